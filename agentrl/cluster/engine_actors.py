"""Engine processes on the nodes of a Ray cluster: implements `engines.process.ProcessPlacement`.

An actor starts the process as its child, as `engines.process` does here. It accepts one TCP connection of the
client, with a token, and the process inherits it: their messages pass through neither the actor nor Ray. Owns actors
and how they end. Does not own the Ray session (`session.py`) or restarts (`engines.process`). Invariants: a
process dies with its actor; when the process, its actor, its node or Ray dies, the child counts as dead and its reader
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from agentrl.cluster.session import (
    RaySession,
    is_node_alive,
    is_node_drained,
    kept_signal_handlers,
    process_scheduling_strategy,
    shorten_ray_error,
)
from agentrl.config.devices import Node
from agentrl.core.network import Address, Listener, connect, interface_of
from agentrl.core.text import plural
from agentrl.engines.process import LocalPlacement

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from agentrl.core.machine import Gpu
    from agentrl.engines.process import ChildProgram, EngineProcess

LOOK_S = 1.0
"""Seconds between checks of a local Ray, which does not report its own death."""
START_S = 120.0
"""Timeout for an actor to start its process, in seconds."""


class EngineActor:
    """Actor that is the parent of an engine's process."""

    def __init__(self) -> None:
        self._process: EngineProcess | None = None
        self._connections: asyncio.Queue[socket.socket] = asyncio.Queue()
        self._listener = Listener(self._accept)

    async def listen(self) -> str:
        """Listen for the client of the process; return the `core.network.Address`."""
        import ray

        return str(await self._listener.listen(ray.util.get_node_ip_address()))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # The process gets its own descriptor; the client sends nothing before the process runs.
        connection: socket.socket = writer.get_extra_info("socket")
        self._connections.put_nowait(connection.dup())

    async def start(self, program: ChildProgram, gpus: Sequence[str]) -> tuple[int, Node]:
        """Start the process with these GPUs, or the actor's GPUs from Ray. Returns the process id and its node."""
        import ray

        connection = await self._connections.get()
        self._listener.close()
        node = Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())
        interface = "lo"
        with contextlib.suppress(OSError):  # raised for IPv6; weights then come as files
            interface = interface_of(node.address)
        self._process = await LocalPlacement(gpus=gpus, interface=interface).start_with(program, connection)
        return self._process.process_id, node

    async def wait(self) -> str:
        """Wait for the end of the process that was started."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()


class RayPlacement:
    """Runs the processes of an engine or a worker as children of Ray actors, one actor per process.

    Args:
        choose: returns the node of the processes and their GPUs; called once. A process whose node is lost is started
            on another node, as soon as one has enough free GPUs. None: any node, without GPUs.
        address: address of the cluster, see `RaySession`; empty: the processes run on this machine.
        process: name under which the plan reserves GPUs for the processes, see `NodePlan.gpu_bundles`.
    """

    def __init__(
        self,
        choose: Callable[[RaySession], tuple[Node | None, Sequence[Gpu]]] | None = None,
        *,
        address: str = "",
        process: str = "",
    ) -> None:
        self._choose = choose
        self._process = process
        self._node: Node | None = None
        self._gpus: Sequence[Gpu] = ()
        self._is_elsewhere = bool(address)
        self._session = RaySession(address)

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(gpu.id for gpu in self._gpus)

    async def start(self, program: ChildProgram) -> ActorChildProcess:
        """Start a process. Starts Ray first if it does not run or is dead."""
        start_task = asyncio.get_running_loop().create_task(asyncio.to_thread(self._start_actor), name="start an actor")
        with kept_signal_handlers():
            try:
                await asyncio.shield(start_task)
            except asyncio.CancelledError:
                await asyncio.wait({start_task})  # otherwise nothing would end the process that is being started
                self._end_started(start_task)
                raise
        import ray

        actor, dead = start_task.result()
        try:
            async with asyncio.timeout(START_S) as timeout:
                reader, writer = await _connect(await _call(dead, actor.listen))
                visible = [gpu.id for gpu in self._gpus if not gpu.node]
                try:
                    process_id, node = await _call(dead, actor.start, program, visible)
                except BaseException:
                    writer.close()
                    raise
        except ray.exceptions.RayError as error:
            raise OSError(f"in a Ray actor: {shorten_ray_error(error)}") from error
        except (OSError, asyncio.CancelledError):
            if not dead():
                ray.kill(actor)  # which also kills its process
            if timeout.expired():
                waits = f"; it waits for {plural(len(self._gpus), 'free GPU')}" if self._gpus else ""
                raise OSError(f"its Ray actor did not start within {START_S:g} s{waits}") from None
            raise
        if not self._is_elsewhere:
            return ActorChildProcess(actor, process_id, reader, writer, dead)
        return ActorChildProcess(actor, process_id, reader, writer, self._session.watch(node), node=node)

    def _end_started(self, start_task: asyncio.Task[tuple[Any, Callable[[], str]]]) -> None:
        """End an actor that no caller waits for any longer."""
        if start_task.exception() is not None:
            return
        actor, dead = start_task.result()
        if not dead():
            import ray

            ray.kill(actor)

    def _start_actor(self) -> tuple[Any, Callable[[], str]]:
        """Start Ray and an actor; return the actor and the watch on its Ray.

        Runs in a thread, because it queries Ray's control service, which may be dying. Another process of this
        placement may restart Ray at any time: creating the watch before the actor ensures that it does not watch a
        later Ray.
        """
        try:
            self._session.start()
        except RuntimeError as error:
            raise OSError(f"Ray did not start: {shorten_ray_error(error)}") from error
        dead = self._session.watch()
        import ray

        try:
            if self._choose is not None:
                (self._node, self._gpus), self._choose = self._choose(self._session), None
            actor = ray.remote(
                num_cpus=0,
                num_gpus=sum(bool(gpu.node) for gpu in self._gpus),
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=self._where(),
            )(EngineActor).remote()
        except ray.exceptions.RayError as error:
            raise OSError(f"Ray started no actor: {shorten_ray_error(error)}") from error
        return actor, dead

    def _where(self) -> Any:
        """Ray's strategy for an actor: its node, or another where that is lost or drained."""
        if self._node is None or (self._is_elsewhere and is_node_drained(self._node)) or not is_node_alive(self._node):
            return "SPREAD"
        return process_scheduling_strategy(self._node, self._process)

    async def close(self) -> None:
        """Release the placement, and leave Ray."""
        await asyncio.to_thread(self._session.stop)


