"""Deterministic mode: are the weights after many kills those of the undisturbed run, bit for bit?

Trains the calculator with an adapter at staleness 1, once undisturbed and once killed with SIGKILL again and again;
compares the digests of the last published weights. Two policies: `benchmarks.coevolution_kills`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.killed_runs import ROOT, Job, digests

STEPS = 32
KILLS = 25

SETTINGS = (
    "--deterministic=true",
    "--evaluation.tasks=0",
    "--checkpoint.every=1",
    "--checkpoint.versions=0",
    "--policies.solver.step_size=16",
    "--policies.solver.lora.rank=4",
    "--policies.solver.learning_rate=2e-3",
    "--credit.group_size=4",
    "--engine.slots=16",
    "--engine.refresh=episode",
)


def job(directory: Path) -> Job:
    """The run that is killed."""
    config = ROOT / "examples/01_tool_use.toml"
    return Job(config=config, settings=SETTINGS, directory=directory, most_entries=(0, 1, 20, 60, 120))


def figures(quick: bool) -> dict[str, float | None]:
    """1.0 where the weights are bit-identical after all kills, 0.0 where not."""
    if quick:
        return {"bit_identical_after_kills": None}
    with tempfile.TemporaryDirectory() as directory:
        made = job(Path(directory))
        undisturbed = digests(made.train("undisturbed", steps=STEPS, kills=0))
        killed = digests(made.train("killed", steps=STEPS, kills=KILLS))
    print(f"deterministic: undisturbed {undisturbed}, after {KILLS} kills {killed}", flush=True)
    return {"bit_identical_after_kills": float(bool(killed) and undisturbed == killed)}
