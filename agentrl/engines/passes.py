"""Forward passes over slots: what the engine's worker thread does, and nothing else.

Owns: turning slots into model inputs, running the model, sampling, and writing the outcome to the columns.
Does not decide which slots run, nor which weights serve them: the event loop hands it a plan.
Invariant: rows of a pass do not see one another; padding is written to a position that is never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.engines.sampler import sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.clock import Clock
    from agentrl.engines.adapter_bank import AdapterBank
    from agentrl.engines.capture import KeptSets, RoutingTap
    from agentrl.engines.slot_cache import SlotCache
    from agentrl.engines.slot_columns import SlotColumns, Slots

_REPEAT_SECONDS = 0.1
"""How long the worker stays with a plan; partials are delivered about every 0.2 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of one model: how many tokens each slot computes, and under which adapter."""

    model: PreTrainedModel
    bank: AdapterBank | None
    slots: Slots  # [B], ascending
    counts: NDArray[np.int64]  # [B]; 0 only where `fixed`: the row keeps its place and computes nothing
    adapters: NDArray[np.int64]  # [B], place in the bank, -1: base weights
    fixed: bool = False
    """One token per row over the whole capacity, whatever the rows hold: the same shapes in every pass."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; rates are the reader's business."""

    sampled_tokens: int = 0
    prefill_tokens: int = 0
    """Context tokens computed; those of contexts computed again count again."""
    cached_tokens: int = 0
    """Context tokens served from KV."""
    passes: int = 0
    rows: int = 0
    """Rows summed over passes: `rows / passes` is the mean batch."""
    busy_seconds: float = 0.0


class PassRunner:
    """Runs passes; lives on the worker thread."""

    def __init__(
        self,
        *,
        cache: SlotCache,
        columns: SlotColumns,
        device: torch.device,
        dtype: torch.dtype,
        tap: RoutingTap | None,
        kept: KeptSets | None,
        clock: Clock,
    ) -> None:
        self._cache = cache
        self._columns = columns
        self._device = device
        self._blocked = torch.finfo(dtype).min
        self._zero = torch.zeros((), dtype=dtype, device=self._device)
        self._keys = torch.arange(cache.capacity + 1, device=self._device)
        self._tap = tap
        self._kept = kept
        self._clock = clock
        self.stats = EngineStats()
        self.interrupted = False
        """Set by the event loop when there is something to do between two passes."""

    def run(self, plan: Sequence[Pass], *, repeat: bool) -> list[int]:
        """Run the passes in order; returns the slots whose calls ended with a stop token or at their limit.

        With `repeat` (all rows decode, nobody waits) the plan is run again, for a while, as long as no call ends and
        nothing sets `interrupted`: a change of threads costs a few rows, on a busy machine a pass.
        """
        start = now = self._clock.monotonic()
        ended: list[int] = []
        with torch.inference_mode():
            while True:
                for one in plan:
                    ended += self._sample(one, self.logits(one))
                now = self._clock.monotonic()
                if not repeat or ended or self.interrupted or now - start > _REPEAT_SECONDS:
                    break
        self.stats.busy_seconds += now - start
        return ended

    def logits(self, one: Pass) -> Tensor:
        """Run one pass; the logits after each row's last token, `[B, V]`."""
        slots, counts, columns = one.slots, one.counts, self._columns
        first, rows = int(slots[0]), len(slots)
        consecutive = int(slots[-1]) - first + 1 == rows
        begin = columns.computed[slots]
        width = int(counts.max())
        length = self._cache.capacity if one.fixed else int((begin + counts).max())
        write: Tensor | int
        if one.fixed:
            ids = columns.tokens[slots, begin][:, None]
            positions = self._to_device(begin[:, None])
            write = self._to_device(np.where(counts > 0, begin, self._cache.capacity)[:, None])
        elif width == 1:
            ids = columns.tokens[slots, begin][:, None]
            positions = self._to_device(begin[:, None])
            write = int(begin[0]) if length - 1 == begin[0] and bool((begin == begin[0]).all()) else positions
        else:
            offset = np.arange(width) - (width - counts[:, None])
            place = np.where(offset >= 0, begin[:, None] + offset, 0)
            ids = columns.tokens[slots[:, None], place]
            positions = self._to_device(place)
            write = self._to_device(np.where(offset >= 0, place, self._cache.capacity))
        index = None if consecutive else self._to_device(slots)
        self._cache.address(first=first, count=rows, rows=index, positions=write, length=length)
        mask = torch.where(self._keys[:length] <= positions[:, :, None], self._zero, self._blocked)[:, None]
        if one.bank is not None:
            one.bank.select(one.adapters)
        if self._tap is not None:
            self._tap.begin()
        logits: Tensor = one.model(
            input_ids=self._to_device(ids),
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        if self._tap is not None:
            self._tap.store(slots, begin, counts, width)
        columns.computed[slots] = begin + counts
        self.stats.passes += 1
        self.stats.rows += rows
        self.stats.prefill_tokens += int(counts.sum()) if width > 1 else 0
        return logits

    def _sample(self, one: Pass, logits: Tensor) -> list[int]:
        columns, slots = self._columns, one.slots
        ready = (columns.computed[slots] == columns.length[slots]) & (one.counts > 0)
        if not ready.all():
            slots = slots[ready]
            if not len(slots):
                return []
            logits = logits[torch.from_numpy(np.flatnonzero(ready)).to(self._device)]
        tokens, logprobs, kept = sample(logits, columns.sampling(slots))
        drawn = tokens.cpu().numpy()
        if self._kept is not None:
            self._kept.store(slots, kept, columns.filtered[slots])
        self.stats.sampled_tokens += len(slots)
        return columns.append(slots, drawn, logprobs.cpu().numpy())

    def score(self, one: Pass, token_ids: NDArray[np.int64], temperature: float) -> NDArray[np.float32]:
        """Log-probability of each token of one sequence given those before it, without the cache; entry 0 is 0."""
        start = self._clock.monotonic()
        ids = self._to_device(token_ids)[None]
        with torch.inference_mode():
            if one.bank is not None:
                one.bank.select(one.adapters)
            logits = one.model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
            found = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        scored = np.zeros(len(token_ids), np.float32)
        scored[1:] = found.cpu().numpy()
        self.stats.busy_seconds += self._clock.monotonic() - start
        return scored

    def next_logprobs(self, one: Pass, contexts: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """Log-probability of each of `tokens` after each context, `[B, n]`, without the cache."""
        start = self._clock.monotonic()
        with torch.inference_mode():
            if one.bank is not None:
                one.bank.select(one.adapters)
            logits = one.model(input_ids=self._to_device(contexts), use_cache=False, logits_to_keep=1).logits[:, -1]
            found: NDArray[np.float32] = torch.log_softmax(logits.float(), dim=-1)[:, tokens].cpu().numpy()
        self.stats.busy_seconds += self._clock.monotonic() - start
        return found

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)
