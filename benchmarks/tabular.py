"""Whole runs that learn in seconds: a softmax table over letters instead of a model, trained in virtual time.

The loop, credit and journal are those of real runs. The policy has one row of logits for each observation, and a step
is REINFORCE with the credits of its units. The expected reward of a table is exact, so learning curves have no
evaluation noise.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

import agentrl
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, StepReport, Task
from agentrl.journal.entries import TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.sim.small_run import SmallRun

LETTERS = "abcd"
KINDS = 4
"""Number of tasks."""
TURNS = 6
LEARNING_RATE = 4.0
Probabilities = Callable[[str], np.ndarray]
"""Maps an observation to the probabilities of the letters."""


class Rules(ABC):
    """A task of up to `TURNS` letters. `secrets[kind]` has the right letter of each turn."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.secrets = ["".join(draw.choice(LETTERS) for _ in range(TURNS)) for _ in range(KINDS)]

    def observation(self, kind: int, turn: int) -> str:
        """Return what the policy sees before a turn."""
        return f"<{kind}.{turn}>"

    def right(self, kind: int, turn: int, probabilities: Probabilities) -> float:
        """Return the probability that the letter of a turn is right."""
        return float(probabilities(self.observation(kind, turn))[LETTERS.index(self.secrets[kind][turn])])

    def ended(self, kind: int, said: str) -> bool:
        """Whether the episode has ended."""
        return len(said) == TURNS

    @abstractmethod
    def reward(self, kind: int, said: str) -> float:
        """Return the reward of an ended episode."""

    @abstractmethod
    def expected(self, kind: int, probabilities: Probabilities) -> float:
        """Return the expected reward."""


class LastTurn(Rules):
    """The last letter decides."""

    def reward(self, kind: int, said: str) -> float:
        return float(said[-1] == self.secrets[kind][-1])

    def expected(self, kind: int, probabilities: Probabilities) -> float:
        return self.right(kind, TURNS - 1, probabilities)


class FirstTurn(Rules):
    """The first letter decides."""

    def reward(self, kind: int, said: str) -> float:
        return float(said[0] == self.secrets[kind][0])

    def expected(self, kind: int, probabilities: Probabilities) -> float:
        return self.right(kind, 0, probabilities)


class EveryTurn(Rules):
    """The reward is the share of right letters."""

    def reward(self, kind: int, said: str) -> float:
        return sum(map(str.__eq__, said, self.secrets[kind])) / TURNS

    def expected(self, kind: int, probabilities: Probabilities) -> float:
        return sum(self.right(kind, turn, probabilities) for turn in range(TURNS)) / TURNS


class AnyTurn(Rules):
    """Up to three guesses of one letter."""

    guesses = 3

    def ended(self, kind: int, said: str) -> bool:
        return len(said) == self.guesses or self.secrets[kind][0] in said

    def reward(self, kind: int, said: str) -> float:
        return float(self.secrets[kind][0] in said)

    def expected(self, kind: int, probabilities: Probabilities) -> float:
        letter = LETTERS.index(self.secrets[kind][0])
        wrong = (1 - float(probabilities(self.observation(kind, turn))[letter]) for turn in range(self.guesses))
        return 1 - math.prod(wrong)


class Spell(agentrl.Environment):
    """Says letters by the rules."""

    seats = ("guesser",)
    rules: ClassVar[Rules]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, kind, said = ctx.agent("guesser"), ctx.task.data["kind"], ""
        while not self.rules.ended(kind, said):
            turn = await agent.act(agentrl.user(self.rules.observation(kind, len(said))))
            said += turn.text[:1]
        agent.reward(self.rules.reward(kind, said))


TASKS = [Task(id=f"kind-{kind}", data={"kind": kind}) for kind in range(KINDS)]


