"""Conversion between records and rows of the control log, at admission, commit, publication and step.

Query columns are written once, at commit, and never updated: the fate of a unit is in `step_units` and `unit_drops`.
"""

from __future__ import annotations

import functools
import math
import sqlite3
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.ports import PolicyCounts
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
    UNNUMBERED,
    Admission,
    AttemptPruning,
    EpisodeEnd,
    EvaluationBegun,
    EvaluationEnded,
    FilePruning,
    MetricRow,
    Repinning,
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
_SPEC_FIELDS = ("seed", "seats", "group_size", "pins", "fork", "deadline", "waited")
"""Fields of an `EpisodeSpec` that have no column of their own, in the order in which `admissions.spec` lists them."""
_SPEC = msgspec.msgpack.Decoder(list[Any])

_JSON = msgspec.json.Encoder()
_TASK_DATA = msgspec.json.Decoder(dict[str, Any])
_FINISHERS = msgspec.json.Decoder(tuple[str, ...])
_EARLIER = msgspec.json.Decoder(tuple[RoleMeanAtAdmission, ...])
_MEMBER_SCORES = msgspec.json.Decoder(tuple[MemberScore, ...])
_VERSIONS = msgspec.json.Decoder(tuple[PolicyVersion, ...])
_VERSIONS_BY_POLICY = msgspec.json.Decoder(dict[str, PolicyVersion])
_TURN_REWARDS = msgspec.json.Decoder(tuple[tuple[int, float], ...])
_METRICS = msgspec.json.Decoder(dict[str, float | None])
_COUNTS = msgspec.json.Decoder(dict[str, PolicyCounts] | None)
_NAMED_REWARDS = msgspec.json.Decoder(tuple[tuple[str, float], ...])


def row_checksum(table: str, values: Sequence[Any]) -> int:
    """Compute the CRC-32 of a control row: its table and all its other columns."""
    return zlib.crc32(_ENCODER.encode(values), _seed(table))


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
    return (*row, zlib.crc32(data, _seed(table)))


@functools.cache
def _seed(table: str) -> int:
    return zlib.crc32(table.encode())


ADMISSION_COLUMNS = "episode attempt purpose environment task data parent group_id spec admitted_at seq"
EPISODE_COLUMNS = (
    "episode attempt purpose environment task parent group_id seats policies oldest_step lineage reward stop_reason "
    "drop_reason turns tokens seconds partition entries digest metrics detail committed_at measured_against counts seq"
)
TRAJECTORY_COLUMNS = (
    "episode attempt seat agent policy reward tokens oldest_step lineage turn_rewards named_rewards turn_states"
)

COLUMNS = {
    "meta": "key value",
    "admissions": ADMISSION_COLUMNS,
    "episodes": EPISODE_COLUMNS,
    "trajectories": TRAJECTORY_COLUMNS,
    "unit_drops": "episode attempt policy reason dropped_at seq",
    "evaluations": "first began_lineage versions tasks seq",
    "evaluation_ends": "first seq",
    "proposals": "number episode attempt call environment key structure seq",
    "baselines": "group_id finishers earlier seq",
    "group_scores": "group_id scorer weight scores note seconds seq",
    "versions": "policy lineage step parent_lineage parent_step path kind sha256 published_at seq",
    "steps": (
        "policy lineage step started_lineage started_step loss grad_norm fed samples tokens seconds normaliser"
        " input_digest columns_file metrics stepped_at seq"
    ),
    "step_units": ("policy lineage step position episode attempt seat agent reward advantage baseline turn_advantages"),
    "pruned": "episode attempt rule pruned_at",
    "pruned_files": "file rule pruned_at",
    "metrics": "policy step name value recorded_at",
}
"""Columns of each table that are written, except the checksum."""
NUMBERED_TABLES = [table for table, columns in COLUMNS.items() if columns.endswith(" seq")]
"""Tables whose rows are numbered in the order of the log."""

IGNORED_KEY = "ignored."
"""Key prefix in `meta` of the numbers of rows that were not written, because a row with their key was there."""

Row = tuple[str, Sequence[Any]]
"""A table, and a row of its columns."""


# --- to rows ----------------------------------------------------------------------------------------------------------


def encode_records(
    records: Iterable[ControlRecord], seq: int, now: float, learners: Collection[str] | None
) -> tuple[list[Row], int]:
    """Return the rows of records with their tables, and the number of the next record.

    Args:
        records: records of the control log.
        seq: number of the next record in the log.
        now: time label of the rows.
        learners: see `learning_policies`.
    """
    rows: list[Row] = []
    for record in records:
        rows += _encode_record(record, seq, now, learners)
        seq += not isinstance(record, UNNUMBERED)
    return rows, seq


