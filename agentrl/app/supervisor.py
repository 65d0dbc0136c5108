"""The supervisor: starts the parts of a run from its newest checkpoint, and restarts them when a process is lost.

Each start does what `--resume` does in a new process. A start owns trainer, engine, workers and orchestrator, which end
with it; journal and observer outlive it. It ends with the run, with an error that ends the run, or with the loss of a
process; after a loss the next start follows, within a budget. Invariant: every loss is recovered in the same way, from
the data on disk alone.

With `workers = 1` environments share the run's process, and one that kills it kills the run. At the next `--resume`,
`RunProcessRecord` tells how the previous process ended and which episodes were running. If one of them made no progress
at two deaths in a row, or an environment broke the event loop, the run continues as with `workers = 2`: the pool of
worker processes finds the episode that kills, and drops it by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal as signals
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from agentrl.app.assemble import RunParts, assemble_orchestrator, change_orchestrator
from agentrl.app.control import RunControl, serve_control
from agentrl.app.engines import engines_by_base
from agentrl.app.plan import RunPlan
from agentrl.app.policies import frozen_policy_weights, pinned_policy_step_lags, serve_configured_weights
from agentrl.app.received import refusal_on_resume
from agentrl.app.recovery import UserCodeDigests, find_start_point
from agentrl.app.run_parts import RunFactories, make_chat_format, make_workers
from agentrl.app.run_tasks import CONSEQUENCE, RunTasks
from agentrl.app.stops import STOP_LIMIT, handle_signals, record_stop
from agentrl.cluster.worker_pool import MIN_SUSPECT_DEATHS
from agentrl.config.load import SettingDifference
from agentrl.config.plans import EnginePlan
from agentrl.core.clock import RetryBudget
from agentrl.core.errors import (
    EVALUATION_CUT,
    AgentRLError,
    EngineLostError,
    EnvironmentFaultError,
    InputError,
    JournalError,
    StorageError,
    TrainerError,
    TrainerLostError,
    describe_user_code_error,
    is_user_code,
)
from agentrl.core.event_loop import EpisodeEventLoop, was_stopped
from agentrl.core.files import was_closed_by_foreign_code
from agentrl.core.library_functions import LibraryFunctions, describe_removed
from agentrl.core.ports import ChatFormat, ProcessStatusSource, Trainer
from agentrl.core.records import EpisodeSpec, PolicyVersion, dropped_header
from agentrl.credit.estimators import AdvantageEstimator
from agentrl.environment.containment import exit_forked_process, stop_loop_in_forked_process
from agentrl.environment.environment import TaskSource
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.run_process import (
    NAMED,
    RunProcessRecord,
    format_episode_list,
    write_error,
)
from agentrl.observe.blocked_loop import watch_event_loop
from agentrl.observe.run_state import RunSnapshot, display_settings_from_config
from agentrl.orchestrator.checkpoints import CheckpointWriter
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.versions import ServedVersions

if TYPE_CHECKING:
    from agentrl.app.recovery import StartPoint
    from agentrl.cluster.worker_pool import WorkerPool
    from agentrl.core.ports import Engine
    from agentrl.journal.run_log import RunStart
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_directory import RunDirectory
    from agentrl.observe.run_observer import RunObserver
    from agentrl.orchestrator.versions import BestRunningMean

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class RunSetup:
    """The parts of a run that outlive its restarts within this process."""

    plan: RunPlan
    """The plan, with the changes that `agentrl run set` made."""
    tasks: TaskSource
    held_out: Sequence[HeldOutSplit]
    run_tasks: RunTasks
    """The tasks as they were read at this start."""
    selected: Sequence[Mapping[str, Any]]
    """What the tasks choose outside the run; see `app.received.selected_by_tasks`."""
    chat_format: ChatFormat
    factories: RunFactories
    directory: RunDirectory
    store: SqliteJournal
    observer: RunObserver
    code: UserCodeDigests
    estimator: AdvantageEstimator | None
    """Advantage estimator; see `UserFunctions`."""
    compares_in_step: bool
    """As in `UserFunctions`."""
    changed: Sequence[SettingDifference]
    """Settings changed since the previous process."""
    configured: Mapping[str, Any]
    """Data of the configuration, without the settings of the command line and of `agentrl run set`."""
    began: list[RunStart] = field(default_factory=list)
    """Starts in this process."""
    paused_by: str = ""
    """`Orchestrator.paused_by` at the end of the previous start."""
    drained_by: str = ""
    """`Orchestrator.drained_by` at the end of the previous start."""


def run_guarding_event_loop(main: Coroutine[Any, Any, T], directory: Path) -> T:
    """Run a coroutine to its end, like `asyncio.run`, in a loop that environments share and may break.

    Raises:
        EnvironmentFaultError: an environment stopped the loop, cancelled the run's tasks, ended the process from one
            of its tasks, or removed functions of Python's library.
    """
    library = LibraryFunctions()
    STOP_LIMIT.forget()
    runner = asyncio.Runner(loop_factory=EpisodeEventLoop)
    try:
        task = runner.get_loop().create_task(main, name="run")
        try:
            runner.run(_wait(task))
            if not task.cancelled():
                return task.result()
            loop_error: BaseException = asyncio.CancelledError()
        except BaseException as error:
            exit_forked_process()
            removed = library.restore()  # first, because ending the run needs them
            is_outcome = task.done() and not task.cancelled() and task.exception() is error
            is_broken = bool(removed) and not isinstance(error, AgentRLError)
            if is_outcome and not is_broken and not _is_foreign(error):
                if isinstance(error, Exception) and not isinstance(error, AgentRLError):
                    error.add_note(f"Episodes that ran: {_running_now(directory)}")
                raise
            loop_error = error
        is_ctrl_c = isinstance(loop_error, KeyboardInterrupt) and (
            signals.getsignal(signals.SIGINT) is signals.default_int_handler
        )
        record = RunProcessRecord.read(directory)
        running = _running_now(directory)  # some episodes end while the run shuts down, so list them now
        _finish(runner.get_loop(), task)
        if is_ctrl_c or not record.is_of_this_process or not record.is_playing or record.workers > 1:
            if removed:
                raise EnvironmentFaultError(f"an environment {describe_removed(removed)}") from loop_error
            raise loop_error
        raise _fault(loop_error, record, directory, running, removed) from loop_error
    finally:
        STOP_LIMIT.resume()  # closing waits for the threads of the loop
        with contextlib.suppress(OSError):  # an environment may have closed the log's descriptors
            runner.close()
        STOP_LIMIT.cancel()


def _is_foreign(error: BaseException) -> bool:
    """Whether an error of the run comes from foreign code: from a function that an environment replaced, or from files
    that it closed."""
    if isinstance(error, AgentRLError):
        return was_closed_by_foreign_code(error)
    frames = traceback.extract_tb(error.__traceback__)
    return was_closed_by_foreign_code(error) or bool(frames and is_user_code(frames[-1].filename))


async def _wait(task: asyncio.Task[Any]) -> None:
    await asyncio.wait({task})


def _finish(loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
    """Cancel the run in a loop that foreign code broke, and let it close its resources."""
    if not task.done() and not task.cancelling():
        task.cancel()
    for _ in range(NAMED):  # the task that stopped the loop may stop it again
        if task.done():
            break
        with contextlib.suppress(BaseException):
            loop.run_until_complete(_wait(task))


def _running_now(directory: Path) -> str:
    """List the episodes in flight, as far as the journal on disk shows them; for a message."""
    record = RunProcessRecord.read(directory)
    try:
        with contextlib.closing(SqliteRunLog(directory / "journal")) as log:
            return format_episode_list(record.running(log.unfinished))
    except JournalError as error:
        return f"episodes that the journal cannot name ({error})"


def _fault(
    loop_error: BaseException, record: RunProcessRecord, directory: Path, running: str, removed: Sequence[str]
) -> EnvironmentFaultError:
    """Make the error of a run whose process an environment broke, and record it for the next process."""
    match loop_error:
        case _ if removed:
            fault = describe_removed(removed)
        case asyncio.CancelledError():
            fault = "cancelled the tasks of the whole run"
        case KeyboardInterrupt() | SystemExit():
            fault = f"raised {describe_user_code_error(loop_error)} in its own task or callback"
        case _ if was_stopped(loop_error):
            fault = "stopped the event loop of the run"
        case _:
            fault = f"broke the process of the run ({describe_user_code_error(loop_error)})"
    fault = f"an environment {fault}"
    with contextlib.suppress(StorageError):
        msgspec.structs.replace(record, state="failed", fault=fault, has_killer=True).write(directory)
    error = EnvironmentFaultError(
        f"{fault} while these episodes ran: {running}. Start again with --resume: episodes are then run in worker "
        "processes, and one that does it again is dropped and named"
    )
    write_error(directory, error)
    return error


async def supervise(setup: RunSetup) -> Orchestrator:
    """Run to the end, restarting after each loss; returns the last orchestrator.

    Raises:
        TrainerLostError: the trainer was lost `core.clock.ATTEMPTS` times in a row, with no step in between.
        AgentRLError: another error ended the run.
    """
    budget = RetryBudget()
    observer = setup.observer
    while True:
        steps = len(observer.steps)
        try:
            return await _run_once(setup)
        except (TrainerLostError, EngineLostError) as error:
            if len(observer.steps) > steps:
                budget.achieved()
            wait = budget.lost()
            if wait is None:
                raise
            observer.watch()
            observer.warn(f"{error}; resuming from the newest checkpoint in {wait:g} s")
        await setup.factories.clock.sleep(wait)


async def _run_once(setup: RunSetup) -> Orchestrator:
    """Start the run from the data on disk, and run it until it ends or one of its processes is lost.

    1. `process.json` tells how the previous process ended, and which episodes ran in it. If one of them made no
       progress at two deaths in a row, episodes are played in worker processes (`_new_record`).
    2. Checkpoints and journal determine where the run continues, and which work is left (`find_start_point`).
    3. The trainer starts from the checkpoint beside the engine, then the workers. The journal records the start before
       its first versions are published, and the versions before the engine serves them
       (`ResumeCheckpoint.publish_first_versions`).
    4. `assemble_orchestrator` builds the loop and hands it the remaining work (`Dispatcher.restore`): units still to be
       trained return to the buffer, and unfinished episodes to their workers, which replay their recorded calls and
       continue.
    """
    store, observer, directory, clock = setup.store, setup.observer, setup.directory, setup.factories.clock
    await store.flush()
    record = _new_record(setup)
    plan = replace(setup.plan, settings=setup.plan.settings.model_copy(update={"workers": record.workers}))
    changes = () if setup.began else setup.changed
    point = await find_start_point(
        *(plan, directory, store),
        code=setup.code,
        changed=changes,
        refusal=_refusal(setup),
        clock=clock,
        tell=observer.say,
    )
    tasks_changed = await asyncio.to_thread(setup.run_tasks.changes_since, directory.path)  # none after `write`
    for change in tasks_changed:
        observer.warn(f"{change} since the run's last start. {CONSEQUENCE}")
    setup.began.append(point.record)
    if point.record.lineage:
        observer.say(". ".join(f"{sentence[0].upper()}{sentence[1:]}" for sentence in point.sentences) + ".")
    async with contextlib.AsyncExitStack() as stack:
        trainer = setup.factories.trainer(plan.trainer, directory.path)
        stack.push_async_callback(_close, trainer, observer)
        engine = await _start_trainer_and_engine(setup, plan.engine, point, trainer, stack)
        workers = _workers(plan, setup, engine)
        if workers is not None:
            stack.push_async_callback(workers.close)
        else:
            record.workers = 1
        served_versions = ServedVersions(
            engine, batches=pinned_policy_step_lags(plan.trained, deterministic=plan.settings.deterministic)
        )
        await serve_configured_weights(
            plan.engine.bases, served_versions, store, await asyncio.to_thread(frozen_policy_weights, plan.engine.bases)
        )
        store.record_start(msgspec.structs.replace(point.record, tasks_changed=tuple(tasks_changed)))
        await store.flush()  # a start that is killed between the two finds the change again
        await asyncio.to_thread(setup.run_tasks.write, directory.path)
        if point.record.lineage:
            observer.forget_after(point.record.steps)
        trainable = {name: point.versions[name] for name in plan.trained}
        opponents = await point.recovery.publish_first_versions(
            plan, trainable, trainer, served_versions, store, point.past
        )
        if point.record.lineage:
            await asyncio.to_thread(directory.unlink)
        running_best = await asyncio.to_thread(point.recovery.running_best, directory.versions)
        parts = _parts(
            setup, point, opponents, running_best, served_versions=served_versions, trainer=trainer, workers=workers
        )
        orchestrator = assemble_orchestrator(plan, parts)
        setup.factories.assembled(orchestrator)
        observer.watch(partial(_status, orchestrator, [trainer, *engines_by_base(engine), workers]))
        with (
            _episode_tracking(record, directory.path, workers) as report_end,
            _interruptible(orchestrator, observer, directory.path, report_end, plan.settings.stop_seconds),
            watch_event_loop(observer.warn, count=orchestrator.activity.count_blocked),
            orchestrator.activity.during("loop", workers is None),
            stop_loop_in_forked_process(),
        ):
            await _drop_cut_evaluations(store)
            await _run_controlled(setup, orchestrator)
        return orchestrator


async def _start_trainer_and_engine(
    setup: RunSetup, plan: EnginePlan, point: StartPoint, trainer: Trainer, stack: contextlib.AsyncExitStack
) -> Engine:
    """Start both, side by side if the engine runs in other processes. `stack` closes the engine."""
    observer, directory, clock = setup.observer, setup.directory, setup.factories.clock
    began = clock.monotonic()

    async def start_trainer() -> None:
        for line in await trainer.start(point.recovery.start_from):
            observer.say(line)
        observer.say(f"the trainer is ready: {clock.monotonic() - began:.1f} s")

    async def start_engine() -> Engine:
        engine = await setup.factories.engine(plan, point.versions, observer.warn, directory.engine_log)
        stack.push_async_callback(engine.close)
        observer.say(f"the engine is ready: {clock.monotonic() - began:.1f} s")
        return engine

    observer.phase("loading trainer and engine")
    if plan.demand.engine_in_process:  # transformers loads with settings of the whole process
        await start_trainer()
        return await start_engine()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(start_trainer())
            engine = group.create_task(start_engine())
    except BaseExceptionGroup as errors:
        error = errors.exceptions[0]
        raise error from error.__cause__
    return engine.result()


async def _run_controlled(setup: RunSetup, orchestrator: Orchestrator) -> None:
    """Run the loop, and answer `agentrl run pause | resume | drain | set` meanwhile."""

    def apply(plan: RunPlan) -> None:
        setup.plan = plan
        change_orchestrator(orchestrator, plan)
        setup.observer.state.plan = display_settings_from_config(plan.settings.model_dump(mode="json"))

    control = RunControl(
        *(setup.plan, setup.configured, orchestrator, setup.store),
        clock=setup.factories.clock,
        apply=apply,
        tell=setup.observer.say,
    )
    if setup.drained_by:
        orchestrator.drain(setup.drained_by)
    if setup.paused_by:
        orchestrator.pause(setup.paused_by)
    async with serve_control(setup.directory.path, control, setup.observer.warn):
        try:
            await orchestrator.run()
        except TrainerLostError as error:
            if orchestrator.outcome.interrupted:  # the user asked to stop, so do not restart
                raise TrainerError(f"{error}, while the run was stopping; its newest checkpoint is intact") from error
            raise
        finally:
            setup.paused_by, setup.drained_by = orchestrator.paused_by, orchestrator.drained_by


async def _drop_cut_evaluations(store: SqliteJournal) -> None:
    """Drop the evaluation episodes that an earlier process left in flight."""
    detail = "its process ended during the evaluation"
    cut = [(spec, dropped_header(spec, EVALUATION_CUT)) for spec in store.unfinished("evaluate")]
    await asyncio.gather(*(store.commit(EpisodeEnd(spec, header, b"", {}, detail)) for spec, header in cut))


def _status(orchestrator: Orchestrator, parts: Sequence[object]) -> RunSnapshot:
    """The status of the loop, with the activity of the run's processes."""
    processes = [status for part in parts if isinstance(part, ProcessStatusSource) for status in part.statuses()]
    return replace(orchestrator.status(), processes=tuple(processes))


