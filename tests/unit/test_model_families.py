"""The trainer gives the log-probabilities of the plain forward pass of transformers; a benchmark has all families.

Families that are trained in different ways: over a prefix tree, with a head of their own, experts, chunks, sinks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file

from agentrl.app.plan import with_chosen_settings
from agentrl.app.policies import check_vllm_models
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.model_layers import check_slot_layers
from agentrl.engines.embedded.forward import load_model
from agentrl.engines.models import check_sparse_attention, read_meta_model, read_model
from agentrl.learn.models import load_models
from benchmarks.families import shape_digest, vllm_classes
from docs.generators.families import families_page
from tests.default_starts import write_model
from tests.model_families import (
    FAMILIES,
    MAX_CONTEXT,
    RECURRENT,
    SERVED_BY_VLLM,
    WRAPPED,
    family_config,
    family_rows,
    gradient_error,
    logprobs_of,
    long_run,
    plain_logprobs,
    sharp_model,
    trained_logprobs,
    ways,
    write_family,
    write_released,
)
from tests.planted_errors import PlantedErrors, missed

pytestmark = pytest.mark.full_start_check


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Phi-3, LongRoPE", "OLMoE", "Llama 4", "gpt-oss", "BART", "XLM"])
def test_what_is_trained_is_what_transformers_gives_each_row_alone(tmp_path: Path, name: str) -> None:
    path, rows = write_family(name, tmp_path), family_rows()
    policy = load_models(long_run(path).trainer_plan, torch.device("cpu"))["policy"]
    expected = np.concatenate(plain_logprobs(path, rows))
    for way in ways(policy):
        found = np.concatenate(trained_logprobs(policy, rows, way=way))
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0, err_msg=way)


@pytest.mark.parametrize("name", ["Qwen3", "DeepSeek-V3", "GLM-4.5", "Dots 1", "ERNIE 4.5 MoE"])
def test_an_engine_expects_the_dtypes_that_a_trainer_loads(tmp_path: Path, name: str) -> None:
    path = write_released(name, tmp_path / "model")
    trained = read_model(path, dtype=torch.bfloat16, max_context=MAX_CONTEXT, to_sample=False).state_dict()
    served = read_meta_model(path, max_context=MAX_CONTEXT, dtype=torch.bfloat16).state_dict()
    assert {name: tensor.dtype for name, tensor in served.items()} == {
        name: tensor.dtype for name, tensor in trained.items()
    }
    kept = {name for name, tensor in served.items() if tensor.dtype == torch.float32}
    assert bool(kept) == (name != "Qwen3")


@pytest.mark.parametrize("name", ["Gemma 2", "VaultGemma"])
def test_scores_are_capped_in_training_and_sampling(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / "model", family_rows()
    config = family_config(name)
    config.update({"attn_logit_softcapping": 0.5, "sliding_window": MAX_CONTEXT})
    sharp_model(config).save_pretrained(path)
    expected = plain_logprobs(path, rows)
    policy = load_models(long_run(path).trainer_plan, torch.device("cpu"))["policy"]
    found = np.concatenate(trained_logprobs(policy, rows, way="padded"))
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-4, rtol=0)
    sampled = load_model(str(path), max_context=MAX_CONTEXT, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        found = np.concatenate([each.numpy() for each in logprobs_of(sampled, rows)])
    np.testing.assert_allclose(found, np.concatenate(expected), atol=1e-4, rtol=0)
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**written, "attn_logit_softcapping": None}))
    uncapped = np.concatenate(plain_logprobs(path, rows))
    assert np.abs(uncapped - np.concatenate(expected)).max() > 0.1, "the cap has an effect"


@pytest.mark.parametrize(
    "name", ["Qwen3.5", "Jamba", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RECURRENT[1:])]
)
def test_recurrent_layers_compute_whole_rows(tmp_path: Path, name: str) -> None:
    """Log-probabilities and gradients are those of transformers for each row alone."""
    path, rows = write_family(name, tmp_path), family_rows()
    run = long_run(path)
    policy = load_models(run.trainer_plan, torch.device("cpu"))["policy"]
    unshared = load_models(run.trainer_plan, torch.device("meta"))["policy"].unshared
    assert policy.unshared == unshared == "its recurrent or convolution layers, which mix the tokens of a row in order"
    found = np.concatenate(trained_logprobs(policy, rows, way="padded"))
    np.testing.assert_allclose(found, np.concatenate(plain_logprobs(path, rows)), atol=1e-4, rtol=0)
    assert gradient_error(path, policy, rows) <= 1e-5


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "GLM-5"])
def test_rows_are_whole_for_an_indexer(tmp_path: Path, name: str) -> None:
    policy = load_models(long_run(write_family(name, tmp_path)).trainer_plan, torch.device("cpu"))["policy"]
    assert policy.unshared == "its indexer, which selects keys among those of a whole row"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_convolutions_compute_whole_rows_even_if_their_weights_are_too_small_to_show(
    tmp_path: Path, device: str
) -> None:
    path = write_model("LFM2", tmp_path)
    policy = load_models(long_run(path).trainer_plan, torch.device(device))["policy"]
    assert "recurrent or convolution layers" in policy.unshared


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "indexer"),
        ({"model_type": "glm_moe_dsa", "layer_types": ["indexed_attention"]}, "indexer"),
        ({"model_type": "wrapped", "text_config": {"layer_types": ["heavily_compressed_attention"]}}, "indexer"),
        ({"model_type": "bloom"}, "ALiBi"),
        ({"model_type": "minimax"}, "lightning"),
        ({"model_type": "jamba"}, "cannot continue a context"),
    ],
)
def test_what_a_slot_cannot_hold_is_refused_before_anything_is_loaded(
    tmp_path: Path, config: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = long_run(tmp_path)
    with pytest.raises(ModelError, match=rf"{reason}.*\[engine\.vllm\]"):
        with_chosen_settings(run, {})
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=reason):
        read_model(tmp_path, dtype=torch.float32, max_context=8)
    check_slot_layers(write_model("Qwen3", tmp_path / "other"))


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3-Next"])
def test_vllm_computes_gated_delta_net_on_a_cpu_in_bfloat16_alone(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.core.machine.missing_torchvision", lambda: "")
    run = long_run(write_model(name, tmp_path))
    engine = run.engine.model_copy(update={"vllm": {}})
    with pytest.raises(ConfigError, match=r"in bfloat16 only.*set model\.dtype = \"bfloat16\""):
        check_vllm_models(run.model_copy(update={"engine": engine}).engine_plan)
    half = run.model_copy(update={"engine": engine, "model": run.model.model_copy(update={"dtype": "bfloat16"})})
    check_vllm_models(half.engine_plan)
    check_vllm_models(run.engine_plan)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Phi-3, LongRoPE"])
def test_the_check_at_start_finds_planted_errors(tmp_path: Path, name: str) -> None:
    """Of each kind, in the pass over a prefix tree and in that over padded rows."""
    model = load_models(long_run(write_family(name, tmp_path)).trainer_plan, torch.device("cpu"))["policy"].model
    assert len(PlantedErrors(model).possible()) == 3
    assert missed(model, MAX_CONTEXT) == []


def test_layers_that_share_a_weight_are_trained_with_an_adapter_each(tmp_path: Path) -> None:
    """Zamba2 calls two blocks of weights in turn; PEFT reads the published adapter as it was trained."""
    run = long_run(write_model("Zamba2", tmp_path / "base"), policies={"policy": PolicyConfig(lora=LoraConfig(rank=2))})
    policy, rows = load_models(run.trainer_plan, torch.device("cpu"))["policy"], family_rows()
    assert any(
        name.endswith("layers.5.shared_transformer.self_attn.q_proj.lora_A.weight")
        for name, _ in policy.publication.tensors()
    )
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.normal_(0, 0.05)
    save_file(dict(policy.publication.tensors()), tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(policy.publication.config()))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    before = np.concatenate(plain_logprobs(tmp_path / "base", rows))
    found = np.concatenate(trained_logprobs(policy, rows, way=ways(policy)[0]))
    adapted = peft.PeftModel.from_pretrained(base, str(tmp_path))
    np.testing.assert_allclose(found, np.concatenate(logprobs_of(adapted, rows)), atol=1e-4, rtol=0)
    assert np.abs(found - before).max() > 1e-3


def test_routers_get_an_adapter_only_if_they_are_named(tmp_path: Path) -> None:
    path = write_family("Llama 4", tmp_path)
    for targets, expected in (((), False), (("q_proj", "router"), True)):
        run = long_run(path, policies={"policy": PolicyConfig(lora=LoraConfig(target_modules=targets))})
        policy = load_models(run.trainer_plan, torch.device("cpu"))["policy"]
        assert any("router" in name for name in policy.publication.layout()) is expected


@pytest.mark.parametrize("name", ["HunYuan-MoE", "LongCat-Flash"])
def test_a_size_of_two_in_a_configuration_makes_no_row_of_one_token(tmp_path: Path, name: str) -> None:
    """Their `moe_topk` of 2 is a length at which the check at the start looks for a change."""
    run = long_run(write_family(name, tmp_path))
    assert load_models(run.trainer_plan, torch.device("cpu"))["policy"].parameters


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["AXK2Config", "DeepseekV32Config"])
def test_a_model_that_selects_keys_is_refused_in_contexts_it_selects_from(
    tmp_path: Path, kind: str, device: str
) -> None:
    """Before its weights are read: which of several keys with equal scores it attends to depends on what is forwarded
    together."""
    values = {**family_config("DeepSeek-V3.2").to_dict(), "index_topk": MAX_CONTEXT - 1}
    values.pop("model_type")
    getattr(transformers, kind)(**values).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"index_topk.*engine\.max_context"):
        load_models(long_run(tmp_path).trainer_plan, torch.device(device))


@pytest.mark.parametrize("name", ["index_topk", "index_topk_blocks", "indexer_budget"])
def test_every_name_of_a_bound_on_selected_keys_is_known(name: str) -> None:
    config = transformers.PretrainedConfig(**{name: 63})
    check_sparse_attention(config, 63, "model")
    with pytest.raises(ModelError, match=f"{name} = 63"):
        check_sparse_attention(config, 64, "model")


def test_a_model_that_selects_all_keys_is_trained(tmp_path: Path) -> None:
    path, rows = write_family("DeepSeek-V3.2", tmp_path), family_rows()
    policy = load_models(long_run(path).trainer_plan, torch.device("cpu"))["policy"]
    found = np.concatenate(trained_logprobs(policy, rows, way="padded"))
    np.testing.assert_allclose(found, np.concatenate(plain_logprobs(path, rows)), atol=1e-4, rtol=0)


def test_the_page_of_results_is_that_of_the_last_run(repository: Path) -> None:
    seen = json.loads((repository / "docs/families.json").read_text(encoding="utf-8"))
    page = (repository / "docs/results/models.md").read_text(encoding="utf-8")
    assert page == families_page(seen), "run `make docs-config`"


def test_the_last_run_saw_the_families_that_are_loaded(repository: Path) -> None:
    """The models as they are now, by name and shape, and the classes of the installed vLLM."""
    seen = json.loads((repository / "docs/families.json").read_text(encoding="utf-8"))
    shapes = {name: each["shape"] for name, each in seen["families"].items()}
    assert shapes == {name: shape_digest(name) for name in (*FAMILIES, *WRAPPED)}, (
        "run `python -m benchmarks.families --output docs/families.json` and `make docs-config`"
    )
    assert all(repository.joinpath(test).is_file() for test in SERVED_BY_VLLM.values())
    vllm = vllm_classes({each["released_class"] for each in seen["families"].values()})
    if vllm and vllm["version"] == seen["vllm"]["version"]:
        assert vllm["classes"] == seen["vllm"]["classes"]


@pytest.mark.parametrize("change", ["difference", "lost", "embedded", "refused"])
def test_what_a_run_saw_is_on_the_page(repository: Path, change: str) -> None:
    seen = json.loads((repository / "docs/families.json").read_text(encoding="utf-8"))
    before, qwen3 = families_page(seen), seen["families"]["Qwen3"]
    changed: dict[str, Any] = {"difference": 0.25, "lost": ["lm_head.weight"], "embedded": "no", "refused": "never"}
    qwen3[change] = changed[change]
    after = families_page(seen)
    expected = {"difference": "\n2e-1, gradients", "lost": "without `lm_head.weight`", "embedded": "* Qwen3: no\n"}
    assert expected.get(change, "* Qwen3: never\n") in after
    assert after != before
