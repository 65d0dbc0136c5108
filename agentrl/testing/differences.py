"""Compares two executions of an episode: their calls, results and ends."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.journal.entries import (
    EffectEntry,
    EffectIntentEntry,
    JournalEntry,
    NondeterministicValueEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
)
from agentrl.rollout.calls.mismatch import describe_entry, shortened_repr
from agentrl.rollout.sandbox import NAME as SANDBOX
from agentrl.testing.execution import ExecutedEpisode


def difference(first: ExecutedEpisode, second: ExecutedEpisode) -> str | None:
    """Return how two executions of an episode differ; None if they agree."""
    before, after = first.header, second.header
    if before.reward != after.reward or before.stop_reason != after.stop_reason:
        return f"reward {after.reward} ({after.stop_reason}) instead of {before.reward} ({before.stop_reason})"
    problem = differing_call(first.entries, second.entries)
    if problem:
        return problem
    for name, state in first.states.items():
        if second.states.get(name) != state:
            return f"{name} ends as {shortened_repr(second.states.get(name))} instead of {shortened_repr(state)}"
    return None


def differing_call(first: Sequence[JournalEntry], second: Sequence[JournalEntry]) -> str | None:
    """Return how the calls of two executions differ; None if they agree."""
    then, now = _acts(first), _acts(second)
    for call_id in sorted(then.keys() | now.keys()):
        if call_id not in now or call_id not in then:
            return f"call {call_id} is {'missing' if call_id not in now else 'new'}"
        if then[call_id].request_hash != now[call_id].request_hash:
            old_text, new_text = describe_entry(then[call_id].decode()), describe_entry(now[call_id].decode())
            return f"call {call_id} differs after resuming ({old_text} → {new_text})"
        before, after = result_of(then[call_id]), result_of(now[call_id])
        if before != after:
            return f"call {call_id} returned {shortened_repr(after)} instead of {shortened_repr(before)}"
    return None


def _acts(entries: Sequence[JournalEntry]) -> dict[str, JournalEntry]:
    """Return the entries by call id, without the intents of `once` acts, which are not written if their answer is
    supplied."""
    return {entry.call_id: entry for entry in entries if not isinstance(entry.decode(), EffectIntentEntry)}


def result_of(entry: JournalEntry) -> object:
    """Return the observation that the program received, which is equal on every execution."""
    match entry.decode():
        case ToolEntry(observation=observation):
            return observation
        case ResourceCallEntry(value=value, error=error) if not _is_sandboxed(entry):
            return (value, error)
        case TurnEntry(tokens=tokens):
            return tokens.token_ids
    return None


def _is_sandboxed(entry: JournalEntry) -> bool:
    """Whether an entry is a command in a sandbox, whose duration differs, and which may print the time."""
    body = entry.decode()
    return isinstance(body, ResourceCallEntry) and body.resource.startswith(SANDBOX)


def is_external(entry: JournalEntry) -> bool:
    """Whether an entry is an answer of the outside world."""
    body = entry.decode()
    if isinstance(body, ResourceCallEntry):
        return body.level == "snapshot" and _is_sandboxed(entry)
    return isinstance(body, EffectEntry | NondeterministicValueEntry) or (isinstance(body, ToolEntry) and body.external)
