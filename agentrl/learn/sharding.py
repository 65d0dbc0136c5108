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
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from agentrl.core.errors import ModelError
from agentrl.engines.models import layers_of
from agentrl.learn.forward import HeadOutput, token_logprobs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


class ShardedForward(nn.Module):
    """`forward.token_logprobs` of a model whose weights lie in shards.

    This module is the root of the shards, because `token_logprobs` calls parts of the model separately.

    Args:
        model: model with its weights, on any device, whole or as shards (`ranks.shard_of`); its parameters become
            `DTensor`s.
        mesh: see `ProcessGroup.mesh`.
        masters: whether full weights are trained, so that the shards are float32.
        offload: whether the shards stay in main memory, with their gradients and optimizer states; layers go to the
            mesh's device while they compute.

    Raises:
        ModelError: FSDP2 cannot shard the model.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh, *, masters: bool, offload: bool = False) -> None:
        super().__init__()
        self.model: Any = model
        dtypes = {parameter.dtype for parameter in self.model.parameters()}
        if masters and len(dtypes) > 1:
            raise _refused(model, f"it has parameters of several dtypes, {', '.join(sorted(map(str, dtypes)))}")
        policy = MixedPrecisionPolicy()
        if masters and dtypes != {torch.float32}:
            policy = MixedPrecisionPolicy(
                param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            )
        place = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
        shards = _without_data(self.model)
        try:
            for module in [*layers_of(self.model), self]:
                if masters:
                    for parameter in module.parameters():
                        if not isinstance(parameter, DTensor):
                            parameter.data = parameter.data.float()
                sharded: Any = fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=place)
                # Gradients are summed, not averaged, over ranks: the loss is already divided by the normalizer of the
                # whole step.
                sharded.set_gradient_divide_factor(1.0)
                sharded.set_force_sum_reduction_for_comms(True)
                # An expert that got no token on this rank may have a gradient on another rank.
                sharded.set_reduce_scatter_unused_params(True, recurse=False)
        except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
            raise _refused(model, str(error)) from error
        if masters:
            widened = {shard: nn.Parameter(shard.detach().float()) for shard in shards.values()}
            shards = {name: widened[shard] for name, shard in shards.items()}
        self.model.load_state_dict(shards, strict=False, assign=True)

    def forward(self, *arguments: Any, **settings: Any) -> HeadOutput:
        """See `forward.token_logprobs`; calls it with the model and these arguments."""
        # Clones, because FSDP attaches hooks to the returned tensors and cannot do so for views.
        return token_logprobs(self.model, *arguments, **settings).map(Tensor.clone)

    def __call__(self, *arguments: Any, **settings: Any) -> HeadOutput:
        """Gather weights, call `forward`, and add up gradients."""
        output: HeadOutput = super().__call__(*arguments, **settings)
        if not torch.is_grad_enabled():
            root: Any = self
            root.reshard()  # otherwise the root's weights stay gathered and outdated until a backward pass
        return output


def _without_data(model: nn.Module) -> dict[str, nn.Parameter]:
    """Replace parameters that are shards already, which FSDP does not take, by ones without data; return the shards by
    name."""
    named = model.named_parameters(remove_duplicate=False)
    shards: dict[str, nn.Parameter] = {name: each for name, each in named if isinstance(each, DTensor)}
    empty = {
        parameter: nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in shards.values()  # keeps tied parameters tied
    }
    for name, parameter in shards.items():
        path, _, last = name.rpartition(".")
        model.get_submodule(path).register_parameter(last, empty[parameter])
    return shards


def _refused(model: PreTrainedModel, reason: str) -> ModelError:
    kind = type(model).__name__
    return ModelError(f"{kind} cannot be sharded: {' '.join(reason.split())}; set trainer.sharding = 'none'")
