"""The process of an episode worker: `python -m agentrl.app.worker_server FD PARENT`, started by
`cluster.worker_process`.

The process serves one connection, the socket it was started with, and ends with it. This module is a composition root:
it wires production's worker and runner to a partition of the journal, an engine in another process, and the run at the
other end of the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.app.engines import external_policies
from agentrl.app.policies import rollout_settings
from agentrl.app.run_parts import make_chat_format
from agentrl.app.scoring import make_scorers
from agentrl.cluster import worker_wire as wire
from agentrl.cluster.journal_stream import StreamedTurnLog
from agentrl.config.plans import plan_from_data
from agentrl.core import ids, rpc
from agentrl.core.clock import SystemClock
from agentrl.core.errors import VERSION_GONE, AgentRLError, EpisodeError, format_foreign_error
from agentrl.core.event_loop import EpisodeEventLoop
from agentrl.core.files import was_closed_by_foreign_code
from agentrl.core.parent_death import die_with_parent
from agentrl.core.records import EpisodeHeader, EpisodeSpec, Task
from agentrl.engines.remote.client import EngineClient
from agentrl.engines.router import SamplerRouter
from agentrl.environment.containment import exit_forked_process, stop_loop_in_forked_process
from agentrl.environment.registry import register_source_files, resolve
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.routing import HostRoutingStore, RoutingStore
from agentrl.journal.run_process import retry_until_writer_exits
from agentrl.journal.store import SqliteTurnLog
from agentrl.observe.blocked_loop import watch_event_loop
from agentrl.observe.bottleneck import ActivityClock
from agentrl.rollout.runner import EpisodeRunner
from agentrl.rollout.worker import AsyncioWorker
from agentrl.sandbox.sandbox import choose_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentrl.core.records import ForkPoint, PolicyVersion, ProposalNovelty
    from agentrl.journal.port import TurnLog, WorkerTurnLog

PARK_S = 10.0
"""Maximum seconds for a leaving worker to park its turns: spot machines get 30 s or more of notice."""
PROGRESS_S = 0.2
"""Seconds between reports of progress: without one, an episode is suspected when its worker dies."""


class RunConnection:
    """The connection of this process's episodes to the run: implements `EpisodeHost` and `CommitLog`."""

    def __init__(self, connection: rpc.Connection, log: TurnLog, policy_of: Callable[[str, int], str]) -> None:
        self.numbers: dict[str, int] = {}
        """Numbers of the episodes in flight, keyed by id."""
        self.specs: dict[int, EpisodeSpec] = {}
        """Specs of running episodes as received, keyed by number."""
        self._connection = connection
        self._log = log
        self._policy_of = policy_of
        self._children: dict[tuple[int, int, str], Callable[[int, EpisodeHeader], None]] = {}
        """Callbacks that wait for children, keyed by the spawn call."""
        self._ends: dict[str, EpisodeEnd] = {}

    def tell(self, message: wire.FromWorker) -> None:
        """Send the run a message; never waits."""
        self._connection.send(message)

    # --- requests of episodes -----------------------------------------------------------------------------------------

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str],
    ) -> None:
        child = resolve(environment)
        for seat in child.seats:
            self._policy_of(f"{child.__name__}.{seat}", 0)
        number, attempt = self.numbers[parent.episode_id], parent.attempt
        distinct = {id(task): task for task in tasks}
        spawn = wire.SpawnChildEpisodes(
            number=number,
            attempt=attempt,
            call=spawn_call,
            environment=environment,
            tasks=tuple(distinct.values()),
            of=tuple(list(distinct).index(id(task)) for task in tasks),
            known=tuple(known),
        )
        self.tell(spawn)
        self._children[number, attempt, spawn_call] = on_end

    async def branch(
        self, main: EpisodeSpec, point: ForkPoint, count: int, versions: Mapping[str, PolicyVersion]
    ) -> Mapping[str, PolicyVersion]:
        call, number = self._connection.next_call(), self.numbers[main.episode_id]
        request = wire.StartBranches(call=call, number=number, point=point, count=count, versions=dict(versions))
        reply: wire.BranchesStarted = await self._connection.ask(call, request)
        if reply.refusal:
            raise EpisodeError(reply.refusal, reason=VERSION_GONE, begin_again=True)
        return reply.pins

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> ProposalNovelty:
        call, number = self._connection.next_call(), self.numbers[spec.episode_id]
        proposal = wire.RememberProposal(call=call, number=number, call_id=call_id, key=key, structure=structure)
        reply: wire.ProposalReply = await self._connection.ask(call, proposal)
        return reply.known

    def readmit(self, spec: EpisodeSpec) -> None:
        self.tell(wire.AttemptStarted(number=self.numbers[spec.episode_id], attempt=spec.attempt))

    # --- ends of episodes ---------------------------------------------------------------------------------------------

    async def commit(self, end: EpisodeEnd) -> None:
        if end.header.committed:
            await self._log.flush()
        self._ends[end.spec.episode_id] = end

    def ended(self, number: int, header: EpisodeHeader) -> None:
        """Report the end of an episode."""
        end = self._ends.pop(header.episode_id)
        self.tell(wire.encode_episode_ended(number, header, end.digest, end.metrics, end.detail, end.distinct_counts))
        self._forget(number)

    def begin(self, number: int, spec: EpisodeSpec) -> None:
        """Note that an episode is in flight here."""
        self.numbers[spec.episode_id] = number
        self.specs[number] = spec

    def _forget(self, number: int) -> None:
        del self.numbers[self.specs.pop(number).episode_id]
        for key in [key for key in self._children if key[0] == number]:
            del self._children[key]

    # --- messages from the run ----------------------------------------------------------------------------------------

    def child_ended(self, message: wire.ChildEpisodeEnded) -> None:
        """Call the callback that waits for a child, if there is one."""
        on_end = self._children.get((message.number, message.attempt, message.call))
        if on_end is None:
            return
        parent = self.specs[message.number].episode_id
        child = replace(
            self.specs[message.number],
            episode_id=ids.child_episode_id(parent, message.attempt, message.call, message.index),
            group_id=ids.spawned_group_id(parent, message.attempt, message.call),
            parent_id=parent,
        )
        on_end(message.index, wire.decode_episode_header(child, message.ended, message.partition))

    def failed(self, error: BaseException) -> None:
        """End the run because of a failure that belongs to no episode. An unexpected error ends this process: code of
        an episode may have broken it, and the pool identifies the episode."""
        if isinstance(error, AgentRLError) and not was_closed_by_foreign_code(error):
            self.tell(wire.WorkerFailed(kind=type(error).__name__, message=str(error)))
            return
        self.tell(
            wire.LogLine(
                line=f"a worker process was broken from within: {format_foreign_error(error)} (see workers.log)"
            )
        )
        with contextlib.suppress(Exception):
            traceback.print_exception(error)
        os._exit(1)

    def forget_all(self) -> None:
        """Forget all episodes."""
        for table in (self.numbers, self.specs, self._children, self._ends):
            table.clear()


