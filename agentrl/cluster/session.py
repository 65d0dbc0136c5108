"""The Ray session of a run, which is an existing one or a small local one.

A local session listens on loopback only, requires the token in a private file (0600), sends no usage reports, and has
no dashboard and no prestarted workers. Owns: starting, attaching, stopping, Ray's environment variables. Does not own:
actors. Invariants: the caller's signal handlers stay in place; an existing session is never shut down; a local one is
shared by all its users, since Ray allows one per process, and ends with the last of them. The GPUs of a run on a
cluster are reserved all at once, in one placement group, from its start to its end.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.config.devices import Node, NodePlan, plan_devices, plan_nodes, reassign_lost_ranks
from agentrl.core.clock import SystemClock
from agentrl.core.errors import ConfigError, InputError
from agentrl.core.machine import gpus as machine_gpus

if TYPE_CHECKING:
    from agentrl.config.plans import DeviceDemand


LOOK_S = 2.0
"""Seconds between two queries of the cluster's nodes."""
ATTACH_S = 50.0
"""Timeout for connecting this process to a cluster, in seconds."""
RESERVE_S = 20.0
"""Timeout for reserving a run's GPUs, in seconds. They were free a moment before, so it only elapses if another program
takes them at the same time."""
RELEASE_S = 2.0
"""Timeout for Ray to show released GPUs as free, in seconds."""
_TOKEN = "if it requires a token, set the same RAY_AUTH_MODE and RAY_AUTH_TOKEN here"
_LONGEST_TEMPORARY = 40
"""Maximum length of Ray's temporary directory: its sockets lie deep below, and the path of a Unix socket has at most
107 characters."""

_LOCAL_ENVIRONMENT = {
    # Makes Ray use 127.0.0.1 for this node, as it does on desktops; otherwise its servers listen on every interface.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    # Makes calls after the end of the session fail; by default they would start another Ray that listens everywhere.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}


def _reread_environment() -> None:
    """Make Ray read its environment variables again.

    Ray reads them at its import, which an environment's module may do before a session sets them. Without this, such a
    session listens on every interface, and refuses its own process's token.
    """
    import ray
    from ray._private import auto_init_hook, ray_constants

    raylet: Any = ray._raylet
    raylet.Config.initialize("")
    ray_constants.ENABLE_RAY_CLUSTER = os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"].lower() in ("1", "true")
    auto_init_hook.enable_auto_connect = os.environ["RAY_ENABLE_AUTO_CONNECT"] != "0"


@functools.cache
def _process_token() -> str:
    """Return the token of all sessions that a process starts one after another, because Ray reads it only once."""
    return secrets.token_hex(32)


@contextmanager
def kept_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM on leaving, because Ray replaces them in Python and in C.

    Does nothing outside the main thread, because only the main thread may set handlers.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
                signal.siginterrupt(number, False)  # restores the setting that asyncio makes


def shorten_ray_error(error: BaseException) -> str:
    """Return an error of Ray in a few words: the exception that a task raised, without the traceback around it."""
    cause = getattr(error, "cause", None)
    text = str(error) if cause is None else f"{type(cause).__name__}: {cause}"
    return " ".join(text.split())[:200]


def remove_dead_sessions(parent: Path) -> None:
    """Remove the directories, including tokens, of sessions whose process was killed."""
    for directory in parent.glob("agentrl-*-*"):
        owner = directory.name.split("-")[1]
        if owner.isdecimal() and not Path("/proc", owner).exists() and directory.stat().st_uid == os.getuid():
            shutil.rmtree(directory, ignore_errors=True)


def check_cluster_reachable(address: str) -> None:
    """Check that something listens at a `HOST:PORT`; Ray itself would try for minutes, silently.

    Raises:
        InputError: no process listens there, or the address is that of Ray's client, whose program has no node.
    """
    if address.startswith("ray://"):
        raise InputError(
            f"cluster.address = {without_credentials(address)!r} is for Ray's client: "
            "start the run on a node of the cluster with "
            "cluster.address = 'auto'"
        )
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    # Refuses `local`, among others, for which Ray would start a cluster that listens everywhere.
    if not port.isdecimal():
        raise InputError(f"cluster.address = {without_credentials(address)!r}: give 'auto', or HOST:PORT of the head")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise _unreachable_error(address, str(error)) from None


def without_credentials(address: str) -> str:
    """Return an address for a message, without the password or token that it may begin with."""
    before, _, place = address.rpartition("@")
    return f"***@{place}" if before else address


def _unreachable_error(address: str, reason: str) -> InputError:
    reason = reason.replace(address, without_credentials(address))
    return InputError(
        f"cluster.address is {without_credentials(address)!r}, and no Ray answers there ({reason}); "
        "start one with `ray start` on this "
        "machine and the others (docs/how-to/several_gpus.md), or leave cluster.address out"
    )


class _LocalRay:
    """A local Ray session that this process started."""

    current: ClassVar[_LocalRay | None] = None
    lock: ClassVar[threading.RLock] = threading.RLock()
    """Lock for `current` and for every start and end of a session."""

    def __init__(self) -> None:
        """Set the environment variables that Ray reads on import. Does not start Ray."""
        self.holders = 0
        self._died = ""
        parent = tempfile.gettempdir()
        if len(parent) > _LONGEST_TEMPORARY:
            parent = "/tmp"
        remove_dead_sessions(Path(parent))
        self._directory = Path(tempfile.mkdtemp(prefix=f"agentrl-{os.getpid()}-", dir=parent))
        for name, value in _LOCAL_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        # If the raylet is dead, Ray's client exits when the raylet's parent also seems dead, as process 1 does, the
        # parent in containers and under nohup. With this setting it checks this process instead, which is alive.
        os.environ.setdefault("RAY_RAYLET_PID", str(os.getpid()))
        if "RAY_AUTH_MODE" not in os.environ and "RAY_AUTH_TOKEN" not in os.environ:
            token = self._directory / "token"
            token.touch(mode=0o600)
            token.write_text(_process_token())
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)

    def start(self) -> None:
        import ray

        _LocalRay.current = self
        try:
            ray.init(
                address="local",
                # Idle prestarted workers burn CPU; our actors ask for no CPU slots.
                num_cpus=0,
                include_dashboard=False,
                # the smallest that Ray accepts: records are small, and trainers read token data themselves
                object_store_memory=80 << 20,
                log_to_driver=False,
                logging_level=logging.ERROR,
                # Ray opens its own directory to everyone; the one around it stays private.
                _temp_dir=str(self._directory / "ray"),
            )
        except (OSError, RuntimeError):
            raise
        except Exception as error:  # Ray raises a plain Exception when it is not ready in time
            raise RuntimeError(str(error)) from error
        atexit.register(self.end)
        _quieten()

    def dead(self) -> str:
        import ray

        if not self._died:
            node = ray._private.worker._global_node
            dead_processes: list[str] = [name for name, _ in node.dead_processes()] if node is not None else []
            self._died = " and ".join(name for name in dead_processes if name in ("raylet", "gcs_server"))
        return self._died

    def end(self) -> None:
        """End the session. Idempotent."""
        with _LocalRay.lock:
            if _LocalRay.current is self:
                import ray

                self._died = self.dead() or "session"
                ray.shutdown()
                _LocalRay.current = None
                atexit.unregister(self.end)
        if os.environ.get("RAY_AUTH_TOKEN_PATH") == str(self._directory / "token"):
            del os.environ["RAY_AUTH_TOKEN_PATH"], os.environ["RAY_AUTH_MODE"]
        shutil.rmtree(self._directory, ignore_errors=True)


