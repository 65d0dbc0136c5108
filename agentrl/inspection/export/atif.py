"""The Agent Trajectory Interchange Format, version 1.8, for `agentrl run export --to atif`.

An export is a directory with one trajectory per episode. An episode of one agent whose context was never rewritten
is written as that agent's trajectory. Any other episode refers to one embedded trajectory for each row of each agent.
Child episodes are separate files that their parents refer to. Tool results stand with the turn that called the tool,
as the format requires. Data without a field in the format is in `extra`: versions, finish reasons, sizes of masks,
rewards, other acts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from agentrl.core.errors import JournalError
from agentrl.core.machine import DISTRIBUTION
from agentrl.inspection.conversation import (
    ConversationView,
    PolicyTurn,
    RewardAct,
    SpawnAct,
    ToolAct,
    build_conversation,
    reward_components,
)
from agentrl.inspection.export.episodes import encode_json
from agentrl.inspection.tokens import assemble_token_rows, decode_float32, decode_int32

if TYPE_CHECKING:
    from agentrl.inspection.export.exporting import ExportSelection
    from agentrl.inspection.reader import EpisodeView
    from agentrl.inspection.tokens import AssembledTokenRow
    from agentrl.journal.entries import TurnEntry

VERSION = "ATIF-v1.8"
MAX_NAME = 180
_SOURCES = {"system": "system", "user": "user", "assistant": "agent"}


def write(selection: ExportSelection, path: Path) -> None:
    """Write the trajectories of a selection as a directory."""
    path.mkdir()
    run = str(selection.reader.info().get("run", ""))
    for episode, attempt in selection.reported(selection.keys):
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
    # The format repeats the whole context at each turn. Longer episodes are written without prompts, and the file says
    # so.
    has_prompts = sum(map(_prompt_ids, rows)) <= 4_000_000
    calls = _calls(conversation)
    copied_keys = {_key(act) for act in conversation.acts[: conversation.inherited] if isinstance(act, PolicyTurn)}
    steps = [list(_steps(row, calls, copied_keys, has_prompts=has_prompts)) for row in rows]
    header: dict[str, Any] = {"session_id": run or None, "trajectory_id": name, "extra": _extra(conversation)}
    if not has_prompts:
        header["notes"] = "prompt_token_ids are left out: the contexts of all turns are too long to repeat"
    if len(rows) == 1:
        return _trajectory(rows[0].policy, rows[0].seat, {"index": rows[0].index, "row": 0}, steps[0], header)
    parts = [
        _trajectory(
            row.policy,
            row.seat,
            {"index": row.index, "row": row.row},
            row_steps,
            {"trajectory_id": f"{name}/{row.seat}[{row.index}].{row.row}"},
        )
        for row, row_steps in zip(rows, steps, strict=True)
    ]
    references = [{"trajectory_id": part["trajectory_id"]} for part in parts]
    children = [child for act in conversation.acts if isinstance(act, SpawnAct) for child in act.children]
    references += [{"trajectory_path": file_name(child, 0)} for child in children]
    first: dict[str, Any] = {"step_id": 1, "source": "system", "message": f"Episode {name} of {line.environment}"}
    if references:
        first["observation"] = {"results": [{"subagent_trajectory_ref": [reference]} for reference in references]}
    if parts:
        header["subagent_trajectories"] = parts
    return _trajectory(None, line.environment, {"is_program": True}, [first], header)


def _trajectory(
    policy: str | None, name: str, extra: dict[str, Any], steps: list[dict[str, Any]], header: dict[str, Any]
) -> dict[str, Any]:
    agent = {"name": name, "version": metadata.version(DISTRIBUTION), "model_name": policy, "extra": extra}
    agent = {field: value for field, value in agent.items() if value is not None}
    for number, step in enumerate(steps):
        step["step_id"] = number + 1
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    totals: dict[str, Any] = {"total_steps": len(steps)}
    if metrics:
        totals["total_prompt_tokens"] = sum(step_metrics["prompt_tokens"] for step_metrics in metrics)
        totals["total_completion_tokens"] = sum(step_metrics["completion_tokens"] for step_metrics in metrics)
        totals["total_cached_tokens"] = sum(step_metrics["cached_tokens"] for step_metrics in metrics)
    trajectory = {"schema_version": VERSION, **header, "agent": agent, "steps": steps, "final_metrics": totals}
    return {field: value for field, value in trajectory.items() if value is not None}


def _extra(conversation: ConversationView) -> dict[str, Any]:
    """Return the data of an episode that the format has no field for."""
    line = conversation.summary
    field_names = (
        "status",
        "purpose",
        "environment",
        "group",
        "parent",
        "seats",
        "stop_reason",
        "drop_reason",
        "detail",
    )
    return {
        "episode": line.episode,
        "attempt": line.attempt,
        **{name: getattr(line, name) for name in field_names},
        "task": {"id": line.task, "data": conversation.task},
        "reward": line.reward,
        "rewards": {f"{agent_line.seat}[{agent_line.index}]": agent_line.reward for agent_line in conversation.agents},
        "reward_parts": {
            agent: [(act.turn, act.value * act.weight) for act in parts]
            for agent, parts in reward_components(conversation).items()
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
    row: AssembledTokenRow, calls: dict[str, list[ToolAct]], copied_keys: set[str], *, has_prompts: bool
) -> Iterator[dict[str, Any]]:
    """Yield the steps of a row: the policy's input, its output, and the answers of its tools."""
    context: list[int] = []
    answers: list[dict[str, Any]] = []
    for place, turn in enumerate(row.turns):
        for message in turn.messages[len(answers) :]:
            yield _message_step(message)
        next_messages = row.turns[place + 1].messages if place + 1 < len(row.turns) else ()
        answers = list(takewhile(lambda message: message.get("role") == "tool", next_messages))
        context += decode_int32(turn.context_ids)
        step = _agent_step(turn, len(context))
        if has_prompts:
            step["metrics"]["prompt_token_ids"] = list(context)
        if _key(turn) in copied_keys:
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
    other_fields = {name: value for name, value in message.items() if name != "content"}
    if other_fields != {"role": step["source"]} and other_fields != {}:
        step["extra"] = other_fields
    return step


