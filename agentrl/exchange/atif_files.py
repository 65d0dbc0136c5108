"""`--from atif`: trajectories of the Agent Trajectory Interchange Format, versions 1.0 to 1.8, a file or a directory.

A trajectory and those embedded in it are the agents of one episode. Where a prompt does not begin with the tokens that
went before, the agent's context was rewritten: a new row begins there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from agentrl.core.errors import InputError
from agentrl.exchange.bounded import decoded, directories, whole_file
from agentrl.exchange.messages import finite_numbers, text_of, with_observations
from agentrl.exchange.played import NOT_RECORDED, Call, PlayedAgent, PlayedEpisode, PlayedRow, Reply
from agentrl.journal.entries import Span

T = TypeVar("T")

VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
TRIAL = "trajectory.json"
"""Of each trial of a job, in a directory of its own."""
MAX_FILES = 1_000_000
MAX_INDEX = 10_000
_VERSION = re.compile(r"(.{1,200})@(-?\d{1,9})\.(-?\d{1,9})", re.DOTALL)


class _Agent(msgspec.Struct):
    name: str
    version: str = ""
    model_name: str | None = None
    extra: dict[str, Any] | None = None


class _Call(msgspec.Struct):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class _Result(msgspec.Struct):
    source_call_id: str | None = None
    content: Any = None
    extra: dict[str, Any] | None = None


class _Observation(msgspec.Struct):
    results: list[_Result]


class _Metrics(msgspec.Struct):
    cached_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class _Step(msgspec.Struct):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: Any
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class _Trajectory(msgspec.Struct):
    schema_version: str
    agent: _Agent
    steps: list[_Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[_Trajectory] | None = None


class _Task(msgspec.Struct):
    id: str = ""
    data: dict[str, Any] = {}


def read(source: Path) -> Iterator[PlayedEpisode]:
    """The episodes of a file, of a directory of files, or of the trials of a job.

    Raises:
        InputError: there is none, or a file is no trajectory.
    """
    tree = directories(source)
    if (top := next(tree, None)) is None:
        files = [source]
    else:
        files = [source / name for name in top[1] if name.endswith(".json")]
        files = files or [directory / TRIAL for directory, names in tree if TRIAL in names]
    if not files or len(files) > MAX_FILES:
        raise InputError(f"{source}: {len(files):,} files of trajectories are there")
    for file in files:
        where = str(file)
        trajectory = decoded(whole_file(file), _Trajectory, where)
        yield _episode(trajectory, where, file.stem)


def _episode(root: _Trajectory, where: str, stem: str) -> PlayedEpisode:
    extra = root.extra or {}
    name = root.trajectory_id or (stem if stem != "trajectory" else None) or root.session_id or stem
    agents: dict[tuple[str, int], PlayedAgent] = {}
    _collect(root, agents, where)
    for (seat, index), agent in agents.items():
        agent.rewards = _typed(_field(extra, "reward_parts", f"{seat}[{index}]"), list[tuple[int | None, float]], [])
    task = _typed(extra.get("task"), _Task, _Task())
    replies = [item for agent in agents.values() for row in agent.rows for item in row if isinstance(item, Reply)]
    times = [(reply.started, reply.started + reply.seconds) for reply in replies if reply.started]
    environment = _typed(extra.get("environment"), str, root.agent.name)
    return PlayedEpisode(
        name=name,
        where=where,
        source={
            "from": "atif",
            "where": where,
            "session": root.session_id,
            "agent": f"{root.agent.name} {root.agent.version}",
        },
        environment=environment,
        task_id=task.id,
        task=task.data,
        group=_typed(extra.get("group"), str, name),
        agents=list(agents.values()),
        stop_reason=_typed(extra.get("stop_reason"), str | None, None),
        drop_reason=_typed(extra.get("drop_reason"), str | None, None),
        detail=_typed(extra.get("detail"), str | None, None) or "",
        metrics=finite_numbers(_typed(extra.get("metrics"), dict[str, Any], {}), ""),
        started=min((start for start, _ in times), default=0.0),
        ended=max((end for _, end in times), default=0.0),
    )


def _typed(value: Any, kind: Any, otherwise: Any) -> Any:
    """A value of `extra`, which anybody writes as he likes: of the kind, or none."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError):
        return otherwise


def _field(extra: dict[str, Any], *names: str) -> Any:
    value: Any = extra
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _collect(trajectory: _Trajectory, agents: dict[tuple[str, int], PlayedAgent], where: str) -> None:
    """Its own agent, then those embedded in it."""
    if trajectory.schema_version not in VERSIONS:
        raise InputError(f"{where}: version {trajectory.schema_version[:40]!r}; read are 1.0 to 1.8")
    agent, extra = trajectory.agent, trajectory.agent.extra or {}
    if extra.get("is_program") is not True:
        told = extra.get("index")
        count = sum(seat == agent.name for seat, _ in agents)
        index = _typed(told, Annotated[int, msgspec.Meta(ge=0, lt=MAX_INDEX)], count)
        played = agents.setdefault(
            (agent.name, index),
            PlayedAgent(seat=agent.name, index=index, policy=agent.model_name or agent.name, rows=[], rewards=[]),
        )
        played.rows += [with_observations(row) for row in _rows(trajectory.steps, played.policy, where)]
    for part in trajectory.subagent_trajectories or ():
        _collect(part, agents, where)


