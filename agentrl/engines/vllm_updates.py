"""How a published version comes to serve in vLLM: read and check, load beside the others or in their place.

Owns: the live versions, adapter places, private copies of adapters, pauses, and the order of steps of an update. Does
not know tokens. Invariant: until an update has succeeded the old version serves, and no failure leaves vLLM paused.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.errors import EngineError, EngineLostError
from agentrl.core.files import WEIGHT_FILES
from agentrl.engines.adapter_files import check_adapter, read_adapter
from agentrl.engines.leases import Leases, LiveVersion, live_version, newest_of
from agentrl.engines.private_files import VARIABLE
from agentrl.engines.weight_files import match_full_weights, read_weights, refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Mapping

    from transformers import PreTrainedModel
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef
    from agentrl.engines.vllm_start import VllmSettings

_FIRST_LABEL = "default"
"""What vLLM calls the weights it was started with."""


@dataclass(slots=True, eq=False, kw_only=True)
class VllmVersion(LiveVersion):
    """A version vLLM can sample from."""

    adapter: LoRARequest | None = None
    salt: str | None = None
    """Sets its prefixes apart in vLLM's cache; an adapter's path does that by itself."""
    file: str = ""
    """Full weights; empty: what vLLM was started on."""


class VllmUpdates:
    """The versions one vLLM serves, and how they change.

    Args:
        llm: the vLLM.
        model: the model's shapes.
        versions: for each policy, the version that the directory's weights are.
        settings: the engine's.
        switch: told when calls in flight that the first version samples are to go on under the second; what it has
            to ask of vLLM for that is asked when it returns.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        model: PreTrainedModel,
        versions: Mapping[str, PolicyVersion],
        settings: VllmSettings,
        *,
        switch: Callable[[VllmVersion, VllmVersion], Awaitable[None]],
    ) -> None:
        self._llm = llm
        self._model = model
        self._refresh = settings.refresh
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
            refresh=settings.refresh, max_staleness=settings.max_staleness, current=self.of_policy, ended=self.settle
        )
        self._switch = switch
        self._numbers = itertools.count(1)
        self._held: set[str] = set()
        """Policies whose new calls wait for an update."""
        self._paused = False
        self._ready_for_files = False
        self._one_at_a_time = asyncio.Lock()
        self._controls = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._lost = False
        """vLLM has weights of no version."""
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
        return live_version(self._live, version)

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
            task = asyncio.get_running_loop().create_task(self._unload(adapter))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _unload(self, adapter: LoRARequest) -> None:
        try:
            await self._llm.remove_lora(adapter.lora_int_id)
        except EngineDeadError:
            return  # whoever samples hears of it
        shutil.rmtree(adapter.lora_path, ignore_errors=True)

    def spans(
        self, serving: VllmVersion, output: RequestOutput, *, start: int, stop: int
    ) -> list[tuple[int, PolicyVersion]]:
        """Who sampled tokens `[start, stop)` of a call, as (end, version): vLLM's word where weights are replaced."""
        told = output.outputs[0].weight_versions
        if self._places or not told:
            return [(stop, serving.version)]
        return [(start + span.end, self._labels[span.version]) for span in told]

    async def may_sample(self, policy: str, is_ending: Callable[[], bool]) -> None:
        """Wait while the engine is paused or the policy waits for an update; not longer than the call lives."""
        while (self._paused or policy in self._held) and not (self._closed or is_ending()):
            await self._change()
        if self._lost:
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
            await asyncio.to_thread(self._copy_checked, weights, copy)
            while len(adapters := [each for each in self._live.values() if each.adapter]) >= self._places:
                old = self.of_policy(weights.version.policy)
                if self._refresh == "token" and not old.held and old.adapter:
                    break  # nothing holds the old version: it leaves when its calls have moved
                if not self.leases.revoke(adapters):
                    self._check_may_free(weights, adapters)
                    await self._change()
            adapter = LoRARequest(lora_name=f"{weights.version}/{number}", lora_int_id=number, lora_path=str(copy))
            await _finished(self._load_adapter(weights, adapter, keep=keep))
        except BaseException:
            if weights.version not in self._live:
                shutil.rmtree(copy, ignore_errors=True)
            raise

    def _copy_checked(self, weights: WeightsRef, copy: Path) -> None:
        """The copy is checked: it is what vLLM reads, and stays although the run's own changes or is pruned."""
        copy.mkdir()
        for name in WEIGHT_FILES["adapter"]:
            try:
                shutil.copyfile(Path(weights.path) / name, copy / name)
            except OSError as error:
                raise refusal(weights, f"{weights.path}/{name} cannot be read ({error.strerror})") from error
        check_adapter(weights, read_adapter(replace(weights, path=str(copy))), self._model, max_rank=self._max_rank)

    async def _load_adapter(self, weights: WeightsRef, adapter: LoRARequest, *, keep: bool) -> None:
        try:
            await self._llm.add_lora(adapter)
        except EngineDeadError:
            raise
        except Exception as error:
            raise refusal(weights, f"vLLM cannot load it ({type(error).__name__}: {error})") from error
        new = VllmVersion(version=weights.version, digest=weights.sha256, kept=int(keep), adapter=adapter)
        old = self._promote(new)
        if self._refresh == "token":
            await self._switch(old, new)
        self.settle(old)

    def _check_may_free(self, weights: WeightsRef, adapters: list[VllmVersion]) -> None:
        if all(each.kept or self._current[each.version.policy] is each for each in adapters):
            taken = ", ".join(sorted(str(each.version) for each in adapters))
            raise refusal(
                weights, f"all {self._places} adapter places are taken by {taken}; release one, or raise adapter_slots"
            )

    def _promote(self, new: VllmVersion) -> VllmVersion:
        old = self.of_policy(new.version.policy)
        self._live[new.version] = self._current[new.version.policy] = new
        self._changed.set()
        return old

    async def _apply_full(self, weights: WeightsRef, *, keep: bool) -> None:
        if self._places:
            raise refusal(weights, "vLLM was started for adapters; it serves full weights where no policy has a lora")
        if keep:
            raise refusal(weights, "vLLM serves one full version at a time, so none can be kept; use lora")
        policy = weights.version.policy
        await asyncio.to_thread(self._check_full, weights)
        self._held.add(policy)  # a turn that began now would find the prefixes of the version that leaves
        try:
            while self._refresh == "turn" and self.of_policy(policy).calls:
                if self._paused:
                    raise refusal(
                        weights, "the engine is paused in the middle of turns; resume it, or use refresh token"
                    )
                await self._change()
            await _finished(self._load_full(weights))
        finally:
            self._held.discard(policy)
            self._changed.set()

    def _check_full(self, weights: WeightsRef) -> None:
        match_full_weights(weights, read_weights(weights), self._model.state_dict(), self._model)

    async def _load_full(self, weights: WeightsRef) -> None:
        if (pinned := self.of_policy(weights.version.policy)).pins:
            raise refusal(
                weights, f"{pinned.pins} conversations are pinned to {pinned.version}; close them, or use lora"
            )
        label, file = str(weights.version), str(Path(weights.path) / "model.safetensors")
        new = VllmVersion(version=weights.version, digest=weights.sha256, salt=label, file=file)
        async with self._controls:
            if not self._ready_for_files:
                await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
                self._ready_for_files = True
            await self._llm.pause_generation(mode="keep", clear_cache=not self._keep_kv)
            try:
                await self._replace(weights, new)
                self._labels[label] = new.version
                old = self._promote(new)
                self._live = {new.version: new}
                await self._switch(old, new)
            finally:
                if not (self._paused or self._lost):
                    await self._llm.resume_generation()

    async def _replace(self, weights: WeightsRef, new: VllmVersion) -> None:
        try:
            await self._load_file(new)
        except EngineDeadError:
            raise
        except Exception as error:
            old = self.of_policy(weights.version.policy)
            try:
                await self._load_file(old)
            except Exception as second:  # noqa: BLE001 (whatever it is: no version serves)
                self._lost = True
                raise EngineLostError(
                    f"weights {weights.version}: vLLM can neither load them ({error}) nor go back to {old.version} "
                    f"({second})"
                ) from error
            raise refusal(weights, f"vLLM cannot load it ({type(error).__name__}: {error})") from error

    async def _load_file(self, serving: VllmVersion) -> None:
        await self._llm.start_weight_update()
        update = {"path": serving.file, "sha256": serving.digest}
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=update))
        await self._llm.finish_weight_update(weight_version=str(serving.version))

    # --- control ------------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Calls in flight freeze, new ones wait."""
        self._paused = True
        self._changed.set()
        async with self._controls:
            if self._paused:
                await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on. Idempotent."""
        self._paused = False
        async with self._controls:
            if not self._paused:
                await self._llm.resume_generation()
        self._changed.set()

    async def score(self, serving: VllmVersion, token_ids: Int32Array) -> Float32Array:
        """Log-probability of each token given those before it, `[n]`; entry 0 is 0."""
        parameters = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = TokensPrompt(prompt_token_ids=token_ids.tolist(), cache_salt=serving.salt)  # type: ignore[typeddict-item]
        serving.calls += 1
        scores = np.zeros(len(token_ids), np.float32)
        try:
            name = f"score/{next(self._numbers)}"
            async for output in self._llm.generate(prompt, parameters, name, lora_request=serving.adapter):
                rows: Any = output.prompt_logprobs
                for at, token in enumerate(token_ids[1:].tolist(), start=1):
                    scores[at] = rows[at][token].logprob
        finally:
            serving.calls -= 1
            self.settle(serving)
        return scores

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
