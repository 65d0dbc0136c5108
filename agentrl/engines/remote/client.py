"""Clients of engines in other processes.

`ProcessEngine` owns an engine's process and implements `core.ports.Engine`: it starts the process, restarts it when it
dies, and gives a fresh one the versions of its predecessor. `EngineClient` samples from processes that it does not own
and implements `core.ports.Sampler`: the process of an episode worker has one. Both talk over an `EngineConnection`, in
the messages of `protocol.py`, to `engine_server.py`.
Invariants: a running call raises `EngineLostError` after its last delta when its connection ends; the next call of a
session reopens it; a conversation stays with its process, which has its KV, as long as the process lives; any other
request waits for the next process and is repeated, an update only once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from agentrl.core.clock import RetryBudget, SystemClock
from agentrl.core.errors import (
    AgentRLError,
    EngineError,
    EngineFailedError,
    EngineLostError,
    VersionNotServedError,
    VersionsRefusedError,
    version_refused_error,
)
from agentrl.core.futures import run_shielded
from agentrl.core.ids import opening_digest, stable_hash64
from agentrl.core.network import connect
from agentrl.core.records import ProcessStatus
from agentrl.engines import protocol
from agentrl.engines.process import SILENCE_S, LocalPlacement, Supervisor
from agentrl.engines.remote.connection import EngineConnection
from agentrl.engines.version_table import VersionRow, VersionSet, in_loading_order
from agentrl.engines.weights.version_files import VersionFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from agentrl.core.clock import Clock
    from agentrl.core.ports import EngineCapabilities, EngineSession, GenerateRequest, NewTokensCallback, TokenScores
    from agentrl.core.records import Int32Array, PolicyVersion, WeightsRef
    from agentrl.core.tokens import Completion
    from agentrl.engines.process import ChildProgram, ConnectedChildProcess, ProcessPlacement

LOAD_BOUND = 1.25
"""Multiple of the mean load up to which an engine takes conversations that share its cached prefixes."""
LOSSES_OF_AN_UPDATE = 2
"""Number of deaths during one update after which the update counts as their cause."""


class SessionOpener(Protocol):
    """An object that opens conversations: the connection to a process, or one engine of a fleet."""

    sessions: int
    """Number of its conversations."""

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession: ...


ReplicaT = TypeVar("ReplicaT", bound=SessionOpener)


class ReplicaRouter(Protocol[ReplicaT]):
    """Decides which replica serves a conversation."""

    capabilities: EngineCapabilities

    def is_available(self, replica: ReplicaT) -> bool:
        """Whether a conversation on this replica stays there, with its KV."""
        ...

    async def pick(self, policy: str, opening: int) -> ReplicaT:
        """Pick the replica for a conversation with this `GenerateRequest.opening`; waits while none takes calls.

        Raises:
            EngineLostError: no replica is available now.
            EngineFailedError: no replica will be available again.
        """
        ...

    def replica_lost(self, replica: ReplicaT, error: EngineLostError | EngineFailedError) -> None:
        """Note that a call failed because its replica is gone, for now or for good.

        Raises:
            EngineFailedError: the replica is gone for good, and no other replica could serve the call.
        """
        ...


class RoutedSession(Generic[ReplicaT]):
    """One conversation on one replica at a time; it is reopened on another when its replica is not available.

    If its policy keeps versions (refresh `episode`), the conversation is pinned to the version of its first tokens; a
    replica without this version refuses the call.
    """

    __slots__ = ("_closed", "_name", "_pin", "_policy", "_replica", "_router", "_session")

    def __init__(self, router: ReplicaRouter[ReplicaT], name: str, policy: str, pin: PolicyVersion | None) -> None:
        self._router = router
        self._name = name
        self._policy = policy
        self._pin = pin
        self._replica: ReplicaT | None = None
        self._session: EngineSession | None = None
        self._closed = False

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        while True:
            replica, session = await self._open_session(request)
            try:
                completion = await session.generate(request, on_delta)
            except EngineFailedError as error:  # nothing was sampled, so another replica can take the call
                self._close_session()
                self._router.replica_lost(replica, error)
            except EngineLostError as error:
                self._close_session()
                self._router.replica_lost(replica, error)
                raise
            else:
                if self._pin is None and completion.spans and self._policy in self._router.capabilities.keeps_version:
                    self._pin = completion.spans[0].version
                return completion

    async def _open_session(self, request: GenerateRequest) -> tuple[ReplicaT, EngineSession]:
        """Return the conversation's replica, and its session there."""
        if self._replica is not None and not self._router.is_available(self._replica):
            # Close before waiting for another replica, which may need the KV cache that the session holds.
            self._close_session()
        if self._replica is None or self._session is None:
            replica = await self._router.pick(
                self._policy, request.opening or opening_digest(request.token_ids.tobytes())
            )
            if self._closed:
                raise EngineError(f"call {request.request_id}: the session is closed")
            self._session = replica.open(self._name, self._policy, pin=self._pin)
            self._replica = replica
            replica.sessions += 1
        return self._replica, self._session

    async def wait_for_room(self) -> None:
        if self._session is not None:
            with suppress(EngineLostError):  # the next call reports the loss to the router
                await self._session.wait_for_room()

    def hold(self, version: PolicyVersion) -> None:
        self._pin = version
        if self._session is not None:
            self._session.hold(version)

    def close(self) -> None:
        self._closed = True
        self._close_session()

    def _close_session(self) -> None:
        if self._replica is not None and self._session is not None:
            self._session.close()
            self._replica.sessions -= 1
        self._replica = self._session = None


