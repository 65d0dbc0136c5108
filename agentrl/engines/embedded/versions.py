"""Versions the embedded engine serves: their weights, and how a published version comes to serve.

Owns: the live versions and who holds them (pins, leases, calls in flight), one model per full version, one place in the
adapter bank per adapter, and the order of steps of an update: read and check off the loop, swap between two forward
passes. Does not know slots, nor the tokens of calls.
Invariants: a version that is current, kept, pinned, leased or used by a call is never overwritten; a policy has exactly
one current version; base weights serve as long as anything is built on them; until the new version has passed its
canary check nothing has changed that a later pass could see, so that any failure leaves the old version serving.

refresh   adapters                                   full weights (one copy per version that must stay)
token     calls in flight go on under the new one    the same
turn      calls in flight end on theirs              new calls wait until those in flight have ended, then the swap
episode   sessions stay on theirs until they close   refused
lazy      sessions stay until their lag exceeds      refused
          `max_staleness`, their KV is gone, or a place is short

LoRA: Hu et al., 2021, arXiv:2106.09685. y = W x + B ((A x) * row mask), the A of the pass's adapters stacked, their B
side by side; where they are many, adapter by adapter in one batched product, as in Punica (arXiv:2310.18547).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from agentrl.core.errors import EngineError
from agentrl.engines.models import ready_to_sample
from agentrl.engines.sessions import Leases, LiveVersion, canaries_of, live_version, newest_of
from agentrl.engines.weights import (
    check_adapter,
    check_answer,
    linear_layer,
    match_full_weights,
    read_adapter,
    read_canary,
    read_weights,
    refusal,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.core.ports import Refresh
    from agentrl.core.records import Float32Array, PolicyVersion, WeightsRef
    from agentrl.engines.embedded.capture import RoutingTap
    from agentrl.engines.weights import AdapterFile, Canary

BASE = -1
"""The place of rows that use no adapter."""
_MANY = 4
"""With more adapters in a pass, each row is computed with its own; with fewer, it is cheaper to compute the columns of
all of them for every row, and to mask what is not its own."""
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedSettings:
    """How an embedded engine works, beyond what its capabilities say; see `EmbeddedEngine.load`."""

    slots: int
    refresh: Refresh | Mapping[str, Refresh]
    keep_kv: bool
    max_rank: int
    max_staleness: Mapping[str, int]
    prefill_tokens: int
    fixed_shapes: bool


@dataclass(slots=True, eq=False)
class ServedModel:
    """One copy of the model's weights."""

    model: PreTrainedModel
    state: Mapping[str, Tensor]
    """Its parameters and persistent buffers under the names of the checkpoint."""
    bank: AdapterBank | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ServedModel:
        """Wrap a loaded model."""
        return cls(model, dict(model.state_dict()))

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Copy checked weights into place."""
        with torch.inference_mode():
            for name, tensor in weights.items():
                if name in self.state:
                    self.state[name].copy_(tensor)

    def copied(self) -> dict[str, Tensor]:
        """A copy of the present weights, which `overwrite` can restore."""
        return {name: tensor.clone() for name, tensor in self.state.items()}


@dataclass(slots=True, eq=False, kw_only=True)
class Serving(LiveVersion):
    """A version the embedded engine can sample from."""

    served: ServedModel
    adapter: int = BASE


@dataclass(slots=True)
class VersionTable:
    """The live versions of all policies on one base model."""

    base: ServedModel
    places: int
    max_rank: int
    current: dict[str, Serving] = field(default_factory=dict)
    live: dict[PolicyVersion, Serving] = field(default_factory=dict)
    _spare: ServedModel | None = None

    def start(self, versions: Iterable[PolicyVersion]) -> None:
        """Serve the base weights as these versions."""
        for version in versions:
            self.live[version] = self.current[version.policy] = Serving(version=version, served=self.base)

    def of_policy(self, policy: str) -> Serving:
        """The policy's current version.

        Raises:
            EngineError: the engine does not serve the policy.
        """
        return newest_of(self.current, policy)

    def of_version(self, version: PolicyVersion) -> Serving:
        """A live version.

        Raises:
            EngineError: the version is not (or no longer) here.
        """
        return live_version(self.live, version)

    def servings_of(self, served: ServedModel) -> list[Serving]:
        """Live versions that a model copy serves."""
        return [serving for serving in self.live.values() if serving.served is served]

    def target_for_full(self, policy: str) -> ServedModel | None:
        """The copy that a new full version of `policy` may overwrite; None: it needs a copy of its own.

        The base copy is never given away while adapters are built on it.
        """
        old = self.current.get(policy)
        if old is None or old.held or old.served.bank is not None:
            return None
        for other in self.servings_of(old.served):
            if other is not old and (other.held or other.calls or self.current.get(other.version.policy) is other):
                return None
        return old.served

    def give_back(self, copy: ServedModel) -> None:
        """A copy that came to serve nothing; the next one that is needed is this."""
        self._spare = copy

    def new_copy(self) -> ServedModel:
        """A copy of the architecture, to be filled."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        template = self.base.model
        with torch.random.fork_rng(devices=[]):
            make: Any = AutoModelForCausalLM.from_config
            model = make(template.config, dtype=template.dtype, trust_remote_code=False)
        return ServedModel.of(ready_to_sample(model, template.device))

    def bank(self) -> AdapterBank:
        """The adapter bank of the base model, made when first needed."""
        if self.base.bank is None:
            self.base.bank = AdapterBank(self.base.model, places=self.places, max_rank=self.max_rank)
        return self.base.bank

    def promote(self, new: Serving) -> None:
        """Make a version current; its weights are where it says already."""
        old = self.current.get(new.version.policy)
        if new.adapter == BASE:
            for overwritten in self.servings_of(new.served):
                del self.live[overwritten.version]
        self.live[new.version] = self.current[new.version.policy] = new
        if old is not None:
            self.settle(old)

    def settle(self, serving: Serving) -> bool:
        """Forget a version that nothing needs any more; returns whether it was forgotten."""
        if serving.held or serving.calls or self.current.get(serving.version.policy) is serving:
            return False
        if self.live.get(serving.version) is not serving:
            return False
        if serving.adapter != BASE:
            del self.live[serving.version]
            self.bank().empty(serving.adapter)
            return True
        if serving.served is self.base:
            return False  # base weights cost nothing to keep while the copy stands
        del self.live[serving.version]
        if self._spare is None and not self.servings_of(serving.served):
            self.give_back(serving.served)
        return True


