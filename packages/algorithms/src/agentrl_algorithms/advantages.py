"""Advantage estimators from papers: functions of a `Group`, one advantage per reward, or a list with one per turn.

docs/reference/algorithms.md says when to use which.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence

from agentrl import Group, advantage
from agentrl.parts import GroupTooSmallError


@advantage
def max_rl(group: Group) -> list[float]:
    """A_i = (R_i - mean(R)) / mean(R), for rewards of at least 0; 0 if all are equal (MaxRL, arXiv:2602.02710).

    Rarely solved tasks weigh more: for rewards of 0 and 1, the expectation approaches the gradient of log p, p being
    the probability of success, whereas GRPO's approaches the gradient of p.

    Example:
        >>> max_rl(Group(rewards=(1.0, 0.0, 0.0, 0.0), episodes=("a", "b", "c", "d")))
        [3.0, -1.0, -1.0, -1.0]
    """
    if min(group.rewards) < 0:
        raise ValueError(
            f"it divides by the mean reward, so no reward may be negative, but one is {min(group.rewards)}"
        )
    return [(r - group.mean) / group.mean for r in group.rewards] if group.has_signal else [0.0] * len(group.rewards)


@advantage
def best_of_n(group: Group) -> list[float]:
    """A_i = n / m for the m of n agents with the largest reward, else 0; 0 if all are equal (RAFT, arXiv:2304.06767).

    With the loss `reinforce`, this is supervised training on the best episodes of each group, with equal weight per
    group.

    Example:
        >>> best_of_n(Group(rewards=(1.0, 0.0, 1.0, 0.5), episodes=("a", "b", "c", "d")))
        [2.0, 0.0, 2.0, 0.0]
    """
    if not group.has_signal:
        return [0.0] * len(group.rewards)
    best = max(group.rewards)
    share = len(group.rewards) / sum(reward == best for reward in group.rewards)
    return [share if reward == best else 0.0 for reward in group.rewards]


@advantage
def pass_at_k(group: Group, *, k: int = 4, threshold: float = 0.5) -> list[float]:
    """A_i = k (pass@k of i and k - 1 others - pass@k of k others); a reward above `threshold` passes (PKPO,
    arXiv:2505.15201).

    The others are agents of k different episodes than that of i, and pass@k is the share of all such choices in which
    one passes: an unbiased estimate for k independent attempts. With one agent per episode it is 1 - C(n - c, k) /
    C(n, k), c of n passed (arXiv:2107.03374), and A_i = n (pass@k of all n - pass@k of the others). The subtracted
    estimate is a baseline that the agent cannot influence, so the gradient estimate of pass@k is unbiased. With k = 1
    the advantages are those of `leave_one_out`.

    Raises:
        GroupTooSmallError: the group has k episodes or fewer, for example because others failed.

    Example:
        >>> pass_at_k(Group(rewards=(1.0, 0.0, 0.0, 0.0), episodes=("a", "b", "c", "d")), k=3)
        [3.0, -1.0, -1.0, -1.0]
    """
    if k < 1:
        raise ValueError(f"k = {k}: it must be at least 1")
    passes: dict[str, list[bool]] = defaultdict(list)
    for episode, reward in zip(group.episodes, group.rewards, strict=True):
        passes[episode].append(reward > threshold)
    if len(passes) <= k:
        raise GroupTooSmallError(
            f"credit.advantage: k = {k} attempts are drawn from the other {len(passes) - 1} episodes of a group: "
            f"choose k below {len(passes)}"
        )
    advantages = {}
    for episode in passes:
        passes_of_others = [has_passed for name, has_passed in passes.items() if name != episode]
        attempts, failures = (
            _choices(map(len, passes_of_others), k),
            _choices((results.count(False) for results in passes_of_others), k),
        )
        advantages[episode] = [
            k * (failures[k] / attempts[k] - failures[k - 1] / attempts[k - 1] * (not has_passed))
            for has_passed in (False, True)
        ]
    return [
        advantages[episode][reward > threshold] for episode, reward in zip(group.episodes, group.rewards, strict=True)
    ]


def _choices(agents: Iterable[int], largest: int) -> list[int]:
    """Return in how many ways 0, 1, …, `largest` agents of different episodes can be chosen.

    Args:
        agents: number of agents of each episode to choose from.
        largest: the largest number to choose.
    """
    ways = [1] + [0] * largest
    for count in agents:
        for chosen in range(largest, 0, -1):
            ways[chosen] += count * ways[chosen - 1]
    return ways


@advantage
def gigpo(
    group: Group, *, discount: float = 0.95, step_weight: float = 1.0, divide_by_std: bool = False
) -> list[list[float]]:
    """A_it = (R_i - mean(R)) + ω (G_it - mean of G over the turns in the same state) (GiGPO, arXiv:2505.10978).

    G_it = Σ_{k ≥ t} γ^(k - t) r_ik is the discounted return of turn t of agent i; rewards that are not for a turn are
    those of its last turn. Turns of the group that began in the same state are compared with each other, so that an
    action gets its own credit. A state that was met once adds 0. With `divide_by_std`, both differences are divided by
    their std + 1e-6, std by n - 1.

    Like the mean of `group_mean`, the means include the turn itself; an agent that returns to a state is compared with
    itself, and gets less for the earlier turn: it went in a circle.

    Args:
        group: the agents, with the states of their turns.
        discount: γ, from 0 to 1.
        step_weight: ω, the weight of the comparison by state.
        divide_by_std: whether to divide by the standard deviations.

    Example:
        >>> states = ((b"start", b"door"), (b"start",))
        >>> group = Group(rewards=(1.0, 0.0), episodes=("a", "b"), turn_states=states)
        >>> gigpo(group, discount=0.5)
        [[0.75, 0.5], [-0.75]]
    """
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount = {discount}: it must be from 0 to 1")
    states = group.turn_states or ((),) * len(group.rewards)
    turn_rewards = group.turn_rewards or ((),) * len(group.rewards)
    returns = [
        _discounted_returns(reward, turns, len(hashes), discount)
        for reward, turns, hashes in zip(group.rewards, turn_rewards, states, strict=True)
    ]
    met: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for agent, hashes in enumerate(states):
        for turn, state in enumerate(hashes):
            met[state].append((agent, turn))
    of_episodes = _compared(group.rewards, group.episodes, divide_by_std=divide_by_std)
    advantages = [[value] * max(1, len(turns)) for value, turns in zip(of_episodes, states, strict=True)]
    for places in met.values():
        of_state = _compared([returns[a][t] for a, t in places], places, divide_by_std=divide_by_std)
        for (agent, turn), value in zip(places, of_state, strict=True):
            advantages[agent][turn] += step_weight * value
    return advantages


def _compared(values: Sequence[float], units: Sequence[Hashable], *, divide_by_std: bool) -> list[float]:
    """Return v - mean, or that divided by std + 1e-6, with std by n - 1; 0 for a single unit and for equal values."""
    if len(set(units)) < 2 or min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    centered = [value - mean for value in values]
    std = math.sqrt(math.fsum(value * value for value in centered) / (len(values) - 1))
    return [value / (std + 1e-6) for value in centered] if divide_by_std else centered


def _discounted_returns(
    reward: float, turn_rewards: Sequence[tuple[int, float]], turns: int, discount: float
) -> list[float]:
    """Return the discounted return of each turn of an agent with this total reward, of which `turn_rewards` were for
    turns."""
    turn_values = dict(turn_rewards)
    if turns:
        turn_values[turns - 1] = turn_values.get(turns - 1, 0.0) + reward - math.fsum(turn_values.values())
    returns, next_return = [], 0.0
    for turn in reversed(range(turns)):
        next_return = turn_values.get(turn, 0.0) + discount * next_return
        returns.append(next_return)
    return returns[::-1]


@advantage(over="step")
def reinforce_plus_plus(group: Group) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-8) over all units of the step (REINFORCE++, arXiv:2501.03262); std by n.

    No group is needed, but a task that is easy for all gets positive advantages throughout.
    """
    return _standardized(list(group.rewards))


