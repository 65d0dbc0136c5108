"""Curves as inline SVG, drawn by a few lines of ours: no script, no style of others, colors by CSS class."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 420, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 10, 24
MAX_POINTS = 400
"""Points drawn per line; longer series are averaged down to it."""


class Line(NamedTuple):
    """One line of a plot."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    color: int = 0
    """From 0 to 5: the CSS classes `c0` … `c5`."""
    dots: bool = False
    """Draw each point: for what is measured rarely."""


def plot(
    lines: Sequence[Line],
    *,
    title: str,
    low: float | None = None,
    high: float | None = None,
    marks: Sequence[tuple[int, str]] = (),
) -> str:
    """An `<svg>` element; the empty string where there is nothing to draw.

    Args:
        lines: what to draw.
        title: for screen readers and as a tooltip.
        low: the axis reaches at least down to it.
        high: the axis reaches at least up to it.
        marks: steps before which something changed, and what.
    """
    drawn = [line._replace(steps=steps, values=values) for line in lines for steps, values in [_finite(line)] if steps]
    if not drawn:
        return ""
    first, last = min(line.steps[0] for line in drawn), max(line.steps[-1] for line in drawn)
    values = [value for line in drawn for value in line.values]
    ticks = _ticks(min([*values, *([] if low is None else [low])]), max([*values, *([] if high is None else [high])]))
    bottom, top = ticks[0], ticks[-1]

    def x(step: float) -> float:
        return _LEFT + (step - first) / max(last - first, 1) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (top - value) / (top - bottom) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{html.escape(title)}</title>']
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(tick) + 3.5:.1f}" text-anchor="end">{_label(tick, ticks)}</text>')
    for step in _step_ticks(first, last):
        anchor = "end" if step == last and last > first else "middle"
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step}</text>')
    for step, what in marks:
        if first <= step <= last:
            at = f'x1="{x(step):.1f}" x2="{x(step):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
            parts.append(f'<line class="mark" {at}><title>{html.escape(f"step {step}: {what}")}</title></line>')
    for line in drawn:
        points = [(x(step), y(value)) for step, value in _thinned(line)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        if len(points) > 1:
            parts.append(f'<polyline class="c{line.color}" points="{path}"/>')
        if line.dots or len(points) == 1:
            parts += [f'<circle class="c{line.color}" cx="{px:.1f}" cy="{py:.1f}" r="3"/>' for px, py in points]
    return "".join([*parts, "</svg>"])


def _finite(line: Line) -> tuple[list[int], list[float]]:
    points = [(s, v) for s, v in zip(line.steps, line.values, strict=True) if math.isfinite(v)]
    return [step for step, _ in points], [value for _, value in points]


def _thinned(line: Line) -> list[tuple[float, float]]:
    points = list(zip(line.steps, line.values, strict=True))
    if len(points) <= MAX_POINTS:
        return [(float(step), value) for step, value in points]
    cuts = [index * len(points) // MAX_POINTS for index in range(MAX_POINTS + 1)]
    chunks = [points[start:stop] for start, stop in itertools.pairwise(cuts)]
    return [(sum(s for s, _ in chunk) / len(chunk), sum(v for _, v in chunk) / len(chunk)) for chunk in chunks]


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers around a range."""
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        margin = max(abs(low) * 0.1, 0.05)
        low, high = low - margin, high + margin
    raw = (high - low) / 4
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= raw * 0.999)
    start = math.floor(low / step + 1e-9)
    count = max(math.ceil(high / step - 1e-9) - start, 1)
    return [(start + index) * step for index in range(count + 1)]


def _step_ticks(first: int, last: int) -> list[int]:
    if last == first:
        return [first]
    parts = min(4, last - first)
    return [round(first + index * (last - first) / parts) for index in range(parts + 1)]


def _label(value: float, ticks: Sequence[float]) -> str:
    step = ticks[1] - ticks[0]
    if max(abs(ticks[0]), abs(ticks[-1])) >= 10_000:
        return f"{value:.2g}" if step < 1 else f"{value / 1000:,.3g}k"
    decimals = max(0, min(6, -math.floor(math.log10(step) + 1e-9)))
    if decimals and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    return f"{value:.{decimals}f}" if abs(value) > 1e-12 else "0"
