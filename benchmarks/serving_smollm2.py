"""The part of `benchmarks.serving` about a pretrained model that learns: in bfloat16, on vLLM and embedded."""

from __future__ import annotations

import sys
import tempfile

import agentrl
from agentrl.config.load import load
from benchmarks.real_models_smollm2 import EXAMPLE, MODEL
from benchmarks.report import completed

SLOWER = ("--model.dtype=bfloat16", "--policies.solver.learning_rate=1.5e-4", "--steps=24")
"""At half of the example's learning rate: at 3e-4, rewards swing in bfloat16, on both engines."""


def figures(quick: bool) -> dict[str, float | None]:
    """The part's figures: one run on each engine."""
    if quick:
        return {}
    if not MODEL.is_dir():
        print(f"skipped: {MODEL} is not there: make smollm2", flush=True)
        return {}
    found: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as directory:
        for kind in ("embedded", "vllm"):
            overrides = [f"--model.path={MODEL}", *SLOWER, *["--engine.vllm={}"] * (kind == "vllm")]
            run = completed(
                agentrl.train(load(EXAMPLE, [*overrides, f"--directory={directory}", f"--name={kind}"]), quiet=True)
            )
            tokens = sum(metrics["step/tokens"] for metrics in run.metrics)
            found[f"reward_end_{kind}"] = run.summary["reward_end"]
            found[f"tokens_per_s_{kind}"] = tokens / run.summary["rl_seconds"]
            print(f"{kind}: {run.summary['rewards']}, {found}", file=sys.stderr, flush=True)
    ends = [found["reward_end_vllm"], found["reward_end_embedded"]]
    found["reward_gap_vllm"] = abs(ends[0] - ends[1]) if None not in ends else None  # type: ignore[operator]
    return found