class RaySession:
    """A user of this process's connection to Ray.

    Args:
        address: address of a cluster, see `ClusterConfig`; empty: the Ray that this process already uses, else a local
            one.
    """

    def __init__(self, address: str = "") -> None:
        self._address = address
        self._local: _LocalRay | None = None
        self._started = False

    def start(self) -> None:
        """Attach to the cluster or to the Ray that this process already uses, else start a local one (about 4 s).

        From a thread other than the main one, the main thread wraps the wait in `kept_signal_handlers`. A second call
        does nothing, unless that Ray is dead: then another one is started.

        Raises:
            InputError: no Ray answers at the address, or its version differs.
            OSError: Ray did not start.
            RuntimeError: Ray did not start.
        """
        with _LocalRay.lock, kept_signal_handlers():
            if self._started and self.dead():
                self.stop()
            if self._started:
                return
            if self._address:
                _attach(self._address)
            else:
                self._local = _join_local()
            self._started = True

    def nodes(self) -> tuple[Node, ...]:
        """Return the live nodes of the cluster: this process's own first, then by address."""
        import ray

        this_node = ray.get_runtime_context().get_node_id()
        alive: list[dict[str, Any]] = [node for node in ray.nodes() if node["Alive"]]
        state = ray._private.state
        has_gpus = any(node["Resources"].get("GPU") for node in alive)
        available = state.available_resources_per_node() if has_gpus else {}
        draining_ids = state.state.get_draining_nodes() if has_gpus else ()
        nodes = []
        for node in alive:
            identity = str(node["NodeID"])
            free = int(available.get(identity, {}).get("GPU", 0))
            used_gpus = int(node["Resources"].get("GPU", 0)) - free
            # Ray grants no GPUs on a node that is being drained.
            gpus = (0, 0) if identity in draining_ids else (free, used_gpus)
            nodes.append(Node(identity, str(node["NodeManagerAddress"]), *gpus))
        return tuple(sorted(nodes, key=lambda node: (node.id != this_node, _in_order(node.address))))

    def plan(self, demand: DeviceDemand) -> NodePlan:
        """Return the nodes and GPUs of a run's ranks, engines and workers; without a cluster, this machine's GPUs.

        In `gpu_reservation`, the first call reserves GPUs of a cluster. Later calls return the same ranks and engines,
        with another node for each rank whose node has left.

        Raises:
            ConfigError: there are too few nodes or GPUs, or another program took them.
            InputError: the driver does not list its GPUs.
            TrainerLostError: the node of a rank has left, and no other has a free GPU.
        """
        if not self._address:
            return NodePlan(devices=plan_devices(demand, machine_gpus()))
        nodes, reservation = self.nodes(), _reservation.get()
        if reservation is None:
            return plan_nodes(demand, nodes)
        with reservation.lock:
            if reservation.plan is not None:
                # Kept, so that a rank which has moved does not need another free GPU at the next call.
                reservation.plan = reassign_lost_ranks(reservation.plan, demand.workers, nodes)
                return reservation.plan
            plan = plan_nodes(demand, nodes)
            if plan.gpu_bundles():
                reservation.start(plan)
            return plan

    def dead(self) -> str:
        """Return the name of a dead essential process of a local session; empty while all are alive, and for an
        existing session."""
        return self._local.dead() if self._local is not None else ""

    def watch(self, *nodes: Node | None) -> Callable[[], str]:
        """Return a function like `dead` that keeps watching the present Ray, even after this user has moved to another
        one. It also names the first of these nodes that left the cluster; a call into such a node may never return."""
        local = self._local
        if local is not None:
            return local.dead
        watched_nodes = [node for node in nodes if node is not None]
        return (lambda: _node_watch().gone(watched_nodes)) if watched_nodes else str

    def stop(self) -> None:
        """Leave a local session. The session ends when its last user leaves or when it is dead. Idempotent."""
        with _LocalRay.lock:
            local, self._local = self._local, None
            self._started = False
            if local is not None:
                local.holders -= 1
                if local.holders == 0 or local.dead():
                    local.end()


