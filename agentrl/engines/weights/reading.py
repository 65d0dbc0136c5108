"""Published weights from disk, read and checked before an engine serves them.

Owns the checks that full weights and LoRA adapters must pass: digest, names, shapes, dtypes, finite values. Does not
decide which version serves; never unpickles.

`predict_engine_memory` predicts the memory of an engine from the shapes in a model directory, without loading weights.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal
from weakref import WeakValueDictionary

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import load_file
from torch import nn

from agentrl.core.errors import EngineStorageError, ModelError, version_refused_error
from agentrl.core.files import SAFETENSORS_LENGTH_BYTES, WEIGHT_FILES, read_safetensors_header
from agentrl.core.machine import Memory, gpus, machine_memory
from agentrl.engines.canary import CANARY_KEY, Canary, read_canary
from agentrl.engines.meta import runnable_on_meta
from agentrl.engines.models import (
    ONE_LOAD_AT_A_TIME,
    LayerKinds,
    dtype_name,
    kv_bytes_per_token,
    model_dtype,
    outermost_layers,
    quote_first_names,
    read_meta_model,
    state_bytes_per_slot,
)
from agentrl.engines.process import MAKE_ROOM
from agentrl.engines.stored_tensors import checkpoint_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.records import WeightsRef

_WEIGHT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_PEFT_PREFIX = "base_model.model."
_CONFIG_BYTES = 1 << 16
_HARMLESS = {
    *("auto_mapping", "base_model_name_or_path", "bias", "eva_config", "exclude_modules", "inference_mode"),
    *("init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core"),
    *("peft_type", "peft_version", "qalora_group_size", "r", "revision", "runtime_config", "target_modules"),
    *("task_type", "use_rslora"),
}
"""Keys of PEFT's configuration that keep an adapter plain LoRA. Any other key that is set would be ignored by the
embedded engine, or refused by vLLM."""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A version's safetensors file after its checks."""

    tensors: dict[str, Tensor]
    metadata: dict[str, str]


class _StoredTensor(msgspec.Struct):
    """A tensor in a safetensors header."""

    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    data_offsets: tuple[int, int]


def check_size(weights: WeightsRef, max_numbers: int) -> int:
    """Check by its header and size that a version's safetensors file is not larger than what it is for.

    Args:
        weights: the version, whose files may come from others.
        max_numbers: maximum number of numbers in its tensors: `count_numbers` or `count_adapter_numbers`.

    Returns:
        Size of the file in bytes, as its header describes it.

    Raises:
        EngineError: the file has no header, or it or the numbers that it describes are larger.
        OSError: the file cannot be read.
    """
    path = Path(weights.path) / WEIGHT_FILES[weights.kind][0]
    try:
        header = read_safetensors_header(path)
        stored = msgspec.json.decode(header[SAFETENSORS_LENGTH_BYTES:], type=dict[str, msgspec.Raw])
        tensors = [
            msgspec.json.decode(raw, type=_StoredTensor) for name, raw in stored.items() if name != "__metadata__"
        ]
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise version_refused_error(weights, f"{path} is damaged (its header: {error})") from error
    numbers = sum(math.prod(tensor.shape) for tensor in tensors)
    size = max((tensor.data_offsets[1] for tensor in tensors), default=0)
    if numbers > max_numbers or size > max_numbers * torch.float64.itemsize:
        raise version_refused_error(
            weights,
            f"{path} describes {numbers:,} numbers in {size:,} bytes, but what it is for has at most {max_numbers:,} "
            "numbers",
        )
    size += len(header)
    if (actual_size := path.stat().st_size) > size:
        raise version_refused_error(
            weights, f"{path} is damaged ({actual_size:,} bytes, of which its header describes {size:,})"
        )
    return size


def count_numbers(model: PreTrainedModel) -> int:
    """Count the numbers that a full version of a model may have: those of its state, and those of its base's files, of
    which a version keeps the tensors that the model does not have."""
    count: int = sum(tensor.numel() for tensor in model.state_dict().values())
    with suppress(ModelError, OSError, SafetensorError, ValueError, KeyError):
        stored = checkpoint_tensors(Path(str(model.name_or_path)))
        count += sum(math.prod(tensor.get_shape()) for tensor in stored.values())
    return count


