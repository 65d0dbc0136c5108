"""Real vLLM on checkpoints for images and text: it samples from what the trainer publishes, as transformers does."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.core.machine import missing_torchvision
from agentrl.core.records import PolicyVersion
from agentrl.engines.process import LocalPlacement
from agentrl.engines.remote.client import ProcessEngine
from agentrl.learn.models import load_models
from agentrl.learn.publish import Publisher
from tests.contract.engine_kinds import canary_of, prompt, request, token_logprobs
from tests.contract.test_engine_vllm_process import program
from tests.contract.vllm_suite import MISSING
from tests.model_families import family_config, long_run, plain_model, sharp_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=MISSING),
    pytest.mark.skipif(missing_torchvision() != "", reason=f"vLLM needs torchvision, but {missing_torchvision()}"),
]
START, NEXT = PolicyVersion("policy", 0, 0), PolicyVersion("policy", 0, 1)


@pytest.mark.parametrize("lora", [LoraConfig(rank=4), None], ids=["adapter", "full"])
def test_published_versions_of_gemma_3_are_sampled_from(tmp_path: Path, lora: LoraConfig | None) -> None:
    path = tmp_path / "model"
    sharp_model(family_config("Gemma 3, with images", hidden_size=64, head_dim=32)).save_pretrained(path)
    run = long_run(path, policies={"policy": PolicyConfig(lora=lora)})
    policy = load_models(run.trainer_plan, torch.device("cpu"))["policy"]
    policy.train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    before = plain_model(path).eval()
    (tmp_path / "run").mkdir()
    directory = Publisher(tmp_path / "run").publish(NEXT, policy).path
    after: Any = peft.PeftModel.from_pretrained(plain_model(path), directory) if lora else plain_model(Path(directory))
    (tmp_path / "checked").mkdir()
    weights = Publisher(tmp_path / "checked").publish(NEXT, policy, canary_of(after.eval(), before))

    async def main() -> None:
        options = {"adapter_slots": 3 if lora else 0, "slots": 4, "max_context": 64}
        placement = LocalPlacement(tmp_path / "engine.log")
        engine = ProcessEngine(program(path, **options), {"policy": START}, placement=placement)
        async with asyncio.timeout(500):
            await engine.ready()
        for version, model in ((START, before), (NEXT, after)):
            if version == NEXT:
                await engine.serve([weights])
            contexts = [prompt(20 + seed, seed) for seed in range(4)]
            calls = [
                engine.open(name, "policy").generate(request(name, context, seed=seed, max_tokens=16))
                for seed, context in enumerate(contexts)
                for name in (f"{version}/{seed}",)
            ]
            for context, completion in zip(contexts, await asyncio.gather(*calls), strict=True):
                assert completion.spans == ((0, 16, version),)
                expected = token_logprobs(model, context, completion)
                np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)
                other = after if model is before else before
                assert np.abs(token_logprobs(other, context, completion) - completion.logprobs).max() > 0.1
        await engine.close()

    asyncio.run(main())
