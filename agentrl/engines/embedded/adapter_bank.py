"""The LoRA adapters that the embedded engine serves side by side on one base model.

LoRA: Hu et al., 2021, arXiv:2106.09685. y = W x + B ((A x) * row mask), with the A of the pass's adapters stacked, and
their B side by side. With many adapters, rows are grouped by adapter in one batched product, as in Punica
(arXiv:2310.18547).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.engines.weights.reading import check_adapter, linear_layer

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.core.records import WeightsRef
    from agentrl.engines.weights.reading import AdapterWeights

_NO_ADAPTERS = np.empty(0, np.int64)


class AdapterBank:
    """The adapters of one base model. Layers are wrapped when the first adapter arrives."""

    def __init__(self, model: PreTrainedModel, *, places: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._model = model
        self._free = list(range(places))
        self._adapters: dict[int, AdapterWeights] = {}
        self._layers: dict[str, BankLinear] = {}
        self._rank = 0
        self._columns = 0
        self._selection: bytes | None = None
        self._narrow_indices = _NO_ADAPTERS
        self.active = False
        self.mask: Tensor | None = None
        """Float [B, 1, columns]: 1 if the column belongs to the row's adapter; None: all do."""
        self.groups: _Groups | None = None
        """Rows grouped by adapter; set instead of `mask` if there are many adapters."""

    def free_slot(self) -> int | None:
        """Return the lowest empty slot, or None if all are filled."""
        return min(self._free) if self._free else None

    def check(self, weights: WeightsRef, adapter: AdapterWeights) -> None:
        """Refuse an adapter that does not fit the model.

        Raises:
            EngineError: a rank, module or shape does not fit.
        """
        check_adapter(weights, adapter, self._model, max_rank=self.max_rank)

    def fill(self, place: int, adapter: AdapterWeights) -> None:
        """Put a checked adapter into an empty slot; call it between two passes."""
        self._free.remove(place)
        self._adapters[place] = adapter
        self._selection, self._narrow_indices = None, _NO_ADAPTERS
        has_new_layers = self._wrap(adapter)
        new_rank = max(self._rank, adapter.rank)
        columns = (max(self._adapters) + 1) * new_rank
        if has_new_layers or new_rank > self._rank or columns > self._columns:
            self._rank, self._columns = new_rank, max(columns, self._columns)
            self._allocate()
            # A copy, because the event loop may empty a slot meanwhile. Writing to that slot does no harm.
            for at, weights in list(self._adapters.items()):
                self._write(at, weights)
        else:
            self._write(place, adapter)

    def empty(self, place: int) -> AdapterWeights:
        """Remove and return the adapter of a slot; call it when no row uses the adapter."""
        self._free.append(place)
        return self._adapters.pop(place)

    def _wrap(self, adapter: AdapterWeights) -> bool:
        """Wrap the layers of an adapter that no earlier adapter covered; returns whether there are any."""
        new_names = [name for name in adapter.matrices if name not in self._layers]
        for name in new_names:
            layer = linear_layer(self._model, name)
            assert layer is not None, "checked before"
            parent, _, child = name.rpartition(".")
            bank_layer = BankLinear(layer, self)
            setattr(self._model.get_submodule(parent), child, bank_layer)
            self._layers[name] = bank_layer
        return bool(new_names)

    def _allocate(self) -> None:
        for layer in self._layers.values():
            layer.down = layer.base.weight.new_zeros(self._columns, layer.base.in_features)
            layer.up = layer.base.weight.new_zeros(self._columns, layer.base.out_features)

    def _write(self, place: int, adapter: AdapterWeights) -> None:
        first = place * self._rank
        with torch.inference_mode():
            for name, layer in self._layers.items():
                layer.down[first : first + self._rank] = 0
                layer.up[first : first + self._rank] = 0
                if name in adapter.matrices:
                    down, up = adapter.matrices[name]
                    layer.down[first : first + adapter.rank] = down
                    layer.up[first : first + adapter.rank] = up.t() * adapter.scale

    def select(self, adapters: NDArray[np.int64]) -> None:
        """Set the adapter of each row of the next pass, `[B]`; -1: none."""
        key = adapters.tobytes()
        if key == self._selection:
            return
        self._selection = key
        indices = np.unique(adapters[adapters >= 0])
        self.active = len(indices) > 0
        if not self.active:
            return
        self._narrow(indices)
        columns, device = self._narrow_indices, self._model.device
        everyone = bool((adapters >= 0).all())
        self.mask, self.groups = None, None
        # With at most four, it is cheaper to compute the columns of all adapters for every row and to mask the others'.
        if everyone and len(columns) > 4:
            self.groups = _group_rows(np.searchsorted(columns, adapters), len(columns), device)
        elif len(columns) > 1 or not everyone:
            mask = torch.from_numpy(adapters[:, None, None] == np.repeat(columns, self._rank))
            self.mask = mask.to(device, self._model.dtype)

    def _narrow(self, indices: NDArray[np.int64]) -> None:
        """Compute the columns of these adapters and of few others: the set changes in almost every pass."""
        old_indices = self._narrow_indices
        if np.array_equal(indices, old_indices) or (
            1 < len(indices) < len(old_indices) <= 2 * len(indices) and np.isin(indices, old_indices).all()
        ):
            return
        self._narrow_indices = indices
        first, last = int(indices[0]), int(indices[-1]) + 1
        columns: slice | Tensor = slice(first * self._rank, last * self._rank)
        if last - first > len(indices):
            columns = torch.from_numpy((indices[:, None] * self._rank + np.arange(self._rank)).reshape(-1))
        for layer in self._layers.values():
            layer.narrow(columns, self._rank)


