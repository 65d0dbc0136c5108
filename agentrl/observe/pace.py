"""Seconds per step at each bound on staleness, predicted from the timings of a run, and the choice between the bounds.

`predict_step_seconds` plays the loop's rules in virtual time: groups start within the bound, turns share the engine,
episodes wait for tools, complete groups are released, and the trainer takes a step once enough episodes are ready. It
knows neither worker processes nor KV-cache memory, and treats child episodes as groups of their own.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean
from typing import NamedTuple

from agentrl.observe.metrics import PREDICTED_STEP, STALENESS_BOUND, TOGETHER

MIN_GAIN = 0.2
"""Share of lockstep's time per step that asynchrony must save. Steps on stale data teach less than fresh ones."""
NEAR_BEST = 0.1
"""The smallest bound is taken whose time per step exceeds the best one's by no more than this share."""
MARGIN = 0.05
"""Both shares move by this much in favor of the bound in force, so that noise in the timings does not change it."""
SHARED_CORES = 0.8
"""Speed of engine and trainer at the same time, relative to each alone, below which they count as sharing cores."""

MAX_BOUND = 64
"""Largest bound on staleness that is looked for in the metrics of a run."""
NO_LIMIT = 1 << 30
"""A number of episodes in flight that no run reaches."""
MEASURED_STEPS = 16
"""Number of simulated steps that are measured, after the pipeline has filled."""
MAX_SIMULATED_EPISODES = 64
"""Largest number of episodes per simulated step, unless two groups have more. Larger steps are simulated on a smaller
scale, which makes their longest waits somewhat too short."""
MAX_SIMULATED_TURNS = 1024
"""Largest number of turns of a simulated step; turns of longer episodes are merged. A prediction runs in the loop of
the episodes, so it must end within a fraction of a second."""
SLOWEST_TOGETHER = 0.25
"""Smallest speed of engine and trainer at the same time that is fitted."""


class EpisodePace(NamedTuple):
    """An ended episode, as far as its pace matters."""

    turns: int
    tokens: int
    """Sampled tokens."""
    wait_s: float
    """Seconds outside the engine: tools, environments, scorers."""

    @property
    def work(self) -> int:
        """Forward passes of the engine: one for each sampled token, and one for the context of each turn."""
        return self.tokens + self.turns


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTimings:
    """What the time per step depends on, besides the bound on staleness."""

    groups: Sequence[Sequence[EpisodePace]]
    """Recorded groups, from which simulated ones are drawn."""
    episodes_per_step: int
    """Episodes that a step takes, dropped ones included."""
    step_s: float
    """Seconds of an optimizer step, with the publication of its version."""
    pass_s: float
    """Seconds of a forward pass of the engine without any rows."""
    row_s: float
    """Seconds that each concurrent turn adds to a forward pass."""
    places: int = 0
    """Turns that the engine samples at once; 0: no limit."""
    max_in_flight: int = NO_LIMIT
    together: float = 1.0
    """Speed of engine and trainer while both compute, relative to each alone: 1 if they share nothing, about ½ if one
    core serves both."""
    max_lag: int | None = None
    """`max_lag`, if admission keeps it."""
    releases_groups: bool = True
    """Whether episodes are trained once their group is complete; otherwise once they end."""


def predict_step_seconds(timings: LoopTimings, staleness: int) -> float:
    """Return the seconds per step of a long run with a bound on staleness.

    The same timings give the same result: groups are drawn with a fixed seed.
    """
    simulation = _Simulation(_of_small_scale(timings), staleness)
    skipped = staleness + 3
    while len(simulation.step_ends) < skipped + MEASURED_STEPS:
        simulation.advance()
    return (simulation.step_ends[-1] - simulation.step_ends[skipped - 1]) / MEASURED_STEPS


def _of_small_scale(timings: LoopTimings) -> LoopTimings:
    """Return timings of the same run with smaller steps, on a proportionally slower engine."""
    largest_group = max(map(len, timings.groups))
    simulated = max(MAX_SIMULATED_EPISODES, 2 * largest_group)
    scale = timings.episodes_per_step / simulated
    if scale <= 1:
        return timings
    return replace(
        timings,
        episodes_per_step=simulated,
        row_s=timings.row_s * scale,
        places=math.ceil(timings.places / scale),
        max_in_flight=max(int(timings.max_in_flight / scale), largest_group),
    )


