"""The embedded engine: continuous batching of any local Hugging Face causal LM in this process.

Owns: the life of sessions and calls, one worker thread, and the loop that alternates plans and forward passes.
Does not tokenise, and does not know episodes.
Invariants:
1. The event loop schedules, the worker computes; they never touch the same state at once (`_between_passes`).
2. Weights change between two forward passes; a completion's spans say which weights sampled each token.
3. Keys and values of one version never serve another, except inside a call with refresh `token` and `keep_kv`.
4. An error in a pass fails the calls in flight and the engine, by name; nothing hangs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, EngineError
from agentrl.core.ports import EngineCapabilities
from agentrl.core.records import Completion
from agentrl.engines.embedded.batcher import ActiveRequest, Batcher, EmbeddedSession, SlotTable
from agentrl.engines.embedded.capture import KeptSetRecorder, RoutingTap
from agentrl.engines.embedded.forward import Pass, PassRunner, check_memory, check_rows, check_slots
from agentrl.engines.embedded.slots import SlotCache, SlotColumns
from agentrl.engines.embedded.versions import EmbeddedSettings, EmbeddedVersions, ServedModel, Serving
from agentrl.engines.models import load_model, model_dtype
from agentrl.engines.versions import ModelEngine, empty_completion, keeping_version, needs_adapters

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.core.clock import Clock
    from agentrl.core.ports import Delta, GenerateRequest, Refresh
    from agentrl.core.records import FinishReason, Float32Array, Int32Array, PolicyVersion, WeightsRef
    from agentrl.engines.embedded.forward import EngineStats
    from agentrl.engines.versions import Canary

_DELTA_SECONDS = 0.2


class EmbeddedEngine(ModelEngine[Serving]):
    """See `agentrl.core.ports.Engine`. Make one with `load`; it belongs to one event loop.

    Its memory is one row per slot regardless of length, so it states no `kv_tokens`: a conversation keeps its row
    between turns until another one needs it.

    Arguments of `load`:
        model_path: a local Hugging Face causal LM directory.
        versions: for each policy, the version that the directory's weights are.
        slots: conversations whose KV is held at once.
        max_context: longest context in tokens, completion included.
        refresh: when sessions move to newer weights, of all policies or by policy; see `versions.py`.
        keep_kv: whether calls in flight keep the KV that older weights computed (refresh `token`).
        capture_routing: record the experts of each position.
        capture_mask: record the kept set of each sampled token.
        adapter_slots: adapters served side by side; 0: full weights only.
        max_rank: the largest rank of an adapter.
        max_staleness: refresh `lazy`: how many steps a session of a policy may stay behind; 1 where absent.
        prefill_tokens: padded context tokens computed per step.
        fixed_shapes: compute every token alone, in passes of one shape, so that it is the same bit for bit whoever else
            is there and however often the conversation was interrupted; several times slower.
        threads: torch threads of this process.
        device: where the model lies; None: the first GPU (not yet tested), or the CPU if there is none.
        dtype: `float32`, `bfloat16`, or `auto`: the checkpoint's.
        clock: times durations.
    """

    versions: EmbeddedVersions

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        versions: Mapping[str, PolicyVersion],
        capabilities: EngineCapabilities,
        settings: EmbeddedSettings,
        clock: Clock,
    ) -> None:
        slots, context = settings.slots, capabilities.max_context
        self.capabilities = capabilities
        self._vocabulary = int(model.config.vocab_size)
        self._tap = RoutingTap(model, slots=slots, capacity=context) if capabilities.expert_routing else None
        self._kept = KeptSetRecorder(slots) if capabilities.sampling_mask else None
        self._columns = SlotColumns(slots=slots, capacity=context)
        self._table = SlotTable(slots, clock=clock)
        cache = SlotCache(slots=slots, capacity=context, layers=model.config.num_hidden_layers)
        self._batcher = Batcher(
            cache=cache,
            columns=self._columns,
            table=self._table,
            prefill_tokens=settings.prefill_tokens,
            tap=self._tap,
            kept=self._kept,
            fixed_shapes=settings.fixed_shapes,
        )
        self._runner = PassRunner(
            cache=cache,
            columns=self._columns,
            device=model.device,
            dtype=model.dtype,
            tap=self._tap,
            kept=self._kept,
            clock=clock,
        )
        self._between_passes = asyncio.Lock()
        self.versions = EmbeddedVersions(
            ServedModel.of(model),
            versions.values(),
            settings=settings,
            places=capabilities.adapters,
            between_passes=self._between_passes,
            switch=self._switch_calls,
            on_worker=self._on_worker,
            answer=self._answer,
            interrupt=self._interrupt,
            tap=self._tap,
        )
        self._keep_kv = settings.keep_kv
        self._clock = clock
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="agentrl-engine")
        self._loop_task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._calls: dict[str, ActiveRequest] = {}
        self._arrivals = 0
        self._next_delta = 0.0
        self._failure: BaseException | None = None
        self._closed = False

    @classmethod
    def load(  # noqa: PLR0913 (one keyword per setting)
        cls,
        model_path: str,
        *,
        versions: Mapping[str, PolicyVersion],
        slots: int = 64,
        max_context: int = 512,
        refresh: Refresh | Mapping[str, Refresh] = "token",
        keep_kv: bool = False,
        capture_routing: bool = False,
        capture_mask: bool = False,
        adapter_slots: int = 4,
        max_rank: int = 64,
        max_staleness: Mapping[str, int] = MappingProxyType({}),
        prefill_tokens: int = 2048,
        fixed_shapes: bool = False,
        threads: int = 1,
        device: str | None = None,
        dtype: str = "auto",
        clock: Clock | None = None,
    ) -> EmbeddedEngine:
        """Load a model directory and serve it; the class docstring explains the arguments.

        Raises:
            ModelError: the directory holds no model that can serve this.
            EngineCapabilityError: the model or the settings cannot give what was asked for.
        """
        if adapter_slots == 0 and (needing := needs_adapters(refresh)):
            raise EngineCapabilityError(
                f"engine.refresh = {needing!r} needs adapters side by side; set adapter_slots, or refresh token or turn"
            )
        torch.set_num_threads(threads)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        computed = model_dtype(model_path, dtype, torch.device(device))
        model = load_model(model_path, max_context=max_context, dtype=computed, device=device)
        check_slots(model, model_path, max_context=max_context)
        check_memory(model, slots=slots, max_context=max_context)
        if fixed_shapes:
            check_rows(model, model_path, slots=slots)
        capabilities = EngineCapabilities(
            name="embedded",
            refresh=frozenset({"token", "turn", "episode", "lazy"} if adapter_slots else {"token", "turn"}),
            expert_routing=capture_routing,
            sampling_mask=capture_mask,
            adapters=adapter_slots,
            max_context=max_context,
            keeps_version=keeping_version(refresh, versions),
        )
        settings = EmbeddedSettings(
            slots=slots,
            refresh=refresh,
            keep_kv=keep_kv,
            max_rank=max_rank,
            max_staleness=max_staleness,
            prefill_tokens=prefill_tokens,
            fixed_shapes=fixed_shapes,
        )
        return cls(model, versions=versions, capabilities=capabilities, settings=settings, clock=clock or SystemClock())

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EmbeddedSession:
        """See `agentrl.core.ports.Engine.open`."""
        return EmbeddedSession(self, session_id, policy, self._resolve_pin(policy, pin))

    def session_ended(self, session: EmbeddedSession) -> None:
        """See `sessions.SessionOwner`."""
        self._table.free_slot(session)
        self.versions.leases.close(session)

    async def generate(
        self, session: EmbeddedSession, request: GenerateRequest, on_delta: Delta | None = None
    ) -> Completion:
        """One call of `session`; see `agentrl.core.ports.EngineSession.generate`."""
        self._check_call(session, request, self._calls)
        if self._samples_nothing(request):
            return empty_completion(len(request.token_ids), "length")
        loop = asyncio.get_running_loop()
        self._arrivals += 1
        call = ActiveRequest(request, session, loop.create_future(), on_delta, self._arrivals)
        self._calls[request.request_id], session.request = call, request
        self._batcher.submit(call)
        self._interrupt()
        if self._loop_task is None:
            self._loop_task = loop.create_task(self._run(), name="agentrl-embedded-engine")
            self._loop_task.add_done_callback(self._loop_ended)
        try:
            return await call.future
        except asyncio.CancelledError:
            call.ending = True
            self._interrupt()
            raise

    def _check_running(self, what: str) -> None:
        if self._closed or self._failure is not None:
            raise EngineError(f"{what}: the engine is {'closed' if self._closed else 'dead'}") from self._failure

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Plan, run, finish; lives while there are calls."""
        batcher, loop = self._batcher, asyncio.get_running_loop()
        while True:
            async with self._between_passes:
                self._runner.interrupted = False
                for call in batcher.drop_ending():
                    self._end(call, aborted=True)
                if batcher.empty:
                    break
                plan: list[Pass] = []
                if not self.versions.paused:
                    batcher.admit(self.versions.held, self.versions.leases.resolve)
                    plan = batcher.plan()
                if plan:
                    run = partial(self._runner.run, plan, repeat=batcher.repeats(plan))
                    ended = await loop.run_in_executor(self._worker, run)
                    for slot in ended:
                        self._end(batcher.running[slot], aborted=False)
                    self._deliver()
                else:
                    self._wake.clear()
            if not plan:
                await self._wake.wait()
        self._loop_task = None

    def _end(self, call: ActiveRequest, *, aborted: bool) -> None:
        session = call.session
        stopped = not aborted and self._columns.stopped(session.slot)
        reason: FinishReason = "abort" if aborted else "stop" if stopped else "length"
        completion = call.complete(self._columns, reason, tap=self._tap, kept=self._kept)
        serving = call.serving
        if serving is not None:
            self._runner.stats.cached_tokens += call.cached
            self._batcher.finish(call)
            serving.calls -= 1
            self.versions.settle(serving)
        del self._calls[call.request.request_id]
        session.end_call()
        if not call.future.done():
            call.future.set_result(completion)

    def _deliver(self) -> None:
        now = self._clock.monotonic()
        if now < self._next_delta:
            return
        self._next_delta = now + _DELTA_SECONDS
        for call in self._batcher.running.values():
            call.deliver(self._columns)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """A pass or a callback raised: the engine is dead, and every waiting call fails."""
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._loop_task = None
        self._failure = error
        self.versions.close()
        self._fail_calls("the engine died in a forward pass", error)

    def _fail_calls(self, reason: str, cause: BaseException | None) -> None:
        for call in self._batcher.calls():
            if not call.future.done():
                failure = EngineError(f"call {call.request.request_id}: {reason} ({cause!r})" if cause else reason)
                failure.__cause__ = cause
                call.future.set_exception(failure)

    def _interrupt(self) -> None:
        """There is something to do between two passes."""
        self._runner.interrupted = True
        self._wake.set()

    async def ping(self) -> None:
        """See `agentrl.core.ports.Engine.ping`: heard from when a forward pass has ended."""
        await self._on_worker(lambda: None)

    async def _on_worker(self, work: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # --- control ------------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """See `agentrl.core.ports.Engine.serve`; what happens to calls in flight is described in `versions.py`."""
        self._check_running("an update")
        try:
            await self.versions.serve(current, pinned)
        finally:
            self._wake.set()

    def _switch_calls(self, old: Serving, new: Serving) -> None:
        for call in list(self._batcher.running.values()):
            if call.serving is old and call.session.pin is None:
                self._batcher.switch(call, new, keep_kv=self._keep_kv)

    async def pause(self) -> None:
        """Compute nothing after the present pass, so that an update finds calls at a defined position."""
        self.versions.paused = True
        self.versions.wake()
        self._interrupt()
        async with self._between_passes:
            pass

    async def resume(self) -> None:
        """Go on after `pause`. Idempotent."""
        self.versions.paused = False
        self._wake.set()

    def abort(self, request_id: str) -> None:
        """See `agentrl.core.ports.Engine.abort`; a call that has ended is left alone."""
        call = self._calls.get(request_id)
        if call is not None:
            call.ending = True
            self._interrupt()

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """See `agentrl.core.ports.Engine.score`."""
        versions = self.versions
        self._interrupt()
        async with self._between_passes:
            self._check_running(f"scores of {version}")
            serving = versions.of_policy(version) if isinstance(version, str) else versions.of_version(version)
            ids, loop = token_ids.astype(np.int64), asyncio.get_running_loop()
            one = self._alone(serving, np.array([len(ids)]))
            return await loop.run_in_executor(self._worker, self._runner.score, one, ids, temperature)

    async def _answer(self, serving: Serving, canary: Canary) -> Float32Array:
        """To the canary of `serving`; between two passes."""
        contexts, tokens = canary.contexts.astype(np.int64), canary.token_ids.astype(np.int64)
        one = self._alone(serving, np.full(len(contexts), contexts.shape[1]))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._runner.next_logprobs, one, contexts, tokens)

    def _alone(self, serving: Serving, counts: NDArray[np.int64]) -> Pass:
        """A pass of one version over rows that have no slots."""
        served, nowhere = serving.served, np.zeros(len(counts), np.int64)
        adapters = np.full(len(counts), serving.adapter)
        return Pass(model=served.model, bank=served.bank, slots=nowhere, counts=counts, adapters=adapters)

    @property
    def stats(self) -> EngineStats:
        """Counters since the start."""
        return self._runner.stats

    def busy_seconds(self) -> float:
        """See `agentrl.core.ports.Engine.busy_seconds`."""
        return self._runner.stats.busy_seconds

    async def close(self) -> None:
        """See `agentrl.core.ports.Engine.close`; calls in flight fail."""
        if self._closed:
            return
        self._closed = True
        self.versions.close()
        self._fail_calls("the engine was closed", None)
        for call in self._batcher.calls():
            call.ending = True
        self._interrupt()
        task = self._loop_task
        if task is not None:
            await asyncio.wait([task])
        async with self._between_passes:  # a swap that has begun is finished
            self._worker.shutdown()
