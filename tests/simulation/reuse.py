"""Episodes that are trained more than once: the production loop in virtual time, with a tabular policy that learns.

The trainer adds older episodes to a step by itself, so the loop needs no setting for it. `Plan.uses` is how often an
episode is trained, each time with its importance weights from the recorded probabilities.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

import agentrl
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, Unit, WeightsRef
from agentrl.core.tokens import Completion
from agentrl.credit.samples import TrainingSample, trained_positions, unit_samples
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for
from tests.support.recording_trainer import RecordingTrainer

TASKS, TURNS, CHOICES = 8, 3, 4
GROUP = 8
STEP_SIZE = 64
POLICY = "solver"
BETAS = (0.9, 0.95)
MAX_RATIO, TRUST_REGION = 5.0, 0.2
"""Options of the loss `truncated`."""
_CHAT = PlainChatFormat()
Logits = NDArray[np.float64]
"""Logits of each choice, [TASKS, TURNS, CHOICES]; the first choice is the right one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run. `STEP_SIZE` episodes in flight per unit of staleness, whatever the number of new episodes of a step."""

    rate: float
    """AdamW's learning rate."""
    uses: int = 1
    fresh: int = STEP_SIZE
    """New episodes of a step. The step also trains those of the `uses` - 1 steps before it."""
    in_a_row: bool = False
    """Whether each step's new episodes are trained `uses` times at once instead, with an update each time."""
    staleness: int = 4
    exact: bool = False
    """Whether an episode's weight is its whole ratio of probabilities; otherwise the loss is `truncated`."""
    least_ess: float = 0.5
    """Least effective sample size of a step's episodes, as a share, for which they are trained again."""
    tool_s: float = 0.5
    """Median of a tool's seconds; the 90th percentile is five times as long."""
    episode_s: float = 0.2 / STEP_SIZE
    """Seconds that the trainer takes per episode."""
    limit_s: float = 36.0

    @property
    def max_staleness(self) -> int:
        return (1 + self.staleness) * STEP_SIZE // self.fresh - 1 if self.staleness else 0


class Curve(NamedTuple):
    """What a run reached."""

    to_goal_s: float
    """Seconds until a version's mean reward reached the goal; infinite if none did."""
    final: float
    """Mean reward of the last version."""
    uses: float
    """How often an episode was trained, on average."""
    trainer_busy: float


class Decision(NamedTuple):
    """A trained token."""

    state: tuple[int, int]
    """Task and turn."""
    choice: int
    logprob: float
    advantage: float


Row = Sequence[Decision]
"""The decisions of an episode."""


def log_softmax(logits: Logits) -> Logits:
    shifted: Logits = logits - logits.max(axis=-1, keepdims=True)
    normalized: Logits = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return normalized


def success(logits: Logits) -> float:
    """The policy's exact mean reward."""
    return float(np.exp(log_softmax(logits)[..., 0]).prod(axis=1).mean())


def episode_ratio(logprobs: Logits, row: Row) -> float:
    """Probability of an episode's decisions over the recorded one."""
    return math.exp(sum(logprobs[each.state][each.choice] - each.logprob for each in row))


def effective_share(logprobs: Logits, rows: Sequence[Row]) -> float:
    """Effective sample size of episodes, as a share of their number."""
    weights = np.array([episode_ratio(logprobs, row) for row in rows])
    return float(weights.sum() ** 2 / (weights**2).sum() / len(rows))


def gradient(logits: Logits, rows: Sequence[Row], *, exact: bool) -> Logits:
    """The ascent direction of a step."""
    logprobs, total = log_softmax(logits), np.zeros_like(logits)
    for row in rows:
        whole = episode_ratio(logprobs, row) if exact else 1.0
        for state, choice, recorded, advantage in row:
            now = logprobs[state][choice]
            moved = math.exp(now) - math.exp(recorded)
            if not exact and (moved if advantage > 0 else -moved) > TRUST_REGION:
                continue
            score = -np.exp(logprobs[state])
            score[choice] += 1
            weight = whole if exact else min(math.exp(now - recorded), MAX_RATIO)
            total[state] += weight * advantage * score
    return total / len(rows)


class Choose(agentrl.Environment):
    """Three decisions, all of which must be right; a tool takes time between two."""

    seats = ("solver",)
    tool_s: ClassVar[float]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver, is_right = ctx.agent("solver"), True
        for turn in range(TURNS):
            reply = await solver.act(agentrl.user(f"[{ctx.task.id} {turn}]"))
            is_right &= reply.text == "0"
            if turn + 1 < TURNS and self.tool_s:
                await ctx.sleep(self.tool_s * math.exp(math.log(5) / 1.2815515655446004 * ctx.rng.gauss()))
        solver.reward(float(is_right))


def state_of(token_ids: NDArray[np.int32]) -> tuple[int, int]:
    """Task and turn of a context."""
    text = _CHAT.decode(token_ids.tolist())
    task, turn = text[text.rindex("[") + 1 : text.rindex("]")].split()
    return int(task), int(turn)


class TabularEngine(ScriptedEngine):
    """Records the probabilities under the version that sampled a turn.

    Args:
        tables: logits of each version, by step.
    """

    def __init__(self, *arguments: Any, tables: Mapping[int, Logits], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._tables = tables

    def _completion(self, request: GenerateRequest, tokens: Sequence[int], reason: Any, spans: Any) -> Completion:
        if not len(tokens):
            return super()._completion(request, tokens, reason, spans)
        logprobs = log_softmax(self._tables[spans[0].version.step][state_of(request.token_ids)])
        values = [0.0 if token == STOP_TOKEN else logprobs[int(chr(token))] for token in tokens]
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=np.array(values, np.float32),
            finish_reason=reason,
            spans=spans,
        )


