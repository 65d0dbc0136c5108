"""Reward models: scores are the model's own; what has no trained head is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from agentrl_judges import reward_model
from agentrl_judges.reward_model import RewardModel
from safetensors.torch import load_file, save_file

from agentrl.config.fields import resolve_package_directory
from packages.judges.tests.test_judge import conversation

BASE = Path(resolve_package_directory("agentrl.environments:calculator/model"))
SHAPE: dict[str, Any] = {
    "vocab_size": 440,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": 435,
    "bos_token_id": 436,
    "eos_token_id": 437,
}


def save_reward_model(
    directory: Path, architecture: str = "Qwen3ForTokenClassification", *, labels: int = 2, **shape: Any
) -> Path:
    """Write a random reward model of an architecture, with the tokenizer of a shipped model."""
    model_class: Any = getattr(transformers, architecture)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**{**SHAPE, "num_labels": labels, **shape}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)  # sharp enough that a wrong position shows
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, directory / name)
    return directory


def own_scores(path: Path, token_ids: Sequence[int]) -> list[float]:
    """Scores by a plain forward pass: at every token, or, of a sequence classifier, at the last one."""
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    model: Any = getattr(transformers, name).from_pretrained(path).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits
    values = logits[..., 0] if logits.shape[-1] == 1 else logits.softmax(-1)[..., 1]
    found: list[float] = values.reshape(-1).tolist()
    return found


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": each.role, "content": each.content} for each in conversation(*contents).messages]


@pytest.mark.parametrize(
    ("architecture", "labels"),
    [
        ("Qwen3ForTokenClassification", 2),
        ("Qwen3ForSequenceClassification", 1),
        ("LlamaForSequenceClassification", 2),
        ("BertForSequenceClassification", 1),
    ],
)
def test_a_conversation_s_score_is_the_model_s_own_at_its_end(tmp_path: Path, architecture: str, labels: int) -> None:
    path = save_reward_model(tmp_path / "model", architecture, labels=labels)
    score, found = reward_model(path), []
    for contents in (("a", "one"), ("a", "one", "b", "two")):
        token_ids, _ = RewardModel(path, architecture[architecture.index("For") :], "cpu").positions(
            messages(*contents), ""
        )
        found.append(asyncio.run(score(conversation(*contents))))
        assert found[-1] == pytest.approx(own_scores(path, token_ids)[-1], abs=1e-6)
    assert found[0] != pytest.approx(found[1], abs=1e-4), "the model does not tell conversations apart"


@pytest.mark.parametrize(
    ("contents", "steps"),
    [
        (("a", "one\n\ntwo\n\n"), ["one\n\n", "two\n\n"]),
        (("a", "one\n\ntwo"), ["one\n\n", "two\n\n"]),
        (("a", "\n\none\n\n\n\n"), ["one\n\n", "\n\n"]),
        (("a\n\nb", "one\n\ntwo", "c", "three"), ["three\n\n"]),
        (("a", ""), []),
    ],
)
def test_a_step_is_scored_at_the_token_that_ends_it(
    tmp_path: Path, contents: tuple[str, ...], steps: list[str]
) -> None:
    path = save_reward_model(tmp_path / "model")
    token_ids, ends = RewardModel(path, "ForTokenClassification", "cpu").positions(messages(*contents), "\n\n")
    decode = transformers.AutoTokenizer.from_pretrained(path).decode
    assert [decode(token_ids[: end + 1])[-len(step) :] for end, step in zip(ends, steps, strict=True)] == steps


@pytest.mark.parametrize(("combine", "pick"), [("mean", np.mean), ("min", np.min), ("last", lambda each: each[-1])])
def test_a_turn_s_score_is_made_of_its_steps(tmp_path: Path, combine: Any, pick: Any) -> None:
    path = save_reward_model(tmp_path / "model")
    contents = ("a", "one\n\ntwo\n\nthree")
    token_ids, ends = RewardModel(path, "ForTokenClassification", "cpu").positions(messages(*contents), "\n\n")
    own = own_scores(path, token_ids)
    score = reward_model(path, steps="\n\n", combine=combine)
    assert asyncio.run(score(conversation(*contents))) == pytest.approx(pick([own[end] for end in ends]), abs=1e-6)
    assert asyncio.run(score(conversation("a", ""))) is None


def test_a_conversation_longer_than_the_context_is_no_score(tmp_path: Path) -> None:
    path = save_reward_model(tmp_path / "model", max_position_embeddings=32)
    long = conversation("a", "b " * 100)
    with pytest.raises(ValueError, match="more than the reward model's 32"):
        asyncio.run(reward_model(path)(long))
    assert asyncio.run(reward_model(path, unscorable=-1.0)(long)) == -1.0


def spoil(path: Path, *, without: str = "", **config: Any) -> Path:
    if without:
        tensors = load_file(path / "model.safetensors")
        save_file({name: value for name, value in tensors.items() if without not in name}, path / "model.safetensors")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return path


@pytest.mark.parametrize(
    ("labels", "spoiled", "message"),
    [
        (2, {"without": "score"}, r"weights are missing \(score\.bias, score\.weight\)"),
        (2, {"without": "layers.0.mlp"}, "weights are missing"),
        (3, {}, "3 outputs"),
        (2, {"auto_map": {"AutoModel": "code.Model"}}, "without code of its own"),
        (2, {"architectures": ["Qwen3ForCausalLM"]}, "classification model"),
    ],
)
def test_what_is_no_trained_reward_model_is_refused(
    tmp_path: Path, labels: int, spoiled: dict[str, Any], message: str
) -> None:
    path = spoil(save_reward_model(tmp_path / "model", labels=labels), **spoiled)
    with pytest.raises(ValueError, match=message):
        asyncio.run(reward_model(path)(conversation("a", "b")))
