"""Lines of conversations in OpenAI's form for fine-tuning, as the environment `imitation` trains on them."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.environment.registry import resolve
from agentrl.journal.entries import TurnEntry
from tests.translations.rows import Row, seen
from tests.unit.episodes import play


def translate(line: Any) -> tuple[Any, Any]:
    """Replay the conversation; the trained replies are the grader's part."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "lines.jsonl"
        file.write_text(json.dumps(line) + "\n", encoding="utf-8")
        environment = resolve("agentrl.environments.imitation:Imitation")
        [task] = environment.tasks("train", path=str(file))  # type: ignore[call-arg, misc]
    played = play(environment, ["not this"] * 4, data=dict(task.data))
    return seen(played), [
        entry.text.removesuffix("<|stop|>") for entry in played.entries if isinstance(entry, TurnEntry)
    ]


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the first message."""
    module = resolve("agentrl.environments.imitation:Imitation").run.__globals__
    check = module["_check_line"]
    with mock.patch.dict(module, {"_check_line": lambda line, where: check(line, where)[1:]}):
        yield


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "1 + 1?"}
TWO = {"role": "assistant", "content": "2"}
ASKED = ["user", "1 + 1?"]


def row(name: str, messages: list[Any], sees: Any, grader: Any, **line: Any) -> Row:
    return Row(name=name, input={"messages": messages, **line}, sees=sees, grader=grader)


def refused(name: str, words: str, *messages: Any, **line: Any) -> Row:
    return Row(name=name, input={"messages": list(messages), **line}, refused=words)


ROWS = [
    row("one reply", [USER, TWO], [ASKED], ["2"]),
    row("a system message", [SYSTEM, USER, TWO], [["system", "Be brief."], ASKED], ["2"]),
    row(
        "two replies",
        [USER, TWO, {**USER, "content": "Sure?"}, {**TWO, "content": "Yes."}],
        [ASKED, ["user", "Sure?"]],
        ["2", "Yes."],
    ),
    row(
        "an answer of a tool", [USER, TWO, {"role": "tool", "content": "ok"}, TWO], [ASKED, ["tool", "ok"]], ["2", "2"]
    ),
    row("null columns", [{**USER, "name": None}, {**TWO, "tool_calls": None}], [ASKED], ["2"], tools=None),
    refused("calls", "with tool calls written in the content", USER, {**TWO, "tool_calls": [{"id": "c"}]}),
    refused("parts", "not a conversation", {**USER, "content": [{"type": "text", "text": "1 + 1?"}]}, TWO),
    refused("a reply that is not to be trained", "a message has weight", USER, {**TWO, "weight": 0}),
    refused("reasoning", "a message has reasoning_content", USER, {**TWO, "reasoning_content": "1, 2"}),
    refused("a speaker", "a message has name", {**USER, "name": "Ann"}, TWO),
    refused("tools", "tools of a line are not supported", USER, TWO, tools=[{"type": "function"}]),
    refused("no reply", "an assistant message must follow", USER),
]
