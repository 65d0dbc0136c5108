"""Checkpoints in FP8 and MXFP4 are dequantized, trained and published; others are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from agentrl.app.policies import check_quantized_models
from agentrl.config.policies import FrozenPolicy, PolicyConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.models import model_dtype, read_meta_model, read_model
from agentrl.engines.stored_tensors import checkpoint_tensors
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.publish import Publisher
from tests.default_starts import default_config, start
from tests.learn_cases import run_config, write_model, write_tokenizer
from tests.model_families import write_released
from tests.quantized_models import write_copy, write_fp8, write_mxfp4

KINDS = ("qwen3", "moe", "deepseek", "gpt_oss")
LORA: dict[str, Any] = {"lora": {"rank": 2}}
MERGED: dict[str, Any] = {"lora": {"rank": 2, "merge": True}}
FP8_MATRIX = torch.ones((16, 16), dtype=torch.float8_e4m3fn)


def write(kind: str, directory: Path, **options: Any) -> Path:
    """Write a quantized model of a kind in bfloat16."""
    source = write_model(directory / "source", kind=kind)
    write_tokenizer(source)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    change(source, dtype="bfloat16")
    write_quantization = write_mxfp4 if kind == "gpt_oss" else write_fp8
    return write_quantization(source, directory / "model", **options)


def change(directory: Path, **values: object) -> None:
    """Change settings of a model's configuration."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_fp8_file(directory: Path, tensors: dict[str, torch.Tensor], block: object) -> Path:
    """Write the tensors of an FP8 checkpoint, and of its configuration only the quantization."""
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text("{}")
    change(directory, quantization_config={"quant_method": "fp8", "weight_block_size": block})
    return directory


def load(path: Path, policy: dict[str, Any] | None = None, dtype: str = "auto") -> PolicyModel:
    policies = {"policy": PolicyConfig.model_validate({"learning_rate": 1e-2, **(policy or {})})}
    config = run_config(path, policies=policies)
    config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
    return load_models(config.trainer_plan, torch.device("cpu"))["policy"]