def _rows(steps: Sequence[_Step], policy: str, where: str) -> list[PlayedRow]:
    rows: list[PlayedRow] = [[]]
    tokens: list[int] = []
    for number, step in enumerate(steps):
        if step.step_id != number + 1:
            raise InputError(f"{where}: step {number + 1} has the id {step.step_id}")
        here = f"{where}, step {step.step_id}"
        if step.source != "agent" or step.llm_call_count == 0:
            rows[-1].append(_message(step))
        else:
            prompt = None if step.metrics is None else step.metrics.prompt_token_ids
            if prompt is not None and prompt[: len(tokens)] != tokens:
                waiting = _waiting(rows[-1])
                rows[-1] = rows[-1][: len(rows[-1]) - len(waiting)]
                rows.append(waiting)
                tokens = []
            reply = _reply(step, policy, None if prompt is None else prompt[len(tokens) :], here)
            rows[-1].append(reply)
            tokens += [*(reply.context_ids or ()), *(reply.token_ids or ())]
        names = {call.tool_call_id: call.function_name for call in step.tool_calls or ()}
        for result in step.observation.results if step.observation is not None else ():
            if result.content is not None:
                rows[-1].append(_answer(result, names))
    return [row for row in rows if row]


def _waiting(row: PlayedRow) -> PlayedRow:
    """The messages after the last reply."""
    last = max((place for place, item in enumerate(row) if isinstance(item, Reply)), default=-1)
    return row[last + 1 :]


def _message(step: _Step) -> dict[str, Any]:
    extra = step.extra or {}
    roles = {"agent": "assistant"}
    message: dict[str, Any] = {"role": roles.get(step.source, step.source), "content": text_of(step.message)}
    if extra.get("role") in ("system", "user", "assistant", "tool"):
        message["role"] = extra["role"]
    message |= {name: extra[name] for name in ("name", "tool_call_id") if isinstance(extra.get(name), str)}
    if isinstance(extra.get("tool_calls"), list):
        message["tool_calls"] = extra["tool_calls"]
    elif step.tool_calls:
        message["tool_calls"] = [
            {"id": call.tool_call_id, "name": call.function_name, "arguments": call.arguments}
            for call in step.tool_calls
        ]
    return message


def _answer(result: _Result, names: dict[str, str]) -> dict[str, Any]:
    extra = result.extra or {}
    message: dict[str, Any] = {"role": "tool", "content": text_of(result.content)}
    if result.source_call_id is not None:
        message["tool_call_id"] = result.source_call_id
        if result.source_call_id in names:
            message["name"] = names[result.source_call_id]
    return message | {name: extra[name] for name in ("name", "tool_call_id") if isinstance(extra.get(name), str)}


def _reply(step: _Step, policy: str, context: list[int] | None, where: str) -> Reply:
    metrics = step.metrics or _Metrics()
    extra = metrics.extra or {}
    ids = metrics.completion_token_ids
    logprobs = metrics.logprobs if ids is not None and len(metrics.logprobs or ()) == len(ids) else None
    spans, whose = _spans(extra.get("versions"), len(ids or ()))
    return Reply(
        text=text_of(step.message),
        reasoning=step.reasoning_content or "",
        calls=[_call(call, step.observation) for call in step.tool_calls or ()],
        context_ids=context if ids is not None else None,
        token_ids=ids,
        logprobs=logprobs,
        spans=spans,
        weights_of=whose if whose != policy else "",
        finish_reason=_typed(extra.get("finish_reason"), str, ""),
        temperature=_typed(extra.get("temperature"), float | None, None),
        started=_seconds(step.timestamp, where),
        seconds=_typed(extra.get("seconds"), float, 0.0),
        cached_tokens=min(max(metrics.cached_tokens or 0, 0), 2**31),
    )


def _call(call: _Call, observation: _Observation | None) -> Call:
    results = [] if observation is None else observation.results
    answer = next((result for result in results if result.source_call_id == call.tool_call_id), _Result())
    extra = answer.extra or {}
    told = (call.extra or {}).get("arguments")
    return Call(
        id=call.tool_call_id,
        name=call.function_name,
        arguments=call.arguments if told is None else told,
        observation=text_of(answer.content),
        outcome=_typed(extra.get("outcome"), str, NOT_RECORDED),
        seconds=_typed(extra.get("seconds"), float, 0.0),
    )


def _spans(told: Any, tokens: int) -> tuple[list[Span], str]:
    """Which weights sampled a turn's tokens, as our exports write it, and whose they are; none where it is not told."""
    spans, whose = [], set()
    for start, stop, version in _typed(told, list[tuple[int, int, str]], []):
        found = _VERSION.fullmatch(version)
        if found is None or not 0 <= start < stop <= tokens:
            return [], ""
        spans.append(Span(start, stop, int(found[2]), int(found[3])))
        whose.add(found[1])
    return (spans, whose.pop()) if len(whose) == 1 else ([], "")


def _seconds(timestamp: str | None, where: str) -> float:
    if timestamp is None:
        return 0.0
    try:
        return max(datetime.fromisoformat(timestamp).timestamp(), 0.0)
    except (ValueError, OverflowError, OSError) as error:
        raise InputError(f"{where}: {timestamp[:40]!r} is no time of ISO 8601") from error
