"""An asyncio worker: runs episodes in this process's event loop, retries failed attempts, reports each end once.

Foreign errors stop here (and in the cluster's supervision): any exception of an environment becomes a retry or a drop
with a reason, never a reward and never the end of the run.

An episode whose environment raises is tried `DATA_ATTEMPTS` times. An episode whose infrastructure fails continues from
its last entry after a wait, and is dropped when it makes no progress. So is an episode that keeps losing the engine,
despite the waits of its turn (`agent.py`). A program that ignores its cancellation is abandoned: its coroutine is
closed at its current await, and its later actions are ignored. Threads and tasks that it started keep running.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine

from agentrl.core.clock import RetryBudget
from agentrl.core.errors import (
    EngineError,
    EngineLostError,
    EnvironmentDefinitionError,
    EpisodeError,
    InfrastructureError,
    ScorerError,
    StorageError,
    describe_raise_location,
    describe_user_code_error,
)
from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.environment.environment import Environment
from agentrl.environment.registry import resolve
from agentrl.rollout.episode import GRACE_S
from agentrl.rollout.kv_budget import KVBudget
from agentrl.rollout.runner import EpisodeRunner

MAX_ATTEMPTS = 8
"""Maximum number of attempts of an episode over all restarts of a run, if they end through no fault of its environment:
a resource died with its process, or the code changed. Attempts whose external agent died with its process do not
count: it restarts with the same replies, and a process dies once."""

MAX_STRAYS = 3
"""Number of cancellations of an episode's task by code that does not own it after which the episode is dropped."""

OnEnd = Callable[[EpisodeHeader], None]


DATA_ATTEMPTS = 2
"""Number of attempts of an environment that raises: one retry covers an accident; a defect fails again."""


