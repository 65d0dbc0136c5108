"""`rebuild_step`: what an optimizer step was fed, made again from the journal, and compared bit for bit by its digest.

From the step's record and the episodes it names to the rows the trainer consumed, by the code the trainer itself uses.
Needs no torch: nothing is computed from the rows.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.records import DataLocation
from agentrl.core.training_records import TrajectoryCredit, Unit
from agentrl.credit.fed import input_digest, row_digest, trained_positions
from agentrl.credit.samples import samples
from agentrl.inspection.checked import checked_rows
from agentrl.inspection.columns import step_rows
from agentrl.inspection.steps import StepLine, step_list, step_view
from agentrl.journal.reader import EntryKey, TurnReader
from agentrl.journal.rows import trajectories

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.core.training_records import TrainingSample
    from agentrl.inspection.reader import RunReader


class StepRebuilt(msgspec.Struct, frozen=True, kw_only=True):
    """A step's input, recorded and made again."""

    policy: str
    lineage: int
    step: int
    identical: bool
    rows: int
    tokens: int
    """Trained ones."""
    recorded: str
    """Digest of what the trainer consumed."""
    rebuilt: str
    """Digest of what the journal gives now; empty where it could not be made."""
    text: str = ""
    """Why it could not, or how it differs."""


def rebuild_steps(reader: RunReader, policy: str | None = None) -> list[StepRebuilt]:
    """Every step of a run, or of one policy; raises as `step_list`."""
    return [rebuild_step(reader, line) for line in step_list(reader, policy)]


def rebuild_step(reader: RunReader, line: StepLine) -> StepRebuilt:
    """One step; what cannot be read is told in `text`."""
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
        fed = _in_order(reader, view.columns_file, _fed(reader, turns, line))
    except JournalError as error:
        return msgspec.structs.replace(found, text=str(error))
    finally:
        turns.close()
    rebuilt = input_digest(map(row_digest, fed))
    tokens = sum(len(trained_positions(sample)) for sample in fed)
    same = rebuilt == view.input_digest
    text = "" if same else f"{len(fed)} rows of {tokens} tokens now, {line.samples} of {line.tokens} then"
    return msgspec.structs.replace(found, identical=same, rows=len(fed), tokens=tokens, rebuilt=rebuilt, text=text)


def _fed(reader: RunReader, turns: TurnReader, line: StepLine) -> Iterator[TrainingSample]:
    for unit in _units(reader, line):
        key = EntryKey(unit.location.partition, unit.episode_id, unit.attempt, unit.location.entries)
        (entries,) = turns.read_many([key])
        yield from samples(unit, trajectories(entries, line.policy))


def _units(reader: RunReader, line: StepLine) -> Iterator[Unit]:
    """The step's units, in the order of its record."""
    problems: list[str] = []
    rows = checked_rows(
        reader.log,
        "step_units",
        "policy = ? AND lineage = ? AND step = ? ORDER BY position",
        *(line.policy, line.lineage, line.step),
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
            raise JournalError(f"episode {episode}, attempt {attempt}: its record is gone, or damaged")
        where = DataLocation(located[0]["partition"], located[0]["entries"])
        yield Unit(episode_id=episode, attempt=attempt, policy=line.policy, location=where, credits=tuple(own))


def _in_order(reader: RunReader, columns: str | None, fed: Iterator[TrainingSample]) -> list[TrainingSample]:
    """The rows in the order the trainer consumed them, which several ranks share among each other."""
    rows = list(fed)
    if columns is None:
        return rows
    try:
        order = [(row.episode, row.row) for row in step_rows(reader.path, columns)]
    except JournalError:  # the order of the record is that of a single rank
        return rows
    places = {key: place for place, key in reversed(list(enumerate(order)))}
    return sorted(rows, key=lambda row: places.get((row.episode_id, row.row_index), len(places)))
