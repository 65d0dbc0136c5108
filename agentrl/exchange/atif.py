"""The Agent Trajectory Interchange Format: `--to atif` writes version 1.8, `--from atif` reads 1.0 to 1.8.

An export is a directory with one trajectory per episode. An episode of one agent whose context was never rewritten
is written as that agent's trajectory. Any other episode refers to one embedded trajectory for each row of each agent.
Child episodes are separate files that their parents refer to. Tool results stand with the turn that called the tool,
as the format requires. Data without a field in the format is in `extra`: versions, finish reasons, sizes of masks,
rewards, other acts.

An import reads a file or a directory. A trajectory and the trajectories embedded in it are the agents of one episode.
Where a prompt does not begin with the preceding tokens, the agent's context was rewritten, and a new row begins.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar
from urllib.parse import quote

import msgspec

from agentrl.core.errors import InputError, JournalError
from agentrl.exchange.episodes import encode_json
from agentrl.exchange.files import decode_json, read_whole_file, walk_directories
from agentrl.exchange.imported_episodes import (
    NOT_RECORDED,
    ImportedAgent,
    ImportedEpisode,
    ImportedReply,
    ImportedToolCall,
    MessageRow,
    finite_numbers,
    flatten_message_text,
    with_observations,
)
from agentrl.inspection.conversation import (
    ConversationView,
    PolicyTurn,
    RewardAct,
    SpawnAct,
    ToolAct,
    build_conversation,
    reward_components,
)
from agentrl.inspection.tokens import assemble_token_rows, decode_float32, decode_int32
from agentrl.journal.entries import TurnVersionSpan

if TYPE_CHECKING:
    from agentrl.exchange.exporting import ExportSelection
    from agentrl.inspection.reader import EpisodeView
    from agentrl.inspection.tokens import AssembledTokenRow
    from agentrl.journal.entries import TurnEntry

VERSION = "ATIF-v1.8"
MAX_PROMPT_IDS = 4_000_000
"""Maximum number of prompt tokens of an episode; the format repeats the whole context at each turn. Longer episodes are
written without prompts, and the file says so."""
MAX_NAME = 180
_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}
T = TypeVar("T")
VERSIONS = tuple(f"ATIF-v1.{minor}" for minor in range(9))
TRIAL = "trajectory.json"
"""File name of a trial; a job has one directory per trial."""
MAX_FILES = 1_000_000
MAX_INDEX = 10_000
_VERSION = re.compile(r"(.{1,200})@(-?\d{1,9})\.(-?\d{1,9})", re.DOTALL)


def write(selection: ExportSelection, path: Path) -> None:
    """Write the trajectories of a selection as a directory."""
    path.mkdir()
    run = str(selection.reader.info().get("run", ""))
    for episode, attempt in selection.keys:
        try:
            view = selection.reader.episode(episode, attempt)
            trajectory = atif_trajectory(run, view, build_conversation(selection.reader, view))
        except JournalError as error:
            selection.problems.append(f"{episode}: left out: {error}")
            continue
        selection.problems.extend(f"{episode}: {problem}" for problem in view.problems)
        (path / file_name(episode, attempt)).write_bytes(encode_json(trajectory) + b"\n")


def file_name(episode: str, attempt: int) -> str:
    """Return the name of an episode's file: its id, escaped for file systems, or a digest if that is too long."""
    name = quote(f"{episode}.{attempt}", safe="~#")
    return f"{name if len(name) <= MAX_NAME else hashlib.sha256(name.encode()).hexdigest()}.json"


def atif_trajectory(run: str, view: EpisodeView, conversation: ConversationView) -> dict[str, Any]:
    """Return an episode as a trajectory."""
    line = view.summary
    name = f"{line.episode}.{line.attempt}"
    rows = assemble_token_rows(view)
    has_prompts = sum(map(_prompt_ids, rows)) <= MAX_PROMPT_IDS
    calls = _calls(conversation)
    copied = {_key(act) for act in conversation.acts[: conversation.inherited] if isinstance(act, PolicyTurn)}
    steps = [list(_steps(row, calls, copied, has_prompts=has_prompts)) for row in rows]
    own: dict[str, Any] = {"session_id": run or None, "trajectory_id": name, "extra": _extra(conversation)}
    if not has_prompts:
        own["notes"] = "prompt_token_ids are left out: the contexts of all turns are too long to repeat"
    if len(rows) == 1:
        return _trajectory(rows[0].policy, rows[0].seat, {"index": rows[0].index, "row": 0}, steps[0], own)
    parts = [
        _trajectory(
            row.policy,
            row.seat,
            {"index": row.index, "row": row.row},
            found,
            {"trajectory_id": f"{name}/{row.seat}[{row.index}].{row.row}"},
        )
        for row, found in zip(rows, steps, strict=True)
    ]
    references = [{"trajectory_id": part["trajectory_id"]} for part in parts]
    children = [child for act in conversation.acts if isinstance(act, SpawnAct) for child in act.children]
    references += [{"trajectory_path": file_name(child, 0)} for child in children]
    first: dict[str, Any] = {"step_id": 1, "source": "system", "message": f"Episode {name} of {line.environment}"}
    if references:
        first["observation"] = {"results": [{"subagent_trajectory_ref": [each]} for each in references]}
    if parts:
        own["subagent_trajectories"] = parts
    return _trajectory(None, line.environment, {"is_program": True}, [first], own)


