"""Combines several engines into one: spreads conversations over them, and updates them in turn.

Implements `core.ports.Engine`. Owns the assignment of conversations to replicas, the versions that all should serve,
and the replicas that do not. Does not know what kind of engines the replicas are.
Invariants: a conversation stays with its replica, which has its KV, until that is lost or behind; every replica is
brought to the wanted versions, also when it comes back late, and is fenced while it is behind: it finishes its calls
and gets no new ones; a version that the first replica refuses has reached none, unless that replica's disk refused it;
a fenced replica is reported with its reason, again after a minute, after two more, and so on.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import EngineError, EngineFailedError, EngineLostError, EngineStorageError
from agentrl.core.ids import opening_digest
from agentrl.core.ports import ProcessStatusSource
from agentrl.engines.remote.client import AddressableEngine, RoutedSession, pick_replica
from agentrl.engines.versions import WantedVersions, run_shielded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from agentrl.core.ports import Engine, EngineCapabilities, EngineSession
    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, ProcessStatus, WeightsRef

FENCE_S = 30.0
"""Maximum time the other replicas wait for one replica's update to full weights, in seconds."""
REMIND_S = 60.0
"""Seconds after which a fenced replica is first reported again; the interval then doubles each time."""
BACK_S = 1.0
"""Seconds between checks of whether a lost replica is back."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of the fleet, and its state."""

    number: int
    engine: Engine
    sessions: int = 0
    """Number of its conversations."""
    asked: WantedVersions | None = None
    """Last request to the replica; None if it was lost meanwhile."""
    serves: WantedVersions = field(default_factory=WantedVersions)
    """Versions that the replica serves."""
    refusal: Exception | None = None
    """Error with which the replica refused the last request."""
    following: asyncio.Task[None] | None = None
    """Task that makes the replica serve the wanted versions."""
    is_fenced: bool = False
    why: str = ""
    """Reason for the fence."""
    is_lost: bool = False
    failure: EngineError | None = None
    """Error with which the replica failed for good."""

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        return self.engine.open(session_id, policy, pin=pin)


