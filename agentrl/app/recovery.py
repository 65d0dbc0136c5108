"""Finds the state a run starts from: its newest checkpoint, and the unfinished work in its journal.

A first start and a resume take the same path: `find_start_point` reads the disk, and finds nothing in a new run. Then
the trainer starts from the checkpoint, and `ResumeCheckpoint.publish_first_versions` publishes the first versions of
this start and loads them into the engine. Only then do episodes run. `agentrl.app.supervisor` and the crash tests use
this path.

Invariant: a version id never names other weights. A new lineage is larger than any in the journal, and than any on
disk, since a start that died before being recorded may have left files.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.app.plan import RunPlan
from agentrl.app.policies import SPARE, pinned_policy_step_lags
from agentrl.app.user_functions import UserFunctions
from agentrl.config.load import SettingDifference
from agentrl.config.policies import BotPolicy, OpponentPoolPolicy, PolicyConfig
from agentrl.core.clock import Clock
from agentrl.core.custom_functions import Kind
from agentrl.core.errors import EngineError, RunDirectoryError, StorageError
from agentrl.core.files import LOCAL, Disk, remove_staging_directories
from agentrl.core.machine import library_versions
from agentrl.core.ports import Trainer
from agentrl.core.records import (
    EpisodeSpec,
    Lines,
    PolicyVersion,
    dropped_header,
)
from agentrl.core.text import plural
from agentrl.credit.baselines import MeanAtStep, SeatRole
from agentrl.environment.environment import Environment
from agentrl.environment.harness import HarnessEnvironment
from agentrl.environment.loaded_code import modules_below
from agentrl.environment.mixture import all_environment_classes
from agentrl.environment.registry import load_function, name_of
from agentrl.journal.entries import BeginEntry, code_digest, decode_entries
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.reader import AttemptLocation, TurnLogReader
from agentrl.journal.run_log import RunJournal, RunLog, RunStart, SettingChange
from agentrl.orchestrator.checkpoints import Manifest, find_newest_checkpoint, list_version_directories
from agentrl.orchestrator.opponents import opponent_pool_holder, opponent_pool_steps
from agentrl.orchestrator.tree_leases import tree_holder
from agentrl.orchestrator.versions import BATCHES, NOT_MEASURED, BestRunningMean, PolicyBoard, ServedVersions, publish

if TYPE_CHECKING:
    from agentrl.journal.store import SqliteJournal
    from agentrl.observe.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """The state with which a start of a run begins."""

    recovery: ResumeCheckpoint
    versions: Mapping[str, PolicyVersion]
    """First version of each policy."""
    past: PastRun
    record: RunStart
    """Record of the start, written to the journal before the first version is published."""
    sentences: Sequence[str]
    """Sentences for the user: the restored state, and the changes."""


async def find_start_point(
    plan: RunPlan,
    directory: RunDirectory,
    store: SqliteJournal,
    *,
    code: UserCodeDigests,
    changed: Sequence[SettingDifference],
    refusal: Callable[[EpisodeSpec], str],
    clock: Clock,
    tell: Callable[[str], None],
) -> StartPoint:
    """Read the disk and decide where the run continues, in this order:

    1. `checkpoints/`: the newest checkpoint whose files all have the digests of its manifest. Newer ones are rejected,
       each with its reason. The half-built directories of dead processes are removed; nothing else is written here.
    2. `control.db` and `versions/`: a lineage above every lineage used so far. Each policy that learns starts in it at
       the checkpoint's step, which the journal must know as published.
    3. `control.db`: every row is checked against its checksum; then the unfinished work at the checkpoint is collected.
       A unit is still to be trained if no step on the line of versions up to the checkpoint consumed it and it was not
       dropped; an episode is unfinished if its newest attempt has no end. Steps after the checkpoint are taken again.
    4. `turns-*.db`: the code that played the episodes still to be trained is compared with the current code.

    Args:
        plan: plan of the run.
        directory: directory of the run.
        store: the run's journal.
        code: code of the environments and bots that will run.
        changed: the settings changed since the previous start.
        refusal: returns why an unfinished episode cannot be resumed, so that it is dropped; empty if it can.
        clock: gives the time label.
        tell: receives a sentence about each rejected checkpoint, and about dropped episodes.

    Raises:
        RunDirectoryError: the checkpoint lacks a policy.
        StorageError: no checkpoint can be used, the usable one belongs to another run, or tokens it needs were pruned.
        JournalError: the journal is damaged.
    """
    recovery = await asyncio.to_thread(ResumeCheckpoint.find, directory.checkpoints)
    for reason in recovery.rejected:
        tell(f"left out: {reason}")
    await asyncio.to_thread(remove_leftover_directories, directory.checkpoints, directory.versions)
    versions = recovery.first_versions(plan, store, directory.versions)
    past = recovery.past_run(plan, store)

    def refusal_of(spec: EpisodeSpec) -> str:
        bindings = spec.seats.values()
        pinned = {version.policy for version in (*spec.pins.values(), *(each.pin for each in bindings)) if version}
        unknown = {*(binding.policy for binding in bindings), *spec.pins, *pinned} - plan.settings.policies.keys()
        return refusal(spec) or (f"the configuration has no policy {min(unknown)!r}" if unknown else "")

    if await _drop_refused(store, past.unfinished, refusal_of, tell):
        past = recovery.past_run(plan, store)
    record, sentences = describe_start(recovery, plan, versions, past, store, code=code, changed=changed, clock=clock)
    return StartPoint(recovery=recovery, versions=versions, past=past, record=record, sentences=sentences)


async def _drop_refused(
    store: SqliteJournal,
    unfinished: Sequence[EpisodeSpec],
    refusal: Callable[[EpisodeSpec], str],
    tell: Callable[[str], None],
) -> int:
    """Drop the unfinished episodes that cannot be resumed; returns their number."""
    refused = [(spec, reason) for spec in unfinished if (reason := refusal(spec))]
    for spec, reason in refused:
        await store.commit(EpisodeEnd(spec, dropped_header(spec, "code_changed"), b"", {}, reason))
    if refused:
        tell(f"{plural(len(refused), 'unfinished episode')} dropped as code_changed: {refused[0][1]}")
        await store.flush()
    return len(refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeCheckpoint:
    """The checkpoint from which a run resumes, if there is one."""

    manifest: Manifest | None
    """Manifest of the checkpoint; None: the run starts with its initial weights."""
    rejected: Sequence[str]
    """Sentences for the user: why each newer checkpoint was rejected."""

    @staticmethod
    def find(checkpoints: Path, *, disk: Disk = LOCAL) -> ResumeCheckpoint:
        """Choose the checkpoint.

        Raises:
            StorageError: there are checkpoints, and none can be used.
        """
        manifest, rejections = find_newest_checkpoint(checkpoints, disk=disk)
        if rejections and manifest is None:
            raise StorageError(
                f"no checkpoint can be used: {'; '.join(rejections)}. To start again from the base model, remove them"
            )
        return ResumeCheckpoint(manifest=manifest, rejected=rejections)

    @property
    def start_from(self) -> str | None:
        """Directory from which the trainer starts; None: the initial weights."""
        return None if self.manifest is None else str(self.manifest.directory)

    @property
    def role_means(self) -> Mapping[SeatRole, Sequence[MeanAtStep]]:
        """Mean rewards of each role, from the checkpoint."""
        return {} if self.manifest is None else self.manifest.role_means

    def running_best(self, versions: Path, *, disk: Disk = LOCAL) -> BestRunningMean:
        """Return the best versions that the checkpoint records; none if their files are gone.

        Args:
            versions: the directory of published versions.
            disk: the disk that holds it.
        """
        mean = NOT_MEASURED if self.manifest is None else self.manifest.measured
        for version in mean.versions.values():
            if (version.lineage, version.step) not in list_version_directories(versions / version.policy, disk=disk):
                return BestRunningMean(what=mean.what)
        return mean

    def first_versions(
        self, plan: RunPlan, journal: RunLog, versions: Path, *, disk: Disk = LOCAL
    ) -> dict[str, PolicyVersion]:
        """Return the first version of every policy: at the checkpoint's step, in an unused lineage.

        Args:
            plan: plan of the run.
            journal: journal of the run.
            versions: the directory of published versions.
            disk: the disk that holds it.

        Raises:
            RunDirectoryError: the checkpoint lacks a policy.
            StorageError: the checkpoint belongs to another run's journal.
        """
        lineage = 1 + max(journal.highest_lineage(), _highest_on_disk(versions, disk))
        first = {}
        for name in plan.settings.policies:
            step = 0
            if self.manifest is not None and name in plan.trained:
                if name not in self.manifest.versions:
                    raise RunDirectoryError(
                        f"checkpoint {self.manifest.directory} has no policy {name!r}; resume with its configuration"
                    )
                if journal.published(self.manifest.versions[name]) is None:
                    raise StorageError(
                        f"checkpoint {self.manifest.directory} contains {self.manifest.versions[name]}, which the "
                        "run's journal does not record: the checkpoint or the journal was altered or belongs to "
                        "another run; restore the original"
                    )
                step = self.manifest.versions[name].step
            first[name] = PolicyVersion(name, lineage if name in plan.trained else 0, step)
        return first

    async def publish_first_versions(
        self,
        plan: RunPlan,
        trainable: Mapping[str, PolicyVersion],
        trainer: Trainer,
        served_versions: ServedVersions,
        journal: RunJournal,
        past: PastRun,
    ) -> dict[str, list[PolicyVersion]]:
        """Publish and serve the first versions of the trainable policies, and serve past versions: those of opponents,
        and of unfinished trees.

        Returns:
            The versions of each opponent pool, oldest first.
        """
        await serve_versions_of_trees(
            plan.trained, served_versions, journal, past, deterministic=plan.settings.deterministic
        )
        older: Mapping[str, Sequence[PolicyVersion]] = {}
        if self.manifest is not None:
            older = await serve_opponents_and_pins(
                plan, served_versions, journal, self.manifest.versions, self.manifest.opponents
            )
        for name, version in trainable.items():
            parent = None if self.manifest is None else self.manifest.versions[name]
            weights = await publish(trainer, journal, version, parent, step=None)
            await served_versions.make_current(weights)
        pools = plan.settings.of_kind(OpponentPoolPolicy)
        return await start_opponent_pools(pools, served_versions, older, journal.lines())

    def past_run(self, plan: RunPlan, journal: RunLog) -> PastRun:
        """Read the past of the run up to this checkpoint.

        Raises:
            JournalError: the journal is damaged.
            StorageError: tokens of episodes to be trained were pruned, because a checkpoint is missing.
        """
        versions = {} if self.manifest is None else self.manifest.versions
        return PastRun(journal, versions, group_size=plan.settings.credit.group_size)


# --- the record of a start --------------------------------------------------------------------------------------------


def describe_start(
    recovery: ResumeCheckpoint,
    plan: RunPlan,
    versions: Mapping[str, PolicyVersion],
    past: PastRun,
    store: SqliteJournal,
    *,
    code: UserCodeDigests,
    changed: Sequence[SettingDifference],
    clock: Clock,
) -> tuple[RunStart, list[str]]:
    """Make the record of a start of the run, and sentences about it for the user.

    Args:
        recovery: the checkpoint from which the run resumes.
        plan: plan of the run.
        versions: first versions of the policies.
        past: unfinished work, from the journal.
        store: the run's journal.
        code: the code of environments and bots that will run.
        changed: the settings changed since the previous start.
        clock: gives the wall time of the start.
    """
    steps = {name: versions[name].step for name in plan.trained}
    newest, before = store.newest_steps(), store.starts()
    stale = _played_by_other_code(past, store, code)
    changed_code = set(stale)
    for place, digest in code.digests.items():
        if before and digest not in (before[-1].digests_of(place) or {digest}):
            changed_code.add(place)
    start = RunStart(
        lineage=max((versions[name].lineage for name in plan.trained), default=0),
        began_at=clock.wall(),
        checkpoint="" if recovery.manifest is None else recovery.manifest.directory.name,
        steps=steps,
        again={name: newest[name] for name, step in steps.items() if newest.get(name, 0) > step},
        changed=tuple(SettingChange(change.path, change.before, change.now) for change in changed),
        code=dict(code.digests),
        code_changed=tuple(sorted(changed_code)),
        reward_code_changed=tuple(sorted(place for place in changed_code if code.determines_rewards(place))),
        libraries=library_versions(),
    )
    sentences = [f"resuming from checkpoint {start.checkpoint} (steps taken: {_count_steps(steps)})"]
    if recovery.manifest is None:
        sentences = ["there is no checkpoint yet: the run starts again from its initial weights and keeps its episodes"]
    for name, step in start.again.items():
        one = step == steps[name] + 1
        sentences.append(
            f"{f'step {step}' if one else f'steps {steps[name] + 1} to {step}'} of {name} will be taken again"
        )
    if past.unfinished:
        sentences.append(f"unfinished episodes that will resume from the journal: {len(past.unfinished)}")
    for change in changed:
        suffix = "; unfinished episodes keep the old value" if change.rule.rule == "per episode" else ""
        sentences.append(f"setting {change}{suffix}")
    sentences += _changed_libraries(before, start.libraries)
    for function in sorted(changed_code & code.functions.keys()):
        kind, name = code.functions[function]
        sentences.append(f"the {kind} {name} changed: later steps use the new code")
    if files := sorted(changed_code & set(code.imported)):
        sentences.append(
            f"the code changed in {', '.join(files)}, imported beside the environment's file; unfinished episodes "
            + "; ".join(code.continuations)
        )
    if files := sorted(changed_code - code.functions.keys() - set(code.imported)):
        sentences.append(
            f"the code changed in {', '.join(files)}; `on_code_change` of its environment decides how unfinished "
            "episodes continue"
        )
    if count := sum(map(len, stale.values())):
        condition = shlex.quote(f"(status = ready or status = trained) and committed_at < {start.began_at:.0f}")
        run = shlex.quote(str(store.directory.parent))
        environment_id = plan.settings.environment.id
        option = (
            f" --environment {shlex.quote(environment_id)}"
            if isinstance(environment_id, str) and ".py" in environment_id
            else ""
        )
        sentences.append(
            f"{plural(count, 'committed episode')} will be trained with rewards from the old code; to see "
            f"the new code's: `agentrl episode rescore {run} --where {condition}{option}`"
        )
    return start, sentences


def _changed_libraries(starts: Sequence[RunStart], now: Mapping[str, str]) -> list[str]:
    """Return a sentence about the versions of libraries that changed since the run began."""
    then = next((start.libraries for start in starts if start.libraries), now)
    changes = [
        f"{name} {then.get(name, 'missing')} → {now.get(name, 'missing')}"
        for name in sorted({*then, *now}, key=str.lower)
        if then.get(name) != now.get(name)
    ]
    return [f"versions changed since the run began: {', '.join(changes)}"] if changes else []


def _count_steps(steps: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {step}" for name, step in steps.items())


def _played_by_other_code(past: PastRun, store: SqliteJournal, code: UserCodeDigests) -> dict[str, list[str]]:
    """Return the committed episodes with units to be trained that other code has played, by the current file."""
    keys, environments = [], {}
    for spec, header in past.ready:
        if header.location is None:
            continue
        keys.append(AttemptLocation(header.location.partition, spec.episode_id, spec.attempt))
        environments[spec.episode_id] = spec.environment
    reader, episodes_by_change = TurnLogReader(store.directory), dict[str, list[str]]()
    try:
        for entry in reader.beginnings(keys):
            begin = decode_entries([entry])[0]
            file, digest = code.environments.get(environments[entry.episode_id], ("", ""))
            if isinstance(begin, BeginEntry) and digest and begin.code_hash != digest:
                episodes_by_change.setdefault(file, []).append(entry.episode_id)
    finally:
        reader.close()
    return episodes_by_change


class UserCodeDigests(NamedTuple):
    """The user's code in a run."""

    digests: Mapping[str, str]
    """Digest of each file, and of each function by its reference."""
    environments: Mapping[str, tuple[str, str]]
    """File and digest of each environment, by name."""
    functions: Mapping[str, tuple[Kind, str]]
    """Kind and name of the user's functions, by reference."""
    imported: Collection[str] = ()
    """Files in `digests` of imported modules that define no environment and no bot."""
    continuations: Sequence[str] = ()
    """Clauses about unfinished episodes when only imported modules have changed; see `_continuations`."""

    @staticmethod
    def of(bots: Mapping[str, BotPolicy], environment: type[Environment], functions: UserFunctions) -> UserCodeDigests:
        """Collect the code of the environment, its children, bots, and the user's functions."""
        environments = {}
        for environment_class in all_environment_classes(environment):
            environments[name_of(environment_class)] = (
                _file_of(environment_class),
                code_digest(environment_class.source()),
            )
        digests = dict(environments.values())
        imported: dict[str, str] = {}
        for file in digests:
            imported |= imported_digests(file)
        digests |= {code.reference: code.digest for _, code in functions.codes}
        for name, bot in bots.items():
            try:
                program = load_function(bot.id, f"policies.{name}.id")
                digests[_file_of(program)] = code_digest(inspect.getsource(inspect.getmodule(program) or program))
            except (OSError, TypeError):
                continue  # its code is in no file, for example typed in a shell
        kinds = {code.reference: (kind, code.name) for kind, code in functions.codes}
        imported_files = imported.keys() - digests.keys()
        continuations = _continuations(all_environment_classes(environment))
        return UserCodeDigests(imported | digests, environments, kinds, imported_files, continuations)

    def determines_rewards(self, place: str) -> bool:
        """Whether rewards depend on the code in a file or of a function."""
        return place not in self.functions or self.functions[place][0] == "scorer"