class WeightUpdates:
    """Applies updates one after another, between the passes of an engine."""

    def __init__(
        self,
        *,
        versions: VersionTable,
        settings: EmbeddedSettings,
        between_passes: asyncio.Lock,
        switch: Callable[[Serving, Serving], None],
        on_worker: Callable[[Callable[[], None]], Awaitable[None]],
        answer: Callable[[Serving, Canary], Awaitable[Float32Array]],
        interrupt: Callable[[], None],
        tap: RoutingTap | None,
    ) -> None:
        self._versions = versions
        self._between_passes = between_passes
        self._switch = switch
        self._on_worker = on_worker
        self._answer = answer
        self._interrupt = interrupt
        self._tap = tap
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self.leases: Leases[Serving] = Leases(
            refresh=settings.refresh,
            max_staleness=settings.max_staleness,
            current=versions.of_policy,
            on_release=self.settle,
        )
        self.held: set[str] = set()
        """Policies whose new calls wait for an update at a turn boundary."""
        self.paused = False
        self._stopped = False

    def settle(self, serving: Serving) -> None:
        """A call, pin or lease of `serving` ended."""
        self._versions.settle(serving)
        self._changed.set()

    # --- updates ------------------------------------------------------------------------------------------------------

    async def apply(self, weights: WeightsRef, *, keep: bool) -> None:
        """Serve a new version; see `Engine.update`."""
        async with self._one_at_a_time:
            known = self._versions.live.get(weights.version)
            if known is not None and known.digest:
                if known.digest != weights.sha256:
                    raise refusal(weights, "this version is served with other weights; version ids are never reused")
                known.kept += keep
                return
            self._versions.of_policy(weights.version.policy)
            if weights.kind == "full":
                await self._apply_full(weights, keep=keep)
            else:
                await self._apply_adapter(weights, keep=keep)

    async def _apply_full(self, weights: WeightsRef, *, keep: bool) -> None:
        policy, base = weights.version.policy, self._versions.base
        refresh = self.leases.refresh_of(policy)
        if refresh in ("episode", "lazy"):
            raise refusal(
                weights,
                f"refresh {refresh!r} needs adapters; with full weights set engine.refresh to auto, token or turn",
            )
        loop = asyncio.get_running_loop()
        file = await loop.run_in_executor(None, read_weights, weights)
        read = await loop.run_in_executor(
            None, lambda: match_full_weights(weights, file.tensors, base.state, base.model)
        )
        canary = self._of_the_model(weights, read_canary(weights, file))
        old = self._versions.of_policy(policy)
        try:
            if refresh == "turn":
                self.held.add(policy)
                await self._turn_boundary(weights, old)
            await asyncio.shield(self._swap_full(weights, read, canary, keep=keep))
        finally:
            self.held.discard(policy)
            self._changed.set()

    async def _swap_full(
        self, weights: WeightsRef, read: Mapping[str, Tensor], canary: Canary | None, *, keep: bool
    ) -> None:
        """Once begun it is finished, even if whoever asked for it is cancelled."""
        versions = self._versions
        self._interrupt()
        async with self._between_passes:
            self._check_running()
            old, target = versions.of_policy(weights.version.policy), versions.target_for_full(weights.version.policy)
            served = target or self._new_copy()
            before = served.copied() if target is not None and canary is not None else None
            new = Serving(version=weights.version, digest=weights.sha256, canary=canary, kept=int(keep), served=served)
            await self._on_worker(lambda: served.overwrite(read))
            try:
                await self._check_answer(weights, new)
            except BaseException:
                if before is not None:
                    await self._on_worker(lambda: served.overwrite(before))
                elif target is None:
                    versions.give_back(served)
                raise
            versions.promote(new)
            if self.leases.refresh_of(weights.version.policy) == "token":
                self._move_calls(old, new)

    async def _turn_boundary(self, weights: WeightsRef, old: Serving) -> None:
        while old.calls and self._versions.target_for_full(weights.version.policy) is not None:
            if self.paused:
                raise refusal(weights, "the engine is paused in the middle of turns; resume it, or use refresh token")
            await self._change()

    def _new_copy(self) -> ServedModel:
        served = self._versions.new_copy()
        if self._tap is not None:
            self._tap.attach(served.model)
        return served

    async def _apply_adapter(self, weights: WeightsRef, *, keep: bool) -> None:
        adapter = await asyncio.get_running_loop().run_in_executor(None, read_adapter, weights)
        if self._versions.places == 0:
            raise refusal(weights, "the engine was started without places for adapters (adapter_slots = 0)")
        bank = self._versions.bank()
        bank.check(weights, adapter)
        canary = self._of_the_model(weights, adapter.canary)
        while (place := bank.free_slot()) is None:
            old = self._versions.of_policy(weights.version.policy)
            if self.leases.refresh_of(weights.version.policy) == "token" and not old.held and old.adapter != BASE:
                break  # nothing holds the old version: its place is filled anew
            if not self.leases.revoke([s for s in self._versions.live.values() if s.adapter != BASE]):
                self._check_may_free(weights)
                await self._change()
        await asyncio.shield(self._swap_adapter(weights, adapter, place, canary, keep=keep))

    async def _swap_adapter(
        self, weights: WeightsRef, adapter: AdapterFile, place: int | None, canary: Canary | None, *, keep: bool
    ) -> None:
        """Once begun it is finished, even if whoever asked for it is cancelled."""
        versions, replaced = self._versions, None
        self._interrupt()
        async with self._between_passes:
            self._check_running()
            old, bank = versions.of_policy(weights.version.policy), versions.bank()
            if place is None:
                place, replaced = old.adapter, bank.empty(old.adapter)
            filled = place
            new = Serving(
                version=weights.version,
                digest=weights.sha256,
                canary=canary,
                kept=int(keep),
                served=versions.base,
                adapter=filled,
            )
            await self._on_worker(lambda: bank.fill(filled, adapter))
            try:
                await self._check_answer(weights, new)
            except BaseException:
                bank.empty(filled)
                if replaced is not None:
                    former = replaced
                    await self._on_worker(lambda: bank.fill(filled, former))
                raise
            if replaced is not None:
                del versions.live[old.version]
            versions.promote(new)
            if self.leases.refresh_of(weights.version.policy) == "token":
                self._move_calls(old, new)

    def _of_the_model(self, weights: WeightsRef, canary: Canary | None) -> Canary | None:
        if canary is not None:
            canary.check_vocabulary(weights, int(self._versions.base.model.config.vocab_size))
        return canary

    async def _check_answer(self, weights: WeightsRef, new: Serving) -> None:
        """Ask what is loaded for its canary, between the same two passes, before anything samples from it.

        Raises:
            EngineError: it does not answer as the trainer does.
        """
        if new.canary is not None:
            answer = await self._answer(new, new.canary)
            others, dtype = canaries_of(self._versions.live.values()), new.served.model.dtype
            check_answer(weights, new.canary, answer, dtype=dtype, others=others)

    def _move_calls(self, old: Serving, new: Serving) -> None:
        self._switch(old, new)
        self.settle(old)

    def _check_may_free(self, weights: WeightsRef) -> None:
        current = self._versions.current
        live = [serving for serving in self._versions.live.values() if serving.adapter != BASE]
        if all(s.kept or current[s.version.policy] is s for s in live):
            kept = ", ".join(sorted(str(s.version) for s in live))
            raise refusal(
                weights,
                f"all {self._versions.places} adapter places are taken by {kept}; release one, or raise adapter_slots",
            )

    async def _change(self) -> None:
        self._check_running()  # it may have ended while the files were read, and then nothing changes any more
        self._changed.clear()
        await self._changed.wait()
        self._check_running()

    def _check_running(self) -> None:
        if self._stopped:
            raise EngineError("the engine ended before the update could be applied")

    def wake(self) -> None:
        """Something an update may wait for has changed."""
        self._changed.set()

    def stop(self) -> None:
        """The engine ended: updates that wait or read fail."""
        self._stopped = True
        self._changed.set()


