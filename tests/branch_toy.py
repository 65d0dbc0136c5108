"""Exact gradients of rules for branches, by enumeration, on a toy: binary decisions under a tabular policy.

`Toy` has the probabilities, rewards and scores of all episodes. Each rule returns the expectation of its gradient;
`ratio` compares it with the exact one, which it equals if the rule is unbiased.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from agentrl.core.records import AgentTurns, ForkPoint
from agentrl.credit.advantages.group_baselines import leave_one_out
from agentrl.credit.group import Advantage
from agentrl.credit.trees import AgentKey, tree_credits

Path = tuple[int, ...]
Point = tuple[int, int]
"""Number of decisions before a call of `ctx.branch`, and its number of branches."""


class Toy:
    """Episodes of `length` binary decisions with a tabular policy and random rewards of 0 and 1."""

    def __init__(self, length: int = 4, seed: int = 1) -> None:
        rng = np.random.default_rng(seed)
        self.length = length
        states = (path for t in range(length) for path in itertools.product((0, 1), repeat=t))
        self._number = {path: index for index, path in enumerate(states)}
        self._logits = rng.normal(0, 0.7, len(self._number))
        self.paths: list[Path] = list(itertools.product((0, 1), repeat=length))
        self.reward = {path: float(rng.random() < 0.35) for path in self.paths}
        self.mean = sum(self.probability(path) * self.reward[path] for path in self.paths)
        self.exact = sum(
            (self.probability(path) * self.reward[path] * self.score(path) for path in self.paths), self.zero()
        )

    def zero(self) -> np.ndarray:
        return np.zeros(len(self._number))

    def _of_one(self, state: Path) -> float:
        return 1 / (1 + math.exp(-self._logits[self._number[state]]))

    def probability(self, path: Path, start: int = 0) -> float:
        """Probability of the decisions from `start` on."""
        each = (self._of_one(path[:t]) if path[t] else 1 - self._of_one(path[:t]) for t in range(start, self.length))
        return math.prod(each)

    def score(self, path: Path, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Gradient of the log-probability of some decisions."""
        gradient = self.zero()
        for t in range(start, self.length if stop is None else stop):
            gradient[self._number[path[:t]]] += path[t] - self._of_one(path[:t])
        return gradient

    def continuations(self, state: Path) -> list[Path]:
        return [path for path in self.paths if path[: len(state)] == state]

    def ratio(self, gradient: np.ndarray) -> float:
        """⟨g, ∇J⟩ / ⟨∇J, ∇J⟩: 1 if g is unbiased."""
        return float(gradient @ self.exact / (self.exact @ self.exact))

    def error(self, gradient: np.ndarray) -> float:
        """Largest difference to the exact gradient."""
        return float(np.abs(gradient - self.exact).max())

    # --- trees, with the credit of the library ------------------------------------------------------------------------

    def trees(self, points: Callable[[Path], Sequence[Point]]) -> list[tuple[float, Path, list[tuple[Point, Path]]]]:
        """Every tree with its probability: the main path, and each branch with its point.

        `points(main)` may look at the decisions before each point alone, or the rule is one of hindsight.
        """
        found = []
        for main in self.paths:
            starts = [point for point in points(main) for _ in range(point[1])]
            choices = [self.continuations(main[: point[0]]) for point in starts]
            for branches in itertools.product(*choices):
                pairs = list(zip(starts, branches, strict=True))
                probability = self.probability(main) * math.prod(self.probability(b, p[0]) for p, b in pairs)
                found.append((probability, main, pairs))
        return found

    def expectation(
        self, points: Callable[[Path], Sequence[Point]], trees: int = 1, *, resample_weight: float = 0.0
    ) -> np.ndarray:
        """Expected gradient of a group of trees, divided by their number, with the credit of `tree_credits`. A single
        tree is compared with the mean reward. With `resample_weight` the branches are those of `ctx.resample`."""
        total = self.zero()
        every = self.trees(points)
        for group in itertools.product(every, repeat=trees):
            total += math.prod(tree[0] for tree in group) * self._gradient(group, resample_weight) / trees
        return total

    def pivots(self, points: Callable[[Path], Sequence[Point]], weight: float = 1.0) -> np.ndarray:
        """∇J + λ Σ d(s) ∇V(s), with weight λ and d(s) the probability that the decision after s is sampled again."""
        total = self.exact.copy()
        for path in self.paths:
            for start, _ in points(path):
                for other in self.continuations(path[:start]):
                    chosen = self.probability(path) * self.probability(other, start)
                    total += weight * chosen * self.reward[other] * self.score(other, start)
        return total

    def _gradient(
        self, group: Sequence[tuple[float, Path, list[tuple[Point, Path]]]], resample_weight: float
    ) -> np.ndarray:
        agents: list[AgentKey] = []
        branches: dict[str, ForkPoint] = {}
        whole: list[tuple[Path, int]] = []
        for number, (_, main, pairs) in enumerate(group):
            agents.append((f"e{number}", "s", 0))
            whole.append((main, 0))
            for index, ((start, _), path) in enumerate(pairs, start=1):
                name = f"e{number}~0.r#{start}.b{index}"
                branches[name] = ForkPoint(
                    journal=".",
                    partition="",
                    episode_id=f"e{number}",
                    attempt=0,
                    call_id=f"r#{start}",
                    branch=index,
                    turns=(AgentTurns("s", 0, start),),
                    resample_weight=resample_weight,
                )
                agents.append((name, "s", 0))
                whole.append((path, start))
        rewards = [self.reward[path] for path, _ in whole]
        gradient = self.zero()
        for (path, first), credit in zip(whole, tree_credits(self._advantage, rewards, agents, branches), strict=True):
            turns = credit.by_turn or (credit.value,)
            for t in range(first, self.length):
                gradient += turns[min(t, len(turns) - 1)] * self.score(path, t, t + 1)
        return gradient

    def _advantage(self, rewards: Sequence[float], episodes: Sequence[Hashable]) -> list[Advantage]:
        """Leave-one-out, or the reward minus the mean of all for an episode alone."""
        if len(set(episodes)) > 1:
            return leave_one_out(rewards, episodes)
        return [Advantage(reward - self.mean, self.mean) for reward in rewards]

    def roulette(self, survival: Callable[[Path], float], at: int) -> np.ndarray:
        """Expected gradient with `ctx.roulette` after `at` decisions: survivors' rewards weigh 1/survival, the others
        have reward 0."""
        total = self.zero()
        for path in self.paths:
            q = survival(path[:at])
            total += self.probability(path) * q * (self.reward[path] / q - self.mean) * self.score(path)
            total += self.probability(path) * (1 - q) * (0.0 - self.mean) * self.score(path, 0, at)
        return total

    # --- rules with a known bias --------------------------------------------------------------------------------------

    def leaves_of_weight_one(self, points: Callable[[Path], Sequence[Point]]) -> np.ndarray:
        """Branches without weights: every leaf counts as a whole episode behind the branch point."""
        total = self.zero()
        for probability, main, pairs in self.trees(points):
            leaves = [main, *(path for _, path in pairs)]
            at = pairs[0][0][0] if pairs else self.length
            rewards = [self.reward[path] for path in leaves]
            gradient = (sum(rewards) / len(leaves) - self.mean) * self.score(main, 0, at)
            for path, credit in zip(leaves, self._advantage(rewards, range(len(leaves))), strict=True):
                gradient = gradient + credit.value * self.score(path, at)
            total += probability * gradient
        return total

    def resampled(self, points: Callable[[Path], Sequence[Point]], *, with_main: bool) -> np.ndarray:
        """DEEP-GRPO (arXiv:2602.14169): the branches of a failed episode, compared with the mean of theirs."""
        total = self.zero()
        for probability, main, pairs in self.trees(points):
            gradient = (self.reward[main] - self.mean) * self.score(main)
            pool = [self.reward[path] for _, path in pairs] + [self.reward[main]] * with_main
            for (start, _), path in pairs:
                advantage = self.reward[path] - sum(pool) / len(pool)
                gradient = gradient + advantage / len(pairs) * self.score(path, start)
            total += probability * gradient
        return total

    def stopped(self, survival: Callable[[Path], float], at: int, *, drops: bool) -> np.ndarray:
        """Stopping without weights: with reward 0, or without a reward, so that the episode is dropped."""
        total = self.zero()
        for path in self.paths:
            q = survival(path[:at])
            total += self.probability(path) * q * (self.reward[path] - self.mean) * self.score(path)
            if not drops:
                total += self.probability(path) * (1 - q) * (0.0 - self.mean) * self.score(path, 0, at)
        return total


def always(_: Path) -> list[Point]:
    return [(2, 2)]


def by_state(path: Path) -> list[Point]:
    """Two branches after two decisions, chosen by the state there."""
    return [(2, 2)] if path[:2] in ((0, 1), (1, 1)) else []


def on_failure(toy: Toy) -> Callable[[Path], list[Point]]:
    """Two branches after two decisions of episodes that failed: hindsight."""
    return lambda path: [(2, 2)] if toy.reward[path] < 0.5 else []


def first_step(path: Path) -> float:
    """Probability of survival by the first decision."""
    return 0.25 if path[0] == 0 else 1.0