class ReplicatedEngine:
    """Conversations with the same opening share a replica unless its load is too high.

    The replica is chosen by consistent hashing with bounded loads: Mirrokni et al., 2018, arXiv:1608.01350.

    Args:
        engines: engines with equal versions and capabilities.
        tell: receives a line for people when a replica falls behind, and when it is back.
    """

    def __init__(self, engines: Sequence[Engine], *, tell: Callable[[str], None] | None = None) -> None:
        self.capabilities = _together([engine.capabilities for engine in engines])
        self._replicas = [Replica(number, engine) for number, engine in enumerate(engines)]
        self._wanted = self._accepted = WantedVersions()
        """Newest request, and the part of it that at least one replica serves."""
        self._unpinning: set[asyncio.Task[None]] = set()
        """Tasks that unpin versions while a replica is busy with an earlier request; see `serve`."""
        self._tell = tell or (lambda line: None)
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self._reminding: asyncio.Task[None] | None = None
        self._closed = False
        self._moved: Callable[[], None] = lambda: None

    @property
    def engines(self) -> list[Engine]:
        """The replicas."""
        return [replica.engine for replica in self._replicas]

    def add(self, engine: Engine) -> None:
        """Use one more replica, of equal capabilities, once it serves the wanted versions."""
        replica = Replica(len(self._replicas), engine, is_fenced=True, why="it starts")
        self._replicas.append(replica)
        if isinstance(engine, AddressableEngine):
            engine.on_move(self._moved)
        self._follow(replica)

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
        """See `client.AddressableEngine`: addresses of replicas that are not fenced."""
        engines = [replica.engine for replica in self._replicas if not replica.is_fenced]
        return tuple(each for engine in engines if isinstance(engine, AddressableEngine) for each in engine.addresses)

    def on_move(self, moved: Callable[[], None]) -> None:
        self._moved = moved
        for replica in self._replicas:
            if isinstance(replica.engine, AddressableEngine):
                replica.engine.on_move(moved)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> RoutedSession[Replica]:
        """See `agentrl.core.ports.Engine.open`; the first call chooses the replica."""
        session = RoutedSession(self, session_id, policy, pin)
        for replica in sorted(self._living(), key=lambda each: each.is_fenced):
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
        """See `client.ReplicaRouter.pick`; waits while all replicas are fenced."""
        available = await self._available()
        return available[pick_replica([replica.sessions for replica in available], policy, opening)]

    async def _available(self) -> list[Replica]:
        while not (available := [replica for replica in self._living() if not replica.is_fenced]):
            if not any(replica.following and not replica.following.done() for replica in self._replicas):
                raise self._nobody()
            await self._change()
        return available

    def replica_lost(self, replica: Replica, error: EngineLostError | EngineFailedError) -> None:
        """See `client.ReplicaRouter.replica_lost`: fences the replica until it answers again, or for good."""
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
                await asyncio.sleep(BACK_S)

    def _living(self) -> list[Replica]:
        if self._closed:
            raise EngineError("the engine is closed")
        living = [replica for replica in self._replicas if replica.failure is None]
        if not living:
            raise self._nobody()
        return living

    def _nobody(self) -> EngineFailedError:
        reasons = [
            f"replica {replica.number}: {replica.failure or replica.refusal or 'behind'}" for replica in self._replicas
        ]
        return EngineFailedError(f"all replicas of the engine are lost; {'; '.join(reasons)}")

    # --- control ----------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """See `agentrl.core.ports.Engine.serve`: updates the replicas in turn, so that the others sample meanwhile.

        A replica that takes longer than `FENCE_S` for full weights, or fails where another did not, is fenced until it
        has caught up. An adapter may have to wait for a slot, which conversations free when they end, and unpinned
        versions at once; this method waits too.
        """
        self._wanted = self._wanted.followed_by(current, pinned)
        self._accepted = self._accepted.without_pins_but(self._wanted)
        for replica in self._replicas:
            replica.refusal = None
            if replica.asked is not None and replica.following is not None and not replica.following.done():
                # The replica still works on an earlier request, which may wait for a place that only versions unpinned
                # since then can free: unpin them now. What is new reaches it when that request has ended.
                self._unpin(replica.engine.serve((), replica.asked.pinned & self._wanted.pinned))
        await run_shielded(self._roll_out())

    def _unpin(self, unpinning: Coroutine[Any, Any, None]) -> None:
        """Run a replica's `serve` that only unpins versions in the background; a failure is ignored."""
        task = asyncio.get_running_loop().create_task(unpinning, name="engine unpins")
        self._unpinning.add(task)

        def end(ended: asyncio.Task[None]) -> None:
            self._unpinning.discard(ended)
            if not ended.cancelled():
                ended.exception()  # mark as retrieved: the replica's own task (`_reconcile`) meets the failure too

        task.add_done_callback(end)

    async def _roll_out(self) -> None:
        """Bring the replicas to the newest request, one after another; if none accepts it, return to the last accepted
        one."""
        async with self._one_at_a_time:
            wanted = self._wanted
            try:
                for replica in self._living():
                    await self._in_turn(replica)
                while not self._is_taken():
                    await self._change()
            except Exception:
                if self._wanted is wanted:  # otherwise a newer request decides
                    self._wanted = self._accepted
                    for replica in self._replicas:
                        self._follow(replica)
                raise
            self._accepted = self._wanted

    async def _in_turn(self, replica: Replica) -> None:
        """Wait until a replica serves the wanted versions, and fence it if it does not; skip fenced ones.

        Raises:
            EngineError: the replica refused, and no other replica accepted.
        """
        following = self._follow(replica)
        if replica.is_fenced:
            return
        is_full = any(weights.kind == "full" for weights in self._wanted.all - replica.serves.all)
        silent = f"no answer within {FENCE_S:g} s"
        try:
            async with asyncio.timeout(FENCE_S):
                await self._followed(replica, following)
        except TimeoutError:
            if not is_full:
                what = f"{silent}: it waits for a place for the adapter, or hangs"
                self._tell(f"engine replica {replica.number} has not taken {self._missing(replica)} ({what})")
                await self._followed(replica, following)
        is_refused = isinstance(replica.refusal, EngineStorageError) and len(self._living()) > 1
        if not following.done() or is_refused or (self._is_behind(replica) and self._is_taken()):
            self._fence(replica, f"it is behind at {self._missing(replica)} ({replica.refusal or silent})")

    async def _followed(self, replica: Replica, following: asyncio.Task[None]) -> None:
        while not (following.done() or replica.is_fenced):
            await self._change()

    def _missing(self, replica: Replica) -> str:
        new = self._wanted.all - replica.serves.all
        return ", ".join(sorted(str(weights.version) for weights in new))

    def _is_taken(self) -> bool:
        """Return whether a replica serves the wanted versions.

        Raises:
            EngineError: no replica will; the message has the reason.
        """
        living = self._living()
        behind = [replica for replica in living if self._is_behind(replica)]
        if len(behind) < len(living):
            return True
        refused = [replica for replica in behind if replica.refusal is not None]
        for replica in refused:
            if replica.refusal is not None and (not replica.is_fenced or len(refused) == len(living)):
                raise replica.refusal
        return False

    def _is_behind(self, replica: Replica) -> bool:
        """Whether a replica lacks a version, or has a current one that the others refused."""
        serves, wanted = replica.serves, self._wanted
        return serves.current != wanted.current or not wanted.pinned <= serves.pinned

    def _follow(self, replica: Replica) -> asyncio.Task[None]:
        """Return the task that makes a replica serve the wanted versions, starting it if none runs."""
        if replica.following is None or replica.following.done():
            name = f"engine replica {replica.number}"
            replica.following = asyncio.get_running_loop().create_task(self._reconcile(replica), name=name)
            replica.following.add_done_callback(lambda _: self._changed.set())
        return replica.following

    async def _reconcile(self, replica: Replica) -> None:
        """Wait for a lost replica, ask it for the versions wanted, again as long as these change, and lift its
        fence."""
        while not self._closed and replica.failure is None:
            try:
                if replica.is_lost:
                    await self._answers(replica)
                elif replica.asked is not self._wanted:
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
        """Make a replica serve the versions wanted now; callers that wait for it get its refusal."""
        wanted = replica.asked = self._wanted
        replica.refusal = None
        try:
            await replica.engine.serve(wanted.current.values(), wanted.pinned)
        except (EngineLostError, EngineFailedError):
            replica.asked = None
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for these versions hears of it
            replica.refusal = error
            return
        replica.serves = replica.serves.followed_by(wanted.current.values(), wanted.pinned)

    def _fence(self, replica: Replica, why: str) -> None:
        if not replica.is_fenced:
            replica.is_fenced, replica.why = True, why
            self._tell(f"engine replica {replica.number} gets no calls: {why}; {self._count()}")
            self._moved()
            if self._reminding is None or self._reminding.done():
                self._reminding = asyncio.get_running_loop().create_task(self._remind(), name="remind of replicas")
        self._changed.set()

    def _count(self) -> str:
        return f"{sum(not each.is_fenced for each in self._replicas)} of {len(self._replicas)} replicas take calls"

    async def _remind(self) -> None:
        """Report the replicas that get no calls, until all do."""
        wait = REMIND_S
        while any(each.is_fenced for each in self._replicas):
            await asyncio.sleep(wait)
            wait *= 2
            for each in self._replicas:
                if each.is_fenced:
                    why = each.failure or each.refusal or each.why
                    self._tell(f"engine replica {each.number} still gets no calls: {why}; {self._count()}")

    async def ping(self) -> None:
        """See `agentrl.core.ports.Engine.ping`: returns once one replica takes calls."""
        await self._available()

    def abort(self, request_id: str) -> None:
        for replica in self._replicas:
            replica.engine.abort(request_id)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        policy = version if isinstance(version, str) else version.policy
        while True:
            replica = await self.pick(policy, opening_digest(token_ids.tobytes()))
            try:
                return await replica.engine.score(version, token_ids, temperature)
            except (EngineLostError, EngineFailedError) as error:
                self.replica_lost(replica, error)

    def busy_seconds(self) -> float:
        """See `agentrl.core.ports.Engine.busy_seconds`: the mean of the replicas."""
        return sum(replica.engine.busy_seconds() for replica in self._replicas) / len(self._replicas)

    async def close(self) -> None:
        self._closed = True
        self._changed.set()
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))
        pending = {replica.following for replica in self._replicas if replica.following is not None} | self._unpinning
        pending |= {self._reminding} if self._reminding is not None else set()
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
        if self._closed:
            raise EngineError("the engine is closed")


def _together(replicas: Sequence[EngineCapabilities]) -> EngineCapabilities:
    """Combine the capabilities of several equal engines: their memory and compute add up."""
    held = [each.kv_tokens for each in replicas if each.kv_tokens is not None]
    return replace(
        replicas[0],
        kv_tokens=sum(held) if len(held) == len(replicas) else None,
        prefill_rate=sum(each.prefill_rate for each in replicas),
    )
