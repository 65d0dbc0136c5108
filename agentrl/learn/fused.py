"""Fused layers on CUDA: norms, rotary embedding and SwiGLU by liger-kernel, one kernel each instead of about ten.

Modules of known classes get a forward pass of their own; the class, its other models and the parameters stay as they
are. Of an MLP only the product silu(gate) * up is fused, so that its projections keep their adapters. Every module is
compared with its class on random inputs, outputs and gradients, before it is used.

Owns: which classes are fused, the comparison. Does not own: the kernels (liger-kernel), attention (`forward.py`),
adapters (`models.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from agentrl.core.machine import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LIGER = (0, 8)
"""Oldest liger-kernel that is used: its norms compute no gradient of frozen weights."""

_FAMILIES = ("Llama", "Qwen2", "Qwen3", "Mistral", "SmolLM3", "Phi3", "Gemma", "Gemma2", "Gemma3")
_FUSED_CLASS = re.compile(f"(?!Gemma[23]?MLP)({'|'.join(_FAMILIES)})(RMSNorm|MLP|Attention)")  # Gemma's is GeGLU
_ROTARY = "apply_rotary_pos_emb"
"""The function with which the attention of every such family rotates queries and keys."""

_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2}
"""Largest difference between a fused module and its class, relative to the largest value."""
_ROUNDED_TOLERANCE = 5e-2
"""The same in bfloat16, which rounds each of several operations by .004."""
_TOKENS = 24
"""Number of tokens in a comparison."""


class Kernels(NamedTuple):
    """Fused functions, with gradients."""

    rms_norm: Callable[[Tensor, Tensor, float, float, str], Tensor]
    """Of inputs [..., H], weight [H], epsilon, offset of the weight, and the kind: 'llama' or 'gemma'."""
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    """silu(gate) * up. May overwrite both in the backward pass."""
    rotate: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """Of queries and keys, [B, heads, N, D], cosines and sines, [B or 1, N, D]. May overwrite queries and keys."""


class FusedLayers(NamedTuple):
    """What `fuse_layers` did."""

    fused: Counter[str]
    """Number of fused modules, by class."""
    refused: dict[str, str]
    """Why a class was not fused although it is known."""


def find_kernels() -> Kernels | str:
    """Return liger-kernel's functions, or why there are none."""
    try:
        version = metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return f"liger-kernel is not installed: {install_command('liger')}"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LIGER:
        return f"liger-kernel is {version}, and needs to be {'.'.join(map(str, LIGER))} or newer"
    try:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
    except Exception as error:  # noqa: BLE001 - Triton's, of the driver, or of another layout of the package
        return f"liger-kernel {version} cannot be imported ({type(error).__name__}: {error})"

    def rms_norm(inputs: Tensor, weight: Tensor, epsilon: float, offset: float, kind: str) -> Tensor:
        # Not in place: a gradient may belong to a residual connection too.
        output: Tensor = LigerRMSNormFunction.apply(inputs, weight, epsilon, offset, kind, False)
        return output

    return Kernels(rms_norm, LigerSiLUMulFunction.apply, LigerRopeFunction.apply)


def fuse_layers(model: PreTrainedModel, kernels: Kernels) -> FusedLayers:
    """Give the modules of known classes fused forward passes, if all of their class reproduce it."""
    modules: dict[str, list[tuple[nn.Module, Callable[..., Any]]]] = {}
    refused: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        is_known = _FUSED_CLASS.fullmatch(kind) and type(module).__module__.startswith("transformers.models.")
        if not is_known or kind in refused or "forward" in vars(module):
            continue
        forward = _fused_forward(module, kernels)
        if forward is None:
            refused[kind] = "its variant has no fused form"
        elif reason := _why_different(module, forward, kernels):
            refused[kind] = f"{name} {reason}"
        else:
            modules.setdefault(kind, []).append((module, forward))
    fused: Counter[str] = Counter()
    for kind, pairs in modules.items():
        if kind in refused:
            continue
        fused[kind] = len(pairs)
        for module, forward in pairs:
            module.forward = forward
    return FusedLayers(fused, refused)


