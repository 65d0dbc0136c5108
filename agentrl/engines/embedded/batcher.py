"""Continuous batching: admission of calls to slots, shared prefixes, and the plan of each forward pass.

A position's keys and values depend on the tokens up to it and on the weights. So each distinct position is computed in
one slot and copied to the others that need it: within a group of episodes, across groups whose prompts begin alike, and
among conversations that sample the same tokens. The cache holds a row per slot, and what no slot holds is computed
again.

Owns: calls and their completions, waiting and running; the assignment of slots to conversations, in LRU order. Lives on
the event loop, between passes. Does not run models, and does not choose versions: the engine hands it a resolver.
Invariants: a call runs in exactly one slot; a session has at most one slot, a slot at most one session; a busy slot is
never taken away; keys and values are reused only under the version that computed them; prefill per step is bounded, so
that no long context delays the others; no call waits forever, at any priority.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentrl.core.records import VersionSpan
from agentrl.core.tokens import Completion, KeptSets
from agentrl.engines.embedded.forward import ForwardPassPlan, StepPlan
from agentrl.engines.embedded.slots import PrefixCopy
from agentrl.engines.version_table import VersionedSession, empty_completion

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from agentrl.core.clock import Clock
    from agentrl.core.ports import GenerateRequest, NewTokensCallback
    from agentrl.core.records import FinishReason
    from agentrl.engines.embedded.capture import ExpertRoutingRecorder, SamplingMaskRecorder
    from agentrl.engines.embedded.forward import EmbeddedVersion, ServedModelCopy
    from agentrl.engines.embedded.slots import SlotColumns, SlotKvCache, Slots


@dataclass(slots=True, eq=False)
class EmbeddedSession(VersionedSession["EmbeddedVersion"]):
    """One conversation, and its slot while it has one. Made by `EmbeddedEngine.open`."""

    slot: int = -1

    @property
    def has_kv(self) -> bool:
        """Whether the session's KV is still in a slot."""
        return self.slot >= 0


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """One request in flight."""

    request: GenerateRequest
    session: EmbeddedSession
    future: asyncio.Future[Completion]
    on_delta: NewTokensCallback | None
    order: int
    """Arrival number."""
    queue_order: int = 0
    """Place in the queue: the arrival number, shifted by the priority."""
    serving: EmbeddedVersion | None = None
    """Version that samples the call now; None while it waits for a slot."""
    ending: bool = False
    """Whether the call was aborted or cancelled, so that it ends before the next pass."""
    cached: int = 0
    num_delivered: int = 0
    """Number of tokens passed to `on_delta`."""
    since: int = 0
    """Index of the first token sampled by `serving`."""
    spans: list[VersionSpan] = field(default_factory=list)

    def __lt__(self, other: ActiveRequest) -> bool:
        return (self.queue_order, self.order) < (other.queue_order, other.order)

    def close_span(self, num_sampled: int) -> None:
        """Attribute the first `num_sampled` tokens, as far as no span covers them, to the version that serves now."""
        if self.serving is None or num_sampled == self.since:
            return
        version, start = self.serving.version, self.since
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(start, num_sampled, version))
        self.since = num_sampled

    def deliver(self, columns: SlotColumns) -> None:
        """Pass `on_delta` the tokens sampled since its last call, separately by version."""
        if self.on_delta is None or self.serving is None:
            return
        sampled = columns.sampled(self.session.slot, self.num_delivered)
        num_sampled, start = self.num_delivered + len(sampled), self.num_delivered
        for span in (*self.spans, VersionSpan(self.since, num_sampled, self.serving.version)):
            first, last = max(span.start, start) - start, span.stop - start
            if last > max(first, 0):
                spans = (VersionSpan(0, last - max(first, 0), span.version),)
                delta = sampled.slice(max(first, 0), last).with_column("spans", spans)
                self.on_delta(self.request.request_id, delta)
        self.num_delivered = num_sampled

    def complete(
        self,
        columns: SlotColumns,
        reason: FinishReason,
        *,
        tap: ExpertRoutingRecorder | None,
        mask_recorder: SamplingMaskRecorder | None,
    ) -> Completion:
        """Make the reply to the call from the tokens sampled so far."""
        if self.serving is None:
            return empty_completion(reason)
        slot = self.session.slot
        sampled = columns.sampled(slot)
        self.close_span(len(sampled))
        table = msgspec.structs.replace(
            sampled,
            spans=tuple(self.spans),
            kept=KeptSets.of(mask_recorder.sets_of_call(slot)) if mask_recorder and columns.filtered[slot] else None,
            experts=tap.routing_of_call(slot, int(columns.computed[slot])) if tap else None,
        )
        return Completion.of(table, reason, self.cached)


