"""Several LoRA adapters side by side on one base model, any mixture of them in one forward pass.

Owns: the adapters' matrices, ranks concatenated, and which rows of the next pass use which adapter.
Does not know policies or versions: an adapter has a place, a number. Files are plain PEFT.
Invariants: a row sees the columns of its own adapter only; a place is emptied before it is filled again.

LoRA: Hu et al., 2021, arXiv:2106.09685. y = W x + B ((A x) * row mask), all adapters' A stacked, all B side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from agentrl.engines.adapter_files import check_adapter, linear_layer
from agentrl.engines.weight_files import refusal

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.records import WeightsRef
    from agentrl.engines.adapter_files import AdapterFile


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
        if self._layers and set(adapter.matrices) != set(self._layers):
            different = sorted(set(adapter.matrices) ^ set(self._layers))
            raise refusal(
                weights,
                "all adapters of an engine must have the same target modules; these are in only one of "
                f"this adapter and those served: {', '.join(different[:4])}",
            )
        check_adapter(weights, adapter, self._model, max_rank=self.max_rank)

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

    def empty(self, place: int) -> AdapterFile:
        """Forget the adapter of `place`, which is returned; call when no row uses it."""
        self._free.append(place)
        return self._filled.pop(place)

    def _wrap(self, adapter: AdapterFile) -> None:
        for name in adapter.matrices:
            layer = linear_layer(self._model, name)
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
