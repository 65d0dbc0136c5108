"""Checks, when a model is loaded, whether prefix trees and padded rows compute what the model itself does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from agentrl.core.errors import ModelError
from agentrl.core.known_checks import known_result
from agentrl.core.model_layers import SELECTED_KEYS
from agentrl.core.tokens import TrainingSample
from agentrl.engines.models import (
    THRESHOLD_MULTIPLES,
    affordable_tokens,
    check_cost,
    check_finite_logits,
    check_lengths,
    computing_in_float32,
    configured_integers,
    has_recurrent_layers,
    native_attention,
    random_tokens,
    varied,
    with_few_layers,
)
from agentrl.learn.forward import (
    ATTENTION,
    FORWARD_ERRORS,
    UNFUSED_TOKENS,
    compiles_attention,
    guesses_lengths,
    logits_after,
    token_logprobs,
)
from agentrl.learn.packing import pack, padded_together
from agentrl.learn.ranks import gather_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_CHECK_LENGTH = 11
"""Number of tokens at the end of each row of the check whose log-probabilities are compared."""
REASON_LENGTH = 300
"""Maximum number of characters of an error that is shown as a reason."""
SHARING_TOLERANCE = 2e-3
"""Largest difference in log-probabilities between the model's own forward pass and the trainer's, in nats."""


def why_unshared(model: PreTrainedModel, max_context: int, directory: Path | None = None) -> str:
    """Return why the prefix tree does not reproduce the model's own log-probabilities, so that padded rows are used;
    empty if it does.

    Rows of many lengths (`check_lengths`) are computed together as a step would, in two packings, and each alone by the
    model's own forward pass. Weights that are still at a constant initial value get noise (`varied`). Both passes
    compute in float32, layer by layer, because rounding would hide a wrong position. What all layers would take too
    long for is computed with two layers of each kind. The function sets the model's attention according to the result.
    A model without weights, on the meta device, is assumed to share. Of a model as it was loaded from `directory`, a
    known result is used.

    The reference is the attention with which the model computes a row alone, `native_attention`, because transformers'
    `eager` is wrong for some models: it adds the ALiBi of Falcon twice.

    Raises:
        ModelError: neither reproduces them, or the model cannot be forwarded at all.
    """
    attention = native_attention(model)
    reason = ""
    if has_recurrent_layers(model):
        reason = "its recurrent or convolution layers, which mix the tokens of a row in order"
    elif any(
        value for name, value in model.config.get_text_config().to_dict().items() if name.startswith(SELECTED_KEYS)
    ):
        reason = "its indexer, which selects keys among those of a whole row"
    if model.device.type != "meta":
        check = partial(_measured_reason, model, max_context, reason)
        if directory is None or torch.distributed.is_initialized():  # ranks compute together
            reason = check()
        else:
            reason = known_result("shared prefixes", directory, model, max_context, check)
    model.set_attn_implementation(attention if reason else ATTENTION)
    return reason


def _measured_reason(model: PreTrainedModel, max_context: int, reason: str) -> str:
    """Return `reason` or else what differs over a prefix tree, once rows in one of the two ways are right.

    Raises:
        ModelError: neither way is.
    """
    stages = _check_stages(model, max_context)
    for is_shared in (False,) if reason else (True, False):
        mismatches = (_mismatch(model, stage, is_shared=is_shared) for stage in stages)
        mismatch = next((each for each in mismatches if each.text), _Mismatch())
        if not mismatch.text:
            return reason
        reason = mismatch.text
    raise ModelError(_refusal(model, stages, mismatch))


class _CheckStage(NamedTuple):
    """Rows of the check at the start that are computed with the same layers."""

    lengths: tuple[int, ...]
    layers: Callable[[PreTrainedModel], AbstractContextManager[None]]
    """Returns a context in which the model computes with those layers."""
    max_tokens: int
    """Number of tokens up to which a second packing may be filled with further rows; 0: there is one packing."""


class _Mismatch(NamedTuple):
    """How a pass of the trainer differs from the model's own; the text is empty if it does not."""

    text: str = ""
    difference: float = math.nan


_SHORT_ROWS = (12, 13, 15)
"""Lengths of rows that are always checked, with all layers: several, so that padding and masks are tested."""
_LARGEST_PACKING = 1 << 12
"""Number of tokens up to which the check fills a packing: a model may count the tokens of a whole micro-batch."""


def _all_layers(_: PreTrainedModel) -> AbstractContextManager[None]:
    return nullcontext()


