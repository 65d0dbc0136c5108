"""The scripted engine: follows a script at a given pace, without a model; for tests and benchmarks.

Owns: calls in flight, the version ascribed to each token, and the duration of calls on the running loop's clock. Starts
no threads or tasks, uses no random numbers, and reads no weight files: a version is only an id.
Invariants: without latency `generate` returns without suspending; the same script and the same order of calls give the
same completions; spans split at an update, with refresh `token`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.core.errors import (
    EngineError,
    EngineFailedError,
    EngineLostError,
    VersionNotServedError,
    VersionsRefusedError,
)
from agentrl.core.ports import DELTA_SECONDS, EngineCapabilities, TokenScores
from agentrl.core.records import VersionSpan
from agentrl.core.tokens import Completion, Tokens
from agentrl.engines.counter_random import uniform
from agentrl.engines.kv_budget import KVBudget, kv_budget_of
from agentrl.engines.version_table import VersionSet, in_loading_order

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.core.ports import GenerateRequest, NewTokensCallback, Refresh
    from agentrl.core.records import FinishReason, Float32Array, Int32Array, PolicyVersion, WeightsRef

Script = Callable[["GenerateRequest", str, "PolicyVersion"], Sequence[int]]
"""Maps (request, policy, version) to the tokens that the policy samples."""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that takes time. The number of its sampled tokens is a function of the seconds it was allowed to run."""

    request: GenerateRequest
    tokens: Sequence[int]
    reason: FinishReason
    version: PolicyVersion
    follows: bool
    """Whether the call moves to newer versions while it runs."""
    on_delta: NewTokensCallback | None
    future: asyncio.Future[None]
    ran: float = 0.0
    """Seconds that the call ran until `since`."""
    since: float = 0.0
    timer: asyncio.TimerHandle | None = None
    """Timer of the call; None while it does not run."""
    num_released: int = 0
    num_delivered: int = 0
    spans: tuple[VersionSpan, ...] = ()
    """Spans of the versions before `version`."""

    def all_spans(self) -> tuple[VersionSpan, ...]:
        """Return the spans of all sampled tokens."""
        start = self.spans[-1].stop if self.spans else 0
        return (
            (*self.spans, VersionSpan(start, self.num_released, self.version))
            if self.num_released > start
            else self.spans
        )


