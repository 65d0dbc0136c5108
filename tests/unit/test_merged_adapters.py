"""`lora.merge`: versions hold an adapter, and engines merge it into the base that they keep."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.app.policies import adapter_slots_needed
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.weights.merging import CheckpointMerger
from agentrl.engines.weights.reading import read_adapter
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.trainer import PolicyTrainer
from tests.contract.engine_kinds import request
from tests.learn_cases import Episodes, make_rows, run_config, write_model

MERGED = LoraConfig(rank=4, alpha=8.0, merge=True)
CPU = torch.device("cpu")
KINDS = [("qwen3", False), ("moe", False), ("moe", True), ("deepseek", True), ("gpt_oss", True)]


def config_of(path: Path, **lora: Any) -> RunConfig:
    other = PolicyConfig(lora=LoraConfig(rank=2), learning_rate=1e-2)
    merged = PolicyConfig(lora=MERGED.model_copy(update=lora), learning_rate=1e-2)
    return run_config(path, policies={"policy": merged, "other": other})


def started(config: RunConfig, directory: Path) -> PolicyTrainer:
    """A trainer of two policies, which share a base."""
    trainer = PolicyTrainer(config.trainer_plan, directory, read=Episodes(make_rows(0, 8)).read)
    trainer.start()
    return trainer


def step(trainer: PolicyTrainer) -> WeightsRef:
    """The version after one more step of the merged policy."""
    number = trainer._learners["policy"].step + 1
    trainer.forward_backward(Episodes(make_rows(0, 8)).batch(step_id=number))
    trainer.optim_step("policy", number)
    return trainer.publish("policy", PolicyVersion("policy", 0, number))


def merged_by_peft(model: PolicyModel) -> dict[str, Tensor]:
    """All weights, merged by PEFT's own code from the matrices of the trainer."""
    tensors = model.model.state_dict().items()
    state = {name.replace(".base_layer", ""): tensor.detach() for name, tensor in tensors}
    for name, module in model.model.named_modules():
        adapter: Any = model.adapter
        if adapter not in getattr(module, "lora_A", {}):
            continue
        parameter = getattr(module, "parameter_name", "weight")
        key = f"{name.replace('.base_layer', '')}.{parameter}"
        state[key] = state[key] + module.get_delta_weight(adapter).detach()
    return {name: tensor for name, tensor in state.items() if ".lora_" not in name}


def loaded(path: Path, **options: Any) -> EmbeddedEngine:
    versions = {"policy": PolicyVersion("policy", 0, 0), "other": PolicyVersion("other", 0, 0)}
    return EmbeddedEngine.load(
        str(path), versions=versions, merged=["policy"], slots=2, **{"max_context": 64, **options}
    )


def served(engine: EmbeddedEngine) -> dict[str, Tensor]:
    return engine.versions.of_policy("policy").model_copy.model.state_dict()


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one.keys() | other.keys())


@pytest.mark.parametrize(("kind", "experts"), KINDS)
def test_the_engine_serves_the_weights_that_the_trainer_would_merge(tmp_path: Path, kind: str, experts: bool) -> None:
    path = write_model(tmp_path / "model", kind=kind)
    config = config_of(path, experts=experts)
    trainer = started(config, tmp_path / "run")
    engine = loaded(path, max_context=8 if kind == "gpt_oss" else 64)  # its window
    base = {name: tensor.clone() for name, tensor in engine.versions.base.state.items()}
    model = trainer._learners["policy"].model
    merger = CheckpointMerger(path, torch.float32)
    for _ in range(3):
        weights = step(trainer)
        assert weights.kind == "adapter"
        asyncio.run(engine.serve([weights]))
        expected = merged_by_peft(model)
        assert largest_difference(served(engine), expected) == 0.0
        adapter = read_adapter(weights, max_numbers=1 << 20)
        files = load_file(path / "model.safetensors") | dict(merger.merged(adapter, CPU))
        in_files = revert_weight_conversion(model.model, expected)
        assert largest_difference(files, {name: in_files[name] for name in files}) == 0.0
    assert largest_difference(served(engine), base) > 1e-3, "the steps changed next to nothing"
    assert largest_difference(dict(engine.versions.base.state), base) == 0.0
    asyncio.run(engine.close())


