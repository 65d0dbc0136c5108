"""Conversion between records and rows of the control log, at admission, commit, publication and step.

Query columns are written once, at commit, and never updated: the fate of a unit is in `step_units` and `unit_drops`.
"""

from __future__ import annotations

import functools
import math
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.holds import AdmissionWait
from agentrl.core.records import (
    STATE_BYTES,
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    FrozenGroupBaselines,
    GroupScores,
    MemberScore,
    PolicyVersion,
    Proposal,
    RoleMeanAtAdmission,
    SeatBinding,
    TrajectoryHeader,
    WeightsRef,
)
from agentrl.core.text import shorten_lines
from agentrl.journal.port import (
    Admission,
    AttemptPruning,
    EpisodeEnd,
    FilePruning,
    MetricRow,
    StepRow,
    UnitDropped,
    VersionPublication,
)
from agentrl.journal.schema import DAMAGE, all_rows, column_types, database_error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from agentrl.journal.port import ControlRecord

_ENCODER = msgspec.msgpack.Encoder()
_NEGATIVE_ZERO = _ENCODER.encode(-0.0)
_SPEC = msgspec.msgpack.Decoder(EpisodeSpec)


class _OldSpec(msgspec.Struct):
    """What versions before 0.1 recorded in another form than `EpisodeSpec`."""

    held_by: str = ""


_OLD_SPEC = msgspec.msgpack.Decoder(_OldSpec)
_JSON = msgspec.json.Encoder()
_FINISHERS = msgspec.json.Decoder(tuple[str, ...])
_EARLIER = msgspec.json.Decoder(tuple[RoleMeanAtAdmission, ...])
_MEMBER_SCORES = msgspec.json.Decoder(tuple[MemberScore, ...])
_JUDGED_BY = msgspec.json.Decoder(PolicyVersion | None)
_VERSIONS = msgspec.json.Decoder(tuple[PolicyVersion, ...])
_TURN_REWARDS = msgspec.json.Decoder(tuple[tuple[int, float], ...])
_NAMED_REWARDS = msgspec.json.Decoder(tuple[tuple[str, float], ...])


def row_checksum(table: str, values: Sequence[Any]) -> int:
    """Compute the CRC-32 of a control row: its table and all its other columns."""
    return _checksum(table, _ENCODER.encode(values))


def is_intact(table: str, row: Sequence[Any]) -> bool:
    """Whether a row, its checksum last, is as it was written. SQLite keeps text in a column of integers if a file is
    edited with another program, so the types are checked too."""
    return row_checksum(table, row[:-1]) == row[-1] and _has_types(table, tuple(map(type, row)))


@functools.cache
def _has_types(table: str, types: tuple[type, ...]) -> bool:
    return all(found in allowed for found, allowed in zip(types, column_types(table), strict=True))


def with_checksum(table: str, row: Sequence[Any]) -> Sequence[Any]:
    """Return a row with its checksum last. SQLite returns -0.0 as 0.0, so it is stored as 0.0."""
    data = _ENCODER.encode(row)
    if _NEGATIVE_ZERO in data:
        row = [(value or 0.0) if isinstance(value, float) else value for value in row]
        data = _ENCODER.encode(row)
    return (*row, _checksum(table, data))


def _checksum(table: str, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(table.encode()))


ADMISSION_COLUMNS = "episode attempt purpose environment task parent group_id spec admitted_at"
EPISODE_COLUMNS = (
    "episode attempt purpose environment task parent group_id seats policies oldest_step lineage reward stop_reason "
    "drop_reason turns tokens seconds partition entries digest metrics detail committed_at measured_against"
)
TRAJECTORY_COLUMNS = (
    "episode attempt seat agent policy reward tokens oldest_step lineage turn_rewards named_rewards turn_states"
)

