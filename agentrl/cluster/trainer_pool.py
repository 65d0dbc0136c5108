"""The trainer port over Ray: one actor per data-parallel rank, each a `PolicyTrainer` of the same weights.

The control path carries batches by reference; every rank reads its share of the token data itself. Ranks meet in one
torch.distributed group through a file, on loopback. Owns: actors, their order, what a failure of one means for all.
Does not own: training (`learn.trainer`), the Ray session (`session.py`). Invariants: every call goes to all ranks; a
step that failed on one rank is discarded on all; a dead rank or a dead Ray ends the group by name, and nothing is
retried: who owns the pool makes another.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cluster.session import RaySession, brief, kept_signal_handlers, on_node
from agentrl.config.run import LOSSES, RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, ConfigError, TrainerError, TrainerLostError
from agentrl.core.functions import FunctionCode, find, is_replaced
from agentrl.engines.child_process import visible_gpus

if TYPE_CHECKING:
    from ray import ObjectRef

    from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef
    from agentrl.engines.transfer import Recipient


PATIENCE_S = 60.0
"""Longest time, in seconds, that the other ranks may continue after one refused a call; then the group is stuck."""

LOOK_S = 1.0
"""Seconds between two looks at a local Ray: a call that is waiting does not fail when Ray dies."""


LEARNING = (
    "agentrl.learn.losses",
    "agentrl.learn.loss_batch",
    "agentrl.learn.attention",
    "agentrl.learn.forward",
    "agentrl.learn.packing",
    "agentrl.learn.sharding",
    "agentrl.learn.trainer",
    "agentrl.credit.samples",
    "agentrl.journal.rows",
)
"""The modules a rank computes with."""


def refuse_patches() -> None:
    """Refuse functions of ours that this process has replaced: ranks import the installed ones.

    Raises:
        ConfigError: a function, method or constant of `LEARNING` is not the one of its file.
    """
    for name in LEARNING:
        live = sys.modules.get(name)
        if live is None or live.__spec__ is None or live.__spec__.loader is None:
            continue  # nobody imported it here, so nobody replaced anything in it
        installed = importlib.util.module_from_spec(live.__spec__)
        live.__spec__.loader.exec_module(installed)
        for part, ours in vars(installed).items():
            if not part.startswith("__") and is_replaced(ours, vars(live).get(part)):
                raise ConfigError(
                    f"{name}.{part} was replaced in this process, and trainer.kind = 'ray' trains in processes of its "
                    "own, with the installed one. Set trainer.kind = 'in_process', where the replacement counts, or "
                    "leave it out"
                )


class TrainerRank:
    """The actor of one rank: a `PolicyTrainer` in its process group."""

    def __init__(
        self,
        config: dict[str, Any],
        run_directory: str,
        *,
        rank: int,
        size: int,
        rendezvous: str,
        gpu: str | None,
        memory_share: float,
        loss: FunctionCode | None,
    ) -> None:
        if gpu is not None:  # otherwise Ray has set it, or there is none
            os.environ.update(visible_gpus([gpu]))
        # gloo listens on the interface this names; by default it would be the host's first.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        from agentrl.learn.ranks import OneRank, ProcessGroup
        from agentrl.learn.trainer import PolicyTrainer, device_of, limit_memory

        if memory_share:
            limit_memory(rank, memory_share)
        ranks: OneRank | ProcessGroup = OneRank()
        if size > 1:
            ranks = ProcessGroup(Path(rendezvous), rank=rank, size=size, device=device_of(rank))
        self._trainer = PolicyTrainer(RunConfig.model_validate(config), Path(run_directory), ranks=ranks, loss=loss)

    def start(self, resume_from: str | None) -> tuple[int, tuple[str, ...]]:
        """See `PolicyTrainer.start`; the process id, and what that returns."""
        lines = self._trainer.start(None if resume_from is None else Path(resume_from))
        return os.getpid(), lines

    def forward_backward(self, batch: TrainBatch) -> None:
        """See `PolicyTrainer.forward_backward`."""
        self._trainer.forward_backward(batch)

    def discard(self, policy: str) -> None:
        """See `PolicyTrainer.discard`."""
        self._trainer.discard(policy)

    def optim_step(self, policy: str, step_id: int) -> StepReport:
        """See `PolicyTrainer.optim_step`."""
        return self._trainer.optim_step(policy, step_id)

    def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """See `PolicyTrainer.publish`."""
        return self._trainer.publish(policy, version)

    def send(self, version: PolicyVersion, recipient: Recipient) -> None:
        """See `PolicyTrainer.send`."""
        self._trainer.send(version, recipient)

    def save(self, directory: str) -> None:
        """See `PolicyTrainer.save`."""
        self._trainer.save(Path(directory))


class RayTrainerPool:
    """`core.ports.Trainer` over `trainer.workers` Ray actors."""

    def __init__(self, config: RunConfig, run_directory: Path, *, session: RaySession | None = None) -> None:
        """Create the pool; `start` starts the ranks.

        Args:
            config: of the run.
            run_directory: location of journal, versions and step columns, visible to all ranks.
            session: the Ray to use, which `close` leaves running; None: a session of its own.

        Raises:
            ConfigError: see `refuse_patches`; or there is no such loss.
        """
        refuse_patches()
        self._config = config
        name = config.trainer.loss.name
        self._loss = None if name in LOSSES else find("loss", name, key="trainer.loss.name")
        """The code of the user's loss, which every rank gets from here."""
        self._directory = run_directory.resolve()
        self._session = session if session is not None else RaySession()
        self._owns_session = session is None
        self._actors: list[Any] = []
        self._private: Path | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] | None = None
        """Resolved, with what died, when Ray itself is gone."""
        self.process_ids: tuple[int, ...] = ()
        """Process ids of the ranks, once started: for people and profilers."""

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        """Start Ray and the ranks; see `PolicyTrainer.start`.

        Raises:
            ModelError: the model cannot be trained.
            ConfigError: an adapter is to be on what cannot be both trained and served.
            TrainerError: the checkpoint does not fit.
            TrainerLostError: a rank or Ray died meanwhile, or Ray did not start.
        """
        loop = asyncio.get_running_loop()
        with kept_signal_handlers():
            await asyncio.to_thread(self._start_actors)
        self._lost = loop.create_future()
        self._watch = loop.create_task(self._look_at_ray(self._lost), name="watch Ray")
        started: Sequence[tuple[int, tuple[str, ...]]] = await self._all("start", resume_from)
        self.process_ids = tuple(process for process, _ in started)
        return started[0][1]

    def _start_actors(self) -> None:
        try:
            self._session.start()
        except (OSError, RuntimeError) as error:
            raise TrainerLostError(f"Ray did not start: {brief(error)}") from error
        self._private = Path(tempfile.mkdtemp(prefix=f"agentrl-{os.getpid()}-ranks-"))
        import ray

        settings = self._config.model_dump(mode="json")
        size = self._config.trainer.workers
        try:
            plan = self._session.plan_devices(self._config)
            for rank in range(size):
                gpu = plan.gpu_of_rank(rank)
                arguments = {
                    "rank": rank,
                    "size": size,
                    "rendezvous": str(self._private / "rendezvous"),
                    "gpu": gpu.id if gpu is not None and not gpu.node else None,
                    "memory_share": plan.share_of_rank(rank) if gpu is not None else 0.0,
                    "loss": self._loss,
                }
                held = (gpu,) if gpu is not None and gpu.node else ()
                # No restarts and no retries: a rank that died takes its group's state with it.
                actor = ray.remote(num_cpus=0, num_gpus=len(held), max_restarts=0, max_task_retries=0)(TrainerRank)
                placed = actor.options(scheduling_strategy=on_node(held))
                self._actors.append(placed.remote(settings, str(self._directory), **arguments))
        except (OSError, ray.exceptions.RayError) as error:
            raise TrainerLostError(f"Ray died while the trainer's ranks were started: {brief(error)}") from error

    async def _look_at_ray(self, lost: asyncio.Future[str]) -> None:
        clock = SystemClock()
        while not (dead := self._session.dead()):
            await clock.sleep(LOOK_S)
        lost.set_result(dead)
        await asyncio.to_thread(self._stop)

    async def forward_backward(self, batch: TrainBatch) -> None:
        """See `PolicyTrainer.forward_backward`; a failure on one rank discards the step's gradient on all."""
        try:
            await self._all("forward_backward", batch)
        except AgentRLError:
            if self._actors:
                await self._all("discard", batch.policy)
            raise

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        """See `PolicyTrainer.optim_step`."""
        reports: Sequence[StepReport] = await self._all("optim_step", policy, step_id)
        return reports[0]

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """See `PolicyTrainer.publish`."""
        references: Sequence[WeightsRef] = await self._all("publish", policy, version)
        return references[0]

    async def send(self, version: PolicyVersion, recipient: Recipient) -> None:
        """See `PolicyTrainer.send`."""
        await self._all("send", version, recipient)

    async def save(self, directory: str) -> None:
        """See `PolicyTrainer.save`."""
        await self._all("save", await asyncio.to_thread(os.path.abspath, directory))

    async def close(self) -> None:
        """Stop the ranks and, if the pool started it, Ray. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            if self._lost is not None and not self._lost.done():
                watch.cancel()
            await asyncio.wait({watch})
        await asyncio.to_thread(self._stop)

    def _stop(self) -> None:
        self._kill_actors()
        if self._owns_session:
            self._session.stop()
        if self._private is not None:
            with contextlib.suppress(OSError):
                (self._private / "rendezvous").unlink(missing_ok=True)
                self._private.rmdir()
            self._private = None

    def _kill_actors(self) -> None:
        if self._actors:
            import ray

            actors, self._actors = self._actors, []
            if not self._session.dead():  # else they die with it
                for actor in actors:
                    ray.kill(actor)

    async def _all(self, method: str, *arguments: object) -> list[Any]:
        return await self._call(self._actors, method, *arguments)

    async def _call(self, actors: Sequence[Any], method: str, *arguments: object) -> list[Any]:
        """Call a method on some ranks; their results in rank order, or the first rank's error.

        Raises:
            AgentRLError: what the method raised.
            TrainerLostError: a rank or Ray died; the group is gone.
            TrainerError: a rank failed, or the pool was not started; the group is gone.
        """
        if self._lost is not None and (self._lost.done() or self._session.dead()):
            raise self._ray_died(method)  # not asked: a call into a dead Ray can block for a minute
        if not self._actors or self._lost is None:
            raise TrainerError("the trainer pool is not running: it was not started, was closed, or lost a rank")
        from ray.exceptions import RayError

        try:
            futures = [asyncio.wrap_future(_result(getattr(actor, method).remote(*arguments))) for actor in actors]
        except (OSError, RayError) as error:  # an argument that Ray's store of objects, which is gone, should have held
            await asyncio.to_thread(self._kill_actors)
            raise TrainerLostError(f"Ray died in {method}, and the trainer's ranks with it: {brief(error)}") from error
        for future in futures:
            future.add_done_callback(_retrieve_exception)
        pending = set(futures)
        # The first failure is acted upon: the other ranks may wait in a collective for the one that failed.
        while pending and not self._lost.done() and not any(_failed(future) for future in futures):
            await asyncio.wait({*pending, self._lost}, return_when=asyncio.FIRST_COMPLETED)
            pending = {future for future in futures if not future.done()}
        for rank, future in enumerate(futures):
            if _failed(future):
                await self._settle(rank, method, future.exception(), pending)
        if pending:
            for future in pending:
                future.cancel()
            raise self._ray_died(method)
        return [future.result() for future in futures]

    def _ray_died(self, method: str) -> TrainerLostError:
        lost = self._lost
        # The watch leaves the dead session, which then no longer tells.
        dead = lost.result() if lost is not None and lost.done() else self._session.dead()
        return TrainerLostError(f"Ray's {dead} died (in {method}), and the trainer's ranks with it")

    async def _settle(
        self, rank: int, method: str, error: BaseException | None, pending: set[asyncio.Future[Any]]
    ) -> None:
        """Raise what a rank's error means for the group."""
        from ray.exceptions import RayActorError, RayError, RayTaskError

        if isinstance(error, RayError) and not isinstance(error, RayTaskError) and self._session.dead():
            raise self._ray_died(method) from error
        if isinstance(error, RayTaskError) and isinstance(error.cause, AgentRLError):
            if pending:
                _, pending = await asyncio.wait(pending, timeout=PATIENCE_S)
            if not pending:
                raise error.cause
        await asyncio.to_thread(self._kill_actors)
        for future in pending:
            future.cancel()
        stopped = f"The group of {self._config.trainer.workers} was stopped"
        if isinstance(error, RayActorError):
            raise TrainerLostError(f"trainer rank {rank} died in {method}: {brief(error)}. {stopped}") from error
        if isinstance(error, RayError) and not isinstance(error, RayTaskError):  # a node, an object, Ray itself
            raise TrainerLostError(f"trainer rank {rank} was lost in {method}: {brief(error)}. {stopped}") from error
        raise TrainerError(
            f"trainer rank {rank} failed in {method}: {error}. {stopped}; start the run again with --resume to go on "
            "from its newest checkpoint"
        ) from error


def _failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """A call that nobody waits for any longer may fail in silence: the run ended for another reason, told elsewhere."""
    if not future.cancelled():
        future.exception()


def _result(reference: ObjectRef[Any]) -> Any:
    return reference.future()