def test_only_changed_weights_are_stored_twice(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    trainer, engine = started(config_of(path, target_modules=("q_proj",)), tmp_path / "run"), loaded(path)
    asyncio.run(engine.serve([step(trainer)]))
    base, merged = engine.versions.base.model, engine.versions.of_policy("policy").model_copy.model
    own = [name for name, each in merged.named_parameters() if each.data_ptr() != base.get_parameter(name).data_ptr()]
    assert own == [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(2)]
    asyncio.run(engine.close())


def test_a_weight_that_an_adapter_no_longer_changes_is_the_base_again(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    engine, merger = loaded(path), CheckpointMerger(path, torch.float32)
    base = {name: tensor.clone() for name, tensor in engine.versions.base.state.items()}
    for number, modules in enumerate((("q_proj", "up_proj"), ("k_proj",)), start=1):
        trainer = started(config_of(path, target_modules=modules), tmp_path / f"run{number}")
        weights = step(trainer)
        weights = WeightsRef(
            version=PolicyVersion("policy", 0, number), path=weights.path, kind="adapter", sha256=weights.sha256
        )
        asyncio.run(engine.serve([weights]))
        files = dict(merger.merged(read_adapter(weights, max_numbers=1 << 20), CPU))
        for tensors in (served(engine), files):
            changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, base[name])}
            assert {name.split(".")[-2] for name in changed} == set(modules)
    assert len(files) < len(base), "embeddings are not loaded again"
    asyncio.run(engine.close())


