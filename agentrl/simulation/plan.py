"""What is simulated, as a TOML file says it: episodes, hardware, and the settings of a run by production's names.

    agentrl simulate examples/07_simulate.toml

What a run is configured with goes to production as it is (`Plan.config`), whose checks hold here too.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from agentrl.config.load import read_mapping, read_toml
from agentrl.config.mistakes import mistakes
from agentrl.config.run import RunConfig
from agentrl.config.section import Episodes, MaybeSteps, NonNegative, Positive, Rate, Seconds, Section, Share, Tokens
from agentrl.core.errors import ConfigError
from agentrl.simulation.hardware import GPUS, MODELS, Gpu, GpuName, Model, ModelName, Rates

FURTHEST = 3.0
"""Deviations of a normal variable, up to which the ranks of what was measured are kept."""
MAX_EPISODES = 1_000_000
"""That a task may come to, with all its children, or a step: more would not be simulated in anyone's time."""
_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)
_SCORES = [_NORMAL.inv_cdf((rank + 0.5) / 200) for rank in range(200)]
"""Equally likely values of a normal variable."""


class Tail(Section):
    """A distribution by its quantiles: of tokens, seconds or turns.

    Example:
        >>> tail = Tail(p50=32, p90=160, cap=1280)
        >>> round(tail.value(0.0)), round(tail.value(1.2815515)), round(tail.value(9.0))
        (32, 160, 1280)
    """

    p50: Rate
    p90: Rate
    cap: Rate
    """Longer ones are cut off here."""
    law: Literal["lognormal", "pareto", "measured"] = "lognormal"
    ranks: tuple[Annotated[float, Field(gt=0)], ...] = ()
    """With `law = "measured"`: the values whose ranks a normal variable has at equal distances from -3 to 3."""

    @model_validator(mode="after")
    def _check_order(self) -> Tail:
        if not self.p50 <= self.p90 <= self.cap:
            raise ValueError(f"p50 = {self.p50:g}, p90 = {self.p90:g}, cap = {self.cap:g} do not grow")
        if self.law == "pareto" and not self.p50 < self.p90 < self.cap:
            raise ValueError("law = 'pareto' needs p50 < p90 < cap")
        if (self.law == "measured") != (len(self.ranks) > 1) or list(self.ranks) != sorted(self.ranks):
            raise ValueError("law = 'measured' and ranks, two or more that grow, belong together")
        return self

    def value(self, z: float) -> float:
        """The quantile at which a standard normal variable has the value `z`."""
        if self.law == "lognormal":
            return min(self.p50 * math.exp(math.log(self.p90 / self.p50) / _Z90 * z), self.cap)
        if self.law == "measured":
            place = min(max((z + FURTHEST) / (2 * FURTHEST), 0.0), 1.0) * (len(self.ranks) - 1)
            below = min(int(place), len(self.ranks) - 2)
            return self.ranks[below] + (place - below) * (self.ranks[below + 1] - self.ranks[below])
        cap = self.cap / self.p50
        alpha = _pareto_index(self.p90 / self.p50, cap)
        low = _pareto_low(alpha, cap)
        rank = _NORMAL.cdf(z) * (1 - (low / cap) ** alpha)
        return float(self.p50 * low * (1 - min(rank, 1 - 1e-12)) ** (-1 / alpha))

    @property
    def mean(self) -> float:
        """The mean."""
        return fmean(map(self.value, _SCORES))


def _pareto_low(alpha: float, cap: float) -> float:
    """Where a Pareto distribution cut off at `cap` begins, for a median of 1."""
    # 1 - x^a = (1 - (x/cap)^a) / 2  =>  x^a = 1 / (2 - cap^-a)
    return float((2 - cap**-alpha) ** (-1 / alpha))


def _pareto_index(p90: float, cap: float) -> float:
    """The index with which it has this P90, for a median of 1: by bisection."""
    low, high = 1e-3, 50.0
    while high - low > 1e-9:
        alpha = (low + high) / 2
        begin = _pareto_low(alpha, cap)
        rank = 0.9 * (1 - (begin / cap) ** alpha)
        low, high = (alpha, high) if begin * (1 - rank) ** (-1 / alpha) > p90 else (low, alpha)
    return low


