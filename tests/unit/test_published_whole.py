"""Versions of checkpoints with parts that a text model lacks, such as a vision tower, are whole."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
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
from tests.model_families import WRAPPED, lost_in_publishing, write_released

WHOLE = [name for name in WRAPPED if name != "Llama 4, with images"]


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


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("shards", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_version_has_every_tensor_of_the_checkpoint(tmp_path: Path, name: str, shards: bool) -> None:
    base = write_released(name, tmp_path / "base", **({"max_shard_size": "100KB"} if shards else {}))
    if has_further := name.startswith("Qwen3.5"):
        add_tensor(min(base.glob("*.safetensors")))
    assert (len(list(base.glob("*.safetensors"))) > 1) is shards
    path, model = publish(base, tmp_path / "run")
    assert lost_in_publishing(base, path) == []
    published = load_file(path / "model.safetensors")
    assert {name: tensor.shape for name, tensor in model.publication.layout().items()} == {
        name: tensor.shape for name, tensor in published.items()
    }
    assert not has_further or published["mtp.norm.weight"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", WHOLE)
def test_the_text_part_is_sampled_and_trained_under_the_names_of_the_whole(tmp_path: Path, name: str) -> None:
    """The embedded engine's slots and the tree agree with the released class, or loading them raises."""
    write_released(name, tmp_path)
    EmbeddedEngine.load(str(tmp_path), versions={"policy": PolicyVersion("policy", 0, 0)}, slots=2, max_context=16)
    policies = {"policy": PolicyConfig(lora=LORA.model_copy(update={"target_modules": ()}))}
    model = load_models(run_config(tmp_path, policies=policies).trainer_plan, torch.device("cpu"))["policy"]
    modules = dict(AutoModelForImageTextToText.from_pretrained(tmp_path).named_modules())
    layers = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in model.publication.layout()}
    assert layers
    assert layers <= modules.keys()
    assert not any("vis" in name for name in layers)
    assert bool(model.unshared) == name.startswith("Qwen3.5")  # recurrent layers


def test_tied_weights_and_names_of_another_layout_are_not_carried(tmp_path: Path) -> None:
    """A head beside tied embeddings would be the old one."""
    write_released("Qwen3", tmp_path / "base")
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
    write_released("Llama 4, with images", tmp_path / "base")
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


def test_what_was_published_with_a_tower_is_loaded_again_bit_for_bit(tmp_path: Path) -> None:
    write_released("Gemma 3, with images", tmp_path / "base")
    plan = run_config(tmp_path / "base").trainer_plan
    model = load_models(plan, torch.device("cpu"))["policy"]
    with torch.no_grad():
        for parameter in model.parameters.values():
            parameter.add_(0.01)
    (tmp_path / "run").mkdir()
    weights = Publisher(tmp_path / "run").publish(PolicyVersion("policy", 0, 1), model)
    again = load_models(plan, torch.device("cpu"))["policy"]
    again.publication.load(weights)
    assert all(torch.equal(again.parameters[name], tensor) for name, tensor in model.parameters.items())
