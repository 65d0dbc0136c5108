"""Fused layers of the trainer: what is fused computes what it replaces, and everything else is left alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.config.policies import PolicyConfig
from agentrl.learn import fused
from agentrl.learn.adapters import AdaptedLinear
from agentrl.learn.fused import Kernels, describe_fused, find_kernels, fuse_layers
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import LORA, Episodes, make_rows, run_config, write_model

CALLS: list[str] = []


class Operations(TorchDispatchMode):
    """Collects the names of the operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operation.is_view:
            self.names.add(operation._schema.name.split("::")[1])
        return operation(*args, **(kwargs or {}))


def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float, offset: float, kind: str) -> Tensor:
    CALLS.append(f"rms_norm {kind}")
    return F.rms_norm(inputs, inputs.shape[-1:], weight + offset, epsilon)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    CALLS.append("silu_mul")
    return F.silu(gate) * up


def rotate(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
    CALLS.append("rotate")
    size = cosines.shape[-1]

    def turn(tensor: Tensor) -> Tensor:
        turned, rest = tensor[..., :size], tensor[..., size:]
        left, right = turned.chunk(2, dim=-1)
        swapped = torch.cat([-right, left], dim=-1)
        return torch.cat([turned * cosines[:, None] + swapped * sines[:, None], rest], dim=-1)

    return turn(queries), turn(keys)


KERNELS = Kernels(rms_norm, silu_mul, rotate)


def small_model(family: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    shape = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**shape, **heads, **settings)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def values(model: Any) -> list[Tensor]:
    model.zero_grad()
    logits = model(input_ids=torch.arange(24).view(2, 12), use_cache=False).logits
    logits.log_softmax(-1)[..., 0].sum().backward()
    return [logits.detach(), *(parameter.grad for parameter in model.parameters())]


COUNTS = {  # norms, MLPs and attention layers that are fused
    "Qwen3": (9, 2, 2),
    "Llama": (5, 2, 2),
    "Mistral": (5, 2, 2),
    "Qwen2": (5, 2, 2),
    "SmolLM3": (5, 2, 2),
    "Phi3": (5, 2, 2),
    "Gemma": (5, 0, 2),
    "Gemma2": (9, 0, 2),
}


@pytest.mark.parametrize("family", COUNTS)
def test_fused_layers_compute_what_their_classes_do(family: str) -> None:
    model, other = small_model(family), small_model(family)
    expected = values(model)
    layers = fuse_layers(model, KERNELS)
    parts = ("RMSNorm", "MLP", "Attention")
    assert tuple(layers.fused[family + part] for part in parts) == COUNTS[family]
    assert not layers.refused
    CALLS.clear()
    for one, two in zip(expected, values(model), strict=True):
        assert torch.allclose(one, two, atol=1e-5, rtol=1e-4)
    norm = "rms_norm gemma" if "Gemma" in family else "rms_norm llama"
    assert [CALLS.count(name) for name in (norm, "silu_mul", "rotate")] == list(COUNTS[family])
    CALLS.clear()
    values(other)
    assert not CALLS, "another model of the class was fused too"


def wrong_values(*arguments: Any) -> Tensor:
    return rms_norm(*arguments) * 1.01


def wrong_gradients(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up.detach()


def failing(*_: Any) -> tuple[Tensor, Tensor]:
    raise RuntimeError("out of resource: shared memory")


@pytest.mark.parametrize(
    ("wrong", "kind", "reason"),
    [
        ({"rms_norm": wrong_values}, "Qwen3RMSNorm", r"q_norm differs from its class by 0.01"),
        ({"silu_mul": wrong_gradients}, "Qwen3MLP", r"mlp differs from its class by"),
        ({"rotate": failing}, "Qwen3Attention", "self_attn cannot be fused .RuntimeError: out of resource"),
        ({"rotate": lambda q, k, c, s: rotate(q, k, c, -s)}, "Qwen3Attention", "self_attn differs"),
        ({"rms_norm": lambda *inputs: rms_norm(*inputs) * torch.nan}, "Qwen3RMSNorm", "differs from its class by nan"),
    ],
)
def test_a_kernel_that_differs_is_refused_by_name(wrong: dict[str, Callable[..., Any]], kind: str, reason: str) -> None:
    model = small_model("Qwen3")
    expected = values(model)
    layers = fuse_layers(model, KERNELS._replace(**wrong))
    assert list(layers.refused) == [kind]
    assert kind not in layers.fused
    assert len(layers.fused) == 2
    assert re.search(f"not {kind}: .*{reason}", describe_fused(layers))
    for one, two in zip(expected, values(model), strict=True):
        assert torch.allclose(one, two, atol=1e-5, rtol=1e-4)


def test_unknown_classes_are_left_alone() -> None:
    model = small_model("Olmo2")
    layers = fuse_layers(model, KERNELS)
    assert not layers.fused
    assert describe_fused(layers) == "no layers are fused"
    assert not any("forward" in vars(module) for module in model.modules())


def test_another_activation_is_not_taken_for_silu() -> None:
    layers = fuse_layers(small_model("Llama", hidden_act="relu"), KERNELS)
    assert layers.refused == {"LlamaMLP": "its variant has no fused form"}


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapted_layer_computes_what_peft_does_by_matrix_products_alone(bias: bool) -> None:
    torch.manual_seed(0)
    layer = AdaptedLinear(torch.nn.Linear(12, 10, bias=bias), "one", r=4, lora_alpha=10, config=peft.LoraConfig(r=4))
    layer.base_layer.requires_grad_(False)
    torch.nn.init.normal_(layer.lora_B["one"].weight)
    inputs = torch.randn(2, 5, 12, requires_grad=True)
    leaves = [inputs, layer.lora_A["one"].weight, layer.lora_B["one"].weight]
    gradient = torch.randn(2, 5, 10)

    operations = Operations()
    with operations:
        outputs = layer(inputs)
        actual = [outputs, *torch.autograd.grad(outputs, leaves, gradient)]
    plain = peft.tuners.lora.Linear.forward(layer, inputs)
    expected = [plain, *torch.autograd.grad(plain, leaves, gradient)]
    for one, two in zip(expected, actual, strict=True):
        assert torch.allclose(one, two, atol=1e-5, rtol=1e-5)
    assert operations.names <= {"mm", "addmm", "addmm_", "empty_like"}
    assert torch.autograd.grad(layer(inputs.detach()).sum(), leaves[1:])  # of the first layer


def test_the_output_of_an_adapted_layer_may_be_changed_in_place() -> None:
    """As Llama 4 and Gemma 3n do."""
    torch.manual_seed(0)
    layer = AdaptedLinear(torch.nn.Linear(12, 10), "one", r=4, lora_alpha=10, config=peft.LoraConfig(r=4))
    layer.base_layer.requires_grad_(False)
    torch.nn.init.normal_(layer.lora_B["one"].weight)
    inputs, leaves = torch.randn(2, 5, 12), [layer.lora_A["one"].weight, layer.lora_B["one"].weight]
    outputs = layer(inputs)
    outputs *= 2
    plain = 2 * peft.tuners.lora.Linear.forward(layer, inputs)
    for one, two in zip(*(torch.autograd.grad(each.square().sum(), leaves) for each in (outputs, plain)), strict=True):
        assert torch.allclose(one, two, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("lora", [LORA, None], ids=["adapter", "full"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_with_fused_layers_is_the_same_step(lora: Any, recompute: bool, tmp_path: Path) -> None:
    episodes = Episodes(make_rows(0, 4))
    write_model(tmp_path / "model")
    norms = []
    for kernels in (None, KERNELS):
        policies = {"policy": PolicyConfig(learning_rate=1e-2, lora=lora)}
        config = run_config(tmp_path / "model", policies=policies, recompute=recompute)
        trainer = PolicyTrainer(config.trainer_plan, tmp_path / f"run {kernels is None}", read=episodes.read)
        trainer.start()
        trainer._kernels = kernels  # as on CUDA with liger-kernel
        CALLS.clear()
        trainer.forward_backward(episodes.batch())
        assert bool(CALLS) is (kernels is not None)
        norms.append(trainer.optim_step("policy", 1).grad_norm)
        calls = len(CALLS)
        trainer.forward_backward(episodes.batch(2))
        assert len(CALLS) - calls < calls or kernels is None, "the layers were checked again"
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_step_warns_of_layers_that_are_not_fused(tmp_path: Path) -> None:
    episodes = Episodes(make_rows(0, 4))
    trainer = PolicyTrainer(
        run_config(write_model(tmp_path / "model")).trainer_plan, tmp_path / "run", read=episodes.read
    )
    trainer.start()
    trainer._kernels = KERNELS._replace(silu_mul=wrong_gradients)
    with pytest.warns(match="Qwen3ForCausalLM: .*not Qwen3MLP: .*differs"):
        trainer.forward_backward(episodes.batch())


@pytest.mark.parametrize(("version", "reason"), [(None, "not installed"), ("0.6.5", "0.6.5, and needs to be 0.8")])
def test_a_missing_or_old_package_is_named(
    version: str | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if version is None:
            raise fused.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(fused.metadata, "version", installed)
    assert reason in str(find_kernels())


@pytest.mark.exhaustive
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_the_kernels_of_liger_are_exact(repository: Path) -> None:
    """Runs liger-kernel through Triton's interpreter."""
    command = [sys.executable, "-m", "tests.support.interpreted_liger"]
    finished = subprocess.run(command, cwd=repository, stdout=subprocess.PIPE, text=True, check=True, env=os.environ)
    result = json.loads(finished.stdout.splitlines()[-1])
    assert result["fused_max_error"] <= 1e-5
    for family, (norms, mlps, layers) in COUNTS.items():
        counts = {"RMSNorm": norms, "MLP": mlps, "Attention": layers}
        assert result["fused"][family] == {family + part: count for part, count in counts.items() if count}
