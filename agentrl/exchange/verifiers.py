"""`--from verifiers`: episodes of `traces.jsonl` (verifiers 0.2 and later), and rollouts of `results.jsonl` (before).

A trace is a graph of messages. Each path from a root to a leaf becomes a row; a message that the policy sampled in an
earlier row is part of the prompt in a later one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.core.errors import InputError
from agentrl.exchange.files import decode_json, json_lines, walk_directories
from agentrl.exchange.imported_episodes import (
    UNKNOWN,
    ImportedAgent,
    ImportedEpisode,
    ImportedReply,
    MessageRow,
    decode_imported_message,
    decode_imported_tool_call,
    finite_numbers,
    flatten_message_text,
    with_observations,
)
from agentrl.journal.entries import TurnVersionSpan

FILES = ("traces.jsonl", "results.jsonl")
"""File names looked for in a directory of verifiers, in this order."""
MAX_REPEATED = 32_000_000
"""Maximum number of characters and tokens of all branches of a trace, each counted in full."""
_STOPS = {
    "max_turns": "max_turns",
    **dict.fromkeys(("max_input_tokens", "max_output_tokens", "max_total_tokens"), "context_length"),
}
"""Stop reasons by those of verifiers; others are kept."""


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Node(msgspec.Struct):
    message: _Message
    parent: int | None = None
    sampled: bool = False
    timestamp: float = 0.0
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float | None] = []


class _Span(msgspec.Struct):
    start: float = 0.0
    end: float = 0.0


class _Sampling(msgspec.Struct):
    temperature: float | None = None


class _ModelCall(msgspec.Struct):
    node: int | None = None
    model: str | None = None
    finish_reason: str | None = None
    sampling: _Sampling | None = None
    time: _Span = msgspec.field(default_factory=_Span)


class _Reward(msgspec.Struct):
    score: float
    weight: float = 1.0


class _Error(msgspec.Struct):
    type: str = "error"
    message: str = ""


class _Agent(msgspec.Struct):
    name: str = "agent"


class _Task(msgspec.Struct):
    type: str = ""
    data: dict[str, Any] = {}
    key: str | None = None
    hash: str | None = None


class _Timing(msgspec.Struct):
    start: float = 0.0
    finalize: _Span = msgspec.field(default_factory=_Span)
    scoring: _Span = msgspec.field(default_factory=_Span)
    agent: _Span = msgspec.field(default_factory=_Span)


class _Trace(msgspec.Struct):
    id: str = ""
    task: _Task = msgspec.field(default_factory=_Task)
    agent: _Agent = msgspec.field(default_factory=_Agent)
    nodes: list[_Node] = []
    calls: list[_ModelCall] = []
    rewards: dict[str, _Reward | None] = {}
    metrics: dict[str, float | None] = {}
    ok: bool = False
    stop_condition: str | None = None
    errors: list[_Error] = []
    timing: _Timing = msgspec.field(default_factory=_Timing)


class _Environment(msgspec.Struct):
    id: str = ""
    name: str | None = None


class _Group(msgspec.Struct):
    id: str


class _Policy(msgspec.Struct):
    start: int
    end: int


class _Work(msgspec.Struct):
    policy: _Policy | None = None


class _Run(msgspec.Struct):
    id: str = ""
    work: _Work | None = None


class _TraceEpisode(msgspec.Struct):
    traces: list[_Trace]
    id: str = ""
    env: _Environment = msgspec.field(default_factory=_Environment)
    task: _Task = msgspec.field(default_factory=_Task)
    group: _Group | None = None
    run: _Run | None = None
    ok: bool = False
    errors: list[_Error] = []


class _Rollout(msgspec.Struct):
    """Line of `results.jsonl`."""

    prompt: list[_Message] | str
    completion: list[_Message] | str
    example_id: int | str | None = None
    task: str = ""
    env_id: str = ""
    reward: float | None = None
    metrics: dict[str, float | None] = {}
    info: Any = None
    answer: Any = None
    stop_condition: str | None = None
    error: Any = None


class _Shape(msgspec.Struct):
    """Fields that distinguish the kinds of lines."""

    traces: msgspec.Raw = msgspec.Raw()
    nodes: msgspec.Raw = msgspec.Raw()
    completion: msgspec.Raw = msgspec.Raw()


def read(source: Path) -> Iterator[ImportedEpisode]:
    """Yield the episodes of a file, or of the directory of a run.

    Raises:
        InputError: the file does not exist, or a line of it is no episode.
    """
    if (top := next(walk_directories(source), None)) is not None:
        found = [source / name for name in FILES if name in top[1]]
        if not found:
            raise InputError(f"{source}: contains neither {' nor '.join(FILES)}")
        source = found[0]
    for where, line in json_lines(source):
        shape = decode_json(line, _Shape, where)
        if bytes(shape.traces):
            yield _episode(decode_json(line, _TraceEpisode, where), where)
        elif bytes(shape.nodes):
            trace = decode_json(line, _Trace, where)
            alone = _TraceEpisode(traces=[trace], id=trace.id, task=trace.task, ok=trace.ok, errors=trace.errors)
            yield _episode(alone, where)
        elif bytes(shape.completion):
            yield _rollout(decode_json(line, _Rollout, where), where)
        else:
            raise InputError(f"{where}: neither an episode, nor a trace, nor a rollout of verifiers (no `traces`)")


def _episode(told: _TraceEpisode, where: str) -> ImportedEpisode:
    if not told.id:
        raise InputError(f"{where}: the episode has no id")
    policy = told.run.work.policy if told.run is not None and told.run.work is not None else None
    agents: list[ImportedAgent] = []
    metrics: dict[str, float] = {}
    counts: dict[str, int] = {}
    several = len(told.traces) > 1
    for trace in told.traces:
        seat = trace.agent.name
        index = counts[seat] = counts.get(seat, -1) + 1
        agents.append(_agent(trace, index, policy, where))
        prefix = f"{seat}[{index}]/" if several else ""
        metrics |= finite_numbers(trace.metrics, prefix)
        values = {name: reward.score * reward.weight for name, reward in trace.rewards.items() if reward is not None}
        metrics |= finite_numbers(values, f"{prefix}reward/")
    errors = told.errors or [error for trace in told.traces for error in trace.errors]
    stops = list(dict.fromkeys(trace.stop_condition for trace in told.traces if trace.stop_condition))
    starts = [trace.timing.start for trace in told.traces if trace.timing.start]
    failed = errors[-1] if errors and not told.ok else None
    return ImportedEpisode(
        name=told.id,
        where=where,
        source={"from": "verifiers", "where": where, "run": told.run.id if told.run is not None else None},
        environment=told.env.name or told.env.id or "verifiers",
        task_id=str(told.task.key or told.task.hash or told.task.data.get("idx", "")),
        task=told.task.data,
        group=told.group.id if told.group is not None else told.id,
        agents=agents,
        stop_reason=None if failed else _STOPS.get(stops[-1], stops[-1]) if stops else None,
        drop_reason=failed.type if failed else None,
        detail=failed.message if failed else "",
        metrics=metrics,
        started=min(starts, default=0.0),
        ended=max((_end(trace) for trace in told.traces), default=0.0),
        oldest_step=policy.start if policy is not None else UNKNOWN,
    )


def _end(trace: _Trace) -> float:
    timing = trace.timing
    said = [call.time.end for call in trace.calls]
    return max(timing.agent.end, timing.finalize.end, timing.scoring.end, *said)


def _agent(trace: _Trace, index: int, policy: _Policy | None, where: str) -> ImportedAgent:
    calls = {call.node: call for call in trace.calls if call.node is not None}
    models = [call.model for call in trace.calls if call.model]
    same = policy.start if policy is not None and policy.start == policy.end else None
    rewards = [reward.score * reward.weight for reward in trace.rewards.values() if reward is not None]
    return ImportedAgent(
        seat=trace.agent.name,
        index=index,
        policy=models[-1] if models else trace.agent.name,
        rows=[with_observations(row) for row in _rows(trace, calls, same, where)],
        rewards=[(None, value) for value in finite_numbers(dict(enumerate(rewards)), "").values()],
    )


def _rows(trace: _Trace, calls: dict[int, _ModelCall], step: int | None, where: str) -> Iterator[MessageRow]:
    """Yield a row for each leaf; messages that were sampled in an earlier row are part of the prompt in later ones."""
    nodes = trace.nodes
    parents = [node.parent for node in nodes]
    for number, parent in enumerate(parents):
        if parent is not None and not 0 <= parent < number:
            raise InputError(f"{where}: message {number} of a trace follows message {parent}, which is not before it")
    _check_repetition(trace, where)
    has_tokens = all(len(node.mask) == len(node.token_ids) and _is_suffix(node.mask) for node in nodes)
    has_tokens = has_tokens and any(node.token_ids for node in nodes if node.sampled)
    said: set[int] = set()
    for leaf in sorted(set(range(len(nodes))) - set(parents)):
        path, at = [leaf], parents[leaf]
        while at is not None:
            path.append(at)
            at = parents[at]
        yield _row(trace, path[::-1], said, calls, step, has_tokens)
        said.update(path)


def _check_repetition(trace: _Trace, where: str) -> None:
    """Refuse a graph whose paths, each written in full, are much longer than the graph."""
    sizes: list[int] = []
    for node in trace.nodes:
        size = 16 + len(node.token_ids) + len(json.dumps(msgspec.structs.astuple(node.message)))
        sizes.append(size + (sizes[node.parent] if node.parent is not None else 0))
    leaves = set(range(len(sizes))) - {node.parent for node in trace.nodes}
    total = sum(sizes[leaf] for leaf in leaves)
    if total > MAX_REPEATED:
        raise InputError(f"{where}: the {len(leaves):,} branches of a trace come to {total:,} characters and tokens")


def _is_suffix(mask: list[bool]) -> bool:
    """Whether the sampled tokens come last."""
    sampled = sum(mask)
    return not sampled or all(mask[-sampled:])


def _row(
    trace: _Trace,
    path: Sequence[int],
    said: set[int],
    calls: dict[int, _ModelCall],
    step: int | None,
    has_tokens: bool,
) -> MessageRow:
    row: MessageRow = []
    context: list[int] = []
    for number in path:
        node = trace.nodes[number]
        if not node.sampled or number in said:
            row.append(decode_imported_message(node.message))
            context += node.token_ids
            continue
        sampled = sum(node.mask)
        ids = node.token_ids[len(node.token_ids) - sampled :] if has_tokens else None
        context += node.token_ids[: len(node.token_ids) - sampled]
        row.append(_reply(node, calls.get(number, _ModelCall()), context if has_tokens else None, ids, step))
        context = []
    return row


def _reply(
    node: _Node, call: _ModelCall, context: list[int] | None, ids: list[int] | None, step: int | None
) -> ImportedReply:
    logprobs = [value for value in node.logprobs if value is not None]
    return ImportedReply(
        text=flatten_message_text(node.message.content),
        reasoning=node.message.reasoning_content or "",
        calls=[decode_imported_tool_call(each) for each in node.message.tool_calls or ()],
        context_ids=context,
        token_ids=ids,
        logprobs=logprobs if ids is not None and len(logprobs) == len(ids) else None,
        spans=[TurnVersionSpan(0, len(ids), 0, step)] if ids and step is not None else (),
        finish_reason=call.finish_reason or "",
        temperature=call.sampling.temperature if call.sampling is not None else None,
        started=call.time.start or node.timestamp,
        seconds=max(call.time.end - call.time.start, 0.0) if call.time.end else 0.0,
    )


def _rollout(told: _Rollout, where: str) -> ImportedEpisode:
    """Convert a line of `results.jsonl`: messages and a reward, without tokens and times."""
    number = where.rpartition(" ")[2]
    row: MessageRow = [
        decode_imported_message(message)
        for message in ([_Message("user", told.prompt)] if isinstance(told.prompt, str) else told.prompt)
    ]
    said = [_Message("assistant", told.completion)] if isinstance(told.completion, str) else told.completion
    for message in said:
        if message.role == "assistant":
            calls = [decode_imported_tool_call(each) for each in message.tool_calls or ()]
            text, reasoning = flatten_message_text(message.content), message.reasoning_content or ""
            row.append(ImportedReply(text=text, reasoning=reasoning, calls=calls))
        else:
            row.append(decode_imported_message(message))
    task = f"{told.task or 'task'}-{told.example_id if told.example_id is not None else number}"
    agent = ImportedAgent(
        seat="agent",
        index=0,
        policy="agent",
        rows=[with_observations(row)],
        rewards=[] if told.reward is None else [(None, told.reward)],
    )
    return ImportedEpisode(
        name=f"r{number}",
        where=where,
        source={"from": "verifiers", "where": where},
        environment=told.env_id or told.task or "verifiers",
        task_id=task,
        task={"answer": told.answer, "info": told.info},
        group=task,
        agents=[agent],
        stop_reason=_STOPS.get(told.stop_condition, told.stop_condition) if told.stop_condition else None,
        drop_reason="error" if told.error else None,
        detail=flatten_message_text(told.error) if told.error else "",
        metrics=finite_numbers(told.metrics, ""),
    )
