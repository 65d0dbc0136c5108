"""Settings of a run, one at a time on a base with which each of them works, and whether two of them are refused.

Refused pairs are found through the real configuration: `RunConfig`, the user's functions, and the run's plan for an
environment. They are listed in tests/golden/refused_combinations.txt.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_args
from unittest.mock import patch

import agentrl
from agentrl.app.plan import resolve
from agentrl.app.policies import check_engine_capabilities
from agentrl.app.user_functions import load_user_functions
from agentrl.config import algorithms, combinations
from agentrl.config.algorithms import ADVANTAGES, LOSSES, NORMALIZERS, advantage_part, loss_part, normalizer_part
from agentrl.config.run import RunConfig
from agentrl.core.custom_functions import GROUPINGS, FunctionDeclaration, find_function
from agentrl.core.parts import Part, Refusal, check_compatible, compatible
from agentrl.core.ports import EngineCapabilities, Refresh
from agentrl.environments.calculator import Calculator
from tests.support import combined_functions

FUNCTIONS = Path(combined_functions.__file__).resolve()
Changes = dict[str, Any]

BASE: Changes = {
    "environment": {"id": "calculator"},
    "model": {"path": "agentrl.environments:calculator/model"},
    "policies": {"solver": {"lora": {"rank": 4}, "max_staleness": 1, "reference": "elsewhere", "step_size": 8}},
    "seats": {"agent": "solver"},
    "credit": {"group_size": 4, "advantage": {"name": "leave_one_out"}},
    "trainer": {"loss": {"name": "truncated", "normalizer": 64}},
}


FULL_ENGINE = EngineCapabilities(
    name="full",
    refresh=frozenset(get_args(Refresh)),
    expert_routing=True,
    sampling_mask=True,
    adapters=64,
    max_context=4096,
)
ENGINES: Mapping[str, EngineCapabilities] = {
    **{
        f"engine without refresh {refresh}": replace(FULL_ENGINE, refresh=FULL_ENGINE.refresh - {refresh})
        for refresh in get_args(Refresh)
    },
    "engine without routing": replace(FULL_ENGINE, expert_routing=False),
    "engine without kept sets": replace(FULL_ENGINE, sampling_mask=False),
    "engine without adapters": replace(FULL_ENGINE, adapters=0),
}
TRAINER_PARTS: Mapping[str, Part] = {}
"""Parts that are known once a model is loaded."""


class Branching(Calculator):
    branches: ClassVar[int] = 1


class Punished(Calculator):
    truncated_reward: ClassVar[float] = -1.0


ENVIRONMENTS: Mapping[str, type[agentrl.Environment]] = {
    "branches": Branching,
    "negative truncated reward": Punished,
}
FULL: Changes = {"lora": None}
REMOTE: Changes = {"kind": "remote", "url": "https://api.example.com/v1", "model": "m"}


def _advantage(name: str, **options: Any) -> Changes:
    return {"credit": {"advantage": {"name": name, **options}}}


def _loss(name: str, **options: Any) -> Changes:
    return {"trainer": {"loss": {"name": name, **options}}}


def _scorer(**settings: Any) -> Changes:
    return {"scorers": {"score": settings}}


SETTINGS: Mapping[str, Changes] = {
    # engines that have started, and models that are loaded
    **{name: {} for name in (*ENGINES, *TRAINER_PARTS)},
    "engine without refresh lazy": {"engine": {"refresh": "turn"}},
    "engine without adapters": {"policies": {"solver": FULL}},
    # algorithms
    "one member": {"credit": {"group_size": 1, "advantage": {"name": "none"}}},
    **{f"advantage {name}": _advantage(name) for name in ADVANTAGES},
    **{f"advantage {name}": _advantage(f"{FUNCTIONS}:{name}") for name in ("by_group", "by_step", "by_tree")},
    **{f"loss {name}": _loss(name) for name in LOSSES},
    "loss importance_sampling of agents": _loss("importance_sampling", level="agent"),
    **{
        f"loss {name}": _loss(f"{FUNCTIONS}:{name}")
        for name in ("of_token", "of_group", "of_step", "with_reference", "with_divergence")
    },
    "divergence": {"trainer": {"loss": {"kl": 0.1}}},
    "normalizer tokens": {"trainer": {"loss": {"normalizer": "tokens"}}},
    "normalizer sequences": {"trainer": {"loss": {"normalizer": "sequences"}}},
    "release late": {"credit": {"release": "late"}},
    "release episode": {"credit": {"release": "episode"}},
    "dynamic sampling": {"credit": {"dynamic_sampling": True}},
    "rewards to go": {"credit": {"turn_credit": "to_go"}},
    # policies
    "adapter": {"policies": {"solver": {"lora": {"rank": 4}}}},
    "full weights": {"policies": {"solver": FULL}},
    "full weights without a reference": {"policies": {"solver": FULL | {"reference": ""}}},
    "adapter without a reference": {"policies": {"solver": {"reference": ""}}},
    "merged adapter": {"policies": {"solver": {"lora": {"merge": True}}}},
    "staleness 0": {"policies": {"solver": {"max_staleness": 0}}},
    "staleness auto": {"policies": {"solver": {"max_staleness": "auto"}}},
    "masked lag": {"policies": {"solver": {"max_lag": 1}}},
    "second learner": {"policies": {"other": {"lora": {"rank": 4}, "max_staleness": 1}}},
    "past opponent": {"policies": {"other": {"kind": "past", "of": "solver"}}},
    "past opponent of full weights": {"policies": {"solver": FULL, "other": {"kind": "past", "of": "solver"}}},
    "frozen opponent": {"policies": {"other": {"kind": "frozen"}}},
    "remote opponent": {"policies": {"other": REMOTE}},
    "filters": {"sampling": {"top_k": 5}},
    "filters of one policy": {"policies": {"solver": {"sampling": {"top_p": 0.5}}, "other": {"kind": "frozen"}}},
    # scorers
    "scorer of groups": _scorer(function=f"{FUNCTIONS}:ranked", per="group"),
    "scorer of groups, a note": _scorer(function=f"{FUNCTIONS}:ranked", per="group", credit="note"),
    "scorer of episodes": _scorer(function=f"{FUNCTIONS}:ranked", per="episode"),
    # the run
    "cluster": {"cluster": {"address": "auto"}},
    "deterministic": {"deterministic": True},
    "freeze": {
        "freeze": [["solver", 5], ["other", 5]],
        "policies": {"other": {"lora": {"rank": 4}, "max_staleness": 1}},
    },
    "max_in_flight auto": {"max_in_flight": "auto"},
    "steps as a table": {"steps": {"solver": 4}},
    "best.stop_at": {"best": {"metric": "reward/mean", "stop_at": 1.0}},
    "seats as a list": {"seats": {"agent": ["solver"]}},
    "best of evaluations": {
        "best": {"metric": "evaluation/reward"},
        "evaluation": {"every": 5, "tasks": 4},
    },
    "no held-out tasks": {"evaluation": {"every": 0, "tasks": 0}},
    "evaluation": {"evaluation": {"every": 5, "tasks": 4}},
    "vllm": {"engine": {"vllm": {}}},
    "vllm with full weights": {"engine": {"vllm": {}}, "policies": {"solver": FULL}},
    "replicas": {"engine": {"replicas": 2}},
    "routing": {"engine": {"capture_routing": True}},
    **{
        f"refresh {refresh}": {"engine": {"refresh": refresh}}
        for refresh in ("token", "token_keep_kv", "turn", "episode", "lazy")
    },
    # environments
    **{name: {} for name in ENVIRONMENTS},
}


def merged(base: Changes, changes: Changes) -> Changes:
    """Return settings with others put over them."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(value, dict) and isinstance(old, dict) else copy.copy(value)
    return result


