"""What the engine knows of each slot, as columns: tokens, logprobs, lengths, limits and how the call there samples.

Owns: one numpy array per fact, indexed by slot, so that a pass handles all its rows without a Python loop.
Does not know calls, sessions or versions. Written by the event loop between passes and by the worker during one, never
at once.

A slot's context is `tokens[slot, :length]`, the first `computed` positions of which have their keys and values in the
cache. Sampling appends: the n-th token of the call in the slot is `tokens[slot, prompt + n]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentrl.engines.counter_random import uniform
from agentrl.engines.sampler import SamplingBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from agentrl.core.ports import GenerateRequest

    Slots = NDArray[np.int64]


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
        self._tempered = np.zeros(slots, np.bool_)
        self._stops = np.full((slots, 1), -1, np.int64)

    def begin(self, slot: int, request: GenerateRequest, *, reused: int) -> None:
        """Put a call into `slot`; the first `reused` positions already have their keys and values there."""
        context, sampling = request.token_ids, request.sampling
        count = len(context)
        capacity = self.tokens.shape[1] - 1
        self.tokens[slot, reused:count] = context[reused:]
        self.length[slot] = self.prompt[slot] = count
        self.computed[slot] = reused
        self.limit[slot] = min(count + sampling.max_tokens, capacity)
        self._seeds[slot] = request.seed & 0xFFFFFFFFFFFFFFFF
        self._sampled_before[slot] = request.sampled_before
        self._temperature[slot] = sampling.temperature
        self._top_k[slot] = sampling.top_k
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        self.filtered[slot] = sampling.is_filtered
        self._tempered[slot] = sampling.temperature != 1.0
        self._set_stops(slot, sampling.stop_token_ids)

    def _set_stops(self, slot: int, stops: Sequence[int]) -> None:
        missing = len(stops) - self._stops.shape[1]
        if missing > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def sampling(self, slots: Slots) -> SamplingBatch:
        """How the next token of each of `slots` is drawn."""
        number = self._sampled_before[slots] + self.length[slots] - self.prompt[slots]
        return SamplingBatch(
            uniforms=uniform(self._seeds[slots], number),
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            filtered=bool(self.filtered[slots].any()),
            tempered=bool(self._tempered[slots].any()),
        )

    def append(self, slots: Slots, tokens: NDArray[np.int64], logprobs: NDArray[np.float32]) -> list[int]:
        """Append one sampled token per slot; returns the slots whose call ended by it."""
        at = self.length[slots]
        self.tokens[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.length[slots] = at + 1
        ended = (at + 1 >= self.limit[slots]) | (self._stops[slots] == tokens[:, None]).any(axis=1)
        return slots[ended].tolist() if ended.any() else []

    def stopped(self, slot: int) -> bool:
        """Whether the last token of the slot is a stop token of its call."""
        return bool((self._stops[slot] == self.tokens[slot, self.length[slot] - 1]).any())

    def sampled(self, slot: int, start: int = 0) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of the tokens and logprobs sampled by the slot's call, from its `start`-th."""
        first, last = self.prompt[slot] + start, self.length[slot]
        return self.tokens[slot, first:last].astype(np.int32), self.logprobs[slot, first:last].copy()

    def common_prefix(self, slot: int, context: NDArray[np.int32]) -> int:
        """How many leading tokens of `context` the slot has computed; at most all but the last, which is forwarded."""
        limit = min(int(self.computed[slot]), len(context) - 1)
        differs = np.flatnonzero(self.tokens[slot, :limit] != context[:limit])
        return int(differs[0]) if len(differs) else limit