def _parts(
    setup: RunSetup,
    point: StartPoint,
    opponents: Mapping[str, Sequence[PolicyVersion]],
    running_best: BestRunningMean,
    *,
    served_versions: ServedVersions,
    trainer: Trainer,
    workers: WorkerPool | None,
) -> RunParts:
    store, directory = setup.store, setup.directory
    return RunParts(
        served=served_versions,
        trainer=trainer,
        chat_format=setup.chat_format,
        store=store,
        observer=setup.observer,
        clock=setup.factories.clock,
        tasks=setup.tasks,
        held_out=setup.held_out,
        checkpoints=CheckpointWriter(directory.checkpoints),
        versions=point.versions,
        opponents=opponents,
        past=point.past,
        is_current_task=setup.run_tasks.is_current,
        refusal=_refusal(setup),
        role_means=point.recovery.role_means,
        estimator=setup.estimator,
        compares_in_step=setup.compares_in_step,
        workers=workers,
        tell=setup.observer.warn,
        say=setup.observer.say,
        running_best=running_best,
    )


def _refusal(setup: RunSetup) -> Callable[[EpisodeSpec], str]:
    return partial(refusal_on_resume, setup.directory.journal, setup.plan.environment, setup.selected)


def _new_record(setup: RunSetup) -> RunProcessRecord:
    """Make the record of this start. Warns about the end of the previous process, if it is known."""
    store, num_workers = setup.store, setup.plan.settings.workers
    last = RunProcessRecord.read(setup.directory.path)
    record = last.next(store)
    running = last.running(store.unfinished)
    suspects = [spec for spec in running if record.deaths(spec) >= MIN_SUSPECT_DEATHS]
    # Worker processes can build only this format themselves.
    can_be_apart = setup.factories.chat_format is make_chat_format
    is_suspicious = bool(suspects) or record.has_killer
    # An episode killed the main process: continue in worker processes.
    record.workers = max(num_workers, 2) if is_suspicious and can_be_apart else num_workers
    if last.is_playing:
        end_reason = (
            f"ended: {last.fault}"
            if last.fault
            else "died without an error message (killed, crashed, or out of memory)"
        )
        place = "" if last.workers == 1 else ", in worker processes"
        message = f"the previous process {end_reason}. It was running {format_episode_list(running, 2)}{place}"
        if any(spec.purpose == "train" for spec in running):
            message += "; training episodes continue from where they stopped"
        if any(spec.purpose == "evaluate" for spec in running):
            message += "; held-out episodes that have ended count if their evaluation is resumed"
        setup.observer.warn(message)
    if is_suspicious and num_workers == 1:
        cause = (
            f"{format_episode_list(suspects)} made no progress through {MIN_SUSPECT_DEATHS} such deaths in a row"
            if suspects
            else "an episode may break the process again"
        )
        record_text = (
            f"episodes are run in {record.workers} worker processes, where one that kills its process is identified "
            "and dropped as worker_lost, and the others survive"
            if can_be_apart
            else "worker processes would identify it, but they cannot use the chat format that this run was given"
        )
        setup.observer.warn(f"{cause}: {record_text}")
    return record


