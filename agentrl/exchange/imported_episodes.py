"""Episodes of other tools: their messages, their agents, and the journal entries made of them.

Absent data is left out and listed in an entry `imported`; nothing is invented. A turn without token ids keeps its
text; an episode without times gets none.
"""

from __future__ import annotations

import json
import math
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from agentrl.core.errors import InputError
from agentrl.core.records import EpisodeDataLocation, EpisodeHeader, EpisodeSpec, SeatBinding, Task, TrajectoryHeader
from agentrl.exchange.files import MAX_INT, check_storable
from agentrl.journal.entries import (
    BeginEntry,
    EntryBody,
    JournalEntry,
    NondeterministicValueEntry,
    RewardEntry,
    ToolEntry,
    TurnEntry,
    TurnVersionSpan,
    encode_body,
)

UNKNOWN = -1
"""Step and lineage of unknown weights."""
NOT_RECORDED = "not_recorded"
"""Outcome of a tool call that is known only by its observation."""


class ImportedToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """Tool call of a policy."""

    id: str
    name: str
    arguments: Any
    observation: str = ""
    outcome: str = NOT_RECORDED
    seconds: float = 0.0


class ImportedReply(msgspec.Struct, frozen=True, kw_only=True):
    """Reply of a policy."""

    text: str
    reasoning: str = ""
    calls: Sequence[ImportedToolCall] = ()
    context_ids: Sequence[int] | None = None
    """Context tokens before the reply that are new in its row; None if unknown."""
    token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    spans: Sequence[TurnVersionSpan] = ()
    weights_of: str = ""
    finish_reason: str = ""
    temperature: float | None = None
    started: float = 0.0
    """Start in seconds since the epoch; 0 if unknown."""
    seconds: float = 0.0
    cached_tokens: int = 0


MessageRow = list[dict[str, Any] | ImportedReply]
"""Messages and replies of one conversation, in order."""


class ImportedAgent(msgspec.Struct, kw_only=True):
    """Agent of an episode of another tool."""

    seat: str
    index: int
    policy: str
    rows: list[MessageRow]
    rewards: list[tuple[int | None, float]]
    """Pairs (turn, value) for each component; turn is None for the whole episode."""


class ImportedEpisode(msgspec.Struct, kw_only=True):
    """Episode of another tool, as an import reads it."""

    name: str
    where: str
    """File and line of the episode."""
    source: dict[str, Any]
    """Information about the episode's origin, shown to readers."""
    environment: str
    task_id: str
    task: dict[str, Any]
    group: str
    agents: list[ImportedAgent]
    stop_reason: str | None = None
    drop_reason: str | None = None
    detail: str = ""
    metrics: dict[str, float]
    started: float = 0.0
    ended: float = 0.0
    oldest_step: int = UNKNOWN
    """Step of the weights that played the episode, if the file names one for the whole episode."""


def make_episode_spec(played: ImportedEpisode) -> EpisodeSpec:
    """Return the spec of an episode."""
    return EpisodeSpec(
        episode_id=played.name,
        environment=played.environment,
        task=Task(id=played.task_id, data=played.task),
        seed=0,
        seats={agent.seat: SeatBinding(agent.policy) for agent in played.agents},
        group_id=played.group,
        purpose="import",
    )


def make_journal_entries(played: ImportedEpisode) -> list[JournalEntry]:
    """Return the entries of an episode: agents are interleaved by time if all times are known, else one follows the
    other."""
    seats = {agent.seat: agent.policy for agent in played.agents}
    begin = BeginEntry(
        played.environment, "", played.task_id, played.task, 0, seats, "import", played.group, 1, None
    )  # fmt: skip
    blocks = [block for agent in played.agents for block in _blocks(agent, played.where)]
    if all(started > 0.0 for started, _ in blocks):
        blocks.sort(key=lambda block: block[0])
    bodies: list[EntryBody] = [
        NondeterministicValueEntry("imported", {**played.source, "not_told": missing_data(played)})
    ]
    bodies += [body for _, block in blocks for body in block]
    for agent in played.agents:
        bodies += [RewardEntry(agent.seat, agent.index, value, turn) for turn, value in agent.rewards]
    calls = [("begin", begin), *((f"r#{number}", body) for number, body in enumerate(bodies))]
    return [JournalEntry(played.name, 0, call, b"", encode_body(body)) for call, body in calls]