@contextlib.contextmanager
def recording() -> Iterator[list[Refusal]]:
    """Record the refused combinations, and load each of the user's functions once."""
    recorded: list[Refusal] = []

    def record(parts: Iterable[Part]) -> Iterator[Refusal]:
        for refusal in compatible(parts):
            recorded.append(refusal)
            yield refusal

    find = cache(find_function)
    with (
        patch("agentrl.core.parts.compatible", record),
        patch("agentrl.app.user_functions.find_function", find),
        patch("agentrl.app.scoring.find_function", find),
    ):
        yield recorded


def start(*names: str) -> None:
    """Check the base with these settings as the start of a run does.

    Raises:
        ConfigError: they are refused.
    """
    data = BASE
    for name in names:
        data = merged(data, SETTINGS[name])
    if "other" in data["policies"]:
        data = merged(data, {"seats": {"agent": ["solver", "other"]}})
    if trainer_parts := [TRAINER_PARTS[name] for name in names if name in TRAINER_PARTS]:
        return check_compatible(trainer_parts)
    config = RunConfig(**data)
    load_user_functions(config.trainer, config.credit, config.scorers, config.trained)
    engines = [ENGINES[name] for name in names if name in ENGINES]
    environments = [ENVIRONMENTS[name] for name in names if name in ENVIRONMENTS]
    for environment in environments or [Calculator] * bool(engines):
        plan = resolve(config, environment)
        for engine in engines:
            check_engine_capabilities(plan.engine, engine)


def all_parts() -> list[Part]:
    """Return the parts of the tables in the order of their definition, and those of a user's functions by mark."""
    parts: list[Part] = []
    for value in [*vars(algorithms).values(), *vars(combinations).values()]:
        parts += [part for part in (value.values() if isinstance(value, dict) else [value]) if isinstance(part, Part)]
    algorithm_parts = [
        *(advantage_part(name, declaration, {}) for name, declaration in ADVANTAGES.items()),
        *(loss_part(name, declaration, {}) for name, declaration in LOSSES.items()),
        *(normalizer_part(normalizer) for normalizer in NORMALIZERS),
    ]
    return list(dict.fromkeys([*algorithm_parts, *_parts_by_mark(), *parts]))


def _parts_by_mark() -> Iterator[Part]:
    by_options = {f'over="{over}"': FunctionDeclaration("advantage", over=over) for over in ("group", "step", "tree")}
    for options, declaration in by_options.items():
        yield advantage_part("", declaration, {})._replace(setting=f"@agentrl.advantage({options})")
    token = FunctionDeclaration("loss", groups="token")
    by_options = {
        **{f'groups="{groups}"': token._replace(groups=groups) for groups in GROUPINGS},
        "reference=True": token._replace(reference=True),
        "divergence=True": token._replace(reference=True, divergence=True),
    }
    for options, declaration in by_options.items():
        yield loss_part("", declaration, {})._replace(setting=f"@agentrl.loss({options})")
