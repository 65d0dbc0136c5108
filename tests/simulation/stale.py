"""A task on which stale data does harm: the production loop in virtual time, with a tabular policy.

The policy learns by agentrl's own losses; loop, credit and the lags of tokens are real. What the policy earns is
computed exactly from its table, not from samples.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

import agentrl
from agentrl.config.sections import TrainerConfig
from agentrl.core.records import PolicyVersion, Unit
from agentrl.credit.samples import TrainingSample, trained_positions
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.losses import make_loss
from agentrl.learn.step_columns import TokenColumns
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.simulation.reuse import (
    CHOICES,
    GROUP,
    POLICY,
    Logits,
    Plan,
    Row,
    TabularTrainer,
    log_softmax,
    play,
    state_of,
)

RECENT = 16
"""Number of answers to a task among which a rival's is drawn."""
VERSION_S = 0.6
"""More virtual seconds than a version takes."""


class Crowd(agentrl.Environment):
    """An answer is right if it differs from that of a recent episode: the best answer is the one that the policy gives
    least, and becomes wrong as the policy learns it. The best policy gives each equally often."""

    seats = ("solver",)
    recent: ClassVar[dict[str, deque[str]]]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver, recent = ctx.agent("solver"), Crowd.recent[ctx.task.id]
        reply = await solver.act(agentrl.user(f"[{ctx.task.id} 0]"))
        rival = ctx.rng.choice(recent) if recent else ""
        recent.append(reply.text)
        solver.reward(float(reply.text != rival))


def share_of_best(logits: Logits) -> float:
    """The probability that two answers of a policy differ, as a share of the largest possible one."""
    same = (np.exp(log_softmax(logits[:, 0])) ** 2).sum(axis=-1).mean()
    return float((1 - same) / (1 - 1 / CHOICES))


class LossTrainer(TabularTrainer):
    """Learns by a loss of agentrl.

    Args:
        section: the loss and the warm-up.
    """

    def __init__(self, *arguments: Any, section: TrainerConfig, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._loss, self._warmup_steps = make_loss(section), section.optimizer.warmup_steps
        self._trained: list[TrainingSample] = []
        self.lags: list[float] = []
        """Mean lag of the tokens of each step."""

    reward_of = staticmethod(share_of_best)

    def _samples(self, unit: Unit) -> Sequence[TrainingSample]:
        samples = super()._samples(unit)
        self._trained += samples
        return samples

    def _ascent(self, rows: Sequence[Row]) -> Logits:
        samples, self._trained = self._trained, []
        columns = TokenColumns.of(samples, PolicyVersion(POLICY, 0, self._updates), group_size=GROUP)
        self.lags.append(float(columns.lags.mean()))
        table = torch.tensor(self._logits, requires_grad=True)
        logprobs = torch.stack(
            [
                # nothing but the end follows a choice
                table.new_zeros(())
                if sample.token_ids[at] == STOP_TOKEN
                else table[state_of(sample.token_ids[:at])].log_softmax(-1)[int(chr(sample.token_ids[at]))]
                for sample, positions in zip(samples, trained_positions(samples), strict=True)
                for at in positions
            ]
        )
        leaf = logprobs.detach().float().requires_grad_()
        batch = LossBatch(columns, logprobs=leaf, entropies=torch.zeros_like(leaf).requires_grad_())
        gradients = self._loss.evaluate(batch, torch.full_like(leaf.detach(), 1 / len(rows)))
        (gradient,) = torch.autograd.grad(logprobs @ gradients.by_logprob.double(), table)
        ascent: Logits = -gradient.numpy()
        return ascent

    def _update(self, rows: Sequence[Row]) -> None:
        before = self._logits
        super()._update(rows)
        warmth = min(1.0, self._updates / self._warmup_steps) if self._warmup_steps else 1.0
        self._logits = before + warmth * (self._logits - before)


class Settled(NamedTuple):
    """What the second half of a run's versions earned, as shares of the best possible reward."""

    mean: float
    worst: float
    mean_lag: float


def settle(section: TrainerConfig, *, staleness: int, rate: float, seed: int, versions: int) -> Settled:
    """Play a run of so many versions."""
    Crowd.recent = defaultdict(lambda: deque(maxlen=RECENT))
    plan = Plan(rate=rate, staleness=staleness, tool_s=0.0, limit_s=VERSION_S * versions)
    trainer, _ = play(plan, seed, environment=Crowd, trainer_class=LossTrainer, section=section)
    assert isinstance(trainer, LossTrainer)
    rewards = [reward for _, reward in trainer.curve[: versions + 1]]
    assert len(rewards) == versions + 1, f"{len(rewards)} versions"
    second_half = rewards[versions // 2 :]
    return Settled(float(np.mean(second_half)), min(second_half), float(np.mean(trainer.lags)))
