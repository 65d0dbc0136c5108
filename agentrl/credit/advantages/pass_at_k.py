"""PKPO: the gradient of pass@k instead of that of pass@1."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from agentrl.core.errors import GroupTooSmallError
from agentrl.credit.group import Group


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
