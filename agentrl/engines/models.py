"""Model directories: load a local Hugging Face causal LM for sampling or training, or read its shapes alone.

Owns: the checks of a directory, and fixing rotary frequencies that would vary with a context's length. Never executes
code from a directory, never unpickles.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import weakref
from contextlib import contextmanager
from functools import cache
from inspect import signature
from pathlib import Path
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
)
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from agentrl.core.clock import SystemClock
from agentrl.core.errors import ModelError
from agentrl.core.files import (
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    SAFETENSORS_LENGTH_BYTES,
    WEIGHT_FILES,
    check_model_directory,
    read_safetensors_header,
)
from agentrl.core.model_layers import SELECTED_KEYS, check_slot_layers
from agentrl.core.quantization import CONFIG_KEYS, check_quantization
from agentrl.engines.meta import runnable_on_meta
from agentrl.engines.stored_tensors import FLOAT_DTYPES, QUANTIZATION_SUFFIXES, WEIGHTS_INDEX, weight_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PretrainedConfig, PreTrainedModel


# cuDNN's attention, which torch prefers on Hopper, makes a plan for each length of the keys, in 40 ms or more: each
# sampled token has a new one.
torch.backends.cuda.enable_cudnn_sdp(False)

ONE_LOAD_AT_A_TIME = Lock()
"""Lock around loading, during which transformers changes global state. Engines and trainers of one process load in
threads.
"""
_ONE_TENSOR_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable that keeps transformers from reading tensors ahead."""
_SIZE_LIMITS = (
    (re.compile("vocab_size"), 1 << 24),
    (re.compile("layers|experts"), 1 << 14),
    (re.compile("hidden|intermediate|d_model|n_embd"), 1 << 20),
)
"""Patterns of size names in a model's configuration, and the largest accepted values: some 40 times the largest
known.
"""
_IMPLEMENTATIONS = (None, "eager", "sdpa", "flex_attention", "grouped_mm", "batched_mm")
"""Accepted values of `attn_implementation` and the like. For others transformers may fetch code from a hub and run it,
if the package `kernels` is installed."""
_LAYERS_WITHOUT_KV = {"linear_attention", "conv", "moe", "mlp"}
"""Kinds of layers, as transformers names them, that keep a state instead of keys and values, or nothing."""
_LAYERS_WITH_STATE = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Kinds of layers that keep a recurrent state or a convolution's window, some of them beside keys and values."""
_TEXT_WITHIN = {"llama4"}
"""Model types of checkpoints for images and text whose text model has a head of its own inside, so that the whole
cannot be called for the hidden states of a text."""
_STATE_PLACES = ("conv_states", "recurrent_states")
"""Attributes of a layer's part of a `transformers.Cache` that hold states, by their number in the layer."""
_LENGTH_NAMES = re.compile("window|chunk|block|topk|original_max_position")
"""Names of integers that are known to be lengths: both sides of each are checked, whatever that costs."""
THRESHOLD_MULTIPLES = (1, 2, 4, 8)
"""Multiples of an integer of the configuration at which a model may change its computation, too."""
_LOAD_ERRORS = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    ImportError,
    RuntimeError,  # includes RecursionError
    MemoryError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors that transformers raises for a damaged directory, or an invalid configuration."""
_HALF = (torch.bfloat16, torch.float16)


def model_dtype(path: str | Path, setting: str, device: torch.device | str) -> torch.dtype:
    """Return the dtype in which a model computes on a device.

    Args:
        path: directory of the model.
        setting: `model.dtype` of the configuration. `auto` is the dtype of the checkpoint: that of `config.json`, else
            of the first floating-point tensor. A float16 checkpoint computes in float32, because float16 gradients
            underflow.
        device: device of the computation.

    Raises:
        ModelError: the directory holds no model, or the device does not support the dtype.
    """
    dtype = _checkpoint_dtype(Path(path)) if setting == "auto" else getattr(torch, setting)
    if dtype is torch.float16:
        dtype = torch.float32
    device = torch.device(device)
    lacking = device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False)
    if not lacking:
        try:
            torch.ones((2, 2), dtype=dtype, device=device) @ torch.ones((2, 2), dtype=dtype, device=device)
        except (RuntimeError, TypeError):
            lacking = True
    if lacking:
        raise ModelError(
            f"{path}: model.dtype = {setting!r} means {dtype_name(dtype)}, which {device} does not support; set "
            "model.dtype = 'float32'"
        )
    return dtype


def measure_products(path: str | Path) -> tuple[float, float]:
    """Measure a matrix product of a model's shape on this machine's CPU, which may compute bfloat16 many times slower
    than float32.

    Returns:
        The best of three times in float32 and in bfloat16, in ms.

    Raises:
        ModelError: the directory holds no model.
    """
    _check_directory(path)
    try:
        text = _read_config(path).get_text_config()
    except _LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{path}: config.json describes no causal LM ({reason})") from error
    width = int(getattr(text, "hidden_size", 0) or 1024)
    inner = getattr(text, "intermediate_size", None)
    wide = inner if type(inner) is int else 4 * width
    times: list[float] = []
    clock = SystemClock()
    for dtype in (torch.float32, torch.bfloat16):
        rows, weights = torch.ones((64, width), dtype=dtype), torch.ones((width, wide), dtype=dtype)
        best = float("inf")
        for _ in range(4):  # the first one prepares the kernel
            start = clock.monotonic()
            rows @ weights
            best = min(best, clock.monotonic() - start)
        times.append(1e3 * best)
    return times[0], times[1]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a configuration, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def _read_config(path: str | Path) -> PretrainedConfig:
    """Read the configuration of a checkpoint, without what its training asked of a forward pass, such as router logits
    for an auxiliary loss, and without its quantization: vLLM may serve a quantized checkpoint.

    Raises:
        ModelError: the text model can only be used alone.
    """
    config: PretrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if config.model_type in _TEXT_WITHIN:
        raise ModelError(
            f"{path}: is a checkpoint for images and text ({config.model_type}) of which only the text model can be "
            f"used, alone. Save it to another directory: AutoModelForCausalLM.from_pretrained({str(path)!a})"
            ".save_pretrained(DIR), and copy the tokenizer and the chat template"
        )
    for part in (config, config.get_text_config()):
        for key in CONFIG_KEYS:
            vars(part).pop(key, None)
        for output in ("output_router_logits", "output_attentions", "output_hidden_states"):
            if getattr(part, output, False):
                setattr(part, output, False)
    return config


def _checkpoint_dtype(path: Path) -> torch.dtype:
    """Return the dtype of a stored checkpoint; float32 if nothing states it."""
    _check_directory(path)
    try:
        config = _read_config(path)
        dtype: Any = config.dtype or config.get_text_config().dtype
        if dtype is None:
            for file in sorted(path.glob("*.safetensors")):
                header = json.loads(read_safetensors_header(file)[SAFETENSORS_LENGTH_BYTES:])
                # The scales of quantized weights are in float32, whatever the others are.
                dtype_names = [tensor.get("dtype") for name, tensor in header.items() if "_scale" not in name]
                dtype = next((FLOAT_DTYPES[tensor] for tensor in dtype_names if tensor in FLOAT_DTYPES), None)
                break
    except _LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{path}: cannot be loaded as a causal LM: its dtype cannot be read ({reason})") from error
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


_frozen_weights: dict[tuple[str, torch.dtype, torch.device], dict[str, weakref.ref[Tensor]]] = {}
"""Weights of base models that a trainer in this process never changes, by path, dtype, device and name."""


def share_frozen_weights(path: str | Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let engines that this process loads later use the weights of a model instead of a copy.

    Args:
        path: its directory.
        model: the model, as read; its weights must never change. It may be deleted.
        dtype: dtype for which it was read.
    """
    tensors = model.state_dict(keep_vars=True)
    key = os.path.realpath(path), dtype, model.device
    _frozen_weights[key] = {name: weakref.ref(tensor) for name, tensor in tensors.items()}