class SlotTable:
    """The slots of one engine."""

    def __init__(self, slots: int, *, clock: Clock) -> None:
        self._free = deque(range(slots))
        """Free slots, the one freed longest ago first: a conversation that has ended leaves a prefix that others may
        copy."""
        self._idle: OrderedDict[int, tuple[EmbeddedSession, float]] = OrderedDict()
        self._clock = clock
        self.computed_by: list[EmbeddedVersion | None] = [None] * slots
        """Version that computed all keys and values of each slot; None if the slot is empty or mixed."""

    def has_slot(self, *, patient: bool) -> bool:
        """Whether a session without a slot gets one; a `patient` session does not evict a conversation between two
        turns."""
        if self._free or not self._idle:
            return bool(self._free)
        _, since = next(iter(self._idle.values()))
        return not patient or self._clock.monotonic() - since > 1.0

    def assign_slot(self, session: EmbeddedSession) -> int:
        """Assign a slot to a call of `session`: its own, a free one, or else the least recently used idle one."""
        if session.slot >= 0:
            del self._idle[session.slot]
        elif self._free:
            session.slot = self._free.popleft()
            self.computed_by[session.slot] = None
        else:
            session.slot, (evicted_session, _) = self._idle.popitem(last=False)
            evicted_session.slot = -1
            self.computed_by[session.slot] = None
        return session.slot

    def mark_idle(self, session: EmbeddedSession) -> None:
        """Make the session's slot evictable after its call has ended."""
        self._idle[session.slot] = (session, self._clock.monotonic())

    def free_slot(self, session: EmbeddedSession) -> None:
        """Free the slot of an idle session, if it has one."""
        if session.slot >= 0:
            del self._idle[session.slot]
            self._free.append(session.slot)
            session.slot = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The running calls that one model copy serves, `[B]` each."""

    model_copy: ServedModelCopy
    slots: Slots
    adapters: NDArray[np.int64]
    versions: NDArray[np.int64]
    """Numbers that are equal for slots whose keys and values one version computed."""

    def decode(self, rows: NDArray[np.bool_]) -> ForwardPassPlan:
        """Plan one token for each of these rows."""
        slots, adapters, versions = self.slots[rows], self.adapters[rows], self.versions[rows].tolist()
        return _pass(self.model_copy, slots, np.ones(len(slots), np.int64), adapters, versions=versions)


@dataclass(slots=True)
class _PrefillPass:
    """A pass over contexts of similar length."""

    counts: dict[int, int] = field(default_factory=dict)
    """Number of tokens to compute, by slot."""
    copies: list[PrefixCopy] = field(default_factory=list)


@dataclass(slots=True)
class _PrefillStep:
    """The prefill of one step."""

    budget: int
    """Number of padded tokens that may still be computed."""
    ends: NDArray[np.int64]
    """Number of positions that each slot has once the prefill of its call is complete."""
    passes: dict[tuple[int, int], _PrefillPass] = field(default_factory=dict)
    """The passes, which run in the order of their keys: longest contexts first, as others may take a part of them."""
    last_pass: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The pass after which a slot has all positions of `ends`, for slots that complete their prefill in this step."""

    def add(self, key: tuple[int, int], slot: int, width: int) -> int:
        """Add a row of up to `width` tokens to a pass; returns the number of its tokens, 0 if the budget is spent."""
        counts = self.passes[key].counts if key in self.passes else {}
        before = max(counts.values(), default=0)
        padded = max(before, width) * (len(counts) + 1) - before * len(counts)
        if padded > self.budget:
            if self.passes:
                return 0
            width = padded = max(self.budget, 2)
        self.budget -= padded
        self.passes.setdefault(key, _PrefillPass()).counts[slot] = width
        return width


