"""Opens a run directory whose client decides what is sampled and trained, with the parts that a run has."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.app.engines import make_engine
from agentrl.app.hub import check_local_models
from agentrl.app.model_files import check_models_unchanged, decode_models, record_models
from agentrl.app.plan import with_chosen_settings
from agentrl.config.load import setting_differences
from agentrl.config.policies import LocalPolicy
from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import ConfigError
from agentrl.core.files import remove_staging_directories, remove_whole
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef
from agentrl.journal.port import StepRow
from agentrl.journal.requests import REQUESTS_FILE, RequestLog
from agentrl.journal.run_process import record_process_state, recording_process_state
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.versions import record_published_version
from agentrl.parts.sampler import BaseText, ClientSampler

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig
    from agentrl.journal.store import SqliteJournal
    from agentrl.parts.learner import ClientLearner


class TrainedSince(msgspec.Struct):
    """What a client trained on since the newest version: the journal's record of the step between two versions."""

    rows: int = 0
    tokens: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the newest gradient."""
    seconds: float = 0.0
    digest: bytes = b""
    """Digest of the training data, in order."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an open run directory. `open_parts` makes them."""

    directory: Path
    """The run directory; clients keep their own files in `checkpoints/`."""
    learners: Mapping[str, ClientLearner]
    """Learner of each policy that learns."""
    sampler: ClientSampler
    """Samples from frozen policies and from recorded versions."""
    requests: RequestLog
    """Journal of the client's requests and their results."""
    clock: Clock
    """Clock of the records."""
    store: SqliteJournal
    """The run's journal."""

    def published(self, version: PolicyVersion) -> WeightsRef | None:
        """Return a recorded version; None if it was never recorded."""
        return self.store.published(version)

    async def record_version(
        self, weights: WeightsRef, parent: PolicyVersion | None, trained: TrainedSince | None = None
    ) -> None:
        """Record a version that a learner published, with the step from its parent, durably on return.

        Raises:
            StorageError: writing failed.
        """
        step, version = None, weights.version
        if parent is not None and trained is not None:
            report = StepReport(
                step_id=version.step,
                policy=version.policy,
                started_from=parent,
                loss=trained.loss,
                grad_norm=trained.grad_norm,
                samples=trained.rows,
                tokens=trained.tokens,
                seconds=trained.seconds,
                metrics={},
                input_digest=trained.digest.hex(),
            )
            batch = TrainBatch(step_id=version.step, policy=version.policy, units=(), normalizer=1.0)
            step = StepRow(report=report, version=version, batch=batch)
        await record_published_version(self.store, weights, parent, step)

    def version_directories(self, policy: str) -> Iterator[tuple[PolicyVersion, Path]]:
        """Yield the versions of a policy on disk."""
        for directory in (self.directory / "versions" / policy).glob("*.*"):
            lineage, _, step = directory.name.partition(".")
            if lineage.isdecimal() and step.isdecimal():
                yield PolicyVersion(policy, int(lineage), int(step)), directory

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove saved weights or a version, so that no reader sees a part of them."""
        remove_whole(directory)


@contextlib.asynccontextmanager
async def open_parts(config: RunConfig, tell: Callable[[str], None]) -> AsyncIterator[Parts]:
    """Open the run directory of a configuration, and load its models for training and sampling.

    A policy that learns has a `ClientLearner`, which trains adapters or all weights as its `lora` says. A directory
    that exists is continued: it keeps its seed, dtype and models, but policies may be added or left out.

    Args:
        config: the configuration. Its environment only names the records, and nothing plays episodes.
        tell: receives lines for the user.

    Raises:
        InputError: a model or a setting cannot be used, or differs from earlier starts.
        JournalError: a record of an earlier process is damaged.
    """
    from agentrl.journal.store import SqliteJournal

    check_local_models(config)
    path, clock = Path(config.directory) / config.name, SystemClock()
    plan, chosen = await asyncio.to_thread(with_chosen_settings, config, RunDirectory.config(path))
    for line in filter(None, chosen):
        tell(line)
    is_new = not (path / "journal").is_dir()
    directory = RunDirectory.create(path, plan.model_dump_json(indent=1)) if is_new else RunDirectory.reopen(path)
    info = {"name": config.name, "config": plan.model_dump(mode="json"), "code": {}}
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteJournal(directory.journal, info=info)
        stack.push_async_callback(store.close)
        await _check_unchanged(plan, store)
        stack.enter_context(recording_process_state(directory.path))
        learners, texts = await asyncio.to_thread(_load_models, plan, directory)
        versions = {policy: PolicyVersion(policy, 0, 0) for policy in plan.policies}
        engine = await make_engine(plan.engine_plan, versions, tell, directory.engine_log)
        stack.push_async_callback(engine.close)
        requests = store.request_log()
        stack.callback(requests.close)
        parts = Parts(
            directory=directory.path,
            learners=learners,
            sampler=ClientSampler(engine, store, clock, str(plan.environment.id), texts),
            requests=requests,
            clock=clock,
            store=store,
        )
        _remove_leftovers(parts, directory)
        yield parts
        record_process_state(directory.path, "stopped")


async def _check_unchanged(plan: RunConfig, store: SqliteJournal) -> None:
    """Refuse to continue with other models or another seed, and record new policies.

    Raises:
        ConfigError: a setting or a model's file differs.
        InputError: a file cannot be read.
    """
    before, recorded = store.config(), store.info().get("models")
    if not (store.directory / REQUESTS_FILE).exists():  # no start has served a client yet
        before, recorded = plan.model_dump(mode="json"), []
    changed = [
        str(difference)
        for difference in setting_differences(before, plan)
        if difference.path in (("seed",), ("model", "dtype"))
        or (
            difference.path[0] == "policies"
            and (difference.path[-1] == "model" or (difference.path[-1] == "lora" and None in difference[1:3]))
        )
    ]
    if changed:
        raise ConfigError(
            f"{'; '.join(changed)}: the models in the run directory were trained as before. Restore the setting, or "
            "set another `name`, which begins empty"
        )
    paths: dict[tuple[str, ...], str] = {
        ("policies", name, "model"): policy.model for name, policy in plan.of_kind(LocalPolicy).items()
    }
    await asyncio.to_thread(check_models_unchanged, paths, recorded)
    known = decode_models(recorded)
    new = {setting: path for setting, path in paths.items() if ".".join(setting) not in {one.setting for one in known}}
    if new:
        models = [*known, *await asyncio.to_thread(record_models, new)]
        earlier = before.get("policies")
        policies = {**plan.model_dump(mode="json")["policies"], **(earlier if isinstance(earlier, dict) else {})}
        await store.describe(config={**before, "policies": policies}, models=msgspec.to_builtins(models))


def _load_models(plan: RunConfig, directory: RunDirectory) -> tuple[dict[str, ClientLearner], dict[str, BaseText]]:
    """Load the models of policies that learn, and the tokenizers of all."""
    from agentrl.learn.ranks import rank_device
    from agentrl.parts.learner import ClientLearner
    from agentrl.rollout.chat.chat_format import read_tokenizer
    from agentrl.rollout.chat.chat_template import stop_token_ids

    device = rank_device(0, stays_on_cpu=plan.stays_on_cpu)
    learners: dict[str, ClientLearner] = {}
    texts: dict[str, BaseText] = {}
    for name, policy in plan.of_kind(LocalPolicy).items():
        model = Path(policy.model)
        texts[name] = BaseText(
            decode=partial(read_tokenizer(model / "tokenizer.json").decode, skip_special_tokens=False),
            stop_token_ids=tuple(stop_token_ids(model)),
        )
        if name in plan.trained:
            learners[name] = ClientLearner(plan.trainer_plan, model, directory.path, device)
    return learners, texts


def _remove_leftovers(parts: Parts, directory: RunDirectory) -> None:
    """Remove what a killed process left: halves of saved weights and versions, and versions without a record."""
    for place in directory.checkpoints.glob("*/*"):
        remove_staging_directories(place)
    for policy in parts.learners:
        remove_staging_directories(directory.versions / policy)
        for version, place in parts.version_directories(policy):
            if parts.published(version) is None:
                remove_whole(place)
