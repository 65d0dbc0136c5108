"""Whether a model computes over slots what it computes alone: asked once, when it is loaded.

Models differ in how they use a cache, a mask and positions. Rather than keep a list of those that work, the engine lets
the model prefill two ragged contexts in pieces, decode, and compares with a plain forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.core.clock import SystemClock
from agentrl.core.errors import ModelError
from agentrl.engines.passes import Pass, PassRunner
from agentrl.engines.slot_cache import SlotCache
from agentrl.engines.slot_columns import SlotColumns

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_CONTEXTS = ((0, 5, 1, 3, 2, 4), (0, 2, 0, 1))
_PIECES = ((4, 2), (1, 1), (1, 1))
"""Tokens of each context computed by each pass."""


def check_slots(model: PreTrainedModel, path: str) -> None:
    """Refuse a model that computes something else over slots than alone.

    Raises:
        ModelError: it does, or it fails.
    """
    try:
        difference = _largest_difference(model)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise ModelError(f"{path}: {type(model).__name__} cannot run in the embedded engine ({error!r})") from error
    if not difference < 1e-2 + 4 * torch.finfo(model.dtype).eps:
        raise ModelError(
            f"{path}: {type(model).__name__} gives other logits over slots than alone (by {difference:.2g} of their "
            "spread); its attention or cache is of a kind that the embedded engine does not support"
        )


def _largest_difference(model: PreTrainedModel) -> float:
    """Relative to the spread of the logits."""
    longest = max(map(len, _CONTEXTS))
    cache = SlotCache(slots=2, capacity=longest, layers=model.config.num_hidden_layers)
    columns = SlotColumns(slots=2, capacity=longest)
    for slot, context in enumerate(_CONTEXTS):
        columns.tokens[slot, : len(context)] = context
        columns.length[slot] = len(context)
    runner = PassRunner(
        cache=cache, columns=columns, device=model.device, dtype=model.dtype, tap=None, kept=None, clock=SystemClock()
    )
    largest = 0.0
    for counts in _PIECES:
        one = Pass(
            model=model, bank=None, slots=np.arange(2), counts=np.array(counts), adapters=np.full(2, -1, np.int64)
        )
        with torch.inference_mode():
            logits = runner.logits(one)
        for slot, context in enumerate(_CONTEXTS):
            plain = _plain_logits(model, context[: columns.computed[slot]])
            largest = max(largest, float((logits[slot] - plain).abs().max() / plain.std()))
    return largest


def _plain_logits(model: PreTrainedModel, context: tuple[int, ...]) -> Tensor:
    with torch.inference_mode():
        ids = torch.tensor([context], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
    return logits