def count_adapter_numbers(model: PreTrainedModel, max_rank: int) -> int:
    """Count the numbers that an adapter on every matrix of a model has at most, at four times the rank: of one with a
    slightly larger rank, `check_adapter` names the rank."""
    matrices: list[tuple[int, ...]] = [tuple(each.shape) for each in model.parameters() if each.ndim > 1]
    return sum(math.prod(shape[:-2]) * (shape[-2] + shape[-1]) * 4 * max_rank for shape in matrices)


class HeldWeights:
    """Full weights of a version that a trainer in this process still has. Engines copy them instead of reading the
    version's file, whose digest was computed from them.

    Args:
        metadata: metadata of the file.
        tensors: yields the tensors.
    """

    def __init__(self, metadata: dict[str, str], tensors: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self._metadata = metadata
        self._tensors: Callable[[], Iterator[tuple[str, Tensor]]] | None = tensors
        self._lock = Lock()

    def copy(self) -> WeightFile | None:
        """Return a copy on the CPU; None if the trainer has changed the weights."""
        with self._lock:
            if self._tensors is None:
                return None
            tensors = {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors()}
        return WeightFile(tensors, self._metadata)

    def withdraw(self) -> None:
        """Let no engine copy the weights from now on; waits for copies in progress."""
        with self._lock:
            self._tensors = None


_held_weights: WeakValueDictionary[str, HeldWeights] = WeakValueDictionary()
"""Weights that trainers in this process have, by the digest of their version."""


def hold_weights(
    sha256: str, metadata: dict[str, str], tensors: Callable[[], Iterator[tuple[str, Tensor]]]
) -> HeldWeights:
    """Let engines in this process copy the weights of a published version, as long as the result is referenced."""
    held = _held_weights[sha256] = HeldWeights(metadata, tensors)
    return held


def is_from_trainer(weights: WeightsRef) -> bool:
    """Whether a version has a canary, so that a trainer published it. Nothing changes such a file in place, so it needs
    no copy; if someone does, the canary check fails.

    Raises:
        EngineError: the file cannot be read.
    """
    return CANARY_KEY in read_metadata(weights)


def read_weights(weights: WeightsRef, *, max_numbers: int, config: bytes = b"", maps: bool = False) -> WeightFile:
    """Read a version's safetensors file after checking its size, and its digest, which also covers the bytes of its
    `config`. A trainer in this process gives the tensors instead, if it still has them.

    Args:
        weights: the version.
        max_numbers: see `check_size`.
        config: content of the version's other file.
        maps: whether the file, which no one changes, is mapped into memory; otherwise it is read.

    Raises:
        EngineError: the file is missing, damaged, too large, or not the one whose digest was published; or a tensor is
            of a wrong dtype or has a value that is not finite.
    """
    held = _held_weights.get(weights.sha256) if weights.kind == "full" else None
    file = None if held is None else held.copy()
    if file is None:
        file = _read_file(weights, max_numbers, config, maps=maps)
    for key, tensor in file.tensors.items():
        if tensor.dtype not in _WEIGHT_TYPES:
            raise version_refused_error(
                weights, f"{key} has dtype {tensor.dtype}; float32, bfloat16 or float16 is needed"
            )
        if not _is_finite(tensor):
            raise version_refused_error(weights, f"{key} has values that are not finite")
    return file


def _read_file(weights: WeightsRef, max_numbers: int, config: bytes, *, maps: bool) -> WeightFile:
    path = Path(weights.path) / WEIGHT_FILES[weights.kind][0]
    content, digest = b"", hashlib.sha256()
    try:
        size = check_size(weights, max_numbers)
        with path.open("rb") as file:
            if not maps:
                content = file.read(size)
                digest.update(content)
            hashlib.file_digest(file, lambda: digest)
    except OSError as error:
        raise version_refused_error(weights, f"{error.filename or path} cannot be read ({error.strerror})") from error
    digest.update(config)
    if digest.hexdigest() != weights.sha256:
        description = f"{path} and its configuration" if config else path
        raise version_refused_error(
            weights, f"the SHA-256 digest of {description} is {digest.hexdigest()}, but {weights.sha256} was published"
        )
    try:
        tensors = load_file(path) if maps else load_safetensors(content)
    except OSError as error:
        raise version_refused_error(weights, f"{path} cannot be read ({error.strerror})") from error
    except SafetensorError as error:
        raise version_refused_error(weights, f"{path} is damaged ({error})") from error
    if maps:
        return WeightFile(tensors, read_metadata(weights))
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])  # safetensors has validated the header
    return WeightFile(tensors, header.get("__metadata__") or {})


