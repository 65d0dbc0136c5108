"""Several LoRA adapters side by side on one base model, any mixture of them in one forward pass.

Owns: the adapters' matrices, ranks concatenated, and which rows of the next pass use which adapter.
Does not know policies or versions: an adapter has a place, a number. Files are plain PEFT.
Invariants: a row sees the columns of its own adapter only; a place is emptied before it is filled again.

LoRA: Hu et al., 2021, arXiv:2106.09685. y = W x + B ((A x) * row mask), all adapters' A stacked, all B side by side.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from agentrl.engines.weight_files import read_weights, refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
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
        EngineError: the files are damaged, not the published ones, or of a kind that the embedded engine cannot serve.
    """
    tensors = read_weights(weights)
    try:
        config = json.loads((Path(weights.path) / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise refusal(weights, f"{weights.path}/adapter_config.json cannot be read ({error})") from error
    if config.get("peft_type") != "LORA":
        raise refusal(weights, f"its peft_type is {config.get('peft_type')!r}; the embedded engine serves LORA")
    used = [key for key in _UNSUPPORTED if config.get(key)]
    if used or config.get("bias", "none") != "none":
        raise refusal(weights, f"the embedded engine serves plain LoRA, without {', '.join(used) or 'bias'}")
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


class BankLinear(nn.Module):
    """A linear layer and the bank's share of it."""

    def __init__(self, base: nn.Linear, bank: AdapterBank) -> None:
        super().__init__()
        self.base = base
        self.down = base.weight.new_zeros(0, base.in_features)
        self.up = base.weight.new_zeros(0, base.out_features)
        self._plain = (base.weight, base.bias, bank)  # in a tuple: reached at once, and registered only once
        self._live = (self.down.t(), self.up)

    def narrow(self, first: int, last: int) -> None:
        """Compute only columns `[first, last)` from now on."""
        self._live = (self.down[first:last].t(), self.up[first:last])

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in]` → `[..., out]`."""
        weight, bias, bank = self._plain
        if not bank.active:
            return functional.linear(hidden, weight, bias)
        flat = hidden.reshape(-1, hidden.shape[-1])
        down, up = self._live
        low = torch.mm(flat, down)
        if bank.mask is not None:
            low.view(len(bank.mask), -1, low.shape[-1]).mul_(bank.mask)
        out = functional.linear(flat, weight, bias).addmm_(low, up)
        return out.view(*hidden.shape[:-1], -1)


class AdapterBank:
    """The adapters of one base model. Layers are wrapped when the first adapter arrives."""

    def __init__(self, model: PreTrainedModel, *, places: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._model = model
        self._free = list(range(places))
        self._filled: dict[int, AdapterFile] = {}
        self._layers: dict[str, BankLinear] = {}
        self._rank = 0
        self._span = (0, 0)
        self._selected: bytes | None = None
        self.active = False
        self.mask: Tensor | None = None

    def free_place(self) -> int | None:
        """The lowest empty place, None where all are filled."""
        return min(self._free) if self._free else None

    def check(self, weights: WeightsRef, adapter: AdapterFile) -> None:
        """Refuse an adapter that does not fit the model or the adapters already served.

        Raises:
            EngineError: wrong rank, module or shape.
        """
        if adapter.rank > self.max_rank:
            raise refusal(weights, f"its rank is {adapter.rank}, the engine was started for at most {self.max_rank}")
        if self._layers and set(adapter.matrices) != set(self._layers):
            different = sorted(set(adapter.matrices) ^ set(self._layers))
            raise refusal(
                weights,
                "all adapters of an engine must have the same target modules; these are in only one of "
                f"this adapter and those served: {', '.join(different[:4])}",
            )
        for name, (down, up) in adapter.matrices.items():
            layer = self._layers[name].base if self._layers else _linear(self._model, name)
            if layer is None:
                raise refusal(weights, f"the model has no linear layer {name}")
            if down.shape[1] != layer.in_features or up.shape[0] != layer.out_features:
                found = (tuple(down.shape), tuple(up.shape))
                raise refusal(
                    weights, f"{name} has shapes {found}, the layer is {layer.in_features} → {layer.out_features}"
                )

    def fill(self, place: int, adapter: AdapterFile) -> None:
        """Put a checked adapter into an empty place; call between two passes."""
        self._free.remove(place)
        self._filled[place] = adapter
        if not self._layers:
            self._wrap(adapter)
        grown = max(self._rank, adapter.rank)
        needed = (max(self._filled) + 1) * grown
        if grown > self._rank or needed > next(iter(self._layers.values())).down.shape[0]:
            self._rank = grown
            self._allocate(needed)
            for at, filled in self._filled.items():
                self._write(at, filled)
        else:
            self._write(place, adapter)

    def empty(self, place: int) -> None:
        """Forget the adapter of `place`; call when no row uses it."""
        del self._filled[place]
        self._free.append(place)

    def _wrap(self, adapter: AdapterFile) -> None:
        for name in adapter.matrices:
            layer = _linear(self._model, name)
            assert layer is not None, "checked before"
            parent, _, child = name.rpartition(".")
            wrapped = BankLinear(layer, self)
            setattr(self._model.get_submodule(parent), child, wrapped)
            self._layers[name] = wrapped

    def _allocate(self, columns: int) -> None:
        self._selected = None
        for layer in self._layers.values():
            layer.down = layer.base.weight.new_zeros(columns, layer.base.in_features)
            layer.up = layer.base.weight.new_zeros(columns, layer.base.out_features)

    def _write(self, place: int, adapter: AdapterFile) -> None:
        first = place * self._rank
        with torch.inference_mode():
            for name, (down, up) in adapter.matrices.items():
                layer = self._layers[name]
                layer.down[first : first + self._rank] = 0
                layer.up[first : first + self._rank] = 0
                layer.down[first : first + adapter.rank] = down
                layer.up[first : first + adapter.rank] = up.t()

    def select(self, adapters: NDArray[np.int64]) -> None:
        """Say which adapter each row of the next pass uses, `[B]`; -1: none."""
        key = adapters.tobytes()
        if key == self._selected:
            return
        self._selected = key
        used = adapters[adapters >= 0]
        self.active = len(used) > 0
        if not self.active:
            return
        first, last = int(used.min()), int(used.max()) + 1
        span = (first * self._rank, last * self._rank)
        for layer in self._layers.values():
            layer.narrow(*span)
        self.mask = None
        if last - first > 1 or len(used) < len(adapters):
            owner = np.repeat(np.arange(first, last), self._rank)
            mask = torch.from_numpy(adapters[:, None, None] == owner)
            self.mask = mask.to(next(iter(self._layers.values())).base.weight)


def _linear(model: PreTrainedModel, name: str) -> nn.Linear | None:
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        return None
    return layer if isinstance(layer, nn.Linear) else None
