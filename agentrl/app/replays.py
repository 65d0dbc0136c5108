"""`replay` and `rescore`: re-execution of recorded episodes, without sampling, acting or writing.

A replay reports whether the program still matches its journal, or the first call that differs. A rescore recomputes
the rewards, with the same or another program, over the same conversation; children come first, because parents' rewards
may depend on theirs.

`replay_step` rebuilds the rows of a recorded optimizer step from its episodes, with the trainer's own code, and
compares their digest with the recorded one; it needs no torch. `recompute_step_loss` has the trainer compute their loss
and gradient norm, if the step's initial weights are still on disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.app.model_files import check_models_unchanged, model_paths
from agentrl.app.policies import MAX_EXTERNAL_CONTEXT, rollout_settings
from agentrl.app.received import REPLAY, STEP_REPLAY, ReceivedRun, recorded_environment_code
from agentrl.app.recovery import changed_imports
from agentrl.app.run_parts import RunFactories
from agentrl.app.scoring import RecordedScorer
from agentrl.config.algorithms import LOSSES
from agentrl.config.plans import TrainerPlan
from agentrl.config.run import RunConfig
from agentrl.core import event_loop, ids
from agentrl.core.custom_functions import find_function_code
from agentrl.core.errors import (
    AgentRLError,
    EpisodeError,
    InfrastructureError,
    InputError,
    JournalError,
    ReplayMismatchError,
    describe_user_code_error,
)
from agentrl.core.machine import install_command
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.ports import EngineCapabilities
from agentrl.core.records import (
    EpisodeDataLocation,
    PolicyVersion,
    TrainBatch,
    TrajectoryCredit,
    Unit,
    WeightsRef,
)
from agentrl.core.text import plural
from agentrl.credit.samples import (
    INPUT_DIGEST_PREFIX,
    input_digest,
    row_digest,
    trained_positions,
    unit_samples,
    without_stale_tokens,
)
from agentrl.inspection.comparisons import Outcome, ReplayResult, agent_rewards
from agentrl.inspection.reader import RunReader, verified_control_rows
from agentrl.inspection.steps import StepLine, step_list, step_view
from agentrl.inspection.tokens import read_step_rows
from agentrl.journal.entries import BeginEntry, ChildResultEntry, JournalEntry, decode_entries, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.reader import AttemptLocation, TurnLogReader, pruned_attempt_error
from agentrl.journal.routing import RoutingReader, read_locally
from agentrl.journal.rows import ForkPrefixes, assemble_trajectories
from agentrl.observe.run_directory import run_argument
from agentrl.orchestrator.checkpoints import find_checkpoint_of
from agentrl.rollout.external.agent import external_turns_with_context, is_external_turn
from agentrl.rollout.replay import CallNotRecordedError, Replay, ReplayHost, ReplayStoppedError
from agentrl.rollout.runner import EpisodeRunner

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.core.ports import ChatFormat
    from agentrl.core.records import EpisodeHeader, EpisodeSpec
    from agentrl.core.tokens import TrainingSample
    from agentrl.environment.environment import Environment
    from agentrl.inspection.reader import EpisodeLine
    from agentrl.learn.trainer import PolicyTrainer


class _Settings(NamedTuple):
    """The settings of a start of the run."""

    config: RunConfig
    chat_format: ChatFormat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ReplayRequest:
    """The arguments shared by all episodes of a call."""

    received: ReceivedRun
    settings: Callable[[EpisodeLine], _Settings]
    """Returns the settings of the start in which an episode ended."""
    environment: type | str | None
    until: str | None
    rescoring: bool


@outside_event_loop
def replay(
    run: str | Path,
    episodes: Sequence[tuple[str, int | None]],
    *,
    until: str | None = None,
    rescoring: bool = False,
    environment: type | str | None = None,
    overrides: Sequence[str] = (),
    factories: RunFactories | None = None,
    on_progress: Callable[[str, float], None] = lambda part, share: None,
) -> list[ReplayResult]:
    """Execute recorded episodes again.

    Args:
        run: the run's directory.
        episodes: id and attempt of each episode; None: the newest attempt.
        until: stop after this call.
        rescoring: whether to recompute the rewards instead of comparing them.
        environment: replaces the environment named in the journal. A journal cannot choose the code that runs: its
            environment is used only if it is installed, or if the user named it for this run before.
        overrides: values for what the run would choose on this machine, as `section.field=value` or `task.key=value`;
            needed once for a run that the user did not train here.
        factories: factory of the chat format; default: that of the run's configuration.
        on_progress: receives the current part, and the share that is done.

    Raises:
        InputError: there is no such episode or call, or only the run names what it needs.
        JournalError: the control log is damaged.
    """
    reader = RunReader(run)
    try:
        received = ReceivedRun(reader.path, overrides)
        verb = "rescore" if rescoring else "replay"
        first = [*[name for name, _ in episodes[:1]], *_until_option(until)]
        command = received.command(f"episode {verb}", *first, environment=environment)
        use = REPLAY if factories is None else REPLAY.without_models()
        choose_code = partial(_choose_code, reader, episodes[:1], received, environment)
        changed_starts = [start for start in reader.log.starts() if start.changed]

        @cache
        def settings_of(lineage: int) -> _Settings:
            config = received.config(reader.log.config(lineage), use, command, choose_code)
            return _Settings(config, (factories or RunFactories()).chat_format(config.model))

        def settings(line: EpisodeLine) -> _Settings:
            ended_at = math.inf if line.committed_at is None else line.committed_at
            return settings_of(
                max((start.lineage for start in changed_starts if start.began_at <= ended_at), default=0)
            )

        request = _ReplayRequest(
            received=received,
            settings=settings,
            environment=environment,
            until=until,
            rescoring=rescoring,
        )
        return event_loop.run(_all(reader, episodes, request, on_progress))
    finally:
        reader.close()


def _choose_code(
    reader: RunReader,
    episodes: Sequence[tuple[str, int | None]],
    received: ReceivedRun,
    environment: type | str | None,
    command: str,
) -> None:
    """Choose the code of the first episode, to be refused where its settings are."""
    for episode_id, attempt in episodes:
        entries, _ = reader.recorded(reader.episode(episode_id, attempt).summary)
        begin = decode_entries(entries[:1])[0] if entries else None
        if isinstance(begin, BeginEntry):
            received.environment(
                begin.environment,
                environment,
                references=recorded_environment_code(reader.info()),
                code_hash=begin.code_hash,
                command=command,
                is_child=ids.child_depth(episode_id) > 0,
            )


def _until_option(until: str | None) -> list[str]:
    return [] if until is None else ["--until", until]


async def _all(
    reader: RunReader,
    episodes: Sequence[tuple[str, int | None]],
    request: _ReplayRequest,
    on_progress: Callable[[str, float], None],
) -> list[ReplayResult]:
    results: list[ReplayResult] = []
    for episode_id, attempt in episodes:
        on_progress(f"{len(results):,} of {plural(len(episodes), 'episode')}", len(results) / len(episodes))
        results.append(await _one(reader, episode_id, attempt, request))
    return results


async def _one(reader: RunReader, episode_id: str, attempt: int | None, request: _ReplayRequest) -> ReplayResult:
    view = reader.episode(episode_id, attempt)
    line = view.summary
    config, chat_format = request.settings(line)
    result = ReplayResult(episode=line.episode, attempt=line.attempt, outcome="not_replayable", calls=0, recorded=0)
    entries, inherited_entries = reader.recorded(line)
    if view.problems:
        is_pruned = pruned_attempt_error(reader.journal, line.episode, line.attempt) is not None
        return msgspec.structs.replace(
            result,
            outcome="not_replayable" if is_pruned else "damaged",
            recorded=len(entries),
            text="; ".join(view.problems),
        )
    # An external agent may request its own turns in any order; inherited turns keep theirs, as in the fork itself.
    with_context = external_turns_with_context([*inherited_entries, *entries])
    turns = [entry for entry in with_context if entry.episode_id == line.episode]
    entries = [entry for entry in entries if not is_external_turn(entry)]
    if not entries:
        return msgspec.structs.replace(result, text="it was dropped before its first act, so nothing was recorded")
    if request.until is not None and request.until not in {
        entry.call_id for entry in [*inherited_entries, *entries, *turns]
    }:
        raise InputError(
            f"episode {line.episode} has no call {request.until!r}; `agentrl episode replay "
            f"{run_argument(reader.path)} {line.episode} --step` names them"
        )
    spec = dataclasses.replace(_spec(reader, line), purpose="replay")
    begin = decode_entries(entries[:1])[0]
    verb = "rescore" if request.rescoring else "replay"
    command = request.received.command(
        f"episode {verb}", line.episode, *_until_option(request.until), environment=request.environment
    )
    environment = request.received.environment(
        spec.environment,
        request.environment,
        references=recorded_environment_code(reader.info()),
        code_hash=begin.code_hash if isinstance(begin, BeginEntry) else "",
        command=command,
        is_child=spec.parent_id is not None,
    )
    spec = dataclasses.replace(spec, task=request.received.task(environment, spec.task, command))
    if request.rescoring:
        entries = [await _rescored_child(reader, entry, request) for entry in entries]
    scratch_journal = MemoryJournal(keeps=False)
    runner = EpisodeRunner(
        engine=_NoEngine(),
        chat_format=chat_format,
        store=scratch_journal,
        log=scratch_journal.turn_log("replay"),
        host=ReplayHost(),
        clock=RunFactories().clock,
        settings=dataclasses.replace(
            rollout_settings(config.rollout_plan, chat_format, config.engine.max_context or MAX_EXTERNAL_CONTEXT),
            scorers={name: RecordedScorer(name, scorer.per, scorer.credit) for name, scorer in config.scorers.items()},
            on_code_change="try",
        ),
    )
    environment.load()
    on_new = Replay(request.until)
    outcome, call, text, header, advice = await _run(
        runner.run(
            *(spec, environment, entries),
            answers=turns,
            inherited=inherited_entries,
            regraded=request.rescoring,
            on_new=on_new,
        ),
        line,
    )
    if advice and (files := _changed_imports(reader, line, environment)):
        advice = f"Changed since the episode was recorded: {', '.join(files)}, beside the environment's file"
    before = agent_rewards(view.agents)
    after = agent_rewards(() if header is None else header.trajectories)
    if outcome == "identical" and header is not None and not request.rescoring:
        outcome, text = _compare(header, line, before, after)
    return msgspec.structs.replace(
        result,
        outcome=outcome,
        calls=len(on_new.acts),
        recorded=len(turns) + sum(ids.has_call_number(entry.call_id) for entry in [*inherited_entries, *entries]),
        call=call,
        text=text,
        advice=advice,
        acts=on_new.acts,
        before=before if request.rescoring else {},
        after=after if request.rescoring else {},
    )


def _changed_imports(reader: RunReader, line: EpisodeLine, environment: type[Environment]) -> list[str]:
    """Return the modules beside an environment's file that changed since the start that admitted an episode."""
    starts = [start for start in reader.log.starts() if start.began_at <= line.admitted_at]
    return changed_imports(environment, starts[-1]) if starts else []


