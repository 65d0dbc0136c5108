"""Several engines as one: conversations are spread over them, versions reach them in turn.

Implements `core.ports.Engine`. Owns which replica a conversation is with, and who is behind. Does not know what the
replicas are.
Invariants: a conversation stays with its replica, which has its KV, until that is lost or behind; a replica that is
lost or has not taken the newest versions is fenced: it ends the calls it has and gets no new ones; an update that the
first replica refuses has reached none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import EngineError, EngineLostError
from agentrl.core.ids import key64

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from agentrl.core.ports import Delta, Engine, EngineSession, GenerateRequest
    from agentrl.core.records import Completion, Float32Array, Int32Array, PolicyVersion, WeightsRef

Work = Callable[[], "Coroutine[Any, Any, None]"]

FENCE_S = 30.0
"""How long the others wait for one replica's update."""
BACK_S = 1.0
"""How often a lost replica is asked whether it is back."""
LOAD_BOUND = 1.25
"""A replica takes conversations that its cache suits up to this multiple of the mean."""


@dataclass(slots=True, eq=False)
class Replica:
    """One engine, and how it stands."""

    number: int
    engine: Engine
    sessions: int = 0
    """Conversations it has."""
    newest: asyncio.Task[None] | None = None
    """Its newest update, which begins when the one before has ended."""
    is_behind: bool = False
    """Fenced: it is lost, or has not taken the newest versions."""
    gone: EngineError | None = None
    """Why it will never be back."""


class ReplicatedEngine:
    """See `agentrl.core.ports.Engine`. Conversations that begin alike go to one replica, as long as none has far more.

    The replica is chosen by consistent hashing with bounded loads: Mirrokni et al., 2018, arXiv:1608.01350.

    Args:
        engines: they serve the same versions, and can the same.
        tell: takes a line for people when a replica falls behind, and when it is back.
    """

    def __init__(self, engines: Sequence[Engine], *, tell: Callable[[str], None] | None = None) -> None:
        self.capabilities = engines[0].capabilities
        self._replicas = [Replica(number, engine) for number, engine in enumerate(engines)]
        self._tell = tell or (lambda line: None)
        self._calls: dict[str, Replica] = {}
        self._changed = asyncio.Event()
        self._policy = ""
        """One that is served."""
        self._paused = False
        self._closed = False

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(
        self, session_id: str, policy: str, *, pin: PolicyVersion | None = None, priority: int = 0
    ) -> ReplicatedSession:
        """See `agentrl.core.ports.Engine.open`; which replica it is with is decided by its first call."""
        self._policy = policy
        session = ReplicatedSession(self, session_id, policy, pin, priority)
        for replica in sorted(self._replicas, key=lambda each: each.is_behind):
            try:
                replica.engine.open(session_id, policy, pin=pin, priority=priority).close()  # refused here, if at all
            except EngineLostError:
                self.lost(replica)
            else:
                return session
        raise EngineLostError(f"session {session_id}: all replicas of the engine are gone")

    async def choose(self, context: Int32Array, policy: str) -> Replica:
        """The replica for a conversation that begins with `context`; waits while all are behind.

        Raises:
            EngineError: none will ever be back, and why.
        """
        while not (able := [replica for replica in self._replicas if not replica.is_behind]):
            await self._change()
        if self._closed:
            raise EngineError("the engine is closed")
        suited = able[key64(policy, context.tobytes().hex()) % len(able)]
        mean = sum(replica.sessions for replica in able) / len(able)
        if suited.sessions <= LOAD_BOUND * mean:
            return suited
        return min(able, key=lambda replica: (replica.sessions, replica.number))

    def started(self, request_id: str, replica: Replica) -> None:
        """A call begins."""
        self._calls[request_id] = replica

    def ended(self, request_id: str) -> None:
        """A call has ended."""
        self._calls.pop(request_id, None)

    def lost(self, replica: Replica) -> None:
        """A replica is gone: it is fenced until it answers again, which its supervisor sees to."""
        if replica.is_behind:
            return
        replica.is_behind = True
        self._tell(f"engine replica {replica.number} is lost; it gets no calls until it is back")
        self._follow(replica, partial(self._answers, replica))

    async def _answers(self, replica: Replica) -> None:
        while not self._closed:
            try:
                await (replica.engine.pause() if self._paused else replica.engine.resume())
                replica.engine.open("is it back?", self._policy).close()
            except EngineLostError:
                await asyncio.sleep(BACK_S)
            except EngineError as error:
                replica.gone = error
                self._tell(f"engine replica {replica.number} is gone for good: {error}")
                self._changed.set()
                raise
            else:
                return

    # --- control ----------------------------------------------------------------------------------------------------

    async def update(self, weights: WeightsRef, *, keep: bool = False) -> None:
        """See `agentrl.core.ports.Engine.update`: each replica in turn, so that the others sample meanwhile.

        A replica that takes longer than `FENCE_S`, or fails where the first did not, is fenced until it has caught up.
        """
        accepted = False
        for replica in self._replicas:
            task = self._follow(replica, partial(replica.engine.update, weights, keep=keep))
            if replica.is_behind:
                continue
            await asyncio.wait({task}, timeout=FENCE_S)
            if task.done() and task.exception() is None:
                accepted = True
            elif task.done() and not accepted:
                task.result()
            else:
                replica.is_behind = True
                self._tell(f"engine replica {replica.number} is behind at {weights.version}; it gets no calls for now")
        while not accepted and not self._closed and all(replica.is_behind for replica in self._replicas):
            await self._change()

    def _follow(self, replica: Replica, work: Work) -> asyncio.Task[None]:
        """Let a replica do something once it has done what it is doing."""
        loop = asyncio.get_running_loop()
        task = replica.newest = loop.create_task(_after(replica.newest, work), name=f"engine replica {replica.number}")
        task.add_done_callback(lambda ended: self._updated(replica, ended))
        return task

    def _updated(self, replica: Replica, task: asyncio.Task[None]) -> None:
        """A replica that took its newest update is with the others again."""
        if task.cancelled() or task.exception() is not None or replica.newest is not task:
            return
        if replica.is_behind:
            replica.is_behind = False
            self._tell(f"engine replica {replica.number} has caught up")
        self._changed.set()

    def release(self, version: PolicyVersion) -> None:
        """See `agentrl.core.ports.Engine.release`."""
        for replica in self._replicas:
            replica.engine.release(version)

    async def pause(self) -> None:
        """See `agentrl.core.ports.Engine.pause`."""
        self._paused = True
        await asyncio.gather(*(replica.engine.pause() for replica in self._replicas))

    async def resume(self) -> None:
        """See `agentrl.core.ports.Engine.resume`."""
        self._paused = False
        await asyncio.gather(*(replica.engine.resume() for replica in self._replicas))

    def abort(self, request_id: str) -> None:
        """See `agentrl.core.ports.Engine.abort`."""
        replica = self._calls.get(request_id)
        if replica is not None:
            replica.engine.abort(request_id)

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """See `agentrl.core.ports.Engine.score`."""
        policy = version if isinstance(version, str) else version.policy
        replica = await self.choose(token_ids, policy)
        return await replica.engine.score(version, token_ids, temperature)

    def busy_seconds(self) -> float:
        """See `agentrl.core.ports.Engine.busy_seconds`: the mean of the replicas."""
        return sum(replica.engine.busy_seconds() for replica in self._replicas) / len(self._replicas)

    async def close(self) -> None:
        """See `agentrl.core.ports.Engine.close`."""
        self._closed = True
        self._changed.set()
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas))
        pending = {replica.newest for replica in self._replicas if replica.newest is not None}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)

    async def _change(self) -> None:
        """Wait for a replica that was behind.

        Raises:
            EngineError: all are gone for good.
        """
        gone = [replica.gone for replica in self._replicas if replica.gone is not None]
        if len(gone) == len(self._replicas):
            raise gone[0].with_traceback(None)
        self._changed.clear()
        await self._changed.wait()


