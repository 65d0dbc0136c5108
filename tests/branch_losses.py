"""What branches change in the expected gradient of a loss off policy, by enumeration of all outcomes.

Episodes of two decisions, each a turn, are sampled by mu and trained by pi, with the credit of `tree_credits` and the
columns of the trainer. A loss that branches leave unchanged has the same expected gradient with and without them.
Rewards have one sign: losses that clip by the sign of the advantage are otherwise no function of its mean.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

import agentrl
from agentrl.app.plan import resolve
from agentrl.config.run import RunConfig
from agentrl.core.custom_functions import GROUPINGS
from agentrl.core.errors import ConfigError, LossError
from agentrl.core.records import AgentTurns, ForkPoint, PolicyVersion, VersionSpan
from agentrl.core.tokens import TrainingSample
from agentrl.credit.group_baselines import no_baseline
from agentrl.credit.trees import tree_credits
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.losses import Loss
from agentrl.learn.step_columns import TokenColumns
from tests.loss_cases import DECLARATIONS, loss_named

Decision = tuple[int, ...]
"""A state, as the decisions before it, or the decisions of an episode."""
STATES: tuple[Decision, ...] = ((), (0,), (1,))


class Step(NamedTuple):
    """One outcome of the trees of a step."""

    chance: float
    columns: TokenColumns
    states: list[int]
    """Index in `STATES` of each token."""
    actions: list[int]


@dataclass(frozen=True, eq=False)
class Decisions:
    """A program of two decisions under the sampling policy mu and the trained one pi."""

    mu: Mapping[Decision, float]
    """Probability of decision 1, by state."""
    pi: Mapping[Decision, float]
    rewards: Mapping[Decision, float]

    def true_gradient(self) -> np.ndarray:
        """The gradient of the expected reward under pi by the logits of `STATES`."""
        gradient = np.zeros(3)
        for path in itertools.product((0, 1), repeat=2):
            chance = math.prod(_chance(self.pi, path[:at], path[at]) for at in range(2))
            for at in range(2):
                gradient[STATES.index(path[:at])] += chance * self.rewards[path] * (path[at] - self.pi[path[:at]])
        return gradient

    def expected_gradient(self, loss: Loss, branches: int, *, trees: int = 1) -> np.ndarray:
        """The expected gradient per tree of a step, with branches after the first decision."""
        total = np.zeros(3)
        for step in self.steps(branches, trees):
            pi = torch.tensor([self.pi[STATES[at]] for at in step.states], dtype=torch.float64)
            action = torch.tensor(step.actions, dtype=torch.float64)
            batch = LossBatch(
                step.columns,
                logprobs=torch.where(action > 0, pi, 1 - pi).log().requires_grad_(),
                entropies=torch.zeros_like(pi).requires_grad_(),
                reference_logprobs=torch.full_like(pi, math.log(0.5)),
                reference_kl=(pi * (2 * pi).log() + (1 - pi) * (2 * (1 - pi)).log()).requires_grad_(),
            )
            gradients = loss.evaluate(batch, torch.ones_like(pi))
            by_logit = (action - pi) * gradients.by_logprob
            by_logit += pi * (1 - pi) * (pi / (1 - pi)).log() * gradients.by_reference_kl
            np.add.at(total, step.states, -step.chance * by_logit.numpy())
        return total / trees

    @cache  # noqa: B019 - as many objects as constants below
    def steps(self, branches: int, trees: int) -> list[Step]:
        """Return every outcome of a step of some trees."""
        every = []
        for first, *seconds in itertools.product((0, 1), repeat=2 + branches):
            chances = [_chance(self.mu, (), first), *(_chance(self.mu, (first,), second) for second in seconds)]
            every.append((math.prod(chances), [(first, second) for second in seconds]))
        return [
            self._step(math.prod(chance for chance, _ in step), [paths for _, paths in step])
            for step in itertools.product(every, repeat=trees)
        ]

    def _step(self, chance: float, trees: Sequence[Sequence[Decision]]) -> Step:
        points: dict[str, ForkPoint] = {}
        paths: dict[str, Decision] = {}
        for number, tree in enumerate(trees):
            paths[f"e{number}"] = tree[0]
            for branch, path in enumerate(tree[1:], start=1):
                name = f"e{number}~0.r#1.b{branch}"
                paths[name] = path
                points[name] = ForkPoint(
                    journal=".", partition="", episode_id=f"e{number}", attempt=0, call_id="r#1", branch=branch,
                    turns=(AgentTurns("s", 0, 1),),
                )  # fmt: skip
        agents = [(name, "s", 0) for name in paths]
        credits = tree_credits(no_baseline, [self.rewards[path] for path in paths.values()], agents, points)
        samples, states, actions = [], [], []
        for (name, path), credit in zip(paths.items(), credits, strict=True):
            turns = credit.by_turn or (credit.value,)
            mask = np.array([False, name not in points, True])
            behavior = [0.0, *(math.log(_chance(self.mu, path[:at], path[at])) for at in range(2))]
            samples.append(
                TrainingSample(
                    token_ids=np.array([2, *path], np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, behavior, 0.0).astype(np.float32),
                    advantages=np.where(mask, [0.0, turns[0], turns[-1]], 0.0).astype(np.float32),
                    spans=(VersionSpan(1, 3, PolicyVersion("p", 0, 0)),),
                    episode_id=name,
                    seat="s",
                    turn_index=np.array([-1, 0, 1], np.int32),
                )
            )
            for at in range(int(name in points), 2):
                states.append(STATES.index(path[:at]))
                actions.append(path[at])
        columns = TokenColumns.of(samples, PolicyVersion("p", 0, 1), group_size=len(trees))
        return Step(chance, columns, states, actions)


def _chance(policy: Mapping[Decision, float], state: Decision, action: int) -> float:
    return policy[state] if action else 1 - policy[state]


REWARDS: dict[Decision, float] = {(0, 0): 0.3, (0, 1): 0.3, (1, 0): 0.0, (1, 1): 1.0}
MU: dict[Decision, float] = {(): 0.5, (0,): 0.5, (1,): 0.1}
SECOND_MOVED = Decisions(MU, MU | {(1,): 0.45}, REWARDS)
"""Only the second decision was learned since: after action 1 it now succeeds, so the first is to be learned too."""
BOTH_MOVED = Decisions(MU | {(): 0.3, (0,): 0.7}, MU | {(1,): 0.45}, REWARDS)
PENALTIES = Decisions(BOTH_MOVED.mu, BOTH_MOVED.pi, {path: -1 - reward for path, reward in REWARDS.items()})

WIDE: dict[str, dict[str, float]] = {
    "geometric_mask": {"low": 0.7, "high": 1.5},
    "off_policy_mask": {"threshold": 0.1, "clip_low": 1.0, "clip_high": 99.0, "dual_clip": 99.0},
    "m2po": {"threshold": 1.0, "clip_low": 1.0, "clip_high": 99.0, "dual_clip": 99.0},
    "clip_cov": {"low": -99.0},
}
"""Options under which the grouping of a loss matters for as few tokens as here."""


class Combination(NamedTuple):
    """A loss with its options."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return " ".join([self.name, *(str(value) for value in self.options.values() if value in GROUPINGS)])

    @property
    def loss(self) -> Loss:
        return loss_named(self.name, **self.options)

    def change(self) -> float:
        """Largest change that branches make in the expected gradient off policy."""
        loss = self.loss
        trees, counts = (2, [1]) if loss.grouping == "group" else (1, [1, 2])
        changes = [
            decisions.expected_gradient(loss, count, trees=trees) - decisions.expected_gradient(loss, 0, trees=trees)
            for decisions in (BOTH_MOVED, PENALTIES)
            for count in counts
        ]
        return float(np.abs(changes).max())

    def refusal(self) -> str:
        """What a run with branches says before it begins; empty if it begins."""
        config = RunConfig.model_validate({
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "policies": {"p": {"step_size": 8, "max_staleness": 1, "lora": {"rank": 2}}},
            "credit": {"group_size": 4},
            "trainer": {"loss": {"name": self.name, **self.options}},
            "max_in_flight": 64,
        })  # fmt: skip
        try:
            resolve(config, Branching)
        except ConfigError as error:
            return str(error)
        return ""


class Branching(agentrl.Environment):
    """Never played."""

    seats = ("s",)
    branches = 1


def combinations() -> list[Combination]:
    """Return every named loss with every grouping that its options can select."""
    return [
        Combination(name, {**WIDE.get(name, {}), **options})
        for name, declaration in DECLARATIONS.items()
        for options in _groupings(name, declaration.groups_option)
    ]


def _groupings(name: str, option: str) -> Iterator[dict[str, str]]:
    if not option:
        yield {}
    for grouping in GROUPINGS if option else ():
        try:
            BOTH_MOVED.expected_gradient(loss_named(name, **{option: grouping}), 0)
        except LossError:
            continue  # the loss refuses this grouping
        yield {option: grouping}