class WorkerServer:
    """The worker of this process; executes the run's messages. `tell` receives lines for the user."""

    def __init__(
        self, work: wire.WorkerSetup, connection: rpc.Connection, log: WorkerTurnLog, tell: Callable[[str], None]
    ) -> None:
        plan = plan_from_data(work.plan)
        choose_driver(plan.sandbox.driver)
        self._log = log
        chat_format = make_chat_format(plan.model)
        self.run = RunConnection(connection, log, plan.seats.policy_of)
        self._engines = [EngineClient(work.capabilities) for _ in range(max(1, len(plan.bases)))]
        """Clients of the base models' engines."""
        of_policy = {
            name: engine for base, engine in zip(plan.bases, self._engines, strict=False) for name in base.policies
        }
        self._external = external_policies(plan.external, tell)
        engine = SamplerRouter(of_policy, self._external, work.capabilities)
        settings = rollout_settings(plan, chat_format, work.capabilities.max_context)
        runner = EpisodeRunner(
            engine=engine,
            chat_format=chat_format,
            store=self.run,
            log=log,
            host=self.run,
            clock=SystemClock(),
            settings=replace(settings, scorers=make_scorers(plan.scorers, work.scorers)),
        )
        self._parking = runner.parking
        self._worker = AsyncioWorker(
            runner,
            environments={name: resolve(class_name) for name, class_name in work.environments.items()},
            on_failure=self.run.failed,
        )
        self._cancel_task: asyncio.Task[None] | None = None
        self.leaves = asyncio.Event()
        """Set when this process should end and other workers should resume its episodes."""

    def handle(self, message: wire.ToWorker) -> None:
        """Execute a message of the run."""
        match message:
            case wire.StartEpisode():
                self.run.begin(message.number, message.spec)
                self._worker.submit(message.spec, partial(self.run.ended, message.number), resume=message.resume)
            case wire.EngineAddresses():
                self._engines[message.base].moved(message.addresses)
            case wire.ChildEpisodeEnded():
                self.run.child_ended(message)
            case wire.ParkEpisode() if message.number in self.run.specs:
                episode_id = self.run.specs[message.number].episode_id
                self._worker.park(episode_id)
                self.run.tell(wire.EpisodeParked(number=message.number, deadline=self._parking.deadline(episode_id)))
            case wire.UnparkEpisode() if message.number in self.run.specs:
                self._parking.resume(self.run.specs[message.number].episode_id)
            case wire.CancelEpisodes():
                self._cancel_task = asyncio.get_running_loop().create_task(self._cancel())
            case wire.ShutDownWorker():
                self.leaves.set()

    def activity(self) -> dict[str, float]:
        """Return what the episodes have spent their time on."""
        return dict(self._worker.activity())

    def check_journal(self) -> None:
        self._log.check()

    async def tell_advanced(self) -> None:
        """Report the episodes that have made progress since they came to this process."""
        for episode_id in await self._log.advanced():
            if episode_id in self.run.numbers:
                self.run.tell(wire.EpisodeProgressed(number=self.run.numbers[episode_id]))

    async def close(self) -> None:
        """Close everything after the run has disconnected."""
        for policy in self._external.values():
            await policy.close()
        await self._log.close()

    async def park_all(self) -> None:
        """Park all episodes; the tokens of their turns are with the journal on return."""
        self.run.tell(wire.WorkerShuttingDown())
        for spec in list(self.run.specs.values()):
            self._worker.park(spec.episode_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PARK_S):
                while calls := [call for engine in self._engines for call in engine.calls_in_flight]:
                    await asyncio.wait(calls)

    async def _cancel(self) -> None:
        await self._worker.cancel()
        self.run.forget_all()
        self.run.tell(wire.EpisodesCancelled())


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    run = rpc.Connection(reader, writer, wire.TO_WORKER)
    work = await run.receive()
    if not isinstance(work, wire.WorkerSetup):
        return
    sys.path.extend(path for path in work.paths if path not in sys.path)
    register_source_files(work.sources)
    loop = asyncio.get_running_loop()

    def tell(line: str) -> None:  # threads may call this
        loop.call_soon_threadsafe(run.send, wire.LogLine(line=f"worker {work.number}: {line}"))

    server: WorkerServer | None = None
    watched = ActivityClock(SystemClock())

    async def heartbeat() -> wire.WorkerHeartbeat:
        return wire.WorkerHeartbeat(activity={} if server is None else {**watched.totals(), **server.activity()})

    alive = loop.create_task(run.send_heartbeats(1.0, heartbeat))
    try:
        log = await _open_log(work, tell)
        server = WorkerServer(work, run, log, tell)
    except Exception as error:  # noqa: BLE001 - the run must hear why there is no worker
        run.send(rpc.error_reply(0, error))
        await run.flush()
        return
    run.send(wire.WorkerReady())
    progress_task = loop.create_task(_tell_advanced(server))
    for number in (signal.SIGTERM, signal.SIGUSR1):  # Slurm sends its warning to every process of a job step
        loop.add_signal_handler(number, server.leaves.set)
    with (
        watch_event_loop(tell, count=watched.count_blocked),
        watched.during("loop"),
        stop_loop_in_forked_process(),
    ):
        listening = loop.create_task(run.run(server.handle), name="messages of the run")
        leave_task = loop.create_task(server.leaves.wait(), name="wait until it is to leave")
        await asyncio.wait({listening, leave_task}, return_when=asyncio.FIRST_COMPLETED)
        if listening.done():
            listening.result()
        else:
            await server.park_all()
        for task in (listening, leave_task, alive, progress_task):
            task.cancel()
    await server.close()