COLUMNS = {
    "meta": "key value",
    "admissions": ADMISSION_COLUMNS,
    "episodes": EPISODE_COLUMNS,
    "trajectories": TRAJECTORY_COLUMNS,
    "unit_drops": "episode attempt policy reason dropped_at",
    "proposals": "number episode attempt call environment key structure",
    "baselines": "group_id finishers earlier",
    "group_scores": "group_id scorer weight scores note spread judged_by tokens requests seconds",
    "versions": "policy lineage step parent_lineage parent_step path kind sha256 published_at",
    "steps": (
        "policy lineage step started_lineage started_step loss grad_norm fed samples tokens seconds normaliser"
        " input_digest columns_file metrics stepped_at"
    ),
    "step_units": ("policy lineage step position episode attempt seat agent reward advantage baseline turn_advantages"),
    "pruned": "episode attempt rule pruned_at",
    "pruned_files": "file rule pruned_at",
    "metrics": "policy step name value recorded_at",
}
"""Columns of each table that are written, except the checksum."""

Row = tuple[str, Sequence[Any]]
"""A table, and a row of its columns."""


# --- to rows ----------------------------------------------------------------------------------------------------------


def encode_records(records: Iterable[ControlRecord], now: float, learners: Collection[str] | None) -> list[Row]:
    """Return the rows of records, with their tables.

    Args:
        records: records of the control log.
        now: time label of the rows.
        learners: see `learning_policies`.
    """
    return [row for record in records for row in _encode_record(record, now, learners)]


def _encode_record(  # noqa: C901, PLR0912 (one case per record)
    record: ControlRecord, now: float, learners: Collection[str] | None
) -> Iterable[Row]:
    match record:
        case Admission():
            yield "admissions", encode_admission_row(record.spec, now)
        case EpisodeEnd(spec=spec, header=header):
            row = encode_episode_row(spec, header, record.digest, record.metrics, record.detail, now, learners)
            yield "episodes", row
            for trajectory in encode_trajectory_rows(header):
                yield "trajectories", trajectory
        case UnitDropped():
            yield "unit_drops", (record.episode_id, record.attempt, record.policy, record.reason, now)
        case Proposal():
            yield "proposals", record
        case FrozenGroupBaselines():
            yield "baselines", encode_baselines_row(record)
        case GroupScores():
            yield "group_scores", encode_group_scores_row(record)
        case VersionPublication():
            yield "versions", encode_version_row(record.weights, record.parent, now)
        case StepRow():
            yield "steps", encode_step_row(record, now)
            for unit in encode_step_unit_rows(record):
                yield "step_units", unit
        case MetricRow():
            for name, value in record.values.items():
                yield "metrics", (record.policy, record.step, name, _finite(value), now)
        case AttemptPruning():
            yield "pruned", (record.episode_id, record.attempt, record.rule, now)
        case FilePruning():
            yield "pruned_files", (record.file, record.rule, now)


def encode_admission_row(spec: EpisodeSpec, now: float) -> Sequence[Any]:
    """Return the `ADMISSION_COLUMNS` of a spec."""
    key = (spec.episode_id, spec.attempt, spec.purpose)
    return (*key, spec.environment, spec.task.id, spec.parent_id, spec.group_id, _ENCODER.encode(spec), float(now))


def learning_policies(info: Mapping[str, Any]) -> Collection[str] | None:
    """Return the policies that learn by a journal's `info`: none in an evaluation; None if `info` does not tell."""
    if "evaluated" in info:
        return ()
    config = info.get("config")
    policies = config.get("policies") if isinstance(config, dict) else None
    if not isinstance(policies, dict):
        return None
    return {name for name, one in policies.items() if isinstance(one, dict) and one.get("kind") == "trained"}


def encode_episode_row(
    spec: EpisodeSpec,
    header: EpisodeHeader,
    digest: bytes,
    metrics: Mapping[str, float],
    detail: str,
    now: float,
    learners: Collection[str] | None,
) -> Sequence[Any]:
    """Return the `EPISODE_COLUMNS` of a finished episode, with `detail` shortened.

    `oldest_step` and `lineage` belong to the oldest weights of the policies in `learners`: frozen weights do not age.
    """
    units = header.trajectories
    learner_units = [unit for unit in units if learners is None or unit.policy in learners]
    oldest = min(learner_units, key=lambda unit: (unit.lineage, unit.oldest_step), default=None)
    partition, entries = header.location if header.location is not None else (None, None)
    reward = header.reward
    return (
        header.episode_id,
        header.attempt,
        header.purpose,
        spec.environment,
        spec.task.id,
        header.parent_id,
        header.group_id,
        _JSON.encode({seat: _binding(binding) for seat, binding in spec.seats.items()}).decode(),
        ",".join(dict.fromkeys(unit.policy for unit in units)),
        None if oldest is None else oldest.oldest_step,
        None if oldest is None else oldest.lineage,
        None if reward is None else float(reward),
        header.stop_reason,
        header.drop_reason,
        header.turns,
        header.tokens,
        float(header.seconds),
        partition,
        entries,
        digest,
        _JSON.encode(metrics).decode(),
        shorten_lines(detail, 4000),  # such as a traceback of some twenty calls
        float(now),
        _JSON.encode(header.measured_against).decode() if header.measured_against else None,
    )


