"""Adapters of policies on a base model: which modules they adapt, and how PEFT adds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import torch
import torch.nn.functional as F
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import Tensor, nn

from agentrl.config.policies import LoraConfig
from agentrl.core.errors import ConfigError, ModelError
from agentrl.engines.models import computing_in_float32
from agentrl.engines.weights.reading import adaptable_layers
from agentrl.learn.forward import FORWARD_ERRORS
from agentrl.learn.ranks import gather_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ROUTERS = {"router", "gate", "shared_expert_gate", "indexer"}
"""Name parts of modules that choose experts, or the keys of sparse attention; adapted only if named explicitly."""


def weight_matrices(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of the weights between embeddings and output projection, by module; norms and biases are left
    out. Modules that share a weight, as in Zamba2, count it each, because each has an adapter."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    tables = {id(module.weight) for module in (*ends, model.get_output_embeddings()) if module is not None}
    parameters = model.named_parameters(remove_duplicate=False)
    return {
        name.removesuffix(".weight"): parameter.shape
        for name, parameter in parameters
        if parameter.ndim > 1 and id(parameter) not in tables and not name.endswith("bias")
    }


def adaptable_modules(model: PreTrainedModel) -> list[str]:
    """List the layers that can be served under an adapter, and that PEFT does not take for experts.

    Raises:
        ModelError: the model cannot be forwarded. On the meta device, any error of a pass that needs data.
    """
    mistaken: dict[str, bool] = {}
    try:
        with computing_in_float32(model, gather_float32):  # shards are gathered in float32
            layers = adaptable_layers(model)
    except FORWARD_ERRORS as error:
        if model.device.type == "meta":
            raise
        raise ModelError(f"{type(model).__name__} cannot be forwarded as a causal LM: {error!r}") from error
    for last in {_last(name) for name in layers}:
        adapter = peft.LoraConfig(target_modules=[last])
        try:
            convert_peft_config_for_transformers(adapter, model, None)
        except ValueError:  # PEFT tried to adapt the experts' tensors, or did not find some names
            mistaken[last] = True
        else:
            mistaken[last] = set(adapter.target_modules or ()) != {last}
    return [name for name in layers if not (mistaken[_last(name)] or _read_by_kernel(model, name))]


def _read_by_kernel(model: PreTrainedModel, name: str) -> bool:
    """Whether a fused state-space kernel reads a layer's weight directly, bypassing an adapter; PEFT refuses those."""
    parent, _, last = name.rpartition(".")
    return last == "out_proj" and hasattr(model.get_submodule(parent), "ssm_state_size")