def _fused_forward(module: nn.Module, kernels: Kernels) -> Callable[..., Any] | None:
    """Return the forward pass of a module of a known class; None if its variant is unknown."""
    part: Any = module
    match = _FUSED_CLASS.fullmatch(type(module).__name__)
    assert match is not None
    if match[2] == "RMSNorm":
        if match[1].startswith("Gemma"):
            return lambda inputs: kernels.rms_norm(inputs, part.weight, part.eps, 1.0, "gemma")
        return lambda inputs: kernels.rms_norm(inputs, part.weight, part.variance_epsilon, 0.0, "llama")
    if match[2] == "MLP":
        activation = getattr(part, "act_fn", None) or getattr(part, "activation_fn", None)
        if type(activation).__name__ not in ("SiLU", "SiLUActivation"):
            return None
        if hasattr(part, "gate_up_proj"):
            return lambda inputs: part.down_proj(kernels.silu_mul(*part.gate_up_proj(inputs).chunk(2, dim=-1)))
        return lambda inputs: part.down_proj(kernels.silu_mul(part.gate_proj(inputs), part.up_proj(inputs)))
    plain = type(module).forward
    if not isinstance(plain, FunctionType) or plain.__closure__ or _ROTARY not in plain.__code__.co_names:
        return None
    # The class's own code, in which one name stands for another function.
    namespace = {**plain.__globals__, _ROTARY: kernels.rotate}
    rotating = FunctionType(plain.__code__, namespace, plain.__name__, plain.__defaults__)
    rotating.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(rotating, module)


def _why_different(module: nn.Module, forward: Callable[..., Any], kernels: Kernels) -> str:
    """Return why a fused forward pass does not reproduce the one of the module's class; empty if it does."""
    part: Any = module
    plain: Callable[..., Any] = partial(type(module).forward, module)
    tensor = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    fused = forward
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(tensor.device, tensor.dtype)

    if isinstance(forward, MethodType):
        plain, fused = type(module).forward.__globals__[_ROTARY], kernels.rotate
        width, config = part.head_dim, part.config
        parameters: Any = getattr(config, "rope_parameters", None) or {}
        rotated = int(width * parameters.get("partial_rotary_factor", 1.0))
        angles = torch.rand(1, _TOKENS, rotated // 2, generator=random).repeat(1, 1, 2) * 6.3
        heads = (config.num_attention_heads, config.num_key_value_heads)
        inputs = [draw(1, _TOKENS, count, width).transpose(1, 2) for count in heads]
        inputs += [function(angles).to(tensor.device, tensor.dtype) for function in (torch.cos, torch.sin)]
        differentiated = 2
    else:
        projection = getattr(part, "gate_proj", None) or getattr(part, "gate_up_proj", None)
        inputs = [draw(1, _TOKENS, tensor.shape[0] if projection is None else projection.in_features)]
        differentiated = 1
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.enable_grad():
        try:
            expected, actual = (_values(way, inputs, differentiated, trained) for way in (plain, fused))
        except Exception as error:  # noqa: BLE001 - of the kernels' compiler, or of another signature
            return f"cannot be fused ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
    difference = _largest_difference(expected, actual)
    if difference <= _TOLERANCES.get(tensor.dtype, _ROUNDED_TOLERANCE):  # not so for NaN
        return ""
    return f"differs from its class by {difference:.2g}, relative to the largest output or gradient"


def _values(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    differentiated: int,
    trained: Sequence[Tensor],
) -> list[Tensor]:
    """Return a function's outputs, and the gradients of inputs and parameters for the same random gradients of the
    outputs."""
    random = torch.Generator().manual_seed(1)
    leaves = [tensor.clone().requires_grad_() for tensor in inputs[:differentiated]]
    # Copies, because a kernel may overwrite its inputs.
    output = function(*[leaf.clone() for leaf in leaves], *inputs[differentiated:])
    outputs = [output] if isinstance(output, Tensor) else list(output)
    values = [each.detach().clone() for each in outputs]
    gradients = [torch.randn(each.shape, generator=random).to(each.device, each.dtype) for each in outputs]
    by = torch.autograd.grad(outputs, [*leaves, *trained], gradients, allow_unused=True)
    return values + [tensor for tensor in by if tensor is not None]


def _largest_difference(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """Return the largest difference of two lists of tensors, each relative to the largest expected value; infinite if
    they are of different lengths."""
    if len(expected) != len(actual):
        return float("inf")
    differences = [
        (one.float() - other.float()).abs().max() / one.float().abs().max().clamp(min=1e-12)
        for one, other in zip(expected, actual, strict=True)
    ]
    return float(torch.stack(differences).max())


def describe_fused(layers: FusedLayers) -> str:
    """Say which layers are fused, and which are not and why."""
    parts = [f"{count} {kind}" for kind, count in layers.fused.items()]
    text = f"liger-kernel computes {', '.join(parts)}" if parts else "no layers are fused"
    return "; ".join([text, *(f"not {kind}: {reason}" for kind, reason in layers.refused.items())])
