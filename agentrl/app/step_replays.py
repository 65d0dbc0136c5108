"""Recomputes an optimizer step from the journal: its inputs, its loss and its gradient norm.

`rebuild_step` follows the step's record and its episodes to the rows that the trainer consumed, with the trainer's own
code, and compares them bit for bit by digest; it needs no torch. `compute_step` lets the trainer compute loss and
gradient norm from them, if the weights that the step started from are still on disk.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from agentrl.config.load import recorded_config
from agentrl.config.run import RunConfig
from agentrl.config.sections import LOSSES
from agentrl.core.errors import AgentRLError, InputError, JournalError
from agentrl.core.functions import find
from agentrl.core.machine import install_command
from agentrl.core.records import DataLocation, PolicyVersion, TrainBatch, TrajectoryCredit, Unit, WeightsRef
from agentrl.core.text import plural
from agentrl.credit.samples import input_digest, row_digest, samples, trained_positions
from agentrl.inspection.reader import checked_rows
from agentrl.inspection.steps import StepLine, step_list, step_view
from agentrl.inspection.tokens import step_rows
from agentrl.journal.reader import EpisodeKey, TurnReader
from agentrl.journal.rows import trajectories
from agentrl.orchestrator.checkpoints import holding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.core.records import TrainingSample
    from agentrl.inspection.reader import RunReader
    from agentrl.learn.trainer import PolicyTrainer


TOLERANCE, SMALLEST = 1e-6, 1e-7
"""Relative and absolute difference up to which two computations of a step count as equal: several ranks add in another
order than one process, and other machines round differently."""


class StepComputed(msgspec.Struct, frozen=True, kw_only=True):
    """Loss and gradient norm of a step, as recorded and as recomputed; None if they could not be computed."""

    loss: float | None
    grad_norm: float | None
    loss_again: float | None = None
    grad_norm_again: float | None = None
    same: bool | None = None
    """Whether both are equal up to `TOLERANCE`; None: not computed."""
    text: str
    """Location of the step's initial weights; or the reason why nothing was computed."""


class StepRebuilt(msgspec.Struct, frozen=True, kw_only=True):
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
    computed: StepComputed | None = None
    """Recomputed loss and gradient norm; None if only the inputs were requested."""


def rebuild_steps(reader: RunReader, policy: str | None = None) -> list[StepRebuilt]:
    """Rebuild every step of a run, or of one policy; raises as `step_list`."""
    return [rebuild_step(reader, line) for line in step_list(reader, policy)]


def rebuild_step(reader: RunReader, line: StepLine) -> StepRebuilt:
    """Rebuild one step; `text` describes unreadable data."""
    view = step_view(reader, line.step, line.policy, line.lineage)
    found = StepRebuilt(
        policy=line.policy,
        lineage=line.lineage,
        step=line.step,
        identical=False,
        rows=0,
        tokens=0,
        recorded=view.input_digest,
        rebuilt="",
    )
    turns = TurnReader(reader.journal)
    try:
        inputs = _in_order(reader, view.columns_file, _step_inputs(reader, turns, line))
    except JournalError as error:
        return msgspec.structs.replace(found, text=str(error))
    finally:
        turns.close()
    rebuilt = input_digest(map(row_digest, inputs))
    tokens = sum(map(len, trained_positions(inputs)))
    same = rebuilt == view.input_digest
    text = (
        ""
        if same
        else f"{plural(len(inputs), 'row')} of {plural(tokens, 'token')} now, {line.samples} of {line.tokens} then"
    )
    return msgspec.structs.replace(found, identical=same, rows=len(inputs), tokens=tokens, rebuilt=rebuilt, text=text)


def compute_step(reader: RunReader, line: StepLine) -> StepComputed:
    """Recompute loss and gradient norm of a step; if that is impossible, `text` has the reason."""
    found = StepComputed(loss=line.loss, grad_norm=line.grad_norm, text="")
    try:
        config = recorded_config(reader.log.config(line.lineage))
        if line.policy not in config.trained:
            raise InputError(f"the run's configuration trains no policy {line.policy}")
        base = Path(config.base_of(line.policy))
        if not base.is_dir():
            raise InputError(f"its base model, {base}, is not on this machine")
        _check_loss(config, reader, line.lineage)
        trainer = _trainer(config, reader.path)
        batch, started_from = _batch(reader, line.policy, line.lineage, line.step)
        between: list[tuple[TrainBatch, float]] = []
        weights: WeightsRef | Path | None
        if trainer.has_masters(line.policy):
            weights, where, started_from, between = _kept_masters(reader, started_from)
        else:
            weights, where = kept_weights(reader, started_from)
        loss, grad_norm = trainer.recompute(batch, started_from, weights, between)
    except AgentRLError as error:
        return msgspec.structs.replace(found, text=f"not recomputed: {error}")
    same = _close(line.loss, loss) and _close(line.grad_norm, grad_norm)
    return msgspec.structs.replace(found, loss_again=loss, grad_norm_again=grad_norm, same=same, text=where)


def kept_weights(reader: RunReader, version: PolicyVersion) -> tuple[WeightsRef | Path | None, str]:
    """Return the weights of a version for `PolicyTrainer.recompute`, and their location for people.

    Raises:
        InputError: the weights are no longer on disk.
        StorageError: a record, or the checkpoint that holds them, is damaged.
    """
    same = _same_weights(reader, version)
    if version.step == 0:
        return None, "those a run begins with"
    directory = reader.path / "checkpoints"
    if (saved := holding(directory, same)) is not None:
        return saved, str(saved.relative_to(reader.path))
    for each in same:
        weights = reader.log.published(each)
        if weights is not None and Path(weights.path).is_dir():
            return weights, str(Path(weights.path).relative_to(reader.path))
    raise InputError(
        f"the step started from {version}, whose weights were not kept; checkpoint.versions = 0 keeps all versions"
    )