def encode_trajectory_rows(header: EpisodeHeader) -> Iterable[Sequence[Any]]:
    """Return the `TRAJECTORY_COLUMNS` of a finished episode's agents."""
    for unit in header.trajectories:
        reward = None if unit.reward is None else float(unit.reward)
        key = (header.episode_id, header.attempt, unit.seat, unit.index)
        parts = [
            _JSON.encode(rewards).decode() if rewards else None for rewards in (unit.turn_rewards, unit.named_rewards)
        ]
        token_fields = (unit.tokens, unit.oldest_step, unit.lineage)
        yield (*key, unit.policy, reward, *token_fields, *parts, unit.turn_states or None)


def encode_baselines_row(baselines: FrozenGroupBaselines) -> Sequence[Any]:
    """Return the row of a group's baselines."""
    return (baselines.group_id, _JSON.encode(baselines.finishers).decode(), _JSON.encode(baselines.earlier).decode())


def encode_group_scores_row(scores: GroupScores) -> Sequence[Any]:
    """Return the row of a group's scores."""
    group_id, scorer, weight, members, note, spread, judged_by, tokens, requests, seconds = scores
    return (
        *(group_id, scorer, None if weight is None else float(weight), _JSON.encode(members).decode(), note),
        *(None if spread is None else float(spread), None if judged_by is None else _JSON.encode(judged_by).decode()),
        *(tokens, requests, float(seconds)),
    )


def encode_version_row(weights: WeightsRef, parent: PolicyVersion | None, now: float) -> Sequence[Any]:
    """Return the row of a published version and the version it was made from."""
    policy = weights.version.policy
    parents = (parent.lineage, parent.step) if parent is not None and parent.policy == policy else (None, None)
    return (*weights.version, *parents, weights.path, weights.kind, weights.sha256, float(now))


def encode_step_row(row: StepRow, now: float) -> Sequence[Any]:
    """Return the row of an optimizer step; NaN and infinity become NULL."""
    report = row.report
    return (
        *row.version,
        report.started_from.lineage,
        report.started_from.step,
        _finite(report.loss),
        _finite(report.grad_norm),
        sum(len(unit.credits) for unit in row.batch.units),
        report.samples,
        report.tokens,
        float(report.seconds),
        float(row.batch.normalizer),
        report.input_digest,
        report.columns,
        _JSON.encode(report.metrics).decode(),
        float(now),
    )


def encode_step_unit_rows(row: StepRow) -> Iterable[Sequence[Any]]:
    """Return the rows of a step's inputs, one per trajectory, in order."""
    position = 0
    for unit in row.batch.units:
        for credit in unit.credits:
            credit_fields = (float(credit.reward), float(credit.advantage), float(credit.baseline))
            by_turn = _JSON.encode(credit.turn_advantages).decode() if credit.turn_advantages else None
            yield (
                *row.version,
                position,
                unit.episode_id,
                unit.attempt,
                credit.seat,
                credit.index,
                *credit_fields,
                by_turn,
            )
            position += 1