class _Execution(NamedTuple):
    """The end of a re-execution."""

    outcome: Outcome
    call: str | None
    text: str
    """Reason of the end."""
    header: EpisodeHeader | None = None
    """The header of a program that returned."""
    advice: str = ""


async def _run(execution: Coroutine[Any, Any, EpisodeHeader], line: EpisodeLine) -> _Execution:
    """Execute the program over its journal."""
    try:
        header = await asyncio.get_running_loop().create_task(execution)
    except ReplayStoppedError as stop:
        return _Execution("stopped", stop.call_id, str(stop))
    except CallNotRecordedError as end:
        if line.stop_reason is None:
            text = f"all recorded calls match; the recording ends before call {end.call_id}"
            return _Execution("identical", end.call_id, text)
        return _Execution("departed", end.call_id, f"the episode had ended, and the code now makes {end.act}")
    except ReplayMismatchError as mismatch:
        text = str(mismatch).removesuffix(f". {mismatch.advice}")
        return _Execution("departed", mismatch.call_id, text, advice=mismatch.advice)
    except EpisodeError as error:
        if error.reason in ("resource_lost", "code_changed"):  # `try` leaves the latter to another version of agentrl
            return _Execution("not_replayable", None, str(error))
        return _failed(error.reason, str(error), line)
    except InfrastructureError as error:
        return _failed("infrastructure", str(error), line)
    except AgentRLError:
        raise
    except Exception as error:  # noqa: BLE001 - foreign code: any exception is a finding
        return _failed("environment_error", describe_user_code_error(error), line)
    if line.drop_reason is not None and line.stop_reason is None:
        return _Execution("departed", None, f"it was dropped as {line.drop_reason}, but now ends normally")
    return _Execution("identical", None, "", header)