def _same_weights(reader: RunReader, version: PolicyVersion) -> list[PolicyVersion]:
    """Return all versions with the same weights as `version`. There may be several: a resumed run first publishes the
    weights it resumed from."""
    same = [version]
    for row in checked_rows(reader.log, "versions", "policy = ? ORDER BY lineage DESC", version.policy):
        older = PolicyVersion(version.policy, row["parent_lineage"], row["parent_step"])
        if (row["lineage"], row["step"]) == same[-1][1:] and older.step == version.step:
            same.append(older)
    return same


def _kept_masters(
    reader: RunReader, version: PolicyVersion
) -> tuple[Path | None, str, PolicyVersion, list[tuple[TrainBatch, float]]]:
    """Return the newest checkpoint from which steps lead to a version, its location for people, its version, and those
    steps.

    Each step comes with its learning rate, oldest first. The checkpoint is None if the steps begin at the run's initial
    weights.

    Raises:
        JournalError: the record of one of these steps is gone or damaged.
        StorageError: the checkpoint is damaged.
    """
    between: list[tuple[TrainBatch, float]] = []
    while True:
        same = _same_weights(reader, version)
        saved = None if version.step == 0 else holding(reader.path / "checkpoints", same)
        if saved is not None or version.step == 0:
            where = "those a run begins with" if saved is None else str(saved.relative_to(reader.path))
            steps = f", and {plural(len(between), 'step')} from there" if between else ""
            return saved, where + steps, version, between[::-1]
        for each in same:
            key = (each.policy, each.lineage, each.step)
            if rows := checked_rows(reader.log, "steps", "policy = ? AND lineage = ? AND step = ?", *key):
                batch, version = _batch(reader, *key)
                between.append((batch, float(json.loads(rows[0]["metrics"])["learning_rate"])))
                break
        else:
            raise JournalError(f"the record of the step that produced {version} is missing or damaged")


def _check_loss(config: RunConfig, reader: RunReader, lineage: int) -> None:
    """Refuse to compute with another code of the user's loss than that of the step.

    Raises:
        InputError: the code differs, or was not recorded.
    """
    name = config.trainer.loss.name
    if name in LOSSES:
        return
    now = find("loss", name, key="trainer.loss.name")
    then = next((start.code.get(now.reference) for start in reader.log.starts() if start.lineage == lineage), None)
    if then != now.digest:
        raise InputError(
            f"the code of the loss {now.reference} is now {now.digest}, but the step was taken with "
            f"{then or 'different code'}"
        )


def _trainer(config: RunConfig, run: Path) -> PolicyTrainer:
    try:
        from agentrl.learn.trainer import PolicyTrainer
    except ImportError as error:
        raise InputError(f"{error.name} is not installed: {install_command('train')}") from error
    trainer = PolicyTrainer(config, run, publishes=False)
    trainer.start()
    return trainer


def _batch(reader: RunReader, policy: str, lineage: int, step: int) -> tuple[TrainBatch, PolicyVersion]:
    """Return the batch of a step, by reference, and the version from which it started."""
    key = (policy, lineage, step)
    (row,) = checked_rows(reader.log, "steps", "policy = ? AND lineage = ? AND step = ?", *key)
    units = tuple(_units(reader, *key))
    batch = TrainBatch(step_id=step, policy=policy, units=units, normaliser=row["normaliser"])
    return batch, PolicyVersion(policy, row["started_lineage"], row["started_step"])


def _close(then: float | None, now: float) -> bool:
    return then is not None and math.isclose(then, now, rel_tol=TOLERANCE, abs_tol=SMALLEST)


def _step_inputs(reader: RunReader, turns: TurnReader, line: StepLine) -> Iterator[TrainingSample]:
    for unit in _units(reader, line.policy, line.lineage, line.step):
        key = EpisodeKey(unit.location.partition, unit.episode_id, unit.attempt, unit.location.entries)
        (entries,) = turns.read_many([key])
        yield from samples(unit, trajectories(entries, line.policy))


def _units(reader: RunReader, policy: str, lineage: int, step: int) -> Iterator[Unit]:
    """Yield the units of a step, in the order of its record."""
    problems: list[str] = []
    rows = checked_rows(
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
        by_turn = tuple(map(float, json.loads(row["turn_advantages"]))) if row["turn_advantages"] else ()
        credits.setdefault((row["episode"], row["attempt"]), []).append(
            TrajectoryCredit(row["seat"], row["agent"], row["reward"], row["advantage"], row["baseline"], by_turn)
        )
    for (episode, attempt), own in credits.items():
        located = checked_rows(reader.log, "episodes", "episode = ? AND attempt = ?", episode, attempt)
        if not located or located[0]["partition"] is None:
            raise JournalError(f"episode {episode}, attempt {attempt}: its record is missing or damaged")
        where = DataLocation(located[0]["partition"], located[0]["entries"])
        yield Unit(episode_id=episode, attempt=attempt, policy=policy, location=where, credits=tuple(own))


def _in_order(reader: RunReader, columns: str | None, fed: Iterator[TrainingSample]) -> list[TrainingSample]:
    """Sort the rows to the order in which the trainer consumed them, which depends on its number of ranks."""
    rows = list(fed)
    if columns is None:
        return rows
    try:
        order = [(row.episode, row.row) for row in step_rows(reader.path, columns)]
    except JournalError:  # the record's order is the one in which a single rank packs the rows
        return rows
    places = {key: place for place, key in reversed(list(enumerate(order)))}
    return sorted(rows, key=lambda row: places.get((row.episode_id, row.row_index), len(places)))
