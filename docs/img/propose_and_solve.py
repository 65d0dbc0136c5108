"""Draw what became of a proposer and its solver as an SVG: the frontier over the steps, and how long the sums are.

    python docs/img/propose_and_solve.py RUN [RUN …] OUT.svg

Left: of the proposals of each run, the share that some of the attempts solve (0.2 <= p <= 0.8), mean of five steps of
the proposer; a ring where the run found its best versions. Right: the newest 100 proposals of the first run, by number
of terms.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 940, 300
LEFT, RIGHT, TOP, PANEL_WIDTH, PANEL_HEIGHT = 52, 530, 58, 380, 190
LINES = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
TERMS = ("#dceaf6", "#b5d4e9", "#93c3df", "#6daed5", "#4a98c9", "#2e7ebc", "#1764ab")
FONT = "font-family='system-ui, -apple-system, Segoe UI, Roboto, sans-serif' font-size='12'"
MEAN_OF, NEWEST = 5, 100


class Curve(NamedTuple):
    """The frontier of a run."""

    name: str
    steps: list[int]
    shares: list[float]
    best: int | None
    """Step of the proposer."""


def curve(run: Path) -> Curve:
    """Read it off a run's metrics."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    points = [
        (row["step"], row["pass_rate/frontier"])
        for row in rows
        if row["policy"] == "proposer" and "pass_rate/frontier" in row
    ]
    steps, shares = [step for step, _ in points], [share for _, share in points]
    means = [
        sum(part) / len(part) for end in range(1, len(shares) + 1) for part in [shares[max(end - MEAN_OF, 0) : end]]
    ]
    best = json.loads((run / "summary.json").read_text(encoding="utf-8"))["best"]
    return Curve(run.name, steps, means, best["steps"]["proposer"] if best else None)


def structures(run: Path) -> list[str]:
    """What kind each proposal is of, as they were told."""
    connection = sqlite3.connect(f"file:{run / 'journal' / 'control.db'}?mode=ro", uri=True)
    try:
        return [kind for (kind,) in connection.execute("SELECT structure FROM proposals ORDER BY number")]
    finally:
        connection.close()


def axes(x: int, title: str, last: int, unit: str) -> Iterator[str]:
    """A panel's frame: shares upwards, from the first to the `last` of something to the right."""
    bottom = TOP + PANEL_HEIGHT
    yield f"<text x='{x}' y='{TOP - 20}' font-weight='bold'>{escape(title)}</text>"
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        y = bottom - share * PANEL_HEIGHT
        yield f"<line x1='{x}' x2='{x + PANEL_WIDTH}' y1='{y:.1f}' y2='{y:.1f}' stroke='#e3e3e3'/>"
        yield f"<text x='{x - 8}' y='{y + 4:.1f}' text-anchor='end' fill='#777'>{share:g}</text>"
    for part in range(5):
        at = x + part / 4 * PANEL_WIDTH
        yield f"<text x='{at:.1f}' y='{bottom + 18}' text-anchor='middle' fill='#777'>{round(part / 4 * last)}</text>"
    yield f"<text x='{x + PANEL_WIDTH / 2}' y='{bottom + 36}' text-anchor='middle' fill='#777'>{escape(unit)}</text>"


def frontiers(curves: Sequence[Curve]) -> Iterator[str]:
    """The left panel."""
    last = max(step for each in curves for step in each.steps)
    yield from axes(LEFT, "proposals that some attempts solve and others do not", last, "steps of the proposer")

    def at(step: int, share: float) -> tuple[float, float]:
        return LEFT + step / last * PANEL_WIDTH, TOP + (1 - share) * PANEL_HEIGHT

    for color, each in zip(LINES, curves, strict=False):
        points = " ".join("{:.1f},{:.1f}".format(*at(*point)) for point in zip(each.steps, each.shares, strict=True))
        yield f"<polyline points='{points}' fill='none' stroke='{color}' stroke-width='2'/>"
        if each.best in each.steps:
            x, y = at(each.best, each.shares[each.steps.index(each.best)])
            yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='#fff' stroke='{color}' stroke-width='2'/>"


def terms(kinds: Sequence[str]) -> Iterator[str]:
    """The right panel."""
    yield from axes(RIGHT, "the newest 100 proposals, by number of terms", len(kinds), "proposals")
    known = sorted(set(kinds))
    ends = [max(round(part / 100 * len(kinds)), 1) for part in range(101)]
    below = [0.0] * len(ends)
    for color, kind in zip(TERMS, known, strict=False):
        above = []
        for bottom, end in zip(below, ends, strict=True):
            newest = Counter(kinds[max(end - NEWEST, 0) : end])
            above.append(bottom + newest[kind] / newest.total())
        outline = [(part, share) for part, share in enumerate(above)]
        outline += [(part, below[part]) for part in reversed(range(len(ends)))]
        points = " ".join(
            f"{RIGHT + part / 100 * PANEL_WIDTH:.1f},{TOP + (1 - share) * PANEL_HEIGHT:.1f}" for part, share in outline
        )
        yield f"<polygon points='{points}' fill='{color}'/>"
        below = above
    for number, (color, kind) in enumerate(zip(TERMS, known, strict=False)):
        x = RIGHT + 52 * number
        yield f"<rect x='{x}' y='{TOP - 11}' width='10' height='6' fill='{color}'/>"
        yield f"<text x='{x + 14}' y='{TOP - 5}' font-size='10' fill='#555'>{escape(kind.split()[0])}</text>"


def draw(curves: Sequence[Curve], kinds: Sequence[str]) -> str:
    """The SVG."""
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' viewBox='0 0 {WIDTH} {HEIGHT}'"
    title = "A proposer's share at the frontier over the run, and the number of terms of its sums"
    frame = f"<rect width='{WIDTH}' height='{HEIGHT}' rx='6' fill='#fff' stroke='#ddd'/>"
    return "\n".join(
        [
            f"{head} role='img' {FONT}>",
            f"<title>{title}</title>",
            frame,
            *frontiers(curves),
            *terms(kinds),
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    svg = draw([curve(run) for run in options.run], structures(options.run[0]))
    options.out.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