def _trajectory(
    policy: str | None, name: str, extra: dict[str, Any], steps: list[dict[str, Any]], own: dict[str, Any]
) -> dict[str, Any]:
    agent = {"name": name, "version": metadata.version("agentrl"), "model_name": policy, "extra": extra}
    agent = {field: value for field, value in agent.items() if value is not None}
    for number, step in enumerate(steps):
        step["step_id"] = number + 1
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals: dict[str, Any] = {"total_steps": len(steps)}
    if metrics:
        totals["total_prompt_tokens"] = sum(each["prompt_tokens"] for each in metrics)
        totals["total_completion_tokens"] = sum(each["completion_tokens"] for each in metrics)
        totals["total_cached_tokens"] = sum(each["cached_tokens"] for each in metrics)
    whole = {"schema_version": VERSION, **own, "agent": agent, "steps": steps, "final_metrics": totals}
    return {field: value for field, value in whole.items() if value is not None}


def _extra(conversation: ConversationView) -> dict[str, Any]:
    """Return the data of an episode that the format has no field for."""
    line = conversation.summary
    kept = ("status", "purpose", "environment", "group", "parent", "seats", "stop_reason", "drop_reason", "detail")
    return {
        "episode": line.episode,
        "attempt": line.attempt,
        **{name: getattr(line, name) for name in kept},
        "task": {"id": line.task, "data": conversation.task},
        "reward": line.reward,
        "rewards": {f"{each.seat}[{each.index}]": each.reward for each in conversation.agents},
        "reward_parts": {
            agent: [(act.turn, act.value * act.weight) for act in given]
            for agent, given in reward_components(conversation).items()
        },
        "metrics": conversation.metrics,
        "acts": [act for act in conversation.acts if not isinstance(act, PolicyTurn | RewardAct | ToolAct)],
        "problems": conversation.problems,
    }


def _key(turn: PolicyTurn | TurnEntry) -> str:
    return f"{turn.seat}[{turn.index}].{turn.turn}"


def _prompt_ids(row: AssembledTokenRow) -> int:
    """Return the number of token ids in the prompts of a row; each prompt contains the whole context before it."""
    context = total = 0
    for turn in row.turns:
        context += len(turn.context_ids) // 4
        total += context
        context += len(turn.token_ids) // 4
    return total


def _calls(conversation: ConversationView) -> dict[str, list[ToolAct]]:
    """Return the tool calls between each turn and the next turn of its branch, keyed by turn."""
    newest: dict[str, str] = {}
    calls: dict[str, list[ToolAct]] = {}
    for act in conversation.acts:
        branch = act.call.rpartition("#")[0]
        if isinstance(act, PolicyTurn):
            newest[branch] = _key(act)
        elif isinstance(act, ToolAct) and branch in newest:
            calls.setdefault(newest[branch], []).append(act)
    return calls


def _steps(
    row: AssembledTokenRow, calls: dict[str, list[ToolAct]], copied: set[str], *, has_prompts: bool
) -> Iterator[dict[str, Any]]:
    """Yield the steps of a row: the policy's input, its output, and the answers of its tools."""
    context: list[int] = []
    answers: list[dict[str, Any]] = []
    for place, turn in enumerate(row.turns):
        for message in turn.messages[len(answers) :]:
            yield _message_step(message)
        following = row.turns[place + 1].messages if place + 1 < len(row.turns) else ()
        answers = list(takewhile(lambda message: message.get("role") == "tool", following))
        context += decode_int32(turn.context_ids)
        step = _said(turn, len(context))
        if has_prompts:
            step["metrics"]["prompt_token_ids"] = list(context)
        if _key(turn) in copied:
            step["is_copied_context"] = True
        step |= _tools(calls.get(_key(turn), []), answers)
        yield step
        context += decode_int32(turn.token_ids)


def _message_step(message: dict[str, Any]) -> dict[str, Any]:
    step: dict[str, Any] = {
        "source": _SOURCES.get(str(message.get("role")), "user"),
        "message": _text(message.get("content")),
    }
    if step["source"] == "agent":
        step["llm_call_count"] = 0  # the message is part of the context, and was not sampled at this step
    others = {name: value for name, value in message.items() if name != "content"}
    if others != {"role": step["source"]} and others != {}:
        step["extra"] = others
    return step


