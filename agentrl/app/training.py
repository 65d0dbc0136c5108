"""`train`: from a configuration to trained policies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal as signals
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.assemble import Parts, Past, assemble, past_of
from agentrl.app.parts import held_out as held_out_source
from agentrl.app.parts import load_config, make_engine, make_trainer, task_source
from agentrl.app.seats import demand_of
from agentrl.config.run import RunConfig, check_unchanged
from agentrl.core.clock import SystemClock
from agentrl.core.errors import RunDirectoryError, StorageError
from agentrl.core.ports import Observer, Trainer
from agentrl.core.records import PolicyVersion, Task
from agentrl.environment.base import Environment, TaskSource
from agentrl.environment.registry import resolve
from agentrl.inspection.report import write_report
from agentrl.observe.blocked import watch_loop
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.loop import Orchestrator, Outcome
from agentrl.orchestrator.manifest import CheckpointWriter, Manifest, newest

if TYPE_CHECKING:
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_observer import RunObserver


SAME_PRESS_S = 0.5
"""Signals closer together are one: `timeout` and shells send theirs to the process and to its group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished (or interrupted) run."""

    path: Path
    metrics: list[dict[str, float]]
    """One entry per optimizer step, in order."""
    policies: dict[str, Path]
    """Directory of each trainable policy's last version; loads with `from_pretrained`."""
    summary: dict[str, Any]
    """What `summary.json` holds."""
    interrupted: bool


def train(
    config: RunConfig | str | Path,
    *,
    environment: type | None = None,
    tasks: TaskSource | None = None,
    held_out: Sequence[Task] | None = None,
    resume: bool = False,
    quiet: bool = False,
    observers: Sequence[Observer] = (),
) -> Run:
    """Train, from the first episode to the last checkpoint.

    Args:
        config: a configuration, or the path of a TOML file.
        environment: a class, in place of `config.environment.id`.
        tasks: training tasks, in place of the environment's own.
        held_out: tasks to evaluate on, in place of the environment's `held_out` split.
        resume: go on from the newest checkpoint of the run directory.
        quiet: no progress on the terminal.
        observers: told of every step and evaluation, in the event loop: they must return at once.

    Raises:
        InputError: the configuration, model, environment or run directory cannot be used as they are.
        AgentRLError: what ended the run; its newest checkpoint stays valid.
    """
    config = load_config(config)
    chosen = resolve(environment if environment is not None else config.environment.id)
    demand_of(config, chosen)
    return asyncio.run(_train(config, chosen, tasks, held_out, observers, resume=resume, quiet=quiet))


async def _train(
    config: RunConfig,
    environment: type[Environment],
    tasks: TaskSource | None,
    evaluation_tasks: Sequence[Task] | None,
    observers: Sequence[Observer],
    *,
    resume: bool,
    quiet: bool,
) -> Run:
    from agentrl.rollout.chat_format import TemplateFormat

    clock = SystemClock()
    started = clock.monotonic()
    chat_format = TemplateFormat.load(config.model.path, tool_call_format=config.model.tool_call_format)
    source = await asyncio.to_thread(task_source, config, environment, "train", tasks)
    held_out_tasks = await asyncio.to_thread(held_out_source, config, environment, evaluation_tasks)
    path = Path(config.directory) / config.name
    directory = RunDirectory.reopen(path) if resume else RunDirectory.create(path, config.model_dump_json(indent=1))
    if resume:
        check_unchanged(directory.read_config(), config)
    manifest, rejected = _checkpoint(directory) if resume else (None, [])
    async with _opened(config, directory, observers, quiet=quiet, resume=resume) as (store, observer, trainer, stack):
        for reason in rejected:
            observer.phase(f"left out: {reason}")
        observer.phase("starting the trainer")
        await trainer.start(None if manifest is None else str(manifest.directory))
        observer.phase("loading the engine")
        versions = _starting_versions(config, manifest, lineage=store.highest_lineage() + 1)
        engine = await asyncio.to_thread(make_engine, config, versions)
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
            chat_format=chat_format,
            store=store,
            observer=observer,
            clock=clock,
            tasks=source,
            held_out=held_out_tasks,
            checkpoints=CheckpointWriter(directory.checkpoints, keep=config.checkpoint.keep),
            versions=versions,
            weights=weights,
            parents=store.parents(),
            past=past_of(store, {} if manifest is None else manifest.versions) if resume else Past(),
        )
        orchestrator = assemble(config, environment, parts)
        observer.watch(orchestrator.status)
        with _interruptible(orchestrator, observer), watch_loop(observer.warn):
            outcome = await orchestrator.run()
        summary = _summary(config, observer.steps, orchestrator.evaluator.results, outcome, clock.monotonic() - started)
        return _concluded(directory, observer, orchestrator, summary)