class AdapterBank:
    """The adapters of one base model. Layers are wrapped when the first adapter arrives."""

    def __init__(self, model: PreTrainedModel, *, places: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._model = model
        self._free = list(range(places))
        self._filled: dict[int, AdapterFile] = {}
        self._layers: dict[str, BankLinear] = {}
        self._rank = 0
        self._selected: bytes | None = None
        self._narrowed = _NOTHING
        self.active = False
        self.mask: Tensor | None = None
        """Float [B, 1, columns]: 1 where the column is of the row's adapter; None: all are."""
        self.groups: _Groups | None = None
        """Set instead where there are many adapters."""

    def free_slot(self) -> int | None:
        """The lowest empty place, None if all are filled."""
        return min(self._free) if self._free else None

    def check(self, weights: WeightsRef, adapter: AdapterFile) -> None:
        """Refuse an adapter that does not fit the model.

        Raises:
            EngineError: wrong rank, module or shape.
        """
        check_adapter(weights, adapter, self._model, max_rank=self.max_rank)

    def fill(self, place: int, adapter: AdapterFile) -> None:
        """Put a checked adapter into an empty place; call between two passes."""
        self._free.remove(place)
        self._filled[place] = adapter
        self._selected, self._narrowed = None, _NOTHING
        wrapped = self._wrap(adapter)
        grown = max(self._rank, adapter.rank)
        needed = (max(self._filled) + 1) * grown
        if wrapped or grown > self._rank or needed > next(iter(self._layers.values())).down.shape[0]:
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

    def _wrap(self, adapter: AdapterFile) -> bool:
        """Give the layers of an adapter that no earlier one was on their share of the bank; whether there are any."""
        added = [name for name in adapter.matrices if name not in self._layers]
        for name in added:
            layer = linear_layer(self._model, name)
            assert layer is not None, "checked before"
            parent, _, child = name.rpartition(".")
            wrapped = BankLinear(layer, self)
            setattr(self._model.get_submodule(parent), child, wrapped)
            self._layers[name] = wrapped
        return bool(added)

    def _allocate(self, columns: int) -> None:
        for layer in self._layers.values():
            layer.down = layer.base.weight.new_zeros(columns, layer.base.in_features)
            layer.up = layer.base.weight.new_zeros(columns, layer.base.out_features)

    def _write(self, place: int, adapter: AdapterFile) -> None:
        first = place * self._rank
        with torch.inference_mode():
            for name, layer in self._layers.items():
                layer.down[first : first + self._rank] = 0
                layer.up[first : first + self._rank] = 0
                if name in adapter.matrices:
                    down, up = adapter.matrices[name]
                    layer.down[first : first + adapter.rank] = down
                    layer.up[first : first + adapter.rank] = up.t()

    def select(self, adapters: NDArray[np.int64]) -> None:
        """Say which adapter each row of the next pass uses, `[B]`; -1: none."""
        key = adapters.tobytes()
        if key == self._selected:
            return
        self._selected = key
        used = np.unique(adapters[adapters >= 0])
        self.active = len(used) > 0
        if not self.active:
            return
        self._narrow(used)
        narrowed, weight = self._narrowed, next(iter(self._layers.values())).base.weight
        everyone = bool((adapters >= 0).all())
        self.mask, self.groups = None, None
        if everyone and len(narrowed) > _MANY:
            self.groups = _grouped(np.searchsorted(narrowed, adapters), len(narrowed), weight.device)
        elif len(narrowed) > 1 or not everyone:
            mask = torch.from_numpy(adapters[:, None, None] == np.repeat(narrowed, self._rank))
            self.mask = mask.to(weight)

    def _narrow(self, used: NDArray[np.int64]) -> None:
        """Compute the columns of these adapters, and of few others: which ones there are changes almost every pass."""
        known = self._narrowed
        if np.array_equal(used, known) or (1 < len(used) < len(known) <= 2 * len(used) and np.isin(used, known).all()):
            return
        self._narrowed = used
        first, last = int(used[0]), int(used[-1]) + 1
        columns: slice | Tensor = slice(first * self._rank, last * self._rank)
        if last - first > len(used):
            columns = torch.from_numpy((used[:, None] * self._rank + np.arange(self._rank)).reshape(-1))
        for layer in self._layers.values():
            layer.narrow(columns, self._rank)


class BankLinear(nn.Module):
    """A linear layer and the bank's share of it."""

    def __init__(self, base: nn.Linear, bank: AdapterBank) -> None:
        super().__init__()
        self.base = base
        self.down = base.weight.new_zeros(0, base.in_features)
        self.up = base.weight.new_zeros(0, base.out_features)
        self._plain = (base.weight, base.bias, bank)  # in a tuple: reached at once, and registered only once
        self._live = self._apart = (self.down.t(), self.up)

    def narrow(self, columns: slice | Tensor, rank: int) -> None:
        """Compute only these columns from now on: those of adapters of this rank."""
        down, up = self.down[columns], self.up[columns]
        self._live = (down.t(), up)
        self._apart = (down.view(-1, rank, down.shape[1]).transpose(1, 2), up.view(-1, rank, up.shape[1]))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[..., in]` → `[..., out]`."""
        weight, bias, bank = self._plain
        if not bank.active:
            return functional.linear(hidden, weight, bias)
        flat = hidden.reshape(-1, hidden.shape[-1])
        out = functional.linear(flat, weight, bias)
        if bank.groups is not None:
            down, up = self._apart
            count, rows, places = bank.groups
            by_row = flat.view(len(places), -1)
            grouped = by_row.index_select(0, rows).view(count, -1, flat.shape[-1])
            added = torch.bmm(torch.bmm(grouped, down), up).view(len(rows), -1)
            out.view(len(places), -1).add_(added.index_select(0, places))
        else:
            down, up = self._live
            low = torch.mm(flat, down)
            if bank.mask is not None:
                low.view(len(bank.mask), -1, low.shape[-1]).mul_(bank.mask)
            out.addmm_(low, up)
        return out.view(*hidden.shape[:-1], -1)


class _Groups(NamedTuple):
    """The rows of a pass by adapter, padded with row 0 to the same number each."""

    adapters: int
    rows: Tensor  # int64 [adapters * most rows of one]
    places: Tensor  # int64 [B], where each row lies in `rows`


def _grouped(adapters: NDArray[np.int64], count: int, device: torch.device) -> _Groups:
    """Rows by adapter, from the number of each row's."""
    order = np.argsort(adapters, kind="stable")
    sizes = np.bincount(adapters, minlength=count)
    most = int(sizes.max())
    within = np.arange(len(adapters)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rows, places = np.zeros(count * most, np.int64), np.empty(len(adapters), np.int64)
    places[order] = adapters[order] * most + within
    rows[places] = np.arange(len(adapters))
    return _Groups(count, torch.from_numpy(rows).to(device), torch.from_numpy(places).to(device))