def frozen_weights(path: str | Path, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor] | None:
    """Return the weights of a base model that this process holds already; None if it does not."""
    references = _frozen_weights.get((os.path.realpath(path), dtype, device))
    tensors = {name: reference() for name, reference in (references or {}).items()}
    held = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    return held if held and len(held) == len(tensors) else None


def read_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    max_context: int,
    to_sample: bool = True,
    keep: Callable[[nn.Parameter], nn.Parameter] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Read a local Hugging Face causal LM directory, every weight of it from its safetensors files.

    Args:
        path: the directory.
        dtype: dtype of the parameters.
        max_context: longest context to compute, in tokens.
        to_sample: True: load for the embedded engine, which samples contexts of that length; False: for a trainer.
        keep: returns the part of a parameter to keep, such as a shard, before the next one is read; None keeps all.
        weights: the weights, which the model then shares; None: they are read.

    Text from the directory never reaches a stream unescaped: transformers is silenced, and names are shown as literals.

    Raises:
        ModelError: the directory holds no such model, its weights are damaged or do not fit its configuration, or it
            cannot serve contexts of `max_context`.
    """
    _check_directory(path)
    check_quantization(Path(path))
    if to_sample:
        check_slot_layers(Path(path))
    try:
        config = _read_config(path)
        if to_sample:
            _check_positions(config, max_context, path, stretched=True)
            _check_window(config, max_context, path)
        else:
            check_sparse_attention(config, max_context, path)
        with ONE_LOAD_AT_A_TIME, _track_parameters(keep):
            model, report = _load_weights(language_model_class(config), Path(path), config, dtype, weights)
    except _LOAD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{path}: cannot be loaded as a causal LM ({reason}). It needs config.json of a known architecture and "
            "safetensors weights; save it with model.save_pretrained(directory)"
        ) from error
    _check_report(path, report)
    fix_rotary_positions(model, max_context)
    return model


def _load_weights(
    auto_class: Any,
    path: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights: Mapping[str, Tensor] | None = None,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """Load a model, from its files unless its `weights` are given; returns it with the loading report."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "local_files_only": True,
        "use_safetensors": True,
        "trust_remote_code": False,
        "ignore_mismatched_sizes": True,  # mismatches then appear in the loading report
        "output_loading_info": True,
    }
    model: PreTrainedModel
    if weights is None:
        model, report = auto_class.from_pretrained(path, config=config, **options)
        return model, report
    with torch.device("meta"):
        shapes = auto_class.from_config(config, trust_remote_code=False)
    load: Any = type(shapes).from_pretrained
    model, report = load(None, config=shapes.config, state_dict=weights, **options)
    model.name_or_path = str(path)
    return model, report


