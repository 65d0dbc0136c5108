"""Versions of checkpoints with parts that a text model lacks, such as a vision tower, are whole."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from agentrl.config.policies import PolicyConfig
from agentrl.core.errors import EngineError, ModelError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.models import model_dtype, read_meta_model, read_model
from agentrl.engines.weights.reading import map_weights_to_state
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.publish import Publisher
from tests.learn_cases import LORA, run_config, write_model

TEXT = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
TOKENS = {"image_token_id": 260, "video_token_id": 261, "vision_start_token_id": 262, "vision_end_token_id": 263}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}


def qwen3_5() -> Any:
    config = transformers.Qwen3_5Config(text_config=TEXT | LINEAR, vision_config=TOWER, **TOKENS)
    return transformers.Qwen3_5ForConditionalGeneration(config)


def qwen3_5_moe() -> Any:
    config = transformers.Qwen3_5MoeConfig(text_config=TEXT | LINEAR | EXPERTS, vision_config=TOWER, **TOKENS)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def gemma3() -> Any:
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=SIGLIP, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config)


def qwen3_vl() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    tower = TOWER | {"deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(text_config=TEXT | {"rope_parameters": rope}, vision_config=tower, **TOKENS)
    return transformers.Qwen3VLForConditionalGeneration(config)


def mistral3() -> Any:
    text = transformers.MistralConfig(**TEXT)
    config = transformers.Mistral3Config(
        text_config=text, vision_config=SIGLIP | {"model_type": "pixtral"}, image_token_index=260, spatial_merge_size=2
    )
    return transformers.Mistral3ForConditionalGeneration(config)


def glm4v() -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    tower = {key: value for key, value in TOWER.items() if key != "num_position_embeddings"}
    config = transformers.Glm4vConfig(
        text_config=TEXT | {"rope_parameters": rope, "pad_token_id": 0, "eos_token_id": 2},
        vision_config=tower | {"image_size": 28, "patch_size": 14},
        image_token_id=260,
        video_token_id=261,
    )
    return transformers.Glm4vForConditionalGeneration(config)


def gemma4() -> Any:
    config = transformers.Gemma4Config(
        text_config=TEXT | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 16},
        vision_config={key: SIGLIP[key] for key in SIGLIP if key != "image_size"} | {"head_dim": 8},
        audio_config=None,
    )
    return transformers.Gemma4ForConditionalGeneration(config)


def llama4() -> Any:
    experts = {
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 128,
        "interleave_moe_layer_step": 2,
    }
    text = {"pad_token_id": 0, "attention_chunk_size": 8, "attn_temperature_tuning": False}
    tower = SIGLIP | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
    config = transformers.Llama4Config(text_config=TEXT | experts | text, vision_config=tower, image_token_index=260)
    return transformers.Llama4ForConditionalGeneration(config)


def add_tensor(file: Path) -> None:
    """Add a tensor of a part for which transformers has no class, as Qwen3.5's checkpoints have."""
    tensors = load_file(file)
    tensors["mtp.norm.weight"] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    index = file.with_name("model.safetensors.index.json")
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"]["mtp.norm.weight"] = file.name
        index.write_text(json.dumps(content))


def publish(base: Path, directory: Path, policy: PolicyConfig | None = None) -> tuple[Path, PolicyModel]:
    policies = None if policy is None else {"policy": policy}
    model = load_models(run_config(base, policies=policies).trainer_plan, torch.device("cpu"))["policy"]
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.01)
    directory.mkdir()
    return Path(Publisher(directory).publish(PolicyVersion("policy", 0, 1), model).path), model


WHOLE = [qwen3_5, qwen3_5_moe, qwen3_vl, gemma3, gemma4, mistral3, glm4v]


@pytest.mark.parametrize("make", WHOLE)
@pytest.mark.parametrize("shards", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_version_has_every_tensor_of_the_checkpoint(tmp_path: Path, make: Callable[[], Any], shards: bool) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "base", **({"max_shard_size": "200KB"} if shards else {}))
    has_further = make in (qwen3_5, qwen3_5_moe)
    if has_further:
        add_tensor(min((tmp_path / "base").glob("*.safetensors")))
    assert (len(list((tmp_path / "base").glob("*.safetensors"))) > 1) is shards
    path, model = publish(tmp_path / "base", tmp_path / "run")
    base = {
        name: tensor for file in (tmp_path / "base").glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    published = load_file(path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in published.items()} == {
        name: tensor.shape for name, tensor in base.items()
    }
    assert {name: tensor.shape for name, tensor in model.published_layout().items()} == {
        name: tensor.shape for name, tensor in published.items()
    }
    assert not has_further or torch.equal(published["mtp.norm.weight"], base["mtp.norm.weight"])
    whole, report = AutoModelForImageTextToText.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert set(report["unexpected_keys"]) <= {"mtp.norm.weight"}
    assert type(whole).__name__ == json.loads((path / "config.json").read_text())["architectures"][0]


@pytest.mark.parametrize("make", WHOLE)
def test_the_text_part_is_sampled_and_trained_under_the_names_of_the_whole(
    tmp_path: Path, make: Callable[[], Any]
) -> None:
    """The embedded engine's slots and the tree agree with the released class, or loading them raises."""
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    EmbeddedEngine.load(str(tmp_path), versions={"policy": PolicyVersion("policy", 0, 0)}, slots=2, max_context=32)
    policies = {"policy": PolicyConfig(lora=LORA.model_copy(update={"target_modules": ()}))}
    model = load_models(run_config(tmp_path, policies=policies).trainer_plan, torch.device("cpu"))["policy"]
    modules = dict(AutoModelForImageTextToText.from_pretrained(tmp_path).named_modules())
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in model.published_layout()}
    assert layers
    assert layers <= modules.keys()
    assert not any("vis" in name for name in layers)
    assert not model.unshared