@dataclass(kw_only=True)
class TabularRun:
    """A run that learns a table."""

    rules: Rules
    config: agentrl.RunConfig
    table: dict[str, np.ndarray] = field(default_factory=dict)
    """Logits of each observation."""
    until: float = 1.0
    """Expected reward at which the run stops."""
    sampled: int = 0
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Sampled tokens of the trained units, and the expected reward, after each step."""
    _tables: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    """Table of each version, by step."""

    async def play(self, environment: type[Spell] = Spell, **parts: Any) -> SmallRun:
        """Train; `parts` are those of `SmallRun`."""
        environment.rules = self.rules
        first = max((version.step for version in parts.get("resumed_at", {}).values()), default=0)
        self._tables[first] = dict(self.table)
        self.curve.append((0, self.value()))
        run = SmallRun(
            environment=environment,
            script=self._sample,
            config=self.config,
            engine_options={"seconds_per_token": 0.02},
            tasks=list(TASKS),
            **parts,
        )

        def during(orchestrator: Any) -> None:
            apply = run.trainer.optim_step

            async def learn(policy: str, step_id: int) -> StepReport:
                report = await apply(policy, step_id)
                self._learn(run, step_id)
                if self.value() >= self.until:
                    asyncio.get_running_loop().call_soon(orchestrator.stop)
                return report

            run.trainer.optim_step = learn  # type: ignore[method-assign]

        run.during = during
        await run.run()
        return run

    @property
    def _step_size(self) -> int:
        """Divisor of the gradient: constant, because a step with fewer units must not weigh each of them more."""
        (policy,) = self.config.policies.values()
        return policy.step_size

    def value(self) -> float:
        """Return the expected reward over all tasks."""
        return sum(self.rules.expected(kind, self._probabilities) for kind in range(KINDS)) / KINDS

    def _probabilities(self, observation: str) -> np.ndarray:
        return _softmax(self.table.get(observation))

    def _sample(self, request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        text = bytes(token for token in request.token_ids.tolist() if token < 256).decode()
        observation = re.findall(r"<\d+\.\d+>", text)[-1]
        weights = _softmax(self._tables[version.step].get(observation)).tolist()
        return [*random.Random(request.seed).choices(LETTERS, weights)[0].encode(), STOP_TOKEN]

    def _learn(self, run: SmallRun, step_id: int) -> None:
        """Take a step of REINFORCE."""
        batches = [batch for batch in run.trainer.batches if batch.step_id == step_id]
        units = [unit for batch in batches for unit in batch.units]
        changes: dict[str, np.ndarray] = {}
        for unit in units:
            entries = run.journal.turn_log("0").read(unit.episode_id, unit.attempt)
            turns = [body for entry in entries if isinstance(body := entry.decode(), TurnEntry)]
            (credit,) = unit.credits
            for turn in turns:
                self.sampled += len(turn.token_ids) // 4
                by_turn = credit.turn_advantages or (credit.advantage,)
                advantage = by_turn[min(turn.turn, len(by_turn) - 1)]
                observation = re.findall(r"<\d+\.\d+>", str(turn.messages))[-1]
                score = -self._probabilities(observation)
                score[LETTERS.index(turn.text[0])] += 1
                change = changes.setdefault(observation, np.zeros(len(LETTERS)))
                change += advantage * score
        for observation, change in changes.items():
            before = self.table.get(observation, np.zeros(len(LETTERS)))
            self.table[observation] = before + LEARNING_RATE * change / self._step_size
        self._tables[step_id] = dict(self.table)
        self.curve.append((self.sampled, self.value()))


def tokens_to(curve: Sequence[tuple[int, float]], threshold: float) -> float | None:
    """Return the sampled tokens at which a curve first reaches a threshold, interpolated; None if it does not."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if low < threshold <= high:
            return before + (after - before) * (threshold - low) / (high - low)
    return None


def _softmax(logits: np.ndarray | None) -> np.ndarray:
    if logits is None:
        return np.full(len(LETTERS), 1 / len(LETTERS))
    weights: np.ndarray = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def median_at_worse_reward(ratios: Sequence[tuple[float, ...]]) -> float:
    """Return the median over the seeds at the reward where it is larger; `ratios` has a row for each seed."""
    return float(max(statistics.median(at_reward) for at_reward in zip(*ratios, strict=True)))