def build_episode_header(played: ImportedEpisode, partition: str, entries: int) -> EpisodeHeader:
    """Return the header of an episode."""
    replies = {id(agent): list(_replies(agent)) for agent in played.agents}
    tokens = {key: sum(len(reply.token_ids or ()) for reply in said) for key, said in replies.items()}
    return EpisodeHeader(
        episode_id=played.name,
        group_id=played.group,
        attempt=0,
        purpose="import",
        parent_id=None,
        stop_reason=played.stop_reason,  # type: ignore[arg-type]  # in the words of who wrote it
        drop_reason=played.drop_reason,
        turns=sum(map(len, replies.values())),
        tokens=sum(tokens.values()),
        seconds=max(played.ended - played.started, 0.0) if played.started else 0.0,
        trajectories=tuple(
            TrajectoryHeader(
                agent.seat,
                agent.index,
                agent.policy,
                math.fsum(value for _, value in agent.rewards) if agent.rewards else None,
                tokens[id(agent)],
                *_oldest(replies[id(agent)], played.oldest_step),
                tuple((turn, value) for turn, value in agent.rewards if turn is not None),
            )
            for agent in played.agents
        ),
        location=EpisodeDataLocation(partition, entries),
    )


def missing_data(played: ImportedEpisode) -> list[str]:
    """Return the kinds of data that the file lacks for the episode."""
    replies = all_policy_replies(played)
    lacks = {
        "token ids": any(reply.token_ids is None for reply in replies),
        "prompt token ids": any(reply.token_ids is not None and reply.context_ids is None for reply in replies),
        "log-probabilities": any(reply.logprobs is None for reply in replies),
        "versions": any(not reply.spans for reply in replies),
        "temperature": any(reply.temperature is None for reply in replies),
        "times": any(not reply.started for reply in replies),
    }
    return [what for what, is_missing in lacks.items() if is_missing]


def all_policy_replies(played: ImportedEpisode) -> list[ImportedReply]:
    """Return the replies of all policies of an episode, agent by agent."""
    return [reply for agent in played.agents for reply in _replies(agent)]


def _replies(agent: ImportedAgent) -> Iterator[ImportedReply]:
    return (item for row in agent.rows for item in row if isinstance(item, ImportedReply))


def _oldest(replies: Iterable[ImportedReply], otherwise: int) -> tuple[int, int]:
    """Return the step and lineage of the oldest weights."""
    spans = [(span.lineage, span.step) for reply in replies for span in reply.spans]
    if not spans:
        return otherwise, UNKNOWN if otherwise == UNKNOWN else 0
    lineage, step = min(spans)
    return step, lineage


def _blocks(agent: ImportedAgent, where: str) -> Iterator[tuple[float, list[EntryBody]]]:
    """Yield the start time and the entries of each turn; messages after the last turn form a block without a turn."""
    turn = 0
    for number, row in enumerate(agent.rows):
        messages: list[dict[str, Any]] = []
        length = 0
        started = 0.0
        for item in row:
            if not isinstance(item, ImportedReply):
                messages.append(item)
                continue
            entry = _turn(agent, number, turn, tuple(messages), item, length, where)
            block: list[EntryBody] = [entry]
            if item.reasoning:
                block.append(NondeterministicValueEntry("reasoning", item.reasoning))
            block += [
                ToolEntry(call.name, call.arguments, call.observation, call.outcome, True, call.seconds)
                for call in item.calls
            ]
            yield item.started, block
            started = item.started
            turn += 1
            length += (len(entry.context_ids) + len(entry.token_ids)) // 4
            messages = []
        if messages:
            yield started, [NondeterministicValueEntry("message", message) for message in messages]