def _failed(reason: str, text: str, line: EpisodeLine) -> _Execution:
    if (
        line.stop_reason is None and line.drop_reason == reason
    ) or line.status == "repeated":  # the failure of an attempt that was started over is not recorded
        return _Execution("identical", None, f"it fails with the recorded error: {text}")
    then = line.stop_reason or line.drop_reason or "still running"
    return _Execution("departed", None, f"it now fails ({text}), but was {then}")


def _compare(
    header: EpisodeHeader, line: EpisodeLine, before: dict[str, float | None], after: dict[str, float | None]
) -> tuple[Outcome, str]:
    """Compare the result of an execution with the committed one."""
    pairs = {
        "stop reason": (line.stop_reason, header.stop_reason),
        "turns": (line.turns, header.turns),
        "tokens": (line.tokens, header.tokens),
        "rewards": (before, {agent: reward for agent, reward in after.items() if agent in before}),
    }
    for part, (then, now) in pairs.items():
        if then != now:
            return "departed", f"every call is the same, but the {part} differ: recorded {then}, now {now}"
    return "identical", ""


async def _rescored_child(reader: RunReader, entry: JournalEntry, request: _ReplayRequest) -> JournalEntry:
    """Return an entry; if it reports a child's end, with the child's new rewards."""
    body = entry.decode()
    if not isinstance(body, ChildResultEntry) or body.drop_reason is not None:
        return entry
    child = await _one(reader, body.child, None, request)
    if child.outcome != "identical":
        return entry
    rewards: dict[str, float] = {}
    for agent, reward in child.after.items():
        if reward is not None:
            seat = agent.partition("[")[0]
            rewards[seat] = rewards.get(seat, 0.0) + reward
    return msgspec.structs.replace(entry, body=encode_body(msgspec.structs.replace(body, rewards=rewards)))


