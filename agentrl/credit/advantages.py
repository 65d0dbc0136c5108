"""Advantages: pure functions over rewards that are compared with each other, chosen by configuration.

The rewards are those of one policy in one seat over the episodes of a group, in any order; the result has the same
order. Episodes are compared with episodes: agents of one episode share its outcome, so none is a baseline for another.
The advantage is 0 for an episode alone in its group, and if all rewards are equal.

If the members of a group do not wait for each other (`GroupReleaseRule`), the first m of K finishers are released
together, with m fixed before any of them is sampled, and every later one when it finishes. Each member is compared with
the first m - 1 finishers *among the others*, with weight 1.

This is unbiased, because a member's comparison set depends only on the others, whether it finished early or late. An
early member is compared with the other m - 1 of the first m, which are the first m - 1 of the others; a late one with
the first m - 1 of all. Its baseline is therefore independent of its own samples, and E[score · baseline] = 0. Comparing
a late member with all m would break this: its baseline would then depend on how long it took (docs/scheduling.md).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from agentrl.core import ids
from agentrl.core.custom_functions import FunctionDeclaration, check_options, declaration_of, find_function
from agentrl.core.errors import GroupTooSmallError, InputError
from agentrl.core.records import REWARD, Unit

E = TypeVar("E", bound=Hashable)


class Advantage(NamedTuple):
    """Advantage of one reward: `value = reward - baseline`, divided by a scale in some estimators."""

    value: float
    baseline: float


def leave_one_out(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i - mean of the rewards in the other episodes (RLOO, arXiv:2402.14740).

    Unbiased for every group size, and with several agents in the seat: an agent cannot influence its baseline, which
    leaves out its whole episode.

    Args:
        rewards: the rewards to compare.
        episodes: the episode of each reward; None: all different.

    Example:
        >>> [a.value for a in leave_one_out([1.0, 0.0, 0.0])]
        [1.0, -0.5, -0.5]
        >>> [a.value for a in leave_one_out([1.0, -1.0, 1.0, 0.0], ["e0", "e0", "e1", "e1"])]
        [0.5, -1.5, 1.0, 0.0]
    """
    episodes = range(len(rewards)) if episodes is None else episodes
    if _alike(rewards, episodes):
        return [Advantage(0.0, reward) for reward in rewards]
    own: dict[Hashable, list[float]] = defaultdict(list)
    for episode, reward in zip(episodes, rewards, strict=True):
        own[episode].append(reward)
    total, count = math.fsum(rewards), len(rewards)
    baseline = {key: (total - math.fsum(values)) / (count - len(values)) for key, values in own.items()}
    return [Advantage(r - baseline[e], baseline[e]) for e, r in zip(episodes, rewards, strict=True)]