class ActorChildProcess:
    """A process that an actor started; see `engines.process.ConnectedChildProcess`."""

    def __init__(
        self,
        actor: Any,
        process_id: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        dead: Callable[[], str],
        *,
        node: Node | None = None,
    ) -> None:
        self.process_id = process_id
        self.host = "" if node is None else node.address
        self._node = node
        self.reader = reader
        self.writer = writer
        self._actor = actor
        self._is_ended = False
        """Whether the actor was killed. The child may still run if its node is unreachable."""
        self._dead: Callable[[], str] = lambda: "actor" if self._is_ended else dead()
        self._life_task = asyncio.get_running_loop().create_task(self._live(), name="wait for an engine's actor")
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def is_drained(self) -> bool:
        return self._node is not None and is_node_drained(self._node)

    async def wait(self) -> str:
        return await asyncio.shield(self._life_task)

    def kill(self) -> None:
        """Kill the process through its actor, so that its files are removed too."""
        if self._kill_timer is None and not self._life_task.done() and not self._dead():
            self._actor.kill.remote()
            # then the actor is killed
            self._kill_timer = asyncio.get_running_loop().call_later(10.0, self._end_actor)

    async def _live(self) -> str:
        from ray.exceptions import RayError

        try:
            how: str = await _call(self._dead, self._actor.wait)
        except RayError:
            how = "was lost with its Ray actor"
            self.writer.transport.abort()  # its machine may be unreachable, and would not end the connection
        except OSError as error:
            how = f"was lost: {error}"
            self.writer.transport.abort()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self._end_actor()
        return how

    def _end_actor(self) -> None:
        import ray

        if not self._dead():
            ray.kill(self._actor)
            self._is_ended = True


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to an actor.

    Raises:
        OSError: it cannot be reached from here.
    """
    where = Address.parse(address)
    try:
        return await connect(where)
    except OSError as error:
        raise OSError(
            f"port {where.port} of node {where.host} cannot be reached ({error}); docs/reference/security.md says "
            "which connections the network must allow"
        ) from error


async def _call(dead: Callable[[], str], method: Any, *arguments: object) -> Any:
    """Call an actor's method and wait for its result.

    Raises:
        RayError: the actor died.
        OSError: Ray died.
    """
    if cause := dead():  # check first: a call into a dead Ray, or to an unreachable node, can block for minutes
        raise OSError(f"Ray's {cause} died")
    future = asyncio.wrap_future(method.remote(*arguments).future())
    try:
        while not future.done():
            await asyncio.wait({future}, timeout=LOOK_S)
            if not future.done() and (cause := dead()):
                raise OSError(f"Ray's {cause} died")
        return future.result()
    finally:
        future.cancel()