def test_a_merged_adapter_is_published_with_the_tower(tmp_path: Path) -> None:
    gemma3().save_pretrained(tmp_path / "base")
    policy = PolicyConfig(lora=LORA.model_copy(update={"merge": True}))
    path, _ = publish(tmp_path / "base", tmp_path / "run", policy)
    assert load_file(path / "model.safetensors").keys() == load_file(tmp_path / "base/model.safetensors").keys()


def test_tied_weights_and_names_of_another_layout_are_not_carried(tmp_path: Path) -> None:
    """A head beside tied embeddings would be the old one."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**TEXT, tie_word_embeddings=True)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    file = tmp_path / "base/model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    path, _ = publish(tmp_path / "base", tmp_path / "run")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(renamed, file, {"format": "pt"})
    path, _ = publish(tmp_path / "base", tmp_path / "other")
    assert not renamed.keys() & load_file(path / "model.safetensors").keys()


@pytest.mark.parametrize("extra", ["v_head.summary.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_an_engine_takes_versions_with_what_its_base_has_besides_the_model(tmp_path: Path, extra: str) -> None:
    """Such as the value head that other trainers save beside the policy."""
    write_model(tmp_path / "base", kind="llama")
    file = tmp_path / "base/model.safetensors"
    save_file(load_file(file) | {extra: torch.ones(4)}, file, {"format": "pt"})
    (tmp_path / "run").mkdir()
    with warnings.catch_warnings(action="ignore"):  # of tensors that do not belong to the model
        model = load_models(run_config(tmp_path / "base").trainer_plan, torch.device("cpu"))["policy"]
        weights = Publisher(tmp_path / "run").publish(PolicyVersion("policy", 0, 1), model)
        served = read_model(tmp_path / "base", dtype=torch.float32, max_context=16)
    tensors = load_file(f"{weights.path}/model.safetensors")
    assert torch.equal(tensors[extra], torch.ones(4))
    mapped = map_weights_to_state(weights, tensors, served.state_dict(), served)
    assert {name: tensor.shape for name, tensor in served.state_dict().items()}.items() <= {
        name: tensor.shape for name, tensor in mapped.items()
    }.items()
    with pytest.raises(EngineError, match=r"not those of the model: 'model\.other'"):
        map_weights_to_state(weights, tensors | {"model.other": torch.ones(4)}, served.state_dict(), served)


def test_a_text_model_that_the_whole_hides_is_refused_until_it_is_saved_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama4().save_pretrained(tmp_path / "base")
    for read in (
        lambda path: model_dtype(path, "auto", torch.device("cpu")),
        lambda path: read_meta_model(path, max_context=8),
        lambda path: read_model(path, dtype=torch.float32, max_context=8, to_sample=False),
    ):
        with pytest.raises(ModelError, match=r"base: .*llama4.*AutoModelForCausalLM.*save_pretrained"):
            read(tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(tmp_path / "base").save_pretrained(tmp_path / "text")
    path, _ = publish(tmp_path / "text", tmp_path / "run")
    served, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(served).__name__ == json.loads((path / "config.json").read_text())["architectures"][0]


def test_a_version_has_the_template_with_which_it_was_trained(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", kind="llama")
    (base / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use", "additional_chat_templates/rag"):
        (base / f"{name}.jinja").write_text(name)
    path, _ = publish(base, tmp_path / "run")
    assert (path / "chat_template.jinja").read_text() == "additional_chat_templates/tool_use"
    assert [file.name for file in (path / "additional_chat_templates").iterdir()] == ["rag.jinja"]


def test_what_was_published_with_a_tower_is_loaded_again_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gemma3().save_pretrained(tmp_path / "base")
    plan = run_config(tmp_path / "base").trainer_plan
    model = load_models(plan, torch.device("cpu"))["policy"]
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.01)
    (tmp_path / "run").mkdir()
    weights = Publisher(tmp_path / "run").publish(PolicyVersion("policy", 0, 1), model)
    again = load_models(plan, torch.device("cpu"))["policy"]
    again.load_published(weights)
    assert all(torch.equal(again.parameters[name], tensor) for name, tensor in model.parameters.items())
