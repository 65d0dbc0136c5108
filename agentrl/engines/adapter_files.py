"""LoRA adapters from disk, in PEFT's files: read and checked before any engine serves them.

Owns: the checks an adapter must pass. Does not decide who serves it; never unpickles.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from agentrl.engines.weight_files import read_weights, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.records import WeightsRef

_PREFIX = "base_model.model."
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "target_parameters",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter read from PEFT files: per module A `[rank, in]` and B `[out, rank]`, B scaled by alpha / rank."""

    rank: int
    matrices: Mapping[str, tuple[Tensor, Tensor]]


def read_adapter(weights: WeightsRef) -> AdapterFile:
    """Read and check an adapter directory in PEFT's format.

    Raises:
        EngineError: the files are damaged, not the published ones, or of a kind that is not served.
    """
    tensors = read_weights(weights)
    try:
        config = json.loads((Path(weights.path) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(weights, f"{weights.path}/adapter_config.json cannot be read ({error})") from error
    if config.get("peft_type") != "LORA":
        raise refusal(weights, f"its peft_type is {config.get('peft_type')!r}; LORA is served")
    used = [key for key in _UNSUPPORTED if config.get(key)]
    if used or config.get("bias", "none") != "none":
        raise refusal(weights, f"plain LoRA is served, without {', '.join(used) or 'bias'}")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        module, _, kind = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(_PREFIX) or kind not in ("lora_A", "lora_B"):
            raise refusal(weights, f"{key} is not a LoRA matrix of a linear layer")
        halves.setdefault(module, {})[kind] = tensor
    matrices = {}
    for module, pair in halves.items():
        if len(pair) != 2:
            raise refusal(weights, f"{module} has only {next(iter(pair))}")
        if pair["lora_A"].shape[0] != rank or pair["lora_B"].shape[1] != rank:
            found = (tuple(pair["lora_A"].shape), tuple(pair["lora_B"].shape))
            raise refusal(weights, f"{module} has shapes {found}, which are not of the configured rank {rank}")
        matrices[module] = (pair["lora_A"], pair["lora_B"] * scale)
    return AdapterFile(rank=rank, matrices=matrices)


def check_adapter(weights: WeightsRef, adapter: AdapterFile, model: PreTrainedModel, *, max_rank: int) -> None:
    """Refuse an adapter that does not fit a model; of the model, only the shapes are looked at.

    Raises:
        EngineError: wrong rank, module or shape.
    """
    if adapter.rank > max_rank:
        raise refusal(weights, f"its rank is {adapter.rank}, the engine was started for at most {max_rank}")
    for name, (down, up) in adapter.matrices.items():
        layer = linear_layer(model, name)
        if layer is None:
            raise refusal(weights, f"the model has no linear layer {name}")
        if down.shape[1] != layer.in_features or up.shape[0] != layer.out_features:
            found = (tuple(down.shape), tuple(up.shape))
            raise refusal(
                weights, f"{name} has shapes {found}, the layer is {layer.in_features} → {layer.out_features}"
            )


def linear_layer(model: PreTrainedModel, name: str) -> nn.Linear | None:
    """The linear layer of that name, also where an engine has wrapped it; None where there is none."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    layer = getattr(layer, "base", layer)
    return layer if isinstance(layer, nn.Linear) else None
