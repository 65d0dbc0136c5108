"""A simulated run over time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import msgspec


class RunTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """A run over its seconds, in equal parts."""

    began: float
    """Wall-clock time of the beginning, seconds since the epoch."""
    seconds: float
    part: float
    """Length of one part, in seconds."""
    in_flight: dict[str, list[float]]
    """Mean number of unfinished episodes in each part, keyed by environment, or by `ENVIRONMENT, PURPOSE` if the
    purpose is not that of the run. None count while the run was stopped."""
    committed: list[int]
    dropped: list[int]
    trainers: dict[str, list[float]]
    """Share of each part in which the trainer was at a step, keyed by policy."""
    engine: list[float | None]
    """Share of each part in which the engine had calls; None without metrics."""
    versions: list[tuple[float, str]]
    """Publication times, in seconds since the beginning, with the versions."""
    idle: dict[str, float]
    """Share of the run, without the time in which it was stopped, in which a trainer, or the engine, was idle."""
    problems: list[str]
    nodes: dict[str, list[str]] = {}
    """Processes of the run with their GPUs, as last reported, keyed by the address of their node, which is empty on the
    run's host; a run in one process, and a simulated one, has none."""
    resumes: list[float] = []
    """Times at which the run resumed from a checkpoint, in seconds since the beginning."""
    stopped: list[tuple[float, float]] = []
    """Times in which the run was stopped, in seconds since the beginning: from the last admission, end of an episode or
    step before a resume until the resume."""


def span_occupancy(
    spans: Iterable[tuple[float, float]], parts: int, part: float, weights: Iterable[float] = repeat(1.0)
) -> list[float]:
    """Return the weighted occupancy of each part by the spans, in multiples of the part."""
    change = [0.0] * (parts + 1)
    edges = [0.0] * parts
    for (start, stop), weight in zip(spans, weights, strict=False):
        first, last = _part(start, parts, part), _part(stop, parts, part)
        if first == last:
            edges[first] += max(stop - start, 0.0) * weight
            continue
        edges[first] += ((first + 1) * part - start) * weight
        edges[last] += (stop - last * part) * weight
        change[first + 1] += part * weight
        change[last] -= part * weight
    total, shares = 0.0, []
    for index in range(parts):
        total += change[index]
        shares.append(max(total + edges[index], 0.0) / part)  # rounding can give a value just below 0
    return shares


def _part(at: float, parts: int, part: float) -> int:
    return int(min(max(0.0, at / part), parts - 1))  # in this order, so that infinite times are handled