def _encode_record(  # noqa: C901, PLR0912 (one case per record)
    record: ControlRecord, seq: int, now: float, learners: Collection[str] | None
) -> Iterable[Row]:
    match record:
        case Admission():
            yield "admissions", encode_admission_row(record.spec, now, seq)
        case Repinning():
            yield "admissions", encode_admission_row(record.spec, record.admitted_at, record.seq)
        case EpisodeEnd():
            yield "episodes", encode_episode_row(record, now, seq, learners)
            for trajectory in encode_trajectory_rows(record.header):
                yield "trajectories", trajectory
        case EvaluationBegun():
            versions = _JSON.encode(record.versions).decode()
            yield "evaluations", (record.first, record.lineage, versions, record.tasks, seq)
        case EvaluationEnded():
            yield "evaluation_ends", (record.first, seq)
        case UnitDropped():
            yield "unit_drops", (record.episode_id, record.attempt, record.policy, record.reason, now, seq)
        case Proposal():
            yield "proposals", (*record, seq)
        case FrozenGroupBaselines():
            yield "baselines", (*encode_baselines_row(record), seq)
        case GroupScores():
            yield "group_scores", (*encode_group_scores_row(record), seq)
        case VersionPublication():
            yield "versions", (*encode_version_row(record.weights, record.parent, now), seq)
        case StepRow():
            yield "steps", (*encode_step_row(record, now), seq)
            for unit in encode_step_unit_rows(record):
                yield "step_units", unit
        case MetricRow():
            for name, value in record.values.items():
                yield "metrics", (record.policy, record.step, name, _finite(value), now)
        case AttemptPruning():
            yield "pruned", (record.episode_id, record.attempt, record.rule, now)
        case FilePruning():
            yield "pruned_files", (record.file, record.rule, now)


def encode_admission_row(spec: EpisodeSpec, now: float, seq: int = 0) -> Sequence[Any]:
    """Return the `ADMISSION_COLUMNS` of a spec."""
    key = (spec.episode_id, spec.attempt, spec.purpose, spec.environment, spec.task.id)
    others = _ENCODER.encode([getattr(spec, name) for name in _SPEC_FIELDS])
    return (*key, _JSON.encode(spec.task.data).decode(), spec.parent_id, spec.group_id, others, float(now), seq)


def learning_policies(info: Mapping[str, Any]) -> Collection[str] | None:
    """Return the policies that learn by a journal's `info`: none in an evaluation; None if `info` does not tell."""
    if "evaluated" in info:
        return ()
    config = info.get("config")
    policies = config.get("policies") if isinstance(config, dict) else None
    if not isinstance(policies, dict):
        return None
    return {name for name, one in policies.items() if isinstance(one, dict) and one.get("kind") == "trained"}


def encode_episode_row(end: EpisodeEnd, now: float, seq: int, learners: Collection[str] | None) -> Sequence[Any]:
    """Return the `EPISODE_COLUMNS` of a finished episode, with `detail` shortened.

    `oldest_step` and `lineage` belong to the oldest weights of the policies in `learners`: frozen weights do not age.
    """
    spec, header = end.spec, end.header
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
        end.digest,
        _JSON.encode(end.metrics).decode(),
        shorten_lines(end.detail, 4000),  # such as a traceback of some twenty calls
        float(now),
        _JSON.encode(header.measured_against).decode() if header.measured_against else None,
        None if end.distinct_counts is None else _JSON.encode(end.distinct_counts).decode(),
        seq,
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
    group_id, scorer, weight, members, note, seconds = scores
    weight = None if weight is None else float(weight)
    return group_id, scorer, weight, _JSON.encode(members).decode(), note, float(seconds)


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
    verify_row("admissions", row)
    episode_id, attempt, purpose, environment, task, data, parent, group_id, others, *_ = row
    try:
        fields: dict[str, Any] = dict(zip(_SPEC_FIELDS, _SPEC.decode(others), strict=False))
        fields |= {"episode_id": episode_id, "attempt": attempt, "purpose": purpose, "environment": environment}
        fields |= {"task": {"id": task, "data": _TASK_DATA.decode(data)}, "parent_id": parent, "group_id": group_id}
        return msgspec.convert(fields, EpisodeSpec)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"episode {row[0]}: its admission record cannot be read ({error}); the journal is damaged"
        ) from error


def decode_episode_row(row: Sequence[Any], trajectories: Iterable[Sequence[Any]]) -> EpisodeHeader:
    """Read the header from a row of `EPISODE_COLUMNS` + checksum and its rows of `TRAJECTORY_COLUMNS` + checksum.

    Raises:
        JournalError: a row is damaged.
    """
    verify_row("episodes", row)
    units = []
    for trajectory in trajectories:
        verify_row("trajectories", trajectory)
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