class BankLinear(nn.Module):
    """A linear layer with its part of the bank."""

    def __init__(self, base: nn.Linear, bank: AdapterBank) -> None:
        super().__init__()
        self.base = base
        self.down = base.weight.new_zeros(0, base.in_features)
        self.up = base.weight.new_zeros(0, base.out_features)
        self._plain = (base.weight, base.bias, bank)  # in a tuple, so that torch does not register the parameters twice
        self._live = self._by_adapter = (self.down.t(), self.up)

    def narrow(self, columns: slice | Tensor, rank: int) -> None:
        """Compute only these columns, of adapters of this rank, from now on."""
        down, up = self.down[columns], self.up[columns]
        self._live = (down.t(), up)
        self._by_adapter = (down.view(-1, rank, down.shape[1]).transpose(1, 2), up.view(-1, rank, up.shape[1]))

    def forward(self, hidden: Tensor) -> Tensor:
        """Map `[..., in]` to `[..., out]`."""
        weight, bias, bank = self._plain
        if not bank.active:
            return functional.linear(hidden, weight, bias)
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = functional.linear(flat, weight, bias)
        if bank.groups is not None:
            down, up = self._by_adapter
            count, rows, places = bank.groups
            by_row = flat.view(len(places), -1)
            inputs_by_group = by_row.index_select(0, rows).view(count, -1, flat.shape[-1])
            delta = torch.bmm(torch.bmm(inputs_by_group, down), up).view(len(rows), -1)
            out.view(len(places), -1).add_(delta.index_select(0, places))
        else:
            down, up = self._live
            low = torch.mm(flat, down)
            if bank.mask is not None:
                low.view(len(bank.mask), -1, low.shape[-1]).mul_(bank.mask)
            out.addmm_(low, up)
        return out.view(*hidden.shape[:-1], -1)


class _Groups(NamedTuple):
    """The rows of a pass grouped by adapter, padded with row 0 to equal numbers."""

    adapters: int
    rows: Tensor  # int64 [adapters * most rows of one]
    places: Tensor  # int64 [B], position of each row in `rows`


def _group_rows(adapters: NDArray[np.int64], count: int, device: torch.device) -> _Groups:
    """Group rows by adapter, given the number of each row's adapter."""
    order = np.argsort(adapters, kind="stable")
    sizes = np.bincount(adapters, minlength=count)
    max_rows = int(sizes.max())
    within = np.arange(len(adapters)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows, places = np.zeros(count * max_rows, np.int64), np.empty(len(adapters), np.int64)
    places[order] = adapters[order] * max_rows + within
    rows[places] = np.arange(len(adapters))
    return _Groups(count, torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device))
