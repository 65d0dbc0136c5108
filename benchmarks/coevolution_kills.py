"""Deterministic mode with two policies that learn: are both bit-identical after many kills? A part of
`benchmarks.coevolution`.

The proposer and its solvers train, a wave of four proposals a step, at staleness 1: once undisturbed, and once killed
with SIGKILL again and again, so also between the steps of the two policies and among a proposal's solvers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.killed_runs import Job, digests

STEPS = 28
KILLS = 25

CONFIG = """\
deterministic = true
environment.id = "agentrl.environments.propose_and_solve:ProposeAndSolve"
model.path = "agentrl.environments:propose_and_solve/model"
credit.group_size = 4
sampling = { max_tokens = 32, max_turns = 9 }
engine = { slots = 16, max_context = 256, refresh = "episode" }
trainer = { loss.normalizer = 32, entropy_bonus = 0.07 }
evaluation.tasks = 0
checkpoint = { every = 1, versions = 0 }

[policies]
proposer = { lora.rank = 4, learning_rate = 2e-3, step_size = 4, max_staleness = 1 }
solver = { lora.rank = 4, learning_rate = 5e-4, step_size = 32, max_staleness = 1 }
"""


def job(directory: Path) -> Job:
    """The run that is killed."""
    config = directory / "propose_and_solve.toml"
    config.write_text(CONFIG)
    return Job(config=config, settings=(), directory=directory, most_entries=(0, 1, 40, 150, 300))


def figures(quick: bool) -> dict[str, float | None]:
    """1.0 where both policies' weights are bit-identical after all kills, 0.0 where not."""
    if quick:
        return {"bit_identical_after_kills": None}
    with tempfile.TemporaryDirectory() as directory:
        made = job(Path(directory))
        undisturbed = digests(made.train("undisturbed", steps=STEPS, kills=0))
        killed = digests(made.train("killed", steps=STEPS, kills=KILLS))
    for policy, digest in undisturbed.items():
        print(f"{policy}: undisturbed {digest[:16]}, after {KILLS} kills {killed.get(policy, 'none')[:16]}", flush=True)
    return {"bit_identical_after_kills": float(len(killed) == 2 and undisturbed == killed)}
