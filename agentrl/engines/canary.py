"""The canary of a version: a few log-probabilities by which an engine proves that it serves those weights.

The trainer writes them into the metadata of the version's file. An engine reads them (`read_canary`), computes its
own, and compares (`check_canary_answer`). The digest of the file covers its canary, so a canary belongs to those
weights and to no others. Imports no torch: engines without it share the table of versions, which refers to canaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentrl.core.errors import version_refused_error

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.core.errors import EngineError
    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef

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
        canary = CanaryJson(*(column.tolist() for column in columns))
        return {CANARY_KEY: msgspec.json.encode(canary).decode()}

    def asks_like(self, other: Canary) -> bool:
        """Whether answers to both canaries can be compared."""
        return np.array_equal(self.contexts, other.contexts) and np.array_equal(self.token_ids, other.token_ids)


# --- the check in an engine -------------------------------------------------------------------------------------------

_MAX_NATS = 1e6


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits on the mean distance between an answer and a canary's log-probabilities, in nats."""

    tolerance: float
    """Distance above which the answer comes from another model, or from arithmetic too coarse for importance ratios."""
    floor: float
    """Distance below which a difference is rounding, and distinguishes no versions."""


_EXACT = _Limits(tolerance=1e-2, floor=1e-5)
"""Limits if engine and file are in float32."""
_ROUNDING_LIMITS = _Limits(tolerance=0.25, floor=1e-2)
"""Limits if either is in 16 bits, before any version of the policy has passed."""
_COARSE_LIMITS = _Limits(tolerance=1.5, floor=1e-2)
"""Limits if the engine computes in eight bits or fewer: SmolLM2-135M in FP8, weights and activations, is 0.4 to 0.7
nats from its computation in bfloat16."""
_FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def read_canary(weights: WeightsRef, metadata: Mapping[str, str], tensors: Mapping[str, Any]) -> Canary | None:
    """Return the canary of a version's file; None if it has none.

    Raises:
        EngineError: the file's canary is damaged.
    """
    text = metadata.get(CANARY_KEY)
    if text is None:
        return None
    try:
        if len(text) > 1 << 20:
            raise ValueError(f"{len(text)} characters")
        canary = msgspec.json.decode(text, type=CanaryJson)
        contexts, tokens = np.array(canary.contexts, np.int64), np.array(canary.token_ids, np.int64)
        logprobs, start = (np.array(rows, np.float64) for rows in (canary.logprobs, canary.start_logprobs))
    except (ValueError, OverflowError) as error:  # msgspec's errors are ValueErrors
        raise version_refused_error(weights, f"its canary cannot be read ({str(error)[:200]!a})") from error
    if contexts.ndim != 2 or not (0 < len(contexts) <= 64 and 0 < contexts.shape[1] <= 512):
        raise version_refused_error(weights, f"its canary has contexts of shape {contexts.shape}")
    # vLLM returns at most 128 log-probabilities at once
    if not 1 < len(tokens) <= 128 or {logprobs.shape, start.shape} != {(len(contexts), len(tokens))}:
        shapes = f"{logprobs.shape} and {start.shape}"
        raise version_refused_error(
            weights, f"its canary has {len(tokens)} tokens and log-probabilities of shapes {shapes}"
        )
    for ids in (contexts, tokens):
        if int(ids.min()) < 0 or int(ids.max()) > np.iinfo(np.int32).max:
            raise version_refused_error(weights, "its canary has token ids that are negative, or beyond 32 bits")
    if not all(((values >= -_MAX_NATS) & (values <= 1e-3)).all() for values in (logprobs, start)):
        raise version_refused_error(weights, f"its canary has log-probabilities outside [-{_MAX_NATS:g}, 0]")
    return Canary(
        contexts=contexts.astype(np.int32),
        token_ids=tokens.astype(np.int32),
        logprobs=logprobs.astype(np.float32),
        start_logprobs=start.astype(np.float32),
        is_exact=all(str(tensor.dtype) == "torch.float32" for tensor in tensors.values()),
    )


def check_canary_vocabulary(weights: WeightsRef, canary: Canary, vocabulary: int) -> None:
    """Refuse the canary of another model.

    Raises:
        EngineError: the canary has tokens beyond the vocabulary.
    """
    if max(int(canary.contexts.max()), int(canary.token_ids.max())) >= vocabulary:
        raise version_refused_error(weights, f"its canary has tokens outside the model's vocabulary of {vocabulary}")


