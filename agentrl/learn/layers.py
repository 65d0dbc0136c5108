"""How the layers of a model compute: recomputed in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from transformers.modeling_layers import GradientCheckpointingLayer

from agentrl.core.errors import ModelError
from agentrl.learn.forward import RoutingReplay

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def recompute_layers(model: PreTrainedModel, replay: RoutingReplay | None) -> None:
    """Make each layer keep only its input for the backward pass, and recompute the rest there.

    Raises:
        ModelError: the architecture does not support it.
    """
    # Layers draw no random numbers, so no random state has to be restored.
    settings: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if replay is not None:
        settings["context_fn"] = replay.contexts
    try:
        model.gradient_checkpointing_enable(settings)
    except ValueError as error:
        raise ModelError(
            f"{type(model).__name__} cannot recompute its layers ({error}); set trainer.recompute = false"
        ) from error
    module: nn.Module = model
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # transformers recomputes only layers in training. While a layer computes, it is not: no dropout.
            layer.training = True
            layer.register_forward_pre_hook(partial(_set_training, False), with_kwargs=True)
            layer.register_forward_hook(partial(_set_training, True), with_kwargs=True, always_call=True)


def _set_training(training: bool, layer: nn.Module, *_: object) -> None:
    layer.training = training
