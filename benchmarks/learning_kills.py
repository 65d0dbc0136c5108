"""Runs with dynamic sampling, task selection and a reference, killed with SIGKILL: a part of `benchmarks.learning`."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.chaos import Chaos, Kind, Tally

KILLS = 30
KIND = Kind(
    "selected",
    24,
    {"orchestrator": 5, "engine": 2, "worker": 3},
    calm_s=1.5,
    start_s=10.0,
    one_victim=True,
    after_progress=True,
)


def figures(quick: bool) -> dict[str, float | None]:
    if quick:
        return {}
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="learning-kills-") as scratch:
        Chaos(KIND, Path(scratch), 0, tally).run(KILLS)
    faults = tally.verdict
    for fault in sorted([*tally.violations, *faults.lost, *faults.twice, *faults.ledger_errors, *tally.unexplained]):
        print(fault, flush=True)
    print(f"kills {dict(tally.kills)}, {tally.runs} runs", flush=True)
    return {
        "kills": tally.kills.total(),
        "ledger_errors": len(faults.ledger_errors),
        "lost": len(faults.lost),
        "twice": len(faults.twice),
        "violations": len(tally.violations),
        "bricked": len(tally.unexplained),
    }
