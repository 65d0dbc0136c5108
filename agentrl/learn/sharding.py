"""Shards a model over the ranks with FSDP2: each holds a part of every parameter, its gradient and its optimizer state.

Layers are gathered one at a time while they compute; the parts outside the layers (embeddings, output projection, last
norm) are gathered for the whole pass. Where all weights are trained, the shards are the float32 masters, gathered in
the model's dtype; under adapters, base and adapters are each sharded in their own dtype. Gradients are added up, not
averaged, in float32. With a mesh of two dimensions, each row of the mesh holds the weights once (HSDP).

Owns: the units and dtypes of gathering. Does not own: the group and its mesh (`ranks.py`), which parameters are trained
(`models.py`). Invariant: all ranks call a sharded model equally often, in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.core.errors import ModelError
from agentrl.learn.forward import HeadOutput, token_logprobs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class ShardedForward(nn.Module):
    """`forward.token_logprobs` of a model whose weights lie in shards.

    This module is the root of the shards, because `token_logprobs` calls parts of the model separately.

    Args:
        model: model with its weights in memory, on any device; its parameters become `DTensor`s on the mesh's device.
        mesh: see `ProcessGroup.mesh`.
        masters: whether full weights are trained, so that the shards are float32.

    Raises:
        ModelError: FSDP2 cannot shard the model.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, *, masters: bool) -> None:
        super().__init__()
        self.model: Any = model
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if masters and len(dtypes) > 1:
            raise _refused(model, f"it has parameters in {', '.join(sorted(map(str, dtypes)))}")
        policy = MixedPrecisionPolicy()
        if masters and dtypes != {torch.float32}:
            policy = MixedPrecisionPolicy(
                param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        try:
            for module in [*layers_of(self.model), self]:
                if masters:
                    for parameter in module.parameters():
                        if not isinstance(parameter, DTensor):
                            parameter.data = parameter.data.float()
                sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy)
                # Ranks divide nothing: the loss is divided by the constant of the whole step.
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
                # An expert that no token of this rank reached has a gradient on another one.
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            raise _refused(model, str(error)) from error

    def forward(self, *arguments: Any, **settings: Any) -> HeadOutput:
        """See `forward.token_logprobs`; calls it with the model and these arguments."""
        # Not views: FSDP hangs its hooks on what is returned.
        return HeadOutput(*(column.clone() for column in token_logprobs(self.model, *arguments, **settings)))

    def __call__(self, *arguments: Any, **settings: Any) -> HeadOutput:
        """Gather weights, call `forward`, and add up gradients."""
        output: HeadOutput = super().__call__(*arguments, **settings)
        if not torch.is_grad_enabled():
            root: Any = self
            root.reshard()  # else the weights of the root stay whole, and as they are, until a backward pass
        return output


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, only the outermost ones."""
    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    return [layer for child in model.children() for layer in layers_of(child)]


def _refused(model: PreTrainedModel, reason: str) -> ModelError:
    kind = type(model).__name__
    return ModelError(f"{kind} cannot be sharded: {' '.join(reason.split())}; set trainer.sharding = 'none'")
