"""How policies do against their past versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

from agentrl.journal.results import win_rates

if TYPE_CHECKING:
    from agentrl.inspection.reader import RunReader


class WinRate(msgspec.Struct, frozen=True):
    """How a policy does against one past version of itself."""

    policy: str
    step: int
    """Of the policy's oldest weights in the episode, rounded down to when versions join."""
    opponent: str
    """The policy that stands for the past."""
    version: str
    episodes: int
    score: float
    """Wins per episode; draws count half."""


class _Policy(msgspec.Struct):
    kind: str = ""
    of: str = ""
    every: Annotated[int, msgspec.Meta(ge=1)] = 1


class _Opponents(msgspec.Struct):
    policies: dict[str, _Policy]


def run_win_rates(reader: RunReader) -> list[WinRate]:
    """Results against past versions, by the learner's step and the opponent's version."""
    try:
        config = msgspec.convert(reader.info().get("config"), _Opponents)
    except msgspec.ValidationError:  # of an evaluation, or of nobody's
        return []
    found = []
    for name, policy in config.policies.items():
        if policy.kind == "past":
            matrix = win_rates(reader.log.against({name}), name, policy.of, every=policy.every)
            found += [
                WinRate(policy.of, step, name, str(version), tally.episodes, tally.score / tally.episodes)
                for (step, version), tally in matrix.items()
            ]
    return found


def win_rate_matrix(found: Sequence[WinRate]) -> list[list[str]]:
    """Win rates as text: a heading, then a row per step of the policy with a column per past version."""
    versions = list(dict.fromkeys(line.version for line in found))
    cells = {(line.policy, line.step, line.version): f"{line.score:.2f} of {line.episodes}" for line in found}
    steps = sorted({(line.policy, line.step) for line in found})
    rows = [[policy, str(step), *(cells.get((policy, step, each), "") for each in versions)] for policy, step in steps]
    return [["policy", "from step", *versions], *rows]
