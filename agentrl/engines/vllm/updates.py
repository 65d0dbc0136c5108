"""The versions that one vLLM serves: updates to published versions, and the requests to vLLM that they need.

`VllmVersionTable` owns the live versions, adapter slots, private copies of weights, and the steps of an update: read
and check, then add to the others or replace them. `VllmControl` owns the other requests to vLLM: to pause, to load
weights, to score tokens. Neither knows the tokens of calls.
Invariants: until an update has succeeded the old version stays, and no failure leaves vLLM paused; tokens of a version
leave the engine only after it has passed its canary check. The check runs while calls already sample from the version,
because its answer takes as long as a first token; for an adapter, both are requested together with its loading.

refresh   adapters (nothing is paused)               full weights (one version at a time; new calls wait),
                                                     and adapters that vLLM's worker merges
token     calls continue under it, as a new          pause, load, resume; KV of open turns kept or recomputed
          request over the tokens they have
turn      calls in flight end on theirs              the same, once those in flight have ended
episode   sessions stay on theirs until they close   refused
lazy      sessions stay until their lag exceeds      refused
          `max_staleness`, or a place is short
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.errors import EngineError, EngineLostError, VersionNotServedError, version_refused_error
from agentrl.core.files import WEIGHT_FILES
from agentrl.core.futures import run_shielded
from agentrl.core.ports import TokenScores
from agentrl.engines.canary import check_canary_answer, check_canary_vocabulary, read_canary
from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE
from agentrl.engines.version_table import LiveVersion, VersionTable
from agentrl.engines.vllm.capture import top_k_without_filter
from agentrl.engines.weights import vllm_worker
from agentrl.engines.weights.reading import (
    WeightFile,
    check_adapter,
    check_dtypes,
    copy_weight_files,
    count_adapter_numbers,
    count_numbers,
    is_from_trainer,
    map_weights_to_state,
    read_adapter,
    read_weights,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from transformers import PreTrainedModel
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef
    from agentrl.engines.canary import Canary
    from agentrl.engines.vllm.startup import VllmSettings

_FIRST = -(1 << 40)
"""Priority of a canary: before all conversations."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmVersion(LiveVersion):
    """A version vLLM can sample from."""

    adapter: LoRARequest | None = None
    salt: str | None = None
    """Salt that separates its prefixes in vLLM's cache; for an adapter its path does that."""
    files: WeightsRef | None = None
    """Full weights, or an adapter to be merged: the published files of a trainer, or a private copy;
    None: the weights with which vLLM was started."""
    check: asyncio.Future[bool] | None = None
    """Resolves to whether the version passed its canary check; until then its tokens are held back. None: no check."""

    @property
    def is_being_checked(self) -> bool:
        """Whether the version's tokens are held back for now."""
        return self.check is not None and not self.check.done()

    async def passed_canary(self) -> bool:
        """Wait for the canary check; returns whether the version's tokens may leave the engine."""
        return self.check is None or await asyncio.shield(self.check)


def engine_precision(config: VllmConfig) -> str:
    """Return the coarsest numbers in which a vLLM computes: the quantization of its weights or of its KV cache, or its
    dtype."""
    cache, dtype = config.cache_config.cache_dtype, config.model_config.dtype
    coarse_cache = "" if cache in ("auto", "bfloat16", "float16") else f"a KV cache in {cache}"
    return str(config.model_config.quantization or coarse_cache or str(dtype).removeprefix("torch."))