class _Group:
    """A simulated group."""

    __slots__ = ("begun_at", "running", "size")

    def __init__(self, size: int, begun_at: int) -> None:
        self.size = self.running = size
        self.begun_at = begun_at
        """Number of episodes trained when the group began."""


class _Episode:
    """A simulated episode between two turns, or in one."""

    __slots__ = ("group", "turn_wait_s", "turn_work", "turns")

    def __init__(self, pace: EpisodePace, group: _Group, max_turns: int) -> None:
        self.group = group
        self.turns = min(max(pace.turns, 1), max_turns)
        """Turns left."""
        self.turn_work = max(pace.work, 1) / self.turns
        self.turn_wait_s = pace.wait_s / self.turns


class _Simulation:
    """The loop in virtual time, from one event to the next."""

    def __init__(self, timings: LoopTimings, staleness: int) -> None:
        self._timings, self._staleness = timings, staleness
        self._max_turns = max(MAX_SIMULATED_TURNS // timings.episodes_per_step, 1)
        self._random = random.Random(0)
        self._order = count()
        self._now = 0.0
        self._passes = 0.0
        """Forward passes that a turn in the engine has seen so far."""
        self._sampling: list[tuple[float, int, _Episode]] = []
        """Turns in the engine, by the value of `_passes` at which they end."""
        self._queue: deque[_Episode] = deque()
        """Turns that wait for a place."""
        self._waiting: list[tuple[float, int, _Episode]] = []
        """Episodes outside the engine, by the time at which they return."""
        self._running = 0
        self._ready: deque[_Group] = deque()
        """The group of each episode that waits for its step."""
        self._open: dict[_Group, int] = {}
        """Number of untrained episodes of each group, oldest group first."""
        self._outstanding = 0
        """Number of untrained episodes."""
        self._trained = 0
        self._step_left_s: float | None = None
        """Seconds that the trainer alone needs for the rest of its step; None: it waits."""
        self._undrawn: list[Sequence[EpisodePace]] = []
        self._next = self._draw()
        self.step_ends: list[float] = []

    def advance(self) -> None:
        """Let everything happen that can happen now, then move to the next event."""
        while self._may_admit():
            self._admit()
        if self._step_left_s is None and self._may_step():
            self._step_left_s = self._timings.step_s
        rows = len(self._sampling)
        is_stepping, together = self._step_left_s is not None, self._timings.together
        passes_per_s = 1.0 / max(self._timings.pass_s + self._timings.row_s * rows, 1e-9)
        if is_stepping:
            passes_per_s *= together
        step_speed = together if rows else 1.0
        step_ends_in = math.inf if self._step_left_s is None else self._step_left_s / step_speed
        turn_ends_in = (self._sampling[0][0] - self._passes) / passes_per_s if rows else math.inf
        wait_ends_in = self._waiting[0][0] - self._now if self._waiting else math.inf
        passed_s = max(min(step_ends_in, turn_ends_in, wait_ends_in), 0.0)
        self._now += passed_s
        self._passes += passed_s * passes_per_s if rows else 0.0
        if self._step_left_s is not None:
            self._step_left_s -= passed_s * step_speed
        if step_ends_in <= min(turn_ends_in, wait_ends_in):
            self._end_step()
        elif turn_ends_in <= wait_ends_in:
            self._end_turn(heapq.heappop(self._sampling)[2])
        else:
            self._end_wait(heapq.heappop(self._waiting)[2])

    def _draw(self) -> Sequence[EpisodePace]:
        """Return the next group: each recorded one once, in random order, before any comes again."""
        if not self._undrawn:
            self._undrawn = self._random.sample(self._timings.groups, len(self._timings.groups))
        return self._undrawn.pop()

    def _may_admit(self) -> bool:
        """Whether the next group may start: the rules of `orchestrator.scheduler.Scheduler`."""
        timings, size = self._timings, len(self._next)
        if not self._running and not self._open and self._step_left_s is None:
            return True  # a group that no bound has room for must not stop the simulation
        outstanding = self._outstanding
        step_size, max_lag = timings.episodes_per_step, timings.max_lag
        if self._running + size > timings.max_in_flight or outstanding + size > (1 + self._staleness) * step_size:
            return False
        if max_lag is None:
            return True
        oldest = next(iter(self._open), None)
        overtaken = 0 if oldest is None else self._trained - oldest.begun_at
        return outstanding + overtaken + size <= (1 + max_lag) * step_size

    def _admit(self) -> None:
        group = _Group(len(self._next), self._trained)
        self._open[group] = group.size
        self._outstanding += group.size
        self._running += group.size
        for pace in self._next:
            self._enter_engine(_Episode(pace, group, self._max_turns))
        self._next = self._draw()

    def _enter_engine(self, episode: _Episode) -> None:
        if self._timings.places and len(self._sampling) >= self._timings.places:
            self._queue.append(episode)
        else:
            heapq.heappush(self._sampling, (self._passes + episode.turn_work, next(self._order), episode))

    def _end_turn(self, episode: _Episode) -> None:
        if self._queue:
            self._enter_engine(self._queue.popleft())
        episode.turns -= 1
        heapq.heappush(self._waiting, (self._now + episode.turn_wait_s, next(self._order), episode))

    def _end_wait(self, episode: _Episode) -> None:
        if episode.turns:
            self._enter_engine(episode)
            return
        group = episode.group
        self._running -= 1
        group.running -= 1
        if not self._timings.releases_groups:
            self._ready.append(group)
        elif not group.running:
            self._ready.extend([group] * group.size)

    def _may_step(self) -> bool:
        """Whether enough episodes are ready, or no more can come; the next group does not fit now."""
        return len(self._ready) >= self._timings.episodes_per_step or bool(self._ready and not self._running)

    def _end_step(self) -> None:
        self._step_left_s = None
        self.step_ends.append(self._now)
        for _ in range(min(self._timings.episodes_per_step, len(self._ready))):
            group = self._ready.popleft()
            self._trained += 1
            self._outstanding -= 1
            self._open[group] -= 1
            if not self._open[group]:
                del self._open[group]


def fit_together(timings: LoopTimings, staleness: int, share: float) -> float:
    """Return the speed of engine and trainer at the same time with which a step takes `share` of lockstep's time.

    Args:
        timings: measured while engine and trainer took turns.
        staleness: bound with which steps took that share.
        share: seconds per step over those in lockstep, both as seen.
    """
    slow, fast, step_s = SLOWEST_TOGETHER, 1.0, share * predict_step_seconds(timings, 0)
    for _ in range(5):
        middle = (slow + fast) / 2
        is_too_slow = predict_step_seconds(replace(timings, together=middle), staleness) > step_s
        slow, fast = (middle, fast) if is_too_slow else (slow, middle)
    return (slow + fast) / 2


def choose_staleness(predicted: Mapping[int, float], current: int | None = None) -> int:
    """Return the bound to take: the smallest whose time is near the best, and lockstep if asynchrony gains too little.

    Args:
        predicted: predicted seconds per step by bound.
        current: bound in force, which is kept unless another is clearly better; None: none has been chosen yet.

    Example:
        >>> choose_staleness({0: 16.8, 1: 4.4, 2: 2.7, 4: 1.6}), choose_staleness({0: 0.57, 1: 0.5, 2: 0.49, 4: 0.49})
        (4, 0)
    """
    best = min(predicted.values())

    def margin(bound: int) -> float:
        return 0.0 if current is None else MARGIN if bound == current else -MARGIN

    if 0 in predicted and best > (1 - MIN_GAIN - margin(0)) * predicted[0]:
        return 0
    return min(bound for bound in predicted if predicted[bound] <= (1 + NEAR_BEST + margin(bound)) * best)


class StepPace(NamedTuple):
    """The time per step with one bound on staleness."""

    predicted_s: float | None
    """Seconds per step as last predicted; None: never."""
    seen_s: float | None
    """Mean seconds of the newest steps with this bound; None: there are none."""

    @property
    def text(self) -> str:
        """For people."""
        seconds = {"predicted": self.predicted_s, "seen": self.seen_s}
        return ", ".join(f"{value:.3g} s {kind}" for kind, value in seconds.items() if value is not None)


class ChosenStaleness(NamedTuple):
    """The bound on staleness that a run chose, as its recorded metrics tell."""

    bound: int
    paces: Mapping[int, StepPace]
    """Time per step by bound."""
    together: float
    """Speed of engine and trainer while both compute, relative to each alone."""

    @staticmethod
    def of_steps(steps: Mapping[int, Mapping[str, float]]) -> ChosenStaleness | None:
        """Return the choice in the metrics of a policy's steps, by step; None if the configuration set the bound of
        the newest one. Recorded values may be anything."""
        newest = steps[max(steps)] if steps else {}
        bound = _recorded_bound(newest)
        if bound is None:
            return None
        newest_first = (values for _, values in sorted(steps.items(), reverse=True))
        # after a resume, the first steps record no prediction
        predicted = next(filter(None, map(_recorded_predictions, newest_first)), {})
        seen = _seen_seconds(steps)
        paces = {each: StepPace(predicted.get(each), seen.get(each)) for each in sorted({*predicted, *seen})}
        return ChosenStaleness(bound, paces, _recorded(newest, TOGETHER) or 1.0)

    @property
    def reason(self) -> str:
        """The bound and the reason for it, for people."""
        predicted = {bound: pace.predicted_s for bound, pace in self.paces.items() if pace.predicted_s is not None}
        return explain_staleness(self.bound, predicted, self.together)

    @property
    def table(self) -> dict[int, str]:
        """Predicted and seen seconds per step by bound, for people."""
        return {bound: pace.text for bound, pace in self.paces.items()}


def _recorded(values: Mapping[str, object], name: str) -> float | None:
    """Return a metric of a step; None if it has none that is a number from 0."""
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def _recorded_bound(values: Mapping[str, object]) -> int | None:
    """Return the bound in the metrics of a step; None if it has none."""
    bound = _recorded(values, STALENESS_BOUND)
    return int(bound) if bound is not None and bound <= MAX_BOUND else None


def _recorded_predictions(values: Mapping[str, object]) -> dict[int, float]:
    """Return the predicted seconds per step by bound in the metrics of a step."""
    predictions = {bound: _recorded(values, f"{PREDICTED_STEP}{bound}") for bound in range(MAX_BOUND + 1)}
    return {bound: seconds for bound, seconds in predictions.items() if seconds}


def _seen_seconds(steps: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Return the mean seconds per step by bound, over the newest steps of each. The steps until a change of the bound
    shows belong to none."""
    seconds: dict[int, deque[float]] = {}
    bound, unsettled = None, 0
    for _, values in sorted(steps.items()):
        step_s = _recorded(values, "step/seconds")
        if bound is not None and not unsettled and step_s is not None:
            seconds.setdefault(bound, deque(maxlen=MEASURED_STEPS)).append(step_s)
        unsettled = max(unsettled - 1, 0)
        if (recorded := _recorded_bound(values)) != bound:
            bound, unsettled = recorded, max(recorded or 0, bound or 0)  # a larger bound's episodes are trained first
    return {bound: fmean(values) for bound, values in seconds.items()}


def explain_staleness(bound: int, predicted: Mapping[int, float], together: float) -> str:
    """Say which bound is in force and why, for people.

    Args:
        bound: bound in force.
        predicted: predicted seconds per step by bound; empty before the first prediction.
        together: speed of engine and trainer while both compute, relative to each alone.

    Example:
        >>> explain_staleness(0, {0: 0.57, 1: 0.50, 2: 0.50}, 0.6)
        'lockstep: engine and trainer share the cores; staleness 1 would save 12% a step'
    """
    name = f"staleness {bound}" if bound else "lockstep"
    if bound not in predicted:
        return f"{name}: the first steps are timed"
    if bound:
        if 0 not in predicted:
            return f"{name}: a step takes {predicted[bound]:.3g} s"
        return f"{name}: a step takes {predicted[bound]:.3g} s instead of {predicted[0]:.3g} s in lockstep"
    others = {other: seconds for other, seconds in predicted.items() if other}
    if not others:
        return f"{name}: the other settings of the run allow nothing else"
    other = choose_staleness(others)
    saved = 1 - others[other] / max(predicted[0], 1e-9)
    gain = f"staleness {other} would save {saved:.0%} a step" if saved > 0 else f"staleness {other} would save no time"
    shared = "engine and trainer share the cores; " if together < SHARED_CORES else ""
    return f"{name}: {shared}{gain}"
