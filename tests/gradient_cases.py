"""Two policies' gradients of one step, computed in several ways that must not matter."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.config.run import PolicyConfig
from agentrl.core.records import PolicyVersion, TrainBatch, Trajectory, Unit
from agentrl.core.tokens import TrajectoryRow
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config

POLICIES = ("proposer", "solver")


@dataclass
class Rank:
    """One rank of several, each in a thread of its own, which leaves sums to the caller."""

    rank: int
    size: int
    meet: threading.Barrier
    messages: list[bytes]
    is_started: bool = False

    def sum(self, tensors: Sequence[Tensor]) -> None:
        """Gradients are added up by hand."""

    def context(self, size: int) -> None:
        """No ranks divide the tokens of a micro-batch."""

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes; at the start, where ranks load one after another, as if all said what this one says."""
        if not self.is_started:
            return [data] * self.size
        self.messages[self.rank] = data
        self.meet.wait()
        every = list(self.messages)
        self.meet.wait()
        return every


def split(row: TrajectoryRow) -> tuple[TrajectoryRow, TrajectoryRow]:
    """The row as two, as if its context had been rewritten in between: each token is trained in one of them."""
    early = np.arange(len(row.token_ids)) < (np.flatnonzero(row.loss_mask)[0] + len(row.token_ids)) // 2
    return tuple(row.with_column("loss_mask", row.loss_mask & part) for part in (early, ~early))


class TwoPolicies:
    """A proposer with few units and a solver with many, adapters on one base, after a step of both.

    Args:
        model: a Hugging Face directory.
        directory: for what trainers write.
        seed: of the episodes.
    """

    def __init__(self, model: Path, directory: Path, seed: int) -> None:
        self._model, self._directory = model, directory
        self._episodes = {
            policy: Episodes(make_rows(seed + at, count), policy=policy, seed=seed)
            for at, (policy, count) in enumerate(zip(POLICIES, (3, 24), strict=True))
        }
        self._start = self._trainer()
        self._start.start()
        for policy in POLICIES:  # else nothing would flow into half of an adapter, which begins at 0
            self._start.forward_backward(self._batch(policy, step=1))
            self._start.optim_step(policy, 1)
        self._checkpoint = directory / "checkpoint"
        self._checkpoint.mkdir(parents=True)
        self._start.save(self._checkpoint)

    def whole(self) -> dict[str, Tensor]:
        """The reference: each policy's batch at once, in the trainer that took the step before."""
        for policy in POLICIES:
            self._start.forward_backward(self._batch(policy))
        return self._gradients(self._start)

    def terms(self) -> dict[str, float]:
        """The sum over a policy's units of the norms of their gradients."""
        trainer = self._trainer()
        trainer.start(self._checkpoint)
        sums = dict.fromkeys(POLICIES, 0.0)
        for policy in POLICIES:
            batch = self._batch(policy)
            for unit in batch.units:
                trainer.forward_backward(replace(batch, units=(unit,)))
                sums[policy] += float(self._gradients(trainer)[policy].norm())
                trainer.discard(policy)
        return sums

    def ways(self) -> dict[str, Callable[[], dict[str, Tensor]]]:
        """By name, each in a trainer of its own that resumes from the checkpoint."""
        return {
            "resumed": self._resumed,
            "packed in small pieces": lambda: self._resumed(micro_batch_tokens=30),
            "rows split": lambda: self._resumed(divide=True),
            "policies in turns, a few units each": self._in_turns,
            "distributed over three ranks": self._distributed,
        }

    def _resumed(self, *, micro_batch_tokens: int = 8192, divide: bool = False) -> dict[str, Tensor]:
        trainer = self._trainer(micro_batch_tokens=micro_batch_tokens, divide=divide)
        trainer.start(self._checkpoint)
        for policy in POLICIES:
            trainer.forward_backward(self._batch(policy))
        return self._gradients(trainer)

    def _in_turns(self) -> dict[str, Tensor]:
        trainer = self._trainer()
        trainer.start(self._checkpoint)
        for at in range(0, 24, 2):
            for policy in reversed(POLICIES):
                batch = self._batch(policy)
                if units := batch.units[at : at + 2]:
                    trainer.forward_backward(replace(batch, units=units))
        return self._gradients(trainer)

    def _distributed(self) -> dict[str, Tensor]:
        meet, messages = threading.Barrier(3, timeout=600), [b""] * 3
        ranks = [Rank(rank, 3, meet, messages) for rank in range(3)]
        trainers = [self._trainer(ranks=rank) for rank in ranks]
        for rank, trainer in zip(ranks, trainers, strict=True):  # not at once: transformers loads by global state
            trainer.start(self._checkpoint)
            rank.is_started = True

        def gradients(trainer: PolicyTrainer) -> dict[str, Tensor]:
            for policy in POLICIES:
                trainer.forward_backward(self._batch(policy))
            return self._gradients(trainer)

        with ThreadPoolExecutor(3) as threads:
            parts = list(threads.map(gradients, trainers))
        return {policy: torch.stack([part[policy] for part in parts]).sum(0) for policy in POLICIES}

    def _trainer(
        self, *, micro_batch_tokens: int = 8192, divide: bool = False, ranks: Rank | None = None
    ) -> PolicyTrainer:
        policies = {policy: PolicyConfig(lora=LORA, learning_rate=1e-2) for policy in POLICIES}
        config = run_config(self._model, policies=policies, micro_batch_tokens=micro_batch_tokens)

        def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
            found = [self._episodes[unit.policy].trajectories[int(unit.episode_id[1:])] for unit in units]
            if divide:
                found = [replace(item, rows=tuple(part for row in item.rows for part in split(row))) for item in found]
            return [(item,) for item in found]

        return PolicyTrainer(config.trainer_plan, self._directory, ranks=ranks, read=read)

    def _batch(self, policy: str, *, step: int = 2) -> TrainBatch:
        return self._episodes[policy].batch(step)

    def _gradients(self, trainer: PolicyTrainer) -> dict[str, Tensor]:
        return {
            policy: torch.cat([part.flatten().clone() for part in trainer._learner(policy).gradients()])
            for policy in POLICIES
        }