def language_model_class(config: PretrainedConfig) -> Any:
    """Return the auto class of the model that a checkpoint is released as: for images and text, the whole model, of
    which agentrl calls the text part. Its tensors and adapters then have the names that other programs read."""
    return AutoModelForImageTextToText if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING else AutoModelForCausalLM


def native_attention(model: PreTrainedModel) -> str:
    """Return the name of the attention with which a model computes padded rows."""
    return "sdpa" if model._supports_sdpa and not _caps_scores(model) else "eager"


def keep_cap_of_scores(model: PreTrainedModel) -> None:
    """Make a model compute with the cap of attention scores that its configuration names (Gemma 2): `sdpa` ignores
    it."""
    if _caps_scores(model):
        model.set_attn_implementation("eager")


def _caps_scores(model: PreTrainedModel) -> bool:
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


@contextmanager
def _track_parameters(keep: Callable[[nn.Parameter], nn.Parameter] | None) -> Iterator[None]:
    """Within the context, replace each parameter that transformers loads in this thread by `keep(parameter)`."""
    if keep is None:
        yield
        return
    thread, tracked = get_ident(), set[nn.Parameter]()

    def replace(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        if get_ident() != thread or parameter.is_meta or parameter in tracked:
            return None
        tracked.add(parameter_kept := keep(parameter))
        parameter_kept._is_hf_initialized = True  # type: ignore[attr-defined]  # what is missing is in the report
        return parameter_kept

    before = os.environ.get(_ONE_TENSOR_AT_A_TIME)
    register: Any = register_module_parameter_registration_hook
    hook = register(replace)
    os.environ[_ONE_TENSOR_AT_A_TIME] = "1"
    try:
        yield
    finally:
        hook.remove()
        if before is None:
            del os.environ[_ONE_TENSOR_AT_A_TIME]
        else:
            os.environ[_ONE_TENSOR_AT_A_TIME] = before


def read_meta_model(path: str | Path, *, max_context: int, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Read the model of a directory without its weights, on the meta device: names, shapes, configuration.

    Args:
        path: the directory.
        max_context: longest context to compute, in tokens.
        dtype: dtype of the parameters, also set in the configuration; None: that of the directory.

    Raises:
        ModelError: the directory holds no such model, one with fewer positions than `max_context`, or weights that
            vLLM would load over the model's.
    """
    _check_directory(path)
    _check_alone(Path(path))
    try:
        config = _read_config(path)
        make = language_model_class(config).from_config
        with torch.device("meta"):
            options = {} if dtype is None else {"dtype": dtype}
            model: PreTrainedModel = make(config, trust_remote_code=False, **options)
        if dtype is not None:
            model.config.dtype = dtype
        keep_float32(model)
    except _LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{path}: config.json describes no causal LM ({reason})") from error
    _check_positions(config, max_context, path, stretched=False)  # vLLM does not apply position scaling here
    return model


def keep_float32(model: PreTrainedModel) -> None:
    """Give a model that was made without a checkpoint the dtypes with which `from_pretrained` loads one: some tensors
    stay in float32, such as the biases by which DeepSeek's routers choose experts."""
    patterns = [name.replace("*", ".*") for name in model._get_dtype_plan(model.dtype)]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and any(re.search(pattern, name) for pattern in patterns):
            tensor.data = tensor.data.float()


_SMALL_MODEL = 1 << 28
"""Number of weights up to which a check at the start takes seconds with one thread."""


@contextmanager
def computing_in_float32(
    model: PreTrainedModel, to_float32: Callable[[Tensor], Tensor] = Tensor.float
) -> Iterator[None]:
    """Make a model compute in float32 within the context: each layer has a float32 copy of its weights while it runs.

    This is for passes over few tokens at the start. A small model computes them with one thread: on two busy cores,
    two threads took six times the CPU seconds, as they spin while they wait for each other.

    Args:
        model: model to compute with.
        to_float32: returns the whole float32 tensor of a parameter.
    """
    originals: dict[nn.Module, list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]]] = {}

    def widen(unit: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        restore(unit)
        with torch.inference_mode(False):  # tensors made in inference mode cannot be trained
            for module in unit.modules() if isinstance(unit, GradientCheckpointingLayer) else (unit,):
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        originals.setdefault(unit, []).append((module._parameters, name, parameter))
                        module._parameters[name] = nn.Parameter(to_float32(parameter.detach()), requires_grad=False)
        # Mamba converts the last hidden state to the dtype of its head before the head is called.
        return tuple(value.float() if isinstance(value, Tensor) and value.dtype in _HALF else value for value in inputs)

    def restore(unit: nn.Module, *_: object) -> None:
        for parameters, name, parameter in originals.pop(unit, ()):
            parameters[name] = parameter

    layers = outermost_layers(model)
    inside = {module for layer in layers for module in layer.modules()}
    every: Iterator[nn.Module] = model.modules()
    units = [*layers, *(module for module in every if module._parameters and module not in inside)]
    hooks = [unit.register_forward_pre_hook(widen) for unit in units]
    hooks += [unit.register_forward_hook(restore, always_call=True) for unit in units]
    threads = torch.get_num_threads()
    if sum(parameter.numel() for parameter in model.parameters()) <= _SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for hook in hooks:
            hook.remove()
        for unit in list(originals):
            restore(unit)


def outermost_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, only the outermost ones."""
    if isinstance(model, GradientCheckpointingLayer):
        return [model]
    return [layer for child in model.children() for layer in outermost_layers(child)]


class LayerKinds:
    """The kinds of layers of a model. Layers of one kind have equal modules, settings and shapes."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        """Number of layers of each kind; empty for a model that is kept whole."""

    def trim(self, model: PreTrainedModel, repeated: int | None, *, of_each: int = 1) -> Callable[[], None]:
        """Remove all layers but the first `of_each` of each kind, and the next of kind `repeated`; return a function
        that restores them.

        A model is left whole if its layers are not in one list or share parameters, or no two are of one kind.
        """
        layers = outermost_layers(model)
        owner = next((m for m in model.modules() if layers and layers[0] in m._modules.values()), None)
        parent = next((m for m in model.modules() if owner is not None and owner in m._modules.values()), None)
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        if (
            not isinstance(owner, nn.ModuleList)
            or list(owner) != layers
            or len(set(map(id, parameters))) < len(parameters)
            or (config := getattr(parent, "config", None)) is None
        ):
            return lambda: None
        settings = vars(config)
        lists = [name for name, value in settings.items() if isinstance(value, list) and len(value) == len(layers)]
        places: dict[object, list[int]] = {}
        for place, layer in enumerate(layers):
            kind = (_structure(layer), *(str(settings[name][place]) for name in lists))
            places.setdefault(kind, []).append(place)
        if len(places) == len(layers):
            return lambda: None
        self.counts = [len(of_kind) for of_kind in places.values()]
        kept = sorted(
            place for kind, of_kind in enumerate(places.values()) for place in of_kind[: of_each + (kind == repeated)]
        )
        parent_modules = parent._modules  # type: ignore[union-attr]
        name = next(name for name, module in parent_modules.items() if module is owner)
        count_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
        before = {key: settings[key] for key in (*lists, count_name)}

        def restore() -> None:
            parent_modules[name] = owner
            settings.update(before)

        parent_modules[name] = nn.ModuleList(layers[place] for place in kept)
        for key in lists:
            settings[key] = [settings[key][place] for place in kept]
        settings[count_name] = len(kept)
        return restore


@contextmanager
def with_few_layers(model: PreTrainedModel) -> Iterator[None]:
    """Within the context, a model computes with at most two layers of each kind, if it has more."""
    restore = LayerKinds().trim(model, None, of_each=2)
    try:
        yield
    finally:
        restore()


def _structure(layer: nn.Module) -> tuple[object, ...]:
    """Return what layers of one kind have in common: classes, settings and shapes of their modules."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, int | float | str | None) and not re.search(r"layer_?(idx|id|index|number)", key)
            ),
            tuple((key, tensor.shape) for key, tensor in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def layer_states(model: PreTrainedModel) -> list[tuple[int, str, int, Tensor]]:
    """Return the states that layers keep for a context of one token: layer, place in the cache (`_STATE_PLACES`),
    number in the layer, and tensor, `[1, ...]`; empty for a model whose layers keep keys and values alone."""
    cache = DynamicCache(config=model.config)
    if not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers):
        return []
    with runnable_on_meta(model), torch.inference_mode():
        token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
        model(input_ids=token, use_cache=True, **{cache_argument(model): cache})
    return [
        (index, place, number, state)
        for index, layer in enumerate(cache.layers)
        for place in _STATE_PLACES
        for number, state in getattr(layer, place, {}).items()
        if state is not None
    ]


