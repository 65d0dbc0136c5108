"""Supervised steps on conversations of a file, or of a run's best episodes."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agentrl
from agentrl.core.errors import InputError
from agentrl.environment.registry import resolve
from agentrl.environment.tools import ToolEnvironment
from agentrl.inspection.conversation import PolicyTurn, read_conversation
from agentrl.inspection.reader import RunReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agentrl.core.records import ToolSpec
    from agentrl.environment.context import EpisodeContext
    from agentrl.environment.environment import Split, TaskSource

MAX_LINE = 1 << 24
MAX_EPISODES = 1_000_000
ROLES = ("system", "user", "assistant", "tool")


class Imitation(agentrl.Environment):
    """A conversation in which every answer of the assistant is given, and trained on with advantage 1."""

    seats = ("agent",)
    splits = ("train",)

    async def run(self, ctx: EpisodeContext) -> None:
        """Say the conversation again."""
        agent = ctx.agent("agent", tools=_tools(ctx.task.data["tools_of"]))
        told: list[agentrl.Message] = []
        for message in ctx.task.data["messages"]:
            if message["role"] == "assistant":
                await agent.act(*told, reply=message["content"])
                told = []
            else:
                told.append(agentrl.Message(role=message["role"], content=message["content"]))
        agent.reward(1.0)

    @classmethod
    def tasks(
        cls, split: Split, *, seed: int = 0, path: str = "", where: str = "", best: int = 0, tools_of: str = ""
    ) -> TaskSource:
        """The conversations of a file or run.

        Args:
            split: there is one.
            seed: has no effect.
            path: a file, with a line `{"messages": [{"role": …, "content": …}, …]}` for each conversation, or a run.
            where: of a run, the episodes that are taken, such as `reward > 0.5`.
            best: of a run, so many episodes of each task, those with the largest reward; 0: all.
            tools_of: the environment whose tools the policy is offered.

        Raises:
            InputError: there are no conversations, or they cannot be read.
        """
        _tools(tools_of)
        if not path:
            raise InputError("environment.options.path: the file of conversations, or the run, is missing")
        if Path(path).is_dir():
            found = list(_of_run(Path(path), where, best))
        elif where or best:
            raise InputError(f"environment.options: where and best choose episodes of a run, and {path} is a file")
        else:
            found = list(_of_file(Path(path)))
        if not found:
            raise InputError(f"{path} contains no conversation" + (f" with {where}" if where else ""))
        return [agentrl.Task(id=name, data={"messages": messages, "tools_of": tools_of}) for name, messages in found]


def _tools(environment: str) -> Sequence[ToolSpec]:
    if not environment:
        return ()
    found = resolve(environment)
    if not issubclass(found, ToolEnvironment):
        raise InputError(f"environment.options.tools_of = {environment!r}: {found.__name__} has no tools")
    return tuple(bound.spec for bound in found.tool_table().values())


def _of_file(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), ""), start=1):
                if line.strip():
                    yield f"{path.name}:{number}", _checked(json.loads(line), f"{path}:{number}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _checked(line: Any, where: str) -> list[dict[str, str]]:
    """The messages of a line, up to the last of the assistant."""
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list):
        messages = [None]
    for message in messages:
        known = isinstance(message, dict) and message.get("role") in ROLES
        if not known or not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise InputError(
                f'{where}: not a conversation; a line is {{"messages": [{{"role": "user", "content": …}}, …]}}, with '
                "calls of tools written in the content, as the model writes them"
            )
    said = [{"role": message["role"], "content": message["content"]} for message in messages]
    last = max((at for at, message in enumerate(said) if message["role"] == "assistant"), default=0)
    if not last:
        raise InputError(f"{where}: the assistant must say something, after another role")
    return said[: last + 1]


def _of_run(path: Path, where: str, best: int) -> Iterator[tuple[str, list[dict[str, str]]]]:
    with contextlib.closing(RunReader(path)) as reader:
        by_task: dict[str, list[Any]] = defaultdict(list)
        for line in reader.episodes(where, sort="reward", limit=MAX_EPISODES):
            if line.stop_reason is not None:
                by_task[line.task].append(line)
        for lines in by_task.values():
            for line in lines[: best or None]:
                for seat, messages in _said(read_conversation(reader, line.episode)).items():
                    yield f"{line.episode}:{seat}", messages


def _said(view: Any) -> Mapping[str, list[dict[str, str]]]:
    """The conversation of each agent that spoke."""
    found: dict[str, list[dict[str, str]]] = {}
    for act in view.acts:
        if isinstance(act, PolicyTurn):
            own = found.setdefault(f"{act.seat}[{act.index}]", [])
            own += [{"role": str(each["role"]), "content": str(each["content"])} for each in act.messages]
            own.append({"role": "assistant", "content": act.text})
    return found
