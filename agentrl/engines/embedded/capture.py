"""Recording for the trainer: the experts that each position used, and the kept set of each sampled token.

Owns: a routing row per slot and position, a kept set per sampled token, until the call's completion takes them. Does
not influence a pass; a tap without `begin` records nothing.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.core.errors import EngineCapabilityError
from agentrl.core.tokens import ExpertRouting, KeptCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from agentrl.core.records import BoolArray, ExpertArray
    from agentrl.engines.embedded.slots import PrefixCopy, Slots


@dataclass(slots=True)
class _CallRouting:
    """Recording state of a slot's call."""

    start: int
    """First position of the part in progress."""
    end: int
    """Number of positions computed for this call, or before it."""
    behind: bool = False
    """Whether the part in progress repeats positions of the previous part and has not passed them."""
    parts: list[tuple[int, ExpertArray]] = field(default_factory=list)
    """Earlier parts, as (first position, rows)."""


class ExpertRoutingRecorder:
    """Records the experts that a mixture-of-experts model actually used, by hooks on its routers.

    A router is a module whose output is a tuple with an integer tensor `[tokens, top_k]`: the chosen experts.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int, capacity: int) -> None:
        self._routers = find_routers(model)
        if not self._routers:
            raise EngineCapabilityError(
                f"engine.capture_routing: {type(model).__name__} has no router that reports its experts. "
                "Use a mixture-of-experts model such as Qwen3-MoE or Mixtral, or set capture_routing = false"
            )
        config = model.config.get_text_config()
        counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._dtype = np.min_scalar_type(max(filter(None, counts), default=1) - 1)
        self._recording = False
        self._chosen: list[Tensor] = []
        self._shape = (slots, capacity + 1)
        self._rows: ExpertArray | None = None
        self._calls = [_CallRouting(0, 0) for _ in range(slots)]
        self.attach(model)

    def attach(self, model: PreTrainedModel) -> None:
        """Attach hooks to `model`, another copy of the same architecture."""
        for name in self._routers:
            model.get_submodule(name).register_forward_hook(self._listen)

    def _listen(self, module: nn.Module, inputs: object, output: tuple[Tensor, ...]) -> None:
        if self._recording:
            self._chosen.append(chosen_experts(output))

    def begin(self) -> None:
        """Record the next pass."""
        self._recording = True
        self._chosen.clear()

    def store(
        self,
        slots: Slots,
        begin: NDArray[np.int64],
        counts: NDArray[np.int64],
        width: int,
        copies: Sequence[PrefixCopy] = (),
    ) -> None:
        """Store a pass and its copies: slot i computed `counts[i]` positions from `begin[i]`, right-aligned in `width`.

        A slot's positions are stored in ascending order, so copies to it come first.
        """
        self._recording = False
        routing = torch.stack(self._chosen, dim=1).to("cpu", torch.int16).numpy().astype(self._dtype)
        rows = routing.reshape(len(slots), width, *routing.shape[1:])
        if self._rows is None:
            self._rows = np.zeros((*self._shape, *routing.shape[1:]), self._dtype)
        computed = {
            slot: (first, rows[i, width - count :])
            for i, (slot, first, count) in enumerate(zip(slots.tolist(), begin.tolist(), counts.tolist(), strict=True))
        }
        for copy in copies:
            if copy.source in computed:
                self._put(copy.source, *computed.pop(copy.source))
            self.copy(copy)
        for slot, (first, positions) in computed.items():
            self._put(slot, first, positions)

    def _put(self, slot: int, first: int, rows: ExpertArray) -> None:
        """Record that the KV of `slot` from position `first` on was computed through `rows`.

        Positions recomputed through other experts begin a new part: earlier tokens keep the routing they were sampled
        with.
        """
        assert self._rows is not None
        calls, old_rows, stop = self._calls[slot], self._rows[slot], first + len(rows)
        overlap_end = min(stop, calls.end)
        differences = np.flatnonzero(
            (old_rows[first:overlap_end] != rows[: max(overlap_end - first, 0)]).any(axis=(1, 2))
        )
        if len(differences):
            at = first + int(differences[0])
            if not calls.behind and calls.start < calls.end:
                calls.parts.append((calls.start, old_rows[calls.start : calls.end].copy()))
                calls.start, calls.behind = at, True
            calls.start = min(calls.start, at)
        old_rows[first:stop] = rows
        if stop > calls.end:
            calls.end, calls.behind = stop, False

    def restart(self, slot: int, start: int, end: int) -> None:
        """Begin a call in `slot`, which has KV of `end` positions. The call's routing begins at position `start`."""
        self._calls[slot] = _CallRouting(start, end)

    def copy(self, copy: PrefixCopy) -> None:
        """Copy the routing of positions."""
        if self._rows is not None:
            self._put(copy.target, copy.start, self._rows[copy.source, copy.start : copy.stop].copy())

    def routing_of_call(self, slot: int, num_computed: int) -> ExpertRouting | None:
        """Return the routing of the slot's call, which ends with KV of `num_computed` positions; None before the first
        pass."""
        if self._rows is None:
            return None
        calls = self._calls[slot]
        stop = max(calls.start, num_computed) if calls.behind else calls.end
        parts = [*calls.parts, (calls.start, self._rows[slot, calls.start : stop].copy())]
        return ExpertRouting.of_stretches(parts)