class SeatPlan(Section):
    """What the agent of a seat does in an episode."""

    tokens: Tail
    """Sampled in the whole episode; its turns are equally long."""
    turns: Tail = Tail(p50=1, p90=1, cap=1)
    """Episodes with more tokens have more turns."""


class EnvironmentPlan(Section):
    """One kind of episode: its seats take turns one after another, then its children run."""

    seats: Annotated[dict[str, SeatPlan], Field(min_length=1)]
    prompt: Tokens = 256
    """Of each seat's conversation."""
    tool_seconds: Tail | None = None
    """Between two turns of a seat; leave it out where tools take no time."""
    tool_tokens: NonNegative = 0
    """What a tool's answer adds to the conversation."""
    fan_out: dict[str, Positive] = {}
    """Child episodes that each one starts: a group of their own."""
    likeness: Share = 0.5
    """Correlation of the log-lengths of a group's members; half of it all episodes of a task have in common."""

    def longest_context(self) -> float:
        """Tokens of the longest conversation."""
        return self.prompt + max(
            math.ceil(seat.tokens.cap) + math.ceil(seat.turns.cap - 1) * self.tool_tokens
            for seat in self.seats.values()
        )


class PolicyPlan(Section):
    """See `policies` of a training file."""

    kind: Literal["trained", "frozen"] = "trained"
    step_size: Episodes = 64
    max_staleness: MaybeSteps = 1
    step_seconds: Seconds | None = None
    """Of one of its steps, where that is not in proportion to `trainer.step_seconds`."""


class CreditPlan(Section):
    """See `credit` of a training file."""

    group_size: Episodes = 8
    release: Literal["group", "episode", "late"] = "group"


class EnginePlan(Section):
    """Who samples: by the names of model and GPU, or as it was measured."""

    replicas: Positive = 1
    slots: Positive = 64
    """Calls that a replica runs at once."""
    model: ModelName | None = None
    """Size of the model, in bf16."""
    gpu: GpuName = "H100"
    gpus: Positive = 1
    """Of one replica."""
    rates: dict[Annotated[int, Field(gt=0)], Rate] = {}
    """Tokens per second of each call, by how many run together; in between, seconds per token are interpolated."""
    prefill_rate: Rate | None = None
    """Tokens of context computed per second."""
    kv_tokens: Tokens | None = None
    """Tokens of context whose keys and values a replica holds."""

    @field_validator("rates", mode="before")
    @classmethod
    def _read_counts(cls, rates: object) -> object:
        """TOML's keys are text."""
        if not isinstance(rates, dict):
            return rates
        return {int(key) if isinstance(key, str) and key.isdecimal() else key: rate for key, rate in rates.items()}

    @model_validator(mode="after")
    def _check_known(self) -> EnginePlan:
        if not self.rates and self.model is None:
            raise ValueError("say how fast it is: model = '7B' and gpu = 'H100', or rates = { 1 = 80, 64 = 30 }")
        return self


