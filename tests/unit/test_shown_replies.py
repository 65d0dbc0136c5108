"""What a run read in its replies is what readers of the run show: nothing is read a second time."""

from __future__ import annotations

import asyncio
import io
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from rich.console import Console

import agentrl
from agentrl.inspection.conversation import UNREAD_REPLIES, PolicyTurn, build_conversation, read_conversation
from agentrl.inspection.reader import RunReader
from agentrl.inspection.render_episode import conversation_page
from agentrl.journal.entries import ReplyRecord, ToolEntry, TurnEntry
from tests.journal_cases import write_run
from tests.unit.episodes import play

if TYPE_CHECKING:
    from pathlib import Path

BARE = '{"name": "add", "arguments": {"a": 1}}'
CALL = f"<tool_call>{BARE}</tool_call>"
ADD = {"name": "add", "arguments": {"a": 1}}


def foreign(text: str, form: str) -> ReplyRecord:
    """Return the record of a reply that holds a call in a form that the run does not read."""
    return ReplyRecord(content=text, calls=({"name": "add", "arguments": text, "form": form},))


class Adding(agentrl.ToolEnvironment):
    """A tool that returns its argument."""

    @agentrl.tool
    def add(self, a: int) -> int:
        """Return a."""
        return a

    def prompt(self, task: agentrl.Task) -> str:
        return "?"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("replies", "records"),
    [
        ([BARE, "5"], [foreign(BARE, "json"), ReplyRecord()]),
        ([f"so {CALL}", "done"], [ReplyRecord(content="so", calls=(ADD,)), ReplyRecord()]),
        ([f"[TOOL_CALLS][{BARE}]", "5"], [foreign(f"[TOOL_CALLS][{BARE}]", "mistral"), ReplyRecord()]),
        (["[add(a=1)]", "5"], [foreign("[add(a=1)]", "python"), ReplyRecord()]),
        (["<tool_call>add</tool_call>", "5"], [ReplyRecord(calls=({"name": "", "arguments": "add"},)), ReplyRecord()]),
    ],
    ids=["bare JSON", "a call", "Mistral", "Python", "malformed"],
)
def test_a_turn_records_what_its_environment_read(replies: list[str], records: list[ReplyRecord]) -> None:
    played = play(Adding, replies)
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    assert [turn.reply for turn in turns] == records
    called = [call["name"] for record in records for call in record.calls]
    assert [entry.name for entry in played.entries if isinstance(entry, ToolEntry)] == called


def shown(directory: Path, text: str, reply: ReplyRecord | None) -> tuple[PolicyTurn, str, str]:
    """Return a turn as its readers get it, the page of its episode, and the note on it."""
    asyncio.run(write_run(directory, text=text))
    reader = RunReader(directory)
    view = reader.episode("e0")
    entries: list[Any] = [
        (call, msgspec.structs.replace(body, reply=reply) if isinstance(body, TurnEntry) else body)
        for call, body in view.entries
    ]
    conversation = build_conversation(reader, msgspec.structs.replace(view, entries=entries))
    (turn,) = (act for act in conversation.acts if isinstance(act, PolicyTurn))
    stream = io.StringIO()
    Console(file=stream, width=200, soft_wrap=True).print(conversation_page(conversation))
    reader.close()
    return turn, stream.getvalue(), conversation.note


@pytest.mark.parametrize("text", [BARE, CALL, f"<think>Hm.</think>{CALL}"])
def test_a_reply_without_calls_is_shown_as_its_text(text: str, tmp_path: Path) -> None:
    turn, page, note = shown(tmp_path, text, ReplyRecord())
    assert (turn.content, turn.calls, turn.thinking, note) == (text, [], "", "")
    assert "\u2192 add(" not in page


def test_a_recorded_call_is_shown_whatever_the_text_looks_like(tmp_path: Path) -> None:
    turn, page, note = shown(tmp_path, "add!", ReplyRecord("Hm.", "so", (ADD,)))
    assert (turn.thinking, turn.content, turn.calls, note) == ("Hm.", "so", [ADD], "")
    assert '\u2192 add({"a": 1})' in page


def test_a_turn_of_an_older_version_is_shown_as_text_and_said_so(tmp_path: Path) -> None:
    turn, page, note = shown(tmp_path, CALL, None)
    assert (turn.content, turn.calls, note) == (CALL, [], UNREAD_REPLIES)
    assert UNREAD_REPLIES in page
    assert "\u2192 add(" not in page


def test_a_real_run_is_read_as_it_was_played(sample_run: Path) -> None:
    reader = RunReader(sample_run)
    view = read_conversation(reader, reader.episodes("environment ~ Solve", limit=1)[0].episode)
    reader.close()
    assert view.note == ""