def _continuations(environments: Iterable[type[Environment]]) -> list[str]:
    """Say what a resume does with unfinished episodes if only modules that environments import have changed: a clause
    that follows "unfinished episodes", for each way, with the environments' names if there are several ways."""
    names: dict[str, list[str]] = {}
    for environment in dict.fromkeys(environments):
        if issubclass(environment, HarnessEnvironment):
            replies = "the recorded replies to equal requests" if environment.replay_stable else "new replies"
            clause = f"start over, with {replies}"
        else:
            clause = "repeat their recorded calls, and are dropped (nondeterminism) if a call differs"
            if ".endpoint(" in environment.source():
                clause += ", or start over if an external agent plays them through ctx.endpoint()"
        names.setdefault(clause, []).append(environment.__name__)
    if len(names) == 1:
        return list(names)
    return [f"of {', '.join(of)} {clause}" for clause, of in names.items()]


def changed_imports(environment: type[Environment], recorded: RunStart) -> list[str]:
    """Return the modules that an environment imports and that changed since a recorded start, as paths from its file's
    directory."""
    file = _file_of(environment)
    return sorted(
        os.path.relpath(path, os.path.dirname(file))
        for path, digest in imported_digests(file).items()
        if path != file and digest not in (recorded.digests_of(path) or {digest})
    )


