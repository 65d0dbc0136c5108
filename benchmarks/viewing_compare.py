"""Whether the interval that `agentrl run compare` prints covers the true difference of two runs.

`compare_interval_covers`: share of simulated pairs of runs whose 95 % interval of the paired held-out difference
contains the difference that was simulated. A task's probability of success is random and shared by both runs.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import tempfile
from pathlib import Path

from agentrl.inspection.reader import RunReader
from agentrl.inspection.run_comparison import compare_runs
from tests.support.compared_runs import write_compared_run

PAIRS, QUICK_PAIRS, TASKS, ATTEMPTS = 200, 20, 40, 4
GAIN = 0.15


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    draw = random.Random(0)
    covered = []
    for _ in range(QUICK_PAIRS if quick else PAIRS):
        with tempfile.TemporaryDirectory() as directory:
            covered.append(_is_covered(Path(directory), draw))
    return {"compare_interval_covers": statistics.fmean(covered)}


def _is_covered(directory: Path, draw: random.Random) -> bool:
    """Whether the interval of one pair contains the mean difference over all tasks that could have been drawn."""
    chances = {f"t{number}": draw.uniform(0.0, 1.0 - 2 * GAIN) for number in range(TASKS)}
    gains = {task: draw.uniform(0.0, 2 * GAIN) for task in chances}
    sides = ({task: chances[task] + extra * gains[task] for task in chances} for extra in (0, 1))
    with contextlib.ExitStack() as stack:
        readers = []
        for number, side in enumerate(sides):
            rewards = {
                task: statistics.fmean(draw.random() < chance for _ in range(ATTEMPTS)) for task, chance in side.items()
            }
            run = write_compared_run(directory / f"run{number}", rewards)
            readers.append(stack.enter_context(contextlib.closing(RunReader(run))))
        (line,) = compare_runs(readers).paired
    return abs(line.difference - GAIN) <= line.error