@pytest.mark.parametrize(
    ("kind", "dtype"), [*((kind, torch.float32) for kind in KINDS), ("qwen3", torch.bfloat16)], ids=str
)
def test_a_quantized_model_is_loaded_as_its_float32_copy_rounded_once(
    tmp_path: Path, kind: str, dtype: torch.dtype
) -> None:
    path = write(kind, tmp_path)
    assert model_dtype(path, "auto", torch.device("cpu")) == torch.bfloat16
    model = read_model(path, dtype=dtype, max_context=8)
    expected = read_model(write_copy(path, tmp_path / "copy"), dtype=dtype, max_context=8).state_dict()
    assert expected.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert model.name_or_path == str(path)
    shapes = read_meta_model(path, max_context=8)
    assert {name: tensor.shape for name, tensor in shapes.state_dict().items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


@pytest.mark.parametrize(("kind", "options"), [("qwen3", {"block": (16, 16)}), ("gpt_oss", {})])
def test_weights_are_those_of_transformers_own_dequantization(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """With blocks that divide the matrices: of others, transformers takes the sizes of the blocks from the scales."""
    path = write(kind, tmp_path, **options)
    quantization = transformers.FineGrainedFP8Config if kind == "qwen3" else transformers.Mxfp4Config
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, quantization_config=quantization(dequantize=True)
    )
    ours = read_model(path, dtype=torch.bfloat16, max_context=8).state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", [{}, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (LORA, MERGED))])
def test_versions_are_those_of_a_16_bit_copy(tmp_path: Path, kind: str, policy: dict[str, Any]) -> None:
    path = write(kind, tmp_path)
    copy = write_copy(path, tmp_path / "copy")
    (tmp_path / "run").mkdir()
    model = load(path, policy)
    weights = Publisher(tmp_path / "run").publish(PolicyVersion("policy", 0, 1), model)
    layout = load(copy, policy, "bfloat16").publication.layout()
    (file,) = Path(weights.path).glob("*.safetensors")
    published = load_file(file)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in published.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in layout.items()
    }
    if weights.kind == "adapter":
        return
    config = json.loads((Path(weights.path) / "config.json").read_text())
    assert "quantization_config" not in config
    served, report = transformers.AutoModelForCausalLM.from_pretrained(weights.path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert served.dtype == torch.bfloat16
    for name, tensor in read_model(path, dtype=torch.bfloat16, max_context=8).state_dict().items():
        assert torch.equal(served.state_dict()[name], tensor), name


@pytest.mark.parametrize("adapter", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gpt_oss", marks=pytest.mark.exhaustive)])
def test_a_quantized_model_is_trained(tmp_path: Path, kind: str, adapter: bool) -> None:
    path = write(kind, tmp_path)
    config = default_config(path, adapter=adapter, dtype="auto", engine={"max_context": 8 if kind == "gpt_oss" else 32})
    assert start(config, tmp_path / "run").steps == 2


def test_a_quantized_model_is_served_by_the_embedded_engine(tmp_path: Path) -> None:
    path = write("qwen3", tmp_path)
    EmbeddedEngine.load(str(path), versions={"policy": PolicyVersion("policy", 0, 0)}, slots=2, max_context=32)


def test_further_tensors_are_published_dequantized(tmp_path: Path) -> None:
    """Qwen3.5 in FP8 has a vision tower in bfloat16, and layers that predict several tokens in FP8."""
    write_released("Qwen3.5, 3.6", tmp_path / "source")
    tensors = load_file(tmp_path / "source/model.safetensors")
    tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.randn(32, 64)
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    path = write_fp8(tmp_path / "source", tmp_path / "model", names=".mlp.up_proj.weight")
    (tmp_path / "run").mkdir()
    weights = Publisher(tmp_path / "run").publish(PolicyVersion("policy", 0, 1), load(path))
    published, copy = load_file(f"{weights.path}/model.safetensors"), write_copy(path, tmp_path / "copy")
    expected = load_file(copy / "model.safetensors")
    assert published.keys() == expected.keys()
    for name, tensor in published.items():
        torch.testing.assert_close(tensor.float(), expected[name], rtol=0, atol=0)


def test_scales_per_tensor_and_in_eight_bits_are_read(tmp_path: Path) -> None:
    path = write("qwen3", tmp_path, block=None)
    expected = read_model(write_copy(path, tmp_path / "copy"), dtype=torch.float32, max_context=8).state_dict()
    for shape in ((), (1,), (1, 1)):
        tensors = load_file(path / "model.safetensors")
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name] = tensors[name].reshape(shape)
            tensors[name.replace("weight_scale_inv", "activation_scale")] = torch.ones(())
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        state = read_model(path, dtype=torch.float32, max_context=8).state_dict()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda name, tensor: None if name.endswith("q_proj.weight_scale_inv") else tensor, "scales .* are missing"),
        (lambda name, tensor: tensor[:1] if name.endswith("q_proj.weight_scale_inv") else tensor, r"shape \[1, 2\]"),
        (lambda name, tensor: tensor[0] if name.endswith("q_proj.weight") else tensor, "only matrices"),
        (lambda name, tensor: tensor[0, 0] if name.endswith("q_proj.weight") else tensor, "only matrices"),
    ],
    ids=["missing", "shape", "vector", "number"],
)
def test_scales_that_do_not_fit_are_named(tmp_path: Path, damage: Any, message: str) -> None:
    path = write("qwen3", tmp_path)
    tensors = {name: damage(name, tensor) for name, tensor in load_file(path / "model.safetensors").items()}
    save_file({name: t for name, t in tensors.items() if t is not None}, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=f"q_proj.*{message}"):
        read_model(path, dtype=torch.float32, max_context=8)


@pytest.mark.parametrize("block", [0, "128", [], [16], [16, 0], [16, -16], [16, 16, 16], [16.0, 16], [True, 16], {}])
def test_a_block_that_is_none_is_named(tmp_path: Path, block: object) -> None:
    path = write_fp8_file(tmp_path, {"w.weight": FP8_MATRIX, "w.weight_scale_inv": torch.ones(1, 1)}, block)
    with pytest.raises(
        ModelError, match=r"config\.json: weight_block_size must be two positive integers or null, not "
    ):
        checkpoint_tensors(path, torch.float32)


def test_names_of_scales_that_are_not_supported_are_named(tmp_path: Path) -> None:
    path = write_fp8_file(tmp_path, {"w.weight": FP8_MATRIX, "w.weight_scale": torch.ones(())}, None)
    with pytest.raises(
        ModelError, match=r"'w\.weight_scale', as AutoFP8 writes them, are not supported\. Give a 16-bit"
    ):
        checkpoint_tensors(path, torch.float32)


