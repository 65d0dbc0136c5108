"""Timelines: of an episode by agent and act, of a run by episodes, engines, trainers and versions."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.text import plural
from agentrl.inspection.conversation import (
    ChildEpisodeResultAct,
    EffectAct,
    PolicyTurn,
    RewardAct,
    SpawnAct,
    ToolAct,
    read_conversation,
)
from agentrl.inspection.reader import verified_control_rows
from agentrl.observe.run_state import read_run_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agentrl.inspection.conversation import Act, ConversationView
    from agentrl.inspection.reader import RunReader
    from agentrl.journal.run_log import SqliteRunLog


_ENGINE = {
    "step/seconds": ("seconds", False),
    "engine/busy_share": ("share", False),
    "evaluation/seconds": ("seconds", True),
    "evaluation/engine_busy_share": ("share", True),
}
"""Metrics of the engine's busy time, each with its measure and whether it belongs to an evaluation."""


class TimelineBar(msgspec.Struct, frozen=True):
    """A span of time; it may be empty."""

    start: float
    stop: float
    kind: str
    """Kind of the span: `turn`, `tool`, `effect`, `wait`, `child`, `reward`, `step`."""
    label: str
    call: str = ""


class TimelineLane(msgspec.Struct, frozen=True):
    """Bars that belong together, in order."""

    name: str
    bars: list[TimelineBar]


class EpisodeTimeline(msgspec.Struct, frozen=True, kw_only=True):
    """An episode over time. Turns are at their recorded times; other acts of a branch follow each other."""

    episode: str
    attempt: int
    seconds: float
    lanes: list[TimelineLane]
    updates: list[tuple[float, str]]
    """Times at which new weights were published, with their versions."""
    busy: dict[str, float]
    """Seconds spent, by kind; parallel branches each count."""
    problems: list[str]


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


def episode_timeline(reader: RunReader, episode_id: str, attempt: int | None = None) -> EpisodeTimeline:
    """Return the timeline of an episode. Raises as `RunReader.episode`."""
    return timeline_from_conversation(read_conversation(reader, episode_id, attempt))


def timeline_from_conversation(view: ConversationView) -> EpisodeTimeline:
    """Return the timeline of an episode that was read."""
    lanes: dict[str, list[TimelineBar]] = {}
    ends: dict[str, float] = {}
    for act in view.acts:
        _add_bars(act, lanes, ends)
    busy: dict[str, float] = {}
    for bars in lanes.values():
        for bar in bars:
            busy[bar.kind] = busy.get(bar.kind, 0.0) + bar.stop - bar.start
    return EpisodeTimeline(
        episode=view.summary.episode,
        attempt=view.summary.attempt,
        seconds=max([view.summary.seconds or 0.0, *ends.values()]),
        lanes=[TimelineLane(name, bars) for name, bars in lanes.items()],
        updates=[(update.at, update.version) for update in view.updates],
        busy={kind: seconds for kind, seconds in busy.items() if seconds},
        problems=view.problems,
    )


def _add_bars(act: Act, lanes: dict[str, list[TimelineBar]], ends: dict[str, float]) -> None:
    branch = act.call.rpartition("#")[0]
    now = ends.get(branch, _parent_end(branch, ends))
    match act:
        case PolicyTurn():
            lane = lanes.setdefault(f"{act.seat}[{act.index}]", [])
            if act.waited > 0:
                lane.append(TimelineBar(max(act.at - act.waited, 0.0), act.at, "wait", "waits", act.call))
            lane.append(TimelineBar(act.at, act.at + act.seconds, "turn", f"turn {act.turn}", act.call))
            ends[branch] = act.at + act.seconds
        case ToolAct() | EffectAct():
            kind = "tool" if isinstance(act, ToolAct) else "effect"
            lanes.setdefault("tools" if kind == "tool" else "effects", []).append(
                TimelineBar(now, now + act.seconds, kind, act.name, act.call)
            )
            ends[branch] = now + act.seconds
        case SpawnAct() | ChildEpisodeResultAct():
            label = plural(len(act.children), "child", "children") if isinstance(act, SpawnAct) else act.child
            lanes.setdefault("children", []).append(TimelineBar(now, now, "child", label, act.call))
        case RewardAct():
            label = f"{act.words} to {act.seat}[{act.index}]"
            lanes.setdefault("rewards", []).append(TimelineBar(now, now, "reward", label, act.call))


def _parent_end(branch: str, ends: dict[str, float]) -> float:
    """Return the time at which a branch begins: the latest end on its parent branch."""
    while "/" in branch:
        branch = branch.rpartition("/")[0]
        if branch in ends:
            return ends[branch]
    return 0.0


