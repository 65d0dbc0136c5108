"""The server of an engine in a child process: `python -m agentrl.engines.remote.engine_server FD PARENT`.

Serves its owner over the socket it was started with, and ends with it. Serves other clients, which may only sample, at
a Unix socket in its private directory or, if its owner is on another machine, at a TCP port with a token.
Owns the engine, the tasks of its calls, and the files of versions that its owner sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from agentrl.core import rpc
from agentrl.core.errors import (
    AgentRLError,
    EngineCapabilityError,
    EngineError,
    EngineLostError,
    EngineStorageError,
    VersionsRefusedError,
)
from agentrl.core.files import WEIGHT_FILES
from agentrl.core.machine import rare_collections
from agentrl.core.network import Listener
from agentrl.core.parent_death import die_with_parent
from agentrl.core.ports import Engine
from agentrl.engines import protocol
from agentrl.engines.process import MAKE_ROOM, PRIVATE_DIRECTORY_VARIABLE

if TYPE_CHECKING:
    from agentrl.core.ports import EngineSession
    from agentrl.core.records import PolicyVersion, WeightsRef
    from agentrl.core.tokens import Tokens

ExitProcess = Callable[[], Coroutine[Any, Any, None]]
LONGEST_ADDRESS = 107
"""Maximum length of a Unix socket's path, in characters."""
BUSY_S = 0.2
"""Minimum time, in seconds, between two reports of the engine's busy time to the client."""


class ConnectionHandler:
    """Answers the owner's connection; `exit_process` ends this process."""

    def __init__(self, engine: Engine, connection: rpc.Connection, exit_process: ExitProcess) -> None:
        self.connection = connection
        self._engine = engine
        self._exit_process = exit_process
        self._sessions: dict[int, EngineSession | AgentRLError] = {}
        self.versions = ReceivedWeightFiles()
        self._write_lock = asyncio.Lock()
        """Held while a chunk of a version is written, so chunks are written in the order in which they came."""

    def handle(self, message: protocol.Request) -> None:
        """Execute a message; calls run in separate tasks."""
        match message:
            case protocol.StartGenerationRequest():
                self._answer(message.call, self._generate(message))
            case protocol.WaitForRoomRequest():
                self._answer(message.call, self._wait_for_room(message))
            case protocol.OpenSessionRequest():
                self._open(message)
            case protocol.HoldVersionRequest() | protocol.CloseSessionRequest():
                self._change_session(message)
            case protocol.AbortRequest():
                self._engine.abort(message.request_id)
            case protocol.ServeVersionsRequest():
                self._answer(message.call, self._serve(message))
            case protocol.WeightChunk():
                self._answer(message.call, self._keep(message))
            case protocol.LogprobsRequest():
                self._answer(message.call, self._score(message))
            case protocol.LoadEngineRequest():
                raise EngineError("the engine is already loaded")

    def _open(self, message: protocol.OpenSessionRequest) -> None:
        try:
            self._sessions[message.session] = self._engine.open(message.name, message.policy, pin=message.pin)
        except AgentRLError as error:
            self._sessions[message.session] = error

    def _change_session(self, message: protocol.HoldVersionRequest | protocol.CloseSessionRequest) -> None:
        session = self._sessions.pop(message.session, None)
        if session is None or isinstance(session, AgentRLError):
            return
        if isinstance(message, protocol.HoldVersionRequest):
            try:
                session.hold(message.version)
            except AgentRLError as error:  # the next call raises it
                self._sessions[message.session] = error
            else:
                self._sessions[message.session] = session
                return
        session.close()

    async def heartbeat(self) -> protocol.BusyHeartbeat:
        """Make a heartbeat, which shows that the engine does not hang."""
        try:
            await self._engine.ping()
        except EngineLostError:
            await self._exit_process()
        return self._busy()

    def _busy(self) -> protocol.BusyHeartbeat:
        return protocol.BusyHeartbeat(seconds=self._engine.busy_seconds())

    def _answer(self, call: int, work: Coroutine[Any, Any, rpc.Reply | None]) -> None:
        self.connection.answer(call, self._reply_or_error(work))

    async def _reply_or_error(self, work: Coroutine[Any, Any, rpc.Reply | None]) -> rpc.Reply | None:
        try:
            return await work
        except EngineLostError:
            await self._exit_process()
            # Send no answer: the client must not repeat the call before this process has ended.
            raise asyncio.CancelledError from None
        finally:
            if not self.connection.queued:  # once before the answers of one pass
                self.connection.queue(self._busy())

    async def _wait_for_room(self, message: protocol.WaitForRoomRequest) -> None:
        session = self._sessions.get(message.session)
        if session is not None and not isinstance(session, AgentRLError):
            await session.wait_for_room()

    async def _generate(self, message: protocol.StartGenerationRequest) -> protocol.CompletionReply:
        session = self._sessions.get(message.session)
        if session is None or isinstance(session, AgentRLError):
            raise session or EngineError(f"call {message.request_id}: the session is closed")

        def on_delta(request_id: str, tokens: Tokens) -> None:
            self.connection.queue(protocol.NewTokens(call=message.call, tokens=tokens.encode()))

        completion = await session.generate(
            protocol.generate_request_from_message(message), on_delta if message.deltas else None
        )
        return protocol.CompletionReply(
            call=message.call,
            tokens=completion.encode(),
            finish_reason=completion.finish_reason,
            cached_tokens=completion.cached_tokens,
        )

    async def _keep(self, chunk: protocol.WeightChunk) -> None:
        async with self._write_lock:
            await asyncio.to_thread(self.versions.keep_chunk, chunk)

    async def _serve(self, message: protocol.ServeVersionsRequest) -> protocol.VersionsServedReply:
        """Serve versions, using the copies of those whose files were sent, and remove the other copies."""
        async with self._write_lock:  # waits for the preceding chunks
            known = self.versions.digests()  # later ones are of requests that follow
        current, pinned = ([self.versions.local(ref) for ref in refs] for refs in (message.current, message.pinned))
        refused: Mapping[PolicyVersion, EngineError] = {}
        try:
            await self._engine.serve(current, pinned)
        except VersionsRefusedError as error:
            refused = error.refused
        served = (each for each in (*message.current, *message.pinned) if each.version not in refused)
        self.versions.remove(known.difference(weights.sha256 for weights in served))
        return protocol.VersionsServedReply(
            call=message.call,
            refused=[(version, type(error).__name__, str(error)) for version, error in refused.items()],
        )

    async def _score(self, message: protocol.LogprobsRequest) -> protocol.LogprobsReply:
        tokens = np.frombuffer(message.token_ids, "<i4")
        scores = await self._engine.score(message.version, tokens, message.temperature, top=message.top)
        return protocol.LogprobsReply(
            call=message.call,
            logprobs=scores.logprobs.astype("<f4", copy=False).tobytes(),
            top=scores.top_ids.shape[1],
            top_ids=scores.top_ids.astype("<i4", copy=False).tobytes(),
            top_logprobs=scores.top_logprobs.astype("<f4", copy=False).tobytes(),
        )