def test_scales_per_tensor_may_be_of_a_vector_or_of_an_empty_matrix(tmp_path: Path) -> None:
    for shape in ((3,), (0, 3)):
        weight = torch.ones(shape, dtype=torch.float8_e4m3fn)
        path = write_fp8_file(tmp_path, {"w.weight": weight, "w.weight_scale_inv": torch.full((1,), 2.0)}, None)
        assert torch.equal(checkpoint_tensors(path, torch.float32)["w.weight"][...], torch.full(shape, 2.0))


def test_experts_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    blocks = {"w_blocks": torch.zeros(16, dtype=torch.uint8), "w_scales": torch.zeros((), dtype=torch.uint8)}
    path = write_fp8_file(tmp_path, blocks, None)
    change(path, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"'w_blocks' of shape \[16\] has scales of shape \[\]"):
        checkpoint_tensors(path, torch.float32)


def test_quantized_weights_without_a_description_are_named(tmp_path: Path) -> None:
    """Whoever removes `quantization_config` to have 16 bits gets numbers without their scales."""
    for kind, name in (("qwen3", "weight_scale_inv"), ("gpt_oss", "_blocks")):
        path = write(kind, tmp_path / kind)
        change(path, quantization_config=None)
        with pytest.raises(ModelError, match=f"quantiz.*{name}"):
            read_model(path, dtype=torch.float32, max_context=8)


def test_further_tensors_may_be_scales_of_other_things(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", kind="qwen3")
    tensors = {**load_file(path / "model.safetensors"), "vision.logit_scale": torch.ones(())}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.warns(UserWarning, match="'vision.logit_scale'"):
        read_model(path, dtype=torch.float32, max_context=8)


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"quantization_config": {"quant_method": "awq"}}, "awq"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "bitsandbytes"),
    ({"quantization_config": {"load_in_8bit": True}}, "does not name"),
    ({"quantization_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
    ({"text_config": {"quantization_config": {"quant_method": "fbgemm_fp8"}}}, "fbgemm_fp8"),
    ({"quantization_config": {"quant_method": ["fp8"]}}, "does not name"),
    ({}, "modelopt"),
]


@pytest.mark.parametrize(("settings", "method"), OTHERS, ids=[method for _, method in OTHERS])
def test_other_methods_are_refused_by_name_before_anything_is_loaded(
    tmp_path: Path, repository: Path, settings: dict[str, Any], method: str
) -> None:
    base = repository / "environments/calculator/model"
    path = Path(shutil.copytree(base, tmp_path / "model"))
    (path / "model.safetensors").unlink()
    change(path, **settings)
    if not settings:
        (path / "hf_quant_config.json").write_text('{"producer": {"name": "modelopt"}}')
    lora, vllm = PolicyConfig.model_validate(LORA), EngineConfig(vllm={})
    policies = {"policy": lora, "other": FrozenPolicy(kind="frozen", model=str(path))}
    frozen = run_config(base, policies=policies)
    for config in (
        run_config(path, policies={"policy": lora}),
        run_config(path, policies={"policy": lora}).model_copy(update={"engine": vllm}),
        run_config(base, policies={"policy": lora.model_copy(update={"reference": str(path)})}),
        frozen,
    ):
        with pytest.raises(ModelError, match=rf"{path}.* \([^)]*{method}[^)]*\)"):
            check_quantized_models(config)
    with pytest.raises(ModelError, match=method):
        read_model(path, dtype=torch.float32, max_context=8)
    check_quantized_models(frozen.model_copy(update={"engine": vllm}))


@pytest.mark.parametrize("policy", [{}, LORA, MERGED], ids=str)
def test_full_weights_are_refused_where_vllm_serves_the_quantized_layers(
    tmp_path: Path, repository: Path, policy: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(repository / "environments/calculator/model", tmp_path / "model"))
    change(path, quantization_config={"quant_method": "fp8"})
    config = run_config(path, policies={"policy": PolicyConfig.model_validate({"learning_rate": 1e-3, **policy})})
    check_quantized_models(config)
    config = config.model_copy(update={"engine": EngineConfig(vllm={})})
    if policy == LORA:
        check_quantized_models(config)
        return
    with pytest.raises(ConfigError, match=r"policies\.policy: vLLM .* \(fp8\).*engine\.vllm = false"):
        check_quantized_models(config)