class ScriptedEngine:
    """An engine whose tokens follow from a seed instead of a model, for tests and simulations.

    Args:
        script: called for each request, returns the whole turn; or replies, of which a request gets number `seed %
            len(replies)`. Tokens after a stop token or beyond `max_tokens` are cut; a reply that is not cut ends with
            `stop`. In a continued turn, the first `sampled_before` tokens are left out.
        versions: first version of each policy.
        seconds_per_call: seconds of the running loop before a call's first token.
        seconds_per_token: seconds of each token.
        hold: whether calls stay in flight until `release_held`.
        seeded_logprobs: whether logprobs are drawn from the request's seed, in (-3, 0], instead of -1.
        refresh: when a session moves to a newer version.
        max_staleness: for refresh `lazy`, the number of steps that a session of a policy may stay behind; 1 if absent.
        max_context: longest context, completion included.

    Example:
        >>> from agentrl.core.records import PolicyVersion
        >>> engine = ScriptedEngine([[5, 6, 2]], versions={"policy": PolicyVersion("policy", 0, 0)})
    """

    def __init__(  # noqa: PLR0913 (one keyword per setting)
        self,
        script: Script | Sequence[Sequence[int]],
        *,
        versions: Mapping[str, PolicyVersion],
        seconds_per_call: float = 0.0,
        seconds_per_token: float = 0.0,
        hold: bool = False,
        seeded_logprobs: bool = False,
        refresh: Refresh = "token",
        max_staleness: Mapping[str, int] = MappingProxyType({}),
        max_context: int = 1 << 20,
    ) -> None:
        self.capabilities = EngineCapabilities(
            name="scripted",
            refresh=frozenset({"token", "turn", "episode", "lazy"}),
            expert_routing=False,
            sampling_mask=False,
            choices=True,  # scripts see them in the request
            adapters=1 << 20,
            max_context=max_context,
            keeps_version=frozenset(versions) if refresh == "episode" else frozenset(),
        )
        self._script: Script = script if callable(script) else _replies(script)
        self._current = dict(versions)
        self._request = VersionSet()
        self._loaded_weights: frozenset[WeightsRef] = frozenset()
        """Wanted versions that are loaded."""
        self._per_call = seconds_per_call
        self._per_token = seconds_per_token
        self._holding = hold
        self._immediate = not hold and seconds_per_call == 0 and seconds_per_token == 0
        self._has_seeded_logprobs = seeded_logprobs
        self._refresh = refresh
        self._max_staleness = max_staleness
        self._constant: dict[int, Float32Array] = {}
        self._calls: dict[str, _Call] = {}
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self.paused = False
        self._lost = False
        self.life = 0
        """Number of losses so far; a session belongs to the life in which it was opened."""
        self.sessions = 0
        """Number of open sessions."""
        self._busy = 0.0
        self._busy_since = 0.0
        self.closed = False

    # --- sessions -----------------------------------------------------------------------------------------------------

    @cached_property
    def kv_budget(self) -> KVBudget:
        """The engine's KV-cache memory, of which each session holds its part."""
        return kv_budget_of(self.capabilities)

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> ScriptedSession:
        self.check_alive(session_id, self.life)
        if policy not in self._current:
            raise EngineError(f"no policy {policy!r} in this engine; it serves: {', '.join(sorted(self._current))}")
        if pin is not None and pin != self._current[pin.policy] and not self.has_pin(pin):
            raise VersionNotServedError(f"version {pin} is not served here; pin it by serve(..., pinned)")
        self.sessions += 1
        return ScriptedSession(self, policy, pin)

    def has_pin(self, version: PolicyVersion) -> bool:
        """Whether sessions may be pinned to a version although it is not current."""
        return any(weights.version == version for weights in self._loaded_weights & self._request.pinned)

    def check_alive(self, where: str, life: int) -> None:
        """Refuse work while the engine is closed or gone, and of sessions of an earlier life."""
        if self.closed:
            raise EngineError(f"{where}: the engine is closed")
        if self._lost or life != self.life:
            raise EngineLostError(f"{where}: the engine was lost with all its sessions")

    async def wait_to_run(self, request_id: str) -> bool:
        """Wait while the engine is paused; returns False if the call was aborted during the wait."""
        gates = self._waiting
        while self.paused and not self.closed:
            gate = gates[request_id] = asyncio.get_running_loop().create_future()
            try:
                await gate
            finally:
                aborted = gates.pop(request_id, None) is None
            if aborted:
                return False
        return True

    def version_for(self, policy: str, lease: PolicyVersion | None) -> PolicyVersion:
        """Return the version for the next call of a session, given the previous one."""
        current = self._current[policy]
        if lease is None or self._refresh in ("token", "turn"):
            return current
        lags = lease.lineage != current.lineage or current.step - lease.step > self._max_staleness.get(lease.policy, 1)
        return current if self._refresh == "lazy" and lags else lease

    def start(
        self,
        request: GenerateRequest,
        policy: str,
        version: PolicyVersion,
        *,
        pinned: bool,
        on_delta: NewTokensCallback | None,
    ) -> Completion | _Call:
        """Begin a call; returns its completion, or the call in flight if it takes time."""
        context = len(request.token_ids)
        limit = min(request.sampling.max_tokens, self.capabilities.max_context - context)
        turn = self._script(request, policy, version)
        new = turn[request.sampled_before :] if request.sampled_before else turn
        tokens, reason = _cut(new, request.sampling.stop_token_ids, limit)
        if self._immediate:
            spans = (VersionSpan(0, len(tokens), version),) if len(tokens) else ()
            return self._completion(request, tokens, reason, spans)
        if request.request_id in self._calls:
            raise EngineError(f"call {request.request_id}: a call with this id is already in flight")
        loop = asyncio.get_running_loop()
        follows = self._refresh == "token" and not pinned
        call = _Call(request, tokens, reason, version, follows, on_delta, loop.create_future())
        if not self._calls:
            self._busy_since = loop.time()
        self._calls[request.request_id] = call
        self._go_on(call)
        return call

    def end(self, call: _Call) -> Completion:
        """End a call that took time; returns its completion."""
        self._stop(call)
        del self._calls[call.request.request_id]
        if not self._calls:
            self._busy += asyncio.get_running_loop().time() - self._busy_since
        return self._completion(call.request, call.tokens[: call.num_released], call.reason, call.all_spans())

    def empty_completion(self, request: GenerateRequest) -> Completion:
        """Return the reply to a call that was aborted before it began."""
        return self._completion(request, (), "abort", ())

    def _completion(
        self, request: GenerateRequest, tokens: Sequence[int], reason: FinishReason, spans: tuple[VersionSpan, ...]
    ) -> Completion:
        return Completion(
            token_ids=np.array(tokens, np.int32),
            logprobs=self._logprobs(request, len(tokens)),
            finish_reason=reason,
            spans=spans,
        )

    def _logprobs(self, request: GenerateRequest, count: int) -> Float32Array:
        if self._has_seeded_logprobs:
            seeds = np.full(count, request.seed & 0xFFFFFFFFFFFFFFFF, np.uint64)
            uniforms = uniform(seeds, request.sampled_before + np.arange(count))
            return (-3.0 * uniforms).astype(np.float32)
        logprobs = self._constant.get(count)
        if logprobs is None:
            logprobs = self._constant[count] = np.full(count, -1.0, np.float32)
            logprobs.flags.writeable = False  # the array is shared by all completions of this length
        return logprobs

    # --- calls that take time -----------------------------------------------------------------------------------------

    def _go_on(self, call: _Call) -> None:
        """Run until all tokens are sampled, or until some must be delivered."""
        if self._holding or self.paused:
            return
        loop = asyncio.get_running_loop()
        call.since = loop.time()
        wait = self._per_call + len(call.tokens) * self._per_token - call.ran
        if call.on_delta is not None:
            wait = min(wait, DELTA_SECONDS)
        call.timer = loop.call_later(max(wait, 0.0), self._tick, call)

    def _tick(self, call: _Call) -> None:
        self._stop(call)
        if call.num_released == len(call.tokens):
            if not call.future.done():
                call.future.set_result(None)
            return
        self._deliver(call)
        self._go_on(call)

    def _stop(self, call: _Call) -> None:
        """Deliver the tokens that are due now, and no more until `_go_on`."""
        if call.timer is None:
            return
        call.timer.cancel()
        call.timer = None
        call.ran += asyncio.get_running_loop().time() - call.since
        elapsed_s = call.ran - self._per_call + 1e-9  # tolerance for the rounding of many small waits
        if elapsed_s >= 0:
            num_due = len(call.tokens) if self._per_token == 0 else math.floor(elapsed_s / self._per_token)
            call.num_released = min(max(num_due, call.num_released), len(call.tokens))

    def _deliver(self, call: _Call) -> None:
        if call.on_delta is None:
            return
        logprobs = self._logprobs(call.request, call.num_released)
        for start, stop, version in call.all_spans():
            first = max(start, call.num_delivered)
            if first < stop:
                tokens = np.array(call.tokens[first:stop], np.int32)
                spans = (VersionSpan(0, stop - first, version),)
                delta = Tokens(token_ids=tokens, logprobs=logprobs[first:stop], spans=spans)
                call.on_delta(call.request.request_id, delta)
        call.num_delivered = call.num_released

    def hold_calls(self) -> None:
        """Keep calls made from now on in flight; for an engine made with `hold`."""
        self._holding = True

    def release_held(self) -> None:
        """Let the calls that `hold` suspended continue, and stop holding."""
        self._holding = False
        for call in self._calls.values():
            self._go_on(call)

    @property
    def in_flight(self) -> int:
        """Number of calls in flight."""
        return len(self._calls)

    @property
    def requests_in_flight(self) -> list[str]:
        """Ids of the requests of calls in flight."""
        return list(self._calls)

    # --- control ------------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        for weights in (*current, *pinned):
            if (policy := weights.version.policy) not in self._current:
                policies = ", ".join(sorted(self._current))
                raise EngineError(
                    f"weights {weights.version} refused: no policy {policy!r} here; it serves: {policies}"
                )
        self._request = self._request.followed_by(current, pinned)
        self._loaded_weights &= self._request.all
        refused: dict[PolicyVersion, EngineError] = {}
        for weights in in_loading_order(current, pinned):
            try:
                if weights not in self._loaded_weights:
                    await self.load(weights)
                    self._loaded_weights |= {weights} & self._request.all
            except (EngineLostError, EngineFailedError):
                raise
            except EngineError as error:
                refused[weights.version] = error
            else:
                if self._request.is_current(weights) and self._current[weights.version.policy] != weights.version:
                    self._make_current(weights.version)
        if refused:
            raise VersionsRefusedError(refused=refused)

    async def load(self, weights: WeightsRef) -> None:
        """Load a version that is not served yet, without reading a file. Subclasses may take time, or refuse it."""

    def _make_current(self, version: PolicyVersion) -> None:
        self._current[version.policy] = version
        for call in self._calls.values():
            if call.follows and call.version.policy == version.policy:
                running = call.timer is not None
                self._stop(call)
                call.spans = call.all_spans()
                call.version = version
                if running:
                    self._go_on(call)

    async def pause(self) -> None:
        """Stop the clock of calls in flight; new calls wait. For tests."""
        self.paused = True
        for call in self._calls.values():
            self._stop(call)

    async def resume(self) -> None:
        """Continue after `pause`. Idempotent."""
        if not self.paused:
            return
        self.paused = False
        _let_go(self._waiting.values())
        for call in self._calls.values():
            self._go_on(call)

    def abort(self, request_id: str) -> None:
        """Abort a call; does nothing if the call has ended."""
        call = self._calls.get(request_id)
        if call is not None and not call.future.done():
            call.reason = "abort"
            call.future.set_result(None)
        gate = self._waiting.pop(request_id, None)
        if gate is not None:
            _let_go((gate,))

    def lose(self) -> None:
        """Simulate the death of the engine's process: calls in flight fail, sessions are void, new work is refused."""
        self._lost = True
        self.life += 1
        self.sessions = 0
        self.paused = False
        _let_go(self._waiting.values())
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(EngineLostError(f"call {call.request.request_id}: the engine was lost"))

    def restore(self) -> None:
        """Return after `lose`, with the same versions."""
        self._lost = False

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        """Return -1 as the score of every token except the first, and of its likeliest alternatives: the lowest ids."""
        count = max(len(token_ids) - 1, 0)
        ids = np.tile(np.arange(top, dtype=np.int32), (count, 1))
        return TokenScores.after_first(np.full(count, -1.0), ids, np.full((count, top), -1.0))

    async def ping(self) -> None:
        """Return at once, because the engine computes in the event loop."""
        self.check_alive("ping", self.life)

    def busy_seconds(self) -> float:
        """Return the seconds during which calls were in flight; 0 for an engine that takes no time."""
        return self._busy + (asyncio.get_running_loop().time() - self._busy_since if self._calls else 0.0)

    async def close(self) -> None:
        """Close the engine; calls in flight fail."""
        self.closed = True
        _let_go(self._waiting.values())
        for call in self._calls.values():
            if not call.future.done():
                call.future.set_exception(EngineError(f"call {call.request.request_id}: the engine was closed"))


