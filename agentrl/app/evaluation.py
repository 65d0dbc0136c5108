"""`evaluate`: a policy on held-out tasks, by the same runner and engine as training, with nothing trained."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agentrl.app.beside import given_weights, play_beside
from agentrl.app.parts import held_out, load_config, make_engine
from agentrl.config.run import RunConfig
from agentrl.core.errors import CheckFailedError, InputError, RunDirectoryError
from agentrl.core.records import EpisodeHeader, PolicyVersion, Task
from agentrl.environment.base import Environment
from agentrl.environment.registry import resolve
from agentrl.orchestrator.evaluation import evaluation_metrics


def evaluate(
    config: RunConfig | str | Path,
    policy: str | Path | None = None,
    tasks: Sequence[Task] | None = None,
    *,
    environment: type | None = None,
    journal: str | Path | None = None,
) -> dict[str, float]:
    """Mean reward of a policy on held-out tasks, each sampled once as in training. Nothing is trained.

    Args:
        config: a configuration, or the path of a TOML file.
        policy: a model or adapter directory, such as a run's `policies/NAME`; default: the base model.
        tasks: in place of the environment's `held_out` split.
        environment: a class, in place of `config.environment.id`.
        journal: a new directory that keeps the episodes for inspection; default: they are not kept.

    Raises:
        InputError: something given cannot be used.
        CheckFailedError: an episode was dropped.
    """
    config = load_config(config)
    chosen = resolve(environment if environment is not None else config.environment.id)
    chosen_tasks = list(tasks) if tasks is not None else held_out(config, chosen)
    if not chosen_tasks:
        raise InputError("there are no tasks to evaluate on: evaluation.tasks is 0")
    with tempfile.TemporaryDirectory(prefix="agentrl-evaluate-") as scratch:
        kept = Path(journal) if journal is not None else Path(scratch)
        if (kept / "journal").exists():
            raise RunDirectoryError(f"{kept} holds a journal already; give evaluate a new directory")
        headers = asyncio.run(_evaluate(config, chosen, policy, chosen_tasks, kept / "journal"))
    dropped = [header for header in headers if not header.committed]
    if dropped:
        raise CheckFailedError(
            f"{len(dropped)} of {len(headers)} episodes were dropped, {dropped[0].episode_id} because of "
            f"{dropped[0].drop_reason}: a score over the rest would flatter"
        )
    return evaluation_metrics(headers)


async def _evaluate(
    config: RunConfig, environment: type[Environment], policy: str | Path | None, tasks: Sequence[Task], journal: Path
) -> list[EpisodeHeader]:
    from agentrl.journal.store import SqliteJournal
    from agentrl.rollout.chat_format import TemplateFormat

    config, adapter = given_weights(config, next(iter(config.policies)), policy)
    chat_format = TemplateFormat.load(config.model.path, tool_call_format=config.model.tool_call_format)
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteJournal(journal, info={"name": f"evaluate {policy or config.model.path}"})
        stack.push_async_callback(store.close)
        engine = make_engine(config, {known: PolicyVersion(known, 0, 0) for known in config.policies})
        stack.push_async_callback(engine.close)
        if adapter is not None:
            await engine.update(adapter)
        return await play_beside(
            config, environment, engine, chat_format, store, lambda dispatcher: dispatcher.evaluate(tasks, {})
        )