class AsyncioWorker:
    """Implements `core.ports.Worker`.

    Args:
        runner: runs one attempt.
        environments: classes by name; the registry resolves other names.
        data_attempts: number of attempts of an episode whose environment raises.
        on_failure: called with an error that is no episode's fault (storage, engine); the run should end.
        admitted: waits until the admissions of submitted episodes are on disk. No code of an episode runs earlier: if
            the code kills this process, the journal has the episode. Worker processes do not wait: their death leaves
            the journal's writer alive.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        environments: dict[str, type[Environment]],
        data_attempts: int = DATA_ATTEMPTS,
        on_failure: Callable[[BaseException], None],
        admitted: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._runner = runner
        self._admitted = admitted
        self._environments = dict(environments)
        self._loaded: set[str] = set()
        self._data_attempts = data_attempts
        self._on_failure = on_failure
        self._tasks: dict[asyncio.Task[None], tuple[EpisodeSpec, OnEnd]] = {}
        """Running attempts and their end callbacks, keyed by task."""
        self._on_task_end, self._on_stuck = self._task_ended, self._stuck  # bound once, not for each episode
        self._is_cancelling = False
        self._strays = Counter[str]()
        """Number of cancellations by code that does not own the episode's task, keyed by episode."""
        self.last_failure = ""
        """Message of the last dropped episode."""

    @property
    def kv_budget(self) -> KVBudget:
        """Reservations of the worker's conversations in the engine's KV cache."""
        return self._runner.kv_budget

    def submit(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool = False) -> None:
        """Start an episode in its own task; with `resume`, replay its recorded entries first."""
        self._start(spec, on_end, self._run(spec, on_end, resume=resume))

    def park(self, episode_id: str) -> bool:
        return self._runner.parking.park(episode_id)

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        return self._runner.parking.unpark(count)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancel the episodes in flight. Nothing is reported or dropped: they stay unfinished in the journal."""
        self._is_cancelling = True
        try:
            for task, (spec, _) in list(self._tasks.items()):
                self._runner.stop(spec)
                task.cancel()
            if self._tasks:
                _, stuck = await asyncio.wait(self._tasks, timeout=GRACE_S)
                for task in stuck:
                    self._leave_behind(task)
        finally:
            self._is_cancelling = False

    def _start(self, spec: EpisodeSpec, on_end: OnEnd, work: Coroutine[None, None, None]) -> None:
        self._runner.parking.admit(spec.episode_id)
        task = asyncio.get_running_loop().create_task(work, name=spec.episode_id)
        self._tasks[task] = (spec, on_end)
        task.add_done_callback(self._on_task_end)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Handle the end of an episode's task: resume it if others cancelled it, or report its failure."""
        self._runner.parking.forget(task.get_name())
        attempt = self._tasks.pop(task, None)
        if attempt is None:
            task.cancelled() or task.exception()  # mark as retrieved: the task was abandoned
        elif task.cancelled():
            # When all tasks are cancelled, the event loop ends and would not run a task that is started now. Listing
            # many tasks takes long, so `cancel`, which ends thousands, skips the check.
            if not self._is_cancelling and not all(other.cancelling() for other in asyncio.all_tasks()):
                spec, on_end = attempt
                self._start(spec, on_end, self._resume_stray(spec, on_end))
        elif (error := task.exception()) is not None:
            self._on_failure(error)

    async def _resume_stray(self, spec: EpisodeSpec, on_end: OnEnd) -> None:
        """Resume an episode whose task was cancelled by code that does not own it."""
        self._strays[spec.episode_id] += 1
        if self._strays[spec.episode_id] < MAX_STRAYS:
            await self._runner.flush()
            await self._run(spec, on_end, resume=True)
            return
        detail = f"the task of its run() was cancelled {MAX_STRAYS} times, and not by agentrl: an environment did it"
        self.last_failure = detail
        on_end(await self._runner.drop(spec, "environment_error", detail, 0.0))

    def _leave_behind(self, task: asyncio.Task[None]) -> None:
        spec, _ = self._tasks.pop(task)
        self._runner.abandon(spec)
        task.cancel()

    def _stuck(self, task: asyncio.Task[None]) -> None:
        """Abandon a program that swallowed its cancellation at the time limit, and drop its episode."""
        spec, on_end = self._tasks[task]
        self._leave_behind(task)
        self._start(spec, on_end, self._drop_stuck(spec, on_end))

    async def _drop_stuck(self, spec: EpisodeSpec, on_end: OnEnd) -> None:
        detail = f"run() was cancelled at its deadline, ignored the cancellation, and was abandoned {GRACE_S:g} s later"
        self.last_failure = detail
        on_end(await self._runner.drop(spec, "episode_timeout", detail, 0.0))

    async def _run(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool) -> None:
        """Run attempts until one commits, or the episode is dropped or abandoned.

        With `resume` every attempt reads its recorded entries first, later ones too: a killed process may have written
        entries of a further attempt whose admission never reached the disk.
        """
        if self._admitted is not None:
            await self._admitted()
        started = self._runner.clock.monotonic()
        task = asyncio.current_task()
        assert task is not None
        failures = 0
        recalls_from = 0  # see `EpisodeRunner.run`
        counted_from = 0  # first attempt that counts toward `MAX_ATTEMPTS`
        outages = _Outages()
        while True:
            begin_again = False
            try:
                header = await self._run_attempt(spec, outages, recalls_from, resume=resume)
                break
            except EngineLostError as error:
                reason, detail = "engine_lost", str(error)
            except (StorageError, EngineError, EnvironmentDefinitionError, ScorerError):
                raise
            except EpisodeError as error:
                reason, begin_again = error.reason, error.begin_again
                detail = f"{error}{describe_raise_location(error.__cause__)}{_noted(error)}"
            except Exception as error:  # noqa: BLE001 - the boundary: an environment may raise anything
                reason, detail = "environment_error", f"{describe_user_code_error(error)}{_noted(error)}"
            self._runner.forget(spec)
            if task not in self._tasks:
                return
            if begin_again:
                counted_from = spec.attempt + 1 if reason == "harness_lost" else counted_from
                begin_again = spec.fork is None and spec.attempt + 1 - counted_from < MAX_ATTEMPTS
            elif reason == "environment_error":
                recalls_from = spec.attempt + 1  # the recorded replies led to the error, so the retry samples new ones
                failures += 1
                begin_again = failures < self._data_attempts
            if not begin_again:
                self.last_failure = detail
                header = await self._runner.drop(spec, reason, detail, self._runner.clock.monotonic() - started)
                break
            spec = _next_attempt(spec)
            self._tasks[task] = (spec, on_end)
            self._runner.host.readmit(spec)
        if task in self._tasks:  # otherwise it was abandoned, perhaps while committing
            on_end(header)

    async def _run_attempt(
        self, spec: EpisodeSpec, outages: _Outages, recalls_from: int, *, resume: bool
    ) -> EpisodeHeader:
        """Run one attempt; after a failure of its infrastructure, wait and continue from its last entry.

        Raises:
            EpisodeError: the episode cannot continue, or its infrastructure failed too often without progress.
        """
        environment = self._environment(spec.environment)
        while True:
            recorded = await self._runner.recorded(spec) if resume else ()
            outages.note_progress(len(recorded))
            since, answers = (recalls_from, ()) if recorded else await self._runner.recalled(spec, recalls_from)
            try:
                return await self._runner.run(
                    *(spec, environment, recorded), answers=answers, recalls_from=since, on_stuck=self._on_stuck
                )
            except InfrastructureError as error:
                wait = outages.lost()
                if wait is None or asyncio.current_task() not in self._tasks:
                    raise EpisodeError(f"{error}{_noted(error)}", reason="infrastructure") from error
            await self._runner.flush()
            await self._runner.clock.sleep(wait)
            resume = True

    def _environment(self, name: str) -> type[Environment]:
        environment = self._environments.get(name)
        if environment is None:
            environment = self._environments[name] = resolve(name)
        if name not in self._loaded:
            try:
                environment.load()
            except Exception as error:
                raise EnvironmentDefinitionError(
                    f"{environment.__qualname__}.load() raised {describe_user_code_error(error)}"
                ) from error
            self._loaded.add(name)
        return environment


class _Outages(RetryBudget):
    """Failures of an episode's infrastructure, counted since the episode last had more entries than ever before."""

    __slots__ = ("_most_entries",)

    def __init__(self) -> None:
        super().__init__()
        self._most_entries = 0

    def note_progress(self, entries: int) -> None:
        """Note the number of entries with which an attempt resumes."""
        if entries > self._most_entries:
            self._most_entries = entries
            self.achieved()


def _noted(error: Exception) -> str:
    """Return the location in its episode at which an error was raised, as the runner noted it."""
    notes = getattr(error, "__notes__", None)
    return f" ({notes[-1]})" if notes else ""


def _next_attempt(spec: EpisodeSpec) -> EpisodeSpec:
    return dataclasses.replace(spec, attempt=spec.attempt + 1)