def _agent_step(turn: TurnEntry, prompt_tokens: int) -> dict[str, Any]:
    policy = turn.weights_of or turn.policy
    versions = [(span.start, span.stop, f"{policy}@{span.lineage}.{span.step}") for span in turn.spans]
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
    for act, answer in zip_longest(_in_order_of(answers, acts), answers):
        result: dict[str, Any] = {"content": act.observation if answer is None else _text(answer.get("content"))}
        if act is not None:
            name = None if answer is None else answer.get("tool_call_id")
            known_ids = {call["tool_call_id"] for call in calls}
            call_id = name if isinstance(name, str) and name not in known_ids else act.call
            call: dict[str, Any] = {"tool_call_id": call_id, "function_name": act.name}
            is_object = isinstance(act.arguments, dict)
            call["arguments"] = act.arguments if is_object else {}
            call["extra"] = {"call": act.call} if is_object else {"call": act.call, "arguments": act.arguments}
            calls.append(call)
            result |= {"source_call_id": call_id, "extra": {"outcome": act.outcome, "seconds": act.seconds}}
        else:
            result["extra"] = {name: value for name, value in answer.items() if name not in ("role", "content")}
        results.append(result)
    tools: dict[str, Any] = {}
    if calls:
        tools["tool_calls"] = calls
    if results:
        tools["observation"] = {"results": results}
    return tools


def _in_order_of(answers: Sequence[dict[str, Any]], acts: Sequence[ToolAct]) -> list[ToolAct]:
    """Return tool calls in the order of their answers: calls that ran together ended in any order."""
    remaining = list(acts)
    ordered: list[ToolAct] = []
    for answer in answers[: len(acts)]:
        content = _text(answer.get("content"))
        same = (act for act in remaining if act.name == answer.get("name") and act.observation == content)
        ordered.append(next(same, remaining[0]))
        remaining.remove(ordered[-1])
    return ordered + remaining


def _text(content: Any) -> str:
    return content if isinstance(content, str) else encode_json(content).decode()


def _moment(seconds: float) -> str | None:
    """Return a wall-clock time as ISO 8601; None if it is invalid."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds > 0 else None
    except (ValueError, OverflowError, OSError):
        return None
