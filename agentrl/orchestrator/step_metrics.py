"""What a step's metrics say: reward, lag, busy shares, throughput, counts. Names are in `observe/metrics.py`."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.clock import Clock
from agentrl.core.ports import Engine
from agentrl.core.records import PolicyVersion, StepReport
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.versions import PolicyBoard


class StepMetrics:
    """Accumulates between steps."""

    def __init__(
        self, *, engine: Engine, dispatcher: Dispatcher, buffer: EpisodeBuffer, board: PolicyBoard, clock: Clock
    ) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._buffer = buffer
        self._board = board
        self._clock = clock
        self._started = 0.0
        self._last: dict[str, tuple[float, float]] = {}
        self._idle_since: dict[str, float] = {}

    def start(self) -> None:
        """Training begins now."""
        self._started = self._clock.monotonic()
        busy = self._engine.busy_seconds()
        self._last = dict.fromkeys(self._board.trainable, (self._started, busy))
        self._idle_since = dict.fromkeys(self._board.trainable, self._started)

    def before_step(self, policy: str) -> float:
        """Seconds the policy's trainer has waited for units."""
        return self._clock.monotonic() - self._idle_since[policy]

    def of_step(self, report: StepReport, taken: Sequence[ReadyUnit], waited: float) -> dict[str, float]:
        """Metrics of a step that has just been taken, before its version becomes current."""
        policy = report.policy
        now = self._clock.monotonic()
        since, busy_before = self._last[policy]
        busy = self._engine.busy_seconds()
        self._last[policy] = (now, busy)
        self._idle_since[policy] = now
        wall = max(now - since, 1e-9)
        trajectories = [trajectory for ready in taken for trajectory in ready.trajectories]
        lags = [
            float(self._board.staleness(PolicyVersion(policy, t.lineage, t.oldest_step), dead=self._board.step(policy)))
            for t in trajectories
        ]
        rewards = [sum(t.reward or 0.0 for t in ready.trajectories) for ready in taken]
        ended = self._dispatcher.take_sums()
        ledger = self._buffer.ledger
        metrics = {
            "reward/mean": _mean(rewards),
            "staleness/mean": _mean(lags),
            "staleness/max": max(lags, default=0.0),
            "advantage/zero_share": _mean(
                [float(all(c.advantage == 0.0 for c in ready.unit.credits)) for ready in taken]
            ),
            "step/units": float(len(taken)),
            "step/tokens": float(report.tokens),
            "step/seconds": wall,
            "step/waited_s": waited,
            "run/seconds": now - self._started,
            "engine/busy_share": (busy - busy_before) / wall,
            "trainer/busy_share": report.seconds / wall,
            "tokens/sampled_per_s": ended["tokens"] / wall,
            "episodes/per_s": ended["episodes"] / wall,
            "episodes/turns": ended["turns"] / max(ended["episodes"], 1),
            "episodes/in_flight": float(ledger.in_flight),
            "episodes/ready": float(ledger.ready),
            "episodes/trained": float(ledger.trained),
            "episodes/dropped": float(ledger.dropped.total()),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
        }
        seats = sorted({t.seat for t in trajectories})
        if len(seats) > 1:
            for seat in seats:
                metrics[f"reward/{seat}"] = _mean([t.reward or 0.0 for t in trajectories if t.seat == seat])
        metrics.update(report.metrics)
        return metrics


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
