"""The bound on a policy's staleness under `max_staleness = "auto"`: the smallest with which steps come about as fast.

Owns the bound, and the readings that it follows from: groups that ended, and the activities of the loop at the ends of
the policy's steps. Only admission follows the bound; what runs continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from agentrl.core.records import EpisodeHeader
from agentrl.journal.past_run import PastRun
from agentrl.observe.bottleneck import ANY, Activity, fit_passes
from agentrl.observe.metrics import PREDICTED_STEP, STALENESS_BOUND, TOGETHER
from agentrl.observe.pace import (
    EpisodePace,
    LoopTimings,
    choose_staleness,
    explain_staleness,
    fit_together,
    predict_step_seconds,
)

MAX_GROUPS = 64
"""Number of newest groups that a prediction draws from."""
MAX_WINDOW = 8
"""Number of newest steps that are timed."""
RETRY_AFTER = 64
"""Number of steps in lockstep after which the speed of engine and trainer together is measured again."""
FIRST_INTERVAL, LAST_INTERVAL = 4, 16
"""Number of steps between two predictions: doubled each time that the bound stays. A prediction takes about as long as
a short step."""
CHANGED = 0.25
"""Relative change of a timing from which on the step times are predicted again."""
WAITS: tuple[Activity, ...] = ("environment", "endpoint", "scorer", "disk")
"""Activities of an episode that take time and no room in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessRules:
    """What the time per step depends on and no reading tells."""

    choices: Sequence[int]
    """Bounds to choose between, in ascending order."""
    max_lag: int | None = None
    """`max_lag`, if admission keeps it."""
    releases_groups: bool = True
    """Whether episodes are trained once their group is complete."""
    workers: int = 1
    """Number of processes that run episodes; each counts only its own turns in the engine."""
    together: float = 1.0
    """First guess of `LoopTimings.together`."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Totals at the end of a step."""

    at: float
    totals: Mapping[str, float]
    episodes: int
    """Number of episodes that had ended."""
    step_s: float


