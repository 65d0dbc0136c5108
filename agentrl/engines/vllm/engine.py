"""vLLM behind the port: sessions, calls and versions over one `AsyncLLM`; implements `core.ports.Engine`.

Lives in a child process (`process.py`). Owns sessions, calls in flight and their spans; `updates.py` owns updates of
versions. Token in, token out: vLLM never sees text, and the request defines the stop tokens.
Invariants: a span's version is the one whose weights sampled its tokens; a call cut by an abort or an update keeps its
tokens; when vLLM dies the calls in flight fail as lost.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineCapabilityError, EngineError, EngineLostError, GrammarRefusedError
from agentrl.core.ids import stable_hash64
from agentrl.core.ports import DELTA_SECONDS, LARGEST_TEMPERATURE, LEAST_TEMPERATURE, EngineCapabilities
from agentrl.core.records import VersionSpan
from agentrl.core.tokens import Completion, KeptSets, Tokens
from agentrl.engines.version_table import (
    InProcessEngine,
    VersionedSession,
    empty_completion,
    policies_keeping_version,
    refresh_mode_needing_adapters,
)
from agentrl.engines.vllm.capture import CallRouting, RoutedContext, expert_layers, top_k_without_filter
from agentrl.engines.vllm.grammars import Grammars, enforces_grammars
from agentrl.engines.vllm.startup import (
    VllmSettings,
    kv_cache_capacity,
    prefill_rate,
    read_engine_meta_model,
    start_vllm,
)
from agentrl.engines.vllm.updates import VllmVersion, VllmVersionTable
from agentrl.engines.weights.vllm_worker import SAMPLED_BEFORE

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray
    from vllm.outputs import CompletionOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentrl.core.clock import Clock
    from agentrl.core.ports import GenerateRequest, NewTokensCallback, Refresh, TokenScores
    from agentrl.core.records import FinishReason, Int32Array, PolicyVersion, WeightsRef

VllmSession: TypeAlias = VersionedSession["VllmVersion"]
"""One conversation with its pin or lease. vLLM manages its KV cache."""


@dataclass(slots=True, eq=False)
class VllmCall:
    """One request in flight; becomes several requests to vLLM if its weights change."""

    request: GenerateRequest
    session: VllmSession
    on_delta: NewTokensCallback | None
    clock: Clock
    serving: VllmVersion
    """Version that samples the call, or sampled it last."""
    routing: CallRouting
    name: str = ""
    """Id of the request to vLLM."""
    is_running: bool = False
    """Whether vLLM has the request, so that it counts among the calls of `serving`."""
    ending: bool = False
    """Whether the call was aborted and returns its tokens so far."""
    moving: bool = False
    """Whether other weights sample the call from here on, in a new request."""
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_sets: list[NDArray[np.int32]] | None = None
    """Kept set of each token; None: the call has no filter."""
    spans: list[VersionSpan] = field(default_factory=list)
    _num_delivered: int = 0
    _next_delta: float = 0.0

    def append(self, output: CompletionOutput) -> None:
        """Add the tokens of one output of vLLM."""
        if output.token_ids:
            if self._next_delta == 0.0:
                self._next_delta = self.clock.monotonic() + DELTA_SECONDS
            self.tokens.extend(output.token_ids)
            self.logprobs.extend(_logprobs_of(output))
            if self.kept_sets is not None:
                self.kept_sets.extend(_kept_sets_of(output))
            if self.on_delta is not None and self.clock.monotonic() >= self._next_delta:
                self.deliver()

    def deliver(self) -> None:
        """Pass `on_delta` its new tokens, all sampled by `serving`; none before that version has passed its canary
        check."""
        if self.serving.is_being_checked:
            return
        first, self._num_delivered = self._num_delivered, len(self.tokens)
        self._next_delta = self.clock.monotonic() + DELTA_SECONDS
        if self.on_delta is not None and self._num_delivered > first:
            spans = (VersionSpan(0, self._num_delivered - first, self.serving.version),)
            self.on_delta(self.request.request_id, self._sampled(first).with_column("spans", spans))

    def discard_undelivered(self) -> None:
        """Discard the tokens of a version that failed its canary check."""
        del self.tokens[self._num_delivered :], self.logprobs[self._num_delivered :]
        if self.kept_sets is not None:
            del self.kept_sets[self._num_delivered :]

    def close_spans(self, spans: Sequence[tuple[int, PolicyVersion]]) -> None:
        """Attribute the tokens so far to versions. `spans` holds pairs (end, version) in order."""
        for stop, version in spans:
            start = self.spans[-1].stop if self.spans else 0
            if stop > start:
                if self.spans and self.spans[-1].version == version:
                    start = self.spans.pop().start
                self.spans.append(VersionSpan(start, stop, version))

    def complete(self, reason: FinishReason) -> Completion:
        """Make the engine's reply with the sampled tokens."""
        table = msgspec.structs.replace(
            self._sampled(),
            spans=tuple(self.spans),
            kept=None if self.kept_sets is None else KeptSets.of(self.kept_sets),
            experts=self.routing.experts(),
        )
        return Completion.of(table, reason, self.cached)

    def _sampled(self, start: int = 0) -> Tokens:
        """Return the call's tokens from the `start`-th on, with the columns recorded for each."""
        return Tokens(
            token_ids=np.array(self.tokens[start:], np.int32), logprobs=np.array(self.logprobs[start:], np.float32)
        )


