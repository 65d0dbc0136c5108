"""The journals that the contract suite is run over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from agentrl.core.records import EpisodeSpec
from agentrl.journal.entries import JournalEntry, RewardEntry, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.store import SqliteJournal

AnyJournal = MemoryJournal | SqliteJournal
Scenario = Callable[[AnyJournal], Awaitable[None]]
OnJournal = Callable[[Scenario], None]

INFO = {"name": "contract"}
"""Of a fresh journal."""


def entry(spec: EpisodeSpec, number: int) -> JournalEntry:
    """A reward of `number`."""
    body = encode_body(RewardEntry("agent", 0, float(number), None))
    return JournalEntry(spec.episode_id, spec.attempt, f"r#{number}", b"", body)