class StalenessController:
    """The bound on one policy's staleness, which follows the timings of the run.

    The first steps run with the smallest bound, lockstep where the other settings allow it: engine and trainer are then
    timed one after the other, and nothing is trained on stale data before that is known to save time. Later the bound
    changes when the timings do.

    Args:
        rules: the rules of the run.
    """

    def __init__(self, rules: StalenessRules) -> None:
        self._rules = rules
        self.bound = rules.choices[0]
        self._is_chosen = False
        """Whether a prediction chose the bound, in this process or an earlier one."""
        self.predicted: dict[int, float] = {}
        """Seconds per step by bound; empty before the first prediction. That of the bound in force is the time of its
        newest steps, and the others keep their ratios to it."""
        self._together = rules.together
        self._groups: deque[Sequence[EpisodeHeader]] = deque(maxlen=MAX_GROUPS)
        self._num_episodes = 0
        self._readings: deque[_Reading] = deque(maxlen=MAX_WINDOW + 1)
        self._alone: tuple[LoopTimings, float] | None = None
        """Timings while engine and trainer took turns, and the seconds per step, until `_together` is measured."""
        self._correction = 1.0
        """Factor of lockstep's prediction while engine and trainer overlap: they need not slow each other down alike,
        and timings of that time say little of each alone."""
        self._timed: tuple[float, ...] = ()
        """What the last prediction rested on."""
        self._unsettled = 0
        """Number of steps that are left out of the readings."""
        self._since = 0
        """Number of steps since the last prediction, or since the bound changed."""
        self._interval = 1
        """Number of steps between two predictions."""
        self._in_lockstep = 0
        """Number of steps since the bound became 0."""
        self.restart()

    def restore(self, past: PastRun, policy: str, step: int) -> None:
        """Continue with the bound that the journal recorded last."""
        bound = past.log.recorded_metric(policy, STALENESS_BOUND, step)
        if bound is not None and bound in self._rules.choices:
            self.bound, self._is_chosen = int(bound), True
        self.restart()

    @property
    def reason(self) -> str:
        """The bound and the reason for it, for people."""
        return explain_staleness(self.bound, self.predicted, self._together)

    def record_group(self, headers: Sequence[EpisodeHeader]) -> None:
        """Record a training group that ended."""
        if headers:
            self._groups.append(headers)
            self._num_episodes += len(headers)

    def step_ended(
        self, now: float, totals: Mapping[str, float], step_s: float, *, places: int, max_in_flight: int
    ) -> bool:
        """Take a reading at the end of a step; returns whether the bound was chosen for the first time, or changes.

        Args:
            now: time in seconds.
            totals: `ActivityClock.totals` of the workers.
            step_s: seconds of the optimizer step, publication included.
            places: number of turns that the engine samples at once; 0: unknown.
            max_in_flight: number of episodes that may run at once.
        """
        reading = _Reading(now, totals, self._num_episodes, step_s)
        if self._unsettled:
            self._unsettled -= 1
            self._readings.clear()
        self._readings.append(reading)
        self._since += 1
        self._in_lockstep = 0 if self.bound else self._in_lockstep + 1
        if len(self._readings) < 2:
            return False
        self._calibrate()
        if self._since < self._interval:
            return False
        timings = self._timings(places, max_in_flight)
        if timings is None:
            return False
        self._since = 0
        return self._look(timings)

    def metrics(self) -> dict[str, float]:
        """Return the bound and what it rests on, as metrics of a step."""
        predicted = {f"{PREDICTED_STEP}{bound}": seconds for bound, seconds in self.predicted.items()}
        return {STALENESS_BOUND: float(self.bound), TOGETHER: self._together, **predicted}

    def _look(self, timings: LoopTimings) -> bool:
        timed = (self._seen_s, timings.step_s, fmean(pace.wait_s for group in timings.groups for pace in group))
        share = 0.0
        if not self.bound:
            self._alone, self._correction = (timings, self._seen_s), 1.0
            if self._in_lockstep >= RETRY_AFTER and self._together < self._rules.together:
                self._together, self._in_lockstep, self._timed = self._rules.together, 0, ()
        elif self._alone is not None and self._is_pace:
            alone, lockstep_s = self._alone
            share = self._seen_s / lockstep_s
            self._together, self._timed = fit_together(alone, self.bound, share), ()
            self._alone = None  # later, other episodes may be longer
        if self._timed and not any(_differs(*pair, self._seen_s) for pair in zip(timed, self._timed, strict=True)):
            return False
        is_first, self._timed = not self.predicted, timed
        timings = replace(timings, together=self._together)
        self.predicted = {bound: predict_step_seconds(timings, bound) for bound in self._rules.choices}
        if share:
            self._correction = self.predicted[self.bound] / self.predicted[0] / share
        if 0 in self.predicted:
            self.predicted[0] *= self._correction
        self._calibrate()
        bound, before = choose_staleness(self.predicted, self.bound if self._is_chosen else None), self.bound
        self._is_chosen = True
        self._interval = FIRST_INTERVAL if is_first else min(2 * self._interval, LAST_INTERVAL)
        if bound != before:
            self.bound = bound
            self.restart(before)
        return is_first or bound != before

    def _calibrate(self) -> None:
        """Scale the predictions to what a step takes. A simulation knows neither the loop's own work nor a process that
        warms up, which raise the time with every bound alike."""
        if self.predicted and self._is_pace and self._seen_s > 0.0:
            factor = self._seen_s / self.predicted[self.bound]
            self.predicted = {bound: factor * seconds for bound, seconds in self.predicted.items()}

    def leave_out_step(self) -> None:
        """Take no reading at the end of a step beside which other episodes ran, or a policy was frozen."""
        self._unsettled = max(self._unsettled - 1, 0)
        self._readings.clear()

    def restart(self, before: int = 0) -> None:
        """Take new readings, after a pause or under a new bound. Left out are the steps until the bound shows, and the
        first step of a process, which is slow. Totals of other processes are up to a second old.

        Args:
            before: bound that was in force. If it was larger, the next steps train what was sampled ahead.
        """
        lag = max(self.bound, before)
        self._unsettled, self._since = 1 + lag, 0
        is_first = not self.predicted and self._rules.workers == 1
        self._interval = 1 if is_first else max(FIRST_INTERVAL + lag, 2 + lag + self.bound)

    @property
    def _seen_s(self) -> float:
        """Seconds per step in the window."""
        return (self._readings[-1].at - self._readings[0].at) / (len(self._readings) - 1)

    @property
    def _is_pace(self) -> bool:
        """Whether `_seen_s` is the pace of the run: steps on what was sampled ahead may come all at once."""
        return len(self._readings) - 1 > self.bound

    def _timings(self, places: int, max_in_flight: int) -> LoopTimings | None:
        """Return what the readings of the window say of engine and trainer alone; None if too little ended."""
        first, last, num_steps = self._readings[0], self._readings[-1], len(self._readings) - 1
        passes, num_ended = fit_passes(first.totals, last.totals), last.episodes - first.episodes
        seconds = last.at - first.at
        if passes is None or not num_ended or seconds <= 0.0:
            return None

        def spent(activity: str) -> float:
            return last.totals.get(activity, 0.0) - first.totals.get(activity, 0.0)

        step_s = fmean(reading.step_s for reading in list(self._readings)[1:])
        engine_share = min(spent("engine" + ANY) / self._rules.workers / seconds, 1.0)
        slowed = 1.0 - self._together if self.bound else 0.0
        engine_speed = 1.0 - slowed * min(step_s * num_steps / seconds, 1.0)
        pass_s, row_s = passes
        return LoopTimings(
            groups=_paces(self._groups, spent("engine"), num_ended, sum(map(spent, WAITS))),
            episodes_per_step=max(round(num_ended / num_steps), 1),
            step_s=step_s * (1.0 - slowed * engine_share),
            pass_s=pass_s * engine_speed,
            row_s=row_s * engine_speed / self._rules.workers,
            places=places,
            max_in_flight=max_in_flight,
            max_lag=self._rules.max_lag,
            releases_groups=self._rules.releases_groups,
        )


def _paces(
    groups: Sequence[Sequence[EpisodeHeader]], engine_s: float, num_ended: int, waits_s: float
) -> list[list[EpisodePace]]:
    """Return the paces of groups. Their waits add up to the measured ones.

    Headers have the seconds of an episode, and not how many of them it waited: what it did not spend in the engine at
    the mean pace.

    Args:
        groups: groups that ended.
        engine_s: seconds in the engine of `num_ended` episodes.
        num_ended: number of the episodes that `engine_s` and `waits_s` are of.
        waits_s: their seconds outside the engine.
    """
    newest = [header for group in groups for header in group][-num_ended:]
    share = len(newest) / num_ended
    pass_s = share * engine_s / sum(max(header.tokens + header.turns, 1) for header in newest)

    def rest(header: EpisodeHeader) -> float:
        return max(header.seconds - (header.tokens + header.turns) * pass_s, 0.0)

    rests_s = sum(map(rest, newest))
    scale, least = (share * waits_s / rests_s, 0.0) if rests_s else (0.0, waits_s / num_ended)
    return [
        [EpisodePace(header.turns, header.tokens, least + scale * rest(header)) for header in group] for group in groups
    ]


def _differs(now: float, before: float, step_s: float) -> bool:
    """Whether a timing has changed, by more than what a step would not notice."""
    return abs(now - before) > max(CHANGED * before, 0.05 * step_s)
