"""What a training sample feeds into an optimizer step: which of its tokens, how old they are, and a digest of it all.

Pure numpy, so that a step's input can be rebuilt where nothing is learned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import PolicyVersion
    from agentrl.core.training_records import TrainingSample


def trained_positions(sample: TrainingSample) -> NDArray[np.int64]:
    """Positions of `sample` that are trained; position 0 has nothing before it and cannot be."""
    positions = np.flatnonzero(sample.loss_mask)
    return positions[positions > 0]


def token_lags(sample: TrainingSample, version: PolicyVersion) -> NDArray[np.int32]:
    """Lag of each of the row's tokens behind `version`, as in the step's file; -1 where none of its spans is."""
    lags = np.full(len(sample.token_ids), -1, np.int32)
    for start, stop, sampled in sample.spans:
        steps = max(0, version.step - sampled.step)
        lags[start:stop] = steps if sampled.lineage == version.lineage else max(1, steps)
    return lags


def row_digest(sample: TrainingSample) -> bytes:
    """16 bytes over what a row fed into the step: tokens, mask, recorded log-probabilities, advantages."""
    digest = hashlib.blake2b(digest_size=16)
    for column, kind in (
        (sample.token_ids, "<i4"),
        (sample.loss_mask, "u1"),
        (sample.behavior_logprobs, "<f4"),
        (sample.advantages, "<f4"),
    ):
        digest.update(np.ascontiguousarray(column, kind).tobytes())
    return digest.digest()


def input_digest(row_digests: Iterable[bytes]) -> str:
    """Of a whole step: over the `row_digest`s of its rows, in the order they were consumed."""
    digest = hashlib.blake2b(digest_size=16)
    for part in row_digests:
        digest.update(part)
    return digest.hexdigest()
