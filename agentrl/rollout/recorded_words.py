"""Recorded and asked things in a few words, for messages: shortened, and on one line whatever they contain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.core.errors import ReplayMismatchError
from agentrl.core.words import plural
from agentrl.environment.base import valid_unicode
from agentrl.journal.entries import (
    EffectEntry,
    GatherEntry,
    LimitEntry,
    OrderEntry,
    ResourceEntry,
    RewardEntry,
    SpawnEntry,
    ToolEntry,
    TurnEntry,
    ValueEntry,
)

if TYPE_CHECKING:
    from agentrl.journal.entries import EntryBody

CHARACTERS = 200

REMEDY = (
    "run() must do the same when it is run again: randomness through ctx.rng, time through ctx.now(), the outside "
    "world through ctx.effect()"
)


def shortened(value: object) -> str:
    """A value as Python writes it, at most `CHARACTERS` long."""
    text = valid_unicode(repr(value))
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"


def on_one_line(text: str) -> str:
    """Text with what cannot be printed escaped, at most twice `CHARACTERS` long."""
    shown = valid_unicode(text)[: 2 * CHARACTERS]
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in shown)


def in_words(body: EntryBody) -> str:
    """What an entry records."""
    match body:
        case TurnEntry():
            return f"a turn of {body.seat} asked {shortened(' / '.join(_content(m) for m in body.messages))}"
        case ToolEntry():
            return f"the tool call {body.name}({shortened(body.arguments)})"
        case EffectEntry():
            return f"the effect {body.name!r}"
        case ResourceEntry():
            return f"the call {body.resource}.{body.method}({shortened(body.arguments)})"
        case GatherEntry():
            return f"the wait for {body.child}"
        case SpawnEntry():
            return f"the start of {plural(len(body.children), 'child', 'children')}"
        case RewardEntry():
            return f"a reward of {body.value} to {body.seat}"
        case ValueEntry():
            return f"{body.kind} = {shortened(body.value)}"
        case LimitEntry():
            return f"the end of the episode's time ({body.stop_reason})"
        case OrderEntry():
            return f"the order in which {len(body.order)} branches ended"
    return f"an entry of kind {type(body).__struct_config__.tag}"


def departure(episode_id: str, call_id: str, then: str, now: str, *, code: tuple[str, str]) -> ReplayMismatchError:
    """Re-execution departs from the journal at a call; `then` and `now` are clauses, `code` the hashes then and now."""
    changed = code[0] != code[1]
    why = f"The code has changed since ({code[0]} then, {code[1]} now)"
    text = why if changed else f"The code is the same ({code[1]}): {REMEDY}"
    message = f"episode {episode_id}, call {call_id}: {then}, {now}. {text}"
    return ReplayMismatchError(message, code_changed=changed, call_id=call_id)


def _content(message: dict[str, object]) -> str:
    return str(message.get("content", ""))
