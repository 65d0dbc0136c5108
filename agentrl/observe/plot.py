"""A curve for the terminal, in braille dots: two columns and four rows of them to a character."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve(
    values: Sequence[float], *, steps: Sequence[int] = (), title: str = "", width: int = 64, height: int = 10
) -> str:
    """A plot with axis labels, its first and last values in the title.

    Args:
        values: what to plot; values that are not finite leave a gap.
        steps: the step of each value, growing; 1, 2, … where empty.
        title: put before the first and last values.
        width: characters of the plotting area, at least 10.
        height: lines of the plotting area, at least 2.

    Returns:
        Lines without a trailing newline; a sentence where there is nothing to plot.
    """
    at = list(steps) or list(range(1, len(values) + 1))
    points = [(step, value) for step, value in zip(at, values, strict=True) if math.isfinite(value)]
    if not points:
        return f"{title}: nothing to plot yet".removeprefix(": ")
    width, height = max(width, 10), max(height, 2)
    low, high = _range([value for _, value in points])
    first, last = points[0][0], points[-1][0]
    columns, rows = 2 * width, 4 * height
    cells = [[0x2800] * width for _ in range(height)]

    def dot(x: int, y: int) -> None:
        cells[y // 4][x // 2] |= _DOTS[y % 4][x % 2]

    def position(step: int, value: float) -> tuple[int, int]:
        x = (step - first) / (last - first) * (columns - 1) if last > first else 0
        return round(x), round((high - value) / (high - low) * (rows - 1))

    before = position(*points[0])
    for point in points:
        here = position(*point)
        length = max(abs(here[0] - before[0]), abs(here[1] - before[1]), 1)
        for part in range(length + 1):
            share = part / length
            dot(round(before[0] + share * (here[0] - before[0])), round(before[1] + share * (here[1] - before[1])))
        before = here
    return _framed(cells, title, points, (low, high))


def sparkline(values: Sequence[float], *, width: int = 20) -> str:
    """The newest values on one line of at most `width` characters, each the mean of its share of them.

    Example:
        >>> sparkline([0, 1, 2, 3, 4, 5, 6, 7])
        '▁▂▃▄▅▆▇█'
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or width < 1:
        return ""
    count = min(width, len(finite))
    cuts = [index * len(finite) // count for index in range(count + 1)]
    means = [sum(finite[start:stop]) / (stop - start) for start, stop in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        return _BLOCKS[3] * count
    return "".join(_BLOCKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Bounds on round tenths of the range's size, so that the labels read well."""
    low, high = min(values), max(values)
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-3):
        margin = max(abs(low) * 0.1, 0.1)
        return low - margin, high + margin
    unit = 10.0 ** math.floor(math.log10(high - low))
    unit = unit / 10 if (high - low) / unit < 5 else unit
    return math.floor(low / unit + 1e-9) * unit, math.ceil(high / unit - 1e-9) * unit


def _framed(
    cells: Sequence[Sequence[int]], title: str, points: Sequence[tuple[int, float]], bounds: tuple[float, float]
) -> str:
    low, high = bounds
    height = len(cells)
    decimals = max(0, min(6, 2 - math.floor(math.log10(high - low))))
    labels = {0: high, height // 2: high - (high - low) * (height // 2) / (height - 1), height - 1: low}
    texts = {row: f"{value:.{decimals}f}" for row, value in labels.items()}
    margin = max(len(text) for text in texts.values())
    heading = f"{title}  {points[0][1]:.{decimals}f} → {points[-1][1]:.{decimals}f}".strip()
    lines = [f"{'':{margin}}  {heading}"]
    for row, line in enumerate(cells):
        tick = "┤" if row in texts else "│"
        lines.append(f"{texts.get(row, ''):>{margin}} {tick}" + "".join(map(chr, line)).replace("\u2800", " ").rstrip())
    width = len(cells[0])
    lines.append(f"{'':{margin}} └" + "─" * width)
    first, last = str(points[0][0]), str(points[-1][0])
    axis = first if first == last else f"{first}{'step':^{width - len(first) - len(last)}}{last}"
    lines.append(f"{'':{margin}}  {axis}")
    return "\n".join(lines)
