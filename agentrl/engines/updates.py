"""How a published version comes to serve: read and check off the loop, swap between two forward passes.

Owns: the order of steps of an update, leases, and what each refresh does with calls in flight. Does not know slots.
Invariant: until the new version has answered its probe nothing has changed that a later pass could see, so that any
failure leaves the old version serving.

refresh   adapters                                   full weights (one copy per version that must stay)
token     calls in flight go on under the new one    the same
turn      calls in flight end on theirs              new calls wait until those in flight have ended, then the swap
episode   sessions stay on theirs until they close   refused
lazy      sessions stay until their lag exceeds      refused
          `max_staleness`, their KV is gone, or a place is short
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.core.errors import EngineError
from agentrl.engines.adapter_files import read_adapter
from agentrl.engines.probe import check_answer, read_probe
from agentrl.engines.serving import BASE, Serving
from agentrl.engines.sessions import Leases, probes_of
from agentrl.engines.weight_files import match_full_weights, read_weights, refusal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from torch import Tensor

    from agentrl.core.ports import Refresh
    from agentrl.core.records import Float32Array, WeightsRef
    from agentrl.engines.adapter_files import AdapterFile
    from agentrl.engines.capture import RoutingTap
    from agentrl.engines.probe import Probe
    from agentrl.engines.serving import ServedModel, VersionTable


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
        answer: Callable[[Serving, Probe], Awaitable[Float32Array]],
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
            ended=self.settle,
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
        probe = self._of_the_model(weights, read_probe(weights, file))
        old = self._versions.of_policy(policy)
        try:
            if refresh == "turn":
                self.held.add(policy)
                await self._turn_boundary(weights, old)
            await asyncio.shield(self._swap_full(weights, read, probe, keep=keep))
        finally:
            self.held.discard(policy)
            self._changed.set()

    async def _swap_full(
        self, weights: WeightsRef, read: Mapping[str, Tensor], probe: Probe | None, *, keep: bool
    ) -> None:
        """Once begun it is finished, even if whoever asked for it is cancelled."""
        versions = self._versions
        self._interrupt()
        async with self._between_passes:
            self._check_running()
            old, target = versions.of_policy(weights.version.policy), versions.target_for_full(weights.version.policy)
            served = target or self._new_copy()
            before = served.copied() if target is not None and probe is not None else None
            new = Serving(version=weights.version, digest=weights.sha256, probe=probe, kept=int(keep), served=served)
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
        probe = self._of_the_model(weights, adapter.probe)
        while (place := bank.free_place()) is None:
            old = self._versions.of_policy(weights.version.policy)
            if self.leases.refresh_of(weights.version.policy) == "token" and not old.held and old.adapter != BASE:
                break  # nothing holds the old version: its place is filled anew
            if not self.leases.revoke([s for s in self._versions.live.values() if s.adapter != BASE]):
                self._check_may_free(weights)
                await self._change()
        await asyncio.shield(self._swap_adapter(weights, adapter, place, probe, keep=keep))

    async def _swap_adapter(
        self, weights: WeightsRef, adapter: AdapterFile, place: int | None, probe: Probe | None, *, keep: bool
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
                probe=probe,
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

    def _of_the_model(self, weights: WeightsRef, probe: Probe | None) -> Probe | None:
        if probe is not None:
            probe.check_vocabulary(weights, int(self._versions.base.model.config.vocab_size))
        return probe

    async def _check_answer(self, weights: WeightsRef, new: Serving) -> None:
        """Ask what is loaded for its probe, between the same two passes, before anything samples from it.

        Raises:
            EngineError: it does not answer as the trainer does.
        """
        if new.probe is not None:
            answer = await self._answer(new, new.probe)
            others, dtype = probes_of(self._versions.live.values()), new.served.model.dtype
            check_answer(weights, new.probe, answer, dtype=dtype, others=others)

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