def update_beside(model: Path, directory: Path, seed: int, *, beside: bool) -> dict[str, bytes]:
    """The solver's published files after two steps on fixed data, a proposer stepping before and between, or not there.

    Each policy's batches are the same either way; what is compared is all that an engine would load.
    """
    policies = POLICIES if beside else ("solver",)
    episodes = {policy: Episodes(make_rows(seed + len(policy), 12), policy=policy, seed=seed) for policy in policies}
    config = run_config(model, policies={policy: PolicyConfig(lora=LORA, learning_rate=1e-2) for policy in policies})

    def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
        return [(episodes[unit.policy].trajectories[int(unit.episode_id[1:])],) for unit in units]

    trainer = PolicyTrainer(config.trainer_plan, directory, read=read)
    trainer.start()
    for step in (1, 2):
        batch = episodes["solver"].batch(step)
        if beside:
            trainer.forward_backward(episodes["proposer"].batch(step))
        trainer.forward_backward(replace(batch, units=batch.units[:5]))
        if beside:  # in the middle of the solver's step
            trainer.optim_step("proposer", step)
            trainer.publish("proposer", PolicyVersion("proposer", 0, step))
        trainer.forward_backward(batch)
        trainer.optim_step("solver", step)
        weights = trainer.publish("solver", PolicyVersion("solver", 0, step))
    return {file.name: file.read_bytes() for file in Path(weights.path).iterdir()}


class Error(NamedTuple):
    """How far a gradient is from that of the whole step, the worse of both policies."""

    of_terms: float
    """In parts of sum |g_u| over the units: the size of what was added up. Rounding is in proportion to this."""
    of_sum: float
    """In parts of |sum g_u|, which is smaller where units pull in different directions."""


def worst_error(model: Path, directory: Path, seed: int) -> dict[str, Error]:
    """By way, in float32."""
    two = TwoPolicies(model, directory, seed)
    expected, terms = two.whole(), two.terms()
    errors = {}
    for name, way in two.ways().items():
        found = way()
        off = {policy: float((found[policy] - expected[policy]).norm()) for policy in POLICIES}
        errors[name] = Error(
            max(off[policy] / terms[policy] for policy in POLICIES),
            max(off[policy] / float(expected[policy].norm()) for policy in POLICIES),
        )
    return errors
