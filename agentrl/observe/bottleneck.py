"""The bottleneck of a run: the part that everything else waits for, from the time that each part was busy.

`ActivityClock` adds up the seconds of everything that is in progress, unfinished turns included. Workers count the
waits of their episodes, the loop counts its steps and what holds admission back. `find_bottleneck` compares two
readings: the trainer holds sampling up while no episode is in flight, and sampling holds the trainer up while no step
is in progress.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple

from agentrl.core.holds import HoldKind
from agentrl.core.text import escape_line, plural
from agentrl.observe.metrics import RESOURCE_ERROR, TOOL_ERROR

if TYPE_CHECKING:
    from agentrl.core.clock import Clock

Activity = Literal[
    "engine",
    "memory",
    "endpoint",
    "scorer",
    "lost_engine",
    "children",
    "parked",
    "disk",
    "environment",
    "run",
    "episodes",
    "step",
    "training",
    "publishing",
    "checkpoint",
    HoldKind,
    "loop",
]
"""What takes time: the first nine are of an episode, in its worker, the others of the loop. `loop` is the time in which
an event loop that runs episodes was watched."""
STEP_HOLDS: tuple[HoldKind, ...] = ("max_staleness", "last_steps")
"""Rules that let groups start again after a step of the trainer."""
PERMIT_HOLDS: tuple[HoldKind, ...] = ("max_in_flight",)
"""Rules that let groups start again when episodes end: settings that can be raised."""
WAITS: tuple[Activity, ...] = ("engine", "environment", "memory", "endpoint", "scorer", "lost_engine", "disk")
"""Activities of an episode that can hold up a run."""

ANY, MOST = "/any", "/most"
"""Suffixes of the seconds in which an activity was in progress at all, and of the largest number at once."""
THREADS = "threads"
"""Key of the number of threads that were started for blocking calls."""
BLOCKED = "blocked/"
"""Prefix of the seconds in which a place in the user's code (`file.py:8`) blocked an event loop that runs episodes."""
CALLED, FAILED, IN_A_ROW = "called/", "failed/", "failed_in_a_row/"
"""Prefixes of the number of calls of a program, tool, effect or resource, by its name; of its
failures, by metric, name and error on three lines; and of its failures since it last succeeded, by name."""
MAX_CALLED, MAX_ERRORS, OTHER_ERRORS = 100, 8, "other errors"
"""Maximum number of such names of each metric, and of errors of each name; what further errors are counted as."""
TURNS = "turns"
"""Key of the number of turns that have ended, interrupted ones counted at each interruption."""
TOKENS = "tokens"
"""Key of the number of tokens that engines and endpoints sampled in this process, including interrupted turns and
evaluations, but not what is read from the journal."""

BLOCKED_SHARE = 0.5
"""Share of the time that event loops must be blocked for the user's code to be the bottleneck."""
WINDOW_S = 10.0
"""Minimum seconds that a bottleneck is computed from, once the run is that old."""
MIN_S = 1.0
"""Minimum seconds that anything is concluded from."""
FEW = 1 / 3
"""Share of the most episodes at once below which the episodes in flight are the last ones that a step waits for."""
FULL = 0.8
"""Share of the engine's places from which on it counts as full."""
ALTERNATING = 0.3
"""Share of the time for which sampling and trainer must each wait for the other to count as taking turns."""


class _Tally:
    """One activity: how many are in progress and since when, and what it has come to."""

    __slots__ = ("count", "most", "seconds", "seconds_of_any", "since")

    def __init__(self, now: float) -> None:
        self.count = 0
        self.most = 0
        self.seconds = 0.0
        self.seconds_of_any = 0.0
        self.since = now


