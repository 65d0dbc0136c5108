"""REINFORCE++: advantages scaled by the spread over all units of an optimizer step."""

from __future__ import annotations

import math
from collections import defaultdict

from agentrl.credit.group import Group, standardised


def reinforce_plus_plus(group: Group) -> list[float]:
    """A_i = (R_i - mean(R)) / (std(R) + 1e-8) over all units of the step (REINFORCE++, arXiv:2501.03262); std by n.

    No group is needed, but a task that is easy for all gets positive advantages throughout.
    """
    return standardised(list(group.rewards))


def reinforce_plus_plus_baseline(group: Group) -> list[float]:
    """A_i = (R_i - mean of its group) / (std + 1e-8), with std over these differences in all units of the step, by n.

    REINFORCE++-baseline (arXiv:2501.03262): the group gives the baseline of its task, the step gives the scale.
    """
    members: dict[str, list[float]] = defaultdict(list)
    for name, reward in zip(group.groups, group.rewards, strict=True):
        members[name].append(reward)
    means = {name: math.fsum(rewards) / len(rewards) for name, rewards in members.items()}
    return standardised([r - means[name] for name, r in zip(group.groups, group.rewards, strict=True)])
