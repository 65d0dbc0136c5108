"""Which versions are a run's best, by the running mean of a metric, and whether the run is to end because of it.

Owns the newest measurements and the best mean so far, with the versions of all policies at that moment. Both are in the
checkpoints' manifests, so a resumed run chooses as if it had never stopped. The files of what was chosen stay on disk,
also those that a checkpoint names which may yet be resumed from.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.core.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a metric said so far."""

    what: str = ""
    """Metric, policy and window; a run that is resumed with others begins to measure anew."""
    newest: tuple[float, ...] = ()
    """The measurements whose mean is taken, oldest first; the larger, the better."""
    best: float = -math.inf
    """The largest mean."""
    versions: Mapping[str, PolicyVersion] = field(default_factory=dict)
    """Of every policy that learns, when it was reached; empty before the first mean."""

    def as_data(self) -> dict[str, Any]:
        """As JSON data; floats survive it exactly."""
        versions = {policy: [version.lineage, version.step] for policy, version in self.versions.items()}
        return {
            "what": self.what,
            "newest": list(self.newest),
            "best": self.best if self.versions else None,
            "versions": versions,
        }


UNMEASURED = Measured()


def read_measured(data: Mapping[str, Any]) -> Measured:
    """What `Measured.as_data` wrote.

    Raises:
        KeyError: something of it is missing.
        ValueError: it is not that.
    """
    versions = {
        policy: PolicyVersion(policy, int(lineage), int(step)) for policy, (lineage, step) in data["versions"].items()
    }
    newest = tuple(float(value) for value in data["newest"])
    best = float(data["best"]) if versions else -math.inf
    if not all(map(math.isfinite, [*newest, best] if versions else newest)):
        raise ValueError("a measurement is not finite")
    return Measured(what=str(data["what"]), newest=newest, best=best, versions=versions)


@dataclass(slots=True, kw_only=True)
class Choice:
    """Hears every metric of a run and keeps what the configuration asks for.

    Example:
        >>> choice = Choice(metric="reward/mean", policy="solver", window=2, stop_fall=0.25)
        >>> for step, reward in enumerate([0.0, 1.0, 0.5, 0.0], start=1):
        ...     choice.hear("solver", {"reward/mean": reward}, {"solver": PolicyVersion("solver", 0, step)})
        >>> choice.measured.best, choice.measured.versions["solver"].step
        (0.75, 3)
        >>> choice.why_stop()
        'reward/mean fell to 0.25, from 0.75 at its best'
    """

    metric: str = ""
    """Empty: nothing is chosen."""
    policy: str = ""
    """Whose metric it is."""
    smallest: bool = False
    """Whether small values are good ones."""
    window: int = 1
    """Measurements whose mean is taken."""
    stop_at: float | None = None
    """The run ends once the mean is as good as this."""
    stop_fall: float | None = None
    """The run ends once the mean is worse than the best by more than this."""
    checkpoints: int = 1
    """How many of the newest may be resumed from."""
    measured: Measured = UNMEASURED
    _saved: deque[Measured] = field(init=False)

    def __post_init__(self) -> None:
        what = f"{self._sign:+.0f} {self.metric} of {self.policy}, {self.window}"
        if self.measured.what != what:
            self.measured = Measured(what=what)
        self._saved = deque([self.measured], maxlen=self.checkpoints)

    def hear(self, policy: str, metrics: Mapping[str, float], versions: Mapping[str, PolicyVersion]) -> None:
        """Take metrics of a policy; `versions` are those of all that learn."""
        value = metrics.get(self.metric, math.nan)
        if policy != self.policy or not math.isfinite(value):
            return
        newest = (*self.measured.newest, -value if self.smallest else value)[-self.window :]
        mean = math.fsum(newest) / len(newest)
        if len(newest) == self.window and mean > self.measured.best:
            self.measured = replace(self.measured, newest=newest, best=mean, versions=dict(versions))
        else:
            self.measured = replace(self.measured, newest=newest)

    def why_stop(self) -> str | None:
        """Why the run is to end, in words; None where it is not."""
        newest, best = self.measured.newest, self.measured.best
        if len(newest) < self.window or not self.metric:
            return None
        mean, sign = math.fsum(newest) / len(newest), self._sign
        if self.stop_at is not None and mean >= sign * self.stop_at:
            return f"{self.metric} reached {sign * mean:.4g}"
        if self.stop_fall is not None and mean < best - self.stop_fall:
            moved = "rose" if self.smallest else "fell"
            return f"{self.metric} {moved} to {sign * mean:.4g}, from {sign * best:.4g} at its best"
        return None

    def summary(self) -> dict[str, Any] | None:
        """What is best so far, for people; None before the first mean."""
        if not self.measured.versions:
            return None
        steps = {policy: version.step for policy, version in self.measured.versions.items()}
        return {"metric": self.metric, "value": self._sign * self.measured.best, "steps": steps}

    @property
    def _sign(self) -> float:
        return -1.0 if self.smallest else 1.0

    def saved(self) -> None:
        """A checkpoint with what was measured so far has been written."""
        self._saved.append(self.measured)

    def needed(self) -> Iterator[PolicyVersion]:
        """Versions whose files must stay."""
        for measured in (self.measured, *self._saved):
            yield from measured.versions.values()
