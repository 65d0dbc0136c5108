"""Routes a run's calls and versions to its engines: replicas of each base model, endpoints, and bots.

`EngineRouter` is the run's engine and implements `core.ports.Engine`. A `Fleet` holds the replicas of one base model:
it spreads conversations over them, and brings them to the requested versions in turn. A worker process does not decide
versions; it routes its calls with a `SamplerRouter`. None of them knows the replicas' kind of engine.

The table of versions has a `VersionRow` per policy and replica, `requested` and `confirmed`. One request covers all
policies of a base model, so their rows are stored together in `Replica.versions`. `Fleet.versions` holds the run's
request for a base model, and the versions confirmed by at least one replica. Endpoints and bots have no versions.
`Fleet.reconcile` is the only code that moves a replica from `confirmed` to `requested`.

Invariants: a conversation stays with its replica, which has its KV, until that is lost or behind; every replica is
brought to the requested versions, also when it joins or returns late, and is fenced while it is behind: it finishes its
calls and gets no new ones; a version that the first replica refuses has reached none, unless that replica's disk
refused it; a fenced replica is reported with its reason, again after a minute, after two more, and so on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agentrl.core.errors import (
    EngineError,
    EngineFailedError,
    EngineLostError,
    EngineStorageError,
    VersionsRefusedError,
    format_foreign_error,
)
from agentrl.core.futures import run_shielded
from agentrl.core.ids import opening_digest
from agentrl.core.ports import EngineCapabilities, ProcessStatusSource
from agentrl.engines.external import ExternalPolicy, ExternalSession
from agentrl.engines.remote.client import AddressableEngine, RoutedSession, pick_replica
from agentrl.engines.version_table import VersionRow, VersionSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from agentrl.core.ports import Engine, EngineSession, Sampler, TokenScores
    from agentrl.core.records import Int32Array, PolicyVersion, ProcessStatus, WeightsRef

FENCE_S = 30.0
"""Maximum time the other replicas wait for one replica's update to full weights, in seconds."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of the fleet, and its state."""

    number: int
    engine: Engine
    sessions: int = 0
    """Number of its conversations."""
    versions: VersionRow = field(default_factory=VersionRow)
    """Last request to the replica, and the versions that it serves."""
    has_request: bool = False
    """Whether the replica has received that request, and was not lost since."""
    refusal: EngineError | None = None
    """Error with which the replica refused the last request."""
    follow_task: asyncio.Task[None] | None = None
    """Task that makes the replica serve the requested versions."""
    is_fenced: bool = False
    why: str = ""
    """Reason for the fence."""
    is_lost: bool = False
    failure: EngineError | None = None
    """Error with which the replica failed for good."""

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        return self.engine.open(session_id, policy, pin=pin)