def _is_finite(tensor: Tensor) -> bool:
    """Whether all values are finite. `isfinite().all()` would take 30 times as long on a CPU."""
    return not tensor.numel() or bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


class _Header(msgspec.Struct):
    """The part of a safetensors header that does not describe tensors."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def read_metadata(weights: WeightsRef) -> dict[str, str]:
    """Read the metadata of a version's safetensors file from its header.

    Raises:
        EngineError: the file cannot be read.
    """
    path = Path(weights.path) / WEIGHT_FILES[weights.kind][0]
    try:
        header = msgspec.json.decode(read_safetensors_header(path)[SAFETENSORS_LENGTH_BYTES:], type=_Header)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise version_refused_error(weights, f"{path} cannot be read ({error})") from error
    return header.metadata


def map_weights_to_state(
    weights: WeightsRef, read: Mapping[str, Tensor], expected: Mapping[str, Tensor], model: PreTrainedModel
) -> Mapping[str, Tensor]:
    """Return the tensors of a full version under the names of the module's state, `expected`.

    A file in the architecture's hub layout (for example with separate experts) is converted as `from_pretrained` does.
    Tensors without data are matched as well.

    Raises:
        EngineError: a name or shape does not fit the model.
    """
    tensors = read if set(read) <= set(expected) else _convert_layout(weights, read, model)
    storages = {tensor.untyped_storage()._cdata for name, tensor in expected.items() if name in tensors}
    for name, tensor in expected.items():
        if name not in tensors:
            if tensor.untyped_storage()._cdata not in storages:  # a tied weight may be stored under its other name
                raise version_refused_error(weights, f"{name} is missing")
        elif tensors[name].shape != tensor.shape:
            shape, expected_shape = tuple(tensors[name].shape), tuple(tensor.shape)
            raise version_refused_error(weights, f"{name} has shape {shape}, but the model's is {expected_shape}")
    return tensors


def check_dtypes(weights: WeightsRef, read: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Refuse a trainer's weights whose dtype differs from the engine's, which would silently round them.

    Raises:
        EngineError: there are such weights; the message names the first tensor.
    """
    for name in read.keys() & expected.keys():
        published_dtype, compute_dtype = read[name].dtype, expected[name].dtype
        if published_dtype != compute_dtype:
            raise version_refused_error(
                weights,
                f"its trainer published {name} in {dtype_name(published_dtype)}, and the engine computes in "
                f"{dtype_name(compute_dtype)}; trainer and engine need the same model.dtype",
            )