class ActivityClock:
    """Adds up the seconds of activities: summed over everything in progress, and in which there was any."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tallies: dict[Activity, _Tally] = {}
        self._blocked: dict[str, float] = {}
        self._called = Counter[str]()
        self._names = Counter[str]()
        """Number of names in `_called`, by the metric that counts their failures."""
        self._failed = Counter[tuple[str, str, str]]()
        self._in_a_row = Counter[str]()
        self._num_turns = 0
        self._num_tokens = 0

    def change(self, activity: Activity, by: int, now: float | None = None) -> None:
        """Begin an activity (`by` = 1), end it (-1), or do so for several episodes; `now` is the time, if known."""
        # Called about thirty times per episode, so it calls nothing but the clock.
        if now is None:
            now = self._clock.monotonic()
        try:
            tally = self._tallies[activity]
        except KeyError:
            tally = self._tallies[activity] = _Tally(now)
        count = tally.count
        if count:
            passed_s = now - tally.since
            tally.seconds += count * passed_s
            tally.seconds_of_any += passed_s
        tally.since = now
        tally.count = count = count + by
        if count > tally.most:
            tally.most = count
        elif by < 0 and activity in ("engine", "endpoint"):
            self._num_turns -= by

    def switch(self, ended: Activity, begun: Activity) -> None:
        """End an activity, and begin another at the same time."""
        now = self._clock.monotonic()
        self.change(ended, -1, now)
        self.change(begun, 1, now)

    @contextmanager
    def during(self, activity: Activity, count: int = 1) -> Iterator[None]:
        """Count an activity within the context."""
        self.change(activity, count)
        try:
            yield
        finally:
            self.change(activity, -count)

    def count_blocked(self, place: str, seconds: float) -> None:
        """Add seconds in which a place in the user's code blocked the event loop; called in the watching thread."""
        self._blocked[place] = self._blocked.get(place, 0.0) + seconds

    def count_call(self, name: str, error: str | None, metric: str) -> None:
        """Count a call of the user's code whose failure the episode may survive: a program, a tool, an effect, a
        resource. `metric` counts the failures of one episode."""
        if name not in self._called:
            if self._names[metric] == MAX_CALLED:
                return
            self._names[metric] += 1
        self._called[name] += 1
        if error is None:
            del self._in_a_row[name]
            return
        self._in_a_row[name] += 1
        if (metric, name, error) not in self._failed and sum(key[1] == name for key in self._failed) >= MAX_ERRORS:
            error = OTHER_ERRORS
        self._failed[metric, name, error] += 1

    def count_tokens(self, tokens: int) -> None:
        """Count the tokens that a call to an engine or endpoint returned."""
        self._num_tokens += tokens

    def forget_most(self) -> None:
        """Take the largest numbers at once from now on."""
        for tally in self._tallies.values():
            tally.most = tally.count

    def totals(self) -> dict[str, float]:
        """Return the seconds of each activity until now, its `ANY` and `MOST`, `TURNS` and `TOKENS`."""
        totals: dict[str, float] = {TURNS: float(self._num_turns), TOKENS: float(self._num_tokens)}
        now = self._clock.monotonic()
        for activity, tally in tuple(self._tallies.items()):
            self.change(activity, 0, now)
            totals[activity] = tally.seconds
            totals[activity + ANY] = tally.seconds_of_any
            totals[activity + MOST] = float(tally.most)
        totals |= {f"{CALLED}{escape_line(name)}": float(count) for name, count in self._called.items()}
        totals |= {FAILED + "\n".join(map(escape_line, key)): float(count) for key, count in self._failed.items()}
        totals |= {f"{IN_A_ROW}{escape_line(name)}": float(count) for name, count in self._in_a_row.items()}
        return totals | {f"{BLOCKED}{place}": seconds for place, seconds in dict(self._blocked).items()}


class Bottleneck(NamedTuple):
    """The part of a run that the others wait for."""

    part: str
    """A key of `PARTS`."""
    detail: str
    """Who waits, and why, for people."""

    @property
    def line(self) -> str:
        """Return the bottleneck as one line."""
        return f"{PARTS[self.part]}: {self.detail}"


PARTS: Mapping[str, str] = {
    "engine": "the engine",
    "memory": "the engine's memory",
    "lost_engine": "the engine's restart",
    "endpoint": "a policy's endpoint",
    "environment": "tools and environments",
    "scorer": "scorers",
    "disk": "the disk",
    "workers": "worker processes",
    "long": "a few long episodes",
    **{kind: kind for kind in PERMIT_HOLDS},
    "training": "the trainer",
    "publishing": "new versions",
    "checkpoint": "checkpoints",
    "alternating": "max_staleness",
    "paused": "a pause",
    "none": "nothing",
}
"""Names of the parts that can be a bottleneck, for people."""


class _Shares(NamedTuple):
    """Two readings' difference, per second."""

    spent: Mapping[str, float]
    seconds: float
    most: int
    """Largest number of episodes at once."""

    @classmethod
    def between(cls, before: Mapping[str, float], now: Mapping[str, float]) -> _Shares:
        spent = {activity: value - before.get(activity, 0.0) for activity, value in now.items()}
        return cls(spent, spent["run"], int(now.get("episodes" + MOST, 0.0)))

    def of(self, activity: str) -> float:
        """Return the mean number of this activity in progress."""
        return self.spent.get(activity, 0.0) / self.seconds