def _workers(plan: RunPlan, setup: RunSetup, engine: Engine) -> WorkerPool | None:
    """Make the run's worker processes; none if they are needed only because of a death, and cannot be made."""
    try:
        return make_workers(
            *(plan.rollout, plan.engine.demand, plan.environment, engine, setup.directory.journal),
            *(setup.observer.warn, setup.directory.workers_log, setup.factories.clock),
        )
    except InputError as error:
        if plan.settings.workers == setup.plan.settings.workers:
            raise
        setup.observer.warn(f"no worker processes: {error}. Episodes are run in the main process again")
        return None


@contextlib.contextmanager
def _episode_tracking(record: RunProcessRecord, run: Path, workers: WorkerPool | None) -> Iterator[Callable[[], None]]:
    """Record on disk that episodes run in this process, until their end is known. Yields a function to call after a
    normal end; any other end counts as a death."""

    def end(fault: str = "") -> None:
        record.is_playing, record.fault = bool(fault), fault
        record.has_killer |= workers is not None and bool(workers.killers)
        with contextlib.suppress(StorageError):  # at worst, one death too many is counted
            record.write(run)

    record.write(run)
    try:
        yield end
    except asyncio.CancelledError:
        # agentrl never cancels a run, so an environment did: `run_guarding_event_loop` finds out which
        raise
    except BaseException as error:
        is_ours = isinstance(error, AgentRLError) and not was_closed_by_foreign_code(error)
        end("" if is_ours else describe_user_code_error(error))
        raise
    end()