def has_recurrent_layers(model: PreTrainedModel) -> bool:
    """Whether some layers mix tokens through a state, or through the window of a convolution."""
    takes_state = any("cache_params" in signature(module.forward).parameters for module in model.modules())
    return takes_state or num_layers_with_state(model.config) > 0


def num_layers_with_state(config: PretrainedConfig) -> int:
    """Return the number of a model's layers that mix tokens through a state, as its configuration lists them."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or ()
    return sum(kind in _LAYERS_WITH_STATE for kind in kinds)


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name under which a model takes its cache."""
    return _cache_argument(type(model).forward)


@cache
def _cache_argument(forward: Callable[..., Any]) -> str:
    # Reading a signature takes as long as a layer of a small model.
    return "cache_params" if "cache_params" in signature(forward).parameters else "past_key_values"


def state_bytes_per_slot(model: PreTrainedModel) -> int:
    """Return the bytes of a slot's two states, over all layers; the model may be one without data."""
    return 2 * sum(state.nbytes for *_, state in layer_states(model))


def kv_bytes_per_token(config: PretrainedConfig) -> int:
    """Return the bytes of KV per token, over all layers of a model's decoder that have any."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ()
    num_layers = text.num_hidden_layers - sum(kind in _LAYERS_WITHOUT_KV for kind in kinds)
    if not num_layers:
        return 0
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    dtype: Any = config.dtype or text.dtype or torch.float32
    return int(2 * heads * size * num_layers * dtype.itemsize)


def configured_integers(config: PretrainedConfig) -> dict[str, int]:
    """Return all whole numbers in the configuration of a text model, keyed by their path, such as
    `rope_parameters.original_max_position_embeddings`."""
    return dict(_integers(config.get_text_config().to_dict(), ""))


def _integers(value: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _integers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _integers(item, f"{path}[{index}]")
    elif not isinstance(value, bool) and isinstance(value, int | float) and value == value // 1:
        yield path, int(value)


def random_tokens(config: PretrainedConfig, shape: tuple[int, ...], seed: int) -> NDArray[np.int64]:
    """Draw tokens of text: without those that config.json names, such as that of an image, which a model computes in
    another way."""
    named = [value for name, value in config.to_dict().items() if name.endswith(("_token_id", "_token_index"))]
    tokens = np.setdiff1d(np.arange(config.get_text_config().vocab_size), [id_ for id_ in named if type(id_) is int])
    return np.random.default_rng(seed).choice(tokens, shape)


def check_lengths(
    config: PretrainedConfig, max_context: int, max_tokens: int, longest_unnamed: int | None = None
) -> list[int]:
    """Return the lengths in which the checks at the start compare a model with itself, ascending and distinct.

    A model may change its computation at any integer of its configuration, under any name, or at a multiple of one. So
    there is a length on each side of these (t - 1 and t + 5), and `max_context`. Lengths close to a shorter one are
    left out, the more the fewer `max_tokens` there are, and then the longest. Those at integers with the name of a
    length (a window, a chunk) always stay.

    Args:
        config: configuration of the model.
        max_context: longest context of the run, in tokens.
        max_tokens: the largest `check_cost` of the lengths.
        longest_unnamed: longest of the lengths at integers without the name of a length; None: no limit.
    """
    if max_context < 2:  # no context was chosen yet
        return []
    named, others = set[int](), {max_context}
    for path, value in configured_integers(config).items():
        for multiple in THRESHOLD_MULTIPLES:
            threshold = value * multiple
            if 2 < threshold < max_context:  # a row of one token predicts none, so no change at 2 can matter
                is_named = multiple == 1 and _LENGTH_NAMES.search(path)
                (named if is_named else others).update((threshold - 1, min(threshold + 5, max_context)))
    if longest_unnamed is not None:
        others = {min(length, longest_unnamed) for length in others}
    longest = max(named | others)
    lengths: list[int] = []
    for spacing in (1.15, 1.3, 1.6, 2.0):
        lengths, last = [], 7  # up to which the short contexts of each check suffice
        for length in sorted(named | others):
            if length in named or length > last * spacing:
                lengths.append(length)
                last = length
        if longest not in lengths:
            lengths.append(longest)
        if check_cost(lengths) <= max_tokens:
            return lengths
    while check_cost(lengths) > max_tokens and (unnamed := [length for length in lengths if length not in named]):
        lengths.remove(unnamed[-1])
    return lengths


def check_cost(lengths: Sequence[int]) -> int:
    """Return the tokens that take as long as rows of these lengths, which are computed one by one."""
    return sum(lengths) + _ROW_COST * len(lengths)


_ROW_COST = 32
"""Tokens that take as long as the conversion of weights to float32, for each row."""
_CHECK_OPERATIONS = {"cpu": 1e11, "cuda": 1e14}
"""Floating-point operations that a check at the start may take, by device: some seconds."""


def affordable_tokens(model: PreTrainedModel, max_context: int, passes: int) -> int:
    """Return the number of tokens that a check at the start may forward in each of so many passes."""
    text = model.config.get_text_config()
    ends = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}
    decoder: nn.Module = model.get_decoder()
    weights = sum(parameter.numel() for parameter in decoder.parameters() if id(parameter) not in ends)
    operations = _CHECK_OPERATIONS.get(model.device.type, _CHECK_OPERATIONS["cpu"])
    scores = text.num_hidden_layers * getattr(text, "hidden_size", 0) * max_context
    return int(operations / (2 * max(1, weights + scores) * passes))


def varied(tensor: Tensor) -> Tensor:
    """Return a tensor, with noise if all its values are equal.

    Norms begin as ones, biases, sinks and scalars as zeros. With such values a model may compute the same in right and
    wrong ways, which differ as soon as they are trained. Equal shapes get equal noise, so passes can be compared.
    """
    values = tensor.detach().flatten()
    if not len(values) or bool((values[[0, len(values) // 2, -1]] != values[0]).any()):
        return tensor
    if bool((values != values[0]).any()):
        return tensor
    width = tensor.shape[-1] if tensor.ndim > 1 else 1
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
    scale = 0.3 * (float(values[0].abs()) or width**-0.5)
    return tensor + scale * noise.to(tensor)


def check_sparse_attention(config: PretrainedConfig, max_context: int, path: str | Path) -> None:
    """Refuse to train a model with sparse attention in contexts longer than the number of keys that it selects.

    Keys with equal scores are selected arbitrarily, depending on the number of rows in the pass. So the trainer's
    probabilities may differ from the sampled ones, and the check at the start may not meet such keys.

    Raises:
        ModelError: contexts may have more tokens than keys are selected.
    """
    for name, value in config.get_text_config().to_dict().items():
        if name.startswith(SELECTED_KEYS) and type(value) is int and value < max_context:
            raise ModelError(
                f"{path}: {config.model_type} attends only to keys that it selects by their scores ({name} = "
                f"{value}). How it breaks ties depends on the batch, so rows cannot be trained with the probabilities "
                f"they were sampled with; set engine.max_context to at most {value}, where all keys are attended to, "
                "or train another model"
            )


def _check_directory(path: str | Path) -> None:
    check_model_directory(path)
    # Transformers would load the adapter too, and unpickle adapter_model.bin.
    if (Path(path) / "adapter_config.json").exists():
        raise ModelError(f"{path}: contains an adapter (adapter_config.json). Merge it into the model, or move it away")
    _check_shards(Path(path))
    _check_config(Path(path))
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def _check_config(path: Path) -> None:
    """Refuse absurd sizes, with which building the modules or computing over the vocabulary would not end, and code
    from a hub.

    Raises:
        ModelError: config.json has such a size, or names such code; or a JSON file, which transformers would read
            whole, is too long.
    """
    for file in path.glob("*.json"):
        limit = MAX_TOKENIZER_BYTES if file.name == "tokenizer.json" else MAX_JSON_BYTES
        if file.is_file() and file.stat().st_size > limit:
            raise ModelError(
                f"{file}: {file.stat().st_size:,} bytes, more than the {limit:,} that a file of its kind may have. "
                "Copy the directory again"
            )
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # transformers reads the file next and reports the error
        return
    for name, value in _settings(config):
        if name.endswith("_implementation") and not isinstance(value, dict) and value not in _IMPLEMENTATIONS:
            raise ModelError(
                f"{path}: config.json says {name} = {str(value)[:60]!a}, for which transformers may fetch code from "
                "a hub and run it. Remove that line: agentrl chooses the implementation"
            )
        for words, maximum in _SIZE_LIMITS:
            if words.search(name) and isinstance(value, int) and value > maximum:
                raise ModelError(
                    f"{path}: config.json says {name} = {str(value)[:30]}, but no model has more than {maximum:,}: the "
                    "file is damaged. Copy the directory again"
                )


def _settings(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a configuration, and those of its tables; the values of a table with the name of an
    implementation have that name."""
    for key, item in value.items() if isinstance(value, dict) else ():
        setting = name if name.endswith("_implementation") else key
        yield setting, item
        yield from _settings(item, setting)