def _turn(
    agent: ImportedAgent,
    row: int,
    turn: int,
    messages: tuple[dict[str, Any], ...],
    reply: ImportedReply,
    length: int,
    where: str,
) -> TurnEntry:
    return TurnEntry(
        seat=agent.seat,
        index=agent.index,
        policy=agent.policy,
        row=row,
        turn=turn,
        context_ids=_column("i", reply.context_ids or (), where),
        token_ids=_column("i", reply.token_ids or (), where),
        logprobs=_column("f", reply.logprobs or (), where),
        finish_reason=reply.finish_reason,
        spans=tuple(reply.spans),
        text=reply.text,
        messages=messages,
        temperature=1.0 if reply.temperature is None else reply.temperature,
        seconds=reply.seconds,
        started=reply.started,
        cached_tokens=reply.cached_tokens,
        parent_context=length,
        weights_of=reply.weights_of,
    )


def _column(code: str, values: Sequence[float], where: str) -> bytes:
    """Encode token ids (`i`) or log-probabilities (`f`) as entries store them."""
    try:
        column = array(code, values)
    except OverflowError as error:
        raise InputError(f"{where}: a token id has more than 32 bits") from error
    if code == "f" and not all(map(math.isfinite, column)):
        raise InputError(f"{where}: a log-probability is not a 32-bit number")
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


class _ForeignMessage(Protocol):
    role: str
    content: Any
    tool_calls: list[Any] | None
    tool_call_id: str | None
    name: str | None


def decode_imported_message(message: _ForeignMessage) -> dict[str, Any]:
    """Return a message without empty fields."""
    told: dict[str, Any] = {"role": message.role, "content": flatten_message_text(message.content)}
    if message.tool_calls:
        calls = [decode_imported_tool_call(call) for call in message.tool_calls]
        told["tool_calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in calls]
    others = {"tool_call_id": message.tool_call_id, "name": message.name}
    return told | {name: value for name, value in others.items() if value is not None}


def flatten_message_text(content: Any) -> str:
    """Return the text of a message. A part other than text is replaced by its type, any other content by its JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return json.dumps(content)
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if not isinstance(part, dict):
        return part if isinstance(part, str) else json.dumps(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type', 'a part')} is not shown]"


def decode_imported_tool_call(call: Any) -> ImportedToolCall:
    """Decode a tool call from any of the forms in use: `{name, arguments}` or `{function: {name, arguments}}`, or
    either as JSON text."""
    value = _parsed(call) if isinstance(call, str) else call
    value = value if isinstance(value, dict) else {"name": "?", "arguments": call}
    function = value.get("function")
    inner = function if isinstance(function, dict) else value
    arguments = inner.get("arguments")
    parsed = _parsed(arguments) if isinstance(arguments, str) else arguments
    return ImportedToolCall(
        id=str(value.get("id") or ""),
        name=str(inner.get("name", "?")),
        arguments=parsed if isinstance(parsed, dict) else arguments,
    )


def _parsed(text: str) -> Any:
    try:
        return check_storable(msgspec.json.decode(text), "")
    except (ValueError, RecursionError, InputError):  # keep it as the model wrote it
        return None


def with_observations(row: MessageRow) -> MessageRow:
    """Return the row with the observation of each call, taken from the message that answers it."""
    answered: MessageRow = []
    for place, item in enumerate(row):
        if isinstance(item, ImportedReply) and item.calls:
            answers = []
            for following in row[place + 1 :]:
                if isinstance(following, ImportedReply) or following["role"] != "tool":
                    break
                answers.append(following)
            item = msgspec.structs.replace(item, calls=_answered(item.calls, answers))
            if place + 1 + len(answers) == len(row) and len(answers) <= len(item.calls):
                return [*answered, item]  # the item has no message of its own: the calls contain it
        answered.append(item)
    return answered


def _answered(calls: Any, answers: list[dict[str, Any]]) -> list[ImportedToolCall]:
    """Match answers to calls by id, or by order if there are no ids."""
    by_id = {answer.get("tool_call_id"): answer for answer in answers}
    found = []
    for place, call in enumerate(calls):
        answer = by_id.get(call.id) if call.id else answers[place] if place < len(answers) else None
        found.append(call if answer is None else msgspec.structs.replace(call, observation=answer["content"]))
    return found


def finite_numbers(values: Mapping[Any, Any], prefix: str) -> dict[str, float]:
    """Return the finite numbers among named values."""
    return {
        f"{prefix}{name}": float(value)
        for name, value in values.items()
        if (isinstance(value, float) and math.isfinite(value)) or (isinstance(value, int) and abs(value) < MAX_INT)
    }
