"""The embedded engine: continuous batching of any local Hugging Face causal LM in this process.

`EmbeddedEngine` owns the life of sessions and calls, one worker thread, and the loop that alternates plans and forward
passes; it does not tokenise, and does not know episodes. `EmbeddedVersionTable` owns the live versions and the update
to a published one: it is read and checked off the loop, and swapped in between two passes.

refresh   adapters                                   full weights (one copy per version that must stay)
token     running calls continue under the new one   the same
turn      calls in flight end on theirs              new calls wait until those in flight have ended, then the swap
episode   sessions stay on theirs until they close   refused
lazy      sessions stay until their lag exceeds      refused
          `max_staleness`, their KV is gone, or another version needs the adapter slot

The adapters of `merged` policies are served like full weights: each is merged into a copy of the base, which is kept.

Invariants:
1. The event loop schedules, the worker computes; they never touch the same state at once (`between_passes`).
2. Weights change between two forward passes; a completion's spans say which weights sampled each token.
3. Keys and values of one version never serve another, except inside a call with refresh `token` and `keep_kv`.
4. An error in a pass fails the calls in flight and the engine, with its cause; nothing hangs.
5. A version that is current, pinned, leased or used by a call is never overwritten; a policy has exactly one current
   version; base weights serve as long as any adapter is built on them or may be merged into them.
6. Until a new version has passed its canary check, no later pass can see a change, so that any failure leaves the old
   version serving.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers.initialization import no_init_weights

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, EngineError, version_refused_error
from agentrl.core.futures import run_shielded
from agentrl.core.known_checks import known_result
from agentrl.core.ports import DELTA_SECONDS, EngineCapabilities
from agentrl.core.tokens import Completion
from agentrl.engines.canary import Canary, check_canary_answer, check_canary_vocabulary, read_canary
from agentrl.engines.embedded.adapter_bank import AdapterBank
from agentrl.engines.embedded.batcher import ActiveRequest, Batcher, EmbeddedSession, SlotTable
from agentrl.engines.embedded.capture import ExpertRoutingRecorder, SamplingMaskRecorder
from agentrl.engines.embedded.forward import (
    BASE,
    EmbeddedVersion,
    ForwardPassPlan,
    ForwardPassRunner,
    MergedModelCopy,
    ServedModelCopy,
    check_kv_memory,
    check_row_independence,
    check_slots_match_forward,
    load_model,
    prepare_for_sampling,
)
from agentrl.engines.embedded.slots import SlotColumns, SlotKvCache
from agentrl.engines.experts import compute_row_by_row
from agentrl.engines.models import dtype_name, fix_rotary_positions, keep_float32, language_model_class, model_dtype
from agentrl.engines.shared_cores import computing, use_threads
from agentrl.engines.version_table import (
    InProcessEngine,
    VersionTable,
    empty_completion,
    policies_keeping_version,
    refresh_mode_needing_adapters,
)
from agentrl.engines.weights.reading import (
    check_adapter,
    check_dtypes,
    count_adapter_numbers,
    count_numbers,
    is_from_trainer,
    map_weights_to_state,
    read_adapter,
    read_weights,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.core.clock import Clock
    from agentrl.core.ports import GenerateRequest, NewTokensCallback, Refresh, TokenScores
    from agentrl.core.records import FinishReason, Float32Array, Int32Array, PolicyVersion, WeightsRef
    from agentrl.engines.embedded.forward import EngineStats, StepPlan
    from agentrl.engines.weights.reading import AdapterWeights

_NO_CANARY = Canary(
    contexts=np.zeros((1, 4), np.int32),
    token_ids=np.zeros(1, np.int32),
    logprobs=np.zeros((1, 1), np.float32),
    start_logprobs=np.zeros((1, 1), np.float32),
)
"""Context and token for a version without a canary; any model has token 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """Settings of an embedded engine besides its capabilities; see `EmbeddedEngine.load`."""

    slots: int
    refresh: Refresh | Mapping[str, Refresh]
    keep_kv: bool
    max_rank: int
    max_staleness: Mapping[str, int]
    prefill_tokens: int
    fixed_shapes: bool
    threads: int