def find_bottleneck(
    before: Mapping[str, float],
    now: Mapping[str, float],
    *,
    max_staleness: int,
    places: int = 0,
    period: str = "",
    filled: Mapping[str, float] | None = None,
) -> Bottleneck | None:
    """Name the bottleneck between two readings; None if nothing was measured.

    Args:
        before: reading at the beginning.
        now: reading at the end.
        filled: later reading, from which on sampling is compared with the trainer: before, it filled the pipeline.
        max_staleness: largest bound on staleness of a policy that learns.
        places: number of turns that the engine samples at once; 0: unknown.
        period: the time between the readings, for people.
    """
    if _age(before, now) <= 0.0:
        return None
    blocked = blocked_shares(before, now)
    if sum(blocked.values()) >= BLOCKED_SHARE:
        place = max(blocked, key=lambda name: blocked[name])
        detail = f"the event loop is blocked by {place} {blocked[place]:.0%} of the time"
        return Bottleneck("environment", detail + period)
    shares = _Shares.between(before if filled is None else filled, now)
    is_sampling, is_stepping = (min(shares.of(activity + ANY), 1.0) for activity in ("episodes", "step"))
    sampling_waits, trainer_waits = 1.0 - is_sampling, 1.0 - is_stepping
    if max(sampling_waits, trainer_waits) < 0.05:
        detail = "sampling and training work all the time; neither waits for the other"
        return Bottleneck("none", detail + period)
    if min(sampling_waits, trainer_waits) >= ALTERNATING and sampling_waits + trainer_waits > 0.8:
        detail = (
            f"sampling ({is_sampling:.0%} of the time) and training ({is_stepping:.0%}) take turns, because "
            f"staleness is at most {max_staleness}"
        )
        return Bottleneck("alternating", detail + period)
    if sampling_waits >= trainer_waits:
        found: Bottleneck | None = _slow_step(shares, max_staleness)
    else:
        found = _slow_sampling(_Shares.between(before, now), places=places)
    return found and found._replace(detail=found.detail + period)