class TabularTrainer(RecordingTrainer):
    """Learns a table of logits by AdamW, and trains episodes again.

    Args:
        plan: the run.
        tables: logits of each version, by step; published ones are added.
        journal: the run's journal.
    """

    def __init__(
        self, *arguments: Any, plan: Plan, tables: dict[int, Logits], journal: Any, clock: Any, **options: Any
    ) -> None:
        super().__init__(*arguments, clock=clock, step_seconds=self._seconds, **options)
        self._plan, self._tables, self._log, self._time = plan, tables, journal.turn_log("0"), clock
        self._logits = tables[0].copy()
        self._moments = np.zeros((2, *self._logits.shape))
        self._updates = 0
        self._older: list[list[Row]] = []
        self.curve: list[tuple[float, float]] = []
        """Time and mean reward of each version."""
        self.busy_s = 0.0
        self.trained: list[int] = []
        """Number of new episodes of each step, and of those trained again."""
        self.trained_again: list[int] = []

    reward_of = staticmethod(success)
    """The exact mean reward of a table."""

    def _seconds(self, batch: TrainBatch) -> float:
        again = self._plan.uses - 1 if self._plan.in_a_row else len(self._usable())
        return self._plan.episode_s * len(batch.units) * (1 + again)

    def _usable(self) -> list[list[Row]]:
        logprobs = log_softmax(self._logits)
        return [rows for rows in self._older if effective_share(logprobs, rows) >= self._plan.least_ess]

    def _samples(self, unit: Unit) -> Sequence[TrainingSample]:
        return unit_samples(unit, assemble_trajectories(self._log.read(unit.episode_id, unit.attempt), POLICY, ()))

    def _row(self, unit: Unit) -> Row:
        samples = self._samples(unit)
        return [
            Decision(
                state_of(sample.token_ids[:at]),
                int(chr(sample.token_ids[at])),
                float(sample.logprobs[at]),
                float(sample.advantages[at]),
            )
            for sample, positions in zip(samples, trained_positions(samples), strict=True)
            for at in positions
            if sample.token_ids[at] != STOP_TOKEN
        ]

    def _ascent(self, rows: Sequence[Row]) -> Logits:
        return gradient(self._logits, rows, exact=self._plan.exact)

    def _update(self, rows: Sequence[Row]) -> None:
        ascent = self._ascent(rows)
        self._updates += 1
        corrected = []
        for moment, beta, value in zip(self._moments, BETAS, (ascent, ascent**2), strict=True):
            moment += (1 - beta) * (value - moment)
            corrected.append(moment / (1 - beta**self._updates))
        self._logits = self._logits + self._plan.rate * corrected[0] / (np.sqrt(corrected[1]) + 1e-8)

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        report = await super().optim_step(policy, step_id)
        rows, plan = [self._row(unit) for unit in self.batches[-1].units], self._plan
        again = 0
        if plan.in_a_row:
            self._update(rows)
            self._older = [rows]
            for _ in range(plan.uses - 1):
                if self._usable():
                    self._update(rows)
                    again += len(rows)
        else:
            older = [row for batch in self._usable() for row in batch]
            self._update([*rows, *older])
            self._older, again = [rows, *self._older][: plan.uses - 1], len(older)
        self.busy_s += report.seconds
        self.trained.append(len(rows))
        self.trained_again.append(again)
        return report

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        weights = await super().publish(policy, version)
        self._tables[version.step] = self._logits.copy()
        self.curve.append((self._time.monotonic(), self.reward_of(self._logits)))
        return weights


def play(
    plan: Plan,
    seed: int,
    *,
    environment: type[agentrl.Environment] = Choose,
    trainer_class: type[TabularTrainer] = TabularTrainer,
    **trainer_options: Any,
) -> tuple[TabularTrainer, float]:
    """Play a run; returns its trainer, and when it began."""
    start = 0.3 * np.random.default_rng(seed).standard_normal((TASKS, TURNS, CHOICES))
    start[..., 0] += 1.2
    tables: dict[int, Logits] = {0: start}

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        weights = np.exp(log_softmax(tables[version.step][state_of(request.token_ids)])).tolist()
        return [ord(str(random.Random(request.seed).choices(range(CHOICES), weights)[0])), STOP_TOKEN]

    Choose.tool_s = plan.tool_s
    run = SmallRun(
        environment=environment,
        script=script,
        engine_class=partial(TabularEngine, tables=tables, refresh="turn"),
        engine_options={"seconds_per_call": 0.05, "seconds_per_token": 0.02},
        trainer_options={"publish_seconds": 0.05, "plan": plan, "tables": tables, **trainer_options},
        tasks=[agentrl.Task(id=str(number), data={}) for number in range(TASKS)],
        config=config_for(
            steps=1 << 20,
            seed=seed,
            policies={POLICY: {"step_size": plan.fresh, "max_staleness": plan.max_staleness}},
            credit={"group_size": GROUP},
            sampling={"max_tokens": 4, "max_turns": TURNS},
            max_in_flight=1024,
        ),
    )
    run.trainer_class = partial(trainer_class, journal=run.journal)
    simulate(partial(run.stop_after, plan.limit_s), seed=seed, max_steps=1 << 40)
    assert isinstance(run.trainer, TabularTrainer)
    return run.trainer, run.trainer.curve[0][0]


def curve(plan: Plan, seed: int, goal: float = 0.9) -> Curve:
    """Play a run until its time is over."""
    trainer, began = play(plan, seed)
    times = (time - began for time, reward in trainer.curve if reward >= goal)
    return Curve(
        to_goal_s=next(times, math.inf),
        final=trainer.curve[-1][1],
        uses=1 + sum(trainer.trained_again) / sum(trainer.trained),
        trainer_busy=trainer.busy_s / plan.limit_s,
    )