_THREADED_MATRIX = 1 << 18
"""Weights in a matrix from which several threads are faster: its product with a batch of 64 tokens takes longer than
waking them. On two cores, two threads took 1.4 to 1.7 times as long as one for a step of matrices of 16,000 weights,
and .7 times for products with matrices of 330,000."""


def _pays_threads(model: PreTrainedModel) -> bool:
    """Whether several threads compute a pass of the model faster than one."""
    sizes = sorted(parameter.numel() for parameter in model.parameters() if parameter.dim() > 1)
    return bool(sizes) and sizes[len(sizes) // 2] >= _THREADED_MATRIX


class EmbeddedEngine(InProcessEngine[EmbeddedVersion]):
    """The engine that samples in this process. Make one with `load`; it belongs to one event loop.

    Its KV memory is one row per slot regardless of length, so it reports no `kv_tokens`: a conversation keeps its row
    between turns until another one needs it.

    Arguments of `load`: model_path: a local Hugging Face causal LM directory. versions: for each policy, the version
    that it starts with: the directory's weights, until `serve` brings others of that id. slots: number of conversations
    whose KV is held at once. max_context: longest context in tokens, completion included. refresh: when sessions move
    to newer weights, of all policies or by policy; see above. keep_kv: whether calls in flight keep the KV that older
    weights computed (refresh `token`). capture_routing: whether to record the experts of each position. capture_mask:
    whether to record the kept set of each sampled token. adapter_slots: number of adapters served side by side; 0: full
    weights only. max_rank: the largest rank of an adapter. merged: policies whose adapters are merged. max_staleness:
    for refresh `lazy`, the number of steps that a session of a policy may stay behind; 1 if absent. prefill_tokens:
    padded context tokens computed per step. fixed_shapes: whether to compute every token alone, in passes of one shape,
    so that it is bit-identical whatever the other rows and however often the conversation was interrupted; several
    times slower. threads: torch threads of this process; a model of small matrices is sampled by one. device: device of
    the model; None: the first GPU, or the CPU if there is none. dtype: `float32`, `bfloat16`, or `auto`: the
    checkpoint's. shares_weights: whether to use the frozen weights of a trainer in this process instead of a copy; only
    adapters may then be served on them. clock: times durations.
    """

    versions: EmbeddedVersionTable

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
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        cache = SlotKvCache(model, slots=slots, capacity=context)
        self.tap = ExpertRoutingRecorder(model, slots=slots, capacity=context) if capabilities.expert_routing else None
        self._mask_recorder = SamplingMaskRecorder(slots) if capabilities.sampling_mask else None
        self._columns = SlotColumns(slots=slots, capacity=context)
        self._table = SlotTable(slots, clock=clock)
        self._batcher = Batcher(
            cache=cache,
            columns=self._columns,
            table=self._table,
            prefill_tokens=settings.prefill_tokens,
            tap=self.tap,
            mask_recorder=self._mask_recorder,
            fixed_shapes=settings.fixed_shapes,
        )
        self._runner = ForwardPassRunner(
            cache=cache,
            columns=self._columns,
            device=model.device,
            dtype=model.dtype,
            tap=self.tap,
            mask_recorder=self._mask_recorder,
            clock=clock,
        )
        self.between_passes = asyncio.Lock()
        self.versions = EmbeddedVersionTable(self, ServedModelCopy.of(model), versions.values(), settings=settings)
        self._keep_kv = settings.keep_kv
        self._clock = clock
        self._threads = settings.threads if _pays_threads(model) else 1
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="agentrl-engine",
            initializer=torch.set_num_threads,
            initargs=(self._threads,),
        )
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
        merged: Iterable[str] = (),
        max_staleness: Mapping[str, int] = MappingProxyType({}),
        prefill_tokens: int = 2048,
        fixed_shapes: bool = False,
        threads: int = 1,
        device: str | None = None,
        dtype: str = "auto",
        shares_weights: bool = False,
        clock: Clock | None = None,
    ) -> EmbeddedEngine:
        """Load a model directory and serve it; the class docstring explains the arguments.

        Raises:
            ModelError: the directory holds no model that can be served with these arguments.
            EngineCapabilityError: the model or the settings lack a requested capability.
        """
        if adapter_slots == 0 and (mode := refresh_mode_needing_adapters(refresh)):
            raise EngineCapabilityError(
                f"engine.refresh = {mode!r} needs several adapters at once; set adapter_slots, or refresh = 'token' "
                "or 'turn'"
            )
        torch.set_num_threads(threads)
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        of_model = model_dtype(model_path, dtype, torch.device(device))
        model = load_model(
            model_path, max_context=max_context, dtype=of_model, device=device, shares_weights=shares_weights
        )
        check = partial(check_slots_match_forward, model, model_path, max_context=max_context)
        known_result("slots", model_path, model, max_context, check)
        check_kv_memory(model, slots=slots, max_context=max_context)
        if fixed_shapes:
            compute_row_by_row(model)
            check_row_independence(model, model_path, slots=slots)
        capabilities = EngineCapabilities(
            name="embedded",
            refresh=frozenset({"token", "turn", "episode", "lazy"} if adapter_slots else {"token", "turn"}),
            expert_routing=capture_routing,
            sampling_mask=capture_mask,
            adapters=adapter_slots,
            merged=frozenset(merged),
            max_context=max_context,
            keeps_version=policies_keeping_version(refresh, versions),
            places=slots,
            choices=capture_mask,
        )
        settings = EmbeddedSettings(
            slots=slots,
            refresh=refresh,
            keep_kv=keep_kv,
            max_rank=max_rank,
            max_staleness=max_staleness,
            prefill_tokens=prefill_tokens,
            fixed_shapes=fixed_shapes,
            threads=threads,
        )
        return cls(model, versions=versions, capabilities=capabilities, settings=settings, clock=clock or SystemClock())

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EmbeddedSession:
        return EmbeddedSession(self, session_id, policy, self._resolve_pin(policy, pin))

    def session_ended(self, session: EmbeddedSession) -> None:
        self._table.free_slot(session)
        self.versions.release(session)

    async def generate(
        self, session: EmbeddedSession, request: GenerateRequest, on_delta: NewTokensCallback | None = None
    ) -> Completion:
        """Make one call of `session`; see `agentrl.core.ports.EngineSession.generate`."""
        self._check_call(session, request, self._calls)
        if self._samples_nothing(request):
            return empty_completion("length")
        loop = asyncio.get_running_loop()
        self._arrivals += 1
        call = ActiveRequest(request, session, loop.create_future(), on_delta, self._arrivals)
        self._calls[request.request_id], session.request = call, request
        self._batcher.submit(call)
        self.interrupt()
        if self._loop_task is None:
            self._loop_task = loop.create_task(self._run(), name="agentrl-embedded-engine")
            self._loop_task.add_done_callback(self._loop_ended)
        try:
            return await call.future
        except asyncio.CancelledError:
            call.ending = True
            self.interrupt()
            raise

    def _check_running(self, operation: str) -> None:
        if self._closed or self._failure is not None:
            raise EngineError(f"{operation}: the engine is {'closed' if self._closed else 'dead'}") from self._failure

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Run steps, as long as there are calls."""
        is_waiting = True
        while is_waiting:
            with computing():
                is_waiting = await self._run_steps()
            if is_waiting:
                await self._wake.wait()
        self._loop_task = None

    async def _run_steps(self) -> bool:
        """Plan, run and finish one step after another. Returns whether there are calls that have to wait."""
        batcher, loop = self._batcher, asyncio.get_running_loop()
        while True:
            async with self.between_passes:
                self._runner.interrupted = False
                for call in batcher.drop_ending():
                    self._end(call, aborted=True)
                if batcher.empty:
                    return False
                batcher.admit(self.versions.held, self.versions.resolve)
                step = batcher.plan()
                if step is not None:
                    ended_slots = await loop.run_in_executor(self._worker, self._pass, step)
                    for slot in ended_slots:
                        self._end(batcher.running[slot], aborted=False)
                    self._deliver()
                else:
                    self._wake.clear()
            if step is None:
                return True

    def _pass(self, step: StepPlan) -> list[int]:
        """Run a forward pass, in the worker thread."""
        use_threads(self._threads)
        return self._runner.run(step)

    def _end(self, call: ActiveRequest, *, aborted: bool) -> None:
        session = call.session
        has_stop_token = not aborted and self._columns.stopped(session.slot)
        reason: FinishReason = "abort" if aborted else "stop" if has_stop_token else "length"
        completion = call.complete(self._columns, reason, tap=self.tap, mask_recorder=self._mask_recorder)
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
        self._next_delta = now + DELTA_SECONDS
        for call in self._batcher.running.values():
            call.deliver(self._columns)

    def _loop_ended(self, task: asyncio.Task[None]) -> None:
        """Mark the engine as dead after a pass or a callback raised, and fail every waiting call."""
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

    def interrupt(self) -> None:
        """Make the worker return between two passes."""
        self._runner.interrupted = True
        self._wake.set()

    async def ping(self) -> None:
        """Return at the end of a forward pass."""
        await self.on_worker(lambda: None)

    async def on_worker(self, work: Callable[[], None]) -> None:
        """Run work on the computing thread."""
        await asyncio.get_running_loop().run_in_executor(self._worker, work)

    # --- control ------------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Serve these versions. The module docstring describes the effect on calls in flight."""
        self._check_running("an update")
        try:
            await self.versions.serve(current, pinned)
        finally:
            self._wake.set()

    def switch_calls(self, old: EmbeddedVersion, new: EmbeddedVersion) -> None:
        """Continue the calls that `old` samples under `new`; called between two passes."""
        for call in list(self._batcher.running.values()):
            if call.serving is old and call.session.pin is None:
                self._batcher.switch(call, new, keep_kv=self._keep_kv)

    def abort(self, request_id: str) -> None:
        """Abort a call; does nothing if the call has ended."""
        call = self._calls.get(request_id)
        if call is not None:
            call.ending = True
            self.interrupt()

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        versions = self.versions
        self.interrupt()
        async with self.between_passes:
            self._check_running(f"scores of {version}")
            serving = versions.of_policy(version) if isinstance(version, str) else versions.of_version(version)
            ids, loop = token_ids.astype(np.int64), asyncio.get_running_loop()
            one = self._pass_without_cache(serving, np.array([len(ids)]))
            return await loop.run_in_executor(self._worker, self._runner.score, one, ids, temperature, top)

    async def answer(self, serving: EmbeddedVersion, canary: Canary) -> Float32Array:
        """Compute the log-probabilities, `[m, n]`, that a version gives to a canary; between two passes."""
        contexts, tokens = canary.contexts.astype(np.int64), canary.token_ids.astype(np.int64)
        one = self._pass_without_cache(serving, np.full(len(contexts), contexts.shape[1]))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._worker, self._runner.next_logprobs, one, contexts, tokens)

    def _pass_without_cache(self, serving: EmbeddedVersion, counts: NDArray[np.int64]) -> ForwardPassPlan:
        """Make a pass of one version over rows without slots."""
        model_copy, nowhere = serving.model_copy, np.zeros(len(counts), np.int64)
        adapters = np.full(len(counts), serving.adapter)
        return ForwardPassPlan(
            model=model_copy.model, bank=model_copy.bank, slots=nowhere, counts=counts, adapters=adapters
        )

    @property
    def stats(self) -> EngineStats:
        """Return the counters since the start."""
        return self._runner.stats

    def busy_seconds(self) -> float:
        return self._runner.busy_seconds()

    async def close(self) -> None:
        """Close the engine; calls in flight fail."""
        if self._closed:
            return
        self._closed = True
        self.versions.close()
        self._fail_calls("the engine was closed", None)
        for call in self._batcher.calls():
            call.ending = True
        self.interrupt()
        task = self._loop_task
        if task is not None:
            await asyncio.wait([task])
        async with self.between_passes:  # let a running swap finish
            self._worker.shutdown()


