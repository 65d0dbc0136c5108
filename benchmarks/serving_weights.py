"""The part of `benchmarks.serving` about weights, on real vLLM and the calculator's model: what arrives, and faults."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentrl.config.fields import shipped_example
from agentrl.core.errors import EngineError
from agentrl.core.files import sha256_of
from agentrl.core.records import Completion, PolicyVersion, WeightsRef
from agentrl.engines.vllm.engine import VllmEngine
from agentrl.engines.vllm.startup import start_vllm
from benchmarks.vllm_parts import Requests, add_probe, settings_for

POLICY = "solver"
NEW = 24
EQUAL = 1e-4
"""Nats."""
MODEL = shipped_example("01_tool_use").parents[1] / "environments/calculator/model"


def figures(quick: bool) -> dict[str, float | None]:
    """The part's figures; vLLM is started twice."""
    with tempfile.TemporaryDirectory() as scratch:
        published = Published(Path(scratch))
        right = published.write(1, published.models[1].state_dict())
        caught, updated = asyncio.run(updated_engine(published, right))
        fresh = asyncio.run(fresh_engine(published.directory))
    difference = float(np.abs(updated.logprobs - fresh.logprobs).max())
    is_equal = updated.token_ids.tolist() == fresh.token_ids.tolist() and difference < EQUAL
    print(
        f"{NEW} tokens after an update and of a fresh vLLM: equal {is_equal}, log-probabilities within {difference:.1g}"
    )
    print(f"caught: {', '.join(caught)}")
    return {"faults_caught": float(len(caught)), "full_update_equal": float(is_equal)}


class Published:
    """Versions of the model's weights as a trainer publishes them, with the canary of the right ones."""

    def __init__(self, root: Path) -> None:
        self.models = [self._moved(seed) for seed in range(4)]
        self.directory = root / "fresh"
        self.models[1].save_pretrained(self.directory)
        self._root = root
        self._written = 0

    @staticmethod
    def _moved(seed: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        generator = torch.Generator().manual_seed(seed)
        if seed:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * parameter.std(correction=0) * torch.randn(parameter.shape, generator=generator)
        return model

    def write(self, step: int, tensors: Mapping[str, torch.Tensor]) -> WeightsRef:
        """A version whose file has these tensors, and the canary of the model of that step."""
        self._written += 1
        directory = self._root / f"{self._written}"
        directory.mkdir()
        file = directory / "model.safetensors"
        tied = {name: each.contiguous() for name, each in tensors.items() if name != "lm_head.weight"}
        save_file(tied, file, metadata={"format": "pt"})
        add_probe(file, self.models[step], self.models[0])
        version = PolicyVersion(POLICY, 0, step)
        return WeightsRef(version=version, path=str(directory), kind="full", sha256=sha256_of(file))

    def faults(self) -> dict[str, Callable[[], Mapping[str, torch.Tensor]]]:
        """The faulty versions that may arrive in place of version 2."""
        before, right, other = (self.models[step].state_dict() for step in (1, 2, 3))
        return {
            "the version before": lambda: before,
            "half an update": lambda: {
                name: (before if number % 2 else right)[name] for number, name in enumerate(right)
            },
            "another base": lambda: other,
            "eight bits": lambda: {name: each.to(torch.float8_e4m3fn).float() for name, each in right.items()},
            "another dtype": lambda: {name: each.bfloat16() for name, each in right.items()},
        }


async def updated_engine(published: Published, right: WeightsRef) -> tuple[list[str], Completion]:
    """Update vLLM once, then try every fault: those that were caught, and the greedy tokens it then samples."""
    settings = settings_for(slots=8, max_context=512, refresh="token", adapter_slots=0, keep_kv=False)
    llm: Any = start_vllm(str(MODEL), settings)
    try:
        engine = VllmEngine(llm, str(MODEL), versions={POLICY: PolicyVersion(POLICY, 0, 0)}, settings=settings)
        await engine.serve([right])
        caught = []
        for name, tensors in published.faults().items():
            try:
                await engine.serve([published.write(2, tensors())])
            except EngineError as error:
                print(f"{name}: {error}")
                caught.append(name)
        return caught, await greedy(engine)
    finally:
        llm.shutdown()


async def fresh_engine(directory: Path) -> Completion:
    """The greedy tokens of a vLLM that was started on the new weights."""
    settings = settings_for(slots=8, max_context=512, refresh="token", adapter_slots=0, keep_kv=False)
    llm: Any = start_vllm(str(directory), settings)
    try:
        engine = VllmEngine(llm, str(directory), versions={POLICY: PolicyVersion(POLICY, 0, 0)}, settings=settings)
        return await greedy(engine)
    finally:
        llm.shutdown()


async def greedy(engine: VllmEngine) -> Completion:
    """A turn of `NEW` tokens at so low a temperature that each is the likeliest."""
    requests = Requests(400)
    call = requests.call(requests.prompt(64), NEW)
    return await engine.open("greedy", POLICY).generate(
        type(call)(
            request_id=call.request_id,
            token_ids=call.token_ids,
            sampling=type(call.sampling)(max_tokens=NEW, temperature=0.01),
            seed=call.seed,
        )
    )
