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


def write_checkpoint(name: str, dtype: torch.dtype, directory: Path) -> Path:
    """Save a sharp model of a family, with heads that vLLM's kernels for CPUs take."""
    config = family_config(name, head_dim=32)
    if name.startswith("Qwen3.5"):
        config.text_config.linear_key_head_dim = config.text_config.linear_value_head_dim = 128
    sharp_model(config).to(dtype).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("lora", [LoraConfig(rank=4), None], ids=["adapter", "full"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Gemma 3, with images", torch.float32), ("Qwen3.5, 3.6", torch.bfloat16)],
)
def test_published_versions_are_sampled_from(
    tmp_path: Path, name: str, dtype: torch.dtype, lora: LoraConfig | None
) -> None:
    path = write_checkpoint(name, dtype, tmp_path / "model")
    run = long_run(path, policies={"policy": PolicyConfig(lora=lora)})
    policy = load_models(run.trainer_plan, torch.device("cpu"))["policy"]
    policy.train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    policy.round_masters()
    for place in ("run", "checked"):
        (tmp_path / place).mkdir()
    directory = Path(Publisher(tmp_path / "run").publish(NEXT, policy).path)

    def models(dtype: torch.dtype) -> dict[PolicyVersion, Any]:
        """The models of both versions, as transformers and PEFT load them."""
        after: Any = plain_model(directory if lora is None else path)
        if lora is not None:
            after = peft.PeftModel.from_pretrained(after, str(directory))
        return {START: plain_model(path).to(dtype).eval(), NEXT: after.to(dtype).eval()}

    exact, rounded = models(torch.float32), models(dtype)
    weights = Publisher(tmp_path / "checked").publish(NEXT, policy, canary_of(rounded[NEXT], rounded[START]))

    async def main() -> None:
        options = {"adapter_slots": 3 if lora else 0, "slots": 4, "max_context": 64}
        placement = LocalPlacement(tmp_path / "engine.log")
        engine = ProcessEngine(program(path, **options), {"policy": START}, placement=placement)
        async with asyncio.timeout(500):
            await engine.ready()
        for version in (START, NEXT):
            if version == NEXT:
                await engine.serve([weights])
            names = [f"{version}/{seed}" for seed in range(4)]
            contexts = [prompt(20 + seed, seed) for seed in range(4)]
            calls = [
                engine.open(each, "policy").generate(request(each, context, seed=seed, max_tokens=16))
                for seed, (each, context) in enumerate(zip(names, contexts, strict=True))
            ]
            errors, roundings, others = [], [], []
            for context, completion in zip(contexts, await asyncio.gather(*calls), strict=True):
                assert completion.spans == ((0, 16, version),)
                expected = token_logprobs(exact[version], context, completion)
                errors.append(np.abs(completion.logprobs - expected))
                roundings.append(np.abs(token_logprobs(rounded[version], context, completion) - expected))
                other = exact[NEXT if version == START else START]
                others.append(np.abs(token_logprobs(other, context, completion) - expected))
            seen = [(np.mean(each), np.max(each)) for each in (errors, roundings, others)]
            if dtype == torch.float32:
                assert np.max(errors) <= 1e-4, seen
            else:
                assert np.mean(errors) <= 4 * np.mean(roundings), seen
            assert np.max(others) >= max(3 * np.max(errors), 0.1), seen
        await engine.close()

    asyncio.run(main())
