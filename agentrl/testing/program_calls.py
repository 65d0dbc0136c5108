"""Reads the tool calls of an external agent, and what its tools returned, from the turns that it requested.

An external agent runs its tools itself, so the journal holds no entry for a call: only the reply that makes it, and the
request that sends its result back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from agentrl.journal.entries import JournalEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import PlainChatFormat


@dataclass(slots=True)
class ProgramCall:
    """A tool call of a reply."""

    name: str
    arguments: Any
    result: str | None = None
    """Text that the agent sent back; None if it sent none."""


def program_calls(entries: Iterable[JournalEntry]) -> list[ProgramCall]:
    """Return the tool calls of an episode in `PlainChatFormat`, in order."""
    chat_format = PlainChatFormat()
    calls: list[ProgramCall] = []
    unanswered: dict[tuple[str, int], list[ProgramCall]] = {}
    """Calls of the newest reply of each row; their results follow in the order of the calls."""
    for body in (entry.decode() for entry in entries):
        if not isinstance(body, TurnEntry):
            continue
        waiting = unanswered.get((body.seat, body.row), [])
        for message in body.messages:
            if message["role"] == "tool" and waiting:
                waiting.pop(0).result = str(message["content"])
        reply = chat_format.parse(body.tokens.decode().token_ids.tolist())
        new = [ProgramCall(call.name, call.arguments) for call in reply.tool_calls]
        unanswered[body.seat, body.row] = new
        calls += new
    return calls


def offered_schemas(entries: Iterable[JournalEntry]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield name and parameters of the tools that an episode's requests offered, as a JSON schema each."""
    for body in (entry.decode() for entry in entries):
        if isinstance(body, TurnEntry) and body.request is not None and body.request.tools:
            for name, _, parameters in msgspec.json.decode(body.request.tools):
                if isinstance(parameters, Mapping):
                    yield name, parameters