def _finite(value: float) -> float | None:
    """Convert a value to one that SQLite can store: NULL for NaN and infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


def _binding(binding: SeatBinding) -> str:
    return str(binding.pin) if binding.pin is not None else binding.policy


# --- from rows --------------------------------------------------------------------------------------------------------


def decode_admission_row(row: Sequence[Any]) -> EpisodeSpec:
    """Read the spec from a row of `ADMISSION_COLUMNS` + checksum.

    Raises:
        JournalError: the row is damaged.
    """
    _verify("admissions", row)
    try:
        spec = _SPEC.decode(row[7])
        if b"held_by" in row[7]:
            wait = AdmissionWait.from_old_text(_OLD_SPEC.decode(row[7]).held_by)
            spec = replace(spec, waited=() if wait is None else (wait,))
        _JSON.encode(spec.task.data)  # nothing else checks data that an altered record holds
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"episode {row[0]}: its admission record cannot be read ({error}); the journal is damaged"
        ) from error
    key = (spec.episode_id, spec.attempt, spec.purpose)
    if (*key, spec.environment, spec.task.id, spec.parent_id, spec.group_id) != tuple(row[:7]):
        raise JournalError(
            f"episode {row[0]}: the columns of its admission record differ from its spec; it was altered"
        )
    return spec


def task_data(spec: bytes) -> str | None:
    """Return the task's data in an encoded spec as JSON, for SQL; None if it cannot be read."""
    try:
        return _JSON.encode(_SPEC.decode(spec).task.data).decode()
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        return None


def decode_episode_row(row: Sequence[Any], trajectories: Iterable[Sequence[Any]]) -> EpisodeHeader:
    """Read the header from a row of `EPISODE_COLUMNS` + checksum and its rows of `TRAJECTORY_COLUMNS` + checksum.

    Raises:
        JournalError: a row is damaged.
    """
    _verify("episodes", row)
    units = []
    for trajectory in trajectories:
        _verify("trajectories", trajectory)
        parts = _read_reward_parts(trajectory)
        units.append(TrajectoryHeader(*(*trajectory[2:9], *parts, _read_turn_states(trajectory))))
    return EpisodeHeader(
        episode_id=row[0],
        attempt=row[1],
        purpose=row[2],
        parent_id=row[5],
        group_id=row[6],
        stop_reason=row[12],
        drop_reason=row[13],
        turns=row[14],
        tokens=row[15],
        seconds=row[16],
        location=None if row[17] is None else EpisodeDataLocation(row[17], row[18]),
        trajectories=tuple(units),
        measured_against=_read_measured_against(row),
    )


def decode_baselines_row(row: Sequence[Any]) -> FrozenGroupBaselines:
    """Read the baseline set from a row of `baselines`.

    Raises:
        JournalError: the row is damaged.
    """
    _verify("baselines", row)
    try:
        return FrozenGroupBaselines(row[0], _FINISHERS.decode(row[1]), _EARLIER.decode(row[2]))
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"group {row[0]}: the baselines of its members cannot be read ({error}); the journal is damaged"
        ) from error


def decode_group_scores_row(row: Sequence[Any]) -> GroupScores:
    """Read the scores of a group from a row of `group_scores`.

    Raises:
        JournalError: the row is damaged.
    """
    _verify("group_scores", row)
    group_id, scorer, weight, members, note, spread, judged_by, tokens, requests, seconds, _ = row
    try:
        scores, judge = _MEMBER_SCORES.decode(members), _JUDGED_BY.decode(judged_by or "null")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"group {group_id}: the scores of {scorer} cannot be read ({error}); the journal is damaged"
        ) from error
    return GroupScores(group_id, scorer, weight, scores, note, spread, judge, tokens, requests, seconds)


def _read_measured_against(row: Sequence[Any]) -> tuple[PolicyVersion, ...]:
    if row[23] is None:
        return ()
    try:
        return _VERSIONS.decode(row[23])
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"episode {row[0]}: the versions it was measured against cannot be read ({error}); the journal is damaged"
        ) from error


def _read_reward_parts(
    trajectory: Sequence[Any],
) -> tuple[tuple[tuple[int, float], ...], tuple[tuple[str, float], ...]]:
    """Read the rewards of a trajectory by turn, and by name."""
    by_turn, by_name = trajectory[9:11]
    try:
        return (
            () if by_turn is None else _TURN_REWARDS.decode(by_turn),
            () if by_name is None else _NAMED_REWARDS.decode(by_name),
        )
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"episode {trajectory[0]}: the rewards of {trajectory[2]} by turn or name cannot be read ({error}); the "
            "journal is damaged"
        ) from error


