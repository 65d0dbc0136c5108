"""Slots: the rows of the embedded engine, each with one conversation's keys, values and recurrent states.

`SlotColumns` holds a slot's tokens, lengths, limits and sampling parameters, `SlotKvCache` what the layers computed.
Knows neither conversations (`batcher.py` assigns slots), nor calls and versions. The event loop writes between passes
and the worker thread during one, never both at once.
Invariant: a pass reads and writes only the slots and positions that `address` named; padding is written to position
`capacity`, which is never read.

A slot's context is `tokens[slot, :length]`, the first `computed` positions of which have their keys and values in the
cache. Sampling appends: the n-th token of the call in the slot is `tokens[slot, prompt + n]`.

Keys and values exist for each position, so any prefix of a slot can be reused. A recurrent state (with the inputs that
the layer's convolution still needs) exists only for one position: a slot has the state at `computed`, and a second one
at `saved`, where the call's last prompt token is next. From there, the other calls of a group start, and a conversation
whose last turn is rewritten.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agentrl.core.tokens import Tokens
from agentrl.engines.counter_random import uniform
from agentrl.engines.models import layer_states

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.core.ports import GenerateRequest, SamplingParams

    Slots = NDArray[np.int64]


class PrefixCopy(NamedTuple):
    """Positions that one slot takes from another instead of computing them."""

    source: int
    target: int
    start: int
    stop: int


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
    penalties: Sequence[Penalties] = ()
    """Rows with penalties."""
    allowed: Sequence[tuple[int, int]] = ()
    """Each row with choices, with each token that continues one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """The penalties of one row of a pass."""

    row: int
    tokens: NDArray[np.int64]
    """The context and the tokens of the turn."""
    num_sampled: int
    """Number of tokens of the turn, the last ones."""
    presence: float
    frequency: float
    repetition: float

    def apply(self, scores: Tensor) -> None:
        """Change the logits `[B, V]` in place, as vLLM does."""
        row = scores[self.row]
        seen = torch.from_numpy(np.unique(self.tokens)).to(row.device)
        row[seen] = torch.where(row[seen] > 0, row[seen] / self.repetition, row[seen] * self.repetition)
        sampled, counts = np.unique(self.tokens[len(self.tokens) - self.num_sampled :], return_counts=True)
        penalty = torch.from_numpy((self.presence + self.frequency * counts).astype(np.float32)).to(row.device)
        row[torch.from_numpy(sampled).to(row.device)] -= penalty


