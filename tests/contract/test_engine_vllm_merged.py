"""vLLM's worker merges published adapters: it then computes what it computes with the merged weights as a file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import revert_weight_conversion

from agentrl.core.errors import EngineError
from agentrl.core.files import sha256_of
from agentrl.core.records import WeightsRef
from tests.contract.engine_kinds import (
    ModelZoo,
    canary_of,
    prompt,
    request,
    version,
    write_adapter,
    write_full,
)
from tests.contract.vllm_server import MakeVllm

TARGETS = (("q_proj", "v_proj", "down_proj"), ("k_proj", "up_proj"), ("q_proj",), ("o_proj", "gate_proj", "v_proj"))
"""Parts of the matrices that vLLM fuses, and others."""
TOKENS = prompt(60, 7)


def merged(zoo: ModelZoo, weights: WeightsRef) -> Any:
    """The model with an adapter merged by its definition."""
    model = zoo.load()
    matrices = load_file(Path(weights.path) / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            down = matrices.get(f"base_model.model.{name}.lora_A.weight")
            if down is not None:
                module.weight += (matrices[f"base_model.model.{name}.lora_B.weight"] @ down) * 2.0  # alpha / rank
    return model


def as_file(zoo: ModelZoo, weights: WeightsRef, directory: Path) -> WeightsRef:
    """The merged weights, as full weights of a later step."""
    model = merged(zoo, weights)
    tensors = revert_weight_conversion(model, model.state_dict())
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {name: tensor.clone() for name, tensor in tensors.items() if name not in tied}
    return write_full(directory, version(weights.version.step + 100), tensors)


async def scores(engine: Any, weights: WeightsRef) -> np.ndarray:
    return np.asarray((await engine.score(weights.version, TOKENS)).logprobs)


def test_merged_versions_are_the_merged_weights(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    versions = [
        write_adapter(tmp_path / f"{step}", version(step), zoo.load(), seed=step, targets=targets)
        for step, targets in enumerate(TARGETS, start=1)
    ]

    async def main() -> None:
        engine: Any = make_vllm(merged=("solver",))
        found = []
        for weights in versions:  # one after another, so that nothing of an earlier one may stay
            await engine.serve([weights])
            found.append(await scores(engine, weights))
        for weights, merged_scores in zip(versions, found, strict=True):
            file = as_file(zoo, weights, tmp_path / f"file{weights.version.step}")
            await engine.serve([file])
            assert np.array_equal(await scores(engine, file), merged_scores)
        first = WeightsRef(version=version(201), path=versions[0].path, kind="adapter", sha256=versions[0].sha256)
        await engine.serve([first])  # over all weights of another version
        assert np.array_equal(await scores(engine, first), found[0])
        assert min(np.abs(one - found[0]).max() for one in found[1:]) > 1e-2
        await engine.close()

    make_vllm.run(main)


def test_a_merged_version_that_fails_its_canary_leaves_the_one_before(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    def published(step: int, canary_step: int) -> WeightsRef:
        plain = write_adapter(tmp_path / f"p{step}", version(step), zoo.load(), seed=canary_step)
        metadata = canary_of(merged(zoo, plain), zoo.load()).metadata()
        return write_adapter(tmp_path / f"{step}", version(step), zoo.load(), seed=step, metadata=metadata)

    async def main() -> None:
        engine: Any = make_vllm(merged=("solver",))
        with pytest.raises(EngineError, match=r"solver@0\.1 .*canary"):
            await engine.serve([published(1, canary_step=9)])
        start = await engine.score(version(0), TOKENS)
        good = published(2, canary_step=2)
        await engine.serve([good])
        before = await scores(engine, good)
        assert np.abs(before - start.logprobs).max() > 1e-2
        with pytest.raises(EngineError, match=r"solver@0\.3 .*canary"):
            await engine.serve([published(3, canary_step=9)])
        assert np.array_equal(await scores(engine, good), before)
        completion = await engine.open("s", "solver").generate(request("r", TOKENS, max_tokens=2))
        assert completion.spans[0].version == good.version
        await engine.close()

    make_vllm.run(main)


def test_damaged_factors_are_refused_by_name(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    good = write_adapter(tmp_path / "1", version(1), zoo.load(), seed=1)
    damaged = write_adapter(tmp_path / "2", version(2), zoo.load(), seed=2)
    file = Path(damaged.path) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    tensors = load_file(Path(good.path) / "adapter_model.safetensors")
    shutil.copytree(good.path, foreign := tmp_path / "3")
    save_file({name.replace("layers.1", "layers.7"): each for name, each in tensors.items()}, foreign / file.name)
    digest = sha256_of(foreign / file.name, foreign / "adapter_config.json")

    async def main() -> None:
        engine: Any = make_vllm(merged=("solver",))
        await engine.serve([good])
        before = await scores(engine, good)
        with pytest.raises(EngineError, match=rf"solver@0\.2 .*{file.name}"):
            await engine.serve([damaged])
        with pytest.raises(EngineError, match=r"solver@0\.3 .*no linear layer model\.layers\.7"):
            await engine.serve([WeightsRef(version=version(3), path=str(foreign), kind="adapter", sha256=digest)])
        assert np.array_equal(await scores(engine, good), before)
        await engine.close()

    make_vllm.run(main)