def _spec(reader: RunReader, line: EpisodeLine) -> EpisodeSpec:
    spec = reader.log.admitted(line.episode, line.attempt)
    assert spec is not None  # episodes are listed from their admissions
    return spec


class _NoEngine:
    """An engine that must not be called: a replay samples nothing."""

    capabilities = EngineCapabilities(
        name="none", refresh=frozenset(), expert_routing=False, sampling_mask=False, adapters=0, max_context=0
    )

    def __getattr__(self, name: str) -> Any:
        raise InputError(f"a replay samples nothing, but the episode asked the engine for {name!r}")


# --- optimizer steps --------------------------------------------------------------------------------------------------

TOLERANCE, SMALLEST = 1e-6, 1e-7
"""Relative and absolute difference up to which two computations of a step count as equal: several ranks add in another
order than one process, and other machines round differently."""


class StepRecomputeResult(msgspec.Struct, frozen=True, kw_only=True):
    """Loss and gradient norm of a step, as recorded and as recomputed; None if they could not be computed."""

    loss: float | None
    grad_norm: float | None
    loss_again: float | None = None
    grad_norm_again: float | None = None
    same: bool | None = None
    """Whether both are equal up to `TOLERANCE`; None: not computed."""
    text: str
    """Location of the step's initial weights; or the reason why nothing was computed."""


class StepReplayResult(msgspec.Struct, frozen=True, kw_only=True):
    """Input of a step, as recorded and as rebuilt."""

    policy: str
    lineage: int
    step: int
    identical: bool
    rows: int
    tokens: int
    """Number of trained tokens."""
    recorded: str
    """Digest of the input that the trainer consumed."""
    rebuilt: str
    """Digest of the input rebuilt from the journal; empty if that failed."""
    text: str = ""
    """Reason why the input could not be rebuilt, or the difference."""
    computed: StepRecomputeResult | None = None
    """Recomputed loss and gradient norm; None if only the inputs were requested."""


