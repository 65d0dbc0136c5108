"""Whether a model computes over slots what it computes alone: asked once, when it is loaded.

Models differ in how they use a cache, a mask and positions. Rather than keep a list of those that work, the engine lets
the model prefill two ragged contexts in pieces, decode, and compares with a plain forward pass: short contexts, and
those that grow beyond a length at which the model may begin to compute otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, ModelError
from agentrl.core.memory import memory
from agentrl.engines.passes import Pass, PassRunner
from agentrl.engines.slot_cache import SlotCache
from agentrl.engines.slot_columns import SlotColumns
from agentrl.engines.weight_files import kv_bytes_per_token, special_lengths

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

_CONTEXTS = ((0, 5, 1, 3, 2, 4), (0, 2, 0, 1))
_PIECES = ((4, 2), (1, 1), (1, 1))
"""Tokens of each context computed by each pass."""
_ROW_TOKENS = 9


def check_slots(model: PreTrainedModel, path: str, *, max_context: int) -> None:
    """Refuse a model that computes something else over slots than alone, in contexts of up to `max_context` tokens.

    Raises:
        ModelError: it does, or it fails.
    """
    random, few = np.random.default_rng(0), min(6, int(model.config.get_text_config().vocab_size))
    try:
        difference = _largest_difference(model, _CONTEXTS, _PIECES)
        for length in special_lengths(model.config, max_context):
            grown = min(length + 5, max_context)
            contexts = (tuple(random.integers(0, few, grown).tolist()), _CONTEXTS[1])
            pieces = ((length - 1, 2), (grown - length, 1), (1, 1))
            difference = float(np.maximum(difference, _largest_difference(model, contexts, pieces)))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelError(f"{path}: {type(model).__name__} cannot run in the embedded engine ({error!r})") from error
    if not difference < 1e-2 + 4 * torch.finfo(model.dtype).eps:
        raise ModelError(
            f"{path}: {type(model).__name__} gives other logits over slots than alone (by {difference:.2g} of their "
            "spread); its attention or cache is of a kind that the embedded engine does not support"
        )


def check_memory(model: PreTrainedModel, *, slots: int, max_context: int) -> None:
    """Refuse more keys and values than there is memory for: they are allocated with the first call.

    Raises:
        EngineCapabilityError: so many contexts of that length do not fit this machine.
    """
    if model.device.type != "cpu":
        return
    needed, free = slots * (max_context + 1) * kv_bytes_per_token(model.config), memory().free
    if needed > free:
        raise EngineCapabilityError(
            f"keys and values of {slots} contexts of {max_context} tokens take {needed >> 20} MiB, and {free >> 20} "
            "are free; lower engine.slots or engine.max_context"
        )


def _largest_difference(
    model: PreTrainedModel, contexts: tuple[tuple[int, ...], ...], pieces: tuple[tuple[int, int], ...]
) -> float:
    """Relative to the spread of the logits."""
    longest = max(map(len, contexts))
    cache = SlotCache(slots=2, capacity=longest, layers=model.config.num_hidden_layers)
    columns = SlotColumns(slots=2, capacity=longest)
    for slot, context in enumerate(contexts):
        columns.tokens[slot, : len(context)] = context
        columns.length[slot] = len(context)
    runner = PassRunner(
        cache=cache, columns=columns, device=model.device, dtype=model.dtype, tap=None, kept=None, clock=SystemClock()
    )
    largest = 0.0
    for counts in pieces:
        one = Pass(
            model=model, bank=None, slots=np.arange(2), counts=np.array(counts), adapters=np.full(2, -1, np.int64)
        )
        with torch.inference_mode():
            logits = runner.logits(one)
        for slot, context in enumerate(contexts):
            plain = _plain_logits(model, context[: columns.computed[slot]])
            # NumPy's, since that of Python drops a NaN.
            largest = float(np.maximum(largest, float((logits[slot] - plain).abs().max() / plain.std())))
    return largest


def _plain_logits(model: PreTrainedModel, context: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([context], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
    return logits


def check_rows(model: PreTrainedModel, path: str, *, slots: int) -> None:
    """Refuse fixed shapes where a row's logits depend on its place in the pass or on the other rows.

    Raises:
        EngineCapabilityError: they do, on this machine, with this many slots.
    """
    rng = np.random.default_rng(0)
    context = rng.integers(0, int(model.config.vocab_size), _ROW_TOKENS)
    reference = _fixed_logits(model, np.tile(context, (slots, 1)))
    company = rng.integers(0, int(model.config.vocab_size), (slots, _ROW_TOKENS))
    company[slots // 2] = context
    alone = _fixed_logits(model, company)[slots // 2]
    if not (bool((reference == reference[0]).all()) and bool((alone == reference[0]).all())):
        raise EngineCapabilityError(
            f"{path}: on this machine a row's logits depend on its place among the {slots} slots, so that a run cannot "
            "be repeated bit for bit; try another engine.slots (a multiple of 16), or set deterministic = false"
        )


def _fixed_logits(model: PreTrainedModel, contexts: NDArray[np.int64]) -> Tensor:
    """Logits after the last token of each context, one token at a time; `[slots, V]`."""
    slots, length = contexts.shape
    cache = SlotCache(slots=slots, capacity=length, layers=model.config.num_hidden_layers)
    columns = SlotColumns(slots=slots, capacity=length)
    columns.tokens[:, :length] = contexts
    columns.length[:] = length
    runner = PassRunner(
        cache=cache, columns=columns, device=model.device, dtype=model.dtype, tap=None, kept=None, clock=SystemClock()
    )
    everyone, ones, base = np.arange(slots), np.ones(slots, np.int64), np.full(slots, -1, np.int64)
    one = Pass(model=model, bank=None, slots=everyone, counts=ones, adapters=base, fixed=True)
    with torch.inference_mode():
        for _ in range(length):
            logits = runner.logits(one)
    return logits
