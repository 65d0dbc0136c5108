"""The token-prefix tree under clients that continue, branch, edit, compact and repeat conversations."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.core.records import FinishReason, Message, ToolSpec
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.external.token_tree import RequestPlacement, TokenTree

FORMAT = PlainChatFormat()
TOOLS = (ToolSpec(name="look", description="", parameters={"properties": {"at": {}}}),)
REPLIES = [b"yes", b"no", b" yes", b"caf\xc3\xa9", b"\xff", b"\xfe", b'<tool_call>{"name": "look"}</tool_call>']
"""Some are equal as text and differ as tokens."""
ACTIONS = ["continue", "branch", "edit", "edit_reply", "compact", "new", "repeat", "strip", "tools"]

pytestmark = pytest.mark.property


@dataclass
class Client:
    """A seat's clients beside the engine's own log of what it was given and what it sampled."""

    tree: TokenTree = field(default_factory=lambda: TokenTree(FORMAT))
    conversations: list[tuple[list[Message], tuple[ToolSpec, ...]]] = field(default_factory=list)
    in_flight: list[tuple[RequestPlacement, list[Message], tuple[ToolSpec, ...], list[int]]] = field(
        default_factory=list
    )
    calls: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """Row, context, sampled tokens."""
    causes: list[str | None] = field(default_factory=list)

    def ask(self, messages: list[Message], tools: tuple[ToolSpec, ...] = ()) -> None:
        placed = self.tree.find_row(messages, tools)
        self.causes.append(placed.cause)
        self.in_flight.append((placed, messages, tools, placed.context().tolist()))

    def answer(self, number: int, reply: bytes, finish_reason: FinishReason) -> None:
        placed, messages, tools, context = self.in_flight.pop(number % len(self.in_flight))
        assert placed.context().tolist() == context  # nothing reaches a row that a call continues
        sampled = [*reply, *([STOP_TOKEN] if finish_reason == "stop" else [])]
        said = FORMAT.parse(sampled)
        self.tree.answer(placed, sampled, finish_reason, said)
        self.calls.append((placed.row.number, context, sampled))
        self.conversations.append(([*messages, said], tools))


def user(text: str) -> Message:
    return Message(role="user", content=text)


def act(client: Client, action: str, pick: int, text: str) -> None:
    if action == "new" or not client.conversations:
        client.ask([user(text)])
        return
    messages, tools = client.conversations[pick % len(client.conversations)]
    replies = [n for n, message in enumerate(messages) if message.role == "assistant"]
    if action == "continue":
        client.ask([*messages, user(text)], tools)
    elif action == "repeat":
        client.ask(messages[: replies[-1]], tools)
    elif action == "branch":
        client.ask([*messages[: replies[pick % len(replies)] + 1], user(text)], tools)
    elif action == "edit":
        client.ask([user(text), *messages[1:], user("go")], tools)
    elif action == "edit_reply":
        changed = [*messages]
        at = replies[pick % len(replies)]
        changed[at] = replace(changed[at], content=text)
        client.ask([*changed, user("go")], tools)
    elif action == "compact":
        client.ask([user(f"so far: {text}"), *messages[replies[-1] :], user("go")], tools)
    elif action == "strip":
        client.ask([*messages[:-1], replace(messages[-1], content=messages[-1].content.strip()), user(text)], tools)
    else:
        client.ask([*messages, user(text)], () if tools else TOOLS)


steps = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS),
        st.integers(0, 9),
        st.sampled_from(["a", "b", "hello there"]),
        st.booleans(),
        st.sampled_from(REPLIES),
        st.sampled_from(["stop", "length"]),
    ),
    max_size=14,
)


@settings(max_examples=150)
@given(steps=steps)
def test_rows_are_what_the_engine_had_and_each_sampled_token_is_in_one(steps: list[tuple[Any, ...]]) -> None:
    client = Client()
    for action, pick, text, holds, reply, finish_reason in steps:
        act(client, action, pick, text)
        if not holds:
            client.answer(pick, reply, finish_reason)
    while client.in_flight:
        client.answer(0, b"end", "stop")
    for row in client.tree.rows:
        own = [(context, sampled) for number, context, sampled in client.calls if number == row.number]
        at = 0
        for context, sampled in own:
            assert row.tokens[: len(context)].tolist() == context
            assert row.tokens[len(context) : len(context) + len(sampled)].tolist() == sampled
            assert len(context) > at
            at = len(context) + len(sampled)
        assert at == len(row.tokens)
    assert sorted({number for number, _, _ in client.calls}) == [row.number for row in client.tree.rows]


def said(*texts: str) -> list[Message]:
    """User and assistant in turns."""
    return [Message(role="assistant" if n % 2 else "user", content=text) for n, text in enumerate(texts)]


def asked(
    tree: TokenTree, messages: list[Message], reply: bytes | None, tools: tuple[ToolSpec, ...] = ()
) -> RequestPlacement:
    placed = tree.find_row(messages, tools)
    if reply is not None:
        sampled = [*reply, STOP_TOKEN]
        tree.answer(placed, sampled, "stop", FORMAT.parse(sampled))
    return placed


def test_a_history_that_is_known_continues_its_row_with_the_tokens_that_were_sampled() -> None:
    tree = TokenTree(FORMAT)
    asked(tree, said("a"), b" \xff ")
    placed = asked(tree, said("a", "\ufffd", "b"), b"two")
    assert (placed.row.number, placed.cause, placed.new_messages) == (0, None, 1)
    assert bytes([10, 32, 255, 32]) in bytes(token % 256 for token in placed.row.tokens)


@pytest.mark.parametrize(
    ("messages", "tools", "cause"),
    [
        (said("a", "one", "b"), (), "branch"),
        (said("a", "one", "c"), (), "branch"),
        (said("a", "one", "b", "TWO", "c"), (), "reply"),
        (said("a", "one", "B", "two", "c"), (), "history"),
        (said("A", "one", "b", "two", "c"), (), "history"),
        (said("so far", "two", "c"), (), "history"),
        (said("a", "one", "b", "two", "c"), TOOLS, "tools"),
        (said("a", "few", "b", "shots", "c"), (), "reply"),
        (said("z", "few", "b", "shots", "c"), (), "conversation"),
        (said("hello"), (), "conversation"),
    ],
)
def test_why_a_row_begins_is_said(messages: list[Message], tools: tuple[ToolSpec, ...], cause: str) -> None:
    tree = TokenTree(FORMAT)
    asked(tree, said("a"), b"one")
    asked(tree, said("a", "one", "b"), b"two")
    assert asked(tree, messages, b"three", tools).cause == cause
    assert len(tree.rows) == 2


def test_a_branch_begins_with_the_tokens_that_it_shares() -> None:
    tree = TokenTree(FORMAT)
    asked(tree, said("a"), b"\xff")
    first = asked(tree, said("a", "\ufffd", "b"), b"two")
    second = asked(tree, said("a", "\ufffd", "c"), None)
    shared = second.row.tokens.index(255) + 2
    assert second.row.number == 1
    assert first.row.tokens[:shared] == second.row.tokens[:shared]


def test_a_history_that_fits_turns_of_different_tokens_is_quarantined() -> None:
    tree = TokenTree(FORMAT)
    first, second = tree.find_row(said("a"), ()), tree.find_row(said("a"), ())
    for placed, reply in ((first, b"\xff"), (second, b"\xfe")):
        tree.answer(placed, [*reply, STOP_TOKEN], "stop", FORMAT.parse(list(reply)))
    placed = asked(tree, said("a", "\ufffd", "b"), None)
    assert placed.cause == "ambiguous"
    assert placed.row.tokens.tolist() == FORMAT.start(said("a", "\ufffd", "b"), ())


def test_a_history_that_fits_turns_of_equal_tokens_continues_them_one_after_the_other() -> None:
    tree = TokenTree(FORMAT)
    held = [tree.find_row(said("a"), ()) for _ in range(2)]
    for placed in held:
        tree.answer(placed, [*b"yes", STOP_TOKEN], "stop", FORMAT.parse(list(b"yes")))
    rows = [asked(tree, said("a", "yes", text), None) for text in ("b", "c", "d")]
    assert [(placed.row.number, placed.cause) for placed in rows] == [(0, None), (1, None), (2, "branch")]


def test_what_was_placed_and_never_sampled_is_taken_back() -> None:
    tree = TokenTree(FORMAT)
    first = asked(tree, said("a"), b"one")
    before = first.row.tokens.tolist()
    tree.withdraw(tree.find_row(said("a", "one", "b"), ()))
    assert first.row.tokens.tolist() == before
    assert asked(tree, said("a", "one", "c"), b"two").row is first.row


def test_tokens_are_counted_without_a_trace() -> None:
    tree = TokenTree(FORMAT)
    asked(tree, said("a"), b"one")
    for messages in (said("a", "one", "b"), said("a", "one", "c"), said("new"), said("a", "altered", "b")):
        counted = tree.count_tokens(messages, ())
        placed = tree.find_row(messages, ())
        assert counted == len(placed.row.tokens)
        tree.withdraw(placed)
    before = len(tree.rows)
    tree.count_tokens(said(*map(str, range(99))), ())
    assert len(tree.rows) == before
    assert tree.find_row(said(*map(str, range(100))), ()).cause == "conversation", "what was counted is not known"
