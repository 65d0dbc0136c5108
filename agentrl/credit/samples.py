"""Turns episodes into training samples, and computes the inputs of an optimizer step from them.

Owns which trajectories of an episode belong to a unit, and the advantage of each token. Does not own the advantages of
units (computed from headers, on the control path), reading the journal, or packing. Needs numpy and no torch, so that a
step's inputs can be rebuilt on machines that cannot train.

Invariants: a token whose kept set is missing is not trained, nor one beyond `max_lag`; every
other sampled token is, once: a row whose prefix was routed twice becomes a sample per routing, each with the tokens
sampled under it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from agentrl.core.errors import EntriesError, UntrainableUnitsError
from agentrl.core.records import NEVER_RESUMED, Trajectory, TrajectoryCredit, Unit
from agentrl.core.tokens import TrainingSample, TrajectoryRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import Lines, PolicyVersion

INPUT_DIGEST_PREFIX = "3:"
"""Begins the digests of steps that cover all inputs; earlier ones, without it, covered four columns."""

ReadUnits = Callable[[Sequence[Unit]], Sequence[Sequence[Trajectory]]]
"""Returns the trajectories of each unit's episode."""


def unit_samples(unit: Unit, trajectories: Sequence[Trajectory]) -> list[TrainingSample]:
    """Return the rows of a unit's policy, in (seat, index, row) order; each sampled token has the advantage of its
    trajectory or, if the credit has advantages per turn, of its turn.

    Args:
        unit: names the policy and carries one credit per trajectory.
        trajectories: trajectories of the whole episode; those of other policies are left out.

    Returns:
        One sample per row with a sampled token, or per `ExpertRoutingSpan` of it; `row_index` counts the unit's rows.

    Raises:
        EntriesError: the journal lacks a trajectory the unit has a credit for.
    """
    by_agent = {(item.seat, item.index): item for item in trajectories if item.policy == unit.policy}
    result: list[TrainingSample] = []
    row_index = 0
    for credit in sorted(unit.credits, key=lambda item: (item.seat, item.index)):
        trajectory = by_agent.get((credit.seat, credit.index))
        if trajectory is None:
            raise EntriesError(
                f"episode {unit.episode_id} (attempt {unit.attempt}) has a unit of policy {unit.policy!r} with agent "
                f"{credit.seat}[{credit.index}], but {unit.location.partition} holds no such trajectory; "
                "the journal is damaged or belongs to another run"
            )
        for row in trajectory.rows:
            parts = _samples(row, credit, episode_id=unit.episode_id, row_index=row_index)
            result += (sample for sample in parts if sample.loss_mask.any())
            row_index += 1
    return result


def read_samples(units: Sequence[Unit], read: ReadUnits) -> list[list[TrainingSample]]:
    """Read the samples of several units, in order.

    Raises:
        UntrainableUnitsError: rows of some units cannot be trained; the error has the reason for each.
        JournalError: a partition cannot be read at all.
    """
    try:
        return [unit_samples(unit, episode) for unit, episode in zip(units, read(units), strict=True)]
    except EntriesError:
        samples: list[list[TrainingSample]] = []
        untrainable = []
        for unit in units:
            try:
                samples.append(unit_samples(unit, read([unit])[0]))
            except EntriesError as error:
                untrainable.append((unit.episode_id, unit.attempt, str(error)))
        if untrainable:
            raise UntrainableUnitsError(untrainable) from None
        return samples


def _samples(
    row: TrajectoryRow, credit: TrajectoryCredit, *, episode_id: str, row_index: int
) -> Iterator[TrainingSample]:
    """The samples of one row, one per routing, with its advantage on the trained tokens."""
    by_turn = np.array(credit.turn_advantages or (credit.advantage,), dtype=np.float32)
    advantages = by_turn[np.clip(row.turn_index, 0, len(by_turn) - 1)]
    for part in row.trainable():
        names = (name for name in TrajectoryRow.__struct_fields__ if name != "recorded_routing")
        columns = {name: getattr(part, name) for name in names}
        columns["advantages"] = np.where(part.loss_mask, advantages, np.float32(0))
        yield TrainingSample(
            **columns, episode_id=episode_id, row_index=row_index, seat=credit.seat, agent=credit.index
        )


def trained_positions(samples: Iterable[TrainingSample]) -> list[NDArray[np.int64]]:
    """Return the trained positions of each sample, as int64; never position 0, which has no token before it."""
    return [np.flatnonzero(sample.loss_mask[1:]) + 1 for sample in samples]


def token_lags(sample: TrainingSample, version: PolicyVersion, lines: Lines = NEVER_RESUMED) -> NDArray[np.int32]:
    """Return the age of each token at `version`, in steps, as int32; -1 for tokens outside the row's spans."""
    lags = np.full(len(sample.token_ids), -1, np.int32)
    for start, stop, version_of_span in sample.spans:
        lags[start:stop] = lines.age(version_of_span, version)
    return lags


def without_stale_tokens(
    samples: Iterable[TrainingSample],
    version: PolicyVersion,
    max_lag: int | None,
    lines: Lines = NEVER_RESUMED,
) -> tuple[list[TrainingSample], int]:
    """Leave out the tokens older than `max_lag` steps at `version`, and rows without others.

    Returns:
        The samples, and the number of tokens left out.
    """
    if max_lag is None:
        return list(samples), 0
    kept, num_stale = [], 0
    for sample in samples:
        assert sample.loss_mask is not None
        is_stale = sample.loss_mask & (token_lags(sample, version, lines) > max_lag)
        mask = sample.loss_mask & ~is_stale
        num_stale += int(is_stale.sum())
        if mask.any():
            advantages = np.where(mask, sample.advantages, np.float32(0))
            kept.append(msgspec.structs.replace(sample, loss_mask=mask, advantages=advantages))
    return kept, num_stale


def row_digest(sample: TrainingSample) -> bytes:
    """Return a digest of 16 bytes over a row's inputs to the step: temperature, and the table with all its columns,
    versions, kept sets and recorded experts. The table has temperatures only if the trained tokens have several: the
    temperature is then 0."""
    temperature = 1.0
    if sample.temperatures is not None:
        distinct = np.unique(sample.temperatures[sample.loss_mask])
        temperature = float(distinct[0]) if len(distinct) == 1 else 0.0
        if temperature:
            sample = sample.with_column("temperatures", None)
    content = msgspec.msgpack.encode((temperature, sample.encode()))
    return hashlib.blake2b(content, digest_size=16).digest()


def input_digest(row_digests: Iterable[bytes]) -> str:
    """Return the digest of a step's input: over the `row_digest`s of its rows in the order of consumption, in
    hexadecimal after `INPUT_DIGEST_PREFIX`."""
    digest = hashlib.blake2b(digest_size=16)
    for part in row_digests:
        digest.update(part)
    return INPUT_DIGEST_PREFIX + digest.hexdigest()
