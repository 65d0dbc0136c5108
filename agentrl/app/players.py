"""Who plays in a fork: the policies of its parent with their weights as of the turn, but for what was asked.

    DIR                            weights for the policy that takes the turn, such as a run's `policies/NAME`
    POLICY@LINEAGE.STEP            a version of a policy of the run, wherever it plays
    SEAT=POLICY                    another policy of the run in a seat of the episode
    SEAT=POLICY@LINEAGE.STEP       likewise, at a version; SEAT=DIR: weights for the policy that holds the seat

A policy has the same weights in all its seats, and in the children.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from agentrl.app.weights import weights_in
from agentrl.config.policies import PastPolicy
from agentrl.config.run import RunConfig
from agentrl.core.errors import InputError
from agentrl.core.records import ForkPoint, PolicyVersion, WeightsRef
from agentrl.journal.entries import Begin, TurnEntry
from agentrl.journal.run_log import SqliteRunLog

_VERSION = re.compile(r"(?P<policy>[^@/]+)@(?P<lineage>\d{1,9})\.(?P<step>\d{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """An episode to be forked, at one of its turns."""

    begin: Begin
    point: ForkPoint
    """Its journal is an absolute path."""
    turns: Sequence[TurnEntry]
    """Those before the fork point, and the one there."""
    ancestors: Mapping[str, str]
    """Journal directory by episode id: of the parent, and of what it was forked from."""


class Players(NamedTuple):
    """Who plays in a fork."""

    seats: Mapping[str, str]
    """The policies of seats that others hold than in the parent."""
    weights: Sequence[WeightsRef]
    """Of the policies that do not play as the base model."""


def players(config: RunConfig, parent: Parent, asked: Sequence[str | Path] = ()) -> Players:
    """Who plays in a fork of `parent`, given what was asked for.

    Raises:
        InputError: there is no such seat, policy, version or directory, or weights are no longer on disk.
    """
    for policy in [*parent.begin.seats.values(), *(turn.policy for turn in parent.turns)]:
        _check_known(policy, config, "the episode")
    seats: dict[str, str] = {}
    given: dict[str, WeightsRef | None] = {}
    for each in asked:
        seat, wanted = _split(parent, each)
        policy = parent.turns[-1].policy if seat is None else parent.begin.seats[seat]
        if wanted in config.policies:
            policy = str(wanted)
        elif match := _VERSION.fullmatch(str(wanted)):
            policy = match["policy"]
            _check_known(policy, config, "--policy")
            given[policy] = _weights(parent, PolicyVersion(policy, int(match["lineage"]), int(match["step"])))
        else:
            given[policy] = weights_in(policy, wanted)
        if isinstance(past := config.policies[policy], PastPolicy):
            raise InputError(f"--policy: {policy} plays past versions of {past.of}; name one, as {past.of}@0.5")
        if seat is not None:
            seats[seat] = policy
    left = recorded_weights(parent, [name for name in config.trained if name not in given], leave_out=given)
    return Players(seats, [*(weights for weights in given.values() if weights is not None), *left])


def _check_known(policy: str, config: RunConfig, where: str) -> None:
    if policy not in config.policies:
        raise InputError(f"{where}: the run has no policy {policy!r}; it has {', '.join(config.policies)}")


def _split(parent: Parent, asked: str | Path) -> tuple[str | None, str | Path]:
    """The seat, where one is named, and what is wanted there."""
    if isinstance(asked, Path) or "=" not in asked or Path(asked).is_dir():
        return None, asked
    seat, _, wanted = asked.partition("=")
    if seat not in parent.begin.seats:
        raise InputError(f"--policy: the episode has no seat {seat!r}; it has {', '.join(parent.begin.seats)}")
    return seat, wanted


def recorded_weights(
    parent: Parent, learning: Collection[str] = (), *, leave_out: Collection[str] = ()
) -> list[WeightsRef]:
    """The weights each policy had last used by the turn; of those that learn and had not acted, the newest of then.

    Raises:
        InputError: weights are no longer on disk.
    """
    used = {turn.policy: turn for turn in parent.turns if turn.spans and turn.policy not in leave_out}
    versions = {
        policy: PolicyVersion(turn.weights_of or policy, turn.spans[-1].lineage, turn.spans[-1].step)
        for policy, turn in used.items()
    }
    for policy in learning:
        newest = None if policy in used else _newest(parent, policy)
        if newest is not None:
            versions[policy] = newest
    found = {policy: _weights(parent, version) for policy, version in versions.items()}
    return [
        replace(weights, version=weights.version._replace(policy=policy))
        for policy, weights in found.items()
        if weights is not None
    ]


def _newest(parent: Parent, policy: str) -> PolicyVersion | None:
    """The newest version of a policy when the turn began."""
    statement = "SELECT lineage, step FROM versions WHERE policy = ? AND lineage >= 0 AND published_at <= ?"
    for directory in parent.ancestors.values():
        log = SqliteRunLog(Path(directory))
        try:
            rows = log.rows(f"{statement} ORDER BY published_at DESC LIMIT 1", policy, parent.turns[-1].started)
        finally:
            log.close()
        for lineage, step in rows:
            return PolicyVersion(policy, lineage, step)
    return None


def _weights(parent: Parent, version: PolicyVersion) -> WeightsRef | None:
    """Where the weights of a version lie; None: they are the base model's.

    Raises:
        InputError: they are not on disk.
    """
    for directory in parent.ancestors.values():
        log = SqliteRunLog(Path(directory))
        try:
            weights = log.published(version)
        finally:
            log.close()
        if weights is not None and Path(weights.path).is_dir():
            return weights
    if version.step > 0:
        raise InputError(
            f"the weights of {version} are not on disk, or no longer; give --policy a directory, such as "
            "RUN/policies/NAME, or a version that `agentrl step list` shows and `checkpoint.versions` kept"
        )
    return None
