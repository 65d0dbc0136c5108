"""An asyncio worker: runs episodes in this process's event loop, retries what may be retried, reports each end once.

This is one of the two places where foreign errors stop (the other is the cluster's supervision): whatever an
environment raises becomes a retry or a drop with a reason, never a reward and never the end of the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from agentrl.core.errors import EngineError, EnvironmentDefinitionError, EpisodeError, StorageError
from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.environment.base import Environment, described, place_of
from agentrl.environment.registry import resolve
from agentrl.journal.entries import JournalEntry
from agentrl.rollout.runner import EpisodeRunner

MAX_ATTEMPTS = 8
"""Attempts of an episode over all lives of a run, where what ends them is no fault of its environment: a resource died
with its process, the code changed."""

OnEnd = Callable[[EpisodeHeader], None]


class AsyncioWorker:
    """Implements `core.ports.Worker`.

    Args:
        runner: runs one attempt.
        environments: classes by name; names not here are resolved by the registry.
        data_attempts: how often an episode whose environment raises is tried.
        on_failure: called with an error no episode can be blamed for (storage, engine); the run should end.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        *,
        environments: dict[str, type[Environment]],
        data_attempts: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._runner = runner
        self._environments = dict(environments)
        self._loaded: set[str] = set()
        self._data_attempts = data_attempts
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[None]] = set()
        self.last_failure = ""
        """What the last dropped episode said, for people."""

    def submit(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool = False) -> None:
        """Start an episode in a task of its own."""
        task = asyncio.get_running_loop().create_task(self._run(spec, on_end, resume=resume), name=spec.episode_id)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Stop what is in flight. Nothing is reported or dropped: the journal knows them as unfinished."""
        for task in list(self._tasks):
            self._runner.stop(task.get_name())
            task.cancel()
        await self.drain()

    async def _run(self, spec: EpisodeSpec, on_end: OnEnd, *, resume: bool) -> None:
        recorded = self._runner.recorded(spec) if resume else ()
        on_end(await self._attempts(spec, recorded))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failure(error)

    async def _attempts(self, spec: EpisodeSpec, recorded: Sequence[JournalEntry]) -> EpisodeHeader:
        started = self._runner.clock.monotonic()
        environment = self._environment(spec.environment)
        failures = 0
        while True:
            begin_again = False
            try:
                return await self._runner.run(spec, environment, recorded)
            except (StorageError, EngineError, EnvironmentDefinitionError):
                raise
            except EpisodeError as error:
                reason, detail, begin_again = error.reason, f"{error}{place_of(error.__cause__)}", error.begin_again
            except Exception as error:  # noqa: BLE001 - the boundary: an environment may raise anything
                reason, detail = "environment_error", described(error)
            if begin_again:
                begin_again = spec.fork is None and spec.attempt + 1 < MAX_ATTEMPTS
            elif reason == "environment_error":
                failures += 1
                begin_again = failures < self._data_attempts
            if not begin_again:
                self.last_failure = detail
                return await self._runner.drop(spec, reason, detail, self._runner.clock.monotonic() - started)
            spec, recorded = _next_attempt(spec), ()
            self._runner.host.readmit(spec)

    def _environment(self, name: str) -> type[Environment]:
        environment = self._environments.get(name)
        if environment is None:
            environment = self._environments[name] = resolve(name)
        if name not in self._loaded:
            try:
                environment.load()
            except Exception as error:
                raise EnvironmentDefinitionError(
                    f"{environment.__qualname__}.load() raised {described(error)}"
                ) from error
            self._loaded.add(name)
        return environment


def _next_attempt(spec: EpisodeSpec) -> EpisodeSpec:
    return dataclasses.replace(spec, attempt=spec.attempt + 1)