def decode_end_row(spec: EpisodeSpec, row: Sequence[Any], trajectories: Iterable[Sequence[Any]]) -> EpisodeEnd:
    """Read the end of an episode from the rows of `decode_episode_row`.

    Raises:
        JournalError: a row is damaged.
    """
    header = decode_episode_row(row, trajectories)
    try:
        metrics = {name: value for name, value in _METRICS.decode(row[20]).items() if value is not None}
        counts = _COUNTS.decode(row[24] or "null")
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(f"episode {row[0]}: its metrics cannot be read ({error}); the journal is damaged") from error
    return EpisodeEnd(spec=spec, header=header, digest=row[19], metrics=metrics, detail=row[21], counts=counts)


def decode_evaluation_row(row: Sequence[Any]) -> EvaluationBegun:
    """Read the beginning of an evaluation from a row of `evaluations`.

    Raises:
        JournalError: the row is damaged.
    """
    verify_row("evaluations", row)
    try:
        versions = _VERSIONS_BY_POLICY.decode(row[2])
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(f"the evaluation that began with v{row[0]} cannot be read ({error})") from error
    return EvaluationBegun(first=row[0], lineage=row[1], versions=versions, tasks=row[3])


def decode_version_row(row: Sequence[Any]) -> VersionPublication:
    """Read a published version from a row of `versions`.

    Raises:
        JournalError: the row is damaged.
    """
    verify_row("versions", row)
    policy, lineage, step, parent_lineage, parent_step, path, kind, sha256, *_ = row
    parent = None if parent_lineage is None else PolicyVersion(policy, parent_lineage, parent_step)
    weights = WeightsRef(version=PolicyVersion(policy, lineage, step), path=path, kind=kind, sha256=sha256)
    return VersionPublication(weights, parent)


def decode_drop_row(row: Sequence[Any]) -> UnitDropped:
    """Read a row of `unit_drops`.

    Raises:
        JournalError: the row is damaged.
    """
    verify_row("unit_drops", row)
    return UnitDropped(*row[:4])


def decode_proposal_row(row: Sequence[Any]) -> Proposal:
    """Read a row of `proposals`.

    Raises:
        JournalError: the row is damaged.
    """
    verify_row("proposals", row)
    return Proposal(*row[:7])


def decode_baselines_row(row: Sequence[Any]) -> FrozenGroupBaselines:
    """Read the baseline set from a row of `baselines`.

    Raises:
        JournalError: the row is damaged.
    """
    verify_row("baselines", row)
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
    verify_row("group_scores", row)
    group_id, scorer, weight, members, note, seconds, *_ = row
    try:
        scores = _MEMBER_SCORES.decode(members)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError) as error:
        raise JournalError(
            f"group {group_id}: the scores of {scorer} cannot be read ({error}); the journal is damaged"
        ) from error
    return GroupScores(group_id, scorer, weight, scores, note, seconds)


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


CHECKED_TABLES = tuple(table for table in COLUMNS if table not in ("meta", "metrics"))
"""Tables whose rows end with a checksum over all their other columns."""
HISTORY_TABLES = ("admissions", "episodes", "trajectories", "unit_drops", "proposals", "group_scores", "versions")
"""Checked tables of which `RunLog.history` consists."""
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


def verify_tables(connection: sqlite3.Connection, path: Path, tables: Iterable[str]) -> None:
    """Check every row of some checked tables against its checksum, the structure of the file, and the indexes that a
    resume uses: a changed index entry would hide that a unit was trained.

    Raises:
        JournalError: a row or the file is damaged.
    """
    for check in ("quick_check(1)", *(f"integrity_check({table})" for table in INDEXED_TABLES)):
        problems = all_rows(connection, path, f"PRAGMA {check}")
        if problems != [("ok",)]:
            raise JournalError(f"{path}: {str(problems[0][0])[:200]}; the file is damaged, restore it from a copy")
    for table in tables:
        try:
            if not _all_hold(connection, table):
                for row in connection.execute(f"SELECT * FROM {table}"):
                    verify_row(table, row, f"{path}: ")
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


def verify_row(table: str, row: Sequence[Any], location: str = "") -> None:
    """Check a row against its checksum.

    Raises:
        JournalError: the row is damaged.
    """
    if not is_intact(table, row):
        raise JournalError(
            f"{location}{str(row[0])[:100]!r}: a record in `{table}` does not match its checksum; it was altered or "
            "the disk damaged it; restore the file from a copy"
        )
