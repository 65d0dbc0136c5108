"""The viewer's questions about a run, by name, which the query layer answers as JSON.

A question is a name with text parameters. The server answers one at a time; an exported file contains the answers. An
episode is identified by its id, `forks/ID` for a fork of the run, and optionally an attempt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from agentrl.core.errors import InputError
from agentrl.core.records import ProcessStatus
from agentrl.inspection.comparisons import fork_tree, locate_episode
from agentrl.inspection.conversation import build_conversation, read_conversation
from agentrl.inspection.overview import metric_entry, metric_series, run_overview
from agentrl.inspection.reader import COLUMNS, EPISODES, STATUS, EpisodeLine, RunReader
from agentrl.inspection.reasons import explain_conversation, explain_episode
from agentrl.inspection.search import episodes_with_words
from agentrl.inspection.steps import evaluation_list, step_list, step_view
from agentrl.inspection.tokens import (
    EpisodeToken,
    EpisodeTokens,
    ReadStep,
    TokenRow,
    episode_tokens,
    read_step_rows,
    tokens_from_view,
)
from agentrl.observe.run_state import read_run_snapshot

Parameters = Mapping[str, str]

EXACT = 2**53
"""Smallest integer that is inexact in JavaScript; integers from here on are sent as text."""
_UNCHANGED = {str, bool, type(None)}
"""Types whose values JavaScript reads exactly."""
_NUMBERS = {int, float, bool, type(None)}
_FLOAT_COLUMNS = {field.name for field in msgspec.structs.fields(EpisodeToken) if field.type == float | None}


class EpisodeListPage(msgspec.Struct, frozen=True):
    """A page of the list of episodes."""

    total: int
    lines: list[EpisodeLine]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The run's summary at the head of the page."""

    name: str
    path: str
    purpose: str
    columns: dict[str, str]
    """Columns of episodes, with their types: text or number. `reward` or `reward/SEAT`, as in `rewards`."""
    rewards: list[str]
    """Columns of rewards, as `RunReader.reward_columns` returns them."""
    episodes: int
    """Number of episodes; restarted attempts count separately."""
    processes: list[ProcessStatus]
    """Other processes of the run, while it runs."""
    bottleneck: str
    """Bottleneck of the run, for people."""


class RunProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a run, which the page polls."""

    ended: bool
    """Whether the run has ended, according to its records."""
    state: str
    """State of the run, as `RunReader.standing` returns it."""
    newest: float | None
    """Time of the last write; it changes with every write."""


def answer_viewer_query(reader: RunReader, question: str, parameters: Parameters) -> bytes:
    """Answer a question, as JSON.

    Raises:
        InputError: there is no such question, or a parameter is missing or wrong.
        JournalError: the run cannot be read.
    """
    ask = QUESTIONS.get(question)
    if ask is None:
        raise InputError(f"unknown question {question!r}; there are: {', '.join(QUESTIONS)}")
    return as_json(ask(reader, parameters))


def as_json(value: Any) -> bytes:
    """Encode a value as JSON that JavaScript reads exactly; numbers that are not finite become null."""
    plain = _exact(msgspec.to_builtins(value, builtin_types=(bytes,)))
    try:
        return msgspec.json.encode(plain)
    except UnicodeEncodeError:  # a lone surrogate: JavaScript accepts it, and the page shows it as an escape
        return json.dumps(plain).encode()


def run_summary(reader: RunReader, episodes: int) -> RunSummary:
    """Make the run's summary, with the given number of episodes."""
    info = reader.info()
    status = read_run_snapshot(reader.path) if reader.standing() == "running" else None
    rewards = reader.reward_columns()
    return RunSummary(
        name=name if isinstance(name := info.get("name"), str) else reader.path.name,
        path=str(reader.path),
        purpose=reader.purpose(),
        columns={
            each: column.kind for name, column in COLUMNS.items() for each in (rewards if name == "reward" else (name,))
        },
        rewards=rewards,
        episodes=episodes,
        processes=[] if status is None else list(status.processes),
        bottleneck="" if status is None else status.bottleneck,
    )


def tokens_in_columns(row: TokenRow) -> dict[str, Any]:
    """Convert a row of tokens to a list per field, without fields that are unknown throughout."""
    columns: dict[str, Sequence[Any]] = {}
    values_by_field = zip(*map(msgspec.structs.astuple, row.tokens), strict=True)
    for name, values in zip(EpisodeToken.__struct_fields__, values_by_field, strict=bool(row.tokens)):
        if name != "position" and values.count(None) < len(values):
            is_float = name in _FLOAT_COLUMNS
            columns[name] = [value and round(value, 6) for value in values] if is_float else values
    row_fields = {name: getattr(row, name) for name in row.__struct_fields__ if name != "tokens"}
    return {**row_fields, "count": len(row.tokens), "columns": columns}


