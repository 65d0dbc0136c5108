"""The algorithms of a run, by their settings: what each loss, estimator, normalizer and release rule gives and needs.

The functions are in `learn.losses`, `credit.estimators` and `credit.release`. The exchange between ranks, the refused
combinations and the tables in docs/reference/algorithms.md follow from these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentrl.core.custom_functions import FunctionDeclaration, Grouping
from agentrl.core.parts import Need, Part, Property

# --- losses -----------------------------------------------------------------------------------------------------------

LOSSES: dict[str, FunctionDeclaration] = {
    **dict.fromkeys(("truncated", "ppo", "reinforce"), FunctionDeclaration("loss", groups="token")),
    "importance_sampling": FunctionDeclaration("loss", groups="token", groups_option="level"),
    "distillation": FunctionDeclaration(
        "loss",
        groups="token",
        reference=True,
        divergence=True,
        lacks=frozenset({Property.LEARNS_FROM_REWARDS, Property.WEIGHS_ADVANTAGES}),
        needs=(
            Need(
                "reference",
                Property.TEACHER,
                "it moves the policy toward a teacher",
                "set policies.NAME.reference to the teacher, or choose another trainer.loss.name",
            ),
        ),
    ),
    "dpo": FunctionDeclaration(
        "loss",
        groups="group",
        reference=True,
        lacks=frozenset({Property.WEIGHS_ADVANTAGES}),
        needs=(
            Need(
                "advantage",
                Property.EQUAL_FOR_EQUAL,
                "it prefers the better members of a group, and members of equal reward can differ in advantage",
            ),
        ),
    ),
}
"""The built-in losses, by `trainer.loss.name`. Losses by token without a reference have no gradient where the advantage
is 0."""
WITHIN_TURN: tuple[Grouping, ...] = ("token", "turn")
"""Groupings that `ctx.branch` leaves whole; of a conversation, a branch has only the end."""
_WHOLE_GROUP = Need(
    "release",
    Property.WHOLE_GROUPS,
    "it compares the members of a group in one step, and late ones have none there",
)
NEEDS_REFERENCE = Need(
    "reference",
    Property.FROZEN_REFERENCE,
    "all weights of policies.NAME are trained, so no frozen base is left to serve as the reference",
    "set policies.NAME.reference, or choose a loss without a reference and trainer.loss.kl = 0",
)


def loss_part(name: str, declaration: FunctionDeclaration, options: Mapping[str, Any]) -> Part:
    """Return the part of a loss with its options.

    Raises:
        ConfigError: an option selects no grouping.
    """
    grouping = declaration.grouping(options)
    gives = {
        Property.LEARNS_FROM_REWARDS: True,
        Property.WEIGHS_ADVANTAGES: True,
        Property.NO_DIVERGENCE: not declaration.divergence,
        Property.WITHIN_TURN: grouping in WITHIN_TURN,
        Property.BY_TOKEN: grouping == "token",
    }
    needs = {_WHOLE_GROUP: grouping == "group", NEEDS_REFERENCE: declaration.reference}
    return Part(
        "loss",
        f"trainer.loss.name = {name!r}",
        "set trainer.loss.name = 'truncated'",
        frozenset(item for item, applies in gives.items() if applies) - declaration.lacks,
        (*(need for need, applies in needs.items() if applies), *declaration.needs),
    )


# --- normalizers ------------------------------------------------------------------------------------------------------

NORMALIZERS: dict[str, Grouping] = {"tokens": "token", "sequences": "agent"}
"""Divisors of the loss that are no number, with the tokens on which a token's weight depends, apart from a factor that
all tokens of the step share."""


def normalizer_part(normalizer: str | int) -> Part:
    """Return the part of `trainer.loss.normalizer`."""
    by_turn = isinstance(normalizer, int) or NORMALIZERS[normalizer] in WITHIN_TURN
    return Part(
        "normalizer",
        f"trainer.loss.normalizer = {normalizer!r}",
        "set trainer.loss.normalizer to the sampled tokens of a typical episode",
        frozenset({Property.CONSTANT} if isinstance(normalizer, int) else ())
        | frozenset({Property.WITHIN_TURN} if by_turn else ()),
    )


# --- advantage estimators ---------------------------------------------------------------------------------------------

_COMPANIONS = Need(
    "group size",
    Property.COMPANIONS,
    "an episode without others to compare it with teaches nothing",
    "set credit.group_size = 2 or more, or credit.advantage = 'role_mean' or 'none'",
)
_COMPARED = FunctionDeclaration("advantage", needs=(_COMPANIONS,))
_ALONE = FunctionDeclaration(
    "advantage",
    gives=frozenset({Property.LEAVES_OUT_MEMBER}),
    lacks=frozenset({Property.COMPARES_GROUP}),
)
ADVANTAGES: dict[str, FunctionDeclaration] = {
    "leave_one_out": _COMPARED._replace(gives=frozenset({Property.LEAVES_OUT_MEMBER, Property.TREE_FORM})),
    **dict.fromkeys(("group_mean", "group_std"), _COMPARED),
    "role_mean": _ALONE._replace(lacks=_ALONE.lacks | {Property.REWARDS_TO_GO, Property.EQUAL_FOR_EQUAL}),
    "none": _ALONE._replace(gives=_ALONE.gives | {Property.TREE_FORM}),
}
"""The built-in advantage estimators, by `credit.advantage`."""


def advantage_part(name: str, declaration: FunctionDeclaration, options: Mapping[str, Any]) -> Part:
    """Return the part of an advantage estimator with its options."""
    gives = {
        Property.EQUAL_FOR_EQUAL: True,
        Property.COMPARES_GROUP: declaration.over != "step",
        Property.REWARDS_TO_GO: declaration.over != "step",
        Property.TREE_FORM: declaration.over == "tree",
    }
    return Part(
        "advantage",
        f"credit.advantage = {name!r}",
        "set credit.advantage = 'leave_one_out'",
        (frozenset(item for item, applies in gives.items() if applies) | declaration.gives) - declaration.lacks,
        declaration.needs,
    )


# --- groups and their release -----------------------------------------------------------------------------------------

_EARLY_NEEDS = (
    Need(
        "normalizer",
        Property.CONSTANT,
        "the divisor would depend on who ended first, and short members would weigh more",
    ),
    Need(
        "advantage",
        Property.LEAVES_OUT_MEMBER,
        "who ends first depends on what it does, so only a baseline that leaves out the member itself, without a "
        "divisor by the group's spread, is the same for early and late members, and unbiased",
    ),
)
RELEASES: dict[str, Part] = {
    "group": Part("release", "credit.release = 'group'", gives=frozenset({Property.WHOLE_GROUPS})),
    "late": Part(
        "release",
        "credit.release = 'late'",
        "set credit.release = 'group'",
        needs=(
            *_EARLY_NEEDS,
            Need(
                "advantage",
                Property.COMPARES_GROUP,
                "it makes no comparison within the group, so there is nothing to wait for",
                "set credit.advantage = 'leave_one_out', or credit.release = 'episode' or 'group'",
            ),
            Need(
                "staleness",
                Property.OVERLAPS,
                "each step then waits for all running episodes, so none can be late",
                "set policies.NAME.max_staleness = 1 or more, or credit.release = 'group'",
            ),
        ),
    ),
    "episode": Part("release", "credit.release = 'episode'", "set credit.release = 'group'", needs=_EARLY_NEEDS),
}
DYNAMIC_SAMPLING = Part(
    "dynamic sampling",
    "credit.dynamic_sampling = true",
    "set credit.dynamic_sampling = false",
    needs=(
        Need(
            "advantage",
            Property.COMPARES_GROUP,
            "it drops groups whose rewards are all equal when they end, and this estimator does not compare the "
            "members of one group alone",
        ),
        Need(
            "release",
            Property.WHOLE_GROUPS,
            "members are trained before it is known whether their group has a signal",
        ),
        Need(
            "loss",
            Property.LEARNS_FROM_REWARDS,
            "it would drop episodes from which that loss learns whatever their rewards",
        ),
    ),
)
TO_GO = Part(
    "turn credit",
    "credit.turn_credit = 'to_go'",
    "set credit.turn_credit = 'sum'",
    needs=(
        Need(
            "advantage",
            Property.REWARDS_TO_GO,
            "it compares the group's rewards from each turn on, and this estimator credits turns otherwise or "
            "compares the agents of a step",
        ),
        Need("release", Property.WHOLE_GROUPS, "earlier groups are remembered as wholes"),
    ),
)
ONE_MEMBER = Part(
    "group size",
    "credit.group_size = 1",
    "set credit.group_size = 2 or more",
)