def _read_turn_states(trajectory: Sequence[Any]) -> bytes:
    states = trajectory[11]
    if states is None:
        return b""
    if not isinstance(states, bytes) or len(states) % STATE_BYTES:
        raise JournalError(
            f"episode {trajectory[0]}: the states of {trajectory[2]} by turn cannot be read; the journal is damaged"
        )
    return states


CHECKED_TABLES = (
    "admissions",
    "episodes",
    "trajectories",
    "unit_drops",
    "proposals",
    "baselines",
    "group_scores",
    "versions",
    "steps",
    "step_units",
    "pruned",
    "pruned_files",
)
"""Tables whose rows end with a checksum over all their other columns."""
INDEXED_TABLES = ("step_units", "proposals")
"""Checked tables with an index; the index has no checksum."""


_STEPS_WITH_HOLES = (
    "SELECT s.policy, s.lineage, s.step FROM steps s LEFT JOIN step_units u"
    " ON u.policy = s.policy AND u.lineage = s.lineage AND u.step = s.step"
    " GROUP BY s.policy, s.lineage, s.step HAVING count(u.position) < s.fed"
)
"""Query for steps with fewer recorded units than `fed`, their number of trajectories, which may be 0 in a deterministic
run."""


UNRESOLVED_QUERY = (
    " NOT EXISTS (SELECT 1 FROM unit_drops d WHERE d.episode = t.episode AND d.attempt = t.attempt"
    " AND d.policy = t.policy) AND NOT EXISTS (SELECT 1 FROM step_units s JOIN line l ON l.policy = s.policy"
    " AND l.lineage = s.lineage AND s.step > l.first AND s.step <= l.last"
    " WHERE s.episode = t.episode AND s.attempt = t.attempt AND s.policy = t.policy)"
)
"""Condition on a unit, a row `t` of `trajectories`: neither dropped nor trained by a step of a `LINE`."""
LINE = (
    "line AS (SELECT json_extract(value, '$[0]') AS policy, json_extract(value, '$[1]') AS lineage,"
    " json_extract(value, '$[2]') AS first, json_extract(value, '$[3]') AS last FROM json_each(?))"
)
"""Steps `first < step <= last` of lineages of policies, from a parameter in JSON."""


def verify_tables(connection: sqlite3.Connection, path: Path) -> None:
    """Check every row of every checked table against its checksum, the structure of the file, and the indexes that a
    resume uses: a changed index entry would hide that a unit was trained.

    Raises:
        JournalError: a row or the file is damaged.
    """
    for check in ("quick_check(1)", *(f"integrity_check({table})" for table in INDEXED_TABLES)):
        problems = all_rows(connection, path, f"PRAGMA {check}")
        if problems != [("ok",)]:
            raise JournalError(f"{path}: {str(problems[0][0])[:200]}; the file is damaged, restore it from a copy")
    for table in CHECKED_TABLES:
        try:
            if not _all_hold(connection, table):
                for row in connection.execute(f"SELECT * FROM {table}"):
                    _verify(table, row, f"{path}: ")
        except DAMAGE as error:
            raise database_error(path, error) from error
    for policy, lineage, step in all_rows(connection, path, _STEPS_WITH_HOLES):
        raise JournalError(
            f"{path}: records of units that step {step} of {policy} (lineage {lineage}) trained on are missing, so "
            "they would be trained again; restore the file from a copy"
        )


def _all_hold(connection: sqlite3.Connection, table: str) -> bool:
    """Whether every row of a table matches its checksum; a fast check for millions of rows."""
    tolerant, connection.text_factory = connection.text_factory, str
    try:
        return all(is_intact(table, row) for row in connection.execute(f"SELECT * FROM {table}"))
    except DAMAGE:
        return False
    finally:
        connection.text_factory = tolerant


def _verify(table: str, row: Sequence[Any], location: str = "") -> None:
    if not is_intact(table, row):
        raise JournalError(
            f"{location}{str(row[0])[:100]!r}: a record in `{table}` does not match its checksum; it was altered or "
            "the disk damaged it; restore the file from a copy"
        )