def imported_digests(file: str) -> dict[str, str]:
    """Return the digest of each imported module whose file is in the directory of a file or below, without agentrl,
    Python's library and installed packages."""
    digests: dict[str, str] = {}
    for path, names in modules_below(os.path.dirname(file)) if os.path.isabs(file) else ():
        if names["__name__"].partition(".")[0].partition("_")[0] != "agentrl":
            with contextlib.suppress(OSError, UnicodeDecodeError):
                digests[path] = code_digest(Path(path).read_text(encoding="utf-8"))
    return digests


def _file_of(definition: Any) -> str:
    try:
        return os.path.abspath(inspect.getsourcefile(definition) or "")
    except (OSError, TypeError):  # such as a class of a notebook
        return f"{definition.__module__}:{definition.__qualname__}"


# --- older versions that are served -----------------------------------------------------------------------------------


async def serve_opponents_and_pins(
    plan: RunPlan,
    served_versions: ServedVersions,
    journal: RunLog,
    versions: Mapping[str, PolicyVersion],
    drawn_from: Mapping[str, Sequence[PolicyVersion]],
) -> dict[str, list[PolicyVersion]]:
    """Serve the older versions that a run needs: for the first batches of a deterministic run, and as opponents.
    Returns the opponents' versions, keyed by the policy of the pool.

    Args:
        plan: plan of the run.
        served_versions: table in which they are pinned.
        journal: journal of the run.
        versions: the manifest's versions of the policies that learn.
        drawn_from: the manifest's pools of opponents.

    Raises:
        StorageError: a version was never published here.
        EngineError: the files of a version are missing or altered.
    """
    board = PolicyBoard(versions, (), journal.lines())
    for policy, steps_behind in pinned_policy_step_lags(
        plan.trained, deterministic=plan.settings.deterministic
    ).items():
        now = versions[policy].step if policy in versions else 0
        for step in range(max(now - steps_behind, 0), now):
            version = board.at(policy, step)
            weights = journal.published(version)
            if weights is None:
                raise StorageError(
                    f"episodes to resume are pinned to version {version}, which was never published; the journal is "
                    "damaged"
                )
            await served_versions.pin(BATCHES, weights)
    return {
        name: await _serve_older_opponents(served_versions, journal, board, name, pool, drawn_from.get(name, ()))
        for name, pool in plan.settings.of_kind(OpponentPoolPolicy).items()
        if pool.of in versions
    }


