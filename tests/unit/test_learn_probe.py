"""The canary a trainer publishes: what the published files say to its tokens, and nothing but that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.policies import LoraConfig
from agentrl.config.run import PolicyConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import TrainerError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.canary import Canary, read_canary
from agentrl.engines.weights.reading import read_adapter, read_weights
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config, write_model, write_tokenizer

FIRST = PolicyVersion("policy", 0, 1)


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(make_rows(0, 8))


def probe_in(reference: WeightsRef) -> Canary:
    if reference.kind == "adapter":
        canary = read_adapter(reference, max_numbers=1 << 24).canary
    else:
        file = read_weights(reference, max_numbers=1 << 24)
        canary = read_canary(reference, file.metadata, file.tensors)
    assert canary is not None
    return canary


def plain(model: Any, canary: Canary) -> Any:
    with torch.no_grad():
        ends = model.eval()(input_ids=torch.from_numpy(canary.contexts).long()).logits[:, -1]
    return ends.log_softmax(-1)[:, canary.token_ids.astype(np.int64)].numpy()


def stepped(trainer: PolicyTrainer, episodes: Episodes, resume: Path | None = None) -> PolicyTrainer:
    trainer.start(resume)
    if resume is None:
        trainer.forward_backward(episodes.batch())
        trainer.optim_step("policy", 1)
    return trainer


@pytest.mark.parametrize(
    ("kind", "lora"), [("qwen3", None), ("qwen3", LORA), ("moe", None), ("moe", LORA), ("gpt_oss", LORA)]
)
def test_it_is_what_the_published_files_say(
    tmp_path: Path, episodes: Episodes, kind: str, lora: LoraConfig | None
) -> None:
    path = write_model(tmp_path / "model", kind=kind)
    write_tokenizer(path)
    trained = PolicyConfig(lora=lora, learning_rate=1e-2)
    untrained = PolicyConfig(lora=LORA if kind == "qwen3" else None)
    policies = {"policy": trained, "other": untrained}
    config = run_config(path, policies=policies)
    trainer = stepped(PolicyTrainer(config.trainer_plan, tmp_path, read=episodes.read), episodes)
    other = trainer.publish("other", PolicyVersion("other", 0, 0))
    reference = trainer.publish("policy", FIRST)
    canary, start = probe_in(reference), AutoModelForCausalLM.from_pretrained(path)
    assert (canary.contexts.shape, canary.token_ids.shape) == ((1, 16), (128,))
    assert canary.is_exact
    np.testing.assert_allclose(canary.start_logprobs, plain(start, canary), atol=1e-4)
    np.testing.assert_allclose(probe_in(other).logprobs, canary.start_logprobs, atol=1e-5)
    served = peft.PeftModel.from_pretrained(start, reference.path) if lora is not None else None
    model = served or AutoModelForCausalLM.from_pretrained(reference.path)
    np.testing.assert_allclose(canary.logprobs, plain(model, canary), atol=1e-4)
    assert np.abs(canary.logprobs - canary.start_logprobs).mean() > 1e-3


@pytest.mark.parametrize(("kind", "lora"), [("qwen3", None), ("qwen3", LORA), ("moe", LORA)])
def test_a_resumed_trainer_publishes_the_same_file(
    tmp_path: Path, episodes: Episodes, kind: str, lora: LoraConfig | None
) -> None:
    path = write_model(tmp_path / "model", kind=kind)
    write_tokenizer(path)
    config = run_config(path, policies={"policy": PolicyConfig(lora=lora)})
    undisturbed = stepped(PolicyTrainer(config.trainer_plan, tmp_path, read=episodes.read), episodes)
    undisturbed.save(tmp_path / "checkpoint")
    resumed = PolicyTrainer(config.trainer_plan, tmp_path / "again", read=episodes.read)
    stepped(resumed, episodes, tmp_path / "checkpoint")
    reference = undisturbed.publish("policy", FIRST)
    assert resumed.publish("policy", PolicyVersion("policy", 1, 1)).sha256 == reference.sha256


def test_it_fits_into_a_context(tmp_path: Path, episodes: Episodes) -> None:
    path = write_model(tmp_path / "model")
    write_tokenizer(path)
    shapes = {}
    for longest in (512, 10):
        config = run_config(path).model_copy(update={"engine": EngineConfig(max_context=longest)})
        trainer = stepped(PolicyTrainer(config.trainer_plan, tmp_path / f"{longest}", read=episodes.read), episodes)
        reference = trainer.publish("policy", FIRST)
        file = read_weights(reference, max_numbers=1 << 24)
        canary = read_canary(reference, file.metadata, file.tensors)
        shapes[longest] = None if canary is None else canary.contexts.shape
    assert shapes == {512: (1, 16), 10: (1, 9)}


def test_weights_that_have_diverged_are_not_published(tmp_path: Path, episodes: Episodes) -> None:
    path = write_model(tmp_path / "model")
    write_tokenizer(path)
    trainer = stepped(PolicyTrainer(run_config(path).trainer_plan, tmp_path, read=episodes.read), episodes)
    with torch.no_grad():
        next(iter(trainer._learners["policy"].model.parameters.values())).fill_(torch.inf)
    with pytest.raises(TrainerError, match="diverged"):
        trainer.publish("policy", FIRST)
    assert not (tmp_path / "versions").exists()
