"""The part `smollm2` of `benchmarks.devices`: SmolLM2-135M-Instruct learns in bfloat16 and float32, three seeds each.

Both train the adapter of examples/07_smollm2.toml for half of its steps, from the same start and on the same tasks: in
bfloat16 the adapter is computed rounded, with float32 masters. Needs `make smollm2`. Takes about 20 minutes on two
quiet cores, so a quick benchmark trains nothing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

import agentrl
from agentrl.config.load import load
from benchmarks.report import completed

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "07_smollm2.toml"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"
SEEDS = (0, 1, 2)
STEPS = 8
TASKS = 256


def figures(quick: bool) -> dict[str, float | None]:
    """Measure the held-out reward after the same steps."""
    if quick or not MODEL.is_dir():
        print(f"skipped: {'takes 20 minutes' if quick else f'{MODEL} is missing, run make smollm2'}", flush=True)
        return {}
    rewards: dict[str, list[float]] = {"bfloat16": [], "float32": []}
    with tempfile.TemporaryDirectory() as directory:
        for seed in SEEDS:
            for dtype, found in rewards.items():
                found.append(_reward(directory, dtype, seed))
    half, whole = (statistics.fmean(found) for found in rewards.values())
    return {"lora_reward_bf16": half, "lora_reward_f32": whole, "lora_reward_lost": whole - half}


def _reward(directory: str, dtype: str, seed: int) -> float:
    overrides = [
        *(f"--model.path={MODEL}", f"--directory={directory}", f"--name={dtype}-{seed}", f"--seed={seed}"),
        *(f"--model.dtype={dtype}", f"--steps={STEPS}", f"--evaluation.tasks={TASKS}"),
    ]
    summary = completed(agentrl.train(load(EXAMPLE, overrides), quiet=True)).summary
    start, end, seconds = summary["reward_start"], summary["reward_end"], summary["rl_seconds"]
    print(f"{dtype}, seed {seed}: {start:.3f} to {end:.3f} in {seconds:.0f} s", file=sys.stderr, flush=True)
    return float(end)
