"""Draw what engines and trainer do with 512 rollouts of up to 32K tokens a step on a 32B model, as an SVG.

    PYTHONPATH=. python docs/img/survey.py OUT.svg

Above, a synchronous barrier; below, agentrl on the same GPUs. What is drawn is `benchmarks/scheduling_survey.py`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.simulation.report import timelines_svg
from benchmarks.scheduling_survey import RULES, measured

STEPS = {"barrier": 5, "agentrl": 14}
"""Of about the same time."""
TITLES = {
    "barrier": "A barrier: every step waits for the slowest of 512",
    "agentrl": "agentrl: max_staleness = 2, release = late",
}


def main() -> None:
    """Simulate both and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    runs = []
    for rule in RULES:
        found = measured(rule, steps=STEPS[rule])
        told = f"engines {found.engine_busy:.0%} busy, trainer {found.trainer_busy:.0%}"
        print(f"{rule}: {told}, {found.steps_per_hour['solver']:.2f} steps an hour, token lag {found.token_lag:.2f}")
        runs.append((f"{TITLES[rule]}: {found.steps_per_hour['solver']:.1f} steps an hour", found.timeline))
    options.out.write_text(timelines_svg(runs, seconds=min(line.seconds for _, line in runs)), encoding="utf-8")


if __name__ == "__main__":
    main()
