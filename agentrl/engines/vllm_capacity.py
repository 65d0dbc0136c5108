"""How much context one vLLM holds, and how fast it computes it: asked and measured once, before it serves.

Nothing of the measurement stays in vLLM: neither its contexts nor its adapter.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from vllm import SamplingParams, TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind

from agentrl.core.clock import SystemClock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_TRIES = 3
_ENOUGH_S = 1.0
"""When so much time has passed, no further try begins."""
_ADAPTER = 1 << 30
"""The number of the adapter that is measured with; those of versions count from 1."""


def kv_tokens(config: VllmConfig) -> int | None:
    """Tokens of context whose keys and values fit; None where vLLM keeps none between two turns (without a prefix
    cache: multi-head latent attention on CPU, recurrent models)."""
    cache = config.cache_config
    if not cache.enable_prefix_caching or cache.kv_cache_size_tokens is None:
        return None
    return cache.kv_cache_size_tokens - cache.block_size  # one block is vLLM's own, and never holds anything


async def prefill_rate(llm: AsyncLLM) -> float:
    """Tokens of context computed per second, with nothing else to do: of half the longest context, if one pass takes
    that, and under an adapter, if there can be one, which takes several times as long on a CPU."""
    config = llm.vllm_config
    longest = config.scheduler_config.max_num_batched_tokens
    length = max(min(config.model_config.max_model_len // 2, longest), 1)
    adapter = None
    if config.lora_config is not None:
        await llm.collective_rpc("add_blank_adapter", args=(_ADAPTER, config.lora_config.max_lora_rank))
        adapter = LoRARequest(lora_name="blank", lora_int_id=_ADAPTER, lora_path="blank")
    clock, random = SystemClock(), np.random.default_rng(0)
    parameters = SamplingParams(
        max_tokens=1, logprobs=0, seed=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )

    async def seconds(name: str) -> float:
        context = random.integers(0, config.model_config.get_vocab_size(), length).tolist()
        asked = clock.monotonic()
        prompt = TokensPrompt(prompt_token_ids=context)
        async for _ in llm.generate(prompt, parameters, name, lora_request=adapter):
            pass
        return clock.monotonic() - asked

    await seconds("rate/first")  # it compiles what turns need, log-probabilities too, and takes as long as it takes
    best, began = math.inf, clock.monotonic()
    for attempt in range(_TRIES):
        best = min(best, await seconds(f"rate/{attempt}"))
        if clock.monotonic() - began > _ENOUGH_S:
            break
    if adapter is not None:
        await llm.remove_lora(_ADAPTER)
    await llm.reset_prefix_cache()
    return length / best
