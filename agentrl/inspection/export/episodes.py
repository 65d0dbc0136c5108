"""Exports episodes as plain records with all data needed to train on them: `--to jsonl` and `--to parquet`.

Rows are whole token sequences. Unknown values are null or empty lists, never invented. Expert routing is not exported.
Each line of JSON holds one `ExportedEpisode`.

The Parquet table has one line per token row, with its agent and its episode; it is written in batches. Its columns are
the fields of `ExportedRow`, `ExportedAgent` and `ExportedEpisode`; the episode's reward is `episode_reward`; task,
metrics, acts and other fields without a fixed shape are JSON; `recorded` is a map. An agent or an episode without rows
has one line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import JournalError
from agentrl.core.tokens import Tokens
from agentrl.inspection.conversation import Act, ConversationView, PolicyTurn, RewardAct, build_conversation
from agentrl.inspection.reader import verified_control_rows
from agentrl.inspection.tokens import (
    assemble_token_rows,
    newest_step_token_values,
    read_step_rows,
    recorded_columns,
)

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.inspection.export.exporting import ExportSelection
    from agentrl.inspection.reader import EpisodeView, RunReader
    from agentrl.inspection.tokens import AssembledTokenRow, ReadStep, StepTokenValues


_EPISODE = (
    *("run", "episode", "attempt", "status", "purpose", "environment", "task_id", "group", "parent"),
    *("stop_reason", "drop_reason", "detail", "turns", "tokens", "seconds", "admitted_at", "committed_at"),
    *("measured_against", "problems"),
)
_JSON = ("task", "seats", "metrics", "acts")
_AGENT = ("seat", "index", "policy", "reward", "reward_parts", "credits")


class RewardPart(msgspec.Struct, frozen=True):
    """Component of an agent's reward."""

    turn: int | None
    """Turn of the component; None if it is for the episode."""
    value: float
    name: str
    weight: float


class AgentStepCredit(msgspec.Struct, frozen=True):
    """Reward and advantage of an agent in an optimizer step."""

    step: str
    """Version that the step made."""
    reward: float | None
    baseline: float | None
    advantage: float | None
    turn_advantages: list[tuple[int, float]]
    """Advantages by turn, if turns differ; the last one holds for all later turns."""


class ExportedRow(msgspec.Struct, frozen=True, kw_only=True):
    """Token sequence with its messages. Lists of tokens have the length of `token_ids`."""

    row: int
    messages: list[dict[str, Any]]
    """Replies have `turn`, and content and calls as the environment read them."""
    temperature: float
    """Temperature of the first turn."""
    token_ids: list[int]
    loss_mask: list[int]
    """1 where the policy sampled the token in this episode; 0 also in turns that a fork or branch inherited."""
    logprobs: list[float | None]
    """Log-probabilities under the processed distribution, as the engine recorded them; 0 where the mask is 0."""
    turn_index: list[int]
    """Index of the turn that sampled each token; -1 where the mask is 0."""
    versions: list[tuple[int, int, str]]
    """Spans (start, stop, version): the version that sampled the tokens from start to stop."""
    kept_counts: list[int]
    """Number of tokens that filters or a grammar kept at each position; 0: all, -1: not trained, since the
    distribution is not recorded, a penalty applied, or the temperature was 0; -1 - n: all but n. Empty if there was
    neither."""
    kept_ids: list[int]
    """Ids of the kept tokens, or of those not kept, one set after another."""
    temperatures: list[float]
    """Temperature at which each token was sampled, 1 where the mask is 0; 0: the likeliest token was taken. Empty if
    all turns have the first one's."""
    trained_in: str | None
    """Version made by the newest step that trained on the row and kept its columns; None if there is none."""
    advantages: list[float | None]
    trainer_logprobs: list[float | None]
    lags: list[int | None]
    """Staleness of each token at that step. This list and the two before it are empty if no step is known."""
    recorded: dict[str, list[float | None]]
    """Further columns that the engine recorded, by name; null where a token has none."""


class ExportedAgent(msgspec.Struct, frozen=True, kw_only=True):
    """Agent of an episode."""

    seat: str
    index: int
    policy: str
    reward: float | None
    reward_parts: list[RewardPart]
    credits: list[AgentStepCredit]
    """Credits, one for each step that consumed the row, in order; more than one only after a rollback."""
    rows: list[ExportedRow]


class ExportedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt at an episode."""

    format: str = "agentrl-episode-0"
    run: str
    episode: str
    attempt: int
    status: str
    purpose: str
    environment: str
    task_id: str
    task: Any
    group: str
    parent: str | None
    seats: dict[str, str]
    stop_reason: str | None
    drop_reason: str | None
    detail: str | None
    reward: float | None
    turns: int | None
    tokens: int | None
    seconds: float | None
    admitted_at: float
    committed_at: float | None
    measured_against: list[str]
    metrics: dict[str, float | None]
    agents: list[ExportedAgent]
    acts: list[Act]
    """Acts besides turns and rewards, in order: tool calls, effects, children, values."""
    problems: list[str]


def exported_episodes(selection: ExportSelection) -> Iterator[ExportedEpisode]:
    """Yield the episodes of a selection; unreadable data is added to the selection's problems."""
    reader = selection.reader
    # Neighboring episodes were mostly trained in neighboring steps, so a few steps' columns are cached.
    read = lru_cache(4)(read_step_rows)
    for episode, attempt in selection.reported(selection.keys):
        try:
            episode_record = read_episode(reader, reader.episode(episode, attempt), read)
        except JournalError as error:
            selection.leave_out(episode, str(error))
            continue
        selection.problems.extend(f"{episode}: {problem}" for problem in episode_record.problems)
        yield episode_record


def read_episode(reader: RunReader, view: EpisodeView, read: ReadStep) -> ExportedEpisode:
    """Return an episode with its whole content; `read` reads a step's file."""
    conversation = build_conversation(reader, view)
    problems = list(conversation.problems)
    replies = {
        (act.seat, act.index, act.turn): act.message() for act in conversation.acts if isinstance(act, PolicyTurn)
    }
    rows: dict[tuple[str, int], list[ExportedRow]] = {}
    for token_row in assemble_token_rows(view, problems):
        row = _row(token_row, newest_step_token_values(reader, view, token_row, problems, read), replies)
        rows.setdefault((token_row.seat, token_row.index), []).append(row)
    run = str(reader.info().get("run", ""))
    return _episode(run, conversation, _agents(reader, conversation, rows, problems), problems)


def _episode(run: str, view: ConversationView, agents: list[ExportedAgent], problems: list[str]) -> ExportedEpisode:
    line = view.summary
    shared_fields = {
        name: getattr(line, name) for name in line.__struct_fields__ if name in ExportedEpisode.__struct_fields__
    }
    fields = {
        "run": run,
        "task_id": line.task,
        "task": view.task,
        "measured_against": view.measured_against,
        "metrics": view.metrics,
        "agents": agents,
        "acts": [act for act in view.acts if not isinstance(act, PolicyTurn | RewardAct)],
        "problems": problems,
    }
    return ExportedEpisode(**{**shared_fields, **fields})


def _agents(
    reader: RunReader, view: ConversationView, rows: dict[tuple[str, int], list[ExportedRow]], problems: list[str]
) -> list[ExportedAgent]:
    """Return every agent that acted or was rewarded, in order of seat and index."""
    parts: dict[tuple[str, int], list[RewardPart]] = {}
    for act in view.acts:
        if isinstance(act, RewardAct):
            parts.setdefault((act.seat, act.index), []).append(RewardPart(act.turn, act.value, act.name, act.weight))
    lines = {(agent.seat, agent.index): agent for agent in view.agents}
    policy_by_agent = {(act.seat, act.index): act.policy for act in view.acts if isinstance(act, PolicyTurn)}
    credits = _credits(reader, view, problems)
    agents = []
    for key in sorted({*lines, *policy_by_agent, *parts}):
        line, components = lines.get(key), parts.get(key, [])
        agents.append(
            ExportedAgent(
                seat=key[0],
                index=key[1],
                policy=line.policy
                if line is not None
                else policy_by_agent.get(key) or view.summary.seats.get(key[0], ""),
                reward=line.reward
                if line is not None
                else sum(part.value * part.weight for part in components)
                if components
                else None,
                reward_parts=components,
                credits=credits.get(key, []),
                rows=rows.get(key, []),
            )
        )
    return agents


def _credits(
    reader: RunReader, view: ConversationView, problems: list[str]
) -> dict[tuple[str, int], list[AgentStepCredit]]:
    line = view.summary
    unit_rows = verified_control_rows(
        *(reader.log, "step_units", "episode = ? AND attempt = ? ORDER BY lineage, step, position"),
        *(line.episode, line.attempt),
        problems=problems,
    )
    credits: dict[tuple[str, int], list[AgentStepCredit]] = {}
    for row in unit_rows:
        step = f"{row['policy']}@{row['lineage']}.{row['step']}"
        turns = list(enumerate(decode_json_list(row["turn_advantages"], problems)))
        try:
            credit = msgspec.convert({**row, "step": step, "turn_advantages": turns}, AgentStepCredit)
        except msgspec.ValidationError as error:
            problems.append(f"what step {step} made of it cannot be read ({error})")
            continue
        credits.setdefault((row["seat"], row["agent"]), []).append(credit)
    return credits