class _GpuReservation:
    """The GPUs of a run on a cluster: a placement group with one bundle for each trainer rank and each engine.

    Ray grants a placement group as a whole or not at all, so two runs that start at the same time never wait for each
    other's GPUs.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.plan: NodePlan | None = None
        """The plan whose GPUs are reserved, with other nodes for ranks whose nodes have left; None: nothing is."""
        self._group: Any = None
        self._bundles: dict[str, tuple[Node, int]] = {}
        """Node and GPUs of each bundle of the group, by process."""
        self._free: dict[str, int] = {}
        """GPUs that were free before, by the id of their node."""

    def start(self, plan: NodePlan) -> None:
        """Reserve the GPUs of a plan.

        Raises:
            ConfigError: another program took them.
        """
        from ray.util import placement_group

        self._bundles, self._free = plan.gpu_bundles(), {node.id: node.gpus for node in plan.nodes}
        bundles = self._bundles.values()
        self._group = placement_group(
            [{"GPU": count} for _, count in bundles],
            bundle_label_selector=[{"ray.io/node-id": node.id} for node, _ in bundles],
        )
        try:
            is_granted = self._group.wait(RESERVE_S)
        except BaseException:
            self.end()
            raise
        if not is_granted:
            self.end()
            raise ConfigError(
                f"the {sum(count for _, count in bundles)} GPUs that this run was to have were not granted within "
                f"{RESERVE_S:g} s: another program of the Ray cluster took some at the same time, or a node was lost; "
                "start the run again"
            )
        self.plan = plan

    def strategy(self, node: Node, process: str) -> Any:
        """Return Ray's scheduling strategy for a process with its GPUs on a node; None: it has none there."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        if process not in self._bundles or self._bundles[process][0] != node:
            return None
        return PlacementGroupSchedulingStrategy(self._group, list(self._bundles).index(process))

    def end(self) -> None:
        """Release the GPUs. Idempotent."""
        group, self._group, self.plan, self._bundles = self._group, None, None, {}
        if group is not None:
            from ray.util import remove_placement_group

            with contextlib.suppress(Exception):  # Ray's errors have no common class; a lost head has none to release
                remove_placement_group(group)

    def is_over(self) -> bool:
        """Whether Ray reports the same number of free GPUs as before the reservation."""
        import ray

        now = ray._private.state.available_resources_per_node()
        return all(now[node].get("GPU", 0) >= count for node, count in self._free.items() if node in now)