def pick_replica(loads: Sequence[int], policy: str, opening: int) -> int:
    """Return the index of the replica for a conversation.

    Conversations with the same opening go to one replica, as long as that has at most `LOAD_BOUND` times the mean
    number of conversations (consistent hashing with bounded loads: Mirrokni et al., 2018, arXiv:1608.01350).

    Args:
        loads: number of conversations of each replica.
        policy: policy of the conversation.
        opening: `GenerateRequest.opening` of the conversation.
    """
    best = stable_hash64(policy, opening) % len(loads)
    return best if loads[best] <= LOAD_BOUND * sum(loads) / len(loads) else loads.index(min(loads))


class ProcessEngine:
    """An engine in a process of its own. The process starts at once; `ready` waits for it.

    Args:
        program: program of the process.
        versions: first version of each policy.
        placement: starts the process; closed with the engine. None: a child of this process.
        silence_s: longest silence, in seconds, before the process counts as hung and is killed.
        attempts: maximum number of deaths in a row, without an answered call in between.
        clock: times the waits between attempts.
        tell: receives a line for the user when the process dies, if given.
        name: name of the engine, for messages.
    """

    capabilities: EngineCapabilities
    """Capabilities of the engine, known once the process has served."""

    def __init__(
        self,
        program: ChildProgram,
        versions: Mapping[str, PolicyVersion],
        *,
        placement: ProcessPlacement | None = None,
        silence_s: float = SILENCE_S,
        attempts: int = 5,
        clock: Clock | None = None,
        tell: Callable[[str], None] | None = None,
        name: str = "engine",
    ) -> None:
        self._name = name
        self._program = program
        self._placement = placement or LocalPlacement()
        self._first_versions = dict(versions)
        self._versions = VersionRow()
        """The newest request, and the versions that the process has confirmed, which a new process receives first."""
        self._one_at_a_time = asyncio.Lock()
        """Held while the process is brought to the requested versions."""
        self._pin_errors: dict[WeightsRef, EngineError] = {}
        """Errors of pinned versions that a former process served and the next one could not load, until they are
        unpinned."""
        self._connection: EngineConnection | None = None
        self._host = ""
        """Machine of the process, which cannot read files of this one; "" for this machine."""
        self._is_welcomed = False
        """Whether the process has received its versions; before that, no other message is sent to it."""
        self._address = ""
        """Address of the process while it serves."""
        self._moved: Callable[[], None] = lambda: None
        self._busy_before = 0.0
        """Seconds that former processes have computed."""
        self._tell = tell or (lambda line: None)
        self.supervisor = Supervisor(
            f"the {name}'s process",
            self,
            budget=RetryBudget(attempts),
            silence_s=silence_s,
            clock=clock or SystemClock(),
            tell=self._tell,
        )

    async def ready(self) -> ProcessEngine:
        """Wait until the process serves.

        Raises:
            AgentRLError: the process will never serve: the engine's factory raised the error, or the process died too
                often.
        """
        await self.supervisor.serving()
        return self

    # --- the process ------------------------------------------------------------------------------------------------

    async def launch(self) -> ConnectedChildProcess:
        child = await self._placement.start(self._program)
        self._is_welcomed = False
        self._connection = EngineConnection(
            child.reader, child.writer, on_message=self._on_message, on_end=self.supervisor.kill
        )
        self._host = child.host
        return child

    def _on_message(self, reply: protocol.Reply) -> None:
        self.supervisor.sign_of_life()
        match reply:
            case protocol.CompletionReply():
                self.supervisor.achieved()
            case protocol.BusyHeartbeat() if self._connection is not None and reply.seconds > self._connection.busy:
                self.supervisor.achieved()  # another client may have loaded them

    async def welcome(self) -> None:
        """Give a fresh process the versions of its predecessor."""
        connection = self._connection
        if connection is None:
            raise EngineLostError("the engine's process is not connected")
        load = protocol.LoadEngineRequest(
            factory=self._program.factory,
            arguments=dict(self._program.arguments),
            versions=self._first_versions,
            host=self._host,
        )
        reply = await connection.ask(0, load)
        if not isinstance(reply, protocol.EngineLoadedReply):
            raise EngineLostError("the engine's process sent an unexpected answer")
        self.capabilities = reply.capabilities
        if self._host:
            connection.files = VersionFiles(connection, self._host)
        await self._restore(connection)
        self._is_welcomed = True
        self._address = reply.address
        self._moved()

    async def _restore(self, connection: EngineConnection) -> None:
        """Make a fresh process serve the versions of its predecessor.

        A pinned version whose files are gone is left out: a session that pins it is refused with an error, and it does
        not block later versions.
        """
        served_versions = self._versions.confirmed
        current = served_versions.current.values()
        if current:
            await connection.serve(current, ())
        restored_pins: frozenset[WeightsRef] = frozenset()
        # One by one, so that a version that cannot be loaded names itself, and the others are served.
        for weights in in_loading_order((), served_versions.pinned):
            try:
                await connection.serve(current, restored_pins | {weights})
                restored_pins |= {weights}
            except EngineLostError:
                raise
            except EngineError as error:
                self._pin_errors[weights] = error
        self._versions.confirm(VersionSet(self._versions.confirmed.current, restored_pins))

    async def died(self, how: str) -> None:
        connection, self._connection = self._connection, None
        self._address = ""
        self._moved()
        if connection is not None:
            await connection.drain(EngineLostError(f"the {self._name}'s process {how}"))
            self._busy_before += connection.busy

    @property
    def addresses(self) -> tuple[str, ...]:
        return (self._address,) if self._address else ()

    def on_move(self, callback: Callable[[], None]) -> None:
        self._moved = callback

    def statuses(self) -> list[ProcessStatus]:
        node = "" if self._connection is None else self._host
        activity = "serves" if self._address else "starts"
        return [ProcessStatus(name=self._name, node=node, gpus=self._placement.gpus, doing=activity)]

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(
        self, session_id: str, policy: str, *, pin: PolicyVersion | None = None
    ) -> RoutedSession[EngineConnection]:
        if policy not in self._first_versions:
            policies = ", ".join(sorted(self._first_versions))
            raise EngineError(f"no policy {policy!r} in this engine; it serves: {policies}")
        if pin is not None and not self._versions.confirmed.has_pin(pin) and pin != self._current(pin.policy):
            pin_errors = [error for weights, error in self._pin_errors.items() if weights.version == pin]
            why = (
                f"the engine's process was restarted: {pin_errors[0]}" if pin_errors else "pin it by serve(..., pinned)"
            )
            raise VersionNotServedError(f"version {pin} is not served here; {why}")
        return RoutedSession(self, session_id, policy, pin)

    def is_available(self, replica: EngineConnection) -> bool:
        return replica is self._connection and replica.is_open

    async def pick(self, policy: str, opening: int) -> EngineConnection:
        return await self._connect()

    def replica_lost(self, replica: EngineConnection, error: EngineLostError | EngineFailedError) -> None:
        """Do nothing: the supervisor handles the loss."""
        if isinstance(error, EngineFailedError):
            raise error

    async def _connect(self) -> EngineConnection:
        """Return the connection to the process; waits until one serves."""
        while True:
            try:
                await self.supervisor.serving()
            except AgentRLError as error:
                raise EngineFailedError(str(error)) from error
            if self._connection is not None:
                return self._connection
            await asyncio.sleep(0)

    # --- control ----------------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Serve these versions. A version that repeatedly kills the process is refused.

        A pin that was served before and that a new process could not load is not requested again, and does not raise
        here: sessions that sample from it get the error.
        """
        request = self._versions.request(current, pinned)
        pins = request.pinned.difference(request.current.values())
        self._pin_errors = {weights: error for weights, error in self._pin_errors.items() if weights in pins}
        try:
            if self._one_at_a_time.locked():
                # The update under way may wait for a place that only versions unpinned since then can free.
                with suppress(EngineError):
                    await (await self._connect()).serve((), pinned)
            await run_shielded(self._serve())
        except VersionsRefusedError as error:
            self._versions.refuse(request, error.refused)
            raise
        except EngineError:
            self._versions.refuse(request, {weights.version for weights in self._versions.new()})
            raise

    async def _serve(self) -> None:
        """Bring the process to the requested versions: all at once or, after a process died of several, one by one."""
        refused: dict[PolicyVersion, EngineError] = {}
        losses: Counter[WeightsRef | None] = Counter()
        one_by_one = False
        async with self._one_at_a_time:
            while True:
                connection, before = await self._connect(), self._versions.confirmed
                request = self._versions.requested
                goal = VersionSet(request.current, request.pinned.difference(self._pin_errors)).without(refused, before)
                new = in_loading_order(goal.all - before.all, ())
                postponed = {weights.version for weights in new[1:]} if one_by_one else set()
                version_set = goal.without(postponed, before)
                try:
                    await connection.serve(version_set.current.values(), version_set.pinned)
                except EngineLostError:
                    suspect = new[0] if len(new) == 1 or postponed else None
                    losses[suspect] += 1
                    one_by_one = True
                    if losses[suspect] >= LOSSES_OF_AN_UPDATE:
                        reason = f"{LOSSES_OF_AN_UPDATE} processes of the engine died of it"
                        if suspect is None:
                            raise EngineError(f"the update without new versions was given up: {reason}") from None
                        refused[suspect.version] = version_refused_error(suspect, reason)
                    continue
                except VersionsRefusedError as error:
                    refused |= error.refused
                    version_set = version_set.without(error.refused, before)
                self._versions.confirm(version_set)
                if not postponed:
                    break
        if refused:
            raise VersionsRefusedError(refused=refused)

    def _current(self, policy: str) -> PolicyVersion | None:
        weights = self._versions.confirmed.current.get(policy)
        return self._first_versions.get(policy) if weights is None else weights.version

    async def ping(self) -> None:
        """Wait for a connected process. The supervisor replaces a process that hangs."""
        await self._connect()

    def abort(self, request_id: str) -> None:
        self._send(protocol.AbortRequest(request_id=request_id))

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        scores: TokenScores = await self._until_answered(
            lambda connection: connection.score(version, token_ids, temperature, top)
        )
        return scores

    def busy_seconds(self) -> float:
        """Return the busy time in seconds, at most 0.2 s old."""
        return self._busy_before + (self._connection.busy if self._connection is not None else 0.0)

    async def close(self) -> None:
        """Close the engine; calls in flight fail."""
        connection = self._connection
        if connection is not None:
            connection.close(EngineError("the engine was closed"))
        await self.supervisor.stop()
        await self._placement.close()

    def _send(self, message: protocol.Request) -> None:
        if self._connection is not None and self._is_welcomed:
            self._connection.send(message)

    async def _until_answered(self, ask: Callable[[EngineConnection], Any]) -> Any:
        """Send a request to the process or, if it dies, to the next one; for requests that may be
        repeated.
        """
        while True:
            connection = await self._connect()
            try:
                return await ask(connection)
            except EngineLostError:
                continue


@runtime_checkable
class AddressableEngine(Protocol):
    """An engine whose processes other clients can sample from."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the Unix sockets, or `core.network.Address`es, of the processes that take calls now."""
        ...

    def on_move(self, callback: Callable[[], None]) -> None:
        """Register a callback for changes of the addresses."""
        ...

    async def ping(self) -> None:
        """Wait for a process that takes calls.

        Raises:
            EngineFailedError: there will be none.
        """
        ...