class Fleet:
    """The replicas of one base model.

    Conversations with the same opening share a replica unless its load is too high. The replica is chosen by consistent
    hashing with bounded loads: Mirrokni et al., 2018, arXiv:1608.01350.

    Args:
        engines: engines with equal policies, versions and capabilities.
        tell: receives a line for the user when a replica falls behind, and when it recovers.
        first_number: number of the first replica; no other fleet of the run has a replica of the same number.
    """

    def __init__(
        self, engines: Sequence[Engine], *, tell: Callable[[str], None] | None = None, first_number: int = 0
    ) -> None:
        self.versions = VersionRow()
        """Versions that the run wants, and versions that at least one replica serves."""
        self._replicas = [Replica(number, engine) for number, engine in enumerate(engines, first_number)]
        self.capabilities = _combine_replicas([engine.capabilities for engine in engines])
        self._refused: dict[PolicyVersion, EngineError] = {}
        """Versions that were withdrawn from the request because no replica accepts them, until they are requested
        again."""
        self._unpin_tasks: set[asyncio.Task[None]] = set()
        """Tasks that unpin versions while a replica is busy with an earlier request; see `serve`."""
        self._tell = tell or (lambda line: None)
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self._reminder_task: asyncio.Task[None] | None = None
        self._closed = False
        self._moved: Callable[[], None] = lambda: None

    @property
    def engines(self) -> list[Engine]:
        """The replicas."""
        return [replica.engine for replica in self._replicas]

    def statuses(self) -> list[ProcessStatus]:
        return [
            replace(status, name=f"engine {replica.number}", doing="catches up" if replica.is_fenced else status.doing)
            for replica in self._replicas
            if isinstance(replica.engine, ProcessStatusSource)
            for status in replica.engine.statuses()
        ]

    # --- clients in other processes -----------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the unfenced replicas."""
        engines = [replica.engine for replica in self._replicas if not replica.is_fenced]
        return tuple(
            address for engine in engines if isinstance(engine, AddressableEngine) for address in engine.addresses
        )

    def on_move(self, callback: Callable[[], None]) -> None:
        self._moved = callback
        for replica in self._replicas:
            if isinstance(replica.engine, AddressableEngine):
                replica.engine.on_move(callback)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> RoutedSession[Replica]:
        """Open a session, as `Engine.open` does; its first call chooses the replica."""
        session = RoutedSession(self, session_id, policy, pin)
        for replica in sorted(self._live_replicas(), key=lambda candidate: candidate.is_fenced):
            try:
                replica.open(session_id, policy, pin=pin).close()  # errors must surface here, not at the first call
            except EngineLostError as error:
                self.replica_lost(replica, error)
            else:
                return session
        raise EngineLostError(f"session {session_id}: all replicas of the engine are lost")

    def is_available(self, replica: Replica) -> bool:
        return not replica.is_fenced

    async def pick(self, policy: str, opening: int) -> Replica:
        """Choose a replica; waits while all replicas are fenced."""
        available = await self._available()
        return available[pick_replica([replica.sessions for replica in available], policy, opening)]

    async def _available(self) -> list[Replica]:
        while not (available := [replica for replica in self._live_replicas() if not replica.is_fenced]):
            is_undecided = bool(self.versions.new())  # a refusal is about to be withdrawn
            if not (is_undecided or any(one.follow_task and not one.follow_task.done() for one in self._replicas)):
                raise self._all_replicas_lost()
            await self._change()
        return available

    def replica_lost(self, replica: Replica, error: EngineLostError | EngineFailedError) -> None:
        """Fence a lost replica until it answers again, or permanently."""
        if isinstance(error, EngineFailedError):
            if replica.failure is None and not self._closed:
                replica.failure, replica.is_fenced = error, False  # record the failure even if the replica was fenced
                self._fence(replica, f"it has failed for good: {error}")
        elif not replica.is_lost and replica.failure is None:
            replica.is_lost = True
            self._fence(replica, "it is lost")
            self._follow(replica)

    async def _answers(self, replica: Replica) -> None:
        """Wait until a lost replica takes calls again."""
        while replica.is_lost:
            try:
                await replica.engine.ping()
                replica.is_lost = False
            except EngineLostError:
                await asyncio.sleep(1.0)

    def _live_replicas(self) -> list[Replica]:
        if self._closed:
            raise EngineError("the engine is closed")
        replicas = [replica for replica in self._replicas if replica.failure is None]
        if not replicas:
            raise self._all_replicas_lost()
        return replicas

    def _all_replicas_lost(self) -> EngineFailedError:
        reasons = [
            f"replica {replica.number}: {replica.failure or replica.refusal or 'behind'}" for replica in self._replicas
        ]
        return EngineFailedError(f"all replicas of the engine are lost; {'; '.join(reasons)}")

    # --- control ----------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Serve versions, as `Engine.serve` does: update the replicas in turn, while the others sample.

        A replica that takes longer than `FENCE_S` for full weights, or fails where another did not, is fenced until it
        has caught up. An adapter may have to wait for a slot, which conversations free when they end, and unpinned
        versions at once; this method waits too.
        """
        self.versions.request(current, pinned)
        versions = {weights.version for weights in (*current, *pinned)}
        for version in versions:
            self._refused.pop(version, None)
        for replica in self._replicas:
            replica.refusal = None
            if replica.has_request and replica.follow_task is not None and not replica.follow_task.done():
                # The replica still works on an earlier request, which may wait for a place that only versions unpinned
                # since then can free: unpin them now. What is new reaches it when that request has ended.
                self._unpin(replica)
        self._changed.set()
        await run_shielded(self._roll_out(versions))

    def _unpin(self, replica: Replica) -> None:
        """Unpin versions of the replica's request in the background, unless it is asked for a newer request before. A
        failure is ignored."""
        request = replica.versions.requested

        async def unpin() -> None:
            if replica.versions.requested is request:
                await replica.engine.serve((), request.pinned & self.versions.requested.pinned)

        task = asyncio.get_running_loop().create_task(unpin(), name="engine unpins")
        self._unpin_tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            self._unpin_tasks.discard(task)
            if not task.cancelled():
                task.exception()  # mark as retrieved: the replica's own task (`reconcile`) meets the failure too

        task.add_done_callback(end)

    async def _roll_out(self, versions: Collection[PolicyVersion]) -> None:
        """Bring the replicas to the newest request, one after another, without the versions that none accepts.

        Raises:
            VersionsRefusedError: this or an earlier call withdrew some of `versions`.
        """
        async with self._one_at_a_time:
            while True:
                request, is_taken = self.versions.requested, False
                try:
                    for replica in self._live_replicas():
                        await self._in_turn(replica)
                    # A newer request is given to the replicas in turn, too.
                    while not (is_taken := self._is_taken()) and self.versions.requested is request:
                        await self._change()
                except VersionsRefusedError as error:
                    self._withdraw(request, error.refused)
                except EngineError as error:
                    self._withdraw(request, {weights.version: error for weights in self.versions.new()})
                    raise
                if is_taken:
                    break
            self.versions.confirm(self.versions.requested)
            refused = {version: self._refused[version] for version in versions if version in self._refused}
        if refused:
            raise VersionsRefusedError(refused=refused)

    def _withdraw(self, request: VersionSet, refused: Mapping[PolicyVersion, EngineError]) -> None:
        """Take refused versions out of a request, unless a newer one decides; further callers that wait for them get
        the errors too."""
        if self.versions.refuse(request, refused):
            self._refused |= refused
            for replica in self._replicas:
                self._follow(replica)

    async def _in_turn(self, replica: Replica) -> None:
        """Wait until a replica serves the requested versions, and fence it if it does not; skip fenced ones.

        Raises:
            EngineError: the replica refused, and no other replica accepted.
        """
        task = self._follow(replica)
        if replica.is_fenced:
            return
        merged = self.capabilities.merged
        is_full = any(
            weights.kind == "full" or weights.version.policy in merged
            for weights in self.versions.requested.all - replica.versions.confirmed.all
        )
        silent = f"no answer within {FENCE_S:g} s"
        try:
            async with asyncio.timeout(FENCE_S):
                await self._wait_for_follow(replica, task)
        except TimeoutError:
            if not is_full:
                cause = f"{silent}: it waits for a free adapter slot, or hangs"
                self._tell(f"engine replica {replica.number} has not taken {self._missing(replica)} ({cause})")
                await self._wait_for_follow(replica, task)
        lacks_storage = isinstance(replica.refusal, VersionsRefusedError) and any(
            isinstance(error, EngineStorageError) for error in replica.refusal.refused.values()
        )
        is_refused = lacks_storage and len(self._live_replicas()) > 1
        is_slow = not task.done() and len(self._live_replicas()) > 1
        if is_slow or is_refused or (self._is_behind(replica) and self._is_taken()):
            self._fence(replica, f"it is behind at {self._missing(replica)} ({replica.refusal or silent})")

    async def _wait_for_follow(self, replica: Replica, task: asyncio.Task[None]) -> None:
        while not (task.done() or replica.is_fenced):
            await self._change()

    def _missing(self, replica: Replica) -> str:
        new = self.versions.requested.all - replica.versions.confirmed.all
        return ", ".join(sorted(str(weights.version) for weights in new))

    def _is_taken(self) -> bool:
        """Return whether a replica serves the requested versions.

        Raises:
            EngineError: no replica will; the message has the reason.
        """
        replicas = self._live_replicas()
        behind_replicas = [replica for replica in replicas if self._is_behind(replica)]
        if len(behind_replicas) < len(replicas):
            return True
        is_unanimous = all(replica.refusal for replica in behind_replicas)
        for replica in behind_replicas:
            if replica.refusal is not None and (is_unanimous or not replica.is_fenced):
                raise replica.refusal
        return False

    def _is_behind(self, replica: Replica) -> bool:
        """Whether a replica lacks a version, or has a current one that the others refused."""
        serves, request = replica.versions.confirmed, self.versions.requested
        return serves.current != request.current or not request.pinned <= serves.pinned

    def _follow(self, replica: Replica) -> asyncio.Task[None]:
        """Return the task that makes a replica serve the requested versions, starting it if none runs."""
        if replica.follow_task is None or replica.follow_task.done():
            name = f"engine replica {replica.number}"
            replica.follow_task = asyncio.get_running_loop().create_task(self.reconcile(replica), name=name)
            replica.follow_task.add_done_callback(lambda _: self._changed.set())
        return replica.follow_task

    async def reconcile(self, replica: Replica) -> None:
        """Wait for a lost replica, ask it for the requested versions, again as long as these change, and lift its
        fence."""
        while not self._closed and replica.failure is None:
            try:
                if replica.is_lost:
                    await self._answers(replica)
                elif not (replica.has_request and replica.versions.requested is self.versions.requested):
                    await self._ask(replica)
                else:
                    break
            except (EngineLostError, EngineFailedError) as error:
                self.replica_lost(replica, error)
            self._changed.set()
        if replica.is_fenced and replica.failure is None and not self._is_behind(replica):
            replica.is_fenced = False
            self._tell(f"engine replica {replica.number} has caught up")
            self._moved()

    async def _ask(self, replica: Replica) -> None:
        """Make a replica serve the versions requested now; callers that wait for it get its refusal."""
        request = replica.versions.requested = self.versions.requested
        replica.has_request, replica.refusal = True, None
        try:
            await replica.engine.serve(request.current.values(), request.pinned)
        except (EngineLostError, EngineFailedError):
            replica.has_request = False
            raise
        except VersionsRefusedError as error:
            replica.refusal = error
            request = request.without(error.refused, replica.versions.confirmed)
        except EngineError as error:
            replica.refusal = error
            return
        except Exception as error:  # noqa: BLE001 - report any failure to the callers waiting for these versions
            replica.refusal = EngineError(format_foreign_error(error))
            return
        replica.versions.confirmed = replica.versions.confirmed.followed_by(request.current.values(), request.pinned)

    def _fence(self, replica: Replica, why: str) -> None:
        if not replica.is_fenced:
            replica.is_fenced, replica.why = True, why
            self._tell(f"engine replica {replica.number} gets no calls: {why}; {self._count()}")
            self._moved()
            if self._reminder_task is None or self._reminder_task.done():
                self._reminder_task = asyncio.get_running_loop().create_task(self._remind(), name="remind of replicas")
        self._changed.set()

    def _count(self) -> str:
        return (
            f"{sum(not replica.is_fenced for replica in self._replicas)} of {len(self._replicas)} replicas take calls"
        )

    async def _remind(self) -> None:
        """Report the replicas that get no calls, until all do."""
        wait = 60.0
        while any(replica.is_fenced for replica in self._replicas):
            await asyncio.sleep(wait)
            wait *= 2
            for replica in self._replicas:
                if replica.is_fenced:
                    why = replica.failure or replica.refusal or replica.why
                    self._tell(f"engine replica {replica.number} still gets no calls: {why}; {self._count()}")

    async def ping(self) -> None:
        """Return once one replica takes calls, and its process serves.

        Raises:
            EngineFailedError: all replicas have failed for good.
        """
        while True:
            replica = (await self._available())[0]
            try:
                await replica.engine.ping()
            except (EngineLostError, EngineFailedError) as error:
                self.replica_lost(replica, error)
            else:
                return

    def abort(self, request_id: str) -> None:
        for replica in self._replicas:
            replica.engine.abort(request_id)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        policy = version if isinstance(version, str) else version.policy
        while True:
            replica = await self.pick(policy, opening_digest(token_ids.tobytes()))
            try:
                return await replica.engine.score(version, token_ids, temperature, top=top)
            except (EngineLostError, EngineFailedError) as error:
                self.replica_lost(replica, error)

    def busy_seconds(self) -> float:
        """Return the mean of the replicas' seconds in forward passes."""
        return sum(replica.engine.busy_seconds() for replica in self._replicas) / len(self._replicas)

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))
        pending = {
            replica.follow_task for replica in self._replicas if replica.follow_task is not None
        } | self._unpin_tasks
        pending |= {self._reminder_task} if self._reminder_task is not None else set()
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        if self._closed:
            raise EngineError("the engine is closed")