class Batcher:
    """Calls, slots and the plan of each step."""

    def __init__(
        self,
        *,
        cache: SlotKvCache,
        columns: SlotColumns,
        table: SlotTable,
        prefill_tokens: int,
        tap: ExpertRoutingRecorder | None,
        mask_recorder: SamplingMaskRecorder | None,
        fixed_shapes: bool = False,
    ) -> None:
        self._fixed_shapes = fixed_shapes
        self._cache = cache
        self._columns = columns
        self._table = table
        self._prefill_tokens = prefill_tokens
        self._tap = tap
        self._mask_recorder = mask_recorder
        self._waiting: list[ActiveRequest] = []
        self._calls_with_slots: list[ActiveRequest] = []
        self.running: dict[int, ActiveRequest] = {}
        # So many calls may overtake a waiting one: for each step of priority, or because their session has a slot.
        self._turns_in_a_row = 16 * cache.slots
        self._passed_over = 0
        self._layout: list[_Layout] | None = None

    @property
    def empty(self) -> bool:
        """Whether no call waits or runs."""
        return not (self._waiting or self._calls_with_slots or self.running)

    def submit(self, call: ActiveRequest) -> None:
        """Queue a call. Sessions that still hold a slot need not compete for one."""
        call.queue_order = call.order + call.request.priority * self._turns_in_a_row
        if call.session.slot >= 0:
            self._calls_with_slots.append(call)
        else:
            heapq.heappush(self._waiting, call)

    def calls(self) -> list[ActiveRequest]:
        """Return all calls, waiting or running."""
        return [*self.running.values(), *self._calls_with_slots, *self._waiting]

    def drop_ending(self) -> list[ActiveRequest]:
        """Remove aborted or cancelled calls; calls that ran still hold their slots."""
        ending_calls = [call for call in (*self._calls_with_slots, *self._waiting) if call.ending]
        if ending_calls:
            self._calls_with_slots = [call for call in self._calls_with_slots if not call.ending]
            self._waiting = [call for call in self._waiting if not call.ending]
            heapq.heapify(self._waiting)
        return ending_calls + [call for call in self.running.values() if call.ending]

    def admit(self, held_policies: Collection[str], resolve: Callable[[EmbeddedSession], EmbeddedVersion]) -> None:
        """Give slots to waiting calls in queue order; calls of `held_policies` policies keep waiting.

        Conversations that hold a slot continue in it. While at least half of the slots are busy, others wait for a slot
        that is free or long idle, because evicting a conversation between two turns costs recomputing its context.
        After many turns, a waiting call gets the slot that was idle longest.
        """
        if self._passed_over >= self._turns_in_a_row:
            self._seat_waiting(held_policies, resolve, patient=False, limit=1)
        calls, self._calls_with_slots = self._calls_with_slots, []
        for call in calls:
            if call.session.slot < 0:
                heapq.heappush(self._waiting, call)
            elif _is_held(call, held_policies):
                self._calls_with_slots.append(call)
            else:
                self._begin(call, resolve)
                self._passed_over += bool(self._waiting)
        self._seat_waiting(held_policies, resolve)

    def _seat_waiting(
        self,
        held_policies: Collection[str],
        resolve: Callable[[EmbeddedSession], EmbeddedVersion],
        *,
        patient: bool = True,
        limit: int | None = None,
    ) -> None:
        """Start up to `limit` waiting calls, as long as there are slots for them."""
        aside: list[ActiveRequest] = []
        limit = len(self._waiting) if limit is None else limit
        while self._waiting and limit:
            if not self._table.has_slot(patient=patient and 2 * len(self.running) >= self._cache.slots):
                break
            call = heapq.heappop(self._waiting)
            if _is_held(call, held_policies):
                aside.append(call)
            else:
                self._begin(call, resolve)
                self._passed_over, limit = 0, limit - 1
        for call in aside:
            heapq.heappush(self._waiting, call)

    def _begin(self, call: ActiveRequest, resolve: Callable[[EmbeddedSession], EmbeddedVersion]) -> None:
        request, table = call.request, self._table
        # Resolve before a slot is taken: a lease is valid only while its KV cache is intact.
        serving = resolve(call.session)
        slot = table.assign_slot(call.session)
        has_prefix = table.computed_by[slot] is serving
        num_reused = self._columns.common_prefix(slot, request.token_ids) if has_prefix else 0
        if self._cache.has_states:
            mine = np.array([slot])
            position = self._columns.state_positions(mine, np.array([num_reused]), self._columns.computed[mine])
            num_reused = int(position[0])
            self._set_state(slot, slot, num_reused)
        self._columns.begin(slot, request, num_reused=num_reused)
        table.computed_by[slot] = serving
        call.serving, call.cached = serving, num_reused
        serving.calls += 1
        if self._tap is not None:
            self._tap.restart(slot, num_reused if request.row == call.session.row else 0, num_reused)
        if self._mask_recorder is not None:
            self._mask_recorder.clear(slot)
        self.running[slot] = call
        self._layout = None

    def finish(self, call: ActiveRequest) -> None:
        """Remove a running call from its slot, which stays with the session until another needs it."""
        slot = call.session.slot
        del self.running[slot]
        self._table.mark_idle(call.session)
        self._layout = None

    def switch(self, call: ActiveRequest, serving: EmbeddedVersion, *, keep_kv: bool) -> None:
        """Sample a running call with `serving` from its next token on.

        With `keep_kv` the call continues over the KV of older weights; otherwise the KV is recomputed. A call that has
        sampled nothing yet always starts over.
        """
        slot = call.session.slot
        num_sampled = int(self._columns.length[slot] - self._columns.prompt[slot])
        call.close_span(num_sampled)
        if call.serving is not None:
            call.serving.calls -= 1
        call.serving = serving
        serving.calls += 1
        if keep_kv and num_sampled:
            self._table.computed_by[slot] = None
        else:
            self._set_state(slot, slot, 0)
            self._columns.computed[slot] = 0
            self._table.computed_by[slot] = serving
        if not num_sampled:
            call.cached = 0
            if self._tap is not None:
                self._tap.restart(slot, 0, 0)
        self._layout = None

    def plan(self) -> StepPlan | None:
        """Plan the passes of the next step: bounded prefill, then one decode pass per model; None if no call runs."""
        if not self.running:
            return None
        if self._fixed_shapes:
            return StepPlan((), self._fixed_plan(), repeats=True)
        if self._layout is None:
            self._layout = self._lay_out()
        columns, step = self._columns, self._plan_prefill()
        if self._cache.has_states:
            self._save_states()
        computed = columns.computed.copy()
        computed[list(step.last_pass)] = step.ends[list(step.last_pass)]
        decode, num_decoding = [], 0
        for layout in self._layout:
            rows = computed[layout.slots] == columns.length[layout.slots] - 1
            if rows.any():
                decode.append(layout.decode(rows))
                num_decoding += int(rows.sum())
        prefill = [self._prefill_pass(one) for _, one in sorted(step.passes.items())]
        return StepPlan(prefill, decode, repeats=num_decoding == len(self.running))

    def _prefill_pass(self, one: _PrefillPass) -> ForwardPassPlan:
        """Padding would change a recurrent state, so there all rows compute as many tokens as the shortest."""
        slots = sorted(one.counts)
        counts = np.array([one.counts[slot] for slot in slots], np.int64)
        if self._cache.has_states:
            counts[:] = counts.min()
        for copy in one.copies:
            self._count_cached(copy)
        adapters = np.array([self._serving(slot).adapter for slot in slots], np.int64)
        model_copy = self._serving(slots[0]).model_copy
        return _pass(model_copy, np.array(slots, np.int64), counts, adapters, copies=one.copies)

    def _fixed_plan(self) -> list[ForwardPassPlan]:
        """Plan one token of every running call, of contexts too, in a pass over all slots for each version.

        A position's KV then depends only on the tokens before it and the weights: neither on how much of the context
        was computed at once, nor on the other rows. A resumed conversation continues bit-identically.
        """
        slots = np.arange(self._cache.slots)
        groups: dict[tuple[int, int], tuple[EmbeddedVersion, NDArray[np.int64]]] = {}
        for slot in self.running:
            serving = self._serving(slot)
            _, counts = groups.setdefault((id(serving.model_copy), serving.adapter), (serving, np.zeros_like(slots)))
            counts[slot] = 1
        passes = []
        for serving, counts in groups.values():
            adapters = np.full_like(slots, serving.adapter)
            passes.append(_pass(serving.model_copy, slots, counts, adapters, fixed=True))
        return passes

    def _lay_out(self) -> list[_Layout]:
        groups: dict[int, list[int]] = {}
        for slot in sorted(self.running):
            groups.setdefault(id(self._serving(slot).model_copy), []).append(slot)
        return [
            _Layout(
                model_copy=self._serving(slots[0]).model_copy,
                slots=np.array(slots, np.int64),
                adapters=np.array([self._serving(slot).adapter for slot in slots], np.int64),
                versions=np.array([self._kv_version(slot) for slot in slots], np.int64),
            )
            for slots in groups.values()
        ]

    def _kv_version(self, slot: int) -> int:
        """Return a number for the version that computed the slot's keys and values; if several did, a unique one."""
        computed_by = self._table.computed_by[slot]
        return -1 - slot if computed_by is None else id(computed_by)

    def _serving(self, slot: int) -> EmbeddedVersion:
        serving = self.running[slot].serving
        assert serving is not None, "a running call has a version"
        return serving

    def _plan_prefill(self) -> _PrefillStep:
        """Plan the computation of contexts but for their last tokens, oldest calls first, as far as the budget lasts.

        A call takes what another slot has, or computes in the same pass or in an earlier one; it waits for what another
        one computes later.
        """
        columns = self._columns
        step = _PrefillStep(self._prefill_tokens, columns.computed.copy())
        calls = [call for slot, call in self.running.items() if columns.length[slot] - columns.computed[slot] > 1]
        for call in sorted(calls, key=lambda call: call.order):
            if not self._plan_context(call, step):
                break
        return step

    def _plan_context(self, call: ActiveRequest, step: _PrefillStep) -> bool:
        """Plan the rest of a call's context. Returns whether there may be room for another call's."""
        columns, slot = self._columns, call.session.slot
        source, length = self._longest_prefix(call, step.ends)
        start, end = int(columns.computed[slot]), self._end_of_prefill(slot)
        step.ends[slot] = end
        copies_after = None
        if length > columns.computed[source]:
            copies_after = step.last_pass.get(source)
            if copies_after is None:
                return True
        elif length > start:
            self._copy(PrefixCopy(source, slot, start, length))
        key, missing = copies_after, end - max(start, length)
        if missing > 0:
            width = min(missing, self._prefill_tokens)
            key = (-width.bit_length(), id(self._serving(slot).model_copy))
            if copies_after is not None and copies_after > key:
                return True
            planned = step.add(key, slot, width)
            if planned == 0:
                return False
            if planned < missing or self._cache.has_states:
                key = None
        if copies_after is not None:
            step.passes[copies_after].copies.append(PrefixCopy(source, slot, start, length))
        if key is not None:
            step.last_pass[slot] = key
        return True

    def _end_of_prefill(self, slot: int) -> int:
        """Return the position up to which a context is computed before a token is sampled. A recurrent state is saved
        at the last token of the prompt, so a context that continues behind it stops there."""
        last = int(self._columns.prompt[slot]) - 1
        stops = self._cache.has_states and self._columns.computed[slot] < last
        return last if stops else int(self._columns.length[slot]) - 1

    def _longest_prefix(self, call: ActiveRequest, ends: NDArray[np.int64]) -> tuple[int, int]:
        """Return the slot that has most of a call's context, and the number of its tokens there, if each slot has its
        first `ends` positions."""
        columns, slot = self._columns, call.session.slot
        sources = np.array(
            [
                source
                for source, version in enumerate(self._table.computed_by)
                if version is call.serving and source != slot and ends[source] > columns.computed[slot]
            ],
            np.int64,
        )
        if not len(sources):
            return slot, 0
        limit = int(columns.length[slot]) - 1
        same = columns.tokens[sources, :limit] == columns.tokens[slot, :limit]
        lengths = np.minimum(np.where(same.all(axis=1), limit, same.argmin(axis=1)), ends[sources])
        if self._cache.has_states:
            lengths = columns.state_positions(sources, lengths, ends[sources])
        best = int(lengths.argmax())
        return int(sources[best]), int(lengths[best])

    def _copy(self, copy: PrefixCopy) -> None:
        """Let a call continue from positions that another slot has."""
        self._cache.copy(copy)
        self._set_state(copy.target, copy.source, copy.stop)
        if self._tap is not None:
            self._tap.copy(copy)
        self._columns.computed[copy.target] = copy.stop
        self._count_cached(copy)

    def _count_cached(self, copy: PrefixCopy) -> None:
        if self._columns.length[copy.target] == self._columns.prompt[copy.target]:
            self.running[copy.target].cached += copy.stop - copy.start

    def _save_states(self) -> None:
        """Save the states of calls that have computed their prompt up to its last token: see `SlotColumns.saved`."""
        columns, running = self._columns, np.fromiter(self.running, np.int64)
        at_prompt_end = (columns.computed[running] == columns.prompt[running] - 1) & (
            columns.saved[running] != columns.computed[running]
        )
        for slot in running[at_prompt_end].tolist():
            self._cache.save_state(slot)
            columns.saved[slot] = columns.computed[slot]

    def _set_state(self, slot: int, source: int, position: int) -> None:
        """Let a slot continue from a position at which slot `source` has a state; 0: from an empty context."""
        columns = self._columns
        if position != columns.computed[source] or slot != source:
            is_saved = position != columns.computed[source]
            self._cache.set_state(slot, source if position else None, saved=is_saved)
        if slot != source or columns.saved[slot] > position:
            columns.saved[slot] = 0


def _is_held(call: ActiveRequest, held_policies: Collection[str]) -> bool:
    return call.session.policy in held_policies and call.session.pin is None


def _pass(
    model_copy: ServedModelCopy, slots: Slots, counts: NDArray[np.int64], adapters: NDArray[np.int64], **options: Any
) -> ForwardPassPlan:
    return ForwardPassPlan(
        model=model_copy.model, bank=model_copy.bank, slots=slots, counts=counts, adapters=adapters, **options
    )
