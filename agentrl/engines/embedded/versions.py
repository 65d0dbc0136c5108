"""Versions the embedded engine serves: their weights, and how a published version comes to serve.

Owns: the live versions and who holds them (pins, leases, calls in flight), one model per full version, one place in the
adapter bank per adapter, and the order of steps of an update: read and check off the loop, swap between two forward
passes. Does not know slots, nor the tokens of calls.
Invariants: a version that is current, pinned, leased or used by a call is never overwritten; a policy has exactly
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM

from agentrl.engines.models import ready_to_sample
from agentrl.engines.versions import LiveVersion, VersionTable, refusal, run_to_end
from agentrl.engines.weights import (
    check_adapter,
    check_answer,
    linear_layer,
    match_full_weights,
    read_adapter,
    read_canary,
    read_weights,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from agentrl.core.ports import Refresh
    from agentrl.core.records import Float32Array, PolicyVersion, WeightsRef
    from agentrl.engines.embedded.capture import RoutingTap
    from agentrl.engines.versions import Canary
    from agentrl.engines.weights import AdapterWeights

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


class EmbeddedVersions(VersionTable[Serving]):
    """The versions of one embedded engine; updates are applied one after another, between its passes.

    Args:
        base: the loaded model.
        versions: its weights, as the first version of every policy.
        settings: the engine's.
        places: adapters that are served side by side.
        between_passes: held by whoever computes or changes weights.
        switch: moves the calls that the first version samples to the second.
        on_worker: runs work on the thread that computes.
        answer: the log-probabilities that a version gives to a canary.
        interrupt: ends the engine's run of passes soon.
        tap: records the experts that tokens were routed to.
    """

    def __init__(  # noqa: PLR0913 (the parts of the engine that an update needs)
        self,
        base: ServedModel,
        versions: Iterable[PolicyVersion],
        *,
        settings: EmbeddedSettings,
        places: int,
        between_passes: asyncio.Lock,
        switch: Callable[[Serving, Serving], None],
        on_worker: Callable[[Callable[[], None]], Awaitable[None]],
        answer: Callable[[Serving, Canary], Awaitable[Float32Array]],
        interrupt: Callable[[], None],
        tap: RoutingTap | None,
    ) -> None:
        super().__init__(refresh=settings.refresh, max_staleness=settings.max_staleness, places=places)
        self.base = base
        self._max_rank = settings.max_rank
        self._spare: ServedModel | None = None
        self._between_passes = between_passes
        self._switch = switch
        self._on_worker = on_worker
        self._answer = answer
        self._interrupt = interrupt
        self._tap = tap
        self.paused = False
        for version in versions:
            self.live[version] = self.current[version.policy] = Serving(version=version, served=base)

    # --- copies and places --------------------------------------------------------------------------------------------

    def _servings_of(self, served: ServedModel) -> list[Serving]:
        """Live versions that a model copy serves."""
        return [serving for serving in self.live.values() if serving.served is served]

    def _overwritable(self, policy: str) -> ServedModel | None:
        """The copy that the next full version of `policy` may overwrite; None: it needs a copy of its own.

        The base copy is never given away while adapters are built on it.
        """
        old = self.of_policy(policy)
        if old.held or old.served.bank is not None:
            return None
        for other in self._servings_of(old.served):
            if other is not old and (other.held or other.calls or self.is_current(other)):
                return None
        return old.served

    def _new_copy(self) -> ServedModel:
        """A copy of the architecture, to be filled: one that came to serve nothing, if there is one."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        template = self.base.model
        with torch.random.fork_rng(devices=[]):
            make: Any = AutoModelForCausalLM.from_config
            model = make(template.config, dtype=template.dtype, trust_remote_code=False)
        served = ServedModel.of(ready_to_sample(model, template.device))
        if self._tap is not None:
            self._tap.attach(served.model)
        return served

    def _bank(self) -> AdapterBank:
        """The adapter bank of the base model, made when first needed."""
        if self.base.bank is None:
            self.base.bank = AdapterBank(self.base.model, places=self.places, max_rank=self._max_rank)
        return self.base.bank

    def settle(self, serving: Serving) -> None:
        """See `VersionTable.settle`; base weights cost nothing to keep while the copy stands."""
        self.wake()
        if serving.held or serving.calls or self.is_current(serving) or not self.is_live(serving):
            return
        if serving.adapter != BASE:
            del self.live[serving.version]
            self._bank().empty(serving.adapter)
        elif serving.served is not self.base:
            del self.live[serving.version]
            if self._spare is None and not self._servings_of(serving.served):
                self._spare = serving.served

    # --- updates ------------------------------------------------------------------------------------------------------

    async def _load(self, weights: WeightsRef) -> None:
        await (self._load_full(weights) if weights.kind == "full" else self._load_adapter(weights))

    async def _make_current(self, serving: Serving) -> None:
        self._interrupt()
        async with self._between_passes:
            self._promote(serving)

    def _promote(self, new: Serving) -> None:
        """Make a version current whose weights are in place; call between two passes."""
        policy = new.version.policy
        old = self.of_policy(policy)
        self.live[new.version] = self.current[policy] = new
        if self.leases.refresh_of(policy) == "token":
            self._switch(old, new)
        self.settle(old)

    async def _load_full(self, weights: WeightsRef) -> None:
        policy, base = weights.version.policy, self.base
        refresh = self.leases.refresh_of(policy)
        if refresh in ("episode", "lazy"):
            raise refusal(
                weights,
                f"refresh {refresh!r} needs adapters; with full weights set engine.refresh to auto, token or turn",
            )
        file = await asyncio.to_thread(read_weights, weights)
        read = await asyncio.to_thread(match_full_weights, weights, file.tensors, base.state, base.model)
        canary = self._of_the_model(weights, read_canary(weights, file))
        try:
            if refresh == "turn":
                self.held.add(policy)
                await self._turn_boundary(weights)
            await run_to_end(self._swap_full(weights, read, canary))
        finally:
            self.held.discard(policy)
            self.wake()

    async def _turn_boundary(self, weights: WeightsRef) -> None:
        old = self.of_policy(weights.version.policy)
        while old.calls and self._wanted.is_current(weights) and self._overwritable(old.version.policy) is not None:
            if self.paused:
                raise refusal(weights, "the engine is paused in the middle of turns; resume it, or use refresh token")
            await self._change()

    async def _swap_full(self, weights: WeightsRef, read: Mapping[str, Tensor], canary: Canary | None) -> None:
        """Once begun it is finished, even if whoever asked for it is cancelled."""
        self._interrupt()
        async with self._between_passes:
            self._check_open()
            is_current = self._wanted.is_current(weights)
            target = self._overwritable(weights.version.policy) if is_current else None
            served = target or self._new_copy()
            before = served.copied() if target is not None and canary is not None else None
            overwritten = {serving.version: serving for serving in self._servings_of(served)}
            for version in overwritten:
                del self.live[version]  # from here on nobody can hold it
            new = self._serving(weights, canary, served)
            await self._on_worker(lambda: served.overwrite(read))
            try:
                await self._check_answer(weights, new, *overwritten.values())
            except BaseException:
                if before is not None:
                    await self._on_worker(lambda: served.overwrite(before))
                elif target is None:
                    self._spare = served
                self.live |= overwritten
                raise
            self._add(new, is_current=is_current)

    async def _load_adapter(self, weights: WeightsRef) -> None:
        adapter = await asyncio.to_thread(read_adapter, weights)
        if self.places == 0:
            raise refusal(weights, "the engine was started without places for adapters (adapter_slots = 0)")
        bank = self._bank()
        bank.check(weights, adapter)
        canary = self._of_the_model(weights, adapter.canary)
        while True:
            while bank.free_slot() is None and not self._is_replaceable(weights):
                await self._wait_for_adapter_slot(weights, [s for s in self.live.values() if s.adapter != BASE])
            if await run_to_end(self._swap_adapter(weights, adapter, canary)):
                return

    def _is_replaceable(self, weights: WeightsRef) -> bool:
        """Whether nothing holds the policy's current adapter once these weights are current."""
        policy = weights.version.policy
        old = self.of_policy(policy)
        is_free = self.leases.refresh_of(policy) == "token" and not old.held and old.adapter != BASE
        return is_free and self._wanted.is_current(weights)

    async def _swap_adapter(self, weights: WeightsRef, adapter: AdapterWeights, canary: Canary | None) -> bool:
        """Fill a free place or, where there is none, that of the policy's current version; False: that is held.

        Once begun it is finished, even if whoever asked for it is cancelled.
        """
        replaced = None
        self._interrupt()
        async with self._between_passes:
            self._check_open()
            old, bank = self.of_policy(weights.version.policy), self._bank()
            is_current, place = self._wanted.is_current(weights), bank.free_slot()
            if place is None:
                if not self._is_replaceable(weights):
                    return False
                del self.live[old.version]  # from here on nobody can hold it
                place, replaced = old.adapter, bank.empty(old.adapter)
            filled = place
            new = self._serving(weights, canary, self.base, adapter=filled)
            await self._on_worker(lambda: bank.fill(filled, adapter))
            try:
                await self._check_answer(weights, new, old)
            except BaseException:
                bank.empty(filled)
                if replaced is not None:
                    former = replaced
                    await self._on_worker(lambda: bank.fill(filled, former))
                    self.live[old.version] = old
                raise
            self._add(new, is_current=is_current)
            return True

    def _serving(
        self, weights: WeightsRef, canary: Canary | None, served: ServedModel, *, adapter: int = BASE
    ) -> Serving:
        return Serving(version=weights.version, digest=weights.sha256, canary=canary, served=served, adapter=adapter)

    def _add(self, new: Serving, *, is_current: bool) -> None:
        """A version whose weights are in place can be sampled from; call between two passes."""
        new.pinned = self._wanted.has_pin(new.version)
        self.live[new.version] = new
        if is_current:
            self._promote(new)
        else:
            self.settle(new)  # nobody may want it any more

    def _of_the_model(self, weights: WeightsRef, canary: Canary | None) -> Canary | None:
        if canary is not None:
            canary.check_vocabulary(weights, int(self.base.model.config.vocab_size))
        return canary

    async def _check_answer(self, weights: WeightsRef, new: Serving, *replaced: Serving) -> None:
        """The canary check, between the same two passes, before anything samples from the version.

        Raises:
            EngineError: it does not answer as the trainer does.
        """
        if new.canary is not None:
            answer = await self._answer(new, new.canary)
            others, dtype = self.canaries(new, *replaced), new.served.model.dtype
            check_answer(weights, new.canary, answer, dtype=dtype, others=others)


class AdapterBank:
    """The adapters of one base model. Layers are wrapped when the first adapter arrives."""

    def __init__(self, model: PreTrainedModel, *, places: int, max_rank: int) -> None:
        self.max_rank = max_rank
        self._model = model
        self._free = list(range(places))
        self._filled: dict[int, AdapterWeights] = {}
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

    def check(self, weights: WeightsRef, adapter: AdapterWeights) -> None:
        """Refuse an adapter that does not fit the model.

        Raises:
            EngineError: wrong rank, module or shape.
        """
        check_adapter(weights, adapter, self._model, max_rank=self.max_rank)

    def fill(self, place: int, adapter: AdapterWeights) -> None:
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

    def empty(self, place: int) -> AdapterWeights:
        """Forget the adapter of `place`, which is returned; call when no row uses it."""
        self._free.append(place)
        return self._filled.pop(place)

    def _wrap(self, adapter: AdapterWeights) -> bool:
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

    def _write(self, place: int, adapter: AdapterWeights) -> None:
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
