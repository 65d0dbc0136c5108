"""`lora.merge`: an adapter is trained, and versions hold all weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from agentrl.app.policies import adapter_slots_needed
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core.errors import ModelError
from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import TrainingSample
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import Episodes, make_rows, make_samples, run_config, write_model

MERGED = LoraConfig(rank=4, alpha=8.0, merge=True)
FIRST = PolicyVersion("policy", 0, 1)


def config_of(path: Path, **lora: bool) -> RunConfig:
    other = PolicyConfig(lora=LoraConfig(rank=2), learning_rate=1e-2)
    merged = PolicyConfig(lora=MERGED.model_copy(update=lora), learning_rate=1e-2)
    return run_config(path, policies={"policy": merged, "other": other})


def stepped(config: RunConfig, directory: Path) -> PolicyTrainer:
    """A trainer after a step of one of the two policies, which share a base."""
    episodes = Episodes(make_rows(0, 8))
    trainer = PolicyTrainer(config.trainer_plan, directory, read=episodes.read)
    trainer.start()
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    return trainer


def load(config: RunConfig) -> PolicyModel:
    return load_models(config.trainer_plan, torch.device("cpu"))["policy"]


def computed(model: PolicyModel, samples: Sequence[TrainingSample]) -> torch.Tensor:
    model.activate()
    (batch,) = pack(samples, max_tokens=1000, share=model.shared_prefixes)
    return model.token_logprobs(batch).logprob.detach()


@pytest.mark.parametrize(
    ("kind", "experts"), [("qwen3", False), ("moe", False), ("moe", True), ("deepseek", True), ("gpt_oss", True)]
)
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_a_version_computes_what_was_trained(tmp_path: Path, kind: str, experts: bool, rank_stabilized: bool) -> None:
    path = write_model(tmp_path / "model", kind=kind)
    trainer = stepped(config_of(path, rank_stabilized=rank_stabilized, experts=experts), tmp_path / "run")
    reference = trainer.publish("policy", FIRST)
    assert reference.kind == "full"
    assert trainer.publish("other", PolicyVersion("other", 0, 0)).kind == "adapter"
    trained = trainer._learners["policy"].model
    samples = make_samples(1, 8)
    served, start = (run_config(Path(directory)) for directory in (reference.path, path))
    logprobs = [computed(model, samples) for model in (trained, load(served), load(start))]
    torch.testing.assert_close(logprobs[1], logprobs[0], atol=1e-4, rtol=0)
    assert (logprobs[2] - logprobs[0]).abs().max() > 1e-2, "the step changed next to nothing"
    assert load(served).publication.layout().keys() == load(start).publication.layout().keys()


def test_what_was_trained_is_in_checkpoints_alone(tmp_path: Path) -> None:
    config = config_of(write_model(tmp_path / "model"))
    trainer = stepped(config, tmp_path / "run")
    assert (trainer.only_in_checkpoints("policy"), trainer.only_in_checkpoints("other")) == (True, False)
    reference = trainer.publish("policy", FIRST)
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")
    resumed = PolicyTrainer(config.trainer_plan, tmp_path / "resumed", read=Episodes(make_rows(0, 8)).read)
    resumed.start(tmp_path / "checkpoint")
    assert resumed.publish("policy", FIRST).sha256 == reference.sha256
    with pytest.raises(ModelError, match="merged when it was published"):
        trainer._learners["policy"].model.publication.load(reference)


def test_engines_serve_full_weights(tmp_path: Path) -> None:
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
    assert "small updates" not in load(config).described
    assert "merged into bfloat16, which loses small updates" in load(rounded).described