def check_finite_logits(model: PreTrainedModel, logits: Tensor) -> None:
    """Refuse a model whose weights give probabilities that are NaN.

    Raises:
        ModelError: they do; the message names the first broken parameter.
    """
    if bool(logits.float().log_softmax(-1).isnan().any()):
        bad_parameter = next(
            (name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())), None
        )
        raise ModelError(
            f"{model.name_or_path}: {type(model).__name__} computes logits that are NaN or infinite: "
            + (f"{bad_parameter} contains NaN or infinity" if bad_parameter else "its weights are too large")
            + ". The checkpoint is damaged; copy the directory again"
        )


def _check_shards(path: Path) -> None:
    """Refuse a directory that lacks files named by its index; an invalid index is left to transformers."""
    if not (path / WEIGHTS_INDEX).is_file():
        return
    try:
        file_names = {file.name for file in weight_files(path)}
        missing = [name for name in file_names if not (path / name).is_file()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    if missing:
        raise ModelError(
            f"{path}: {len(missing)} of {len(file_names)} weight files are missing ({quote_first_names(missing)}), "
            f"though {WEIGHTS_INDEX} names them. Copy the directory again, or finish its download"
        )


def _check_alone(path: Path) -> None:
    """Refuse several weight files without an index: transformers would read one, and vLLM all."""
    if not (path / WEIGHTS_INDEX).is_file():
        other_files = {file.name for file in path.glob("*.safetensors")} - {WEIGHT_FILES["full"][0]}
        if other_files:
            raise ModelError(
                f"{path}: vLLM would load {quote_first_names(other_files)} over model.safetensors; move it away, or "
                "save the model with model.save_pretrained(directory)"
            )


def _check_report(path: str | Path, report: Mapping[str, Any]) -> None:
    """Refuse a model with weights that did not come from its files; report tensors that it does not use."""
    unexpected_keys = report["unexpected_keys"]
    if scales := [name for name in unexpected_keys if name.endswith(QUANTIZATION_SUFFIXES)]:
        raise ModelError(
            f"{path}: the weights are quantized, which config.json does not say: {quote_first_names(scales)} do not "
            "belong to the model. Copy config.json again, or give a 16-bit copy of the model"
        )
    wrong = {
        "are missing": report["missing_keys"],
        "have a wrong shape": [key for key, *_ in report["mismatched_keys"]],
    }
    for problem, names in wrong.items():
        if names:
            raise ModelError(
                f"{path}: {len(names)} weights {problem} ({quote_first_names(names)}), so the files do not belong to "
                "config.json. Copy the directory again, or save it with model.save_pretrained(directory)"
            )
    if unexpected_keys:
        warnings.warn(
            f"{path}: {len(unexpected_keys)} tensors do not belong to the model and are ignored: "
            f"{quote_first_names(unexpected_keys)}",
            stacklevel=3,
        )


def quote_first_names(names: Iterable[str]) -> str:
    """Quote the first few names without control characters, shortened."""
    sorted_names = sorted(names)
    return ", ".join(ascii(name[:100]) for name in sorted_names[:4]) + (", …" if len(sorted_names) > 4 else "")


def _rope_types(ropes: object) -> list[str]:
    """Return the rope types in a configuration's `rope_parameters`: one dictionary, or one per kind of layer."""
    if not isinstance(ropes, dict):
        return []
    return [str(rope.get("rope_type", "")) for rope in (ropes, *ropes.values()) if isinstance(rope, dict)]


def _check_positions(config: PretrainedConfig, max_context: int, path: str | Path, *, stretched: bool) -> None:
    """Refuse contexts beyond the last position; `stretched` allows for dynamic NTK scaling."""
    text = config.get_text_config()
    positions, ropes = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    if positions is not None and stretched and "dynamic" in _rope_types(ropes):
        positions = int(positions * ropes.get("factor", 1.0))
    if positions is not None and max_context > positions:
        raise ModelError(f"{path}: max_context is {max_context}, but the model has {positions} positions; lower it")


def fix_rotary_positions(model: PreTrainedModel, max_context: int) -> None:
    """Make a model compute the rotary positions of every context as for `max_context` tokens.

    LongRoPE (Ding et al., 2024, arXiv:2402.13753) and dynamic NTK scaling choose their frequencies by the longest row
    of a forward pass. Keys in a cache would become wrong as a context grows, rows forwarded together would change each
    other, and a token would be trained under other frequencies than it was sampled under. With the frequencies of the
    longest context a token's probability depends on the tokens before it alone; vLLM computes LongRoPE so too.
    """

    def lengthen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Append the largest possible position."""
        positions: Tensor = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        last = torch.full_like(positions[..., :1], max_context - 1)
        longer = torch.cat([positions, last], dim=-1)
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def shorten(_: nn.Module, __: object, rotations: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Drop the result of the appended position."""
        return tuple(rotation[..., :-1, :] for rotation in rotations)

    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(name == "longrope" or "dynamic" in str(name) for name in names):
            module.register_forward_pre_hook(lengthen, with_kwargs=True)
            module.register_forward_hook(shorten)


def longest_context(path: str | Path, *, embedded: bool) -> int | None:
    """Return the longest context in which a model can be sampled and trained; None if `config.json` sets no bound.

    Args:
        path: the model's directory.
        embedded: whether the embedded engine samples the model.

    Raises:
        ModelError: the directory holds no model.
    """
    _check_directory(path)
    try:
        config = _read_config(path)
        text = config.get_text_config()
    except _LOAD_ERRORS as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{path}: config.json describes no causal LM ({reason})") from error
    bounds = [getattr(text, "max_position_embeddings", None), _window(config) if embedded else None]
    bounds += [value for name, value in text.to_dict().items() if name.startswith(SELECTED_KEYS)]
    return min((bound for bound in bounds if type(bound) is int and bound > 1), default=None)


def _window(config: PretrainedConfig) -> int | None:
    """Return the attention window of some layers, in tokens; None if all attend to the whole context."""
    text = config.get_text_config()
    layer_types, window = getattr(text, "layer_types", None), getattr(text, "sliding_window", None)
    slides = layer_types is None or "sliding_attention" in layer_types
    return window if slides and getattr(text, "use_sliding_window", True) else None


def _check_window(config: PretrainedConfig, max_context: int, path: str | Path) -> None:
    """Refuse contexts beyond an attention window, which the embedded engine does not support."""
    window = _window(config)
    if window is not None and max_context > window:
        raise ModelError(
            f"{path}: the model attends to a sliding window of {window} tokens, and the embedded engine supports it "
            f"only up to that length; set engine.max_context to at most {window}, or use vLLM ([engine.vllm])"
        )