def run_timeline(reader: RunReader, parts: int = 60) -> RunTimeline:
    """Return the timeline of a run. Raises `JournalError` if the control log is damaged."""
    log, problems = reader.log, list[str]()
    began, last = log.span() or (0.0, 0.0)
    seconds = max(last - began, 1e-9)
    part = seconds / parts
    spans: dict[str, list[tuple[float, float]]] = {}
    for environment, start, stop in log.rows(
        "SELECT iif(a.purpose = ?, a.environment, a.environment || ', ' || a.purpose), a.admitted_at,"
        # a replaced attempt ends when the next one begins
        " coalesce(e.committed_at, (SELECT min(n.admitted_at) FROM admissions n"
        " WHERE n.episode = a.episode AND n.attempt > a.attempt))"
        " FROM admissions a LEFT JOIN episodes e ON e.episode = a.episode AND e.attempt = a.attempt",
        reader.purpose(),
    ):
        spans.setdefault(environment, []).append((start - began, (last if stop is None else stop) - began))
    steps = verified_control_rows(log, "steps", "1 ORDER BY stepped_at", problems=problems)
    trainers: dict[str, list[tuple[float, float]]] = {}
    for row in steps:
        stop = row["stepped_at"] - began
        trainers.setdefault(row["policy"], []).append((stop - row["seconds"], stop))
    resumes = [at - began for at in resume_times(log, problems)]
    stopped = [(since - began, until - began) for since, until in log.stops()] if resumes else []
    running_s = max(seconds - sum(stop - start for start, stop in stopped), 1e-9)
    versions = verified_control_rows(
        log, "versions", "published_at >= ? ORDER BY published_at", began, problems=problems
    )
    at_work = {policy: span_occupancy(bars, parts, part) for policy, bars in trainers.items()}
    engine = _engine(reader, began, parts, part)
    idle = {
        f"trainer of {policy}": max(1.0 - sum(shares) * part / running_s, 0.0) for policy, shares in at_work.items()
    }
    known_shares = [share for share in engine if share is not None]
    if known_shares:
        idle["engine"] = 1.0 - sum(known_shares) / len(known_shares)
    return RunTimeline(
        began=began,
        seconds=seconds,
        part=part,
        in_flight={name: span_occupancy(_cut_out(stopped, bars), parts, part) for name, bars in spans.items()},
        committed=_ends(reader, "drop_reason IS NULL", began, parts, part),
        dropped=_ends(reader, "drop_reason IS NOT NULL", began, parts, part),
        trainers=at_work,
        engine=engine,
        versions=[(row["published_at"] - began, f"{row['policy']}@{row['lineage']}.{row['step']}") for row in versions],
        idle=idle,
        problems=problems,
        nodes=_nodes(reader),
        resumes=resumes,
        stopped=stopped,
    )


def _cut_out(stopped: list[tuple[float, float]], spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Return the parts of the spans in which the run was not stopped."""
    for start, stop in spans:
        rest = start
        for stopped_at, resumed_at in stopped:
            if rest < resumed_at and stop > stopped_at:
                if rest < stopped_at:
                    yield rest, stopped_at
                rest = resumed_at
        if rest < stop:
            yield rest, stop


def resume_times(log: SqliteRunLog, problems: list[str]) -> list[float]:
    """Return the wall-clock times at which the run resumed from a checkpoint; an unreadable record is a problem."""
    try:
        return [start.began_at for start in log.starts()[1:]]
    except JournalError as error:
        problems.append(str(error))
        return []


def _nodes(reader: RunReader) -> dict[str, list[str]]:
    status, nodes = read_run_snapshot(reader.path), dict[str, list[str]]()
    for process in status.processes if status is not None else ():
        nodes.setdefault(process.node, []).append(process.name_with_gpus)
    return nodes


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


def _ends(reader: RunReader, condition: str, began: float, parts: int, part: float) -> list[int]:
    counts = [0] * parts
    for place, many in reader.log.rows(
        f"SELECT min(max(CAST((committed_at - ?) / ? AS INTEGER), 0), ?) AS place, count(*) FROM episodes"
        f" WHERE {condition} GROUP BY place",
        *(began, part, parts - 1),
    ):
        counts[place] = many
    return counts


def _engine(reader: RunReader, began: float, parts: int, part: float) -> list[float | None]:
    """Return the share of time in which the engine was busy in each part, from the metrics of steps and evaluations.

    Steps of several policies overlap: a part is the mean over all that cover it; None where none does.
    """
    values_by_span: dict[tuple[str, int, float, bool], dict[str, float]] = {}
    for policy, step, name, value, at in reader.log.rows(
        f"SELECT policy, step, name, value, recorded_at FROM metrics WHERE name IN ({', '.join('?' * len(_ENGINE))})",
        *_ENGINE,
    ):
        if value is not None:
            measure, is_evaluation = _ENGINE[name]
            values_by_span.setdefault((policy, step, at, is_evaluation), {})[measure] = value
    complete = {key: values for key, values in values_by_span.items() if len(values) == 2}
    spans = [(at - began - values["seconds"], at - began) for (_, _, at, _), values in complete.items()]
    occupancy = span_occupancy(spans, parts, part)
    busy = span_occupancy(spans, parts, part, [values["share"] for values in complete.values()])
    # Smaller values are rounding errors.
    return [min(share / of, 1.0) if of > 0.01 else None for share, of in zip(busy, occupancy, strict=True)]
