"""The parts of a run that must fit each other: what each gives, what it needs of the others, and which pairs conflict.

A part is a choice such as a loss, an estimator, a release rule or an engine. The tables of parts are in
`config.algorithms` and `config.combinations`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Literal, NamedTuple

from agentrl.core.errors import ConfigError

PartKind = Literal[
    "advantage",
    "loss",
    "normalizer",
    "divergence",
    "release",
    "dynamic sampling",
    "turn credit",
    "group size",
    "weights",
    "staleness",
    "bound on lag",
    "reference",
    "learners",
    "policy",
    "sampling",
    "filters",
    "scorer",
    "environment",
    "evaluation",
    "best metric",
    "held-out tasks",
    "determinism",
    "schedule",
    "engine",
    "replicas",
    "refresh",
    "engine feature",
    "running engine",
    "cluster",
    "trainer setting",
    "sharding",
    "model",
]


class Property(Enum):
    """A property that one part gives and another needs; the value is its meaning."""

    # of advantage estimators
    COMPARES_GROUP = "compares the members of one group with each other"
    LEAVES_OUT_MEMBER = "has a baseline that does not depend on the member itself"
    EQUAL_FOR_EQUAL = "gives members of a group with equal rewards equal advantages"
    REWARDS_TO_GO = "can compare the rewards from one turn on"
    TREE_FORM = "has a form for trees of branches"
    # of losses and normalizers
    WITHIN_TURN = "weighs a token by tokens of the same turn at most"
    BY_TOKEN = "weighs a token by itself alone"
    CONSTANT = "divides by a number that does not depend on the step"
    WEIGHS_ADVANTAGES = "multiplies the advantages"
    LEARNS_FROM_REWARDS = "learns nothing from a group with equal rewards"
    NO_DIVERGENCE = "adds no divergence from a reference at each token"
    # of groups and their release
    WHOLE_GROUPS = "releases a group when all of its members have ended"
    COMPANIONS = "has several members per group"
    # of policies
    SEVERAL_VERSIONS = "is served in several versions at once"
    STABLE_VERSION = "can serve an episode or tree from one version"
    KEEPS_VERSIONS = "can keep a version while newer ones are served"
    OVERLAPS = "samples while the trainer computes"
    FROZEN_REFERENCE = "has frozen weights as a reference"
    TEACHER = "names the weights of a teacher"
    ONE_POLICY = "has one policy that learns"
    # of sampling and scorers
    API_SAMPLING = "uses only filters of the chat completions API"
    SAME_FILTERS = "filters the tokens of all policies or of none"
    SCORES_EPISODES = "scores each episode by itself"
    # of evaluations, machines and engines
    MEASURED = "gives evaluations something to measure"
    REPEATABLE = "depends on the run's configuration alone"
    SHARED_FILES = "gives all workers the files of the run's machine"
    KEEPS_KV = "can reuse a KV cache computed by older weights"
    REFRESH_TOKEN = "can switch to newer weights at any token"
    REFRESH_TURN = "can switch to newer weights between turns"
    REFRESH_EPISODE = "can switch to newer weights between episodes"
    REFRESH_LAZY = "can switch to newer weights when the KV cache is recomputed"
    EXPERT_ROUTING = "records the experts of each token"
    KEPT_SETS = "records the kept set of each token"
    ADAPTER_SLOTS = "has enough slots for adapters"
    # of trainer ranks


class Need(NamedTuple):
    """A property that a part needs of every part of another kind."""

    of: PartKind
    property: Property
    why: str
    """The reason, as a clause."""
    remedy: str = ""
    """The nearest settings that work; empty: replace either part as its `instead` says."""


class Part(NamedTuple):
    """A choice in a run's configuration or environment, with what it gives and needs.

    In its texts, NAME stands for `name`.
    """

    kind: PartKind
    setting: str
    """The choice, as a configuration writes it."""
    instead: str = ""
    """The nearest choice that fits most others, as an imperative."""
    gives: frozenset[Property] = frozenset()
    needs: tuple[Need, ...] = ()
    name: str = ""
    """Name of the policy or scorer that the part belongs to; empty: the part belongs to the whole run."""

    def named(self, name: str, *gives: Property) -> Part:
        """Return the part of one policy or scorer, which also gives these properties."""
        return self._replace(name=name, gives=self.gives.union(gives))

    def __str__(self) -> str:
        return self.setting.replace("NAME", self.name or "NAME")


class Refusal(NamedTuple):
    """Two parts that cannot be combined, since the second lacks what the first needs."""

    part: Part
    other: Part
    need: Need

    def __str__(self) -> str:
        name = self.part.name or self.other.name or "NAME"
        choices = [choice for choice in (self.other.instead, self.part.instead) if choice]
        remedy = (self.need.remedy or ", or ".join(choices)).replace("NAME", name)
        why = self.need.why.replace("NAME", name)
        return f"{self.part} cannot be combined with {self.other}: {why}. {remedy[:1].upper()}{remedy[1:]}"


def compatible(parts: Iterable[Part]) -> Iterator[Refusal]:
    """Yield the pairs of parts that cannot be combined, in the order of the parts and their needs.

    Parts of two different policies or scorers do not meet.
    """
    parts = list(parts)
    for part in parts:
        for need in part.needs:
            for other in parts:
                meets = not (part.name and other.name) or part.name == other.name
                if other.kind == need.of and meets and need.property not in other.gives:
                    yield Refusal(part, other, need)


def check_compatible(parts: Iterable[Part]) -> None:
    """Refuse parts that cannot be combined.

    Raises:
        ConfigError: two of them conflict; the message names both, the reason and the nearest settings that work.
    """
    for refusal in compatible(parts):
        raise ConfigError(str(refusal))