class TrainerPlan(Section):
    """Who learns: by GPUs, or as it was measured."""

    step_seconds: Seconds | None = None
    """Of an optimizer step of the first policy that learns; in proportion for steps of other sizes."""
    gpus: Positive = 8
    """Where `step_seconds` is not given: of the kind and the model that `[engine]` names."""
    publish_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Between a step's end and its version's first token."""


class Plan(Section):
    """A run that is simulated."""

    seed: int = 0
    max_in_flight: Episodes = 256
    environments: Annotated[dict[str, EnvironmentPlan], Field(min_length=1)]
    """The first is the root episode's."""
    policies: dict[str, PolicyPlan] = {"policy": PolicyPlan()}
    seats: dict[str, str | tuple[str, ...]] = {}
    """Which policy holds which seat, as in a training file."""
    credit: CreditPlan = CreditPlan()
    engine: EnginePlan
    trainer: TrainerPlan = TrainerPlan()

    @model_validator(mode="after")
    def _check_children(self) -> Plan:
        for name, environment in self.environments.items():
            for child in environment.fan_out:
                if child not in self.environments:
                    raise ValueError(f"environments.{name}.fan_out names {child!r}, which is not in [environments]")
        root = next(iter(self.environments))
        for name in self.environments:
            if name != root and not any(name in other.fan_out for other in self.environments.values()):
                raise ValueError(f"environments.{name} is nobody's child: name it in the fan_out of {root!r}")
        episodes = sum(self.times().values())
        if episodes > MAX_EPISODES:
            raise ValueError(f"fan_out: a task comes to {episodes:,} episodes; at most {MAX_EPISODES:,}")
        return self

    @model_validator(mode="after")
    def _check_learners(self) -> Plan:
        if not self.trained:
            raise ValueError("policies: none of them learns, so there are no steps to simulate: kind = 'trained'")
        return self

    @model_validator(mode="after")
    def _check_numbers(self) -> Plan:
        sizes = {f"policies.{name}.step_size": policy.step_size for name, policy in self.policies.items()}
        for name, size in {**sizes, "credit.group_size": self.credit.group_size}.items():
            if size > MAX_EPISODES:
                raise ValueError(f"{name} = {size:,}: at most {MAX_EPISODES:,} episodes can be simulated")
        return self

    @model_validator(mode="after")
    def _check_room(self) -> Plan:
        """An episode that outgrows the memory alone could never end."""
        room = self.kv_tokens
        for name, environment in self.environments.items():
            longest = environment.longest_context()
            if room is not None and longest > room:
                raise ValueError(
                    f"environments.{name}: a conversation may have {longest:,.0f} tokens (prompt, tokens.cap, answers "
                    f"of tools), and a replica holds keys and values of {room:,}: an episode could never end. Lower "
                    "the caps, or raise engine.gpus or engine.kv_tokens"
                )
        if self.trainer.step_seconds is None and self.engine.model is None:
            raise ValueError("trainer.step_seconds is needed where engine.model is not given")
        return self

    # --- what follows from it -----------------------------------------------------------------------------------------

    @property
    def root(self) -> str:
        """The kind of a root episode."""
        return next(iter(self.environments))

    @property
    def trained(self) -> dict[str, PolicyPlan]:
        """The policies that learn."""
        return {name: policy for name, policy in self.policies.items() if policy.kind == "trained"}

    def times(self) -> dict[str, int]:
        """How many episodes of each kind a root episode brings."""
        found = dict.fromkeys(self.environments, 0)
        generation = Counter({self.root: 1})
        for _ in self.environments:
            below = Counter[str]()
            for name, times in generation.items():
                found[name] += times
                for child, number in self.environments[name].fan_out.items():
                    below[child] += times * number
            generation = below
        if generation:
            raise ValueError(f"environments.{next(iter(generation))} is its own child")
        return found

    @property
    def model(self) -> Model | None:
        """The preset."""
        return MODELS[self.engine.model] if self.engine.model else None

    @property
    def gpu(self) -> Gpu:
        """The preset."""
        return GPUS[self.engine.gpu]

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of context that fit a replica; None: no bound."""
        if self.engine.kv_tokens is not None or self.model is None:
            return self.engine.kv_tokens
        return self.model.kv_tokens(self.gpu, self.engine.gpus)

    @property
    def prefill_rate(self) -> float:
        """Tokens of context a replica computes per second."""
        if self.engine.prefill_rate is not None or self.model is None:
            return self.engine.prefill_rate or math.inf
        return self.model.prefill_rate(self.gpu, self.engine.gpus)

    @property
    def rates(self) -> Rates:
        """r(b) of a replica."""
        if self.engine.rates or self.model is None:
            return Rates(self.engine.rates)
        return self.model.rates(self.gpu, self.engine.gpus, self.engine.slots, self.mean_context())

    def mean_context(self) -> float:
        """Tokens of a running call's context, on average over all sampled tokens: long episodes have most of them."""
        total = weight = 0.0
        for name, times in self.times().items():
            environment = self.environments[name]
            for seat in environment.seats.values():
                for z in _SCORES:
                    tokens = seat.tokens.value(z)
                    answers = (max(seat.turns.value(z), 1.0) - 1) * environment.tool_tokens
                    total += times * tokens * (environment.prompt + (tokens + answers) / 2)
                    weight += times * tokens
        return total / weight

    def unit_seconds(self, policy: str) -> float | None:
        """What a unit takes its trainer; None: it depends on its tokens."""
        own = self.policies[policy]
        if own.step_seconds is not None:
            return own.step_seconds / own.step_size
        if self.trainer.step_seconds is None:
            return None
        return self.trainer.step_seconds / next(iter(self.trained.values())).step_size

    def train_rate(self) -> float:
        """Tokens trained per second, where `step_seconds` is not given."""
        return self.model.train_rate(self.gpu, self.trainer.gpus) if self.model is not None else math.inf

    def capacity(self) -> float:
        """Tokens per second of all replicas with all slots taken."""
        return self.engine.replicas * self.engine.slots * self.rates(self.engine.slots)

    def tokens_per_root(self) -> float:
        """Sampled in a root episode and its children, on average."""
        return sum(
            times * sum(seat.tokens.mean for seat in self.environments[name].seats.values())
            for name, times in self.times().items()
        )

    def least_step_seconds(self) -> float:
        """What a step of the first policy that learns takes the engines, or the trainer, about."""
        size = next(iter(self.trained.values())).step_size
        units = max(self.times()[self.root] if len(self.environments) == 1 else sum(self.times().values()), 1)
        sampling = self.tokens_per_root() * size / units / self.capacity()
        return max(sampling, self.trainer.step_seconds or 0.0)

    def config(self, steps: int) -> RunConfig:
        """As production reads it.

        Raises:
            ConfigError: what production refuses.
        """
        policies: dict[str, dict[str, object]] = {
            name: {"step_size": policy.step_size, "max_staleness": policy.max_staleness}
            if policy.kind == "trained"
            else {"kind": "frozen"}
            for name, policy in self.policies.items()
        }
        try:
            return RunConfig.model_validate(
                {
                    "steps": steps,
                    "seed": self.seed,
                    "max_in_flight": self.max_in_flight,
                    "episode_timeout_s": 1e12,
                    "environment": {"id": self.root, "tool_timeout_s": 1e12},
                    "model": {"path": "simulated"},
                    "policies": policies,
                    "seats": self.seats,
                    "credit": self.credit.model_dump(),
                    "sampling": {"max_tokens": 1 << 30, "max_turns": 1 << 30},
                    "checkpoint": {"every": 0, "versions": 0},
                    "evaluation": {"tasks": 0},
                }
            )
        except ValidationError as error:
            raise ConfigError(mistakes(error)) from None


def load(path: str | Path, over: Plan | None = None) -> Plan:
    """Read a plan from a TOML file.

    Args:
        path: the file.
        over: the plan that it changes: what the file does not say stays. A tail is changed as a whole, and so is how
            fast an engine is where the file names `engine.model`.

    Raises:
        ConfigError: what does not fit, and where; all problems are listed.
    """
    data = read_toml(path)
    if over is not None:
        base = over.model_dump(mode="json")
        if "model" in data.get("engine", {}):
            base["engine"] = {key: base["engine"][key] for key in ("replicas", "slots")}
        data = _over(data, base)
    return read_mapping(data, path, Plan)


def _over(data: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Tables laid over tables."""
    merged = dict(base)
    for key, value in data.items():
        below = merged.get(key)
        if isinstance(value, dict) and isinstance(below, dict) and "p50" not in value and key != "rates":
            merged[key] = _over(value, below)
        else:
            merged[key] = value
    return merged
