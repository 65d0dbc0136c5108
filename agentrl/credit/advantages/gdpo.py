"""GDPO: each named reward is normalized separately."""

from __future__ import annotations

from collections import defaultdict

from agentrl.credit.group import Group, standardised


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
            scores = standardised([rewards[at] for at in places], epsilon=1e-4, correction=1)
            for at, score in zip(places, scores, strict=True):
                total[at] += weight * score
    return standardised(total, epsilon=1e-4, correction=1)
