"""Metrics of optimizer steps: reward, lag, busy shares, throughput and counts. Names are in `observe/metrics.py`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from agentrl.core.clock import Clock
from agentrl.core.ports import Engine
from agentrl.core.records import StepReport
from agentrl.environment.mixture import trained_root_environments
from agentrl.environment.registry import name_of
from agentrl.observe.bottleneck import THREADS, TOKENS
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.metrics import EpisodeTotals, mean_named_rewards, reward_agreement
from agentrl.orchestrator.versions import PolicyBoard

RATE_STEPS = 5
"""Number of newest steps over which sampled tokens per second are averaged."""


class StepMetrics:
    """Computes the metrics of optimizer steps: reward, lag, busy shares, throughput, counts (`observe/metrics.py`)."""

    def __init__(
        self,
        *,
        engine: Engine,
        dispatcher: Dispatcher,
        buffer: EpisodeBuffer,
        board: PolicyBoard,
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._dispatcher = dispatcher
        self._buffer = buffer
        self._board = board
        self._clock = clock
        self._members = trained_root_environments(dispatcher.specs.environment)
        self._start_s = 0.0
        self._last: dict[str, tuple[float, float]] = {}
        self._idle_since: dict[str, float] = {}
        self._counts: dict[str, EpisodeTotals] = {}
        self._sampled: dict[str, deque[tuple[float, float]]] = {}
        """Time and tokens sampled so far at the newest steps, by policy; the oldest may be the start of training."""

    def start(self) -> None:
        """Start the clocks: training begins now."""
        self._start_s = self._clock.monotonic()
        busy = self._engine.busy_seconds()
        self._last = dict.fromkeys(self._board.trainable, (self._start_s, busy))
        self._idle_since = dict.fromkeys(self._board.trainable, self._start_s)
        at_start = (self._start_s, self._sampled_tokens())
        self._sampled = {policy: deque([at_start], maxlen=RATE_STEPS + 1) for policy in self._board.trainable}
        self._counts = {policy: self._buffer.counts.copy() for policy in self._board.trainable}

    def before_step(self, policy: str) -> float:
        """Return how many seconds the policy's trainer has waited for units."""
        return self._clock.monotonic() - self._idle_since[policy]

    def of_step(self, report: StepReport, ready_units: Sequence[ReadyUnit], waited_s: float) -> dict[str, float]:
        """Compute the metrics of a step that was just taken, before its version becomes current."""
        policy = report.policy
        now = self._clock.monotonic()
        since, busy_before = self._last[policy]
        busy = self._engine.busy_seconds()
        self._last[policy] = (now, busy)
        self._idle_since[policy] = now
        wall = max(now - since, 1e-9)
        trajectories = [trajectory for ready in ready_units for trajectory in ready.trajectories]
        lags = [float(self._board.staleness(t.oldest_version)) for t in trajectories]
        lineage = self._board.current(policy).lineage
        rewards = [sum(t.reward or 0.0 for t in ready.trajectories) for ready in ready_units]
        new_counts = self._buffer.counts.since(self._counts[policy])
        self._counts[policy] = self._buffer.counts.copy()
        ledger = self._buffer.ledger
        metrics = {
            "step/units": float(len(ready_units)),
            "step/tokens": float(report.tokens),
            "step/seconds": wall,
            "step/waited_s": waited_s,
            "run/seconds": now - self._start_s,
            "engine/busy_share": (busy - busy_before) / wall,
            "trainer/busy_share": report.seconds / wall,
            "episodes/per_s": new_counts.of("episodes") / wall,
            "episodes/in_flight": float(ledger.in_flight),
            "episodes/ready": float(ledger.ready),
            "episodes/trained": float(ledger.trained),
            "episodes/dropped": float(ledger.dropped.total()),
            "episodes/threads": self._dispatcher.worker.activity().get(THREADS, 0.0),
            "loss": report.loss,
            "grad_norm": report.grad_norm,
        }
        if ready_units:
            metrics |= {
                "reward/mean": _mean(rewards),
                "staleness/mean": _mean(lags),
                "staleness/max": max(lags),
                "advantage/zero_share": _mean([float(not ready.has_signal) for ready in ready_units]),
                "advantage/alone_share": _mean([float(ready.is_alone) for ready in ready_units]),
            }
            # A rollback trains on tokens of previous attempts again, whose lag admission does not bound.
            if num_before := sum(t.lineage != lineage for t in trajectories):
                metrics["staleness/before_resume"] = float(num_before)
        if rate := self._tokens_per_s(policy, now):
            metrics["tokens/sampled_per_s"] = rate
        seats = sorted({t.seat for t in trajectories})
        if len(seats) > 1:
            for seat in seats:
                metrics[f"reward/{seat}"] = _mean([t.reward or 0.0 for t in trajectories if t.seat == seat])
        if len(self._members) > 1:
            for root in self._members:
                units = zip(ready_units, rewards, strict=True)
                root_rewards = [reward for ready, reward in units if ready.environment == name_of(root)]
                metrics[f"mixture/share/{root.__name__}"] = len(root_rewards) / max(len(ready_units), 1)
                if root_rewards:
                    metrics[f"mixture/reward/{root.__name__}"] = _mean(root_rewards)
        metrics |= {f"named_reward/{name}": value for name, value in mean_named_rewards(trajectories).items()}
        metrics |= {f"reward_agreement/{name}": value for name, value in reward_agreement(trajectories).items()}
        metrics.update(report.metrics)
        for name, value in new_counts.metrics(policy).items():
            metrics.setdefault(name, value)
        if new_counts.of("proposals") and (entropy := self._dispatcher.memory.structure_entropy()) is not None:
            metrics["proposals/structure_entropy"] = entropy
        return metrics

    def _sampled_tokens(self) -> float:
        return self._dispatcher.worker.activity().get(TOKENS, 0.0)

    def _tokens_per_s(self, policy: str, now: float) -> float:
        """Return the tokens per second of the calls that returned during the newest steps; 0 if none did. Calls return
        together, so that a single step's rate jumps."""
        newest, tokens = self._sampled[policy], self._sampled_tokens()
        newest.append((now, tokens))
        (since, before), *_ = newest
        return (tokens - before) / max(now - since, 1e-9)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
