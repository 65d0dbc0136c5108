"""Model directories from others that would run code of a hub, never end, or compute nothing but NaN."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.app.policies import check_tokenizers
from agentrl.config.policies import PolicyConfig
from agentrl.core.errors import ModelError
from agentrl.engines.embedded.forward import check_slots_match_forward
from agentrl.engines.models import read_meta_model, read_model
from agentrl.learn.forward_check import why_unshared
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.default_starts import write_model
from tests.learn_cases import run_config

EVIL = "kernels-community/evil"


@pytest.fixture
def model(repository: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(repository / "environments/calculator/model", tmp_path / "model"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(
    "values",
    [
        {"attn_implementation": EVIL},
        {"_attn_implementation": EVIL},
        {"attn_implementation": f"{EVIL}@v1:flash"},
        {"attn_implementation": {"": EVIL}},
        {"attn_implementation": {"text_config": EVIL}},
        {"text_config": {"_attn_implementation": EVIL}},
        {"attn_implementation": "flash_attention_2"},
        {"experts_implementation": "deepgemm"},
        {"attn_implementation": [EVIL]},
    ],
    ids=str,
)
def test_code_of_a_hub_that_a_configuration_names_is_refused(model: Path, values: dict[str, Any]) -> None:
    change(model / "config.json", **values)
    with pytest.raises(ModelError, match=r"_implementation = .*hub"):
        read_model(model, dtype=torch.float32, max_context=64)
    with pytest.raises(ModelError, match=r"_implementation = .*hub"):
        read_meta_model(model, max_context=64)


@pytest.mark.parametrize("value", [None, "eager", "sdpa"])
def test_an_implementation_of_this_machine_is_accepted(model: Path, value: str | None) -> None:
    change(model / "config.json", attn_implementation=value)
    read_model(model, dtype=torch.float32, max_context=64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_checkpoint_that_computes_nan_is_named_with_its_tensor(model: Path, value: float) -> None:
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][:] = value
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    broken = read_model(model, dtype=torch.float32, max_context=64)
    reason = "too large" if value == 3e38 else f"{name} contains NaN"
    with pytest.raises(ModelError, match=f"{model}.*{reason}"):
        check_slots_match_forward(broken, str(model), max_context=64)
    with pytest.raises(ModelError, match=f"{model}.*{reason}"):
        why_unshared(broken, 64)


def test_an_absurdly_long_token_is_named_before_it_is_compiled(model: Path) -> None:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": last["id"] + 1, "content": "x" * 60_000})
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match="60,000"):
        TemplateChatFormat.load(model)
    policy = PolicyConfig(learning_rate=1e-2, reference=str(model))
    with pytest.raises(ModelError, match="60,000"):
        check_tokenizers(run_config(model, policies={"policy": policy}).engine_plan)


def test_outputs_that_a_checkpoint_s_training_asked_for_are_left_out(tmp_path: Path) -> None:
    path = write_model("Qwen3-MoE", tmp_path / "model", output_router_logits=True, output_hidden_states=True)
    assert json.loads((path / "config.json").read_text())["output_router_logits"]
    output = read_model(path, dtype=torch.float32, max_context=16)(input_ids=torch.zeros((1, 4), dtype=torch.long))
    assert output.hidden_states is None
    assert output.aux_loss is None
    assert not read_meta_model(path, max_context=16).config.output_router_logits