class ScriptedSession:
    """One conversation of a scripted engine."""

    __slots__ = ("_call", "_engine", "_lease", "_pin", "_policy", "_reservation", "closed", "life")

    def __init__(self, engine: ScriptedEngine, policy: str, pin: PolicyVersion | None) -> None:
        self._engine = engine
        self._policy = policy
        self._pin = pin
        self._lease: PolicyVersion | None = None
        self.life = engine.life
        self._call = ""
        self._reservation = engine.kv_budget.reservation((policy, pin))
        self.closed = False

    def generate(
        self, request: GenerateRequest, on_delta: NewTokensCallback | None = None
    ) -> Coroutine[Any, Any, Completion]:
        return self._reservation.sample(request, lambda: self._sample(request, on_delta))

    async def wait_for_room(self) -> None:
        await self._reservation.wait()

    async def _sample(self, request: GenerateRequest, on_delta: NewTokensCallback | None) -> Completion:
        engine, pin = self._engine, self._pin
        self._call = request.request_id
        if engine.paused and not await engine.wait_to_run(request.request_id):
            return engine.empty_completion(request)
        engine.check_alive(request.request_id, self.life)
        if self.closed:
            raise EngineError(f"call {request.request_id}: the session is closed")
        version = self._lease = pin or engine.version_for(self._policy, self._lease)
        call = engine.start(request, self._policy, version, pinned=pin is not None, on_delta=on_delta)
        if isinstance(call, Completion):
            return call
        try:
            await call.future
        finally:
            completion = engine.end(call)
        return completion

    def hold(self, version: PolicyVersion) -> None:
        self._pin = version

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._reservation.release()
        if self.life == self._engine.life:
            self._engine.sessions -= 1
        self._engine.abort(self._call)


def _let_go(gates: Iterable[asyncio.Future[None]]) -> None:
    for gate in gates:
        if not gate.done():
            gate.set_result(None)


def _replies(replies: Sequence[Sequence[int]]) -> Script:
    def reply(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
        return replies[request.seed % len(replies)]

    return reply


def _cut(tokens: Sequence[int], stops: Sequence[int], limit: int) -> tuple[Sequence[int], FinishReason]:
    """Cut tokens at a stop token or the limit, whichever comes first; returns the finish reason too."""
    for position, token in enumerate(tokens):
        if position >= limit:
            return tokens[: max(limit, 0)], "length"
        if token in stops:
            return tokens[: position + 1], "stop"
    return tokens, "stop"