class SlotColumns:
    """The columns of `slots` slots of at most `capacity` tokens."""

    def __init__(self, *, slots: int, capacity: int) -> None:
        self.tokens = np.zeros((slots, capacity + 1), np.int64)
        self.logprobs = np.zeros((slots, capacity + 1), np.float32)
        self.length = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.prompt = np.zeros(slots, np.int64)
        self.saved = np.zeros(slots, np.int64)
        """Position of each slot's second recurrent state; 0: none."""
        self.limit = np.zeros(slots, np.int64)
        self._seeds = np.zeros(slots, np.uint64)
        self._sampled_before = np.zeros(slots, np.int64)
        self._temperature = np.ones(slots, np.float32)
        self._top_k = np.zeros(slots, np.int64)
        self._top_p = np.ones(slots, np.float32)
        self._min_p = np.zeros(slots, np.float32)
        self.filtered = np.zeros(slots, np.bool_)
        self._has_temperature = np.zeros(slots, np.bool_)
        self._penalized: dict[int, SamplingParams] = {}
        """Sampling parameters of the slots whose call has penalties."""
        self._choosing: list[tuple[SamplingParams, ...]] = [()] * slots
        """Sampling parameters of a slot's call, if it has choices."""
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
        self._temperature[slot] = 1.0 if sampling.is_greedy else sampling.temperature
        self._top_k[slot] = 1 if sampling.is_greedy else sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self.filtered[slot] = sampling.is_filtered or sampling.is_greedy or bool(sampling.choices)
        self._has_temperature[slot] = self._temperature[slot] != 1.0
        self._penalized.pop(slot, None)
        if sampling.is_penalized:
            self._penalized[slot] = sampling
        self._choosing[slot] = (sampling,) * bool(sampling.choices)
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
            penalties=self._penalties(slots) if self._penalized else (),
            allowed=[
                (row, token)
                for row, slot in enumerate(slots.tolist())
                for sampling in self._choosing[slot]
                for token in self._continuations(slot, sampling)
            ],
        )

    def _continuations(self, slot: int, sampling: SamplingParams) -> list[int]:
        """Return the tokens that continue one of a call's choices, or end it."""
        start = self.prompt[slot] - self._sampled_before[slot]
        reply = (*self.tokens[slot, start : self.length[slot]].tolist(),)
        count = len(reply)
        nexts = [choice[count : count + 1] for choice in sampling.choices if choice[:count] == reply]
        return [token for one in nexts for token in one or sampling.stop_token_ids]

    def _penalties(self, slots: Slots) -> list[Penalties]:
        return [
            Penalties(
                row=row,
                tokens=self.tokens[slot, : self.length[slot]],
                num_sampled=int(self._sampled_before[slot] + self.length[slot] - self.prompt[slot]),
                presence=sampling.presence_penalty,
                frequency=sampling.frequency_penalty,
                repetition=sampling.repetition_penalty,
            )
            for row, slot in enumerate(slots.tolist())
            if (sampling := self._penalized.get(slot)) is not None
        ]

    def state_positions(
        self, slots: Slots, lengths: NDArray[np.int64], computed: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the last position in the first `lengths` tokens of each slot at which it has a recurrent state, once
        `computed` of its tokens are computed."""
        saved = self.saved[slots]
        return np.where(computed <= lengths, computed, np.where(saved <= lengths, saved, 0))

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

    def sampled(self, slot: int, start: int = 0) -> Tokens:
        """Copy the tokens sampled by the slot's call, from its `start`-th, with the columns recorded for each."""
        first, last = self.prompt[slot] + start, self.length[slot]
        return Tokens(
            token_ids=self.tokens[slot, first:last].astype(np.int32), logprobs=self.logprobs[slot, first:last].copy()
        )

    def common_prefix(self, slot: int, context: NDArray[np.int32]) -> int:
        """Return the number of leading tokens of `context` that the slot has computed, without its last token, which is
        always forwarded."""
        limit = min(int(self.computed[slot]), len(context) - 1)
        differs = np.flatnonzero(self.tokens[slot, :limit] != context[:limit])
        return int(differs[0]) if len(differs) else limit


@dataclass(slots=True)
class _LayerStates:
    """The states of one layer for the rows of a pass, by the names under which transformers' models read them."""

    conv_states: dict[int, Tensor] = field(default_factory=dict)
    recurrent_states: dict[int, Tensor] = field(default_factory=dict)
    record_past: bool = False


class SlotKvCache:
    """A duck-typed `transformers.Cache`: call `address` for a pass, pass it to the model as its cache, and then call
    `commit`."""

    is_compileable = False

    def __init__(self, model: PreTrainedModel, *, slots: int, capacity: int) -> None:
        num_layers = model.config.get_text_config().num_hidden_layers
        self.slots = slots
        self.capacity = capacity
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._rows: Tensor | None = None
        self._first = 0
        self._count = 0
        self._positions: Tensor | int = 0
        self._length = 0
        self._copies: Sequence[PrefixCopy] = ()
        self._twins: tuple[Tensor, Tensor, Tensor | int] | None = None
        """All slots that the pass computes one token of, the row of each, and the position."""
        self.layers = [_LayerStates() for _ in range(num_layers)]
        self._states: list[tuple[dict[int, Tensor], int, Tensor]] = []
        """Place in `layers`, and the states of all slots: row `slot` the newest, row `slots + slot` the saved one."""
        for layer_index, kind, number, state in layer_states(model):
            store = state.new_zeros(2 * slots, *state.shape[1:])
            self._states.append((getattr(self.layers[layer_index], kind), number, store))
        self._written: tuple[Tensor, Tensor] | None = None

    @property
    def has_states(self) -> bool:
        """Whether some layers have a recurrent state, so that a slot can continue only from certain positions."""
        return bool(self._states)

    def address(
        self,
        *,
        first: int,
        count: int,
        rows: Tensor | None,
        positions: Tensor | int,
        length: int,
        written: Tensor | None = None,
        copies: Sequence[PrefixCopy] = (),
        twins: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Set the positions at which the next pass reads and writes.

        Args:
            first: first slot of the pass.
            count: number of slots, consecutive from `first` unless `rows` is given.
            rows: `[B]` slots of the pass, ascending, if they are not consecutive.
            positions: positions to write, `[B, t]`; an int if `t == 1` and all rows agree.
            length: number of positions to read, from 0.
            written: indices of the rows whose states change; None: all.
            copies: positions to copy in each layer once the pass has written its own, in this order.
            twins: slots to write the results to, and the row that computes each; None: the slots of the rows. Such a
                pass computes one token per row.
        """
        self._first, self._count, self._rows = first, count, rows
        self._positions, self._length = positions, length
        self._copies, self._written, self._twins = copies, twins, None
        if twins is not None:
            slots, origins = twins
            self._twins = slots, origins, positions if isinstance(positions, int) else positions[origins, 0]
        block = slice(first, first + count)
        for states, number, store in self._states:
            if rows is None and written is None:
                states[number] = store[block]  # which the layer changes in place
                continue
            if self._written is None:
                slots = torch.arange(first, first + count, device=store.device) if rows is None else rows
                at = torch.arange(count, device=store.device) if written is None else written
                self._written = slots[at], at
            states[number] = store[block].clone() if rows is None else store.index_select(0, rows)

    def commit(self) -> None:
        """Keep the states that the pass has computed."""
        if self._written is not None:
            slots, at = self._written
            for states, number, store in self._states:
                store[slots] = states[number][at]

    def has_previous_state(self, layer_index: int | None = None, state_idx: int | None = None) -> bool:
        """Return True: a slot without a context has a state of zeros, from which a layer computes the same."""
        return True

    def update_conv_state(self, inputs: Tensor, layer_index: int, state_idx: int = 0, **unused: object) -> Tensor:
        """Append a convolution's inputs `[B, channels, t]`; returns them behind those of the tokens before."""
        window = self.layers[layer_index].conv_states[state_idx]
        whole = torch.cat([window, inputs], dim=-1)
        window.copy_(whole[..., -window.shape[-1] :])
        return whole

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **unused: object) -> Tensor:
        """Write the state after the pass's tokens."""
        return self.layers[layer_idx].recurrent_states[state_idx].copy_(state)

    def set_state(self, slot: int, source: int | None, *, saved: bool = False) -> None:
        """Make the state of slot `source`, its saved one if `saved`, the newest of `slot`; None: one without a
        context."""
        with torch.inference_mode():
            for _, _, store in self._states:
                if source is None:
                    store[slot] = 0
                else:
                    store[slot] = store[source + self.slots * saved]

    def save_state(self, slot: int) -> None:
        """Save the newest state of a slot."""
        with torch.inference_mode():
            for _, _, store in self._states:
                store[self.slots + slot] = store[slot]

    def update(
        self, key: Tensor, value: Tensor, layer_index: int, cache_kwargs: object | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, t, dim]`; returns all positions that the pass may attend to, `[B, heads, length, dim]`."""
        keys, values = self._keys[layer_index], self._values[layer_index]
        if keys is None or values is None:
            keys, values = self._allocate(key, value, layer_index)
        for store, new in ((keys, key), (values, value)):
            self._write(store, new)
            for copy in self._copies:
                _copy(store, copy)
        return self._read(keys), self._read(values)

    def _write(self, store: Tensor, new: Tensor) -> None:
        positions, rows = self._positions, self._rows
        if self._twins is not None:
            slots, origins, at = self._twins
            store[slots, :, at] = new[origins, :, 0]
        elif rows is None:
            block = store[self._first : self._first + self._count]
            if isinstance(positions, int):
                block[:, :, positions : positions + 1] = new
            else:
                index = torch.arange(self._count, device=new.device)[:, None]
                block[index, :, positions] = new.transpose(1, 2)
        elif isinstance(positions, int):
            store[rows, :, positions] = new[:, :, 0]
        else:
            store[rows[:, None], :, positions] = new.transpose(1, 2)

    def _read(self, store: Tensor) -> Tensor:
        if self._rows is None:
            return store[self._first : self._first + self._count, :, : self._length]
        return store[:, :, : self._length].index_select(0, self._rows)

    def _allocate(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        buffers = [_zeros_on_demand(x, (self.slots, x.shape[1], self.capacity + 1, x.shape[3])) for x in (key, value)]
        self._keys[layer_index], self._values[layer_index] = buffers
        return buffers[0], buffers[1]

    def copy(self, copy: PrefixCopy) -> None:
        """Copy keys and values."""
        with torch.inference_mode():
            for store in (*self._keys, *self._values):
                if store is not None:
                    _copy(store, copy)

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Return the number of positions before the new tokens; models ask only if positions are not given, and they
        are."""
        return 0


def _zeros_on_demand(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros. On a CPU they take no memory until they are written: most contexts stay far below full length."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    memory = mmap.mmap(-1, math.prod(shape) * like.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would hold the contexts of a thousand tokens
    return torch.frombuffer(memory, dtype=like.dtype).view(shape)


def _copy(store: Tensor, copy: PrefixCopy) -> None:
    store[copy.target, :, copy.start : copy.stop] = store[copy.source, :, copy.start : copy.stop]