def answer_episode_queries(
    reader: RunReader, parameters: Parameters, read: ReadStep = read_step_rows
) -> dict[str, Any]:
    """Answer all questions about one episode, which is read once; `read` reads a step's file."""
    with _open_episode(reader, parameters) as (where, episode, attempt):
        view = where.episode(episode, attempt)
        conversation = build_conversation(where, view)
        return {
            "conversation": conversation,
            "tokens": _token_columns(tokens_from_view(where, view, read)),
            "reasons": explain_conversation(where, conversation),
        }


# --- the questions ----------------------------------------------------------------------------------------------------


def _statuses(reader: RunReader, parameters: Parameters) -> dict[str, int]:
    """Count episodes by status; restarted attempts count separately."""
    rows = reader.log.rows(f"SELECT {STATUS} AS status, count(*){EPISODES} GROUP BY status")
    return {str(status): count for status, count in rows}


def _pulse(reader: RunReader, parameters: Parameters) -> RunProgress:
    state = reader.standing()
    span = reader.log.span()
    return RunProgress(ended=state != "running", state=state, newest=0.0 if span is None else span[1])


def _episodes(reader: RunReader, parameters: Parameters) -> EpisodeListPage:
    where, words = parameters.get("where", ""), parameters.get("match", "")
    among = episodes_with_words(reader, words) if words.strip() else None
    lines = reader.episodes(
        where,
        sort=parameters.get("sort") or "admitted_at",
        training_first=not parameters.get("sort"),
        descending=not parameters.get("ascending"),
        limit=min(_number(parameters, "limit", 100), 1_000),
        offset=_number(parameters, "offset", 0),
        among=among,
    )
    return EpisodeListPage(reader.count(where, among=among), lines)


def _conversation(reader: RunReader, parameters: Parameters) -> Any:
    with _open_episode(reader, parameters) as (where, episode, attempt):
        return read_conversation(where, episode, attempt)


def _tokens(reader: RunReader, parameters: Parameters) -> Any:
    with _open_episode(reader, parameters) as (where, episode, attempt):
        return _token_columns(episode_tokens(where, episode, attempt))


def _token_columns(tokens: EpisodeTokens) -> dict[str, Any]:
    return {"rows": [tokens_in_columns(row) for row in tokens.rows], "problems": tokens.problems}


def _reasons(reader: RunReader, parameters: Parameters) -> Any:
    with _open_episode(reader, parameters) as (where, episode, attempt):
        return explain_episode(where, episode, attempt)


def _step(reader: RunReader, parameters: Parameters) -> Any:
    lineage = _number(parameters, "lineage", -1)
    return step_view(reader, _number(parameters, "step"), parameters.get("policy"), None if lineage < 0 else lineage)


def _series(reader: RunReader, parameters: Parameters) -> Any:
    name = parameters.get("metric", "")
    return metric_series(reader, [name])[name]


QUESTIONS: Mapping[str, Callable[[RunReader, Parameters], Any]] = {
    "run": lambda reader, _: run_summary(reader, reader.count()),
    "statuses": _statuses,
    "overview": lambda reader, _: run_overview(reader),
    "metrics": lambda reader, _: [metric_entry(name) for name in reader.metric_names()],
    "series": _series,
    "pulse": _pulse,
    "episodes": _episodes,
    "conversation": _conversation,
    "tokens": _tokens,
    "reasons": _reasons,
    "forks": lambda reader, _: fork_tree(reader),
    "evaluations": lambda reader, _: evaluation_list(reader),
    "steps": lambda reader, _: step_list(reader),
    "step": _step,
}


@contextmanager
def _open_episode(reader: RunReader, parameters: Parameters) -> Iterator[tuple[RunReader, str, int | None]]:
    """Return the reader of the run or of its forks, the episode's id there, and the attempt."""
    attempt = _number(parameters, "attempt", -1)
    with locate_episode(reader, parameters.get("episode", "")) as (where, episode):
        yield where, episode, None if attempt < 0 else attempt


def _number(parameters: Parameters, name: str, otherwise: int | None = None) -> int:
    text = parameters.get(name, "" if otherwise is None else str(otherwise))
    try:
        number = int(text)
    except ValueError as error:
        raise InputError(f"{name} must be a number, not {text[:100]!r}") from error
    if not -1 <= number < EXACT:
        raise InputError(f"{name} must be 0 or more, not {number}")
    return number


def _exact(value: Any) -> Any:
    kind = type(value)
    if kind is dict:
        return {
            key if type(key) is str else str(key): item if type(item) in _UNCHANGED else _exact(item)
            for key, item in value.items()
        }
    if kind is list or kind is tuple:
        kinds = set(map(type, value))
        if kinds <= _UNCHANGED:
            return value
        if kinds <= _NUMBERS and sum(map(abs, filter(None, value))) < EXACT:
            return value  # such as a column of tokens: no number is above the sum
        return [_exact(item) for item in value]
    if kind is bytes:
        return value.hex()
    if kind is int:
        return value if -EXACT < value < EXACT else str(value)
    return None if kind is float and not math.isfinite(value) else value