async def serve_versions_of_trees(
    trained: Mapping[str, PolicyConfig],
    served_versions: ServedVersions,
    journal: RunLog,
    past: PastRun,
    *,
    deterministic: bool,
) -> None:
    """Serve the versions of the trees that are not finished, before anything resumes. An episode whose version is gone
    is dropped or starts again when it samples.

    Args:
        trained: policies that learn.
        served_versions: table in which they are pinned.
        journal: journal of the run.
        past: unfinished work, from the journal.
        deterministic: whether versions are pinned for batches instead.
    """
    running = {spec.episode_id: spec.attempt for spec in past.unfinished}
    branches = [(spec, spec.fork) for spec in (*past.unfinished, *past.ended) if spec.fork is not None]
    versions = [
        (tree_holder(point.episode_id, point.attempt), version)
        for spec, point in branches
        if spec.episode_id in running or running.get(point.episode_id) == point.attempt
        for version in spec.pins.values()
        if version.policy in trained
    ]
    for holder, version in versions:
        policy = trained[version.policy]
        if deterministic or policy.served_adapter is None or version in served_versions.pinned_by(holder):
            continue
        pinned_versions = {
            pinned_version for pinned_version in served_versions.pinned() if pinned_version.policy == version.policy
        }
        weights = journal.published(version)
        if weights is not None and (version in pinned_versions or len(pinned_versions) <= policy.largest_staleness):
            with contextlib.suppress(EngineError):  # the files were deleted
                await served_versions.pin(holder, weights)