def test_bfloat16_weights_are_rounded_once(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = config_of(path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    trainer, engine = started(config, tmp_path / "run"), loaded(path, dtype="bfloat16")
    weights = step(trainer)
    asyncio.run(engine.serve([weights]))
    matrices = load_file(Path(weights.path) / "adapter_model.safetensors")
    base = load_file(path / "model.safetensors")
    for name, found in served(engine).items():
        if name == "lm_head.weight":
            continue  # tied
        prefix, expected = f"base_model.model.{name.removesuffix('.weight')}", base[name].bfloat16()
        if f"{prefix}.lora_A.weight" in matrices:
            product = matrices[f"{prefix}.lora_B.weight"] @ matrices[f"{prefix}.lora_A.weight"]
            expected = (expected.float() + 2.0 * product).bfloat16()
        assert torch.equal(found, expected), name
    asyncio.run(engine.close())


def test_a_resumed_run_serves_the_same_weights(tmp_path: Path) -> None:
    config = config_of(path := write_model(tmp_path / "model"))
    trainer, before = started(config, tmp_path / "run"), loaded(path)
    for _ in range(2):
        asyncio.run(before.serve([step(trainer)]))
    assert not trainer.only_in_checkpoints("policy")
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")
    resumed = PolicyTrainer(config.trainer_plan, tmp_path / "resumed", read=Episodes(make_rows(0, 8)).read)
    resumed.start(tmp_path / "checkpoint")
    for trainers in (trainer, resumed):
        after = loaded(path)
        asyncio.run(after.serve([trainers.publish("policy", PolicyVersion("policy", 0, 2))]))
        assert largest_difference(served(after), served(before)) == 0.0
        asyncio.run(after.close())
    asyncio.run(before.close())


@pytest.mark.parametrize("where", [200, -1])
def test_a_damaged_factor_is_refused_and_the_previous_version_stays(tmp_path: Path, where: int) -> None:
    path = write_model(tmp_path / "model")
    trainer, engine = started(config_of(path), tmp_path / "run"), loaded(path)
    asyncio.run(engine.serve([step(trainer)]))
    before = {name: tensor.clone() for name, tensor in served(engine).items()}
    weights = step(trainer)
    file = Path(weights.path) / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[where] ^= 1
    file.write_bytes(content)
    with pytest.raises(EngineError, match=rf"policy@0\.2 .*{file.name}"):
        asyncio.run(engine.serve([weights]))
    assert largest_difference(served(engine), before) == 0.0
    asyncio.run(engine.close())


def test_a_version_that_fails_its_canary_leaves_the_previous_weights(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    trainer, engine = started(config_of(path), tmp_path / "run"), loaded(path)
    canaries, model = trainer._canaries, trainer._learners["policy"].model
    asyncio.run(engine.serve([step(trainer)]))
    before = {name: tensor.clone() for name, tensor in served(engine).items()}
    number = 3
    canary = canaries[model.base].of(model)
    trainer._learners["policy"].step = number
    with torch.no_grad():
        next(iter(model.parameters.values())).add_(1.0)
        model.round_masters()
    weights = trainer._publisher.publish(PolicyVersion("policy", 0, number), model, canary)
    with pytest.raises(EngineError, match="canary"):
        asyncio.run(engine.serve([weights]))
    assert largest_difference(served(engine), before) == 0.0
    asyncio.run(engine.close())


def test_two_policies_share_a_base_merged_and_unmerged(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    trainer, engine = started(config_of(path), tmp_path / "run"), loaded(path)
    other = trainer._learners["other"].model
    with torch.no_grad():
        for parameter in other.parameters.values():
            parameter.normal_(std=0.1)
    other.round_masters()
    trainer._learners["other"].step = 1
    versions = [step(trainer), trainer.publish("other", PolicyVersion("other", 0, 1))]
    context = np.arange(3, 12, dtype=np.int32)

    async def main() -> None:
        await engine.serve(versions)
        for policy in ("policy", "other"):
            session = engine.open(policy, policy)
            completion = await session.generate(request("r", context, max_tokens=4))
            session.close()
            weights = next(each for each in versions if each.version.policy == policy)
            model = AutoPeftModelForCausalLM.from_pretrained(weights.path, dtype=torch.float32)
            ids = torch.from_numpy(np.concatenate([context, completion.token_ids]).astype(np.int64))[None]
            with torch.no_grad():
                scores = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            expected = scores[len(context) - 1 : -1].gather(1, ids[0, len(context) :, None])[:, 0]
            np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-4)
        await engine.close()

    asyncio.run(main())


def test_users_merge_a_version_with_peft(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    trainer, engine = started(config_of(path), tmp_path / "run"), loaded(path)
    weights = step(trainer)
    asyncio.run(engine.serve([weights]))
    merged = AutoPeftModelForCausalLM.from_pretrained(weights.path, dtype=torch.float32).merge_and_unload()
    assert largest_difference(served(engine), merged.state_dict()) == 0.0
    asyncio.run(engine.close())


def test_engines_serve_one_version_at_a_time(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = run_config(path, policies={"policy": PolicyConfig(lora=MERGED)})
    assert adapter_slots_needed(config.policies) == 0
    assert config.refresh_of("policy") == "token"
    section = {**config.engine.model_dump(), "refresh": "lazy"}
    with pytest.raises(ValueError, match=r"refresh = 'lazy' .* Set policies\.policy\.lora\.merge = false"):
        RunConfig.model_validate({**config.model_dump(), "engine": section})


def test_a_run_says_that_bfloat16_loses_small_updates(tmp_path: Path) -> None:
    config = config_of(write_model(tmp_path / "model"))
    rounded = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "bfloat16"})})
    descriptions = [load_models(each.trainer_plan, CPU)["policy"].described for each in (config, rounded)]
    assert "small updates" not in descriptions[0]
    assert "merged into bfloat16, which loses small updates" in descriptions[1]
