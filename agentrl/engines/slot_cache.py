"""Keys and values of every conversation, one slot each: the cache object that Hugging Face models write to.

Owns: the KV tensors, `[slots, kv_heads, capacity + 1, head_dim]` per layer, allocated when a layer is first written.
Does not know which conversation holds a slot, nor how much of a slot is valid: the scheduler does.
Invariant: a pass reads and writes only what `address` named; padding is written to position `capacity`, never read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class SlotCache:
    """A duck-typed `transformers.Cache`: `address` a pass, then hand it to the model as `past_key_values`."""

    is_compileable = False

    def __init__(self, *, slots: int, capacity: int, layers: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers
        self._rows: Tensor | None = None
        self._first = 0
        self._count = 0
        self._positions: Tensor | int = 0
        self._length = 0

    def address(self, *, first: int, count: int, rows: Tensor | None, positions: Tensor | int, length: int) -> None:
        """Say where the next pass reads and writes.

        Args:
            first: first slot of the pass.
            count: number of slots, consecutive from `first` unless `rows` is given.
            rows: `[B]` slots of the pass, ascending, where they are not consecutive.
            positions: where each new token is written, `[B, t]`; an int where `t == 1` and all rows agree.
            length: how many positions are read, from 0.
        """
        self._first, self._count, self._rows = first, count, rows
        self._positions, self._length = positions, length

    def update(
        self, key: Tensor, value: Tensor, layer_index: int, cache_kwargs: object | None = None
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, t, dim]`, return all that the pass may attend to, `[B, heads, length, dim]`."""
        keys, values = self._keys[layer_index], self._values[layer_index]
        if keys is None or values is None:
            keys, values = self._allocate(key, value, layer_index)
        return self._write(keys, key), self._write(values, value)

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        positions, rows = self._positions, self._rows
        if rows is None:
            block = store[self._first : self._first + self._count]
            if isinstance(positions, int):
                block[:, :, positions : positions + 1] = new
            else:
                index = torch.arange(self._count, device=new.device)[:, None]
                block[index, :, positions] = new.transpose(1, 2)
            return block[:, :, : self._length]
        if isinstance(positions, int):
            store[rows, :, positions] = new[:, :, 0]
        else:
            store[rows[:, None], :, positions] = new.transpose(1, 2)
        return store[:, :, : self._length].index_select(0, rows)

    def _allocate(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        made = [x.new_zeros(self.slots, x.shape[1], self.capacity + 1, x.shape[3]) for x in (key, value)]
        self._keys[layer_index], self._values[layer_index] = made
        return made[0], made[1]

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        with torch.inference_mode():
            for store in (*self._keys, *self._values):
                if store is not None:
                    store[target, :, :length] = store[source, :, :length]

    def get_seq_length(self, layer_index: int = 0) -> int:
        """Positions before the new tokens; models ask only when they are not told the positions, and they are."""
        return 0