def _concluded(
    directory: RunDirectory, observer: RunObserver, orchestrator: Orchestrator, summary: dict[str, Any]
) -> Run:
    """What a run leaves behind besides its journal: links, summary, report."""
    policies = directory.link_policies(orchestrator.weights)
    directory.write_summary(summary)
    observer.finish(summary)
    write_report(directory.path)
    return Run(
        path=directory.path,
        metrics=observer.steps,
        policies=policies,
        summary=summary,
        interrupted=orchestrator.outcome.interrupted,
    )


@contextlib.asynccontextmanager
async def _opened(
    config: RunConfig, directory: RunDirectory, observers: Sequence[Observer], *, quiet: bool, resume: bool
) -> AsyncIterator[tuple[SqliteJournal, RunObserver, Trainer, contextlib.AsyncExitStack]]:
    """What must be closed again, in order: engine, trainer, observer, journal."""
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_observer import RunObserver
    from agentrl.observe.run_state import plan_of
    from agentrl.observe.sinks import open_sinks

    async with contextlib.AsyncExitStack() as stack:
        if not resume:
            stack.push(directory.forget_if_refused)
        store = SqliteJournal(directory.journal, info={"name": config.name, "config": config.model_dump(mode="json")})
        stack.push_async_callback(store.close)
        plan = plan_of(config.model_dump(mode="json"))
        sinks = open_sinks(config.sinks, directory.path, config.model_dump(mode="json"))
        observer = stack.enter_context(RunObserver(directory, plan=plan, others=observers, sinks=sinks, quiet=quiet))
        observer.watch()
        trainer = make_trainer(config, directory.path)
        stack.push_async_callback(_close, trainer, observer)
        yield store, observer, trainer, stack


async def _close(trainer: Trainer, observer: RunObserver) -> None:
    with observer.closing("stopping the trainer"):
        await trainer.close()


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
    """Where every policy stands: a resumed run begins a lineage of its own, at the manifest's steps."""
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


def _summary(
    config: RunConfig,
    steps: Sequence[Mapping[str, float]],
    evaluations: Sequence[tuple[int, Mapping[str, float]]],
    outcome: Outcome,
    seconds: float,
) -> dict[str, Any]:
    rewards = [values["evaluation/reward"] for _, values in evaluations]
    return {
        "name": config.name,
        "interrupted": outcome.interrupted,
        "steps": len(steps),
        "reward_start": rewards[0] if rewards else None,
        "reward_end": rewards[-1] if len(rewards) > 1 else None,
        "held_out_tasks": config.evaluation.tasks,
        "rl_seconds": steps[-1]["run/seconds"] if steps else 0.0,
        "seconds": seconds,
        "engine_busy_share": _over_time(steps, "engine/busy_share"),
        "trainer_busy_share": _over_time(steps, "trainer/busy_share"),
        "staleness_mean": sum(values["staleness/mean"] for values in steps) / max(len(steps), 1),
        "rewards": [values["reward/mean"] for values in steps],
        "evaluations": [{"step": step, **values} for step, values in evaluations],
    }


def _over_time(steps: Sequence[Mapping[str, float]], name: str) -> float:
    seconds = sum(values["step/seconds"] for values in steps)
    return sum(values[name] * values["step/seconds"] for values in steps) / seconds if seconds else 0.0
