"""The part `kernels` of `benchmarks.devices`: kernels and elementwise traffic of one layer, counted without a card.

A dispatch mode counts the operations of a forward and backward pass of Qwen3-0.6B's layers with adapters of rank 16
in bfloat16; two layers minus one are one layer. Attention is torch's own in every variant, and a sum that is part of a
matrix product counts as that. A fused function counts as one kernel each way, with the tensors that it reads and
writes; where liger-kernel copies or clears tensors first, that counts too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TOKENS = 256
RANK = 16
_MATRIX = ("mm", "addmm", "addmm_", "bmm", "baddbmm")
_FREE = (
    *("detach", "empty", "empty_strided", "empty_like", "new_empty", "zeros", "ones", "full", "arange"),
    *("scalar_tensor", "_unsafe_view"),
)
"""Operations that run no kernel, and those at the ends of the model that make its inputs."""


def figures(quick: bool) -> dict[str, float | None]:
    """Count; `quick`: one family through Triton's interpreter."""
    counts = {variant: count_layer(variant) for variant in ("plain", "unfused", "fused")}
    (kernels, traffic), (unfused_kernels, unfused_traffic), (fused_kernels, fused_traffic) = counts.values()
    return {
        "kernels_per_layer": fused_kernels,
        "kernels_per_layer_unfused": unfused_kernels,
        "kernels_per_layer_plain": kernels,
        "kernels_ratio": fused_kernels / kernels,
        "elementwise_bytes_per_token": fused_traffic,
        "elementwise_bytes_per_token_unfused": unfused_traffic,
        "elementwise_bytes_per_token_plain": traffic,
        "bytes_ratio": fused_traffic / traffic,
        "fused_max_error": _max_error(["Qwen3"] if quick else []),
    }


def _max_error(families: Sequence[str]) -> float | None:
    if find_spec("liger_kernel") is None:
        print("liger-kernel is not installed: its kernels are not compared", flush=True)
        return None
    command = [sys.executable, "-m", "tests.support.interpreted_liger", *families]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(finished.stdout.splitlines()[-1])["fused_max_error"])


def count_layer(variant: str, *, show: bool = False) -> tuple[int, float]:
    """Return the kernels of one layer, forward and backward, and its elementwise bytes per token.

    Args:
        variant: "plain": transformers and PEFT; "unfused": the trainer's model; "fused": with fused layers.
        show: whether to print the operations.
    """
    one, two = (_count(variant, layers) for layers in (1, 2))
    kernels, traffic = two.kernels - one.kernels, two.traffic - one.traffic
    elementwise = {name: size / TOKENS for name, size in traffic.items() if not _is_matrix(name)}
    if show:
        for name, size in sorted(elementwise.items(), key=lambda item: -item[1]):
            print(f"  {variant}: {kernels[name]} {name}, {size:,.0f} bytes per token", flush=True)
    return sum(kernels.values()), sum(elementwise.values())


def _is_matrix(name: str) -> bool:
    return name in _MATRIX or "attention" in name


def _count(variant: str, layers: int) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        """Counts operations and the bytes of the tensors that they read and write."""

        def __init__(self) -> None:
            super().__init__()
            self.kernels: Counter[str] = Counter()
            self.traffic: Counter[str] = Counter()
            self.paused = False

        def add(self, name: str, *values: Any) -> None:
            self.kernels[name] += 1
            tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
            self.traffic[name] += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        @contextmanager
        def pause(self) -> Iterator[None]:
            """Count nothing within the context."""
            self.paused = True
            try:
                yield
            finally:
                self.paused = False

        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            output = operation(*args, **(kwargs or {}))
            name = operation._schema.name.split("::")[1]
            if not self.paused and not operation.is_view and name not in _FREE:
                self.add(name, args, kwargs, output)
            return output

    count = Count()
    with tempfile.TemporaryDirectory() as directory:
        decoder = _decoder(variant, layers, Path(directory), count)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64)
    with count:
        hidden = decoder(input_ids=ids, position_ids=torch.arange(TOKENS)[None], use_cache=False)[0]
        hidden.backward(torch.ones_like(hidden))
    return count


