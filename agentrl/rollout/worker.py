"""An asyncio worker: runs episodes in this process's event loop, retries failed attempts, reports each end once.

Foreign errors stop here (and in the cluster's supervision): any exception of an environment becomes a retry or a drop
with a reason, never a reward and never the end of the run.

An episode whose environment raises is tried `DATA_ATTEMPTS` times. An episode whose infrastructure fails continues from
its last entry after a wait, and is dropped when it makes no progress. So is an episode that keeps losing the engine,
despite the waits of its turn (`turn/agent.py`). A program that ignores its cancellation is abandoned: its coroutine is
closed at its current await, and its later actions are ignored. Threads and tasks that it started keep running.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence

from agentrl.core.clock import RetryBudget
from agentrl.core.errors import (
    EngineError,
    EngineLostError,
    EnvironmentDefinitionError,
    EpisodeError,
    InfrastructureError,
    ScorerError,
    StorageError,
    describe_failure_location,
    describe_raise_location,
    describe_user_code_error,
    format_foreign_error,
)
from agentrl.core.event_loop import CALL_THREADS
from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.environment.environment import Environment
from agentrl.environment.registry import resolve
from agentrl.journal.entries import JournalEntry
from agentrl.observe.bottleneck import THREADS
from agentrl.rollout.episode import GRACE_S
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
        self._on_task_end = self._task_ended  # bound once, not for each episode
        self._is_cancelling = False
        self._strays = Counter[str]()
        """Number of cancellations by code that does not own the episode's task, keyed by episode."""
        self.last_failure = ""
        """Message of the last dropped episode."""

    def submit(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool = False) -> None:
        """Start an episode in its own task; with `resume`, replay its recorded entries first."""
        self._start(spec, on_end, self._run(spec, on_end, resume=resume))

    def activity(self) -> Mapping[str, float]:
        return self._runner.activity.totals() | {THREADS: float(CALL_THREADS.started)}

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
        on_end(await self._drop(spec, "environment_error", detail, 0.0))

    def _leave_behind(self, task: asyncio.Task[None]) -> None:
        spec, _ = self._tasks.pop(task)
        self._runner.abandon(spec)
        task.cancel()

    async def _drop(self, spec: EpisodeSpec, reason: str, detail: str, seconds: float) -> EpisodeHeader:
        """Drop an episode. `last_failure` is set before, for who hears of the end."""
        self.last_failure = detail
        return await self._runner.drop(spec, reason, detail, seconds)

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
        tries = _Tries()
        environment: type[Environment] | None = None
        while True:
            restart = False
            try:
                environment = self._environment(spec.environment)
                recorded, since, answers = await self._recorded(spec, tries, resume)
                header = await self._runner.run(*(spec, environment, recorded), answers=answers, recalls_from=since)
                break
            except InfrastructureError as error:
                if await self._waited(tries, task):
                    resume = True  # continue the attempt from its last entry
                    continue
                reason = "infrastructure"
                detail = _located(str(error), error, describe_raise_location(error, environment))
            except EngineLostError as error:
                reason, detail = "engine_lost", str(error)
            except (StorageError, EngineError, EnvironmentDefinitionError, ScorerError):
                raise
            except EpisodeError as error:
                reason, restart = error.reason, error.begin_again
                detail = _located(str(error), error, describe_failure_location(error, environment))
            except Exception as error:  # noqa: BLE001 - the boundary: an environment may raise anything
                reason = "environment_error"
                detail = _located(format_foreign_error(error), error, describe_raise_location(error, environment))
            self._runner.forget(spec)
            if task not in self._tasks:
                return
            restarts = tries.may_restart(spec, reason, restart, self._data_attempts)
            obstacle = await self._runner.once_effect(spec) if restarts else ""
            if obstacle is not None:
                detail = _with_note(detail, obstacle)
                header = await self._drop(spec, reason, detail, self._runner.clock.monotonic() - started)
                break
            spec = dataclasses.replace(spec, attempt=spec.attempt + 1)
            self._tasks[task] = (spec, on_end)
            self._runner.host.readmit(spec)
        if task in self._tasks:  # otherwise it was abandoned, perhaps while committing
            on_end(header)

    async def _recorded(
        self, spec: EpisodeSpec, tries: _Tries, resume: bool
    ) -> tuple[Sequence[JournalEntry], int, Sequence[JournalEntry]]:
        """Read the entries of an attempt to resume; if it has none, those whose replies it may recall."""
        recorded = await self._runner.recorded(spec) if resume else ()
        tries.note_progress(len(recorded))
        if recorded:
            return recorded, tries.recalls_from, ()
        return (), *await self._runner.recalled(spec, tries.recalls_from)

    async def _waited(self, tries: _Tries, task: asyncio.Task[None]) -> bool:
        """After a failure of its infrastructure, wait before the episode continues; False if it may not."""
        wait = tries.lost()
        if wait is None or task not in self._tasks:
            return False
        await self._runner.flush()
        await self._runner.clock.sleep(wait)
        return True

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


class _Tries(RetryBudget):
    """The failures of an episode so far; those of its infrastructure count since it last had more entries than ever."""

    __slots__ = ("_counted_from", "_errors", "_most_entries", "recalls_from")

    def __init__(self) -> None:
        super().__init__()
        self._most_entries = 0
        self._errors = 0
        self._counted_from = 0
        """First attempt that counts toward `MAX_ATTEMPTS`."""
        self.recalls_from = 0
        """First attempt with replies that a further attempt may recall; see `EpisodeRunner.run`."""

    def note_progress(self, entries: int) -> None:
        """Note the number of entries with which an attempt resumes."""
        if entries > self._most_entries:
            self._most_entries = entries
            self.achieved()

    def may_restart(self, spec: EpisodeSpec, reason: str, restart: bool, data_attempts: int) -> bool:
        """Whether an episode begins a new attempt after the failure of this one; `restart`: the failure asks for it."""
        following = spec.attempt + 1
        if restart:
            if reason == "harness_lost":
                self._counted_from = following
            return spec.fork is None and following - self._counted_from < MAX_ATTEMPTS
        if reason != "environment_error":
            return False
        self.recalls_from = following  # the recorded replies led to the error, so the retry samples new ones
        self._errors += 1
        return self._errors < data_attempts


def _located(text: str, error: Exception, place: str) -> str:
    """Append to an error's first line its place in the code, and the one in its episode that the runner noted."""
    notes = getattr(error, "__notes__", None)
    return _with_note(text, f"{place}{f' ({notes[-1]})' if notes else ''}")


def _with_note(text: str, note: str) -> str:
    first, newline, rest = text.partition("\n")
    return f"{first}{note}{newline}{rest}"