def blocked_shares(before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the time in which each place in the user's code blocked the event loops that run episodes."""
    watched = now.get("loop", 0.0) - before.get("loop", 0.0)
    return {
        name.removeprefix(BLOCKED): min((seconds - before.get(name, 0.0)) / watched, 1.0)
        for name, seconds in now.items()
        if name.startswith(BLOCKED) and watched > 0.0
    }


def commonest_error(totals: Mapping[str, float]) -> str:
    """Return the exception that tools raised most often, with its place; "" if there was none."""
    counts = {name: count for name, count in totals.items() if name.startswith(f"{FAILED}{TOOL_ERROR}\n")}
    commonest = max(counts, key=lambda name: counts[name], default="")
    return ": ".join(commonest.split("\n", 2)[1:])


class FailingCalls(NamedTuple):
    """The calls of a program, tool, effect or resource that failed last time."""

    calls: float
    failed: float
    in_a_row: float
    """Failures since the last success; with several workers, the sum over them."""
    error: str
    """The commonest error."""
    metric: str = RESOURCE_ERROR
    """The metric of an episode that counts the failures."""


def failing_calls(totals: Mapping[str, float]) -> dict[str, FailingCalls]:
    """Return what failed last time, by name."""
    counts_by_name: dict[str, dict[tuple[str, str], float]] = {}
    for key, count in totals.items():
        if key.startswith(FAILED):
            metric, name, error = key.removeprefix(FAILED).split("\n", 2)
            counts_by_name.setdefault(name, {})[error, metric] = count
    return {
        name: FailingCalls(
            totals.get(f"{CALLED}{name}", 0.0),
            sum(counts.values()),
            in_a_row,
            *max(counts, key=lambda error: counts[error]),
        )
        for name, counts in counts_by_name.items()
        if (in_a_row := totals.get(f"{IN_A_ROW}{name}", 0.0))
    }


def _slow_step(shares: _Shares, max_staleness: int) -> Bottleneck:
    kinds: tuple[Activity, ...] = ("training", "publishing", "checkpoint")
    kind = max(kinds, key=shares.of)
    behind = f"the trainer is {plural(max_staleness, 'step')} behind" if max_staleness else "for the trainer"
    share = f"{shares.of(kind):.0%} of the time"
    match kind:
        case "training":
            return Bottleneck(kind, f"sampling waits{': ' if max_staleness else ' '}{behind}; training takes {share}")
        case "publishing":
            return Bottleneck(kind, f"sampling waits: writing and serving new weights takes {share}")
        case _:
            return Bottleneck(kind, f"sampling waits: writing checkpoints takes {share}")


def _slow_sampling(shares: _Shares, *, places: int) -> Bottleneck | None:
    episodes = shares.of("episodes")
    placed = sum(map(shares.of, (*WAITS, "children", "parked")))
    means = {kind: shares.of(kind) for kind in WAITS} | {"workers": episodes - placed if placed else 0.0}
    part = max(means, key=lambda kind: means[kind])
    if not means[part]:
        return None
    engine, memory = means["engine"], means["memory"]
    counts = f"{_number(means[part])} of {_number(episodes)} episodes"
    if part in ("engine", "memory") and memory >= 0.25 * (engine + memory):
        detail = f"{_number(memory)} of {_number(episodes)} episodes wait for room in the KV cache; the trainer waits"
        return Bottleneck("memory", detail)
    is_full = places and engine >= FULL * places
    awaits_step = sum(shares.of(kind + ANY) for kind in STEP_HOLDS) >= 0.5  # one rule holds a group back at a time
    if not is_full and shares.most >= 4 and episodes <= FEW * shares.most and awaits_step:
        detail = (
            f"the trainer waits for the last {_number(episodes)} of {shares.most:,} episodes, which are in "
            f"{'the engine' if part == 'engine' else PARTS[part]}"
        )
        return Bottleneck("long", detail)
    holds = [hold for hold in PERMIT_HOLDS if shares.of(hold + ANY) >= 0.5]
    busy = min(shares.of("engine" + ANY), 1.0)
    match part:
        case "engine" if holds and places and not is_full:
            detail = (
                f"only {_number(episodes)} episodes run at once, and the engine samples {_number(engine)} turns at "
                f"once of {places:,} possible; the trainer waits"
            )
            return Bottleneck(holds[0], detail)
        case "engine":
            if places and round(engine) > places:
                detail = (
                    f"{_number(engine)} turns are in it at once, of which it samples {places:,} while the others wait"
                )
            else:
                of = f" of {places:,} possible" if places else ""
                detail = f"it samples {_number(engine)} turns at once{of}, {busy:.0%} of the time"
            return Bottleneck(part, f"{detail}; the trainer waits for it")
        case "environment":
            more = f"; {holds[0]} lets no more run" if holds else ""
            detail = f"{counts} are in them, and the engine is busy {busy:.0%}{more}; the trainer waits"
            return Bottleneck(part, detail)
        case "workers":
            return Bottleneck(part, f"{counts} wait for one to start or to have room; the trainer waits")
        case _:
            return Bottleneck(part, f"{counts} wait for {PARTS[part]}; the trainer waits")


def _number(mean: float) -> str:
    return f"{mean:,.0f}" if mean >= 9.5 else f"{mean:.1g}" if mean >= 0.05 else "0"


class BottleneckWatch:
    """The readings of a run at its steps, and the bottleneck since the last but one step.

    Args:
        read: returns the totals of the loop and of its workers.
        max_staleness: returns the bound of each policy that learns.
        places: see `find_bottleneck`.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, float]], max_staleness: Callable[[], Mapping[str, int]], places: int
    ) -> None:
        self._read = read
        self._max_staleness = max_staleness
        self._num_steps = 2 * len(max_staleness())
        self.places = places
        self._start: Mapping[str, float] = {}
        self._first_step: Mapping[str, float] | None = None
        """Reading at the begin of the first step, if sampling for it only fills the pipeline."""
        self._marks: deque[Mapping[str, float]] = deque()
        """Readings at the ends of steps, the oldest first."""
        self._end: Mapping[str, float] | None = None
        """Reading at the end of training. The last checkpoint and evaluation come later, and are no part of it."""

    def start(self) -> None:
        """Note that training begins or continues now."""
        self._start, self._first_step = self._read(), None
        self._marks.clear()

    def step_begins(self) -> None:
        """Note that a step begins."""
        if self._first_step is None and min(self._max_staleness().values(), default=0) > 0:
            self._first_step = self._read()

    def step_ended(self) -> None:
        """Note that a step has ended."""
        self._marks.append(now := self._read())
        while len(self._marks) > self._num_steps and _age(self._marks[1], now) >= WINDOW_S:
            self._marks.popleft()

    def stop(self) -> None:
        """Note that training has ended."""
        self._end = self._read()

    def recent(self) -> Bottleneck | None:
        """Return the bottleneck of the last steps; before these, of the time until now."""
        now = self._read()
        if len(self._marks) >= self._num_steps and _age(self._marks[0], now) >= WINDOW_S:
            return self._between(self._marks[0], now, f" (last {_age(self._marks[0], now):,.0f} s)")
        return self._between(self._start, now, f" (last {max(_age(self._start, now), 1.0):,.0f} s)")

    def whole(self) -> Bottleneck | None:
        """Return the bottleneck of the whole time of training."""
        return self._between(self._start, self._end or self._read(), " (whole run)")

    def _between(self, before: Mapping[str, float], now: Mapping[str, float], period: str) -> Bottleneck | None:
        if _age(before, now) < MIN_S:
            return None
        is_filled = before is self._start and self._first_step is not None and _age(self._first_step, now) >= MIN_S
        found = find_bottleneck(
            before,
            now,
            max_staleness=max(self._max_staleness().values(), default=0),
            places=self.places,
            period=period,
            filled=self._first_step if is_filled else None,
        )
        # Whether sampling waits for the trainer shows only after a whole step.
        return None if found is not None and found.part == "none" and not self._marks else found


def _age(mark: Mapping[str, float], now: Mapping[str, float]) -> float:
    return now.get("run", 0.0) - mark.get("run", 0.0)