async def _serve_older_opponents(
    table: ServedVersions,
    journal: RunLog,
    board: PolicyBoard,
    name: str,
    pool: OpponentPoolPolicy,
    drawn_from: Sequence[PolicyVersion],
) -> list[PolicyVersion]:
    """Serve the opponents of one pool: from the checkpoint, and from unfinished episodes.

    A pool that is new in the configuration gets the versions that would have joined it, as far as their files exist.
    """
    now = board.current(pool.of)
    joined = {board.at(pool.of, step) for step in opponent_pool_steps(now.step, pool.every, pool.size)} - {now}
    pool_steps = set(drawn_from[-pool.size :]) or joined
    pinned_versions = {spec.pins[name] for spec in journal.unfinished() if name in spec.pins} - pool_steps
    other_versions = sorted(each for each in pinned_versions if board.staleness(each) and board.survives(each))
    opponents = []
    for version in sorted([*pool_steps, *other_versions[-SPARE:]], key=lambda version: version.step):
        weights = journal.published(version)
        if weights is None:
            continue
        try:
            await table.pin(opponent_pool_holder(name), weights)
        except EngineError:  # deleted since then, as after a rollback: the remaining opponents suffice
            continue
        opponents.append(version)
    return opponents


async def start_opponent_pools(
    pools: Mapping[str, OpponentPoolPolicy],
    table: ServedVersions,
    older: Mapping[str, Sequence[PolicyVersion]],
    lines: Lines,
) -> dict[str, list[PolicyVersion]]:
    """Return the first versions of each opponent pool: `older` ones, and the current one if it joins or the pool is
    empty.

    If a version of an earlier start has the current weights, that version is used, because its results are known.
    """
    opponents = {}
    for name, pool in pools.items():
        pool_versions, current = list(older.get(name, ())), table.current[pool.of]
        joins = current.version.step % pool.every == 0 and len(pool_versions) <= pool.size
        if not pool_versions or (joins and lines.weights(current.version) not in map(lines.weights, pool_versions)):
            await table.pin(opponent_pool_holder(name), current)
            pool_versions.append(current.version)
        opponents[name] = pool_versions
    return opponents


def remove_leftover_directories(checkpoints: Path, versions: Path, *, disk: Disk = LOCAL) -> None:
    """Remove the half-built directories of dead processes; no other process may be writing this run."""
    for directory in (checkpoints, versions, *(versions / name for name in disk.names(versions))):
        remove_staging_directories(directory, disk=disk)


def _highest_on_disk(versions: Path, disk: Disk) -> int:
    """Return the largest lineage with files; -1 if there is none."""
    numbers = [
        lineage
        for policy in disk.names(versions)
        for lineage, _ in list_version_directories(versions / policy, disk=disk)
    ]
    return max(numbers, default=-1)
