"""Which architectures are trained as transformers computes them; prints the table of docs/results/models.md.

    python -m benchmarks.families [--quick]

Small random models of the true architecture (`tests/model_families.py`), their weights scaled until the mean entropy of
the next token is at most half of log V. Rows shorter and longer than windows, chunks and original positions.

`families`: architectures whose log-probabilities are those of the plain forward pass of transformers for each row
alone, packed, with shared prefixes, split over micro-batches, and padded. `families_wrong`: others that are trained.
`families_refused`: those that are refused by name before anything is sampled; listed above the table.
`max_dlogp`: largest difference of a token's log-probability, in nats. `max_gradient_error`: largest difference of the
gradient of their sum, over its norm. `planted_errors_found`: share of the errors planted in the trainer's forward pass
(a neighbor's hidden state leaks, positions + 1, positions × 1.1) that the check at start does not let pass.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.core.errors import AgentRLError
from agentrl.learn.models import PolicyModel, load_models
from benchmarks.parts import run
from tests.model_families import (
    FAMILIES,
    MAX_CONTEXT,
    family_rows,
    gradient_error,
    long_run,
    plain_logprobs,
    trained_logprobs,
    ways,
    write_family,
)
from tests.planted_errors import PlantedErrors, missed

FIGURES = (
    *("families", "families_wrong", "families_refused", "max_dlogp", "max_gradient_error"),
    "planted_errors_found",
)
TOLERANCE = 1e-4
"""In nats, of a log-probability in float32."""
QUICK = ("Qwen3", "Llama 4", "Gemma 2", "Phi-3, LongRoPE", "gpt-oss", "Mamba 2")
SHORT_NAMES = {
    "`q_proj`, `k_proj`, `v_proj`, `o_proj`": "attention",
    "`q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj`, `o_proj`": "MLA",
}
"""Of the layers that an adapter is on; the page explains them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The measured errors of one architecture."""

    refused: str = ""
    ways: tuple[str, ...] = ()
    difference: float = 0.0
    gradient: float = 0.0
    planted: int = 0
    missed: int = 0
    adapters: str = ""


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    warnings.filterwarnings("ignore")
    seen = {name: _measure(name) for name in (QUICK if quick else FAMILIES)}
    trained = {name: each for name, each in seen.items() if not each.refused}
    for name, each in seen.items():
        if each.refused:
            print(f"{name} is refused: {each.refused}")
    print("| model | class | rows | nats | adapter |\n|---|---|---|---|---|")
    for name, each in trained.items():
        rows = "shared" if "shared" in each.ways else "padded"
        class_name = FAMILIES[name][0].removesuffix("Config")
        print(f"| {name} | `{class_name}` | {rows} | {each.difference:.0e} | {each.adapters} |".replace("e-0", "e-"))
    planted = sum(each.planted for each in trained.values())
    wrong = sum(not each.difference <= TOLERANCE for each in trained.values())
    return {
        "families": len(trained) - wrong,
        "families_wrong": wrong,
        "families_refused": len(seen) - len(trained),
        "max_dlogp": max(each.difference for each in trained.values()),
        "max_gradient_error": max(each.gradient for each in trained.values()),
        "planted_errors_found": 1 - sum(each.missed for each in trained.values()) / planted,
    }


def _measure(name: str) -> _Seen:
    with tempfile.TemporaryDirectory() as directory:
        path, rows = write_family(name, Path(directory)), family_rows()
        try:
            policy = _loaded(path, PolicyConfig())
        except AgentRLError as error:
            return _Seen(refused=str(error))
        expected = np.concatenate(plain_logprobs(path, rows))
        differences = [
            np.abs(np.concatenate(trained_logprobs(policy, rows, way=way)) - expected).max() for way in ways(policy)
        ]
        return _Seen(
            ways=ways(policy),
            difference=float(np.max(differences)),
            gradient=gradient_error(path, policy, rows),
            planted=len(PlantedErrors(policy.model).possible()),
            missed=len(missed(policy.model, MAX_CONTEXT)),
            adapters=_adapters(path),
        )


def _loaded(path: Path, policy: PolicyConfig) -> PolicyModel:
    return load_models(long_run(path, policies={"policy": policy}).trainer_plan, torch.device("cpu"))["policy"]


def _adapters(path: Path) -> str:
    """The layers that default adapters are on."""
    try:
        described = _loaded(path, PolicyConfig(lora=LoraConfig(rank=2))).described
    except AgentRLError:
        return "none"
    if "; not on " not in described:
        return "all"
    layers = described.partition(" on ")[2].partition(":")[0]
    names = f"`{layers.replace(', ', '`, `')}`"
    for long, short in SHORT_NAMES.items():
        names = names.replace(long, short)
    return names


if __name__ == "__main__":
    run("families", FIGURES, figures, description=__doc__)