_reservation: ContextVar[_GpuReservation | None] = ContextVar("reservation", default=None)
"""The reservation of the run to which the running task or thread belongs."""


@asynccontextmanager
async def gpu_reservation() -> AsyncIterator[None]:
    """Let the plans made within reserve GPUs of a cluster, until the end of the context; see `RaySession.plan`.

    At its end, Ray shows the GPUs as free, unless that takes longer than `RELEASE_S`: this process can plan again.
    """
    reservation = _GpuReservation()
    token = _reservation.set(reservation)
    try:
        yield
    finally:
        _reservation.reset(token)
        if reservation.plan is not None:
            await asyncio.to_thread(reservation.end)
            clock = SystemClock()
            deadline = clock.monotonic() + RELEASE_S
            with contextlib.suppress(Exception):  # as in `end`
                while clock.monotonic() < deadline and not await asyncio.to_thread(reservation.is_over):
                    await clock.sleep(0.05)


def process_scheduling_strategy(node: Node | None, process: str) -> Any:
    """Return Ray's scheduling strategy for a process of the plan on a node, with its reserved GPUs if it has any there.

    Args:
        node: node of the plan; None lets Ray choose.
        process: name of the process, see `NodePlan.gpu_bundles`.
    """
    reservation = _reservation.get()
    strategy = reservation.strategy(node, process) if reservation is not None and node is not None else None
    return strategy or node_scheduling_strategy(node)


class _NodeWatch:
    """Caches which nodes of the cluster are alive; the answer is at most `LOOK_S` seconds old, plus the response time
    of the head node."""

    def __init__(self) -> None:
        self._left: set[str] = set()
        self.drained: set[str] = set()
        """Ids of nodes that are about to be taken away."""
        self._pause = threading.Event()
        threading.Thread(target=self._look, name="watch the cluster's nodes", daemon=True).start()

    def gone(self, nodes: Sequence[Node]) -> str:
        return next((f"node {node.address}" for node in nodes if node.id in self._left), "")

    def _look(self) -> None:
        import ray

        while not self._pause.wait(LOOK_S):
            with contextlib.suppress(Exception):  # fails while no driver is attached, or if the head does not answer
                self._left = {str(node["NodeID"]) for node in ray.nodes() if not node["Alive"]}
                self.drained = set(ray._private.state.state.get_draining_nodes())


@functools.cache
def _node_watch() -> _NodeWatch:
    return _NodeWatch()


def is_node_drained(node: Node) -> bool:
    """Whether Ray is draining a node."""
    return node.id in _node_watch().drained


def is_node_alive(node: Node) -> bool:
    """Whether a node is in the cluster."""
    import ray

    return any(entry["Alive"] and entry["NodeID"] == node.id for entry in ray.nodes())


def node_scheduling_strategy(node: Node | None) -> Any:
    """Return Ray's scheduling strategy for an actor on a node; None lets Ray choose.

    Ray's own soft affinity is not used: it also takes another node while the head knows little of this one.
    """
    if node is None:
        return None
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node_id=node.id, soft=False)


def _in_order(address: str) -> tuple[int, ...] | tuple[str]:
    parts = address.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else (address,)


def _quieten() -> None:
    """Keep Ray's messages out of this process's output."""
    import ray

    # Ray's hook asks the control service before it prints an exception: where that is dead, Ray's client ends the
    # process after a minute, and the reason for the failure is lost.
    if sys.excepthook is ray._private.worker.custom_excepthook:
        sys.excepthook = ray._private.worker.normal_excepthook
    # Ray prints a page on our standard output when one of its processes dies; agentrl reports it in one line.
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix: None


def _attach(address: str) -> None:
    """Connect this process to a cluster.

    Raises:
        InputError: no cluster answers within `ATTACH_S`, or the cluster refuses the connection.
    """
    check_cluster_reachable(address)
    import ray

    if ray.is_initialized():
        return
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            failed.append(error)

    thread = threading.Thread(target=connect, name="connect to Ray", daemon=True)
    thread.start()
    thread.join(ATTACH_S)
    if thread.is_alive():
        raise _unreachable_error(address, f"not connected after {ATTACH_S:g} s; {_TOKEN}")
    if failed:
        raise _unreachable_error(address, f"{shorten_ray_error(failed[0])}; {_TOKEN}") from failed[0]
    _quieten()


def _join_local() -> _LocalRay | None:
    """Return this process's local session, starting it if needed; None if the caller's own code has started Ray."""
    local = _LocalRay.current
    if local is not None and local.dead():
        local.end()
        local = None
    if local is None:
        local = _LocalRay()
        try:
            import ray

            if ray.is_initialized():
                local.end()
                return None
            _reread_environment()
            local.start()
        except BaseException:
            local.end()
            raise
    local.holders += 1
    return local