def _said(turn: TurnEntry, prompt_tokens: int) -> dict[str, Any]:
    whose = turn.weights_of or turn.policy
    versions = [(span.start, span.stop, f"{whose}@{span.lineage}.{span.step}") for span in turn.spans]
    ids, logprobs = list(decode_int32(turn.token_ids)), list(decode_float32(turn.logprobs))
    metrics: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": len(ids),
        "cached_tokens": turn.cached_tokens,
        "completion_token_ids": ids,
        "extra": {
            "finish_reason": turn.finish_reason,
            "temperature": turn.temperature,
            "seconds": turn.seconds,
            "versions": versions,
            "kept_counts": list(decode_int32(turn.mask_counts or b"")),
        },
    }
    if len(logprobs) == len(ids) and all(map(math.isfinite, logprobs)):
        metrics["logprobs"] = logprobs
    step: dict[str, Any] = {"source": "agent", "message": turn.text, "llm_call_count": 1, "metrics": metrics}
    step["extra"] = {"turn": turn.turn}
    if len({version for *_, version in versions}) == 1:
        step["model_name"] = versions[0][2]
    if (moment := _moment(turn.started)) is not None:
        step["timestamp"] = moment
    return step


def _tools(acts: Sequence[ToolAct], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a turn's tool calls with their observations; calls without an answering message get their recorded
    results."""
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for act, answer in zip_longest(acts, answers):
        result: dict[str, Any] = {"content": act.observation if answer is None else _text(answer.get("content"))}
        if act is not None:
            name = None if answer is None else answer.get("tool_call_id")
            known = {call["tool_call_id"] for call in calls}
            call_id = name if isinstance(name, str) and name not in known else act.call
            call: dict[str, Any] = {"tool_call_id": call_id, "function_name": act.name}
            is_object = isinstance(act.arguments, dict)
            call["arguments"] = act.arguments if is_object else {}
            call["extra"] = {"call": act.call} if is_object else {"call": act.call, "arguments": act.arguments}
            calls.append(call)
            result |= {"source_call_id": call_id, "extra": {"outcome": act.outcome, "seconds": act.seconds}}
        else:
            result["extra"] = {name: value for name, value in answer.items() if name not in ("role", "content")}
        results.append(result)
    found: dict[str, Any] = {}
    if calls:
        found["tool_calls"] = calls
    if results:
        found["observation"] = {"results": results}
    return found


def _text(content: Any) -> str:
    return content if isinstance(content, str) else encode_json(content).decode()


def _moment(seconds: float) -> str | None:
    """Return a wall-clock time as ISO 8601; None if it is invalid."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None


class _AtifAgent(msgspec.Struct):
    name: str
    version: str = ""
    model_name: str | None = None
    extra: dict[str, Any] | None = None


class _AtifCall(msgspec.Struct):
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
    tool_calls: list[_AtifCall] | None = None
    observation: _Observation | None = None
    metrics: _Metrics | None = None
    llm_call_count: int | None = None
    extra: dict[str, Any] | None = None


class _Trajectory(msgspec.Struct):
    schema_version: str
    agent: _AtifAgent
    steps: list[_Step]
    session_id: str | None = None
    trajectory_id: str | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[_Trajectory] | None = None


class _AtifTask(msgspec.Struct):
    id: str = ""
    data: dict[str, Any] = {}


def read(source: Path) -> Iterator[ImportedEpisode]:
    """Yield the episodes of a file, of a directory of files, or of the trials of a job.

    Raises:
        InputError: there are no episodes, or a file is no trajectory.
    """
    tree = walk_directories(source)
    if (top := next(tree, None)) is None:
        files = [source]
    else:
        files = [source / name for name in top[1] if name.endswith(".json")]
        files = files or [directory / TRIAL for directory, names in tree if TRIAL in names]
    if not files or len(files) > MAX_FILES:
        raise InputError(f"{source}: {len(files):,} files of trajectories found; expected from 1 to {MAX_FILES:,}")
    for file in files:
        where = str(file)
        trajectory = decode_json(read_whole_file(file), _Trajectory, where)
        yield _episode(trajectory, where, file.stem)


def _episode(root: _Trajectory, where: str, stem: str) -> ImportedEpisode:
    extra = root.extra or {}
    name = root.trajectory_id or (stem if stem != "trajectory" else None) or root.session_id or stem
    agents: dict[tuple[str, int], ImportedAgent] = {}
    _collect(root, agents, where)
    for (seat, index), agent in agents.items():
        agent.rewards = _typed(_field(extra, "reward_parts", f"{seat}[{index}]"), list[tuple[int | None, float]], [])
    task = _typed(extra.get("task"), _AtifTask, _AtifTask())
    replies = [
        item for agent in agents.values() for row in agent.rows for item in row if isinstance(item, ImportedReply)
    ]
    times = [(reply.started, reply.started + reply.seconds) for reply in replies if reply.started]
    environment = _typed(extra.get("environment"), str, root.agent.name)
    return ImportedEpisode(
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
    """Return a value of `extra` if it has the expected type, else the default; other tools may write anything there."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, RecursionError):
        return otherwise


def _field(extra: dict[str, Any], *names: str) -> Any:
    value: Any = extra
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _collect(trajectory: _Trajectory, agents: dict[tuple[str, int], ImportedAgent], where: str) -> None:
    """Collect the agent of a trajectory, then the agents of embedded trajectories."""
    if trajectory.schema_version not in VERSIONS:
        raise InputError(f"{where}: version {trajectory.schema_version[:40]!r}; supported are 1.0 to 1.8")
    agent, extra = trajectory.agent, trajectory.agent.extra or {}
    if extra.get("is_program") is not True:
        told = extra.get("index")
        count = sum(seat == agent.name for seat, _ in agents)
        index = _typed(told, Annotated[int, msgspec.Meta(ge=0, lt=MAX_INDEX)], count)
        played = agents.setdefault(
            (agent.name, index),
            ImportedAgent(seat=agent.name, index=index, policy=agent.model_name or agent.name, rows=[], rewards=[]),
        )
        played.rows += [with_observations(row) for row in _rows(trajectory.steps, played.policy, where)]
    for part in trajectory.subagent_trajectories or ():
        _collect(part, agents, where)


def _rows(steps: Sequence[_Step], policy: str, where: str) -> list[MessageRow]:
    rows: list[MessageRow] = [[]]
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


def _waiting(row: MessageRow) -> MessageRow:
    """Return the messages after the last reply."""
    last = max((place for place, item in enumerate(row) if isinstance(item, ImportedReply)), default=-1)
    return row[last + 1 :]


def _message(step: _Step) -> dict[str, Any]:
    extra = step.extra or {}
    roles = {"agent": "assistant"}
    message: dict[str, Any] = {
        "role": roles.get(step.source, step.source),
        "content": flatten_message_text(step.message),
    }
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
    message: dict[str, Any] = {"role": "tool", "content": flatten_message_text(result.content)}
    if result.source_call_id is not None:
        message["tool_call_id"] = result.source_call_id
        if result.source_call_id in names:
            message["name"] = names[result.source_call_id]
    return message | {name: extra[name] for name in ("name", "tool_call_id") if isinstance(extra.get(name), str)}


def _reply(step: _Step, policy: str, context: list[int] | None, where: str) -> ImportedReply:
    metrics = step.metrics or _Metrics()
    extra = metrics.extra or {}
    ids = metrics.completion_token_ids
    logprobs = metrics.logprobs if ids is not None and len(metrics.logprobs or ()) == len(ids) else None
    spans, whose = _spans(extra.get("versions"), len(ids or ()))
    return ImportedReply(
        text=flatten_message_text(step.message),
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


def _call(call: _AtifCall, observation: _Observation | None) -> ImportedToolCall:
    results = [] if observation is None else observation.results
    answer = next((result for result in results if result.source_call_id == call.tool_call_id), _Result())
    extra = answer.extra or {}
    told = (call.extra or {}).get("arguments")
    return ImportedToolCall(
        id=call.tool_call_id,
        name=call.function_name,
        arguments=call.arguments if told is None else told,
        observation=flatten_message_text(answer.content),
        outcome=_typed(extra.get("outcome"), str, NOT_RECORDED),
        seconds=_typed(extra.get("seconds"), float, 0.0),
    )


def _spans(told: Any, tokens: int) -> tuple[list[TurnVersionSpan], str]:
    """Return the spans of versions over a turn's tokens, and their policy, as our exports write them; empty if
    absent.
    """
    spans, whose = [], set()
    for start, stop, version in _typed(told, list[tuple[int, int, str]], []):
        found = _VERSION.fullmatch(version)
        if found is None or not 0 <= start < stop <= tokens:
            return [], ""
        spans.append(TurnVersionSpan(start, stop, int(found[2]), int(found[3])))
        whose.add(found[1])
    return (spans, whose.pop()) if len(whose) == 1 else ([], "")


def _seconds(timestamp: str | None, where: str) -> float:
    if timestamp is None:
        return 0.0
    try:
        return max(datetime.fromisoformat(timestamp).timestamp(), 0.0)
    except (ValueError, OverflowError, OSError) as error:
        raise InputError(f"{where}: {timestamp[:40]!r} is not an ISO 8601 time") from error