def replay_steps(
    reader: RunReader,
    policy: str | None = None,
    on_progress: Callable[[str, float], None] = lambda part, share: None,
) -> list[StepReplayResult]:
    """Rebuild every step of a run, or of one policy.

    Raises:
        InputError: as `step_list`.
        JournalError: as `step_list`, or the record of a step is damaged.
    """
    problems: list[str] = []
    lines, results = step_list(reader, policy, problems=problems), list[StepReplayResult]()
    if problems:
        raise JournalError(f"{reader.path}: {'; '.join(problems)}; name a step to rebuild another")
    for line in lines:
        on_progress(f"{len(results):,} of {plural(len(lines), 'step')}", len(results) / len(lines))
        results.append(replay_step(reader, line))
    return results


def replay_step(reader: RunReader, line: StepLine) -> StepReplayResult:
    """Rebuild one step; `text` describes unreadable data."""
    view = step_view(reader, line.step, line.policy, line.lineage)
    result = StepReplayResult(
        policy=line.policy,
        lineage=line.lineage,
        step=line.step,
        identical=False,
        rows=0,
        tokens=0,
        recorded=view.input_digest,
        rebuilt="",
    )
    turns = TurnLogReader(reader.journal)
    try:
        inputs = _in_order(reader, view.columns_file, _step_inputs(reader, turns, line))
    except JournalError as error:
        return msgspec.structs.replace(result, text=str(error))
    finally:
        turns.close()
    rebuilt = input_digest(map(row_digest, inputs))
    tokens = sum(map(len, trained_positions(inputs)))
    same = rebuilt == view.input_digest
    if same:
        text = ""
    elif not view.input_digest.startswith(INPUT_DIGEST_PREFIX):
        text = "recorded by an earlier version of agentrl, whose digest of the input covered fewer columns"
    elif (len(inputs), tokens) == (line.samples, line.tokens):
        text = f"the same {plural(tokens, 'token')} in {plural(len(inputs), 'row')}, with other values in their columns"
    else:
        text = f"{plural(len(inputs), 'row')} of {plural(tokens, 'token')} now, {line.samples} of {line.tokens} then"
    return msgspec.structs.replace(result, identical=same, rows=len(inputs), tokens=tokens, rebuilt=rebuilt, text=text)


def recompute_step_loss(reader: RunReader, line: StepLine, overrides: Sequence[str] = ()) -> StepRecomputeResult:
    """Recompute loss and gradient norm of a step; if that is impossible, `text` has the reason. `overrides` as for
    `replay`."""
    result = StepRecomputeResult(loss=line.loss, grad_norm=line.grad_norm, text="")
    try:
        received = ReceivedRun(reader.path, overrides)
        command = received.command("step replay", line.step)
        config = received.config(reader.log.config(line.lineage), STEP_REPLAY, command)
        if line.policy not in config.trained:
            raise InputError(f"the run's configuration trains no policy {line.policy}")
        base = Path(config.base_of(line.policy))
        if not base.is_dir():
            raise InputError(f"its base model, {base}, is not on this machine")
        check_models_unchanged(model_paths(config), reader.info().get("models"), ignored=STEP_REPLAY.ignored)
        _check_loss(config.trainer.loss.name, reader, line.lineage)
        trainer = _trainer(config.trainer_plan, reader.path)
        batch, started_from = _batch(reader, line.policy, line.lineage, line.step)
        between: list[tuple[TrainBatch, float]] = []
        weights: WeightsRef | Path | None
        if trainer.only_in_checkpoints(line.policy):
            weights, origin, started_from, between = _kept_checkpoint(reader, started_from, line.lineage)
        else:
            weights, origin = find_weights_of(reader, started_from)
        loss, grad_norm = trainer.recompute(batch, started_from, weights, between)
    except AgentRLError as error:
        return msgspec.structs.replace(result, text=f"not recomputed: {' '.join(str(error).split())}")
    is_same = _close(line.loss, loss) and _close(line.grad_norm, grad_norm)
    return msgspec.structs.replace(result, loss_again=loss, grad_norm_again=grad_norm, same=is_same, text=origin)