class EngineClient:
    """Samples from the engine processes of another process. Their owner decides the versions. A call for
    another version fails."""

    def __init__(self, capabilities: EngineCapabilities) -> None:
        self.capabilities = capabilities
        self._addresses: tuple[str, ...] = ()
        self._moved = asyncio.Event()
        self._connections: dict[str, asyncio.Task[EngineConnection]] = {}
        self._num_opening = Counter[str]()
        """Number of conversations whose connection is being opened, by address."""

    @property
    def calls_in_flight(self) -> list[asyncio.Future[protocol.Reply]]:
        """The answers that are waited for."""
        connections = map(self._connection, self._connections)
        return [call for connection in connections if connection is not None for call in connection.calls_in_flight]

    def moved(self, addresses: Sequence[str]) -> None:
        """Use these processes from now on; connections to others end by themselves."""
        self._addresses = tuple(addresses)
        self._moved.set()

    def open(
        self, session_id: str, policy: str, *, pin: PolicyVersion | None = None
    ) -> RoutedSession[EngineConnection]:
        """Open a session. Its first call chooses the process."""
        return RoutedSession(self, session_id, policy, pin)

    def abort(self, request_id: str) -> None:
        for task in self._connections.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().send(protocol.AbortRequest(request_id=request_id))

    def is_available(self, replica: EngineConnection) -> bool:
        return replica.is_open and any(self._connection(address) is replica for address in self._addresses)

    def replica_lost(self, replica: EngineConnection, error: EngineLostError | EngineFailedError) -> None:
        """Do nothing: the connection has ended, or the owner's engine fails other calls too."""
        if isinstance(error, EngineFailedError):
            raise error

    async def pick(self, policy: str, opening: int) -> EngineConnection:
        """Choose a process, and wait while none takes calls."""
        while True:
            while not self._addresses:
                self._moved.clear()
                await self._moved.wait()
            loads = [self._load(address) for address in self._addresses]
            address = self._addresses[pick_replica(loads, policy, opening)]
            self._num_opening[address] += 1
            try:
                return await self._open_connection(address)
            except (FileNotFoundError, ConnectionRefusedError):
                # this process is dead; its successor's address will be announced
                self._addresses = tuple(other_address for other_address in self._addresses if other_address != address)
            except OSError as error:
                raise EngineLostError(f"the engine's process accepts no calls ({error.strerror or error})") from error
            finally:
                self._num_opening[address] -= 1

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        policy = version if isinstance(version, str) else version.policy
        connection = await self.pick(policy, opening_digest(token_ids.tobytes()))
        return await connection.score(version, token_ids, temperature, top)

    async def _open_connection(self, address: str) -> EngineConnection:
        task = self._connections.get(address)
        if task is None:
            task = self._connections[address] = asyncio.get_running_loop().create_task(self._connect(address))
        try:
            return await asyncio.shield(task)
        except OSError:
            self._connections.pop(address, None)
            raise

    def _connection(self, address: str) -> EngineConnection | None:
        task = self._connections.get(address)
        return task.result() if task is not None and task.done() and task.exception() is None else None

    def _load(self, address: str) -> int:
        connection = self._connection(address)
        return self._num_opening[address] + (0 if connection is None else connection.sessions)

    async def _connect(self, address: str) -> EngineConnection:
        reader, writer = await connect(address)

        def on_end(why: str) -> None:
            self._connections.pop(address, None)
            connection.close(EngineLostError(f"the connection to the engine's process ended{why and f': {why}'}"))

        connection = EngineConnection(reader, writer, on_message=lambda reply: None, on_end=on_end)
        return connection