def _row(
    token_row: AssembledTokenRow,
    step_values: StepTokenValues | None,
    replies: Mapping[tuple[str, int, int], dict[str, Any]],
) -> ExportedRow:
    """Return a row; turns that a fork inherited are context, as in the trainer's rows."""
    is_own = [turn.turn >= token_row.first for turn in token_row.turns]
    tables = [
        (context, sampled if own else Tokens.context(sampled.token_ids))
        for own, (context, sampled) in zip(is_own, token_row.tables, strict=True)
    ]
    token_row = msgspec.structs.replace(token_row, tables=tables)
    messages: list[dict[str, Any]] = []
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    turn_index: list[int] = []
    versions: list[tuple[int, int, str]] = []
    counts: list[int] = []
    kept_ids: list[int] = []
    temperatures: list[float] = []
    for turn, own, (context, sampled) in zip(token_row.turns, is_own, tables, strict=True):
        messages += [*turn.messages, replies[turn.seat, turn.index, turn.turn] | {"turn": turn.turn}]
        before, many = len(context), len(sampled)
        start = len(ids) + before
        ids += [*context.token_ids.tolist(), *sampled.token_ids.tolist()]
        mask += [0] * before + [int(own)] * many
        logprobs += [0.0] * before + sampled.logprobs.tolist()
        turn_index += [-1] * before + [turn.turn if own else -1] * many
        temperatures += [1.0] * before + [turn.temperature if own else 1.0] * many
        counts += [0] * before + ([0] * many if sampled.kept is None else sampled.kept.counts.tolist())
        kept_ids += [] if sampled.kept is None else sampled.kept.ids.tolist()
        versions += [(start + span.start, start + span.stop, str(span.version)) for span in sampled.spans]
    is_filtered = any(sampled.kept is not None for _, sampled in tables)
    return ExportedRow(
        row=token_row.row,
        messages=messages,
        temperature=token_row.turns[0].temperature,
        token_ids=ids,
        loss_mask=mask,
        logprobs=null_if_not_finite(logprobs),
        turn_index=turn_index,
        versions=versions,
        kept_counts=counts if is_filtered else [],
        kept_ids=kept_ids,
        temperatures=temperatures if len({turn.temperature for turn in token_row.turns}) > 1 else [],
        trained_in=None if step_values is None else step_values.step,
        recorded=recorded_columns(token_row),
        **_training(step_values, len(ids)),
    )


def _training(step_values: StepTokenValues | None, length: int) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"advantages": [], "trainer_logprobs": [], "lags": []}
    if step_values is None:
        return columns
    places = [(position, token) for position, token in step_values.places.items() if 0 <= position < length]
    for name, values in (
        ("advantages", null_if_not_finite(token["advantages"] for _, token in places)),
        ("trainer_logprobs", null_if_not_finite(token["trainer_logprobs"] for _, token in places)),
        ("lags", [token["lag"] for _, token in places]),
    ):
        columns[name] = [None] * length
        for (position, _), value in zip(places, values, strict=True):
            columns[name][position] = value
    return columns


def null_if_not_finite(values: Iterable[float]) -> list[float | None]:
    """Return numbers for JSON: null for values that are not finite."""
    return [value if math.isfinite(value) else None for value in values]


def decode_json_list(text: Any, problems: list[str]) -> list[Any]:
    """Decode a column of JSON that holds a list; empty if it does not."""
    try:
        value = [] if text is None else msgspec.json.decode(text)
    except (msgspec.MsgspecError, TypeError, ValueError, RecursionError):
        problems.append("the advantages of its turns cannot be read")
        return []
    return value if isinstance(value, list) else []


def write_json_lines(selection: ExportSelection, path: Path) -> None:
    """Write the episodes of a selection as lines of JSON."""
    with path.open("xb") as file:
        for episode in exported_episodes(selection):
            file.write(encode_json(episode) + b"\n")


