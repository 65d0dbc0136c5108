"""Several engines as one: conversations are spread over them, versions reach them in turn.

Implements `core.ports.Engine`. Owns which replica a conversation is with, which versions all are to serve, and who does
not. Does not know what the replicas are.
Invariants: a conversation stays with its replica, which has its KV, until that is lost or behind; a replica follows the
table of versions, oldest first, and is fenced while it cannot: it ends the calls it has and gets no new ones; an update
that the first replica refuses has reached none.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from agentrl.core.errors import EngineError, EngineFailedError, EngineLostError
from agentrl.engines.client import RoutedSession, ServedVersions, SharedEngine, finish_update, pick_replica

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from agentrl.core.ports import Engine, EngineCapabilities, EngineSession
    from agentrl.core.records import Float32Array, Int32Array, PolicyVersion, WeightsRef

FENCE_S = 30.0
"""How long the others wait for one replica's update to full weights."""
BACK_S = 1.0
"""Seconds between checks whether a lost replica is back."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine of the fleet, and its state."""

    number: int
    engine: Engine
    sessions: int = 0
    """Conversations it has."""
    serves: ServedVersions = field(default_factory=ServedVersions)
    """Versions it has taken."""
    refused: dict[WeightsRef, Exception] = field(default_factory=dict)
    """Versions it refused when it was last asked, and why."""
    stale: set[str] = field(default_factory=set)
    """Policies of which it serves a version that the others had refused by the time it took it."""
    following: asyncio.Task[None] | None = None
    """Gives it the versions it is missing."""
    is_fenced: bool = False
    is_lost: bool = False
    failure: EngineError | None = None
    """The error with which it failed for good."""

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        """See `agentrl.core.ports.Engine.open`."""
        return self.engine.open(session_id, policy, pin=pin)