def _convert_layout(weights: WeightsRef, read: Mapping[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    load: Any = type(model).from_pretrained
    is_offer = any(tensor.is_meta for tensor in read.values())
    try:
        with ONE_LOAD_AT_A_TIME:
            converted_model, report = load(
                None,
                config=model.config,
                state_dict=dict(read),
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # mismatches then appear in the loading report
                output_loading_info=True,
                **({"device_map": "meta"} if is_offer else {}),
            )
    except (ValueError, RuntimeError) as error:
        raise version_refused_error(weights, f"its tensors do not match the model ({error})") from error
    surplus = set(report["unexpected_keys"])
    if surplus:  # a version keeps the tensors of its base that the model does not have
        surplus -= checkpoint_tensors(Path(str(model.name_or_path))).keys()
    wrong = {
        "not those of the model": surplus,
        "missing": report["missing_keys"],
        "of a wrong shape": [key for key, *_ in report["mismatched_keys"]],
    }
    for problem, names in wrong.items():
        if names:
            raise version_refused_error(weights, f"tensors are {problem}: {quote_first_names(names)}")
    state: dict[str, Tensor] = converted_model.state_dict()
    return state


class _AdapterConfig(msgspec.Struct, kw_only=True):
    peft_type: Literal["LORA"]
    r: Annotated[int, msgspec.Meta(ge=1)]
    lora_alpha: float
    use_rslora: bool = False
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] | None = True
    """Initialization of the adapter; other values begin by changing the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """An adapter read from PEFT files: per module A `[rank, in]` and B `[out, rank]`."""

    rank: int
    scale: float
    """Factor of the product B A: alpha / rank, or alpha / √rank."""
    matrices: Mapping[str, tuple[Tensor, Tensor]]
    canary: Canary | None
    config: Mapping[str, Any]
    """The fields of `adapter_config.json`."""


def read_adapter(weights: WeightsRef, *, max_numbers: int) -> AdapterWeights:
    """Read and check an adapter directory in PEFT's format, whose file has at most so many numbers.

    Raises:
        EngineError: the files are damaged, not the published ones, or of a kind that is not served.
    """
    content = _read_config(weights)
    file = read_weights(weights, max_numbers=max_numbers, config=content)
    config = _decode_config(weights, content)
    rank = config.r
    scale = config.lora_alpha / (math.sqrt(rank) if config.use_rslora else rank)
    halves: dict[str, dict[str, Tensor]] = {}
    for key, tensor in file.tensors.items():
        module, _, kind = key.removeprefix(_PEFT_PREFIX).removesuffix(".weight").rpartition(".")
        if not key.startswith(_PEFT_PREFIX) or kind not in ("lora_A", "lora_B"):
            raise version_refused_error(weights, f"{key} is not a LoRA matrix of a linear layer")
        if tensor.ndim != 2:
            raise version_refused_error(weights, f"{key} has shape {tuple(tensor.shape)}, but a matrix is expected")
        halves.setdefault(module, {})[kind] = tensor
    matrices = {}
    for module, pair in halves.items():
        if len(pair) != 2:
            raise version_refused_error(weights, f"{module} has only {next(iter(pair))}")
        if not pair["lora_A"].shape[0] == pair["lora_B"].shape[1] == rank:
            shapes = (tuple(pair["lora_A"].shape), tuple(pair["lora_B"].shape))
            raise version_refused_error(
                weights, f"{module} has shapes {shapes}, which are not of the configured rank {rank}"
            )
        matrices[module] = (pair["lora_A"], pair["lora_B"])
        if not _is_finite(pair["lora_B"] * scale):
            raise version_refused_error(weights, f"{module} has values that are not finite when scaled by {scale:g}")
    if not matrices:
        raise version_refused_error(weights, "it contains no LoRA matrices")
    canary = read_canary(weights, file.metadata, file.tensors)
    return AdapterWeights(rank=rank, scale=scale, matrices=matrices, canary=canary, config=json.loads(content))


def read_adapter_tensors(weights: WeightsRef, *, max_numbers: int) -> Mapping[str, Tensor]:
    """Read the unchanged tensors of an adapter's file, after checking its size and digest.

    Raises:
        EngineError: the files are damaged, or not the published ones.
    """
    return read_weights(weights, max_numbers=max_numbers, config=_read_config(weights)).tensors


def copy_weight_files(weights: WeightsRef, directory: Path, *, max_numbers: int) -> WeightsRef:
    """Copy a version's files, and no others, into a directory; returns their new location.

    Raises:
        EngineError: a file cannot be read, is too large (see `check_size`), or there is no space for its copy.
    """
    directory.mkdir(exist_ok=True)
    for name in WEIGHT_FILES[weights.kind]:
        try:
            if name == WEIGHT_FILES[weights.kind][0]:
                check_size(weights, max_numbers)
            else:
                _read_config(weights)  # for its size
            shutil.copyfile(Path(weights.path) / name, directory / name)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise version_refused_error(
                    weights, f"{weights.path}/{name} cannot be read ({error.strerror})"
                ) from error
            reason = (
                f"there is no room for a copy of {weights.path}/{name} in {directory} ({error.strerror}); {MAKE_ROOM}"
            )
            raise version_refused_error(weights, reason, EngineStorageError) from error
    return replace(weights, path=str(directory))


def _read_config(weights: WeightsRef) -> bytes:
    path = Path(weights.path) / WEIGHT_FILES["adapter"][1]
    try:
        with path.open("rb") as file:
            content = file.read(_CONFIG_BYTES + 1)
    except OSError as error:
        raise version_refused_error(weights, f"{path} cannot be read ({error.strerror})") from error
    if len(content) > _CONFIG_BYTES:
        raise version_refused_error(weights, f"{path} is longer than {_CONFIG_BYTES} bytes")
    return content


def _decode_config(weights: WeightsRef, content: bytes) -> _AdapterConfig:
    try:
        config = msgspec.json.decode(content, type=_AdapterConfig)
        fields = msgspec.json.decode(content, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise version_refused_error(
            weights, f"its configuration is not that of a supported LoRA adapter ({error})"
        ) from error
    options = sorted(ascii(key) for key, value in fields.items() if value and key not in _HARMLESS)
    if options:
        raise version_refused_error(weights, f"only plain LoRA is supported, without {', '.join(options)}")
    return config


def check_adapter(weights: WeightsRef, adapter: AdapterWeights, model: PreTrainedModel, *, max_rank: int) -> None:
    """Refuse an adapter that does not fit a model, of which only the shapes matter.

    Raises:
        EngineError: a rank, module or shape does not fit, or a layer that its configuration targets has no matrices.
    """
    if adapter.rank > max_rank:
        raise version_refused_error(
            weights, f"its rank is {adapter.rank}, but the engine was started for at most {max_rank}"
        )
    for name, (down, up) in adapter.matrices.items():
        if (layer := linear_layer(model, name)) is None:
            raise version_refused_error(weights, f"the model has no linear layer {name}")
        inputs, outputs = layer.in_features, layer.out_features
        if (down.shape, up.shape) != ((adapter.rank, inputs), (outputs, adapter.rank)):
            shapes = (tuple(down.shape), tuple(up.shape))
            raise version_refused_error(
                weights, f"{name} has shapes {shapes} with rank {adapter.rank}, but the layer is {inputs} → {outputs}"
            )
    try:
        targeted = _targeted_layers(model, adapter.config)
    except (ValueError, TypeError) as error:
        raise version_refused_error(weights, f"its target_modules cannot be read ({error})") from error
    if missing := [name for name in targeted if name not in adapter.matrices]:
        raise version_refused_error(
            weights,
            f"its configuration targets {len(missing)} layers for which it has no matrices: "
            f"{quote_first_names(missing)}",
        )


def _targeted_layers(model: PreTrainedModel, config: Mapping[str, Any]) -> list[str]:
    """Return the linear layers that PEFT would adapt by a configuration; none if it names them by a regular expression,
    which a file from other people may make endless: the tensors alone then say what is adapted."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if not isinstance(targets, list) or isinstance(excluded, str) or config.get("layers_pattern"):
        return []
    rule = LoraConfig(
        target_modules=targets,
        exclude_modules=excluded,
        layers_to_transform=config.get("layers_to_transform"),
    )
    wrapped = [name.removesuffix(".base") for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [name for name in wrapped if check_target_module_exists(rule, name)]


def adaptable_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that can be served under adapters: called once by the decoder, over
    all tokens.

    Excluded are the output projection, embeddings, experts whose weights are one tensor, and layers that see only some
    of the tokens. The function calls the model with its own attention, which must be set.
    """
    rows, width = 5, 7
    input_shapes: dict[str, list[tuple[int, ...]]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def note(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
                input_shapes.setdefault(name, []).append(tuple(inputs[0].shape[:-1]))

            hooks.append(module.register_forward_pre_hook(note))
    vocabulary = int(model.config.get_text_config().vocab_size)
    with runnable_on_meta(model), torch.no_grad():
        ids = torch.arange(rows * width, device=model.device).view(rows, width) % vocabulary
        model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    head = model.get_output_embeddings()
    return [
        name
        for name, shapes in input_shapes.items()
        if len(shapes) == 1
        and math.prod(shapes[0]) == rows * width
        and shapes[0][0] in (rows, rows * width)
        and model.get_submodule(name) is not head
    ]


def linear_layer(model: PreTrainedModel, name: str) -> nn.Linear | None:
    """Return the linear layer of a name, also if an engine has wrapped it; None if there is none."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    layer = getattr(layer, "base", layer)
    return layer if isinstance(layer, nn.Linear) else None


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemoryEstimate:
    """The memory of one engine, in bytes."""

    dtype: str
    """Dtype that the model computes in, such as `bfloat16`."""
    weights: int
    adapters: int
    """Bytes of all adapter slots, filled."""
    merged: int
    """Bytes of the weights that a merged adapter may change, at most."""
    keys_and_values: int
    """Bytes of the KV and recurrent states of all slots with contexts of full length."""
    logits: int
    """Bytes of the logits of a pass over all slots."""


def predict_engine_memory(
    path: Path,
    *,
    dtype: str,
    slots: int,
    max_context: int,
    adapter_slots: int,
    max_rank: int,
) -> EngineMemoryEstimate:
    """Predict the memory of an engine that serves the model of a directory.

    Args:
        path: directory of the model.
        dtype: `model.dtype` of the configuration.
        slots: number of contexts at once.
        max_context: longest context in tokens.
        adapter_slots: number of adapters at once; 0: none.
        max_rank: largest rank of an adapter.

    Raises:
        ModelError: the directory holds no model, or one with fewer positions.
    """
    compute_dtype = model_dtype(path, dtype, torch.device("cpu"))
    shapes = read_meta_model(path, max_context=max_context, dtype=compute_dtype)
    weights = sum(parameter.nbytes for parameter in shapes.parameters())
    head = shapes.get_output_embeddings()
    matrices = [each for each in shapes.modules() if isinstance(each, nn.Linear) and each is not head]
    vocabulary = int(shapes.config.get_text_config().vocab_size)
    context_bytes = (max_context + 1) * kv_bytes_per_token(shapes.config) + state_bytes_per_slot(shapes)
    merged = sum(each.nbytes for module in matrices for each in module.parameters())
    sizes = 0
    if adapter_slots:
        try:
            sizes = _adaptable_sizes(shapes, LayerKinds())
        except Exception:  # noqa: BLE001 - its layers depend on each other
            sizes = _adaptable_sizes(read_meta_model(path, max_context=max_context, dtype=compute_dtype), None)
    return EngineMemoryEstimate(
        dtype=dtype_name(compute_dtype),
        weights=weights,
        adapters=adapter_slots * max_rank * sizes * compute_dtype.itemsize,
        merged=merged,
        keys_and_values=slots * context_bytes,
        # three float32 copies of a pass's logits exist at once during sampling
        logits=3 * slots * vocabulary * torch.float32.itemsize,
    )


def _adaptable_sizes(model: PreTrainedModel, kinds: LayerKinds | None) -> int:
    """Return the sum of inputs and outputs of the layers that adapters can change. With `kinds`, only one layer of each
    kind is called, and counts for all of its kind."""
    if kinds is not None:
        kinds.trim(model, repeated=None)
    count_of = {
        module: count
        for layer, count in zip(outermost_layers(model), kinds.counts if kinds else (), strict=False)
        for module in layer.modules()
    }
    modules = dict(model.named_modules())
    return sum(sum(modules[name].weight.shape) * count_of.get(modules[name], 1) for name in adaptable_layers(model))


def device_memory() -> tuple[Memory, bool]:
    """Return the memory of this process's device, and whether it is a GPU. The driver is asked: CUDA would make a
    context, which stays as long as the process."""
    devices = gpus() if torch.cuda.is_available() else ()
    return (devices[0].memory, True) if devices else (machine_memory(), False)
