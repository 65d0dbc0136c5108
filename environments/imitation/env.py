"""Supervised steps on conversations from a file, or on a run's best episodes."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agentrl
from agentrl.core.errors import InputError
from agentrl.environment.registry import resolve
from agentrl.environment.tools import ToolEnvironment
from agentrl.inspection.conversation import PolicyTurn, read_conversation
from agentrl.inspection.reader import RunReader
from agentrl.rollout.turn_entries import decode_message

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agentrl.core.records import ToolSpec
    from agentrl.environment.context import EpisodeContext
    from agentrl.environment.environment import Split, TaskSource

MAX_LINE = 1 << 24
MAX_EPISODES = 1_000_000
ROLES = ("system", "user", "assistant", "tool")
GIVEN = "given"
"""Key of an assistant's message that is context, such as an example in a prompt."""


class Imitation(agentrl.Environment):
    """A conversation with given assistant replies, each trained on with advantage 1."""

    seats = ("agent",)
    splits = ("train",)

    async def run(self, ctx: EpisodeContext) -> None:
        """Replay the conversation."""
        agent = ctx.agent("agent", tools=_tools(ctx.task.data["tools_of"]))
        new_messages: list[agentrl.Message] = []
        for message in ctx.task.data["messages"]:
            if _is_trained(message):
                await agent.act(*new_messages, reply=message["content"])
                new_messages = []
            else:
                new_messages.append(decode_message({key: value for key, value in message.items() if key != GIVEN}))
        agent.reward(1.0)

    @classmethod
    def tasks(
        cls,
        split: Split,
        *,
        seed: int = 0,
        path: str = "",
        where: str = "",
        best: int = 0,
        seat: str = "",
        tools_of: str = "",
    ) -> TaskSource:
        """Return the conversations of a file or run.

        Args:
            split: ignored; there is only one.
            seed: ignored.
            path: a file with a line `{"messages": [{"role": …, "content": …}, …]}` per conversation, or a run.
            where: filter for a run's episodes, such as `reward > 0.5`.
            best: number of a run's episodes per task, by largest reward; 0: all.
            seat: seat of a run to imitate; by default the only rewarded one.
            tools_of: environment with the tools to offer to the policy.

        Raises:
            InputError: there are no conversations, or they cannot be read.
        """
        _tools(tools_of)
        if not path:
            raise InputError("environment.options.path: the file of conversations, or the run, is missing")
        if Path(path).is_dir():
            conversations = list(_of_run(Path(path), where, best, seat))
        elif where or best or seat:
            raise InputError(f"environment.options: where, best and seat select turns of a run, but {path} is a file")
        else:
            conversations = list(_of_file(Path(path)))
        if not conversations:
            raise InputError(f"{path} contains no conversation" + (f" with {where}" if where else ""))
        return [
            agentrl.Task(id=name, data={"messages": messages, "tools_of": tools_of}) for name, messages in conversations
        ]


def _tools(environment: str) -> Sequence[ToolSpec]:
    if not environment:
        return ()
    environment_class = resolve(environment)
    if not issubclass(environment_class, ToolEnvironment):
        raise InputError(f"environment.options.tools_of = {environment!r}: {environment_class.__name__} has no tools")
    return tuple(bound.spec for bound in environment_class.tool_table().values())


def _of_file(path: Path) -> Iterator[tuple[str, list[dict[str, str]]]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE), ""), start=1):
                if line.strip():
                    yield f"{path.name}:{number}", _check_line(json.loads(line), f"{path}:{number}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from None


def _check_line(line: Any, where: str) -> list[dict[str, str]]:
    """Return the messages of a line, up to the assistant's last."""
    messages = line.get("messages") if isinstance(line, dict) else None
    if not isinstance(messages, list):
        messages = [None]
    for message in messages:
        has_role = isinstance(message, dict) and message.get("role") in ROLES
        if not has_role or not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise InputError(
                f'{where}: not a conversation; a line is {{"messages": [{{"role": "user", "content": …}}, …]}}, with '
                "tool calls written in the content, in the model's format"
            )
        lost = [key for key, value in message.items() if key not in ("role", "content") and value is not None]
        if lost:
            raise InputError(f"{where}: a message has {lost[0]}, which is not supported; remove it")
    if line.get("tools") or line.get("functions"):
        raise InputError(f"{where}: tools of a line are not supported; name their environment in tools_of")
    messages_of = [{"role": message["role"], "content": message["content"]} for message in messages]
    last = max((at for at, message in enumerate(messages_of) if message["role"] == "assistant"), default=0)
    if not last:
        raise InputError(f"{where}: an assistant message must follow a message of another role")
    return messages_of[: last + 1]


def _of_run(path: Path, where: str, best: int, seat: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the conversations of the chosen or only rewarded seat. A turn that was cut is context, because its end is
    unknown."""
    with contextlib.closing(RunReader(path)) as reader:
        columns = reader.reward_columns()
        if not seat and columns not in ([], ["reward"]):
            seats = " or ".join(repr(column.removeprefix("reward/")) for column in columns if "/" in column)
            raise InputError(f"environment.options.seat: {path} rewards several seats; name one to imitate, {seats}")
        # A template that rewrites its history begins rows too, which continue the conversation.
        has_restarts = reader.config().get("model", {}).get("history") != "fork"
        by_task: dict[str, list[Any]] = defaultdict(list)
        if reader.purpose() == "train":  # its evaluations are of held-out tasks
            where = f"purpose != evaluate and ({where})" if where.strip() else "purpose != evaluate"
        for line in reader.episodes(where, sort=f"reward/{seat}" if seat else "reward", limit=MAX_EPISODES):
            if line.stop_reason is not None:
                by_task[line.task].append(line)
        turns = cut = 0
        for lines in by_task.values():
            for line in lines[: best or None]:
                conversations: dict[str, list[dict[str, Any]]] = defaultdict(list)
                for act in read_conversation(reader, line.episode).acts:
                    if not isinstance(act, PolicyTurn) or act.seat not in ([seat] if seat else line.rewards):
                        continue
                    is_cut = act.finish_reason != "stop"
                    turns, cut = turns + 1, cut + is_cut
                    name = f"{act.seat}[{act.index}]" + (f".{act.row}" if act.row and has_restarts else "")
                    conversations[name] += [
                        {**message, GIVEN: True} if message["role"] == "assistant" else message
                        for message in act.messages
                    ]
                    reply = {"role": "assistant", "content": act.text}
                    conversations[name].append({**reply, GIVEN: True} if is_cut else reply)
                for name, messages in conversations.items():
                    trained = [n for n, message in enumerate(messages, 1) if _is_trained(message)]
                    if trained:
                        yield f"{line.episode}:{name}", messages[: trained[-1]]
        if cut:
            warnings.warn(f"{cut} of {turns} turns of {path} were cut, and are not imitated", stacklevel=1)


def _is_trained(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant" and not message.get(GIVEN)