def find_weights_of(reader: RunReader, version: PolicyVersion) -> tuple[WeightsRef | Path | None, str]:
    """Return the weights of a version for `PolicyTrainer.recompute`, and their location for people.

    Raises:
        InputError: the weights are no longer on disk.
        StorageError: a record, or the checkpoint that holds them, is damaged.
    """
    equal_versions = list(reader.log.lines().published_as(version))
    if version.step == 0:
        return None, "those a run begins with"
    directory = reader.path / "checkpoints"
    if (checkpoint := find_checkpoint_of(directory, equal_versions)) is not None:
        return checkpoint, str(checkpoint.relative_to(reader.path))
    for candidate in equal_versions:
        weights = reader.log.published(candidate)
        if weights is not None and Path(weights.path).is_dir():
            return weights, str(Path(weights.path).relative_to(reader.path))
    raise InputError(
        f"the step started from {version}, whose weights were not kept; checkpoint.versions = 0 keeps all versions"
    )


def _kept_checkpoint(
    reader: RunReader, version: PolicyVersion, lineage: int
) -> tuple[Path | None, str, PolicyVersion, list[tuple[TrainBatch, float]]]:
    """Return the newest checkpoint from which steps lead to a version, its location for people, its version, and those
    steps.

    Each step comes with its learning rate, oldest first. The checkpoint is None if the steps begin at the run's initial
    weights.

    Raises:
        InputError: one of these steps was taken with another loss than `lineage` has, or other values.
        JournalError: the record of one of these steps is gone or damaged.
        StorageError: the checkpoint is damaged.
    """
    between: list[tuple[TrainBatch, float]] = []
    lines = reader.log.lines()
    while True:
        equal_versions = list(lines.published_as(version))
        checkpoint = None if version.step == 0 else find_checkpoint_of(reader.path / "checkpoints", equal_versions)
        if checkpoint is not None or version.step == 0:
            origin = "those a run begins with" if checkpoint is None else str(checkpoint.relative_to(reader.path))
            steps = f", and {plural(len(between), 'step')} from there" if between else ""
            return checkpoint, origin + steps, version, between[::-1]
        for start_point in equal_versions:
            key = (start_point.policy, start_point.lineage, start_point.step)
            if rows := verified_control_rows(reader.log, "steps", "policy = ? AND lineage = ? AND step = ?", *key):
                if _learning_settings(reader, start_point.lineage) != _learning_settings(reader, lineage):
                    raise InputError(
                        f"step {start_point.step}, which lies between the newest checkpoint and this step, was taken "
                        "with another trainer.loss, trainer.entropy_bonus or trainer.optimizer.max_grad_norm"
                    )
                batch, version = _batch(reader, *key)
                if version >= start_point:
                    raise JournalError(f"the record of the step that produced {start_point} begins at {version}")
                between.append((batch, float(json.loads(rows[0]["metrics"])["learning_rate"])))
                break
        else:
            raise JournalError(f"the record of the step that produced {version} is missing or damaged")


def _learning_settings(reader: RunReader, lineage: int) -> list[Any]:
    """Return the recorded settings that change a step's update, and that a resume may change, as data."""
    config = reader.log.config(lineage)
    trainer = config.get("trainer", {})
    return [
        trainer.get("loss"),
        trainer.get("entropy_bonus"),
        trainer.get("optimizer", {}).get("max_grad_norm"),
    ]


def _check_loss(name: str, reader: RunReader, lineage: int) -> None:
    """Refuse to compute with another code of the user's loss than that of the step.

    Raises:
        InputError: the code differs, or was not recorded.
    """
    if name in LOSSES:
        return
    now = find_function_code("loss", name, key="trainer.loss.name", runs=False)
    then = next((start.digests_of(now.reference) for start in reader.log.starts() if start.lineage == lineage), set())
    if now.digest not in then:
        raise InputError(
            f"the code of the loss {now.reference} is now {now.digest}, but the step was taken with "
            f"{', '.join(sorted(then)) or 'different code'}"
        )


def _trainer(plan: TrainerPlan, run: Path) -> PolicyTrainer:
    try:
        from agentrl.learn.trainer import PolicyTrainer
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: {install_command('train')}") from error
    trainer = PolicyTrainer(plan, run, publishes=False)
    trainer.start()
    return trainer