def adapter_targets(key: str, lora: LoraConfig, can: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Return the layers that get an adapter.

    Raises:
        ConfigError: there are none, or a named layer cannot be trained and served; the message lists the possible ones.
    """
    kind, names = type(model).__name__, [name for name, _ in model.named_modules()]
    if not can:
        raise ConfigError(
            f"{key}: {kind} has no linear layers on which an adapter can be trained and served. Remove the section to "
            "train all weights"
        )
    matches = {
        target: [name for name in names if name == target or name.endswith(f".{target}")]
        for target in lora.target_modules
    }
    for target, layers in matches.items():
        strange = [name for name in layers if name not in can]
        if strange or not layers:
            problem = (
                f"is {strange[0]}, on which no adapter can be both trained and served" if layers else "is not a layer"
            )
            raise ConfigError(
                f"{key}.target_modules: {target!r} {problem} of {kind}; adaptable layers: "
                f"{', '.join(dict.fromkeys(map(_last, can)))}. Remove target_modules to adapt all of them"
            )
    layer_names = {name for layers in matches.values() for name in layers}
    if not matches:
        layer_names = {name for name in can if not ROUTERS.intersection(name.split("."))}
    return [name for name in can if name in layer_names]


def describe_adapter(lora: LoraConfig, targets: Sequence[str], matrices: Mapping[str, torch.Size]) -> str:
    trained = sum(lora.rank * sum(matrices[name]) for name in targets)  # rank by inputs, outputs by rank
    text = f"adapters of rank {lora.rank}: {trained:,} trained parameters on "
    without = dict.fromkeys(".".join(name.split(".")[-2:]) for name in matrices if name not in set(targets))
    if not without:
        return f"{text}all linear layers"
    share = sum(matrices[name].numel() for name in targets) / sum(shape.numel() for shape in matrices.values())
    names = ", ".join(dict.fromkeys(map(_last, targets)))
    return f"{text}{names}, {share:.1%} of the linear weights; not on {', '.join(without)}"


def short_names(targets: Sequence[str], model: PreTrainedModel) -> list[str]:
    """Shorten targets to their last names if no other module has that name."""
    other_names = {_last(name) for name, _ in model.named_modules() if name not in set(targets)}
    return list(dict.fromkeys(name if _last(name) in other_names else _last(name) for name in targets))


def _last(name: str) -> str:
    return name.rpartition(".")[2]


class _AdaptedProduct(torch.autograd.Function):
    """Computes x W' + bias + s x A' B' of rows x, with frozen W and bias. The matrix products apply the scale s and add
    the terms up, also in the backward pass, so no further pass over inputs or outputs is needed."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        inner = rows @ down.t()
        ctx.save_for_backward(rows, weight, down, up, inner)
        ctx.scaling = scaling
        return F.linear(rows, weight, bias).addmm_(inner, up.t(), alpha=scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, outputs: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inner = ctx.saved_tensors
        by_inner = outputs @ up
        of_inputs = None
        if ctx.needs_input_grad[0]:
            of_inputs = (outputs @ weight).addmm_(by_inner, down, alpha=ctx.scaling)
        # beta = 0: the first argument is not read.
        of_down = torch.addmm(torch.empty_like(down), by_inner.t(), rows, beta=0, alpha=ctx.scaling)
        of_up = torch.addmm(torch.empty_like(up), outputs.t(), inner, beta=0, alpha=ctx.scaling)
        return of_inputs, None, None, of_down, of_up, None


class AdaptedLinear(peft.tuners.lora.Linear):
    """PEFT's linear layer with an adapter, computed by `_AdaptedProduct`."""

    def update_layer(self, *args: Any, **kwargs: Any) -> None:
        """Add an adapter of the whole layer, whose weights may be shards: PEFT takes those of a mesh of two dimensions
        for tensor parallelism, and would make an adapter of one shard."""
        base: Any = self.get_base_layer()
        self.in_features, self.out_features = base.in_features, base.out_features
        super().update_layer(*args, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the outputs, [..., outputs], of inputs, [..., inputs]."""
        (adapter,) = self.active_adapters
        base: Any = self.get_base_layer()
        if self.disable_adapters or adapter not in self.lora_A:  # it may be on other layers alone
            bare: Tensor = base(x, *args, **kwargs)
            return bare
        down: Any = self.lora_A[adapter].weight
        up: Any = self.lora_B[adapter].weight
        if down.dtype != x.dtype or type(base) is not nn.Linear or base.weight.requires_grad:
            result: Tensor = super().forward(x, *args, **kwargs)
            return result
        product: Any = _AdaptedProduct.apply
        # Some models change a layer's output in place, which a function's own view does not allow.
        output: Tensor = product(x.flatten(0, -2), base.weight, base.bias, down, up, self.scaling[adapter])
        return output.view(*x.shape[:-1], -1)


def add_adapter(
    base: PreTrainedModel,
    peft_model: peft.PeftModel | None,
    adapter: str,
    lora: LoraConfig,
    targets: list[str],
    path: Path,
) -> peft.PeftModel:
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT divides it by the rank; fractions are fine
        target_modules=targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(path),
    )
    config._register_custom_module({nn.Linear: AdaptedLinear})
    try:
        if peft_model is None:
            return peft.get_peft_model(base, config, adapter_name=adapter)
        peft_model.add_adapter(adapter, config)
    except ValueError as error:
        raise ModelError(
            f"{path}: PEFT cannot put an adapter on {', '.join(targets)} ({error}); name fewer of them in "
            "policies.NAME.lora.target_modules"
        ) from error
    return peft_model