class EmbeddedVersionTable(VersionTable[EmbeddedVersion]):
    """The versions of one embedded engine; updates are applied one after another, between its passes.

    Args:
        engine: engine that computes with them.
        base: the loaded model.
        versions: first version of each policy: the loaded weights.
        settings: settings of the engine.
    """

    def __init__(
        self,
        engine: EmbeddedEngine,
        base: ServedModelCopy,
        versions: Iterable[PolicyVersion],
        *,
        settings: EmbeddedSettings,
    ) -> None:
        super().__init__(
            refresh=settings.refresh, max_staleness=settings.max_staleness, places=engine.capabilities.adapters
        )
        self._engine = engine
        self.base = base
        self._max_rank = settings.max_rank
        self._fixed_shapes = settings.fixed_shapes
        self._spares: dict[bool, ServedModelCopy] = {}
        """Copies that serve no version, by whether adapters are merged into them."""
        for version in versions:
            self.live[version] = self.current[version.policy] = EmbeddedVersion(version=version, model_copy=base)

    # --- copies and places --------------------------------------------------------------------------------------------

    def _servings_of(self, model_copy: ServedModelCopy) -> list[EmbeddedVersion]:
        """Return the live versions that a model copy serves."""
        return [serving for serving in self.live.values() if serving.model_copy is model_copy]

    def _overwritable(self, weights: WeightsRef) -> ServedModelCopy | None:
        """Return the model copy that the next full or merged version may overwrite; None: it needs a new copy.

        The base copy is never overwritten while adapters are built on it, or if some are merged into it.
        """
        old = self.of_policy(weights.version.policy)
        is_base = old.model_copy is self.base and bool(self._engine.capabilities.merged or self.base.bank)
        if old.held or is_base or isinstance(old.model_copy, MergedModelCopy) is not (weights.kind == "adapter"):
            return None
        for neighbor in self._servings_of(old.model_copy):
            if neighbor is not old and (neighbor.held or neighbor.calls or self.is_current(neighbor)):
                return None
        return old.model_copy

    def _new_copy(self, *, is_merged: bool) -> ServedModelCopy:
        """Return a copy of the architecture to fill, reusing one that serves no version, if there is one."""
        if is_merged in self._spares:
            return self._spares.pop(is_merged)
        template = self.base.model
        with torch.random.fork_rng(devices=[]), no_init_weights() if is_merged else nullcontext():
            make = language_model_class(template.config).from_config
            model = make(template.config, dtype=template.dtype, trust_remote_code=False)
        keep_float32(model)
        model = prepare_for_sampling(model, template.device)
        fix_rotary_positions(model, self._engine.capabilities.max_context)
        if self._fixed_shapes:
            compute_row_by_row(model)
        model_copy = MergedModelCopy(model, self.base) if is_merged else ServedModelCopy.of(model)
        if self._engine.tap is not None:
            self._engine.tap.attach(model_copy.model)
        return model_copy

    def _bank(self) -> AdapterBank:
        """Return the adapter bank of the base model, made at the first use."""
        if self.base.bank is None:
            self.base.bank = AdapterBank(self.base.model, places=self.places, max_rank=self._max_rank)
        return self.base.bank

    def settle(self, serving: EmbeddedVersion) -> None:
        """Forget a version if nothing holds it. Base weights cost nothing to keep while their copy exists."""
        self.wake()
        if serving.held or serving.calls or self.is_current(serving) or not self.is_live(serving):
            return
        if serving.adapter != BASE:
            del self.live[serving.version]
            self._bank().empty(serving.adapter)
        elif serving.model_copy is not self.base:
            del self.live[serving.version]
            if not self._servings_of(serving.model_copy):
                self._keep_spare(serving.model_copy)

    def _keep_spare(self, model_copy: ServedModelCopy) -> None:
        self._spares.setdefault(isinstance(model_copy, MergedModelCopy), model_copy)

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _load(self, weights: WeightsRef) -> None:
        is_full = weights.kind == "full" or weights.version.policy in self._engine.capabilities.merged
        await (self._load_full(weights) if is_full else self._load_adapter(weights))

    async def _make_current(self, serving: EmbeddedVersion) -> None:
        self._engine.interrupt()
        async with self._engine.between_passes:
            self._promote(serving)

    def _promote(self, new: EmbeddedVersion) -> None:
        """Make a version with loaded weights current; call it between two passes."""
        policy = new.version.policy
        old = self.of_policy(policy)
        self.live[new.version] = self.current[policy] = new
        if self.refresh_of(policy) == "token":
            self._engine.switch_calls(old, new)
        self.settle(old)

    async def _load_full(self, weights: WeightsRef) -> None:
        policy = weights.version.policy
        refresh = self.refresh_of(policy)
        if refresh in ("episode", "lazy"):
            raise version_refused_error(
                weights,
                f"engine.refresh = {refresh!r} needs adapters; with full weights set it to 'auto', 'token' or 'turn'",
            )
        read = self._read_full if weights.kind == "full" else self._read_merged
        fill, canary = await asyncio.to_thread(read, weights)
        try:
            if refresh == "turn":
                self.held.add(policy)
                await self._turn_boundary(weights)
            await run_shielded(self._swap_full(weights, fill, self._of_the_model(weights, canary)))
        finally:
            self.held.discard(policy)
            self.wake()

    def _read_full(self, weights: WeightsRef) -> tuple[Callable[[Any], None], Canary | None]:
        """Read full weights; returns a function that fills a copy of the model with them, and their canary."""
        base = self.base
        file = read_weights(weights, max_numbers=count_numbers(base.model), maps=is_from_trainer(weights))
        state = map_weights_to_state(weights, file.tensors, base.state, base.model)
        canary = read_canary(weights, file.metadata, file.tensors)
        if canary is not None:
            check_dtypes(weights, file.tensors, base.state)
        return (lambda model_copy: model_copy.overwrite(state)), canary

    def _read_merged(self, weights: WeightsRef) -> tuple[Callable[[Any], None], Canary | None]:
        """Read an adapter to be merged; see `_read_full`."""
        adapter = read_adapter(weights, max_numbers=count_numbers(self.base.model))
        check_adapter(weights, adapter, self.base.model, max_rank=adapter.rank)
        return (lambda model_copy: model_copy.merge(adapter)), adapter.canary

    async def _turn_boundary(self, weights: WeightsRef) -> None:
        old = self.of_policy(weights.version.policy)
        while old.calls and self._requested.is_current(weights) and self._overwritable(weights) is not None:
            await self._change()

    async def _swap_full(self, weights: WeightsRef, fill: Callable[[Any], None], canary: Canary | None) -> None:
        """Swap in full weights. A started swap finishes even if the caller is cancelled."""
        self._engine.interrupt()
        async with self._engine.between_passes:
            self._check_open()
            is_current, policy = self._requested.is_current(weights), weights.version.policy
            # A pin on the old version, for which open turns were not awaited, may have ended since.
            has_open_turns = self.refresh_of(policy) == "turn" and self.of_policy(policy).calls > 0
            target = self._overwritable(weights) if is_current and not has_open_turns else None
            model_copy = target or self._new_copy(is_merged=weights.kind == "adapter")
            # Saving costs a merged copy nothing, and full weights a copy in memory.
            is_saved = target is not None and (canary is not None or weights.kind == "adapter")
            restore = model_copy.save() if is_saved else None
            overwritten = {serving.version: serving for serving in self._servings_of(model_copy)}
            for version in overwritten:
                del self.live[version]  # from here on it cannot be held
            new = self._serving(weights, canary, model_copy)
            try:
                await self._engine.on_worker(partial(fill, model_copy))
                await self._check_answer(weights, new, *overwritten.values())
            except BaseException:
                if restore is not None:
                    await self._engine.on_worker(restore)
                elif target is None:
                    self._keep_spare(model_copy)
                if target is None or restore is not None:  # else the old weights may be half overwritten
                    self.live |= overwritten
                raise
            self._add(new, is_current=is_current)

    async def _load_adapter(self, weights: WeightsRef) -> None:
        count = count_adapter_numbers(self.base.model, self._max_rank)
        adapter = await asyncio.to_thread(lambda: read_adapter(weights, max_numbers=count))
        if self.places == 0:
            raise version_refused_error(
                weights, "the engine was started without slots for adapters (adapter_slots = 0)"
            )
        bank = self._bank()
        bank.check(weights, adapter)
        canary = self._of_the_model(weights, adapter.canary)
        while True:
            while bank.free_slot() is None and not self._is_replaceable(weights):
                await self._wait_for_adapter_slot(weights, [s for s in self.live.values() if s.adapter != BASE])
            if await run_shielded(self._swap_adapter(weights, adapter, canary)):
                return

    def _is_replaceable(self, weights: WeightsRef) -> bool:
        """Whether nothing will hold the policy's current adapter once these weights are current."""
        policy = weights.version.policy
        old = self.of_policy(policy)
        is_free = self.refresh_of(policy) == "token" and not old.held and old.adapter != BASE
        return is_free and self._requested.is_current(weights)

    async def _swap_adapter(self, weights: WeightsRef, adapter: AdapterWeights, canary: Canary | None) -> bool:
        """Fill a free slot or, if there is none, that of the policy's current version; returns False if that is held.

        A started swap finishes even if the caller is cancelled.
        """
        old_weights = None
        self._engine.interrupt()
        async with self._engine.between_passes:
            self._check_open()
            old, bank = self.of_policy(weights.version.policy), self._bank()
            is_current, place = self._requested.is_current(weights), bank.free_slot()
            if place is None:
                if not self._is_replaceable(weights):
                    return False
                del self.live[old.version]  # from here on it cannot be held
                place, old_weights = old.adapter, bank.empty(old.adapter)
            adapter_slot = place
            new = self._serving(weights, canary, self.base, adapter=adapter_slot)
            try:
                await self._engine.on_worker(lambda: bank.fill(adapter_slot, adapter))
                await self._check_answer(weights, new, old)
            except BaseException:
                bank.empty(adapter_slot)
                if old_weights is not None:
                    former = old_weights
                    await self._engine.on_worker(lambda: bank.fill(adapter_slot, former))
                    self.live[old.version] = old
                raise
            self._add(new, is_current=is_current)
            return True

    def _serving(
        self, weights: WeightsRef, canary: Canary | None, model_copy: ServedModelCopy, *, adapter: int = BASE
    ) -> EmbeddedVersion:
        return EmbeddedVersion(
            version=weights.version, digest=weights.sha256, canary=canary, model_copy=model_copy, adapter=adapter
        )

    def _add(self, new: EmbeddedVersion, *, is_current: bool) -> None:
        """Add a version with loaded weights to the live ones; call it between two passes."""
        new.pinned = self._requested.has_pin(new.version)
        self.live[new.version] = new
        if is_current:
            self._promote(new)
        else:
            self.settle(new)  # the version may no longer be needed

    def _of_the_model(self, weights: WeightsRef, canary: Canary | None) -> Canary | None:
        if canary is not None:
            check_canary_vocabulary(weights, canary, int(self.base.model.config.get_text_config().vocab_size))
        return canary

    async def _check_answer(self, weights: WeightsRef, new: EmbeddedVersion, *replaced: EmbeddedVersion) -> None:
        """Run the canary check, between the same two passes, before any call samples from the version.

        A version that no trainer published has no canary; its answers must be numbers.

        Raises:
            EngineError: the answer differs from the trainer's, or is NaN.
        """
        if new.canary is None:
            answer = await self._engine.answer(new, _NO_CANARY)
            if np.isnan(answer).any():
                raise version_refused_error(
                    weights, "it computes logits that are NaN or infinite: weights are too large"
                )
        else:
            answer = await self._engine.answer(new, new.canary)
            others, precision = self.canaries(new, *replaced), dtype_name(new.model_copy.model.dtype)
            check_canary_answer(weights, new.canary, answer, precision=precision, others=others, rounding=self.rounding)
