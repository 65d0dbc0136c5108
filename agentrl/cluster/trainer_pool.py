"""Implements the trainer port over Ray: one actor per data-parallel rank, each a `PolicyTrainer` of the same weights.

The control path passes batches by reference. Every rank reads its share of the token data itself: on the run's host
from the journal, elsewhere as Ray objects from an actor on the run's host. It reads expert routing from the host that
recorded it. Rank 0 is on the run's host and is the only one that writes the run's files. The ranks form one
torch.distributed group through a store that rank 0 serves.
Owns: actors, their order and nodes, the consequences of a failed rank for all. Does not own: training
(`learn.trainer`), the Ray session (`session.py`). Invariants: every call goes to all ranks; a step that failed on one
rank is discarded on all; a dead rank, node or Ray ends the group with an error that names it. Nothing is retried: the
owner of the pool creates another pool.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cluster.session import (
    RaySession,
    kept_signal_handlers,
    node_scheduling_strategy,
    process_scheduling_strategy,
    shorten_ray_error,
)
from agentrl.config.algorithms import LOSSES
from agentrl.config.devices import Node
from agentrl.config.plans import TrainerPlan
from agentrl.core.clock import SystemClock
from agentrl.core.custom_functions import FunctionCode, find_function_code, is_monkeypatched
from agentrl.core.errors import AgentRLError, ConfigError, TrainerError, TrainerLostError
from agentrl.core.files import read_bytes
from agentrl.core.futures import retrieve_exception
from agentrl.core.machine import rare_collections
from agentrl.core.records import ProcessStatus
from agentrl.engines.process import gpu_visibility_variables
from agentrl.journal.routing import HostRoutingStore, RoutingReader, RoutingStore

if TYPE_CHECKING:
    from ray import ObjectRef

    from agentrl.config.devices import NodePlan
    from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, Trajectory, Unit, WeightsRef
    from agentrl.core.tokens import RoutingReference
    from agentrl.credit.samples import ReadUnits
    from agentrl.journal.routing import LostRouting
    from agentrl.learn.ranks import Rendezvous

PATIENCE_S = 60.0
"""Seconds for which the other ranks may continue after one refused a call; after that the group counts as stuck."""

LOOK_S = 1.0
"""Seconds between two checks of Ray, because a pending call does not fail when Ray dies."""

OPERATION_LABELS = {
    "forward_backward": "computes a step",
    "optim_step": "computes a step",
    "publish": "publishes a version",
    "save": "writes a checkpoint",
}
"""Description of a trainer's activity for the user, by its ranks' method."""


RANK_MODULES = (
    "agentrl.learn.losses",
    "agentrl.learn.loss_batch",
    "agentrl.learn.step_columns",
    "agentrl.learn.forward",
    "agentrl.learn.packing",
    "agentrl.learn.ranks",
    "agentrl.learn.trainer",
    "agentrl.learn.learner",
    "agentrl.credit.samples",
    "agentrl.core.tokens",
    "agentrl.journal.rows",
    "agentrl.journal.routing",
)
"""Modules that contain the computation of a rank."""


def refuse_monkeypatches() -> None:
    """Refuse to train if this process has replaced functions of agentrl, because ranks import the installed ones.

    Raises:
        ConfigError: a function, method or constant of `RANK_MODULES` differs from that in its file.
    """
    for name in RANK_MODULES:
        live = sys.modules.get(name)
        if live is None or live.__spec__ is None or live.__spec__.loader is None:
            continue  # a module that was not imported here cannot have been patched
        original = importlib.util.module_from_spec(live.__spec__)
        live.__spec__.loader.exec_module(original)
        for part, value in vars(original).items():
            if not part.startswith("__") and is_monkeypatched(value, vars(live).get(part)):
                raise ConfigError(
                    f"{name}.{part} was replaced in this process, and ranks in Ray actors use the installed one. "
                    "Remove the replacement, or train in this process: trainer.ranks = 1, no cluster.address"
                )


class RunFileServer:
    """Actor on the run's host from which ranks on other hosts read; its results travel as Ray objects."""

    def __init__(self, run_directory: str) -> None:
        from agentrl.journal.rows import make_row_reader

        journal = Path(run_directory) / "journal"
        self._read, self._routing = make_row_reader(journal), RoutingStore.of_journal(journal)

    def units(self, units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
        """Return the trajectories of each unit's episode, without routing."""
        return self._read(units)

    def routing(self, references: Sequence[RoutingReference]) -> Sequence[bytes | LostRouting]:
        """Read the expert routing on the run's host; see `ReadRouting`."""
        return self._routing.read(references)

    def read_bytes(self, path: Path, start: int, count: int) -> bytes:
        """Return a part of a file of a checkpoint."""
        return read_bytes(path, start, count)


class RoutingServer:
    """Actor on another host, from which ranks read the expert routing that workers wrote there."""

    def __init__(self, host: str) -> None:
        self._routing = HostRoutingStore(host)

    def routing(self, references: Sequence[RoutingReference]) -> Sequence[bytes | LostRouting]:
        """Read the expert routing on this host; see `ReadRouting`."""
        return self._routing.read(references)


class TrainerRank:
    """Actor of one rank: a `PolicyTrainer` in its process group.

    Args:
        plan: the trainer's part of the run.
        run_directory: directory of the run, on the run's host.
        rank: number of the rank, from 0.
        addresses: address of each rank's node, reachable from the others.
        files: actor from which the rank reads; None: the rank is on the run's host and reads by path.
        gpu: GPU visible to the rank; None: the one that Ray assigned, or none.
        memory_share: share of the GPU's memory that the rank may allocate; 0: all.
        loss: loss function of the user.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        run_directory: str,
        *,
        rank: int,
        addresses: Sequence[str],
        files: Any,
        gpu: str | None,
        memory_share: float,
        loss: FunctionCode | None,
    ) -> None:
        if gpu is not None:
            os.environ.update(gpu_visibility_variables([gpu]))
        self._plan, self._loss, self._memory_share = plan, loss, memory_share
        self._rank, self._addresses = rank, addresses
        self._files = files
        # The run directory is on another host, from which this one reads.
        self._private = None if files is None else tempfile.TemporaryDirectory(prefix=f"agentrl-{os.getpid()}-rank-")
        self._directory = Path(run_directory if self._private is None else self._private.name)
        self._routing = RoutingReader(self._read_routing)
        self._routing_servers: dict[str, Any] = {}
        """`RoutingServer` actor on each host from which this rank has read."""

    def host_name(self) -> str:
        """Return the name of the actor's node; shows that the actor runs."""
        return socket.gethostname()

    def serve(self) -> Rendezvous:
        """Serve, as rank 0, the store through which the group forms."""
        from agentrl.learn.ranks import serve_rendezvous

        rendezvous, self._store = serve_rendezvous(self._addresses[self._rank])
        return rendezvous

    def prepare(self) -> None:
        """Import slow modules, so that no rank waits for imports in the group."""
        with rare_collections():
            from agentrl.learn import trainer  # noqa: F401

    def join(self, rendezvous: Rendezvous | None) -> None:
        """Join the group and create the trainer; None means that there is no group."""
        from agentrl.learn.ranks import DistributedRankGroup, SingleRankGroup, limit_gpu_memory, rank_device
        from agentrl.learn.trainer import PolicyTrainer

        device = rank_device(self._rank, stays_on_cpu=self._plan.demand.stays_on_cpu)
        if self._memory_share:
            limit_gpu_memory(device, self._memory_share)
        ranks: SingleRankGroup | DistributedRankGroup = SingleRankGroup()
        if rendezvous is not None:
            ranks = DistributedRankGroup(
                rendezvous,
                rank=self._rank,
                device=device,
                addresses=self._addresses,
                store=self._store if self._rank == 0 else None,
            )
        self._trainer = PolicyTrainer(
            self._plan,
            self._directory,
            ranks=ranks,
            read=self._make_reader(),
            read_file=read_bytes if self._files is None else self._read_file,
            loss=self._loss,
        )

    def _make_reader(self) -> ReadUnits:
        from agentrl.journal.rows import make_row_reader

        read_rows = None if self._files is not None else make_row_reader(self._directory / "journal")

        def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
            rows = self._fetch(self._files.units.remote(units)) if read_rows is None else read_rows(units)
            return self._routing.attach(units, rows)

        return read

    def _read_routing(self, references: Sequence[RoutingReference]) -> Sequence[bytes | LostRouting]:
        """Read expert routing from the hosts that have it; see `ReadRouting`."""
        by_host: dict[str, list[RoutingReference]] = {}
        for reference in references:
            by_host.setdefault(reference.host, []).append(reference)
        answers = {host: self._ask_for_routing(host, of_host) for host, of_host in by_host.items()}
        contents: dict[str, Iterator[bytes | LostRouting]] = {}
        for host, answer in answers.items():
            try:
                contents[host] = iter(answer if isinstance(answer, list) else self._fetch(answer, host))
            except TrainerLostError as error:
                if not host:
                    raise
                self._routing_servers.pop(host, None)
                contents[host] = itertools.repeat(f"{error}")
        return [next(contents[reference.host]) for reference in references]

    def _ask_for_routing(
        self, host: str, references: Sequence[RoutingReference]
    ) -> list[bytes | LostRouting] | ObjectRef[Any]:
        """Read the routing of a host if this rank is there; otherwise ask for it."""
        if not host:
            if self._files is None:
                return RoutingStore.of_journal(self._directory / "journal").read(references)
            reference: ObjectRef[Any] = self._files.routing.remote(references)
            return reference
        if host == self._addresses[self._rank]:
            return HostRoutingStore(host).read(references)
        import ray

        if host not in self._routing_servers:
            alive = (node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == host)
            if (node := next(alive, None)) is None:
                return [f"host {host[:100]} has left"] * len(references)
            server_class: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(RoutingServer)
            strategy = node_scheduling_strategy(Node(str(node["NodeID"]), host))
            self._routing_servers[host] = server_class.options(scheduling_strategy=strategy).remote(host)
        reference = self._routing_servers[host].routing.remote(references)
        return reference

    def _read_file(self, path: Path, start: int, count: int) -> bytes:
        data: bytes = self._fetch(self._files.read_bytes.remote(path, start, count))
        return data

    def _fetch(self, reference: ObjectRef[Any], host: str = "") -> Any:
        """Fetch a result from the actor on a host; "" is the run's.

        Raises:
            AgentRLError, OSError: the actor raised it.
            TrainerLostError: the actor does not answer.
        """
        import ray

        try:
            return ray.get(reference, timeout=60.0)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, AgentRLError | OSError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            place = f"host {host[:100]}" if host else "the run's host"
            raise TrainerLostError(
                f"trainer rank {self._rank} on node {self._addresses[self._rank]} got no data from "
                f"{place} ({shorten_ray_error(error)})"
            ) from None

    def start(self, resume_from: str | None) -> tuple[int, tuple[str, ...]]:
        """Start the rank's trainer. Returns the process id and the result of `PolicyTrainer.start`."""
        return os.getpid(), self._trainer.start(None if resume_from is None else Path(resume_from))

    def forward_backward(self, batch: TrainBatch) -> None:
        self._trainer.forward_backward(batch)

    def discard(self, policy: str) -> None:
        self._trainer.discard(policy)

    def optim_step(self, policy: str, step_id: int) -> StepReport:
        return self._trainer.optim_step(policy, step_id)

    def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        return self._trainer.publish(policy, version)

    def save(self, directory: str) -> None:
        self._trainer.save(Path(directory))


class RayTrainerPool:
    """`core.ports.Trainer` over `trainer.ranks` Ray actors."""

    def __init__(self, plan: TrainerPlan, run_directory: Path, *, session: RaySession | None = None) -> None:
        """Create the pool; `start` starts the ranks.

        Args:
            plan: the trainer's part of the run.
            run_directory: location of journal, versions and step columns, on this host.
            session: Ray session to use, which `close` leaves running; None: a new session.

        Raises:
            ConfigError: see `refuse_monkeypatches`; or the loss does not exist.
        """
        refuse_monkeypatches()
        self._trainer_plan = plan
        name = plan.trainer.loss.name
        self._loss = None if name in LOSSES else find_function_code("loss", name, key="trainer.loss.name")
        """Loss function of the user, sent to every rank; None for a built-in loss."""
        self._directory = run_directory.resolve()
        self._session = session if session is not None else RaySession(plan.demand.cluster.ray_address)
        self._owns_session = session is None
        self._actors: list[Any] = []
        self._plan: NodePlan
        self._files: Any = None
        """`RunFileServer` actor for ranks on other hosts; None if all ranks are on the run's host."""
        self._death_cause: Callable[[], str] = self._session.dead
        """Returns the name of a dead process of Ray or of a lost node of a rank; empty while all are alive."""
        self._watch: asyncio.Task[None] | None = None
        self._loss_future: asyncio.Future[str] | None = None
        """Future that receives the name of the dead process when Ray itself dies."""
        self._method = ""
        """The method that the ranks run; empty: none."""
        self.process_ids: tuple[int, ...] = ()
        """Process ids of the started ranks, for users and profilers."""

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        """Start Ray and the ranks; see `PolicyTrainer.start`.

        Raises:
            ModelError: the model cannot be trained.
            ConfigError: an adapter targets modules that cannot be both trained and served.
            TrainerError: the checkpoint does not fit.
            TrainerLostError: a rank or Ray died during the start, or Ray did not start.
        """
        loop = asyncio.get_running_loop()
        with kept_signal_handlers():
            await asyncio.to_thread(self._start_actors)
        self._loss_future = loop.create_future()
        self._watch = loop.create_task(self._look_at_ray(self._loss_future), name="watch Ray")
        await self._all("host_name", limit_s=50.0 if self._plan.ranks else None)
        # importing torch from a cold disk takes minutes
        await self._all("prepare", limit_s=600.0)
        met = await self._call(self._actors[:1], "serve") if len(self._actors) > 1 else [None]
        await self._all("join", met[0])
        start_results: Sequence[tuple[int, tuple[str, ...]]] = await self._all("start", resume_from)
        self.process_ids = tuple(process for process, _ in start_results)
        return start_results[0][1]

    def _start_actors(self) -> None:
        try:
            self._session.start()
        except (OSError, RuntimeError) as error:
            raise TrainerLostError(f"Ray did not start: {shorten_ray_error(error)}") from error
        import ray

        size = self._trainer_plan.trainer.ranks
        try:
            plan = self._plan = self._session.plan(self._trainer_plan.demand)
            self._death_cause = self._session.watch(*plan.ranks)
            # No restarts and no retries: the death of a rank destroys the state of its group.
            rank_class: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(TrainerRank)
            if any(node != plan.nodes[0] for node in plan.ranks):
                files_class: Any = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)(RunFileServer)
                home = node_scheduling_strategy(plan.nodes[0])
                self._files = files_class.options(scheduling_strategy=home).remote(str(self._directory))
            for rank in range(size):
                gpu, node = plan.devices.gpu_of_rank(rank), plan.ranks[rank] if plan.ranks else None
                actor = rank_class.options(
                    num_gpus=1 if gpu is not None and node is not None else 0,
                    scheduling_strategy=process_scheduling_strategy(node, f"trainer rank {rank}"),
                ).remote(
                    *(self._trainer_plan, str(self._directory)),
                    rank=rank,
                    addresses=[rank_node.address for rank_node in plan.ranks] or ["127.0.0.1"] * size,
                    files=None if node is None or node == plan.nodes[0] else self._files,
                    gpu=gpu.id if gpu is not None and node is None else None,
                    memory_share=plan.devices.share_of_rank(rank) if gpu is not None else 0.0,
                    loss=self._loss,
                )
                self._actors.append(actor)
        except (OSError, ray.exceptions.RayError) as error:
            raise TrainerLostError(
                f"Ray died while the trainer's ranks were started: {shorten_ray_error(error)}"
            ) from error

    def statuses(self) -> list[ProcessStatus]:
        """Return one status per rank. All ranks do the same."""
        gpus = map(self._plan.devices.gpu_of_rank, range(len(self._actors)))
        return [
            ProcessStatus(
                name=f"trainer rank {rank}",
                node=self._plan.ranks[rank].address if self._plan.ranks else "",
                gpus=() if gpu is None else (gpu.id,),
                doing=OPERATION_LABELS.get(self._method, "waits"),
            )
            for rank, gpu in enumerate(gpus)
        ]

    async def _look_at_ray(self, loss_future: asyncio.Future[str]) -> None:
        clock = SystemClock()
        while not (dead := self._death_cause()):
            await clock.sleep(LOOK_S)
        loss_future.set_result(dead)
        await asyncio.to_thread(self._stop)

    async def forward_backward(self, batch: TrainBatch) -> None:
        """Accumulate gradients on all ranks. A failure on one rank discards the step's gradient on all."""
        try:
            await self._all("forward_backward", batch)
        except AgentRLError:
            if self._actors:
                await self._all("discard", batch.policy)
            raise

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        reports: Sequence[StepReport] = await self._all("optim_step", policy, step_id)
        return reports[0]

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        references: Sequence[WeightsRef] = await self._all("publish", policy, version)
        return references[0]

    async def save(self, directory: str) -> None:
        await self._all("save", await asyncio.to_thread(os.path.abspath, directory))

    async def close(self) -> None:
        """Stop the ranks and, if the pool started it, Ray. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            if self._loss_future is not None and not self._loss_future.done():
                watch.cancel()
            await asyncio.wait({watch})
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._kill_actors()
        if self._owns_session:
            self._session.stop()

    def _kill_actors(self) -> None:
        if self._actors:
            import ray

            actors, self._actors = [*self._actors, *([self._files] if self._files is not None else [])], []
            self._files = None
            if not self._session.dead():  # if Ray is dead, the ranks die with it
                for actor in actors:
                    ray.kill(actor)

    async def _all(self, method: str, *arguments: object, limit_s: float | None = None) -> list[Any]:
        self._method = method
        try:
            return await self._call(self._actors, method, *arguments, limit_s=limit_s)
        finally:
            self._method = ""

    async def _call(
        self, actors: Sequence[Any], method: str, *arguments: object, limit_s: float | None = None
    ) -> list[Any]:
        """Call a method on some ranks. Returns their results in rank order.

        Raises:
            AgentRLError: the method raised it on a rank; the error of the first such rank.
            TrainerLostError: a rank, its node or Ray died, or a rank did not answer within `limit_s`; the group has
                ended.
            TrainerError: a rank failed, or the pool was not started; the group has ended.
        """
        if self._loss_future is not None and (self._loss_future.done() or self._death_cause()):
            raise self._ray_died(method)  # do not ask Ray: a call into a dead Ray can block for a minute
        if not self._actors or self._loss_future is None:
            raise TrainerError("the trainer pool is not running: it was never started, was closed, or lost a rank")
        from ray.exceptions import RayError

        try:
            futures = [asyncio.wrap_future(_result(getattr(actor, method).remote(*arguments))) for actor in actors]
        except (OSError, RayError) as error:  # an argument was in Ray's object store, which is lost
            await asyncio.to_thread(self._kill_actors)
            raise TrainerLostError(
                f"Ray died in {method}, and the trainer's ranks with it: {shorten_ray_error(error)}"
            ) from error
        for future in futures:
            future.add_done_callback(retrieve_exception)  # after the first failure, the others have no waiter
        pending = set(futures)
        loop = asyncio.get_running_loop()
        deadline = None if limit_s is None else loop.time() + limit_s
        # Act on the first failure: the other ranks may be waiting in a collective for the one that failed.
        while pending and not self._loss_future.done() and not any(_failed(future) for future in futures):
            remaining_s = None if deadline is None else deadline - loop.time()
            if remaining_s is not None and remaining_s <= 0:
                await self._give_up(futures, method, limit_s)
            await asyncio.wait({*pending, self._loss_future}, return_when=asyncio.FIRST_COMPLETED, timeout=remaining_s)
            pending = {future for future in futures if not future.done()}
        failed = await self._first_failed(futures)
        pending = {future for future in futures if not future.done()}
        if failed is not None:
            await self._settle(failed, method, futures[failed].exception(), pending)
        if pending:
            for future in pending:
                future.cancel()
            raise self._ray_died(method)
        return [future.result() for future in futures]

    async def _first_failed(self, futures: Sequence[asyncio.Future[Any]]) -> int | None:
        """Return the first rank that failed, if any, and not for want of another one. The ranks notice a lost one
        before Ray does, which says which one it is: waits for that.
        """
        clock = SystemClock()
        deadline = clock.monotonic() + PATIENCE_S
        while True:
            failed = [rank for rank, future in enumerate(futures) if _failed(future)]
            by_itself = [rank for rank in failed if not _misses_a_rank(futures[rank].exception())]
            if by_itself or not failed:
                return by_itself[0] if by_itself else None
            if self._death_cause() or clock.monotonic() > deadline or all(future.done() for future in futures):
                return failed[0]
            await clock.sleep(LOOK_S)

    async def _give_up(self, futures: Sequence[asyncio.Future[Any]], method: str, limit_s: float | None) -> None:
        """End a group in which some ranks do not answer."""
        silent = [rank for rank, future in enumerate(futures) if not future.done()]
        await asyncio.to_thread(self._kill_actors)
        for future in futures:
            future.cancel()
        names = ", ".join(map(self._rank_label, silent))
        raise TrainerLostError(f"trainer rank {names} did not answer ({method}) within {limit_s:g} s")

    def _rank_label(self, rank: int) -> str:
        """Return a rank's number and node, for messages."""
        return f"{rank} on node {self._plan.ranks[rank].address}" if self._plan.ranks else str(rank)

    def _ray_died(self, method: str) -> TrainerLostError:
        loss_future = self._loss_future
        # The watch detaches from a dead session, so its result must be read first.
        dead = loss_future.result() if loss_future is not None and loss_future.done() else self._death_cause()
        return TrainerLostError(f"Ray's {dead} died (in {method}), and the trainer's ranks with it")

    async def _settle(
        self, rank: int, method: str, error: BaseException | None, pending: set[asyncio.Future[Any]]
    ) -> None:
        """Raise the group's error for an error of one rank."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        is_lost = (
            not isinstance(error, RayTaskError) or _misses_a_rank(error) or isinstance(error.cause, TrainerLostError)
        )
        if isinstance(error, RayError) and is_lost and self._death_cause():
            raise self._ray_died(method) from error
        if isinstance(error, RayTaskError) and isinstance(error.cause, AgentRLError):
            if pending:
                _, pending = await asyncio.wait(pending, timeout=PATIENCE_S)
            if not pending:
                raise error.cause
        await asyncio.to_thread(self._kill_actors)
        for future in pending:
            future.cancel()
        consequence = f"The group of {self._trainer_plan.trainer.ranks} was stopped"
        if isinstance(error, RayActorError):
            raise TrainerLostError(
                f"trainer rank {self._rank_label(rank)} died in {method}: {shorten_ray_error(error)}. {consequence}"
            ) from error
        # A node, an object, another rank or Ray itself was lost.
        if isinstance(error, RayError) and is_lost:
            why = shorten_ray_error(error.cause if isinstance(error, RayTaskError) else error)
            raise TrainerLostError(
                f"trainer rank {self._rank_label(rank)} was lost in {method}: {why}. {consequence}"
            ) from error
        raise TrainerError(
            f"trainer rank {self._rank_label(rank)} failed in {method}: {error}. {consequence}; start the run again "
            "with --resume to continue from its newest checkpoint"
        ) from error


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


def _misses_a_rank(error: BaseException | None) -> bool:
    """Whether a call failed because another rank is gone, as gloo and NCCL report it."""
    return any(mark in str(error) for mark in ("gloo/transport", "DistBackendError"))


def _result(reference: ObjectRef[Any]) -> Any:
    return reference.future()
