"""The part `smollm2` of `benchmarks.parallel`: how small the changes of SmolLM2-135M-Instruct's weights are.

It learns the word problems of examples/07_smollm2.toml, all weights in bfloat16. Needs `make smollm2`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from agentrl.config.run import RunConfig
from benchmarks.parallel_publishing import measure

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
STEPS = 8


def figures(quick: bool) -> dict[str, float | None]:
    """Train at each learning rate."""
    if quick or not MODEL.is_dir():
        print(f"skipped: {'takes minutes' if quick else f'{MODEL} is missing, run make smollm2'}", flush=True)
        return {}
    found: dict[str, float | None] = {}
    for suffix, rate in {"": 1e-6, "_1e_5": 1e-5}.items():
        with tempfile.TemporaryDirectory() as directory:
            measured = measure(_config(directory, rate))
        found |= {
            f"smollm2_delta_bytes{suffix}": measured.bytes,
            f"smollm2_changed_numbers{suffix}": measured.changed,
            f"smollm2_changed_predicted{suffix}": measured.predicted,
            f"smollm2_digest_errors{suffix}": measured.errors,
        }
    return found


def _config(directory: str, rate: float) -> RunConfig:
    return RunConfig(
        name="run",
        directory=directory,
        steps=STEPS,
        environment={"id": f"{ROOT}/examples/07_smollm2.py:WordProblems"},
        model={"path": str(MODEL), "dtype": "bfloat16"},
        policies={"solver": {"learning_rate": rate, "step_size": 16}},
        credit={"group_size": 8},
        sampling={"max_tokens": 16, "max_turns": 2},
        engine={"slots": 16, "max_context": 256, "publish": "delta"},
        evaluation={"tasks": 0},
        checkpoint={"every": 0, "versions": 0},
    )