@advantage(over="step")
def reinforce_plus_plus_baseline(group: Group) -> list[float]:
    """A_i = (R_i - mean of its group) / (std + 1e-8), with std over these differences in all units of the step, by n.

    REINFORCE++-baseline (arXiv:2501.03262): the group gives the baseline of its task, the step gives the scale.
    """
    members: dict[str, list[float]] = defaultdict(list)
    for name, reward in zip(group.groups, group.rewards, strict=True):
        members[name].append(reward)
    means = {name: math.fsum(rewards) / len(rewards) for name, rewards in members.items()}
    return _standardized([r - means[name] for name, r in zip(group.groups, group.rewards, strict=True)])


@advantage(over="step")
def gdpo(group: Group) -> list[float]:
    """A_i = (S_i - mean(S)) / (std(S) + 1e-4), S_i = Σ_k w_k (r_ik - mean_k) / (std_k + 1e-4) (GDPO, arXiv:2601.05242).

    mean_k and std_k are those of the rewards of name k in the agent's group, mean(S) and std(S) those over all units of
    the step; std by n - 1. Each named reward is normalized separately, so that a reward with a large spread does not
    drown the others, and combinations of rewards with equal sums get different advantages. w_k is
    `credit.reward_weights`.
    """
    total = [0.0] * len(group.rewards)
    for name, rewards in group.by_name().items():
        weight = group.weights.get(name, 1.0)
        members: dict[str, list[int]] = defaultdict(list)
        for at, group_id in enumerate(group.groups):
            members[group_id].append(at)
        for places in members.values():
            scores = _standardized([rewards[at] for at in places], epsilon=1e-4, correction=1)
            for at, score in zip(places, scores, strict=True):
                total[at] += weight * score
    return _standardized(total, epsilon=1e-4, correction=1)


def _standardized(values: list[float], *, epsilon: float = 1e-8, correction: int = 0) -> list[float]:
    """Return (v - mean) / (std + epsilon), with std by n - `correction`; 0 if all values are equal."""
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - correction))
    return [(value - mean) / (std + epsilon) for value in values]