class VllmVersionTable(VersionTable[VllmVersion]):
    """The versions that one vLLM serves, and their updates.

    Args:
        llm: vLLM's engine.
        model: the model's shapes.
        versions: for each policy, the version that it starts with: the directory's weights, until `serve` brings
            others of that id.
        settings: settings of the engine.
        switch: moves the calls in flight that the first version samples to the second.
        recall: aborts the requests that a refused version samples; their calls continue under the previous version.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model: PreTrainedModel,
        versions: Mapping[str, PolicyVersion],
        settings: VllmSettings,
        *,
        switch: Callable[[VllmVersion, VllmVersion], Awaitable[None]],
        recall: Callable[[VllmVersion], Awaitable[None]],
    ) -> None:
        super().__init__(refresh=settings.refresh, max_staleness=settings.max_staleness, places=settings.adapter_slots)
        self._control = VllmControl(llm)
        self._model = model
        self._precision = engine_precision(llm.vllm_config)
        self.keep_kv = settings.keep_kv
        self._max_rank = settings.max_rank
        self._merged = settings.merged
        for policy, version in versions.items():
            salt = None if self.places else str(version)
            self.live[version] = self.current[policy] = VllmVersion(version=version, salt=salt)
        # vLLM labels the weights that it was started with `default`
        self._labels = {label: version for version in versions.values() for label in ("default", str(version))}
        """Versions by the labels under which vLLM reports them. Used with full weights, where there is one policy;
        adapters need no report."""
        self._switch = switch
        self._recall = recall
        self._fallback: VllmVersion | None = None
        """Version that serves again if the current one fails its canary check."""
        self._numbers = itertools.count(1)
        self._removals: set[asyncio.Task[None]] = set()
        self._copies = tempfile.TemporaryDirectory(prefix="weights-", dir=os.environ.get(PRIVATE_DIRECTORY_VARIABLE))

    # --- versions -----------------------------------------------------------------------------------------------------

    def of_version(self, version: PolicyVersion) -> VllmVersion:
        """Return a live version. One that has not passed its canary check is not served yet."""
        serving = super().of_version(version)
        if serving.is_being_checked:
            raise VersionNotServedError(f"version {version} is not served yet: it has not passed its canary check")
        return serving

    def settle(self, serving: VllmVersion) -> None:
        """Remove a version that nothing holds, and unload its adapter from vLLM."""
        self.wake()
        adapter, is_needed = serving.adapter, serving.held or serving.calls or serving is self._fallback
        if is_needed or adapter is None or self.is_current(serving) or not self.is_live(serving):
            return
        del self.live[serving.version]
        task = asyncio.get_running_loop().create_task(self._control.unload_adapter(adapter))
        self._removals.add(task)
        task.add_done_callback(self._removals.discard)

    def spans(
        self, serving: VllmVersion, output: RequestOutput, *, start: int, stop: int
    ) -> list[tuple[int, PolicyVersion]]:
        """Return the versions that sampled tokens `[start, stop)` of a call, as (end, version). With full weights, vLLM
        reports them."""
        version_spans = output.outputs[0].weight_versions
        if self.places or not version_spans:
            return [(stop, serving.version)]
        return [(min(start + span.end, stop), self._labels[span.version]) for span in version_spans]

    async def may_sample(self, policy: str, is_ending: Callable[[], bool]) -> None:
        """Wait while the policy's calls are held for an update, but not longer than the call lives."""
        while policy in self.held and not (self._closed or is_ending()):
            await self._change()
        if self._control.lost:
            raise EngineLostError("vLLM could not return to the previous version after a failed update")

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _load(self, weights: WeightsRef) -> None:
        is_full = weights.kind == "full" or weights.version.policy in self._merged
        await (self._load_full(weights) if is_full else self._load_adapter(weights))

    async def _make_current(self, serving: VllmVersion) -> None:
        await run_shielded(self._promote(serving))

    async def _promote(self, new: VllmVersion) -> None:
        """Make a version with loaded weights current, and move calls to it if the refresh says so."""
        policy = new.version.policy
        old = self.of_policy(policy)
        self.live[new.version] = self.current[policy] = new
        self.wake()
        if new.adapter is None or self.refresh_of(policy) == "token":
            await self._switch(old, new)
        self.settle(old)

    async def _load_adapter(self, weights: WeightsRef) -> None:
        if self.places == 0:
            raise version_refused_error(
                weights, "the engine was started without slots for adapters (adapter_slots = 0)"
            )
        number = next(self._numbers)
        copy = Path(self._copies.name) / str(number)
        try:
            canary = await asyncio.to_thread(self._copy_checked, weights, copy)
            while len(adapters := [serving for serving in self.live.values() if serving.adapter]) >= self.places:
                old = self.of_policy(weights.version.policy)
                moves = self._requested.is_current(weights) and self.refresh_of(old.version.policy) == "token"
                if moves and not old.held and old.adapter:
                    break  # nothing pins the old version, which is unloaded when its calls have moved
                await self._wait_for_adapter_slot(weights, adapters)
            adapter = vllm_worker.lora_request(f"{weights.version}/{number}", number, str(copy))
            await run_shielded(self._add_adapter(weights, adapter, canary))
        except BaseException:
            if weights.version not in self.live:
                shutil.rmtree(copy, ignore_errors=True)
            raise

    def _copy_checked(self, weights: WeightsRef, copy: Path) -> Canary | None:
        """Copy the weights and check the copy, which vLLM reads, and which stays if the run's own file changes or is
        pruned."""
        count = count_adapter_numbers(self._model, self._max_rank)
        adapter = read_adapter(copy_weight_files(weights, copy, max_numbers=count), max_numbers=count)
        check_adapter(weights, adapter, self._model, max_rank=self._max_rank)
        return self._of_the_model(weights, adapter.canary)

    def _of_the_model(self, weights: WeightsRef, canary: Canary | None) -> Canary | None:
        if canary is not None:
            check_canary_vocabulary(weights, canary, int(self._model.config.get_text_config().vocab_size))
        return canary

    async def _add_adapter(self, weights: WeightsRef, adapter: LoRARequest, canary: Canary | None) -> None:
        new = VllmVersion(version=weights.version, digest=weights.sha256, canary=canary, adapter=adapter)
        old = self.of_policy(weights.version.policy)
        loading = asyncio.get_running_loop().create_task(self._control.load_adapter(adapter))
        await asyncio.sleep(0)  # lets the load be sent: vLLM handles it before any request that is sent later
        await self._begin_service(new, old, is_current=self._requested.is_current(weights))
        await self._check_canary(weights, new, old, loading=loading, undo=lambda: self._control.unload_adapter(adapter))

    async def _begin_service(self, new: VllmVersion, old: VllmVersion, *, is_current: bool) -> None:
        """Sample from weights that vLLM has, or is loading; the tokens are held back until the check has ended."""
        self._fallback = old
        new.pinned = self._requested.has_pin(new.version)
        is_checked = new.canary is not None or new.adapter is not None
        new.check = asyncio.get_running_loop().create_future() if is_checked else None
        self.live[new.version] = new
        if is_current:
            await self._promote(new)

    async def _check_canary(
        self,
        weights: WeightsRef,
        new: VllmVersion,
        old: VllmVersion,
        *,
        loading: Awaitable[None] | None = None,
        undo: Callable[[], Awaitable[None]],
    ) -> None:
        """Wait until vLLM has loaded the weights, and check their canary; on a failure, call `undo` and serve `old`.

        Raises:
            EngineError: vLLM cannot load the weights, or they failed the check.
        """
        try:
            if new.check is not None:
                await self._check_answer(weights, new, old, loading)
                new.check.set_result(True)
        except EngineError:
            await self._withdraw(new, old)
            await undo()
            raise
        finally:
            if new.check is not None and not new.check.done():
                new.check.set_result(False)
            self.held.discard(old.version.policy)
            self._fallback = None
            self.settle(old)
            self.settle(new)

    async def _withdraw(self, new: VllmVersion, old: VllmVersion) -> None:
        """Take new weights out of service; their calls continue under `old`, without the withdrawn tokens."""
        assert new.check is not None
        policy = new.version.policy
        self.held.add(policy)
        del self.live[new.version]
        if self.is_current(new):
            self.live[old.version] = self.current[policy] = old
        self.forget(new)
        new.check.set_result(False)
        await self._recall(new)
        while new.calls:
            await self._change()

    async def _check_answer(
        self, weights: WeightsRef, new: VllmVersion, old: VllmVersion, loading: Awaitable[None] | None
    ) -> None:
        checks: dict[str, Awaitable[Any]] = {} if loading is None else {"load it": loading}
        if (canary := new.canary) is not None:
            checks["answer its canary"] = self._control.next_logprobs(
                canary.contexts, canary.token_ids, adapter=new.adapter, salt=new.salt
            )
        # Wait for all: vLLM would die if an adapter were unloaded during the canary's request.
        outcomes: list[Any] = await asyncio.gather(*checks.values(), return_exceptions=True)
        for check, outcome in zip(checks, outcomes, strict=True):
            if isinstance(outcome, EngineDeadError):
                raise outcome
            if isinstance(outcome, BaseException):
                raise version_refused_error(
                    weights, f"vLLM cannot {check} ({type(outcome).__name__}: {outcome})"
                ) from outcome
        if canary is not None:
            precision, others = self._precision, self.canaries(new, old)
            check_canary_answer(
                weights, canary, outcomes[-1], precision=precision, others=others, rounding=self.rounding
            )

    async def _load_full(self, weights: WeightsRef) -> None:
        if self.places:
            raise version_refused_error(
                weights, "vLLM was started for adapters; it serves full weights only if no policy has a lora section"
            )
        if not self._requested.is_current(weights) or any(serving.pinned for serving in self.live.values()):
            raise version_refused_error(
                weights, "vLLM serves one version of full weights at a time, so no other can be pinned; use lora"
            )
        policy, copy = weights.version.policy, Path(self._copies.name) / str(next(self._numbers))
        try:
            files, canary = await asyncio.to_thread(self._files, weights, copy)
            self.held.add(policy)  # a turn that began now would reuse prefixes of the version being replaced
            while self.refresh_of(policy) == "turn" and self.of_policy(policy).calls:
                await self._change()
            await run_shielded(self._replace_full(weights, canary, files))
        finally:
            self.held.discard(policy)
            self.wake()
            self._remove_unused_copies()

    def _files(self, weights: WeightsRef, copy: Path) -> tuple[WeightsRef, Canary | None]:
        """Return the checked files to load, and their canary, so that nothing is left to check while vLLM is paused. A
        trainer's full weights are loaded as they are; other files are copied (see `_copy_checked`)."""
        if weights.kind == "adapter":
            return self._copy_merged(weights, copy)
        count = count_numbers(self._model)
        files = weights if is_from_trainer(weights) else copy_weight_files(weights, copy, max_numbers=count)
        return files, self._check_full(weights, read_weights(files, max_numbers=count, maps=True))

    def _copy_merged(self, weights: WeightsRef, copy: Path) -> tuple[WeightsRef, Canary | None]:
        count = count_numbers(self._model)
        files = copy_weight_files(weights, copy, max_numbers=count)
        adapter = read_adapter(files, max_numbers=count)
        check_adapter(weights, adapter, self._model, max_rank=adapter.rank)
        return files, self._of_the_model(weights, adapter.canary)

    def _check_full(self, weights: WeightsRef, file: WeightFile) -> Canary | None:
        expected, canary = self._model.state_dict(), read_canary(weights, file.metadata, file.tensors)
        map_weights_to_state(weights, file.tensors, expected, self._model)
        if canary is not None:
            check_dtypes(weights, file.tensors, expected)
        return self._of_the_model(weights, canary)

    def _remove_unused_copies(self) -> None:
        """Remove the private copies of full weights that no longer serve."""
        used_names = {Path(serving.files.path).name for serving in self.live.values() if serving.files}
        for copy in Path(self._copies.name).glob("*"):
            if copy.name not in used_names:
                shutil.rmtree(copy, ignore_errors=True)

    async def _replace_full(self, weights: WeightsRef, canary: Canary | None, files: WeightsRef) -> None:
        old = self.of_policy(weights.version.policy)
        if old.pins:
            raise version_refused_error(
                weights, f"{old.pins} conversations are pinned to {old.version}; close them, or use lora"
            )
        new = VllmVersion(
            version=weights.version, digest=weights.sha256, canary=canary, salt=str(weights.version), files=files
        )

        async with self._control.paused(clear_cache=not self.keep_kv):
            await self._overwrite(weights, new, old)
            self._labels[str(new.version)] = new.version
            del self.live[old.version]
            await self._begin_service(new, old, is_current=True)

        async def undo() -> None:
            # Turns that were open had their contexts computed by the refused weights, under the old version's salt.
            async with self._control.paused(clear_cache=True):
                await self._go_back(weights, old, "they are refused")

        await self._check_canary(weights, new, old, undo=undo)

    async def _overwrite(self, weights: WeightsRef, new: VllmVersion, old: VllmVersion) -> None:
        """Replace the weights while vLLM is paused; after a failure it has the previous ones again."""
        try:
            await self._control.load_full(new.files, str(new.version))
        except EngineDeadError:
            raise
        except Exception as error:
            await self._go_back(weights, old, f"vLLM cannot load them: {error}")
            if isinstance(error, EngineError):
                raise
            raise version_refused_error(weights, f"vLLM cannot load it ({type(error).__name__}: {error})") from error

    async def _go_back(self, weights: WeightsRef, old: VllmVersion, reason: str) -> None:
        """Load the previous weights again.

        Raises:
            EngineLostError: vLLM's weights belong to no version now.
        """
        try:
            if old.files is not None and old.files.kind == "full":
                count = count_numbers(self._model)
                await asyncio.to_thread(read_weights, old.files, max_numbers=count)  # checks their digest
            await self._control.load_full(old.files, str(old.version))
        except Exception as error:
            self._control.lost = True
            raise EngineLostError(
                f"weights {weights.version}: {reason}, and vLLM cannot return to {old.version} ({error})"
            ) from error

    # --- control ------------------------------------------------------------------------------------------------------

    async def score(self, serving: VllmVersion, token_ids: Int32Array, top: int) -> TokenScores:
        """Compute the log-probabilities of tokens, and of the likeliest ones at each position."""
        serving.calls += 1
        try:
            return await self._control.score(token_ids, top, adapter=serving.adapter, salt=serving.salt)
        finally:
            serving.calls -= 1
            self.settle(serving)

    def close(self) -> None:
        """Close the table, and remove the private copies."""
        super().close()
        self._copies.cleanup()


