"""Training in bfloat16 beside float32: the calculator task of examples/01_tool_use.toml, from the same start.

`bf16_over_f32_reward`: held-out reward after training all weights in bfloat16 (float32 masters) over that in float32.
`k3_bf16`: `mismatch/k3` of the run in bfloat16, mean over its steps, in nats: what the embedded engine and the trainer,
which round in another order, disagree by. `k3_bf16_vllm`: the same of a few steps of an adapter with vLLM (null where
it is not installed). `k3_f32`: that of the run in float32, for comparison.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time

import agentrl
from agentrl.config.load import load
from benchmarks.real_models_smollm2 import ROOT
from benchmarks.report import completed

VLLM_STEPS = 6


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part; a quick benchmark takes four steps, after which there is nothing to compare."""
    short = ("--steps=4", "--evaluation.tasks=0") if quick else ()
    half = _run("01_tool_use", "--model.dtype=bfloat16", *short)
    whole = _run("01_tool_use", "--model.dtype=float32", *short)
    measured: dict[str, float | None] = {"k3_bf16": _k3(half), "k3_f32": _k3(whole)}
    if quick:
        return measured
    measured["bf16_over_f32_reward"] = half.summary["reward_end"] / whole.summary["reward_end"]
    if importlib.util.find_spec("vllm") is not None:
        few = (f"--steps={VLLM_STEPS}", "--evaluation.tasks=0")
        measured["k3_bf16_vllm"] = _k3(_run("05_vllm", "--model.dtype=bfloat16", *few))
    return measured


def _run(example: str, *overrides: str) -> agentrl.Run:
    with tempfile.TemporaryDirectory() as directory:
        started = time.perf_counter()
        everywhere = f"--directory={directory}"
        run = completed(agentrl.train(load(ROOT / f"examples/{example}.toml", [*everywhere, *overrides]), quiet=True))
        took = time.perf_counter() - started
        rewards = [round(each, 2) for each in run.summary["rewards"]]
        end = run.summary.get("reward_end")
        print(f"{example} {' '.join(overrides)}: {took:.0f} s, held-out {end}, rewards {rewards}", flush=True)
        return run


def _k3(run: agentrl.Run) -> float:
    return statistics.fmean(each["mismatch/k3"] for each in run.metrics if "mismatch/k3" in each)
