"""The canary of a version: a few log-probabilities by which an engine proves that it serves those weights.

The trainer writes them into the metadata of the version's file. `engines.weights.canary` reads and checks them.
The digest of the file covers its canary, so a canary belongs to those weights and to no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array

CANARY_KEY = "agentrl_probe"
"""Name of the canary in the metadata of a version's safetensors file."""


@dataclass(slots=True)
class ObservedRounding:
    """The rounding of a policy's versions in 16 bits, learned from versions that passed the canary check."""

    distance: float = 0.0
    """Largest mean distance between an engine's log-probabilities and its trainer's, in nats."""
    change: float = 0.0
    """Largest mean distance of a version's log-probabilities from the initial ones, in nats."""


class CanaryJson(msgspec.Struct, forbid_unknown_fields=True):
    """The canary as JSON."""

    contexts: list[list[int]]
    token_ids: list[int]
    logprobs: list[list[float]]
    start_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The canary check's tokens and expected result: the log-probability of each token after each context."""

    contexts: Int32Array  # [m, k]
    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [m, n], under the version
    start_logprobs: Float32Array  # [m, n], under the model the run began with
    is_exact: bool = True
    """Whether the version's file holds its weights unrounded."""

    def metadata(self) -> dict[str, str]:
        """Encode the canary for the metadata of the version's safetensors file."""
        columns = (self.contexts, self.token_ids, self.logprobs, self.start_logprobs)
        said = CanaryJson(*(column.tolist() for column in columns))
        return {CANARY_KEY: msgspec.json.encode(said).decode()}

    def asks_like(self, other: Canary) -> bool:
        """Whether answers to both canaries can be compared."""
        return np.array_equal(self.contexts, other.contexts) and np.array_equal(self.token_ids, other.token_ids)