class ReplicatedEngine:
    """See `agentrl.core.ports.Engine`. Conversations with a common beginning share a replica unless its load is too
    high.

    The replica is chosen by consistent hashing with bounded loads: Mirrokni et al., 2018, arXiv:1608.01350.

    Args:
        engines: engines with equal versions and capabilities.
        tell: takes a line for people when a replica falls behind, and when it is back.
    """

    def __init__(self, engines: Sequence[Engine], *, tell: Callable[[str], None] | None = None) -> None:
        self.capabilities = _together([engine.capabilities for engine in engines])
        self._replicas = [Replica(number, engine) for number, engine in enumerate(engines)]
        self._wanted = ServedVersions()
        self._tell = tell or (lambda line: None)
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False
        self._moved: Callable[[], None] = lambda: None

    # --- clients in other processes -----------------------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """See `client.SharedEngine`: those of replicas that are not fenced."""
        engines = [replica.engine for replica in self._replicas if not replica.is_fenced]
        return tuple(each for engine in engines if isinstance(engine, SharedEngine) for each in engine.addresses)

    def on_move(self, moved: Callable[[], None]) -> None:
        """See `client.SharedEngine`."""
        self._moved = moved
        for replica in self._replicas:
            if isinstance(replica.engine, SharedEngine):
                replica.engine.on_move(moved)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> RoutedSession[Replica]:
        """See `agentrl.core.ports.Engine.open`; which replica it is with is decided by its first call."""
        session = RoutedSession(self, session_id, policy, pin)
        for replica in sorted(self._living(), key=lambda each: each.is_fenced):
            try:
                replica.open(session_id, policy, pin=pin).close()  # refused here, if at all
            except EngineLostError as error:
                self.replica_lost(replica, error)
            else:
                return session
        raise EngineLostError(f"session {session_id}: all replicas of the engine are gone")

    def is_available(self, replica: Replica) -> bool:
        """See `client.Router.is_available`."""
        return not replica.is_fenced

    async def pick(self, policy: str, context: Int32Array) -> Replica:
        """See `client.Router.pick`; waits while all replicas are fenced."""
        available = await self._available()
        return available[pick_replica([replica.sessions for replica in available], policy, context)]

    async def _available(self) -> list[Replica]:
        while not (available := [replica for replica in self._living() if not replica.is_fenced]):
            if not any(replica.following and not replica.following.done() for replica in self._replicas):
                raise self._nobody()
            await self._change()
        return available

    def replica_lost(self, replica: Replica, error: EngineLostError | EngineFailedError) -> None:
        """See `client.Router.replica_lost`: it is fenced until it answers again, or for good."""
        if isinstance(error, EngineFailedError):
            if replica.failure is None and not self._closed:
                replica.failure, replica.is_fenced = error, True
                self._tell(f"engine replica {replica.number} has failed for good: {error}")
                self._changed.set()
                self._moved()
        elif not replica.is_lost and replica.failure is None:
            replica.is_lost = True
            self._fence(replica, "is lost; it gets no calls until it is back")
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
            f"replica {replica.number}: {replica.failure or next(iter(replica.refused.values()), 'behind')}"
            for replica in self._replicas
        ]
        return EngineFailedError(f"no replica of the engine serves any more; {'; '.join(reasons)}")

    # --- control ----------------------------------------------------------------------------------------------------

    async def update(self, weights: WeightsRef, *, keep: bool = False) -> None:
        """See `agentrl.core.ports.Engine.update`: each replica in turn, so that the others sample meanwhile.

        A replica that takes longer than `FENCE_S` for full weights, or fails where another did not, is fenced until it
        has caught up. An adapter may have to wait for a place, which conversations free when they end: so do we.
        A caller who is cancelled keeps nothing.
        """
        on_cancel = partial(self.release, weights.version) if keep else None
        await finish_update(self._update(weights, keep=keep), on_cancel=on_cancel)

    async def _update(self, weights: WeightsRef, *, keep: bool) -> None:
        async with self._one_at_a_time:
            before = self._wanted.newest.get(weights.version.policy)
            self._wanted.record(weights, keep=keep)
            for replica in self._replicas:
                replica.refused.clear()
            try:
                for replica in self._living():
                    await self._in_turn(replica, weights)
                while not self._is_taken(weights.version.policy):
                    await self._change()
            except Exception:
                self._wanted.revoke(weights, before, keep=keep)
                self._follow_fenced()
                raise

    async def _in_turn(self, replica: Replica, weights: WeightsRef) -> None:
        """Wait until a replica has followed, if it is not fenced; it is, where it does not.

        Raises:
            EngineError: it has refused, and no other has taken it.
        """
        following = self._follow(replica)
        if replica.is_fenced:
            return
        try:
            async with asyncio.timeout(FENCE_S if weights.kind == "full" else None):
                while not (following.done() or replica.is_fenced):
                    await self._change()
        except TimeoutError:
            pass
        if not following.done() or (self._missing(replica) and self._is_taken(weights.version.policy)):
            self._fence(replica, f"is behind at {weights.version}; it gets no calls for now")

    def _is_taken(self, policy: str) -> bool:
        """Whether a replica serves what is wanted of a policy.

        Raises:
            EngineError: none will, for this reason.
        """
        living = self._living()
        missing = [replica for replica in living if policy in self._missing(replica)]
        if len(missing) < len(living):
            return True
        refused = {
            replica.number: (replica, error)
            for replica in missing
            for weights, error in replica.refused.items()
            if weights.version.policy == policy
        }
        for replica, error in refused.values():
            if not replica.is_fenced or len(refused) == len(living):
                raise error
        return False

    def _missing(self, replica: Replica) -> dict[str, tuple[WeightsRef, bool]]:
        return replica.serves.missing(self._wanted)

    def _follow(self, replica: Replica) -> asyncio.Task[None]:
        """The task that gives a replica the versions it is missing, started where none runs."""
        if replica.following is None or replica.following.done():
            name = f"engine replica {replica.number}"
            replica.following = asyncio.get_running_loop().create_task(self._give(replica), name=name)
            replica.following.add_done_callback(lambda _: self._changed.set())
        return replica.following

    async def _give(self, replica: Replica) -> None:
        while not self._closed and replica.failure is None:
            updates = [update for update in self._missing(replica).values() if update[0] not in replica.refused]
            if not (updates or replica.is_lost):
                break
            try:
                if replica.is_lost:
                    await self._answers(replica)
                else:
                    await self._deliver(replica, *updates[0])
            except (EngineLostError, EngineFailedError) as error:
                self.replica_lost(replica, error)
            self._changed.set()
        if replica.is_fenced and replica.failure is None and not (replica.stale or self._missing(replica)):
            replica.is_fenced = False
            self._tell(f"engine replica {replica.number} has caught up")
            self._moved()

    async def _deliver(self, replica: Replica, weights: WeightsRef, keep: bool) -> None:
        """Update a replica; what has ceased to be wanted meanwhile is not counted as served."""
        policy = weights.version.policy
        try:
            await replica.engine.update(weights, keep=keep)
        except (EngineLostError, EngineFailedError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for this version hears of it
            replica.refused[weights] = error
            return
        if keep:
            replica.serves.kept[weights] += 1
        if self._wanted.newest.get(policy) == weights or self._wanted.kept[weights]:
            replica.serves.newest[policy] = weights
            replica.stale.discard(policy)
        else:
            replica.stale.add(policy)
        self._trim(replica)

    def release(self, version: PolicyVersion) -> None:
        """See `agentrl.core.ports.Engine.release`."""
        if self._wanted.release(version):
            for replica in self._replicas:
                self._trim(replica)
            self._follow_fenced()

    def _trim(self, replica: Replica) -> None:
        """Release versions of a replica that nobody keeps any more; a keep under way is reconciled when it arrives."""
        surplus = replica.serves.kept - self._wanted.kept
        replica.serves.kept -= surplus
        for weights in surplus.elements():
            replica.engine.release(weights.version)

    def _follow_fenced(self) -> None:
        for replica in self._replicas:
            if replica.is_fenced:
                self._follow(replica)

    def _fence(self, replica: Replica, why: str) -> None:
        if not replica.is_fenced:
            replica.is_fenced = True
            self._tell(f"engine replica {replica.number} {why}")
            self._moved()
        self._changed.set()

    async def ping(self) -> None:
        """See `agentrl.core.ports.Engine.ping`: one replica takes calls."""
        await self._available()

    def abort(self, request_id: str) -> None:
        """See `agentrl.core.ports.Engine.abort`."""
        for replica in self._replicas:
            replica.engine.abort(request_id)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """See `agentrl.core.ports.Engine.score`."""
        policy = version if isinstance(version, str) else version.policy
        while True:
            replica = await self.pick(policy, token_ids)
            try:
                return await replica.engine.score(version, token_ids, temperature)
            except (EngineLostError, EngineFailedError) as error:
                self.replica_lost(replica, error)

    def busy_seconds(self) -> float:
        """See `agentrl.core.ports.Engine.busy_seconds`: the mean of the replicas."""
        return sum(replica.engine.busy_seconds() for replica in self._replicas) / len(self._replicas)

    async def close(self) -> None:
        """See `agentrl.core.ports.Engine.close`."""
        self._closed = True
        self._changed.set()
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))
        pending = {replica.following for replica in self._replicas if replica.following is not None}
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
    """Capabilities of several equal engines: their memory and compute add up."""
    held = [each.kv_tokens for each in replicas if each.kv_tokens is not None]
    return replace(
        replicas[0],
        kv_tokens=sum(held) if len(held) == len(replicas) else None,
        prefill_rate=sum(each.prefill_rate for each in replicas),
    )