def _check_stages(model: PreTrainedModel, max_context: int) -> list[_CheckStage]:
    """Choose the rows of the check at the start: with all layers, if that takes seconds, otherwise with few."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    max_context = min(max_context, positions or max_context)  # beyond its positions, a model may have no table
    passes = 4  # alone, in two packings, and again if the first way of computing them is wrong
    tokens = affordable_tokens(model, max_context, passes)
    unfused = UNFUSED_TOKENS if compiles_attention(model.device) else None  # no wait for a compiler
    lengths = check_lengths(model.config, max_context, tokens, unfused)
    if not lengths:
        return [_CheckStage(_SHORT_ROWS, _all_layers, 0)]
    if (unfused is not None or max_context in lengths) and check_cost(lengths) <= tokens:
        return [_CheckStage(tuple({*_SHORT_ROWS, *lengths}), _all_layers, min(tokens, _LARGEST_PACKING))]
    try:
        with with_few_layers(model), torch.no_grad(), computing_in_float32(model, gather_float32):
            (row,) = check_rows(model, [max(_SHORT_ROWS)])
            _reference_logprobs(model, row)
            few_tokens = affordable_tokens(model, max_context, passes)
    except FORWARD_ERRORS:  # layers of some models need others
        return [_CheckStage(tuple({*_SHORT_ROWS, *lengths}), _all_layers, 0)]
    few_lengths = tuple(check_lengths(model.config, max_context, few_tokens, unfused))
    return [
        _CheckStage(_SHORT_ROWS, _all_layers, 0),
        _CheckStage(few_lengths, with_few_layers, min(few_tokens, _LARGEST_PACKING)),
    ]


def _mismatch(model: PreTrainedModel, stage: _CheckStage, *, is_shared: bool) -> _Mismatch:
    """Compare the trainer's log-probabilities of rows, packed in two ways, with the model's own of each row alone.

    Raises:
        ModelError: the model cannot be forwarded, by itself or over padded rows.
    """
    attention = native_attention(model)
    # Of a wide output projection, only the last tokens of a row are compared.
    rows = check_rows(model, stage.lengths, many=_head_size(model) < 1 << 24)
    fillers = _filler_rows(model, stage)
    on_device = 1 << 30
    if compiles_attention(model.device) and is_shared:
        on_device = UNFUSED_TOKENS  # no wait for a compiler, but for a longer row
    kind = type(model).__name__
    with (
        stage.layers(model),
        torch.no_grad(),
        computing_in_float32(model, lambda parameter: varied(gather_float32(parameter))),
    ):
        model.set_attn_implementation(attention)
        try:
            expected = {id(row): _reference_logprobs(model, row) for row in rows}
        except FORWARD_ERRORS as error:
            raise ModelError(f"{kind} cannot be forwarded as a causal LM: {error!r}") from error
        model.set_attn_implementation(ATTENTION if is_shared else attention)
        largest = 0.0
        packings = [[*rows, *fillers]]
        if stage.max_tokens:
            packings += [rows[::2]] if is_shared else _padded_pairs(rows)
        for packed in packings:
            for batch in pack(packed, max_tokens=on_device, share=is_shared):
                try:
                    logprobs = token_logprobs(model, batch, shared=is_shared).logprob
                except Exception as error:
                    if is_shared:  # of the architecture, or of the attention kernel's compiler; the start names it
                        return _Mismatch(f"{type(error).__name__}: {' '.join(str(error).split())[:REASON_LENGTH]}")
                    raise ModelError(f"{kind} cannot be forwarded by the trainer: {error!r}") from error
                for sample, at, logprob in zip(batch.sample, batch.position, logprobs.tolist(), strict=True):
                    row = packed[sample]
                    if id(row) in expected:  # NumPy's maximum, because Python's max ignores NaN
                        largest = float(np.maximum(largest, abs(logprob - expected[id(row)][int(at)])))
    # A model that has learned nothing yet is near the uniform distribution, where a large fault changes little,
    # and rounding in float32 makes 1e-5 nats.
    spread = float(np.std([logprob for of_row in expected.values() for logprob in of_row.values()]))
    if largest <= max(1e-5, SHARING_TOLERANCE * min(1.0, spread) ** 2):
        return _Mismatch()
    with_prefixes = " with shared prefixes" if is_shared else ""
    return _Mismatch(f"log-probabilities differ by {largest:.2g}{with_prefixes}", largest)


def _padded_pairs(rows: Sequence[TrainingSample]) -> list[list[TrainingSample]]:
    """Return pairs of rows next to each other in length that are padded together, so that each length between them is
    once exceeded by padding alone."""
    by_length = sorted(rows, key=lambda row: len(row.token_ids))
    return [
        [shorter, longer]
        for shorter, longer in pairwise(by_length)
        if padded_together(len(longer.token_ids), len(shorter.token_ids))
    ]


def _refusal(model: PreTrainedModel, stages: Sequence[_CheckStage], mismatch: _Mismatch) -> str:
    """Return the message that refuses a model, with the length up to which it would match."""
    text = (
        f"{type(model).__name__}: log-probabilities recomputed from hidden states, rows of "
        f"{', '.join(map(str, sorted({length for stage in stages for length in stage.lengths})))} tokens together, "
        f"differ from the model's own by {mismatch.difference:.2g} (allowed: {SHARING_TOLERANCE}), so it cannot be "
        "trained"
    )
    stage = stages[-1]
    lengths = sorted(stage.lengths)
    right, wrong = 0, len(lengths)  # numbers of the shortest rows that match together, and that do not
    while wrong - right > 1:
        count = (right + wrong) // 2
        shorter = stage._replace(lengths=tuple(lengths[:count]))
        if _mismatch(model, shorter, is_shared=False).text:
            wrong = count
        else:
            right = count
    if not right:
        return text
    changes = sorted(
        (multiple, f"{path} = {value}")
        for path, value in configured_integers(model.config).items()
        for multiple in THRESHOLD_MULTIPLES
        if lengths[right - 1] <= value * multiple <= lengths[right]
    )
    names = ", ".join(dict.fromkeys(name for _, name in changes[:4]))
    return (
        f"{text}; set engine.max_context to at most {lengths[right - 1]}, where it matches"
        + f" (config.json may say why: {names})" * bool(changes)
    )


def _head_size(model: PreTrainedModel) -> int:
    text = model.config.get_text_config()
    return int(text.vocab_size) * int(getattr(text, "hidden_size", 0) or 0)


def _filler_rows(model: PreTrainedModel, stage: _CheckStage) -> list[TrainingSample]:
    """Make further rows, whose results are not compared, so that a packing exceeds the integers in the configuration
    that it may exceed."""
    tokens = sum(stage.lengths)
    thresholds = [
        value * multiple
        for value in configured_integers(model.config).values()
        for multiple in THRESHOLD_MULTIPLES
        if value * multiple < stage.max_tokens
    ]
    missing = max(thresholds, default=0) + _CHECK_LENGTH - tokens
    short = [length for length in stage.lengths if length <= 256]  # so that attention stays cheap
    lengths: list[int] = []
    while short and missing > 0:
        lengths.append(short[len(lengths) % len(short)])
        missing -= lengths[-1]
    return check_rows(model, lengths, seed=1) if lengths else []


def check_rows(
    model: PreTrainedModel, lengths: Sequence[int], *, many: bool = False, seed: int = 0
) -> list[TrainingSample]:
    """Make random rows, every other one of which begins like the first; the last tokens of each are trained, or with
    `many` also some in every part of it."""
    draws = random_tokens(model.config, (len(lengths), max(lengths)), seed)
    draws[1::2, :7] = draws[0, :7]
    rows = []
    for row_ids, length in zip(draws.astype(np.int32), lengths, strict=True):
        zeros = np.zeros(length, np.float32)
        mask = np.arange(length) >= max(1, length - _CHECK_LENGTH)
        if many:
            mask[1 :: max(1, length // 32)] = True
        rows.append(TrainingSample(token_ids=row_ids[:length], loss_mask=mask, logprobs=zeros, advantages=zeros))
    return rows


def _reference_logprobs(model: PreTrainedModel, row: TrainingSample) -> dict[int, float]:
    """Return the model's own log-probabilities of a row's trained tokens, keyed by position: the row alone, with its
    own attention."""
    ids = torch.from_numpy(row.token_ids.astype(np.int64)).to(model.device)
    positions = np.flatnonzero(row.loss_mask)
    places = torch.from_numpy(positions - 1).to(model.device)
    inputs: dict[str, Any] = {"input_ids": ids[None], "use_cache": False}
    if guesses_lengths(model):
        inputs["attention_mask"] = torch.ones_like(ids)[None]
    if len(ids) * int(model.config.get_text_config().vocab_size) <= 1 << 22:  # few enough to compute all logits
        logits = model(**inputs).logits[0, places]
    else:
        logits = logits_after(model, inputs, places)
    logprobs = logits.float().log_softmax(-1)
    check_finite_logits(model, logprobs)
    values = logprobs.gather(1, ids[places + 1, None])[:, 0].tolist()
    return dict(zip(positions.tolist(), values, strict=True))