class ReceivedWeightFiles:
    """The files of versions that the owner sent, in this process's private directory, keyed by digest.

    They are not trusted: an engine checks the digest of the files it loads.
    """

    def __init__(self) -> None:
        self._root = Path(os.environ.get(PRIVATE_DIRECTORY_VARIABLE, "")) / "versions"
        self._digests: set[str] = set()

    def keep_chunk(self, chunk: protocol.WeightChunk) -> None:
        """Write bytes of a file; the first bytes begin a new one.

        Raises:
            EngineStorageError: writing failed.
            EngineError: the name does not belong to a version's file, or the bytes before are missing.
        """
        names = {name for files in WEIGHT_FILES.values() for name in files}
        if chunk.name not in names or not chunk.sha256.isalnum():
            raise EngineError(f"{chunk.name!r} is not a file of a version")
        directory = self._root / chunk.sha256
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._digests.add(chunk.sha256)
            if chunk.start == 0:  # the engine may have mapped a file that arrives again
                (directory / chunk.name).unlink(missing_ok=True)
            with (directory / chunk.name).open("ab") as file:
                if file.tell() != chunk.start:
                    raise EngineError(f"{chunk.name} has {file.tell():,} bytes, but {chunk.start:,} were sent")
                file.write(chunk.data)
        except OSError as error:
            raise EngineStorageError(
                f"{socket.gethostname()}: {directory} cannot store a version ({error.strerror}); {MAKE_ROOM}"
            ) from error

    def local(self, weights: WeightsRef) -> WeightsRef:
        """Return the version with the path of its local copy, if its files were sent."""
        if weights.sha256 not in self._digests:
            return weights
        return replace(weights, path=str(self._root / weights.sha256))

    def digests(self) -> frozenset[str]:
        """Return the digests of the versions whose files were sent."""
        return frozenset(self._digests)

    def remove(self, digests: Collection[str]) -> None:
        """Remove copies."""
        for digest in self._digests.intersection(digests):
            self._digests.discard(digest)
            shutil.rmtree(self._root / digest, ignore_errors=True)