def check_canary_answer(
    weights: WeightsRef,
    canary: Canary,
    answer: Float32Array,
    *,
    precision: str,
    others: Mapping[PolicyVersion, Canary],
    rounding: dict[str, ObservedRounding],
) -> None:
    """Refuse a version if the engine's answer to its canary fits other weights.

    The answer is wrong if it is further from the trainer's than rounding explains; or, because one update may change
    less than that, if it is at least twice as close to the answer of another version as to its own.

    Args:
        weights: the new version.
        canary: canary of the version.
        answer: [m, n], the engine's log-probabilities of the canary's tokens.
        precision: the coarsest numbers in which the engine computes: a dtype, such as `bfloat16`, or its quantization.
        others: canaries of the other versions that the engine serves or served, and could have mistaken for it.
        rounding: rounding seen in the versions that have passed, by policy; this version's is added.

    Raises:
        EngineError: the answer is not the version's.
    """
    observed_rounding = rounding.setdefault(weights.version.policy, ObservedRounding())
    change = _distance(canary.logprobs, canary.start_logprobs)
    if precision not in _FLOAT_DTYPES:
        limits = _COARSE_LIMITS
    elif canary.is_exact and precision == "float32":
        limits = _EXACT
    else:
        limits = _limits_for_rounding(observed_rounding, change)
    distance_to_self, nearest, name = (
        _distance(answer, canary.logprobs),
        _distance(answer, canary.start_logprobs),
        "the model the run began with",
    )
    for version, other_canary in others.items():
        if other_canary.asks_like(canary) and (distance := _distance(answer, other_canary.logprobs)) < nearest:
            nearest, name = distance, str(version)
    # twice as close: it is the other version
    if distance_to_self > limits.floor and distance_to_self > 2.0 * nearest:
        raise version_refused_error(
            weights,
            f"the engine answers its canary check as {name} would: the log-probabilities of {answer.size} next tokens "
            f"differ by {nearest:.2g} nats on average from those of {name}, and by {distance_to_self:.2g} from those "
            "the trainer computed. The engine serves other weights than those it was given",
        )
    if not distance_to_self <= limits.tolerance:
        raise _too_far(weights, distance_to_self, limits.tolerance, precision)
    if max(distance_to_self, change) >= _ROUNDING_LIMITS.floor:  # a small change with little rounding shows nothing
        observed_rounding.distance, observed_rounding.change = (
            max(observed_rounding.distance, distance_to_self),
            max(observed_rounding.change, change),
        )


def _limits_for_rounding(rounding: ObservedRounding, change: float) -> _Limits:
    """Return the limits in 16 bits for a version that is `change` nats from the weights that the run began with.

    The effect of rounding cannot be derived from a model's shape (0.009 nats with 3 layers, 0.016 with 4, 0.05 to 0.14
    with 30), so versions that have passed determine it. It grows with their change at first: an adapter that is zero
    rounds nothing.
    """
    if not rounding.distance:
        return _ROUNDING_LIMITS
    # In 16 bits a version may round three times as much as earlier versions that changed as much. Models of 3, 4 and 30
    # layers, moved by 1 % and 10 % of their weights' deviation, rounded 1.4 times as much; in eight bits, 4 to 10.
    growth = 3.0 * max(1.0, change / max(rounding.change, _ROUNDING_LIMITS.floor))
    return _Limits(
        min(max(growth * rounding.distance, 2 * _ROUNDING_LIMITS.floor), _ROUNDING_LIMITS.tolerance),
        _ROUNDING_LIMITS.floor,
    )


def _too_far(weights: WeightsRef, difference: float, tolerance: float, precision: str) -> EngineError:
    return version_refused_error(
        weights,
        f"the engine's log-probabilities of its canary tokens differ by {difference:.2g} nats on average from those "
        f"the trainer computed; with {precision} in the engine at most {tolerance:.2g} is allowed. Either the "
        "engine has other weights or another model than the trainer, or the two compute so differently that "
        "importance ratios mean nothing",
    )


def _distance(answer: Float32Array, logprobs: Float32Array) -> float:
    """Return the mean |Δ log-probability| in nats, after subtracting each context's mean Δ.

    The subtracted mean is the rounding error of the shared normalizer: left in, it makes different versions look alike.
    """
    difference = answer.astype(np.float64) - logprobs
    return float(np.abs(difference - difference.mean(axis=1, keepdims=True)).mean())
