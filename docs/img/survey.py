"""Draw what engines and trainer do with 512 rollouts of up to 32K tokens a step on a 32B model, as an SVG.

    PYTHONPATH=. python docs/img/survey.py OUT.svg

Above, a synchronous barrier; below, agentrl on the same GPUs. What is drawn is `benchmarks/scheduling_survey.py`.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from pathlib import Path

from agentrl.inspection.timelines import RunTimeline
from benchmarks.scheduling_survey import RULES, measured

STEPS = {"barrier": 5, "agentrl": 14}
"""Of about the same time."""
TITLES = {
    "barrier": "A barrier: every step waits for the slowest of 512",
    "agentrl": "agentrl: max_staleness = 2, release = late",
}

WIDTH, LEFT, RIGHT = 860, 150, 70
_PLOT = WIDTH - LEFT - RIGHT
_ROW, _GAP, _TITLE, _AXIS = 34, 8, 34, 30
_STYLE = """
text { font: 12px "DejaVu Sans", sans-serif; fill: #475467; } .title { font-weight: bold; fill: #1d2939; }
.frame { fill: #f2f4f7; } .engine { fill: #2563eb; } .trainer { fill: #d9480f; } .flight { fill: #98a2b3; }
.version { stroke: #98a2b3; stroke-width: 1; } .axis { stroke: #98a2b3; }
"""


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
    options.out.write_text(timelines_svg(runs), encoding="utf-8")


def timelines_svg(runs: Sequence[tuple[str, RunTimeline]]) -> str:
    """Draw pairs of title and timeline as an SVG document, over the length of the shortest."""
    seconds = min(line.seconds for _, line in runs)
    unit, name = next(
        ((u, n) for u, n in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if seconds > 3 * u),
        (1.0, "seconds"),
    )
    parts: list[str] = []
    top = 8.0
    for title, line in runs:
        parts.append(f'<text class="title" x="{LEFT}" y="{top + 16:.0f}">{html.escape(title)}</text>')
        top += _TITLE - 8
        marks = top
        rows = [("engines", "engine", [share or 0.0 for share in line.engine], _busy(line, "engine"))]
        for policy, shares in line.trainers.items():
            label = "trainer" if len(line.trainers) == 1 else f"trainer of {policy}"
            rows.append((label, "trainer", shares, _busy(line, f"trainer of {policy}")))
        for environment, counts in line.in_flight.items():
            most = max(counts) or 1.0
            rows.append((f"{environment} in flight", "flight", [c / most for c in counts], f"≤ {most:.0f}"))
        for label, kind, shares, told in rows:
            parts += _timeline_row(label, kind, shares, told, top, line, seconds)
            top += _ROW + _GAP
        for at in (at for at, _ in line.versions if at <= seconds):
            x = LEFT + at / seconds * _PLOT
            parts.append(f'<line class="version" x1="{x:.1f}" x2="{x:.1f}" y1="{marks - 5:.0f}" y2="{marks - 1:.0f}"/>')
        top += 6
    parts += _axis(seconds / unit, name, top)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + _AXIS:.0f}" role="img">'
    about = "; ".join(f"{title}: engines {_busy(line, 'engine')}" for title, line in runs)
    paper = f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}<title>{html.escape(about)}</title>{paper}{''.join(parts)}</svg>\n"


def _busy(line: RunTimeline, name: str) -> str:
    return f"{1 - line.idle[name]:.0%}"


def _timeline_row(
    label: str, kind: str, shares: Sequence[float], told: str, top: float, line: RunTimeline, seconds: float
) -> list[str]:
    """Return one row of the SVG: a label, an area over time, and its total."""
    width = _PLOT * line.part / seconds
    shares = shares[: round(seconds / line.part)]
    bottom = top + _ROW
    points = [f"{LEFT:.1f},{bottom:.1f}"]
    for number, share in enumerate(shares):
        height = bottom - min(share, 1.0) * _ROW
        points += [f"{LEFT + number * width:.1f},{height:.1f}", f"{LEFT + (number + 1) * width:.1f},{height:.1f}"]
    points.append(f"{LEFT + len(shares) * width:.1f},{bottom:.1f}")
    middle = top + _ROW / 2 + 4
    return [
        f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{html.escape(label)}</text>',
        f'<rect class="frame" x="{LEFT}" y="{top:.0f}" width="{len(shares) * width:.1f}" height="{_ROW}"/>',
        f'<polygon class="{kind}" points="{" ".join(points)}"/>',
        f'<text x="{LEFT + len(shares) * width + 6:.0f}" y="{middle:.0f}">{html.escape(told)}</text>',
    ]


def _axis(length: float, name: str, top: float) -> list[str]:
    """Return the ticks of the time axis: four or five round times."""
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if length / s <= 6 or s == 1000)
    parts = [f'<line class="axis" x1="{LEFT}" x2="{LEFT + _PLOT}" y1="{top:.0f}" y2="{top:.0f}"/>']
    for number in range(int(length / step) + 1):
        x = LEFT + number * step / length * _PLOT
        told = f"{number * step:g}" + (f" {name}" if number == 0 else "")
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{top + 4:.0f}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{top + 18:.0f}" text-anchor="{"start" if number == 0 else "middle"}">{told}</text>'
        )
    return parts


if __name__ == "__main__":
    main()