class ClientHandler(ConnectionHandler):
    """Answers a client that may only sample. Its request ids are prefixed: a call that another client continues after
    the first one died must not collide with its own remains."""

    def __init__(self, engine: Engine, connection: rpc.Connection, exit_process: ExitProcess, number: int) -> None:
        super().__init__(engine, connection, exit_process)
        self._prefix = f"{number}:"

    def handle(self, message: protocol.Request) -> None:
        """Execute a sampling message.

        Raises:
            ValueError: the client sent another message.
        """
        match message:
            case protocol.StartGenerationRequest() | protocol.AbortRequest():
                message = msgspec.structs.replace(message, request_id=self._prefix + message.request_id)
            case protocol.OpenSessionRequest() | protocol.HoldVersionRequest() | protocol.CloseSessionRequest():
                pass
            case protocol.WaitForRoomRequest() | protocol.LogprobsRequest():
                pass
            case _:
                raise ValueError(f"a client sent an unexpected message ({type(message).__name__})")
        super().handle(message)

    def disconnected(self) -> None:
        """Close the client's sessions, which returns their memory; its calls were cancelled."""
        for session in self._sessions.values():
            if not isinstance(session, AgentRLError):
                session.close()


class EngineServer:
    """The engine of this process, its owner's connection and those of other clients."""

    def __init__(self, engine: Engine, owner: rpc.Connection) -> None:
        self.owner = ConnectionHandler(engine, owner, self.exit_process)
        self._engine = engine
        self._clients: set[ClientHandler] = set()
        self._numbers = itertools.count(1)
        self._exiting = False

    async def listen(self, host: str) -> str:
        """Accept other clients; returns their address. It is "" if the path of the Unix socket would be too long.

        Args:
            host: address of this machine, for clients on other machines; "": clients are on this machine.
        """
        self._listener = Listener(self._receive)
        if host:
            return str(await self._listener.listen(host))
        private = os.environ.get(PRIVATE_DIRECTORY_VARIABLE)
        address = f"{private}/clients"
        if private is None or len(address) > LONGEST_ADDRESS:
            return ""
        return await self._listener.listen_locally(address)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = rpc.Connection(reader, writer, protocol.REQUESTS)
        client = ClientHandler(self._engine, connection, self.exit_process, next(self._numbers))
        self._clients.add(client)
        try:
            await connection.run(client.handle)
        except ValueError as error:
            with contextlib.suppress(OSError):  # the disk may be full
                sys.stderr.write(f"agentrl: the engine disconnected a client: {error}\n")
        finally:
            client.disconnected()
            self._clients.discard(client)
            writer.close()

    async def exit_process(self) -> None:
        """Exit after an engine failure, once every call has sent its tokens."""
        if self._exiting:
            return
        self._exiting = True
        clients = [client.connection for client in self._clients]
        tasks = {task for connection in (self.owner.connection, *clients) for task in connection.answering.values()}
        if other_tasks := tasks - {asyncio.current_task()}:
            await asyncio.wait(other_tasks, timeout=BUSY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BUSY_S):
                await asyncio.gather(*(connection.flush() for connection in clients))
        await self.owner.connection.flush()
        os._exit(1)


async def _make(load: protocol.LoadEngineRequest) -> Engine:
    module, _, names = load.factory.partition(":")
    try:
        factory: Any = importlib.import_module(module)
    except ImportError as error:
        raise EngineCapabilityError(
            f"this engine needs the package {error.name}, which cannot be imported here ({error}); install the extra "
            "of agentrl that provides it, or set engine.vllm = false"
        ) from error
    for name in names.split("."):
        factory = getattr(factory, name)
    engine: Engine | Awaitable[Engine] = factory(versions=load.versions, **load.arguments)
    return await engine if isinstance(engine, Awaitable) else engine


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    owner = rpc.Connection(reader, writer, protocol.REQUESTS)
    load = await owner.receive()
    if not isinstance(load, protocol.LoadEngineRequest):
        return
    try:
        with rare_collections():  # importing and loading make objects that stay
            engine = await _make(load)
    except Exception as error:  # noqa: BLE001 - the client must receive any error of a factory
        owner.send(rpc.error_reply(0, error))
        await owner.flush()
        return
    server = EngineServer(engine, owner)
    address = await server.listen(load.host)
    owner.send(protocol.EngineLoadedReply(capabilities=engine.capabilities, address=address))
    heartbeats = asyncio.get_running_loop().create_task(owner.send_heartbeats(BUSY_S, server.owner.heartbeat))
    await owner.run(server.owner.handle)
    heartbeats.cancel()
    writer.close()


def main() -> None:
    """Serve the inherited connection until it ends."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    asyncio.run(_serve_and_exit(socket.socket(fileno=descriptor)))


async def _serve_and_exit(connection: socket.socket) -> None:
    await _serve(connection)
    os._exit(0)  # no client is left for the forward pass in progress, nor for the waiting calls


if __name__ == "__main__":
    main()
