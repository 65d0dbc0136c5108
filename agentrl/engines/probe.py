"""The probe of a version: what its trainer computes for a few next tokens after a few contexts, in the version's file.

Owns: what the file says, and whether an engine's answer is that of the version. Does not know how an engine answers.
It is part of the file whose digest is checked, so it belongs to those weights and to no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from agentrl.engines.weight_files import WeightFile, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.core.errors import EngineError
    from agentrl.core.records import Float32Array, Int32Array, WeightsRef

KEY = "agentrl_probe"
"""In the metadata of the safetensors file."""
_MAX_CONTEXTS = 64
_MAX_LENGTH = 512
_MAX_TOKENS = 128
"""The log-probabilities vLLM gives at once."""
_MAX_CHARACTERS = 1 << 20
_MAX_NATS = 1e6
_START = "the model the run began with"


@dataclass(frozen=True, slots=True)
class _Limits:
    """In nats, of the distance between an answer and log-probabilities."""

    tolerance: float
    """More is another model, or arithmetic that no ratio survives."""
    floor: float
    """Less is rounding: nobody is told apart by it."""


_EXACT = _Limits(tolerance=1e-2, floor=1e-5)
"""Engine and file in float32."""
_ROUNDED = _Limits(tolerance=0.25, floor=1e-2)
"""Either in 16 bits."""
_NEARER = 2.0
"""An answer that is this many times nearer to another version is that version's."""


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """The probe as JSON."""

    contexts: list[list[int]]
    token_ids: list[int]
    logprobs: list[list[float]]
    start_logprobs: list[list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What an engine that serves the version must answer: how likely each token is after each context."""

    contexts: Int32Array  # [m, k]
    token_ids: Int32Array  # [n]
    logprobs: Float32Array  # [m, n], under the version
    start_logprobs: Float32Array  # [m, n], under the model the run began with
    is_exact: bool = True
    """Whether the version's file holds its weights unrounded."""

    def metadata(self) -> dict[str, str]:
        """For the metadata of the version's safetensors file."""
        columns = (self.contexts, self.token_ids, self.logprobs, self.start_logprobs)
        said = _Said(*(column.tolist() for column in columns))
        return {KEY: msgspec.json.encode(said).decode()}

    def check_vocabulary(self, weights: WeightsRef, vocabulary: int) -> None:
        """Refuse the probe of another model.

        Raises:
            EngineError: it has tokens beyond the vocabulary.
        """
        if max(int(self.contexts.max()), int(self.token_ids.max())) >= vocabulary:
            raise refusal(weights, f"its probe has tokens outside the model's vocabulary of {vocabulary}")

    def asks_like(self, other: Probe) -> bool:
        """Whether answers to both can be compared."""
        return np.array_equal(self.contexts, other.contexts) and np.array_equal(self.token_ids, other.token_ids)


def read_probe(weights: WeightsRef, file: WeightFile) -> Probe | None:
    """The probe of a version's file; None where it has none.

    Raises:
        EngineError: what stands there is not a probe.
    """
    text = file.metadata.get(KEY)
    if text is None:
        return None
    try:
        if len(text) > _MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters")
        said = msgspec.json.decode(text, type=_Said)
        contexts, tokens = np.array(said.contexts, np.int64), np.array(said.token_ids, np.int64)
        logprobs, start = (np.array(rows, np.float64) for rows in (said.logprobs, said.start_logprobs))
    except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise refusal(weights, f"its probe cannot be read ({str(error)[:200]!a})") from error
    if contexts.ndim != 2 or not (0 < len(contexts) <= _MAX_CONTEXTS and 0 < contexts.shape[1] <= _MAX_LENGTH):
        raise refusal(weights, f"its probe has contexts of shape {contexts.shape}")
    if not 1 < len(tokens) <= _MAX_TOKENS or {logprobs.shape, start.shape} != {(len(contexts), len(tokens))}:
        raise refusal(weights, f"its probe has {len(tokens)} tokens, or not a log-probability for each")
    for ids in (contexts, tokens):
        if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
            raise refusal(weights, "its probe has tokens of no vocabulary")
    if not all(((each >= -_MAX_NATS) & (each <= 1e-3)).all() for each in (logprobs, start)):
        raise refusal(weights, "its probe has log-probabilities that are none")
    return Probe(
        contexts=contexts.astype(np.int32),
        token_ids=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        start_logprobs=start.astype(np.float32),
        is_exact=all(tensor.dtype == torch.float32 for tensor in file.tensors.values()),
    )


def check_answer(
    weights: WeightsRef, probe: Probe, answer: Float32Array, *, dtype: torch.dtype, others: Mapping[str, Probe]
) -> None:
    """Refuse a version whose engine answers its probe as other weights would.

    Two ways to be wrong: further from the trainer's answer than any dtype explains; or, where one update changed less
    than that, at least twice as near to the answer of another version as to its own.

    Args:
        weights: the new version.
        probe: its own.
        answer: [m, n], the engine's log-probabilities of the probe's tokens.
        dtype: the engine computes in.
        others: by version, of what else the engine serves, or served before: what it may have been mistaken for.

    Raises:
        EngineError: the answer is not the version's.
    """
    limits = _EXACT if probe.is_exact and dtype == torch.float32 else _ROUNDED
    own, nearest, name = _distance(answer, probe.logprobs), _distance(answer, probe.start_logprobs), _START
    for version, other in others.items():
        if other.asks_like(probe) and (distance := _distance(answer, other.logprobs)) < nearest:
            nearest, name = distance, version
    if own > limits.floor and own > _NEARER * nearest:
        raise refusal(
            weights,
            f"the engine that loaded it answers its probe as {name} would: the log-probabilities of {answer.size} "
            f"next tokens differ by {nearest:.2g} nats on average from those of that, by {own:.2g} from those its "
            "trainer computed. The engine serves other weights than it was given",
        )
    if not own <= limits.tolerance:
        raise _too_far(weights, own, limits.tolerance, dtype)


def _too_far(weights: WeightsRef, difference: float, tolerance: float, dtype: torch.dtype) -> EngineError:
    name = str(dtype).removeprefix("torch.")
    return refusal(
        weights,
        f"the engine's log-probabilities of its probe differ by {difference:.2g} nats on average from those its "
        f"trainer computed; with {name} in the engine at most {tolerance:g} are taken. Either these are not the "
        "trainer's weights on the trainer's model, or both compute so differently that no ratio means anything; "
        "trainer.probe_contexts = 0 publishes without a probe",
    )


def _distance(answer: Float32Array, logprobs: Float32Array) -> float:
    """Mean |Δ log-probability| in nats, each context's mean Δ taken off.

    That is the rounding of one normaliser for all its tokens: left in, it makes strangers look alike.
    """
    difference = answer.astype(np.float64) - logprobs
    return float(np.abs(difference - difference.mean(axis=1, keepdims=True)).mean())
