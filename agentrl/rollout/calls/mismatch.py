"""Messages about a re-execution that differs from the journal."""

from __future__ import annotations

from agentrl.core.errors import ReplayMismatchError
from agentrl.core.records import REWARD
from agentrl.core.text import agent_name, plural, valid_unicode
from agentrl.journal.entries import (
    BranchEntry,
    ChildResultEntry,
    EffectEntry,
    EntryBody,
    NondeterministicValueEntry,
    ResourceCallEntry,
    RewardEntry,
    SpawnEntry,
    ToolEntry,
    TurnEntry,
    UnansweredEntry,
)

CHARACTERS = 200
DIFFERENT_REQUEST = "the external agent sent a different request"

REMEDY = (
    "run() and tools must do the same when they run again: state on self, not on the class or in globals; randomness "
    "through ctx.rng, time through ctx.now(), the outside world through ctx.effect(). A tool reaches ctx through self: "
    "write self.ctx = ctx in run()"
)
REPLAY_REMEDY = "name what differs by nature in `volatile`, or set replay_stable = False"
FORK_REMEDY = "name what differs by nature in `volatile`"


def shortened_repr(value: object) -> str:
    """Return the `repr` of a value, at most `CHARACTERS` long."""
    text = valid_unicode(repr(value))
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"


def printable_excerpt(text: str) -> str:
    """Escape unprintable characters of a text, and cut it to twice `CHARACTERS`."""
    excerpt = valid_unicode(text)[: 2 * CHARACTERS]
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in excerpt)


def describe_entry(body: EntryBody) -> str:
    """Describe an entry in a few words, for messages."""
    match body:
        case TurnEntry():
            request = shortened_repr(" / ".join(_content(message) for message in body.messages))
            return f"a turn of {agent_name(body.seat, body.index)} asked {request}"
        case ToolEntry():
            return f"the tool call {body.name}({shortened_repr(body.arguments)})"
        case EffectEntry():
            return f"the effect {body.name!r}"
        case ResourceCallEntry():
            return f"the call {body.resource}.{body.method}({shortened_repr(body.arguments)})"
        case ChildResultEntry():
            return f"the wait for {body.child}"
        case SpawnEntry():
            return f"the start of {plural(len(body.children), 'child', 'children')} of {body.environment}"
        case RewardEntry():
            turn = "" if body.turn is None else f" for turn {body.turn}"
            name = "" if body.name == REWARD else f" for {body.name}"
            return f"a reward of {body.value} to {agent_name(body.seat, body.index)}{turn}{name}"
        case NondeterministicValueEntry(kind="gather"):
            return f"the order in which {len(body.value)} coroutines ended"
        case NondeterministicValueEntry():
            return f"{body.kind} = {shortened_repr(body.value)}"
        case UnansweredEntry():
            return f"a call that ended without a value ({body.stop_reason or 'cancelled'})"
        case BranchEntry():
            return (
                f"branch {body.number}"
                if body.number
                else f"the start of {plural(len(body.children), 'branch', 'branches')}"
            )
    return f"an entry of kind {type(body).__struct_config__.tag}"


def replay_mismatch(
    episode_id: str, call_id: str, then: str, now: str, *, code: tuple[str, str], remedy: str
) -> ReplayMismatchError:
    """Make the error of a re-execution that differs from the journal at a call.

    `then` and `now` are clauses, `code` holds the code's hashes then and now. `remedy` is the advice for code that did
    not change; it may be empty.
    """
    changed = code[0] != code[1]
    why = f"The environment's file has changed since ({code[0]} then, {code[1]} now)"
    advice = ""
    if not changed:
        why = f"The environment's file is the same ({code[1]})"
        advice = "Perhaps a module or program that it uses has changed" + (f". If not: {remedy}" if remedy else "")
    message = f"episode {episode_id}, call {call_id}: {then}, {now}. {why}" + (f". {advice}" if advice else "")
    return ReplayMismatchError(message, code_changed=changed, call_id=call_id, advice=advice)


def _content(message: dict[str, object]) -> str:
    return str(message.get("content", ""))