def _kept_sets_of(output: CompletionOutput) -> list[NDArray[np.int32]]:
    """Return the kept sets of the sampled tokens."""
    sets = output.sampling_mask.token_ids if output.sampling_mask is not None else []
    if len(sets) != len(output.token_ids):
        raise EngineError(f"vLLM returned {len(output.token_ids)} tokens with the kept sets of {len(sets)}")
    return [np.array(token_ids, np.int32) for token_ids in sets]


def _logprobs_of(output: CompletionOutput) -> list[float]:
    """Return the log-probabilities of the sampled tokens."""
    flat: Any = output.logprobs
    return [float(flat.logprobs[start]) for start in flat.start_indices]


class VllmEngine(InProcessEngine[VllmVersion]):
    """The engine over vLLM. Make one with `load`; it belongs to one event loop.

    Raises:
        ModelError: the directory holds no such model.
        EngineCapabilityError: the settings cannot be combined.
    """

    versions: VllmVersionTable

    def __init__(
        self,
        llm: AsyncLLM,
        model_path: str,
        *,
        versions: Mapping[str, PolicyVersion],
        settings: VllmSettings,
        prefill_rate: float = math.inf,
        clock: Clock | None = None,
    ) -> None:
        adapters = settings.adapter_slots
        if adapters == 0 and len(versions) > 1:
            raise EngineCapabilityError(
                f"vLLM serves full weights of one policy, not of {', '.join(sorted(versions))}; give the policies a "
                "lora section, or set engine.vllm = false"
            )
        if adapters == 0 and (mode := refresh_mode_needing_adapters(settings.refresh)):
            raise EngineCapabilityError(
                f"engine.refresh = {mode!r} needs several adapters at once; with full weights set it to 'token' or "
                "'turn'"
            )
        shapes = read_engine_meta_model(model_path, settings)
        self.capabilities = EngineCapabilities(
            name="vllm",
            refresh=frozenset({"token", "turn", "episode", "lazy"} if adapters else {"token", "turn"}),
            expert_routing=settings.capture_routing,
            sampling_mask=settings.capture_mask,
            adapters=adapters,
            merged=frozenset(settings.merged),
            max_context=settings.max_context,
            keeps_version=policies_keeping_version(settings.refresh, versions),
            exact_continuation=False,
            kv_tokens=kv_cache_capacity(llm.vllm_config),
            prefill_rate=prefill_rate,
            shares_prefixes=True,
            places=settings.slots,
            grammars=enforces_grammars(llm.vllm_config),
        )
        self._expert_layers = expert_layers(shapes) if settings.capture_routing else []
        self._routing_by_call: dict[str, RoutedContext | None] = {}
        """What earlier calls of a row returned of its experts, by session."""
        self._llm = llm
        self.versions = VllmVersionTable(
            *(llm, shapes, versions, settings),
            switch=self._switch_calls,
            recall=self._recall_calls,
        )
        self._vocabulary = int(shapes.config.get_text_config().vocab_size)
        self._grammars = Grammars(model_path, llm.vllm_config.model_config.get_vocab_size())
        self._top_k_without_filter = top_k_without_filter(llm.vllm_config)
        self._clock = clock or SystemClock()
        self._calls: dict[str, VllmCall] = {}
        self._requests = 0
        self._closed = False
        self._aborts: set[asyncio.Task[None]] = set()
        self._busy = 0.0
        self._busy_since = 0.0
        self._running = 0

    @classmethod
    async def load(  # noqa: PLR0913 (one keyword per setting)
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
        merged: Collection[str] = (),
        max_staleness: Mapping[str, int] = MappingProxyType({}),
        kv_memory: int = 0,
        threads: int = 1,
        dtype: str = "auto",
        memory_share: float = 0.0,
        shares_gpu: bool = False,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> VllmEngine:
        """Start vLLM on a model directory, measure its prefill rate, and serve the model.

        Args:
            model_path: a local Hugging Face causal LM directory.
            versions: for each policy, the version that it starts with: the directory's weights, until `serve` brings
                others of that id.
            slots: number of conversations sampled at once (one more if no canary check runs); others wait.
            max_context: longest context in tokens, completion included.
            refresh: when sessions move to newer weights, of all policies or by policy; see `version_table.py`.
            keep_kv: for full weights and refresh `token`, whether calls in flight keep the KV of older weights.
            capture_routing: whether to return the experts of each position; needs vLLM's model runner V2.
            capture_mask: whether to return the kept set of each token of calls with filters; needs V2 as well.
            adapter_slots: number of adapters served side by side; 0: full weights of one policy.
            max_rank: the largest rank of an adapter.
            merged: policies whose adapters are merged into the weights, with `adapter_slots` = 0.
            max_staleness: for refresh `lazy`, the number of steps that a session of a policy may stay behind; 1 if
                absent.
            kv_memory: bytes of KV; 0: vLLM's own choice on a GPU, enough for `slots` contexts on CPU.
            threads: torch threads of vLLM's worker on CPU.
            dtype: dtype of computation: `float32`, `bfloat16`, or `auto`: the checkpoint's.
            memory_share: share of the device's memory; see `engine.memory_share` of the configuration.
            shares_gpu: whether a trainer or another engine computes on one of the engine's GPUs, so that the size of
                the KV cache is computed instead of measured.
            arguments: further engine arguments by vLLM's names; see `[engine.vllm]` of the configuration.

        Raises:
            ModelError: the directory holds no such model.
            ConfigError: `arguments` has one that is refused.
            EngineCapabilityError: the arguments cannot be combined.
            EngineError: vLLM does not start; the message has the reason.
        """
        settings = VllmSettings(
            slots=slots,
            max_context=max_context,
            refresh=refresh,
            keep_kv=keep_kv,
            capture_routing=capture_routing,
            capture_mask=capture_mask,
            adapter_slots=adapter_slots,
            max_rank=max_rank,
            merged=merged,
            max_staleness=max_staleness,
            dtype=dtype,
            memory_share=memory_share,
            shares_gpu=shares_gpu,
            arguments=arguments,
        )
        llm = start_vllm(model_path, settings, kv_memory=kv_memory, threads=threads)
        rate = await prefill_rate(llm, model_path)
        return cls(llm, model_path, versions=versions, settings=settings, prefill_rate=rate)

    # --- sessions -----------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> VllmSession:
        return VllmSession(self, session_id, policy, self._resolve_pin(policy, pin))

    def session_ended(self, session: VllmSession) -> None:
        self.versions.release(session)
        self._routing_by_call.pop(session.session_id, None)

    async def generate(
        self, session: VllmSession, request: GenerateRequest, on_delta: NewTokensCallback | None = None
    ) -> Completion:
        """Make one call of `session`; see `agentrl.core.ports.EngineSession.generate`."""
        sampling = request.sampling
        self._check_call(session, request, self._calls)
        if not sampling.is_greedy and not LEAST_TEMPERATURE <= sampling.temperature <= LARGEST_TEMPERATURE:
            raise EngineError(
                f"vLLM samples at temperature 0, or from {LEAST_TEMPERATURE} to {LARGEST_TEMPERATURE:g}, not at "
                f"{sampling.temperature}"
            )
        if self._samples_nothing(request):
            return empty_completion("length")
        if request.row != session.row:
            self._routing_by_call.pop(session.session_id, None)
        routing = CallRouting(self._expert_layers, request.token_ids, self._routing_by_call.get(session.session_id))
        call = VllmCall(request, session, on_delta, self._clock, self.versions.of_policy(session.policy), routing)
        call.kept_sets = [] if request.sampling.is_filtered and self.capabilities.sampling_mask else None
        self._calls[request.request_id], session.request = call, request
        try:
            grammar = await self._grammars.compile(sampling.grammar) if sampling.grammar else None
            completion = call.complete(await self._sample(call))
            if grammar is not None and not (sampling.is_filtered or sampling.is_greedy):
                before = request.sampled_before
                reply = [*request.token_ids[len(request.token_ids) - before :].tolist(), *call.tokens]
                kept = await asyncio.to_thread(grammar.kept_sets, reply, before, self._stops(request))
                completion = msgspec.structs.replace(completion, kept=kept)
            if self._expert_layers:
                self._routing_by_call[session.session_id] = routing.after(
                    np.concatenate([request.token_ids, completion.token_ids])
                )
            return completion
        except EngineDeadError as error:
            call.deliver()
            raise self._lost(request) from error
        except VLLMValidationError as error:
            if not sampling.grammar:
                raise EngineError(f"vLLM refuses the call: {error}") from error
            # All of the request but its grammar has been checked.
            raise GrammarRefusedError(f"vLLM refuses the grammar of the reply: {error}") from error
        finally:
            del self._calls[request.request_id]
            session.end_call()

    def _check_running(self, operation: str) -> None:
        if self._closed:
            raise EngineError(f"{operation}: the engine is closed")

    def _lost(self, request: GenerateRequest) -> EngineError:
        if self._closed:
            return EngineError(f"call {request.request_id}: the engine was closed")
        return EngineLostError(f"call {request.request_id}: vLLM died")

    async def _sample(self, call: VllmCall) -> FinishReason:
        """Sample until the turn ends, continuing under newer weights if the refresh says so."""
        limit = min(call.request.sampling.max_tokens, self.capabilities.max_context - len(call.request.token_ids))
        while True:
            await self.versions.may_sample(call.session.policy, lambda: call.ending)
            if self._closed:
                raise EngineError(f"call {call.request.request_id}: the engine was closed")
            if call.ending:
                return "abort"
            call.serving, call.moving, call.is_running = self.versions.resolve(call.session), False, True
            call.serving.calls += 1
            self._work(1)
            try:
                reason = await self._ask(call, limit - len(call.tokens))
            finally:
                self._work(-1)
                call.is_running = False
                call.serving.calls -= 1
                self.versions.settle(call.serving)
            if reason != "abort" or call.ending:
                return reason

    async def _ask(self, call: VllmCall, limit: int) -> FinishReason:
        """Make one request to vLLM, and follow it to its end."""
        self._requests += 1
        request, serving, before = call.request, call.serving, len(call.tokens)
        call.name = f"{request.request_id}/{self._requests}"
        num_sampled, filters = request.sampled_before + before, request.sampling
        routing_start = call.routing.start_of_request(serving) if self._expert_layers else 0
        parameters = SamplingParams(
            # vLLM returns no kept sets of requests at temperature 0
            temperature=1.0 if filters.is_greedy else filters.temperature,
            top_k=1 if filters.is_greedy else filters.top_k or self._top_k_without_filter,
            top_p=filters.top_p,
            min_p=filters.min_p,
            presence_penalty=filters.presence_penalty,
            frequency_penalty=filters.frequency_penalty,
            repetition_penalty=filters.repetition_penalty,
            routed_experts_prompt_start=routing_start,
            max_tokens=limit,
            seed=(stable_hash64(request.seed, num_sampled) if num_sampled else request.seed) & (2**63 - 1),
            stop_token_ids=self._stops(request),
            structured_outputs=StructuredOutputsParams(structural_tag=filters.grammar) if filters.grammar else None,
            extra_args={SAMPLED_BEFORE: num_sampled} if filters.grammar and num_sampled else None,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            # tokens come eight at once, to save CPU; one by one if weights are replaced under a call
            stream_interval=8 if self.versions.places else 1,
            skip_clone=True,
        )
        prompt = TokensPrompt(prompt_token_ids=[*request.token_ids.tolist(), *call.tokens], cache_salt=serving.salt)  # type: ignore[typeddict-item]  # None is taken
        is_aborted = False
        reason: FinishReason | None = None
        outputs = self._llm.generate(
            prompt, parameters, call.name, lora_request=serving.adapter, priority=request.priority
        )
        async for output in outputs:
            delta = output.outputs[0]
            is_discarded = call.moving and not self.versions.places  # new weights may have continued an old prefix
            if not is_discarded:
                if before == 0 and not call.tokens:
                    call.cached = output.num_cached_tokens or 0
                call.append(delta)
            if delta.finish_reason is not None:
                reason = "abort" if is_discarded else _reason(delta, request)
                if not await call.serving.passed_canary():
                    call.discard_undelivered()
                    reason = "abort"
                call.close_spans(self.versions.spans(call.serving, output, start=before, stop=len(call.tokens)))
                if self._expert_layers and len(call.tokens) > before:
                    version = serving if call.serving is serving else None
                    stop = len(request.token_ids) + len(call.tokens) - 1
                    call.routing.append(delta, routing_start, stop, version)
            elif (call.ending or call.moving) and not is_aborted:  # the abort came before vLLM knew the request
                is_aborted = True
                await self._llm.abort(call.name)
        if reason is None:
            raise EngineLostError(f"call {request.request_id}: vLLM ended the call without a reason")
        if reason == "abort" and not call.ending:
            call.deliver()
        return reason

    def _stops(self, request: GenerateRequest) -> list[int]:
        return [stop_id for stop_id in request.sampling.stop_token_ids if stop_id < self._vocabulary]

    def _work(self, change: int) -> None:
        now = self._clock.monotonic()
        if self._running:
            self._busy += now - self._busy_since
        self._busy_since = now
        self._running += change

    # --- control ------------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        self._check_running("an update")
        try:
            await self.versions.serve(current, pinned)
        except EngineDeadError as error:
            raise EngineLostError("vLLM died while its weights were updated") from error

    async def _switch_calls(self, old: VllmVersion, new: VllmVersion) -> None:
        """Move calls from `old` to `new`: open turns in place where weights are replaced, others as new requests.

        If the context is to be computed again and its experts are recorded, an open turn is a new request too: within
        one request vLLM returns the experts of each position once, those of the older weights.
        """
        in_place = new.adapter is None and (self.versions.keep_kv or not self._expert_layers)
        restarted_calls = []
        for call in self._calls.values():
            if not call.is_running or call.serving is not old or call.session.pin is not None or call.ending:
                continue
            if not (in_place and call.tokens):
                call.moving = True
                restarted_calls.append(call.name)
            else:
                call.deliver()
                old.calls, new.calls = old.calls - 1, new.calls + 1
                call.serving = new
        if restarted_calls:
            await self._llm.abort(restarted_calls)

    async def _recall_calls(self, refused_version: VllmVersion) -> None:
        """Stop the calls that `refused_version` samples, so that they continue under another version."""
        calls = [
            call
            for call in self._calls.values()
            if call.is_running and call.serving is refused_version and not call.ending
        ]
        for call in calls:
            call.moving = True
        if calls:
            await self._llm.abort([call.name for call in calls])

    def abort(self, request_id: str) -> None:
        """End a call early. Does nothing if it has ended."""
        call = self._calls.get(request_id)
        if call is not None:
            call.ending = True
            self.versions.wake()
            self._abort(call.name)

    def _abort(self, name: str) -> None:
        task = asyncio.get_running_loop().create_task(self._llm.abort(name))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        """Compute log-probabilities, at temperature 1 only. A tie for the last place is broken arbitrarily."""
        if temperature != 1.0:
            raise EngineCapabilityError(f"vLLM scores tokens only at temperature 1, not {temperature}")
        versions = self.versions
        while True:
            await versions.may_sample(version if isinstance(version, str) else version.policy, lambda: self._closed)
            serving = versions.of_policy(version) if isinstance(version, str) else versions.of_version(version)
            try:
                scores = await versions.score(serving, token_ids, top)
            except EngineDeadError as error:
                raise EngineLostError("vLLM died") from error
            if await serving.passed_canary() and versions.is_live(serving):
                return scores  # otherwise weights were replaced in between, and the scores may mix both versions

    async def ping(self) -> None:
        """Wait for vLLM's core, which responds between two steps of its worker."""
        try:
            await self._llm.is_sleeping()
        except EngineDeadError as error:
            raise EngineLostError("vLLM died") from error

    def busy_seconds(self) -> float:
        """Return the seconds in which at least one call was in flight."""
        self._work(0)
        return self._busy

    async def close(self) -> None:
        """Close the engine; calls in flight fail."""
        if self._closed:
            return
        self._closed = True
        for call in self._calls.values():
            self._abort(call.name)
        self.versions.close()
        self._grammars.close()
        self._llm.shutdown()


def _reason(output: CompletionOutput, request: GenerateRequest) -> FinishReason:
    match output.finish_reason:
        case "stop" | "length" | "abort" as reason:
            return reason
    raise EngineError(f"call {request.request_id}: vLLM ended the call with {output.finish_reason!r}")