class ReplicatedSession:
    """One conversation: with one replica at a time. Made by `ReplicatedEngine.open`."""

    __slots__ = ("_closed", "_engine", "_name", "_pin", "_policy", "_priority", "_replica", "_session")

    def __init__(
        self, engine: ReplicatedEngine, name: str, policy: str, pin: PolicyVersion | None, priority: int
    ) -> None:
        self._engine = engine
        self._name = name
        self._policy = policy
        self._pin = pin
        self._priority = priority
        self._replica: Replica | None = None
        self._session: EngineSession | None = None
        self._closed = False

    async def generate(self, request: GenerateRequest, on_delta: Delta | None = None) -> Completion:
        """See `agentrl.core.ports.EngineSession.generate`."""
        if self._replica is not None and self._replica.is_behind:
            self._leave()
        if self._session is None or self._replica is None:
            replica = await self._engine.choose(request.token_ids, self._policy)
            if self._closed:
                raise EngineError(f"call {request.request_id}: the session is closed")
            self._session = replica.engine.open(self._name, self._policy, pin=self._pin, priority=self._priority)
            self._replica = replica
            replica.sessions += 1
        self._engine.started(request.request_id, self._replica)
        try:
            return await self._session.generate(request, on_delta)
        except EngineLostError:
            self._engine.lost(self._replica)
            self._leave()
            raise
        finally:
            self._engine.ended(request.request_id)

    def close(self) -> None:
        """See `agentrl.core.ports.EngineSession.close`."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        if self._session is not None and self._replica is not None:
            self._session.close()
            self._replica.sessions -= 1
        self._session = self._replica = None


async def _after(before: asyncio.Task[None] | None, work: Work) -> None:
    if before is not None and not before.done():
        await asyncio.wait({before})
    await work()