class VllmControl:
    """The control of one vLLM for `VllmVersionTable`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.lost = False
        """Whether vLLM's weights belong to no version, so that it must not sample again."""
        self._top_k = top_k_without_filter(llm.vllm_config)
        self._one_at_a_time = asyncio.Lock()
        self._scores = itertools.count(1)

    @asynccontextmanager
    async def paused(self, *, clear_cache: bool) -> AsyncIterator[None]:
        """Pause vLLM within the context; afterwards it continues, unless it is lost."""
        async with self._one_at_a_time:
            await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)
            try:
                yield
            finally:
                if not self.lost:
                    await self._llm.resume_generation()

    async def load_full(self, files: WeightsRef | None, label: str) -> None:
        """Replace the weights by a version's; tokens that vLLM samples afterward bear the label.

        Args:
            files: a private copy of full weights or of an adapter; None: the weights with which vLLM was started.
            label: label of the version.
        """
        await self._llm.start_weight_update()
        info: dict[str, Any] = {}
        if files is not None and files.kind == "adapter":
            info["adapter"] = msgspec.to_builtins(files)
        elif files is not None:
            info["path"] = str(Path(files.path) / WEIGHT_FILES["full"][0])
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await self._llm.finish_weight_update(weight_version=label)

    async def load_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter in addition to the others.

        Raises:
            RuntimeError: vLLM cannot load it; an adapter that changes nothing takes its place until it is unloaded.
        """
        arguments = (adapter.lora_name, adapter.lora_int_id, adapter.lora_path)
        reasons = await self._llm.collective_rpc("load_adapter", args=arguments)
        if reason := next(filter(None, reasons), None):
            raise RuntimeError(reason)

    async def unload_adapter(self, adapter: LoRARequest) -> None:
        """Unload an adapter and remove its private copy."""
        try:
            await self._llm.remove_lora(adapter.lora_int_id)
        except EngineDeadError:
            return  # the next call reports the failure
        shutil.rmtree(adapter.lora_path, ignore_errors=True)

    async def score(
        self, token_ids: Int32Array, top: int, *, adapter: LoRARequest | None, salt: str | None
    ) -> TokenScores:
        """Compute the log-probabilities of tokens, and of the `top` likeliest ones at each position."""
        top = min(top, self._llm.model_config.get_vocab_size())
        parameters = SamplingParams(
            max_tokens=1,
            prompt_logprobs=top,
            flat_logprobs=True,
            top_k=self._top_k,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        output = await self._ask(token_ids, parameters, adapter, salt, priority=0)
        flat: Any = output.prompt_logprobs  # at each position but the first, the token itself and the likeliest ones
        ids = np.array(flat.token_ids, np.int32).reshape(-1, top + 1)
        logprobs = np.array(flat.logprobs, np.float32).reshape(-1, top + 1)
        order = 1 + np.lexsort((ids[:, 1:], -logprobs[:, 1:]))
        return TokenScores.after_first(
            logprobs[:, 0], np.take_along_axis(ids, order, 1), np.take_along_axis(logprobs, order, 1)
        )

    async def next_logprobs(
        self, contexts: Int32Array, token_ids: Int32Array, *, adapter: LoRARequest | None, salt: str | None
    ) -> Float32Array:
        """Compute the log-probability of each token after each context, `[m, n]`, before all waiting requests."""
        ids = token_ids.tolist()
        parameters = SamplingParams(
            max_tokens=1,
            logprob_token_ids=ids,
            top_k=self._top_k,
            seed=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        requests = (self._ask(context, parameters, adapter, salt, priority=_FIRST) for context in contexts)
        outputs: list[Any] = [output.outputs[0].logprobs for output in await asyncio.gather(*requests)]
        return np.array([[rows[0][token].logprob for token in ids] for rows in outputs], np.float32)

    async def _ask(
        self,
        token_ids: Int32Array,
        parameters: SamplingParams,
        adapter: LoRARequest | None,
        salt: str | None,
        *,
        priority: int,
    ) -> RequestOutput:
        prompt = TokensPrompt(prompt_token_ids=token_ids.tolist(), cache_salt=salt)  # type: ignore[typeddict-item]
        name, last = f"score/{next(self._scores)}", None
        async for output in self._llm.generate(prompt, parameters, name, lora_request=adapter, priority=priority):
            last = output
        if last is None:
            raise EngineLostError(f"{name}: vLLM ended it without an answer")
        return last
