"""Adapters merged into their base model: W + s B A, computed in float32 and rounded once to the dtype of W.

Trainers publish the factors A and B. Engines keep W and merge each version into it, so that a version has the same
weights wherever it is merged. Adding the difference of two versions to served weights would accumulate rounding errors.
In float32 the result has the bits of PEFT's `merge_and_unload`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.engines.models import ONE_LOAD_AT_A_TIME, quote_first_names, read_meta_model
from agentrl.engines.stored_tensors import checkpoint_tensors, layer_prefix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from agentrl.engines.weights.reading import AdapterWeights


def adapter_products(
    adapter: AdapterWeights, device: torch.device, modules: Iterable[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield s B A of all modules that a checked adapter changes, or of some, in float32, by the name of the weight in
    the model's state."""
    for module in adapter.matrices if modules is None else modules:
        down, up = (matrix.to(device, torch.float32) for matrix in adapter.matrices[module])
        yield f"{module}.weight", (up @ down).mul_(adapter.scale)


def merge(base: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the merged weight of a base that is served in `dtype`; `product` is overwritten."""
    if torch.promote_types(base.dtype, dtype) != dtype:
        base = base.to(dtype)  # rounds; a wider dtype has the same numbers
    return product.add_(base).to(dtype)


class CheckpointMerger:
    """Merges adapters into the weights of a model directory, in the layout of its files.

    The directory is the base that is kept: its files are mapped into memory, and read again for each version.

    Args:
        path: the directory.
        dtype: dtype in which the model is served.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._stored = checkpoint_tensors(path)
        self._dtype = dtype
        self._names: dict[str, list[str]] = {}
        """Names of the directory's tensors, by layer."""
        for name in self._stored:
            self._names.setdefault(layer_prefix(name), []).append(name)
        self._changed: set[str] = set()
        """Layers in which the served weights may differ from the directory's."""
        # Loaded like the directory, so that its layout can be restored, but without data.
        shapes = read_meta_model(path, max_context=1, dtype=dtype)
        state = {name: torch.empty(stored.get_shape(), device="meta") for name, stored in self._stored.items()}
        load: Any = type(shapes).from_pretrained
        with ONE_LOAD_AT_A_TIME:
            self._model = load(None, config=shapes.config, state_dict=state, dtype=dtype, device_map="meta")

    def note_other_weights(self, *, are_initial: bool) -> None:
        """Note that all weights were replaced: by the directory's, or by others."""
        self._changed = set() if are_initial else set(self._names)

    def merged(self, adapter: AdapterWeights, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors of the layers that an adapter changes or an earlier one has changed, a layer at a time:
        vLLM fuses matrices of a layer, and loads these only together.

        Raises:
            ValueError: the directory stores an adapted weight in another layout.
        """
        modules: dict[str, list[str]] = {}
        for module in adapter.matrices:
            modules.setdefault(layer_prefix(f"{module}."), []).append(module)
        unchanged = set(self._changed)
        for names in modules.values():
            merged: dict[str, Tensor] = {}
            for name, product in adapter_products(adapter, device, names):
                for stored_name, part in revert_weight_conversion(self._model, {name: product}).items():
                    merged[stored_name] = merge(self._base(stored_name, part).to(device), part, self._dtype)
            layers = {layer_prefix(name) for name in merged}
            self._changed |= layers
            unchanged -= layers
            for name in (name for layer in layers for name in self._names[layer]):
                yield name, merged[name] if name in merged else self._stored[name][...]
        for name in (name for layer in unchanged for name in self._names[layer]):
            yield name, self._stored[name][...]
        self._changed -= unchanged

    def _base(self, name: str, product: Tensor) -> Tensor:
        stored = self._stored.get(name)
        if stored is None or stored.get_shape() != list(product.shape):
            raise ValueError(
                f"the model's files have no tensor {quote_first_names([name])} of shape {tuple(product.shape)}, into "
                "which its adapter could be merged; set lora.merge = false"
            )
        base: Tensor = stored[...]
        return base
