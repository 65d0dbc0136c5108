"""LoRA adapters from disk, in PEFT's files: read and checked before any engine serves them.

Owns: the checks an adapter must pass. Does not decide who serves it; never unpickles.
"""

from __future__ import annotations

import errno
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from agentrl.core.files import WEIGHT_FILES
from agentrl.engines.child_process import MAKE_ROOM
from agentrl.engines.probe import Probe, read_probe
from agentrl.engines.weight_files import read_weights, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.records import WeightsRef

_PREFIX = "base_model.model."
_CONFIG_BYTES = 1 << 16
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules"),
    *("task_type", "use_rslora"),
}
"""Keys of PEFT's configuration that ask for nothing but plain LoRA. Another one that is set would be left out by the
embedded engine, or refused by vLLM."""


class _Config(msgspec.Struct, kw_only=True):
    peft_type: Literal["LORA"]
    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: float
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] | None = True
    """The other ways begin by changing the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter read from PEFT files: per module A `[rank, in]` and B `[out, rank]`, B scaled by alpha / rank."""

    rank: int
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    probe: Probe | None


def read_adapter(weights: WeightsRef) -> AdapterFile:
    """Read and check an adapter directory in PEFT's format.

    Raises:
        EngineError: the files are damaged, not the published ones, or of a kind that is not served.
    """
    content = _read_config(weights)
    file = read_weights(weights, beside=content)
    config = _decode_config(weights, content)
    rank = config.r
    scale = config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in file.tensors.items():
        module, _, kind = key.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(_PREFIX) or kind not in ("lora_A", "lora_B"):
            raise refusal(weights, f"{key} is not a LoRA matrix of a linear layer")
        if tensor.ndim != 2:
            raise refusal(weights, f"{key} has shape {tuple(tensor.shape)}, which is no matrix")
        halves.setdefault(module, {})[kind] = tensor
    matrices = {}
    for module, pair in halves.items():
        if len(pair) != 2:
            raise refusal(weights, f"{module} has only {next(iter(pair))}")
        if pair["lora_A"].shape[0] != rank or pair["lora_B"].shape[1] != rank:
            found = (tuple(pair["lora_A"].shape), tuple(pair["lora_B"].shape))
            raise refusal(weights, f"{module} has shapes {found}, which are not of the configured rank {rank}")
        matrices[module] = (pair["lora_A"], scaled := pair["lora_B"] * scale)
        if not bool(scaled.isfinite().all()):
            raise refusal(weights, f"{module} has values that are not finite once they are scaled by {scale:g}")
    if not matrices:
        raise refusal(weights, "it has no matrices")
    return AdapterFile(rank=rank, matrices=matrices, probe=read_probe(weights, file))


def read_matrices(weights: WeightsRef) -> Mapping[str, Tensor]:
    """The tensors of an adapter's file as they are, after its digest was checked.

    Raises:
        EngineError: the files are damaged, or not the published ones.
    """
    return read_weights(weights, beside=_read_config(weights)).tensors


def copy_adapter(weights: WeightsRef, directory: Path) -> WeightsRef:
    """Copy an adapter's files, and nothing that lies beside them, into a directory; where they lie now.

    Raises:
        EngineError: a file cannot be read, or there is no room for its copy.
    """
    directory.mkdir(exist_ok=True)
    for name in WEIGHT_FILES["adapter"]:
        try:
            shutil.copyfile(Path(weights.path) / name, directory / name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise refusal(weights, f"{weights.path}/{name} cannot be read ({error.strerror})") from error
            reason = (
                f"there is no room for a copy of {weights.path}/{name} in {directory} ({error.strerror}); {MAKE_ROOM}"
            )
            raise refusal(weights, reason) from error
    return replace(weights, path=str(directory))


def _read_config(weights: WeightsRef) -> bytes:
    path = Path(weights.path) / WEIGHT_FILES["adapter"][1]
    try:
        with path.open("rb") as file:
            content = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise refusal(weights, f"{path} cannot be read ({error.strerror})") from error
    if len(content) > _CONFIG_BYTES:
        raise refusal(weights, f"{path} is longer than {_CONFIG_BYTES} bytes")
    return content


def _decode_config(weights: WeightsRef, content: bytes) -> _Config:
    try:
        config = msgspec.json.decode(content, type=_Config)
        found = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise refusal(weights, f"its configuration is not that of a LoRA adapter that is served ({error})") from error
    used = sorted(ascii(key) for key, value in found.items() if value and key not in _HARMLESS)
    if used:
        raise refusal(weights, f"plain LoRA is served, without {', '.join(used)}")
    return config


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


def adaptable_layers(model: PreTrainedModel) -> list[str]:
    """Names of the linear layers that can be served under adapters: those the decoder calls once, over all tokens.

    The output projection is none of them, nor are embeddings, experts whose weights are one tensor, and layers that see
    a part of the tokens. Tried with the model's own attention, which must be set.
    """
    rows, width = 5, 7
    seen: dict[str, list[tuple[int, ...]]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def note(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                seen.setdefault(name, []).append(tuple(inputs[0].shape[:-1]))

            hooks.append(module.register_forward_pre_hook(note))
    ids = torch.arange(rows * width, device=model.device).view(rows, width) % int(
        model.config.get_text_config().vocab_size
    )
    with torch.inference_mode():
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    head = model.get_output_embeddings()
    return [
        name
        for name, shapes in seen.items()
        if len(shapes) == 1
        and math.prod(shapes[0]) == rows * width
        and shapes[0][0] in (rows, rows * width)
        and model.get_submodule(name) is not head
    ]


def linear_layer(model: PreTrainedModel, name: str) -> nn.Linear | None:
    """The linear layer of that name, also where an engine has wrapped it; None where there is none."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    layer = getattr(layer, "base", layer)
    return layer if isinstance(layer, nn.Linear) else None