def _combine_replicas(replicas: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Combine the capabilities of several equal engines: their memory and compute add up."""
    return replace(
        replicas[0],
        kv_tokens=_total_kv(replicas),
        prefill_rate=sum(engine.prefill_rate for engine in replicas),
        places=_total_places(replicas),
    )


def _combine_fleets(fleets: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Combine the capabilities of engines that serve different policies.

    Refreshes and the policies that keep versions are united, counts and rates added, `max_context` is the smallest; any
    other capability needs all engines to have it.
    """
    return replace(
        fleets[0],
        refresh=frozenset[Any]().union(*(fleet.refresh for fleet in fleets)),
        expert_routing=all(fleet.expert_routing for fleet in fleets),
        sampling_mask=all(fleet.sampling_mask for fleet in fleets),
        grammars=all(fleet.grammars for fleet in fleets),
        choices=all(fleet.choices for fleet in fleets),
        adapters=sum(fleet.adapters for fleet in fleets),
        max_context=min(fleet.max_context for fleet in fleets),
        exact_continuation=all(fleet.exact_continuation for fleet in fleets),
        kv_tokens=_total_kv(fleets),
        prefill_rate=sum(fleet.prefill_rate for fleet in fleets),
        merged=frozenset[str]().union(*(fleet.merged for fleet in fleets)),
        keeps_version=frozenset[str]().union(*(fleet.keeps_version for fleet in fleets)),
        shares_prefixes=all(fleet.shares_prefixes for fleet in fleets),
        places=_total_places(fleets),
    )


def _total_kv(engines: Sequence[EngineCapabilities]) -> int | None:
    capacities = [engine.kv_tokens for engine in engines if engine.kv_tokens is not None]
    return sum(capacities) if len(capacities) == len(engines) else None


def _total_places(engines: Sequence[EngineCapabilities]) -> int:
    places = [engine.places for engine in engines]
    return sum(places) if all(places) else 0


ALL_EXTERNAL = EngineCapabilities(
    name="none", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=1 << 20
)
"""Capabilities of a run whose policies are all external."""
SamplerT = TypeVar("SamplerT", bound="Sampler | Fleet")


class SamplerRouter(Generic[SamplerT]):
    """Opens each conversation at the sampler of its policy.

    Args:
        samplers: by policy; policies of one base model share one. A single sampler serves every policy.
        external: policies that no engine of the run serves.
        capabilities: combined capabilities of the samplers.
    """

    def __init__(
        self,
        samplers: Mapping[str, SamplerT] | SamplerT,
        external: Mapping[str, ExternalPolicy],
        capabilities: EngineCapabilities,
    ) -> None:
        self.capabilities = capabilities
        self._external = external
        self._of: Mapping[str, SamplerT] | None = samplers if isinstance(samplers, Mapping) else None
        self._samplers = tuple(dict.fromkeys(samplers.values())) if isinstance(samplers, Mapping) else (samplers,)

    def of_policy(self, policy: str) -> SamplerT:
        """Return the sampler of a policy.

        Raises:
            EngineError: no engine of the run serves the policy.
        """
        if policy in self._external:
            raise EngineError(f"policy {policy!r} is external: it has no engine and no weights")
        if self._of is None:
            return self._samplers[0]
        if policy not in self._of:
            policies = ", ".join(sorted(self._of)) or "no policy"
            raise EngineError(f"no policy {policy!r} in this run's engines; they serve: {policies}")
        return self._of[policy]

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        if policy in self._external:
            return ExternalSession(self._external[policy], session_id)
        return self.of_policy(policy).open(session_id, policy, pin=pin)

    def abort(self, request_id: str) -> None:
        for policy in self._external.values():
            policy.abort(request_id)
        for sampler in self._samplers:
            sampler.abort(request_id)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        policy = version if isinstance(version, str) else version.policy
        return await self.of_policy(policy).score(version, token_ids, temperature, top=top)


class EngineRouter(SamplerRouter[Fleet]):
    """The engine of a run with several engines, endpoints or bots.

    Args:
        engines: replicas by policy; policies of one base model have the same ones. A sequence serves every policy.
        external: policies that no engine of the run serves.
        tell: receives a line for the user when a replica falls behind, and when it recovers.
    """

    def __init__(
        self,
        engines: Mapping[str, Sequence[Engine]] | Sequence[Engine],
        *,
        external: Mapping[str, ExternalPolicy] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        fleets: dict[tuple[Engine, ...], Fleet] = {}
        count = 0
        for replicas in map(tuple, engines.values() if isinstance(engines, Mapping) else (engines,)):
            if replicas not in fleets:
                fleets[replicas] = Fleet(replicas, tell=tell, first_number=count)
                count += len(replicas)
        self.fleets = tuple(fleets.values())
        """The replicas of each base model."""
        super().__init__(
            {policy: fleets[tuple(replicas)] for policy, replicas in engines.items()}
            if isinstance(engines, Mapping)
            else self.fleets[0],
            external or {},
            ALL_EXTERNAL,
        )
        if self.fleets:
            self.capabilities = _combine_fleets([fleet.capabilities for fleet in self.fleets])

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Serve versions at the engines of their policies; every engine learns which are pinned no longer."""
        for weights in (*current, *pinned):
            self.of_policy(weights.version.policy)  # refuse before calling any engine
        serves = [
            fleet.serve(
                [weights for weights in current if self.of_policy(weights.version.policy) is fleet],
                [weights for weights in pinned if self.of_policy(weights.version.policy) is fleet],
            )
            for fleet in self.fleets
        ]
        refused: dict[PolicyVersion, EngineError] = {}

        async def collect(serve: Coroutine[Any, Any, None]) -> None:
            try:
                await serve
            except VersionsRefusedError as error:
                refused.update(error.refused)

        await _all([collect(serve) for serve in serves])
        if refused:
            raise VersionsRefusedError(refused=refused)

    async def ping(self) -> None:
        await _all([fleet.ping() for fleet in self.fleets])

    def busy_seconds(self) -> float:
        """Return the mean of the base models' seconds in forward passes; 0 if all policies are external."""
        return sum(fleet.busy_seconds() for fleet in self.fleets) / max(len(self.fleets), 1)

    async def close(self) -> None:
        close_calls = [policy.close() for policy in self._external.values()] + [fleet.close() for fleet in self.fleets]
        await _all(close_calls)


async def _all(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all calls, then raise the first error: a failure must not leave the other calls half done."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