def _batch(reader: RunReader, policy: str, lineage: int, step: int) -> tuple[TrainBatch, PolicyVersion]:
    """Return the batch of a step, by reference, and the version from which it started."""
    key = (policy, lineage, step)
    (row,) = verified_control_rows(reader.log, "steps", "policy = ? AND lineage = ? AND step = ?", *key)
    units = tuple(_units(reader, *key))
    batch = TrainBatch(step_id=step, policy=policy, units=units, normalizer=row["normaliser"], lines=reader.log.lines())
    return batch, PolicyVersion(policy, row["started_lineage"], row["started_step"])


def _close(then: float | None, now: float) -> bool:
    return then is not None and math.isclose(then, now, rel_tol=TOLERANCE, abs_tol=SMALLEST)


def _step_inputs(reader: RunReader, turns: TurnLogReader, line: StepLine) -> Iterator[TrainingSample]:
    prefixes, routing = ForkPrefixes(reader.journal), RoutingReader(read_locally(reader.journal))
    batch, started_from = _batch(reader, line.policy, line.lineage, line.step)
    max_lag = _max_lag(reader, line)
    for unit in batch.units:
        key = AttemptLocation(unit.location.partition, unit.episode_id, unit.attempt, unit.location.entries)
        (entries,) = turns.read_many([key])
        rows = assemble_trajectories(entries, line.policy, prefixes.of(entries))
        samples = unit_samples(unit, *routing.attach([unit], [rows]))
        yield from without_stale_tokens(samples, started_from, max_lag, batch.lines)[0]


def _max_lag(reader: RunReader, line: StepLine) -> int | None:
    """Return the recorded `PolicyConfig.max_lag` of a step's policy.

    Raises:
        JournalError: the recorded value is no number of steps.
    """
    policies = reader.log.config(line.lineage).get("policies")
    policy = policies.get(line.policy) if isinstance(policies, dict) else None
    max_lag = policy.get("max_lag") if isinstance(policy, dict) else None
    if max_lag is not None and (type(max_lag) is not int or max_lag < 0):
        raise JournalError(
            f"{reader.path}: policies.{line.policy}.max_lag of the recorded configuration is no number of steps; the "
            "journal is damaged"
        )
    return max_lag


def _units(reader: RunReader, policy: str, lineage: int, step: int) -> Iterator[Unit]:
    """Yield the units of a step, in the order of its record."""
    problems: list[str] = []
    rows = verified_control_rows(
        reader.log,
        "step_units",
        "policy = ? AND lineage = ? AND step = ? ORDER BY position",
        *(policy, lineage, step),
        problems=problems,
    )
    if problems:
        raise JournalError("; ".join(problems))
    credits: dict[tuple[str, int], list[TrajectoryCredit]] = {}
    for row in rows:
        try:
            by_turn = tuple(map(float, json.loads(row["turn_advantages"]))) if row["turn_advantages"] else ()
        except (TypeError, ValueError, RecursionError) as error:
            raise JournalError(
                f"episode {row['episode']}: its advantages by turn cannot be read ({error}); the journal is damaged"
            ) from error
        credits.setdefault((row["episode"], row["attempt"]), []).append(
            TrajectoryCredit(row["seat"], row["agent"], row["reward"], row["advantage"], row["baseline"], by_turn)
        )
    for (episode, attempt), agent_credits in credits.items():
        episode_rows = verified_control_rows(reader.log, "episodes", "episode = ? AND attempt = ?", episode, attempt)
        if not episode_rows or episode_rows[0]["partition"] is None:
            raise JournalError(f"episode {episode}, attempt {attempt}: its record is missing or damaged")
        location = EpisodeDataLocation(episode_rows[0]["partition"], episode_rows[0]["entries"])
        yield Unit(
            episode_id=episode,
            attempt=attempt,
            policy=policy,
            location=location,
            credits=tuple(agent_credits),
        )


def _in_order(reader: RunReader, columns: str | None, samples: Iterator[TrainingSample]) -> list[TrainingSample]:
    """Sort the rows to the order in which the trainer consumed them, which depends on its number of ranks."""
    rows = list(samples)
    if columns is None:
        return rows
    try:
        order = [(row.episode, row.row) for row in read_step_rows(reader.path, columns)]
    except JournalError:  # the record's order is the one in which a single rank packs the rows
        return rows
    places = {key: place for place, key in reversed(list(enumerate(order)))}
    return sorted(rows, key=lambda row: places.get((row.episode_id, row.row_index), len(places)))
