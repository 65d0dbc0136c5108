"""`trainer.recompute`: less is kept for the backward pass, and the gradient is the same, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.config.policies import PolicyConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.tokens import ExpertRouting, TrainingSample
from agentrl.learn.forward import token_logprobs
from agentrl.learn.models import load_models
from agentrl.learn.packing import pack
from tests.learn_cases import LORA, make_samples, predict_trainer_memory, run_config, write_model
from tests.model_families import WRAPPED, family_config, sharp_model, write_family


def with_routing(samples: list[TrainingSample]) -> list[TrainingSample]:
    """Of two layers, two of four experts a token: seldom those that a random router chooses."""
    rng = np.random.default_rng(0)
    drawn = [np.stack([rng.permutation(4)[:2] for _ in range(2 * len(sample))]) for sample in samples]
    return [
        sample.with_column("experts", ExpertRouting(experts.reshape(-1, 2, 2).astype(np.int16)))
        for sample, experts in zip(samples, drawn, strict=True)
    ]


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        *(("qwen3", False), ("qwen3", True), ("sliding", False), ("moe", False), ("Gemma 3, with images", True)),
        pytest.param("Qwen3.5-MoE, 3.6", False, marks=pytest.mark.exhaustive),
    ],
)
def test_the_gradient_is_the_same(tmp_path: Path, kind: str, lora: bool) -> None:
    path = tmp_path / "model"
    if kind in WRAPPED:
        write_family(kind, path)
    else:
        write_model(path, kind=kind)
    policies = {"policy": PolicyConfig(lora=LORA if lora else None)}
    samples = make_samples(0, 12, longest=40)
    gradients, kept = [], []
    for recompute in (False, True):
        config = run_config(path, policies=policies, recompute=recompute)
        if kind == "moe":
            config = config.model_copy(update={"engine": EngineConfig(capture_routing=True)})
            samples = with_routing(samples)
        model = load_models(config.trainer_plan, torch.device("cpu"))["policy"]
        (batch,) = pack(samples, max_tokens=1 << 20, share=model.shared_prefixes)
        sizes: list[int] = []

        def note(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = token_logprobs(model.model, batch, shared=model.shared_prefixes, replay=model.replay)
        output.logprob.sum().backward()
        gradients.append([each.grad for each in model.parameters.values()])
        kept.append(sum(sizes))
    assert all(
        torch.equal(one, two) for one, two in zip(*gradients, strict=True) if one is not None and two is not None
    )
    assert any(each is not None and bool(each.any()) for each in gradients[1])
    assert kept[1] < kept[0] / 2


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("XGLM", {"dropout": 0.3, "activation_dropout": 0.3}),
        ("BioGPT", {"hidden_dropout_prob": 0.3, "activation_dropout": 0.3}),
        ("Falcon", {"hidden_dropout": 0.3, "attention_dropout": 0.3}),
    ],
)
def test_recomputed_layers_drop_nothing(tmp_path: Path, name: str, dropout: dict[str, float]) -> None:
    """These layers call dropout as a function, by their own state of training."""
    sharp_model(family_config(name, **dropout)).save_pretrained(tmp_path)
    gradients, logprobs = [], []
    for recompute in (False, True):
        model = load_models(run_config(tmp_path, recompute=recompute).trainer_plan, torch.device("cpu"))["policy"]
        (batch,) = pack(make_samples(0, 6), max_tokens=1 << 20, share=model.shared_prefixes)
        logprob = token_logprobs(model.model, batch, shared=model.shared_prefixes).logprob
        logprob.sum().backward()
        logprobs.append(logprob.detach())
        gradients.append([each.grad for each in model.parameters.values() if each.grad is not None])
    assert torch.equal(*logprobs)
    assert gradients[0]
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))


def test_the_memory_plan_knows_it(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    plain, recomputed = (
        predict_trainer_memory(run_config(path, recompute=recompute)).activations for recompute in (False, True)
    )
    assert recomputed < plain
