"""A run as a sequence of lives: each starts from the newest checkpoint, as `--resume` does in another process.

A life ends with the run, with an error that ends the run, or with the loss of a process that can be replaced; then the
next one begins, within a budget. Owns what a life starts and stops: trainer, engine, orchestrator. Journal and observer
outlive it. Invariant: there is one way to go on, whatever was lost, and it forgets all but what is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal as signals
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.app.assemble import Parts, Past, assemble, past_of
from agentrl.app.parts import Adapters
from agentrl.config.run import RunConfig
from agentrl.core.budget import RetryBudget
from agentrl.core.errors import EngineLostError, RunDirectoryError, StorageError, TrainerError, TrainerLostError
from agentrl.core.ports import ChatFormat
from agentrl.core.records import PolicyVersion, Task
from agentrl.environment.base import Environment, TaskSource
from agentrl.observe.blocked import watch_loop
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.manifest import CheckpointWriter, Manifest, newest

if TYPE_CHECKING:
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_observer import RunObserver

SAME_PRESS_S = 0.5
"""Signals closer together are one: `timeout` and shells send theirs to the process and to its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """What is the same in every life of a run in this process."""

    config: RunConfig
    environment: type[Environment]
    tasks: TaskSource
    held_out: Sequence[Task]
    chat_format: ChatFormat
    adapters: Adapters
    directory: RunDirectory
    store: SqliteJournal
    observer: RunObserver


async def lives(lasting: Lasting, *, resume: bool) -> Orchestrator:
    """Run to the end, over as many lives as it takes; the orchestrator of the last one.

    Raises:
        TrainerLostError: lost `infrastructure_attempts` times in a row, with no step in between.
        AgentRLError: what else ended the run.
    """
    budget = RetryBudget(lasting.config.infrastructure_attempts)
    observer = lasting.observer
    while True:
        steps = len(observer.steps)
        try:
            return await _life(lasting, resume=resume)
        except (TrainerLostError, EngineLostError) as error:
            if len(observer.steps) > steps:
                budget.achieved()
            wait = budget.lost()
            if wait is None:
                raise
            observer.watch()
            observer.warn(f"{error}; going on from the newest checkpoint in {wait:g} s")
        await lasting.adapters.clock.sleep(wait)
        resume = True


async def _life(lasting: Lasting, *, resume: bool) -> Orchestrator:
    config, store, observer = lasting.config, lasting.store, lasting.observer
    await store.flush()
    manifest, rejected = await asyncio.to_thread(_checkpoint, lasting.directory) if resume else (None, [])
    for reason in rejected:
        observer.phase(f"left out: {reason}")
    async with contextlib.AsyncExitStack() as stack:
        trainer = lasting.adapters.trainer(config, lasting.directory.path)
        stack.push_async_callback(trainer.close)
        observer.phase("starting the trainer")
        await trainer.start(None if manifest is None else str(manifest.directory))
        observer.phase("loading the engine")
        versions = _starting_versions(config, manifest, lineage=store.highest_lineage() + 1)
        engine = await lasting.adapters.engine(config, versions, observer.warn)
        stack.push_async_callback(engine.close)
        weights = {
            name: await trainer.publish(name, versions[name]) for name in versions if config.policies[name].trainable
        }
        for name, published in weights.items():
            store.record_version(published, None if manifest is None else manifest.versions[name])
            await engine.update(published)
        await store.flush()
        parts = Parts(
            engine=engine,
            trainer=trainer,
            chat_format=lasting.chat_format,
            store=store,
            observer=observer,
            clock=lasting.adapters.clock,
            tasks=lasting.tasks,
            held_out=lasting.held_out,
            checkpoints=CheckpointWriter(lasting.directory.checkpoints, keep=config.checkpoint.keep),
            versions=versions,
            weights=weights,
            parents=store.parents(),
            past=past_of(store, {} if manifest is None else manifest.versions) if resume else Past(),
        )
        orchestrator = assemble(config, lasting.environment, parts)
        observer.watch(orchestrator.status)
        with _interruptible(orchestrator, observer), watch_loop(observer.warn):
            try:
                await orchestrator.run()
            except TrainerLostError as error:
                if orchestrator.outcome.interrupted:  # nobody wants another life
                    raise TrainerError(f"{error}, while the run was stopping; its newest checkpoint stays") from error
                raise
        return orchestrator


def _checkpoint(directory: RunDirectory) -> tuple[Manifest | None, list[str]]:
    """The newest checkpoint that can be used, and why newer ones cannot.

    Raises:
        StorageError: there are checkpoints, and none can be used.
    """
    manifest, rejected = newest(directory.checkpoints)
    if rejected and manifest is None:
        raise StorageError(
            f"no checkpoint can be used: {'; '.join(rejected)}. Remove them to start again from the base model"
        )
    return manifest, rejected


def _starting_versions(config: RunConfig, manifest: Manifest | None, *, lineage: int) -> dict[str, PolicyVersion]:
    """Where every policy stands: a life that goes on begins a lineage of its own, at the manifest's steps."""
    versions = {}
    for name, policy in config.policies.items():
        step = 0
        if manifest is not None and policy.trainable:
            if name not in manifest.versions:
                raise RunDirectoryError(
                    f"checkpoint {manifest.directory} has no policy {name!r}; resume with its configuration"
                )
            step = manifest.versions[name].step
        versions[name] = PolicyVersion(name, lineage if policy.trainable else 0, step)
    return versions


@contextlib.contextmanager
def _interruptible(orchestrator: Orchestrator, observer: RunObserver) -> Iterator[None]:
    """Ctrl-C once: drain, write a checkpoint, return. Twice: leave at once."""
    loop = asyncio.get_running_loop()
    asked_at: float | None = None

    def on_signal() -> None:
        nonlocal asked_at
        if asked_at is not None:
            if loop.time() - asked_at > SAME_PRESS_S:
                os._exit(130)
            return
        asked_at = loop.time()
        observer.phase("stopping: finishing the step and writing a checkpoint (Ctrl-C again leaves at once)")
        orchestrator.stop()

    for number in (signals.SIGINT, signals.SIGTERM, signals.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in (signals.SIGINT, signals.SIGTERM, signals.SIGHUP):
            loop.remove_signal_handler(number)