async def _close(trainer: Trainer, observer: RunObserver) -> None:
    with observer.closing("stopping the trainer"):
        await trainer.close()


@contextlib.contextmanager
def _interruptible(
    orchestrator: Orchestrator, observer: RunObserver, run: Path, report_end: Callable[[], None], stop_seconds: float
) -> Iterator[None]:
    """Handle Ctrl-C and signals. Once: drain, write a checkpoint, return. Twice, also while the run closes: end the
    process, which does not count as a death. In a notebook, which shares the process, twice cancels the run instead.
    """
    task, loop, is_over = asyncio.current_task(), asyncio.get_running_loop(), False

    def cancel() -> None:
        if task is not None and not is_over:  # the closing of a drained run is not interrupted
            task.cancel()

    def stop() -> None:
        observer.phase(
            "stopping: finishing the step and writing a checkpoint (another signal, or Ctrl-C, ends at once)"
        )
        orchestrator.stop()

    def leave_at_once() -> None:
        report_end()
        record_stop(run)
        with contextlib.suppress(RuntimeError):  # an environment may have closed the loop
            loop.call_soon_threadsafe(cancel)

    def give_up() -> None:
        given_up = ("" if is_over else orchestrator.unfinished()) or "waiting for the end of its processes"
        observer.warn(
            f"ended {stop_seconds:g} s after the signal (stop_seconds), without {given_up}. A resume continues "
            "from the newest checkpoint; committed episodes are on disk"
        )
        report_end()
        record_stop(run)

    try:
        with handle_signals(
            stop, leave_at_once, stop_seconds=stop_seconds, give_up=give_up, tell=observer.warn, stays=True
        ):
            yield
    finally:
        is_over = True
