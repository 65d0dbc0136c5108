"""What a run says about itself in its first steps: alarms of planted failures, and known bottlenecks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.sim import test_bottleneck, test_early_alarms


def figures(quick: bool) -> dict[str, float | None]:
    """Run the planted failures, runs without one, and the runs with a known bottleneck, in virtual time."""
    failures = list(test_early_alarms.FAILURES.items())[:: 4 if quick else 1]
    missed = {name: line for name, planted in failures if (line := test_early_alarms.found(planted))}
    false_alarms = [
        alarm.line
        for environment, steps in test_early_alarms.HEALTHY[:: 4 if quick else 1]
        for alarm in test_early_alarms.alarms_after(test_early_alarms.healthy, environment, steps)
    ]
    runs, wrong = list(test_bottleneck.RUNS.items())[:: 4 if quick else 1], {}
    with tempfile.TemporaryDirectory() as scratch:
        for number, (name, planted) in enumerate(runs):
            lines, _ = test_bottleneck.wrong_refreshes(planted, Path(scratch, f"{number}"))
            if lines:
                wrong[name] = lines[0][0]
    for name, line in (missed | wrong).items():
        print(f"{name}: {line}", flush=True)
    for line in false_alarms:
        print(f"false alarm: {line}", flush=True)
    return {
        "early_alarms_found": 1.0 - len(missed) / len(failures),
        "early_alarms_planted": float(len(failures)),
        "false_alarms": float(len(false_alarms)),
        "bottleneck_right": 1.0 - len(wrong) / len(runs),
        "bottleneck_runs": float(len(runs)),
    }
