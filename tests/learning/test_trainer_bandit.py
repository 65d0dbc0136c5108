"""The trainer alone learns: a contextual bandit of one token, sampled from the weights it publishes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.sections import LossConfig, TrainerConfig
from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import TrajectoryRow
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import VOCABULARY, Episodes, run_config, write_model

pytestmark = pytest.mark.learning

CONTEXTS = 8
PER_CONTEXT = 16


def sample(network: torch.nn.Module, generator: torch.Generator) -> tuple[list[TrajectoryRow], np.ndarray]:
    """`PER_CONTEXT` attempts at each context; right is the upper half of the vocabulary or the lower, by context."""
    contexts = torch.arange(CONTEXTS).repeat_interleave(PER_CONTEXT)
    prompts = torch.stack([torch.full_like(contexts, 40), torch.full_like(contexts, 41), contexts], dim=1)
    with torch.no_grad():
        logprobs = network(input_ids=prompts).logits[:, -1].log_softmax(-1)
    tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
    rewards = ((tokens[:, 0] >= VOCABULARY // 2) == (contexts % 2 == 0)).float().numpy()
    rows = [
        TrajectoryRow(
            token_ids=torch.cat([prompt, token]).numpy().astype(np.int32),
            loss_mask=np.array([False, False, False, True]),
            logprobs=np.array([0, 0, 0, float(lp[token])], np.float32),
            turn_index=np.array([-1, -1, -1, 0], np.int32),
            spans=(),
        )
        for prompt, token, lp in zip(prompts, tokens, logprobs, strict=True)
    ]
    return rows, rewards


@pytest.mark.parametrize(
    ("lora", "loss", "learning_rate"),
    [
        (None, TrainerConfig().loss, 3e-3),
        (LoraConfig(rank=8, alpha=16.0), TrainerConfig().loss, 1e-2),
        (None, LossConfig(name="ppo"), 3e-3),
        (None, LossConfig(name="reinforce"), 3e-3),
    ],
)
def test_reward_rises(tmp_path: Path, lora: LoraConfig | None, loss: object, learning_rate: float) -> None:
    model = write_model(tmp_path / "model")
    policies = {"policy": PolicyConfig(lora=lora, learning_rate=learning_rate)}
    episodes = Episodes([])
    trainer = PolicyTrainer(
        run_config(model, policies=policies, loss=loss).trainer_plan, tmp_path, read=lambda units: episodes.read(units)
    )
    trainer.start()
    generator = torch.Generator().manual_seed(0)
    curve = []
    for step in range(1, 25):
        path = trainer.publish("policy", PolicyVersion("policy", 0, step - 1)).path
        # transformers loads an adapter's directory onto its base, as an engine would.
        rows, rewards = sample(AutoModelForCausalLM.from_pretrained(path), generator)
        curve.append(float(rewards.mean()))
        episodes = Episodes(rows)
        by_context = rewards.reshape(CONTEXTS, PER_CONTEXT)
        others = (by_context.sum(1, keepdims=True) - by_context) / (PER_CONTEXT - 1)
        episodes.advantages = (by_context - others).reshape(-1)
        trainer.forward_backward(episodes.batch(step))
        report = trainer.optim_step("policy", step)
        if report.metrics["forwarded_tokens"]:
            # What the published weights sampled is what the trainer computes.
            assert report.metrics["abs_logprob_difference"] < 1e-4
    assert np.mean(curve[:2]) < 0.65
    assert np.mean(curve[-3:]) > 0.9