def group_mean(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i - mean(R), the reward itself included (Dr. GRPO, arXiv:2503.20783)."""
    if _alike(rewards, range(len(rewards)) if episodes is None else episodes):
        return [Advantage(0.0, reward) for reward in rewards]
    mean = math.fsum(rewards) / len(rewards)
    return [Advantage(reward - mean, mean) for reward in rewards]


def group_std(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-6) (GRPO, arXiv:2402.03300); 0 if all rewards are equal.

    std is the sample deviation, which divides by n - 1, as in verl and TRL. With the population's (by n) advantages
    would be sqrt(n / (n - 1)) times as large: 1.069 for a group of 8.

    Example:
        >>> [round(a.value, 4) for a in group_std([1.0, 0.0, 0.0, 0.0])]
        [1.5, -0.5, -0.5, -0.5]
    """
    centred = group_mean(rewards, episodes)
    if _alike(rewards, range(len(rewards)) if episodes is None else episodes):
        return centred
    std = math.sqrt(math.fsum(a.value * a.value for a in centred) / (len(rewards) - 1))
    return [Advantage(a.value / (std + 1e-6), a.baseline) for a in centred]


def no_baseline(rewards: Sequence[float], episodes: Sequence[Hashable] | None = None) -> list[Advantage]:
    """A_i = R_i (REINFORCE)."""
    return [Advantage(reward, 0.0) for reward in rewards]


def _alike(rewards: Sequence[float], episodes: Sequence[Hashable]) -> bool:
    """Whether there is nothing to compare: one episode, or equal rewards, whose mean would differ by rounding
    errors.
    """
    return len(set(episodes)) < 2 or min(rewards) == max(rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The agents that an advantage estimator compares: agents of one policy in one seat of an environment.

    An estimator marked with `over="step"` gets the agents of all units of an optimizer step; any other gets those of a
    group. All sequences have one entry per agent, in the order in which the estimator returns the advantages.

    Example:
        >>> Group(rewards=(1.0, 0.0), episodes=("e0", "e1")).mean
        0.5
    """

    rewards: tuple[float, ...]
    """Total reward of each agent, rewards for turns included."""
    episodes: tuple[str, ...]
    """Id of each agent's episode. Agents of one episode share its outcome: neither is a baseline of the other."""
    turn_rewards: tuple[tuple[tuple[int, float], ...], ...] = ()
    """Part of each reward that was given for single turns: (turn, reward), in order."""
    named_rewards: tuple[tuple[tuple[str, float], ...], ...] = ()
    """Named rewards of each agent, as (name, reward) pairs before weights; empty where an agent has none."""
    turn_states: tuple[tuple[bytes, ...], ...] = ()
    """Hashes of the anchor states of each agent's turns, in order; equal if the environment's states were (`state` of
    `Agent.act`, else the new messages). Empty over a step, and for an agent that was played while `credit.advantage`
    did not compare turns."""
    tokens: tuple[int, ...] = ()
    """Number of sampled tokens of each agent; empty over a step."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Copy of `credit.reward_weights`; a name that is absent has weight 1."""
    groups: tuple[str, ...] = ()
    """Id of each agent's group; all the same unless the estimator compares a step."""
    policy: str = ""
    seat: str = ""
    environment: str = ""
    history: float | None = None
    """Mean reward of the policy in this seat over earlier groups of the same task, else of the environment, when the
    group was admitted; None before the first, in a deterministic run, and over a step."""

    @property
    def mean(self) -> float:
        """Mean of the rewards."""
        return math.fsum(self.rewards) / len(self.rewards)

    @property
    def has_signal(self) -> bool:
        """Whether the rewards can be compared: of two episodes or more, and not all equal."""
        return not _alike(self.rewards, self.episodes)

    def by_name(self) -> dict[str, tuple[float, ...]]:
        """Return the rewards of each name, one per agent, before weights; 0 if the agent has none of the name.

        Example:
            >>> given = ((("format", 0.5), ("right", 1.0)), ())
            >>> Group(rewards=(1.5, 0.5), episodes=("a", "b"), named_rewards=given).by_name()
            {'format': (0.5, 0.0), 'reward': (0.0, 0.5), 'right': (1.0, 0.0)}
        """
        weight = self.weights.get(REWARD, 1.0)  # the unnamed reward is already included in `rewards`
        given = [
            dict(named) or {REWARD: reward / weight if weight else 0.0}
            for named, reward in zip(self.named_rewards or ((),) * len(self.rewards), self.rewards, strict=True)
        ]
        names = sorted({name for own in given for name in own})
        return {name: tuple(own.get(name, 0.0) for own in given) for name in names}


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
    own: dict[str, list[bool]] = defaultdict(list)
    for episode, reward in zip(group.episodes, group.rewards, strict=True):
        own[episode].append(reward > threshold)
    if len(own) <= k:
        raise GroupTooSmallError(
            f"credit.advantage: k = {k} attempts are drawn from the other {len(own) - 1} episodes of a group: choose k "
            f"below {len(own)}"
        )
    found = {}
    for episode in own:
        others = [passed for name, passed in own.items() if name != episode]
        attempts, failures = _choices(map(len, others), k), _choices((each.count(False) for each in others), k)
        found[episode] = [
            k * (failures[k] / attempts[k] - failures[k - 1] / attempts[k - 1] * (not passed))
            for passed in (False, True)
        ]
    return [found[episode][reward > threshold] for episode, reward in zip(group.episodes, group.rewards, strict=True)]


def _choices(agents: Iterable[int], most: int) -> list[int]:
    """Return in how many ways 0, 1, …, `most` agents of different episodes can be chosen.

    Args:
        agents: number of agents of each episode to choose from.
        most: the largest number to choose.
    """
    ways = [1] + [0] * most
    for count in agents:
        for chosen in range(most, 0, -1):
            ways[chosen] += count * ways[chosen - 1]
    return ways


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
    each = len(group.rewards) / sum(reward == best for reward in group.rewards)
    return [each if reward == best else 0.0 for reward in group.rewards]


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
    compare = group_std if divide_by_std else group_mean
    states = group.turn_states or ((),) * len(group.rewards)
    given = group.turn_rewards or ((),) * len(group.rewards)
    returns = [
        _discounted(reward, turns, len(own), discount)
        for reward, turns, own in zip(group.rewards, given, states, strict=True)
    ]
    met: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for agent, own in enumerate(states):
        for turn, state in enumerate(own):
            met[state].append((agent, turn))
    of_episodes = compare(group.rewards, group.episodes)
    found = [[own.value] * max(1, len(turns)) for own, turns in zip(of_episodes, states, strict=True)]
    for places in met.values():
        for (agent, turn), step in zip(places, compare([returns[a][t] for a, t in places]), strict=True):
            found[agent][turn] += step_weight * step.value
    return found


def _discounted(reward: float, given: Sequence[tuple[int, float]], turns: int, discount: float) -> list[float]:
    """Return the discounted return of each turn of an agent with this total reward, of which `given` was for turns."""
    left = dict(given)
    if turns:
        left[turns - 1] = left.get(turns - 1, 0.0) + reward - math.fsum(left.values())
    returns, following = [], 0.0
    for turn in reversed(range(turns)):
        following = left.get(turn, 0.0) + discount * following
        returns.append(following)
    return returns[::-1]


def reinforce_plus_plus(group: Group) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-8) over all units of the step (REINFORCE++, arXiv:2501.03262); std by n.

    No group is needed, but a task that is easy for all gets positive advantages throughout.
    """
    return _standardised(list(group.rewards))


def reinforce_plus_plus_baseline(group: Group) -> list[float]:
    """A_i = (R_i - mean of its group) / (std + 1e-8), with std over these differences in all units of the step, by n.

    REINFORCE++-baseline (arXiv:2501.03262): the group gives the baseline of its task, the step gives the scale.
    """
    members: dict[str, list[float]] = defaultdict(list)
    for name, reward in zip(group.groups, group.rewards, strict=True):
        members[name].append(reward)
    means = {name: math.fsum(rewards) / len(rewards) for name, rewards in members.items()}
    return _standardised([r - means[name] for name, r in zip(group.groups, group.rewards, strict=True)])


def gdpo(group: Group) -> list[float]:
    """A_i = (S_i - mean(S)) / (std(S) + 1e-4), S_i = Σ_k w_k (r_ik - mean_k) / (std_k + 1e-4) (GDPO, arXiv:2601.05242).

    mean_k and std_k are those of the rewards of name k in the agent's group, mean(S) and std(S) those over all units of
    the step; std by n - 1. Each named reward is normalised separately, so that a reward with a large spread does not
    drown the others, and combinations of rewards with equal sums get different advantages. w_k is
    `credit.reward_weights`.
    """
    total = [0.0] * len(group.rewards)
    for name, rewards in group.by_name().items():
        weight = group.weights.get(name, 1.0)
        members: dict[str, list[int]] = defaultdict(list)
        for at, own in enumerate(group.groups):
            members[own].append(at)
        for places in members.values():
            scores = _standardised([rewards[at] for at in places], epsilon=1e-4, correction=1)
            for at, score in zip(places, scores, strict=True):
                total[at] += weight * score
    return _standardised(total, epsilon=1e-4, correction=1)


def _standardised(values: list[float], *, epsilon: float = 1e-8, correction: int = 0) -> list[float]:
    """Return (v - mean) / (std + epsilon), with std by n - `correction`; 0 if all values are equal."""
    if min(values) == max(values):
        return [0.0] * len(values)
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - correction))
    return [(value - mean) / (std + epsilon) for value in values]


class AdvantagesAndReturns(NamedTuple):
    """What GAE computes for each trained token from rewards and values."""

    advantages: list[float]
    returns: list[float]
    """Discounted rewards from the token on."""


def generalized_advantages(
    returns: Sequence[float],
    values: Sequence[float],
    agents: Sequence[int],
    turns: Sequence[int],
    *,
    discount: float,
    trace_decay: float,
) -> AdvantagesAndReturns:
    """A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t (generalised advantage estimation, arXiv:1506.02438).

    t counts the trained tokens of an agent in order; those of prompts, tools and other agents do not count, as in verl.
    The reward of a turn is that of its last token, and V = 0 after the agent's last token. With λ = 1, A
    is the discounted return minus V.

    Args:
        returns: rewards of the token's turn and all later ones of its agent, undiscounted; with
            `credit.turn_credit = "sum"` the agent's whole reward.
        values: V of each token.
        agents: id of each token's agent.
        turns: number of each token's turn, ascending in time. The tokens of a turn are given in order.
        discount: γ.
        trace_decay: λ.

    Example:
        >>> generalized_advantages([1.0, 1.0], [0.5, 0.75], [0, 0], [0, 1], discount=1.0, trace_decay=0.5)
        AdvantagesAndReturns(advantages=[0.375, 0.25], returns=[1.0, 1.0])
    """
    found = AdvantagesAndReturns([0.0] * len(returns), [0.0] * len(returns))
    order = sorted(range(len(returns)), key=lambda at: (agents[at], turns[at]))
    later: int | None = None
    for at in reversed(order):
        if later is None or agents[later] != agents[at]:
            found.returns[at] = returns[at]
            found.advantages[at] = returns[at] - values[at]
        else:
            reward = returns[at] - returns[later]
            found.returns[at] = reward + discount * found.returns[later]
            delta = reward + discount * values[later] - values[at]
            found.advantages[at] = delta + discount * trace_decay * found.advantages[later]
        later = at
    return found


AdvantageFunction = Callable[[Sequence[float], Sequence[Hashable]], list[Advantage]]

ADVANTAGES: dict[str, AdvantageFunction] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_std": group_std,
    "role_mean": no_baseline,
    "none": no_baseline,
    "gae": no_baseline,
}
"""Estimators that need the rewards alone, keyed by the name in `credit.advantage`; `role_mean` gets its baseline at the
step (`baselines.RoleMeans`), `gae` in the trainer (`generalized_advantages`)."""

OF_GROUPS: dict[str, tuple[Callable[..., Sequence[float] | Sequence[Sequence[float]]], FunctionDeclaration]] = {
    "max_rl": (max_rl, FunctionDeclaration("advantage")),
    "pass_at_k": (pass_at_k, FunctionDeclaration("advantage")),
    "best_of_n": (best_of_n, FunctionDeclaration("advantage")),
    "gigpo": (gigpo, FunctionDeclaration("advantage")),
    "reinforce_plus_plus": (reinforce_plus_plus, FunctionDeclaration("advantage", over="step")),
    "reinforce_plus_plus_baseline": (reinforce_plus_plus_baseline, FunctionDeclaration("advantage", over="step")),
    "gdpo": (gdpo, FunctionDeclaration("advantage", over="step")),
}
"""Estimators that take a `Group`, like those of users."""


class AgentCredit(NamedTuple):
    """The credit that an estimator gave an agent."""

    value: float
    """Advantage of the agent; with advantages per turn, the one of the first turn."""
    baseline: float
    by_turn: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageEstimator:
    """An estimator that takes a `Group`, with its options."""

    name: str
    function: Callable[..., Any]
    mark: FunctionDeclaration
    options: Mapping[str, Any]

    def __call__(self, group: Group) -> list[AgentCredit]:
        """Return the credit of each agent.

        Raises:
            GroupTooSmallError: the function cannot compare so few members.
            InputError: the function raised, or did not return one advantage per agent or per turn.
        """
        try:
            given = list(self.function(group, **self.options))
        except GroupTooSmallError:
            raise
        except Exception as error:
            raise InputError(f"the advantage {self.name} raised {type(error).__name__}: {error}") from error
        if len(given) != len(group.rewards):
            raise InputError(
                f"the advantage {self.name} returned {len(given)} advantages for a group of {len(group.rewards)} "
                "rewards; it must return one per reward, in their order"
            )
        found = []
        for value, reward in zip(given, group.rewards, strict=True):
            turns = tuple(value) if isinstance(value, list | tuple) else ()
            numbers = turns or (value,)
            for number in numbers:
                if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                    raise InputError(
                        f"the advantage {self.name} returned {value!r} for a reward of {reward}; it must return finite "
                        "numbers, or for each agent a list of them, one per turn"
                    )
            first = float(numbers[0])
            found.append(AgentCredit(first, reward - first, tuple(map(float, turns))))
        return found

    def to_go(self, group: Group) -> list[AgentCredit]:
        """Return the credit of each agent per turn, from the rewards to go; see `advantages_to_go`."""

        def of_rewards(rewards: Sequence[float], _: Sequence[Hashable]) -> list[Advantage]:
            return [Advantage(each.value, each.baseline) for each in self(replace(group, rewards=tuple(rewards)))]

        by_turn = advantages_to_go(of_rewards, group.rewards, group.turn_rewards, group.episodes)
        return [each._replace(by_turn=turns) for each, turns in zip(self(group), by_turn, strict=True)]


class OptimizerStepCreditAssigner:
    """Assigns credit to the units of an optimizer step with an estimator over the step.

    Args:
        estimator: an estimator marked with `over="step"`.
        group_size: group size of the run.
        weights: weights of named rewards.
    """

    def __init__(
        self, estimator: AdvantageEstimator, *, group_size: int, weights: Mapping[str, float] | None = None
    ) -> None:
        self._estimator = estimator
        self._group_size = group_size
        self._weights = weights or {}

    def credited(self, policy: str, units: Sequence[tuple[str, Unit]]) -> list[Unit]:
        """Return the units of a step with their credits, in order; each seat of each environment is compared
        separately.

        Args:
            policy: policy that takes the step.
            units: (environment, unit) in the step's order.
        """
        members: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        for at, (environment, unit) in enumerate(units):
            for number, credit in enumerate(unit.credits):
                members[environment, credit.seat].append((at, number))
        credits = [list(unit.credits) for _, unit in units]
        for (environment, seat), places in members.items():
            episodes = tuple(units[at][1].episode_id for at, _ in places)
            group = Group(
                rewards=tuple(credits[at][number].reward for at, number in places),
                named_rewards=tuple(credits[at][number].named_rewards for at, number in places),
                weights=self._weights,
                episodes=episodes,
                groups=tuple(ids.group_id_of(episode, self._group_size) for episode in episodes),
                policy=policy,
                seat=seat,
                environment=environment,
            )
            for (at, number), (value, baseline, turns) in zip(places, self._estimator(group), strict=True):
                credits[at][number] = replace(
                    credits[at][number], advantage=value, baseline=baseline, turn_advantages=turns
                )
        return [replace(unit, credits=tuple(own)) for (_, unit), own in zip(units, credits, strict=True)]


def make_advantage_estimator(
    name: str, options: Mapping[str, Any], given: Callable[..., Any] | None = None
) -> AdvantageEstimator:
    """Make the estimator that `credit.advantage` names, if it is not one of `ADVANTAGES`.

    Args:
        name: name of the estimator.
        options: its arguments in `credit.advantage`.
        given: the user's function of this name, if it is already loaded.

    Raises:
        ConfigError: there is no such estimator, or its options do not fit.
    """
    function, mark = OF_GROUPS.get(name, (None, None))
    if function is None or mark is None:
        function = given or find_function("advantage", name, key="credit.advantage")[1]
        mark = declaration_of(function)
    check_options(function, options, "credit.advantage")
    return AdvantageEstimator(name=name.rpartition(":")[2], function=function, mark=mark, options=options)


def advantages_to_go(
    advantage: AdvantageFunction,
    rewards: Sequence[float],
    turn_rewards: Sequence[Sequence[tuple[int, float]]],
    episodes: Sequence[Hashable],
) -> list[tuple[float, ...]]:
    """Compute the advantage of each turn from the rewards to go: those given for the turn or later.

    G_i(t) = R_i - (sum of the rewards for turns before t), and the estimator compares the G(t) of one t. So a turn's
    reward reaches the tokens of that turn and of earlier turns, and no token is credited with rewards given before it
    was sampled (policy gradient theorem, Sutton et al. 2000). The baseline of turn t is a function of the other
    episodes alone, so `leave_one_out` stays unbiased. For an episode that ended before turn t, G(t) is its reward for
    the whole episode, which is given at its end.

    Args:
        advantage: the estimator.
        rewards: R, the total reward of each agent.
        turn_rewards: rewards for single turns of each agent, as (turn, reward); the rest of R is for the whole episode.
        episodes: episode of each agent.

    Returns:
        For each agent, the advantages of turns 0, 1, …; the last one holds for all later turns. All lists have one
        length.

    Example:
        >>> advantages_to_go(leave_one_out, [1.0, 0.0], [[(0, 1.0)], []], ["e0", "e1"])
        [(1.0, 0.0), (-1.0, 0.0)]
    """
    last = max((turn + 1 for given in turn_rewards for turn, _ in given), default=0)
    by_turn = []
    for now in range(last + 1):
        before = [math.fsum(value for turn, value in given if turn < now) for given in turn_rewards]
        to_go = [reward - paid for reward, paid in zip(rewards, before, strict=True)]
        by_turn.append([found.value for found in advantage(to_go, episodes)])
    return list(zip(*by_turn, strict=True))


SHRINKAGE = 3.0
"""Weight of the mean of earlier groups, as a number of rewards."""


@dataclass(frozen=True, slots=True)
class GroupReleaseRule:
    """The number of finishers that a group waits for before any member is released.

    The default is half of the members: a larger share waits longer, a smaller one makes the gradient noisier for tasks
    without earlier groups.

    Example:
        >>> GroupReleaseRule().waited_for(8), GroupReleaseRule(share=0.0).waited_for(8)
        (4, 1)
        >>> GroupReleaseRule().waited_for(2)
        2
    """

    share: float = 0.5
    """Share of the members; 0: each member is released when it finishes, and compared with earlier groups alone."""

    def waited_for(self, size: int) -> int:
        """Return m for a group of `size` members; at least two if there are siblings to compare with."""
        return max(math.ceil(self.share * size), min(2, size)) if self.share else 1


def baseline_members(first: Sequence[E], member: E) -> list[E]:
    """The baseline set of a member: the first m - 1 finishers among the others.

    Args:
        first: the first m finishers of its group, in order.
        member: a member of the group, whether or not it is one of `first`.

    Example:
        >>> baseline_members(["a", "b", "c"], "b"), baseline_members(["a", "b", "c"], "z")
        (['a', 'c'], ['a', 'b'])
    """
    return [other for other in first if other != member][: len(first) - 1]


def shrunk_advantage(reward: float, others: Sequence[float], earlier: float | None) -> Advantage:
    """A = R - b with b = (Σ others + κ·V) / (n + κ), κ = 3: the noisy mean of a few siblings is shrunk towards the mean
    V of earlier groups (James & Stein 1961).

    V comes from earlier groups, so b stays independent of the member's samples. Without V, b is the mean of the
    siblings; without both, the advantage is 0.

    Args:
        reward: reward of the member.
        others: rewards in the member's baseline set.
        earlier: V; None if there is none.

    Example:
        >>> shrunk_advantage(1.0, [0.0, 1.0, 0.0], None).value, shrunk_advantage(1.0, [0.0, 1.0, 0.0], 0.5)
        (0.6666666666666667, Advantage(value=0.5833333333333333, baseline=0.4166666666666667))
    """
    weight = 0.0 if earlier is None else SHRINKAGE
    count = len(others) + weight
    if not count:
        return Advantage(0.0, reward)
    baseline = (math.fsum(others) + weight * (earlier or 0.0)) / count
    return Advantage(reward - baseline, baseline)