def encode_json(value: Any) -> bytes:
    """Encode a journaled value as JSON, with null for numbers that JSON lacks."""
    try:
        return msgspec.json.encode(value)
    except (TypeError, UnicodeEncodeError):  # rare: keys that are not text, or lone surrogates
        return msgspec.json.encode(_plain(msgspec.to_builtins(value)))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(str(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


def write_parquet_table(selection: ExportSelection, path: Path) -> None:
    """Write the Parquet table of a selection."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    schema = parquet_table_schema()
    batches: list[pa.RecordBatch] = []
    size = 0
    with ParquetWriter(path, schema, compression="zstd") as writer:
        for episode in exported_episodes(selection):
            try:
                batches.append(pa.RecordBatch.from_pylist(parquet_table_rows(episode), schema))
                size += batches[-1].nbytes
            except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                selection.leave_out(episode.episode, f"the table has no place for it ({error})")
            if size > 16 << 20:
                writer.write_table(pa.Table.from_batches(batches, schema))
                batches.clear()
                size = 0
        writer.write_table(pa.Table.from_batches(batches, schema))


def parquet_table_rows(episode: ExportedEpisode) -> list[dict[str, Any]]:
    """Return the lines of the table for an episode."""
    record = {name: getattr(episode, name) for name in _EPISODE}
    record |= {name: encode_json(getattr(episode, name)).decode() for name in _JSON}
    record["episode_reward"] = episode.reward
    lines: list[dict[str, Any]] = []
    for agent in episode.agents:
        of_agent = record | {name: msgspec.to_builtins(getattr(agent, name)) for name in _AGENT}
        for credit in of_agent["credits"]:
            credit["turn_advantages"] = [{"turn": turn, "value": value} for turn, value in credit["turn_advantages"]]
        for row in agent.rows:
            line = of_agent | {name: getattr(row, name) for name in row.__struct_fields__}
            line["recorded"] = list(row.recorded.items())
            line["messages"] = [_message(message) for message in row.messages]
            line["versions"] = [dict(zip(("start", "stop", "version"), span, strict=True)) for span in row.versions]
            lines.append(line)
        if not agent.rows:
            lines.append(of_agent)
    return lines or [record]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the fields of the table; calls and content other than text become JSON."""
    texts = {name: message.get(name) for name in ("role", "content", "name", "tool_call_id")}
    line: dict[str, Any] = {
        name: value if isinstance(value, str | None) else encode_json(value).decode() for name, value in texts.items()
    }
    line["tool_calls"] = encode_json(message["tool_calls"]).decode() if "tool_calls" in message else None
    line["turn"] = turn if isinstance(turn := message.get("turn"), int) else None
    return line


def parquet_table_schema() -> Any:
    """Return the schema of the table."""
    import pyarrow as pa

    text, integer, number = pa.string(), pa.int64(), pa.float64()
    part = pa.struct({"turn": integer, "value": number})
    reward_part = pa.struct({"turn": integer, "value": number, "name": text, "weight": number})
    credit = {
        "step": text,
        "reward": number,
        "baseline": number,
        "advantage": number,
        "turn_advantages": pa.list_(part),
    }
    message = {"role": text, "content": text, "name": text, "tool_call_id": text, "tool_calls": text, "turn": integer}
    version = {"start": integer, "stop": integer, "version": text}
    columns = dict.fromkeys(("run", "episode"), text) | {"attempt": integer}
    columns |= dict.fromkeys(("status", "purpose", "environment", "task_id", "task", "group", "parent", "seats"), text)
    columns |= dict.fromkeys(("stop_reason", "drop_reason", "detail"), text) | {"episode_reward": number}
    columns |= {"turns": integer, "tokens": integer} | dict.fromkeys(("seconds", "admitted_at", "committed_at"), number)
    columns |= {"measured_against": pa.list_(text), "metrics": text, "acts": text, "problems": pa.list_(text)}
    columns |= {"seat": text, "index": integer, "policy": text, "reward": number, "reward_parts": pa.list_(reward_part)}
    columns |= {"credits": pa.list_(pa.struct(credit)), "row": integer, "messages": pa.list_(pa.struct(message))}
    columns |= {"temperature": number, "token_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.int8())}
    columns |= {"logprobs": pa.list_(pa.float32()), "turn_index": pa.list_(integer)}
    columns |= {"versions": pa.list_(pa.struct(version)), "kept_counts": pa.list_(pa.int32())}
    columns |= {"kept_ids": pa.list_(pa.int32()), "temperatures": pa.list_(number)}
    columns |= {"trained_in": text, "advantages": pa.list_(pa.float32())}
    columns |= {"trainer_logprobs": pa.list_(pa.float32()), "lags": pa.list_(pa.int32())}
    columns |= {"recorded": pa.map_(text, pa.list_(number))}
    return pa.schema(columns)