def chosen_experts(output: object) -> Tensor:
    """Return the integer tensor of a router's output.

    Raises:
        TypeError: the output has none.
    """
    for part in output if isinstance(output, tuple) else ():
        if isinstance(part, torch.Tensor) and part.dim() == 2 and not part.is_floating_point():
            return part
    raise TypeError("not a router's output")


def find_routers(model: PreTrainedModel) -> dict[str, int]:
    """Return the modules that choose experts, in the order in which they run: their names, with the number of experts
    that each chooses for a token."""
    routers: dict[str, int] = {}
    hooks = []
    for name, module in model.named_modules():

        def note(module: nn.Module, inputs: object, output: object, name: str = name) -> None:
            with contextlib.suppress(TypeError):
                routers[name] = chosen_experts(output).shape[1]

        hooks.append(module.register_forward_hook(note))
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, 3), dtype=torch.int64, device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return routers


MAX_KEPT_IDS = 1 << 24
"""Number of ids after which a call's kept sets are recorded no further. Its turn is then too large for a journal entry,
so the episode is dropped by name."""


class SamplingMaskRecorder:
    """Records the sampling mask of each slot's call: the kept set of every sampled token."""

    def __init__(self, slots: int) -> None:
        self._sets: list[list[NDArray[np.int32] | KeptCount]] = [[] for _ in range(slots)]
        self._sizes = [0] * slots

    def clear(self, slot: int) -> None:
        """Start a new call in `slot`."""
        self._sets[slot], self._sizes[slot] = [], 0

    def store(self, slots: Slots, mask: Tensor | None, is_filtered: BoolArray) -> None:
        """Store the kept sets of one token per slot, from `mask`, `[B, V]`, for calls with filters."""
        if mask is None:
            return
        table = mask.cpu().numpy()
        for i, slot in enumerate(slots.tolist()):
            if is_filtered[i]:
                self._sets[slot].append(self._kept_set(slot, table[i]))

    def _kept_set(self, slot: int, mask: BoolArray) -> NDArray[np.int32] | KeptCount:
        if mask.all():
            return KeptCount.NONE
        if self._sizes[slot] >= MAX_KEPT_IDS:
            return KeptCount.MISSING
        kept = np.flatnonzero(mask).astype(np.int32)
        self._sizes[slot] += len(kept)
        return kept

    def sets_of_call(self, slot: int) -> Sequence[NDArray[np.int32] | KeptCount]:
        """Return the kept sets of the slot's call with filters, one per sampled token, as `KeptSets.of` takes them."""
        return self._sets[slot]