async def _open_log(work: wire.WorkerSetup, tell: Callable[[str], None]) -> WorkerTurnLog:
    """Open the worker's partition, on this host or on the run's."""
    journal = Path(work.journal)
    if work.receiver:
        routing = HostRoutingStore(work.host) if work.host else RoutingStore.of_journal(journal)
        return await StreamedTurnLog.open(work.receiver, work.number, routing)
    return await retry_until_writer_exits(lambda: SqliteTurnLog.open(journal, str(work.number)), tell, SystemClock())


async def _tell_advanced(server: WorkerServer) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        try:
            server.check_journal()
            await server.tell_advanced()
        except Exception as error:  # noqa: BLE001 - a full disk, reported only at an episode's end, or a bug
            server.run.failed(error)
            return


def main() -> None:
    """Serve the inherited connection until it ends."""
    faulthandler.enable()  # a native crash writes its Python stack to workers.log
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    with asyncio.Runner(loop_factory=EpisodeEventLoop) as runner:
        try:
            runner.run(_serve_and_leave(socket.socket(fileno=descriptor)))
        finally:
            exit_forked_process()


async def _serve_and_leave(connection: socket.socket) -> None:
    await _serve(connection)
    os._exit(0)  # episodes in flight have lost their owner, so exit without finishing them


if __name__ == "__main__":
    main()