def _decoder(variant: str, layers: int, directory: Path, count: Any) -> Any:
    import peft
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape = {"vocab_size": 256, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    config: Any = Qwen3Config(**shape, **heads, attn_implementation="sdpa")
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if variant == "plain":
        adapter: Any = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(model, adapter, autocast_adapter_dtype=False).base_model.model.model
    from agentrl.config.policies import LoraConfig, PolicyConfig
    from agentrl.config.run import RunConfig
    from agentrl.learn.fused import fuse_layers
    from agentrl.learn.models import load_models

    model.save_pretrained(directory)
    config = RunConfig.model_validate(
        {
            "environment": {"id": "test"},
            "model": {"path": str(directory), "dtype": "bfloat16"},
            "policies": {"policy": PolicyConfig(learning_rate=1e-4, lora=LoraConfig(rank=RANK, alpha=32.0))},
        }
    )
    policy = load_models(config.trainer_plan, torch.device("cpu"))["policy"]
    policy.model.set_attn_implementation("sdpa")
    if variant == "fused":
        layers_fused = fuse_layers(policy.model, counting_kernels(count))
        assert not layers_fused.refused, layers_fused.refused
        count.kernels.clear()  # those of the comparison with the unfused layers
        count.traffic.clear()
    return policy.model.get_decoder()


def counting_kernels(count: Any) -> Any:
    """Return functions that compute as liger-kernel's do and count as its kernels."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from agentrl.learn.fused import Kernels

    class Fused(torch.autograd.Function):
        """A function that counts as one kernel each way."""

        @staticmethod
        def forward(ctx: Any, function: Callable[..., Any], name: str, saved: slice, *inputs: Any) -> Any:
            with count.pause():
                output = function(*inputs)
            count.add(f"fused {name}", inputs, output)
            ctx.function, ctx.name, ctx.saved, ctx.inputs = function, name, saved, inputs
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            if ctx.name == "norm":
                torch.zeros_like(gradients[0])
            with count.pause(), torch.enable_grad():
                needed = ctx.needs_input_grad[3:]
                leaves = [
                    value.detach().requires_grad_() if needs else value
                    for value, needs in zip(ctx.inputs, needed, strict=True)
                ]
                wanted = [leaf for leaf, needs in zip(leaves, needed, strict=True) if needs]
                by = iter(torch.autograd.grad(ctx.function(*leaves), wanted, gradients))
                results = [next(by) if needs else None for needs in needed]
            count.add(f"fused {ctx.name} backward", gradients, ctx.inputs[ctx.saved], results)
            return (None, None, None, *results)

    def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float, offset: float, kind: str) -> Tensor:
        def compute(inputs: Tensor, weight: Tensor) -> Tensor:
            return weight * F.rms_norm(inputs.float(), inputs.shape[-1:], None, epsilon).to(inputs.dtype)

        output: Tensor = Fused.apply(compute, "norm", slice(None), inputs.contiguous(), weight)
        return output

    def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = Fused.apply(lambda gate, up: F.silu(gate) * up, "SwiGLU", slice(None), gate, up)
        return output

    def rotate(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        def compute(queries: Tensor, keys: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
            return turn(queries, cosines, sines), turn(keys, cosines, sines)

        def turn(tensor: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
            left, right = tensor.chunk(2, dim=-1)
            return tensor * cosines[:, :, None] + torch.cat([-right, left], dim=-1) * sines[:, :, None]

        # liger-kernel's kernel takes [B, N, heads, D], and copies what has another layout, gradients too.
        rows = [_Contiguous.apply(tensor.transpose(1, 2)) for tensor in (queries, keys)]
        queries, keys = Fused.apply(compute, "rotary", slice(2, 4), *rows, cosines, sines)
        return queries.transpose(1, 2), keys.transpose(1, 2)

    class _Contiguous(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            return tensor.contiguous()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    return Kernels(rms_norm, silu_mul, rotate)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, count_layer(name, show=True), flush=True)
