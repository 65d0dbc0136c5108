"""Slots: the rows of the embedded engine, each with one conversation's keys and values.

`SlotColumns` holds a slot's tokens, lengths, limits and sampling parameters, `SlotKvCache` its keys and values. Knows
neither conversations (`batcher.py` assigns slots), nor calls and versions. The event loop writes between passes and the
worker thread during one, never both at once.
Invariant: a pass reads and writes only the slots and positions that `address` named; padding is written to position
`capacity`, which is never read.

A slot's context is `tokens[slot, :length]`, the first `computed` positions of which have their keys and values in the
cache. Sampling appends: the n-th token of the call in the slot is `tokens[slot, prompt + n]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.engines.counter_random import uniform

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from agentrl.core.ports import GenerateRequest

    Slots = NDArray[np.int64]
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSamplingParameters:
    """Sampling parameters of each row of a pass, `[B]` each."""

    uniforms: NDArray[np.float64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """Number of likeliest tokens to keep; 0: all."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    filtered: bool
    """Whether any row has a filter."""
    tempered: bool
    """Whether any row has a temperature other than 1."""


class SlotColumns:
    """The columns of `slots` slots of at most `capacity` tokens."""

    def __init__(self, *, slots: int, capacity: int) -> None:
        self.tokens = np.zeros((slots, capacity + 1), np.int64)
        self.logprobs = np.zeros((slots, capacity + 1), np.float32)
        self.length = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.limit = np.zeros(slots, np.int64)
        self._seeds = np.zeros(slots, np.uint64)
        self._sampled_before = np.zeros(slots, np.int64)
        self._temperature = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self.filtered = np.zeros(slots, np.bool_)
        self._has_temperature = np.zeros(slots, np.bool_)
        self._stops = np.full((slots, 1), -1, np.int64)

    def begin(self, slot: int, request: GenerateRequest, *, num_reused: int) -> None:
        """Put a call into `slot`; the KV of its first `num_reused` positions is already there."""
        context, sampling = request.token_ids, request.sampling
        count = len(context)
        capacity = self.tokens.shape[1] - 1
        self.tokens[slot, num_reused:count] = context[num_reused:]
        self.length[slot] = self.prompt[slot] = count
        self.computed[slot] = num_reused
        self.limit[slot] = min(count + sampling.max_tokens, capacity)
        self._seeds[slot] = request.seed & 0xFFFFFFFFFFFFFFFF
        self._sampled_before[slot] = request.sampled_before
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self.filtered[slot] = sampling.is_filtered
        self._has_temperature[slot] = sampling.temperature != 1.0
        self._set_stops(slot, sampling.stop_token_ids)

    def _set_stops(self, slot: int, stops: Sequence[int]) -> None:
        missing = len(stops) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def sampling(self, slots: Slots) -> RowSamplingParameters:
        """Return the sampling parameters for the next token of each of `slots`."""
        number = self._sampled_before[slots] + self.length[slots] - self.prompt[slots]
        return RowSamplingParameters(
            uniforms=uniform(self._seeds[slots], number),
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            filtered=bool(self.filtered[slots].any()),
            tempered=bool(self._has_temperature[slots].any()),
        )

    def append(self, slots: Slots, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> list[int]:
        """Append one sampled token per slot; returns the slots whose call has ended by it."""
        at = self.length[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.length[slots] = at + 1
        has_ended = (at + 1 >= self.limit[slots]) | (self._stops[slots] == tokens[:, None]).any(axis=1)
        return slots[has_ended].tolist() if has_ended.any() else []

    def stopped(self, slot: int) -> bool:
        """Whether the last token of the slot is a stop token of its call."""
        return bool((self._stops[slot] == self.tokens[slot, self.length[slot] - 1]).any())

    def sampled(self, slot: int, start: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copy the tokens and logprobs sampled by the slot's call, from its `start`-th."""
        first, last = self.prompt[slot] + start, self.length[slot]
        return self.tokens[slot, first:last].astype(np.int32), self.logprobs[slot, first:last].copy()

    def common_prefix(self, slot: int, context: NDArray[np.int32]) -> int:
        """Return the number of leading tokens of `context` that the slot has computed, without its last token, which is
        always forwarded."""
        limit = min(int(self.computed[slot]), len(context) - 1)
        differs = np.flatnonzero(self.tokens[slot, :limit] != context[:limit])
        return int(differs[0]) if len(differs) else limit


class SlotKvCache:
    """A duck-typed `transformers.Cache`: call `address` for a pass, then pass it to the model as `past_key_values`."""

    is_compileable = False

    def __init__(self, *, slots: int, capacity: int, layers: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._rows: Tensor | None = None
        self._first = 0
        self._count = 0
        self._positions: Tensor | int = 0
        self._length = 0

    def address(self, *, first: int, count: int, rows: Tensor | None, positions: Tensor | int, length: int) -> None:
        """Set the positions at which the next pass reads and writes.

        Args:
            first: first slot of the pass.
            count: number of slots, consecutive from `first` unless `rows` is given.
            rows: `[B]` slots of the pass, ascending, if they are not consecutive.
            positions: positions to write, `[B, t]`; an int if `t == 1` and all rows agree.
            length: number of positions to read, from 0.
        """
        self._first, self._count, self._rows = first, count, rows
        self._positions, self._length = positions, length

    def update(
        self, key: Tensor, value: Tensor, layer_index: int, cache_kwargs: object | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, t, dim]`; returns all positions that the pass may attend to, `[B, heads, length, dim]`."""
        keys, values = self._keys[layer_index], self._values[layer_index]
        if keys is None or values is None:
            keys, values = self._allocate(key, value, layer_index)
        return self._write(keys, key), self._write(values, value)

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        positions, rows = self._positions, self._rows
        if rows is None:
            block = store[self._first : self._first + self._count]
            if isinstance(positions, int):
                block[:, :, positions : positions + 1] = new
            else:
                index = torch.arange(self._count, device=new.device)[:, None]
                block[index, :, positions] = new.transpose(1, 2)
            return block[:, :, : self._length]
        if isinstance(positions, int):
            store[rows, :, positions] = new[:, :, 0]
        else:
            store[rows[:, None], :, positions] = new.transpose(1, 2)
        return store[:, :, : self._length].index_select(0, rows)

    def _allocate(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        buffers = [x.new_zeros(self.slots, x.shape[1], self.capacity + 1, x.shape[3]) for x in (key, value)]
        self._keys[layer_index], self._values[layer_index] = buffers
        return buffers[0], buffers[1]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        with torch.inference_mode():
            for store in (*self._keys, *self._values):
                if store is not None:
                    store[target, :, :length] = store[source, :, :length]

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Return the number of positions before the new tokens; models ask only if positions are not given, and they
        are."""
        return 0
