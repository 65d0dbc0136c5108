"""The token-prefix tree of one seat: finds the row of tokens that a client's conversation continues.

A client sends its whole conversation with every request, and is free to edit it. `TokenTree` compares its messages with
the earlier requests and replies of the seat, and returns the tokens of the request: the engine's tokens of the longest
known history, then the tokens of the new messages. A row grows only at its end; if a history diverges from a row before
its end, a new row begins with the shared tokens.

Invariants
1. A turn's sampled tokens belong to one row, where they are trained. Rows that branch off after them hold the same
   tokens as context.
2. A row's tokens are, turn by turn, context and sampled tokens, as the engine had them: sampled tokens with a known
   history are never tokenized again.
3. Nothing is guessed: if a history fits turns of different tokens, the request gets a row rendered from its messages.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agentrl.core.ids import opening_digest
from agentrl.core.reply_formats import arguments_alone

if TYPE_CHECKING:
    import re
    from collections.abc import Sequence

    from agentrl.core.ports import ChatFormat
    from agentrl.core.records import FinishReason, Int32Array, Message, ToolSpec

ForkCause = Literal["conversation", "branch", "reply", "history", "tools", "ambiguous"]
"""Reason why a request did not continue a row.

* `conversation`: it holds no reply of the seat, so it begins one (a sub-agent, a compacted history).
* `branch`: its history was continued before, or another call continues it now.
* `reply`, `history`: the client changed a reply, or another message before one.
* `tools`: it offers other tools.
* `ambiguous`: its history fits several turns of different tokens, and the request is quarantined in a row that is
  rendered from its messages.
"""


@dataclass(slots=True, eq=False)
class TreeRow:
    """One row of tokens, including the context of a call in flight."""

    number: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    last: TurnEndPosition | None = None
    begun: int = 0
    """Number of tokens in the context of the conversation's first turn; 0 before it was answered."""
    is_busy: bool = False
    """Whether a call in flight continues the row."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnEndPosition:
    """A turn of a row."""

    row: TreeRow
    start: int
    end: int
    """Numbers of tokens of the row up to the first sampled one, and up to the end of the turn."""
    after: FinishReason

    @property
    def is_open(self) -> bool:
        """Whether a request may continue the row here."""
        return self.row.last is self and not self.row.is_busy

    def history(self) -> array[int]:
        """Tokens of the row up to the end of the turn."""
        return self.row.tokens[: self.end]

    def context(self) -> array[int]:
        """Tokens of the row before the turn."""
        return self.row.tokens[: self.start]

    def sampled(self) -> array[int]:
        """Tokens of the turn."""
        return self.row.tokens[self.start : self.end]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestPlacement:
    """The place of a request in the tree."""

    row: TreeRow
    before: int
    """Number of tokens of the row before this request's; 0 for a new row, even if it shares a prefix with another."""
    new_messages: int
    """Number of messages at the end of the request that no turn of the row has seen."""
    cause: ForkCause | None
    """Reason why the request began a row; None if it continues one, or begins the first."""
    path: bytes
    """Digest of the request's tools and messages."""
    bare_path: bytes
    """Digest of the request's messages."""

    @property
    def context_ids(self) -> bytes:
        """New context tokens of the row, as `int32`; read them before the turn is answered."""
        return self.row.tokens[self.before :].tobytes()

    def context(self) -> Int32Array:
        """Return the whole context for the engine; shape [T]. Call it before the turn is answered."""
        return np.frombuffer(self.row.tokens.tobytes(), dtype=np.int32)

    def opening(self) -> int:
        """Return the `GenerateRequest.opening` of the conversation. Call it before the turn is answered."""
        return opening_digest(self.row.tokens[: self.row.begun or None].tobytes())


class TokenTree:
    """The rows of one seat of one attempt.

    Args:
        chat_format: chat format of the seat's policy.
        volatile: patterns of text that differs between requests by nature, such as dates. A message that differs only
            there counts as known, and keeps the tokens of its first appearance.
    """

    def __init__(self, chat_format: ChatFormat, volatile: Sequence[re.Pattern[str]] = ()) -> None:
        self._format = chat_format
        self._volatile = volatile
        self.rows: list[TreeRow] = []
        """Rows in the order of their numbers."""
        self._turns: dict[bytes, list[TurnEndPosition]] = {}
        """Turns, keyed by the digest of tools and conversation up to their reply."""
        self._seen_paths: set[bytes] = set()
        """Digests of all prefixes of all conversations placed so far, without tools."""
        self._answered_paths: set[bytes] = set()
        """Digests of all answered conversations, without reply and tools."""
        self._replies: set[bytes] = set()
        """Digests of all replies."""

    def find_row(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> RequestPlacement:
        """Find or begin the row of a request; the row is busy until `answer` or `withdraw`.

        Raises:
            ModelError: the chat template refuses the conversation.
        """
        digests = [self._message_digest(message) for message in messages]
        paths, bare = _paths(_tools_digest(tools), digests), _paths(b"", digests)
        cause: ForkCause | None = self._cause(messages, digests, bare)
        turn, at, is_ambiguous = self._find_continued(paths)
        if turn is None:
            if is_ambiguous:
                cause = "ambiguous"
            elif cause == "branch":
                cause = "tools"
            row = TreeRow(len(self.rows), array("i", self._format.start(messages, tools)))
            before = 0
        else:
            new = self._extend(turn, messages, at, tools)
            row, before = turn.row, turn.end
            if turn.is_open:
                cause = None
                row.tokens.extend(new)
            else:
                row, before = TreeRow(len(self.rows), turn.history(), begun=row.begun), 0
                row.tokens.extend(new)
        if row.number == len(self.rows):
            cause = cause if self.rows else None
            self.rows.append(row)
        row.is_busy = True
        self._seen_paths.update(bare)
        return RequestPlacement(
            row=row, before=before, new_messages=len(messages) - at, cause=cause, path=paths[-1], bare_path=bare[-1]
        )

    def _find_continued(self, paths: Sequence[bytes]) -> tuple[TurnEndPosition | None, int, bool]:
        """Return the turn that a request continues, the number of its messages up to it, and whether several turns of
        different tokens qualify, so that none is taken; `paths` are the digests of the request's prefixes."""
        for at in range(len(paths) - 2, 0, -1):
            if turns := self._turns.get(paths[at]):
                turn = next((candidate for candidate in turns if candidate.is_open), turns[0])
                if any(candidate.history() != turn.history() for candidate in turns):
                    return None, 0, True
                return turn, at, False
        return None, 0, False

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> int:
        """Return the length of the context that a request would get, and leave the tree as it is.

        Raises:
            ModelError: the chat template refuses the conversation.
        """
        turn, at, _ = self._find_continued(
            _paths(_tools_digest(tools), [self._message_digest(message) for message in messages])
        )
        if turn is None:
            return len(self._format.start(messages, tools))
        return len(turn.history()) + len(self._extend(turn, messages, at, tools))

    def _extend(
        self, turn: TurnEndPosition, messages: Sequence[Message], at: int, tools: Sequence[ToolSpec]
    ) -> list[int]:
        """Return the tokens of the messages after a turn, which is the reply to the first `at` ones."""
        return self._format.extend(
            messages[at:],
            after=turn.after,
            turn=turn.sampled(),
            context=turn.context(),
            earlier=messages[:at],
            tools=tools,
        )

    def answer(
        self, placement: RequestPlacement, token_ids: Sequence[int], finish_reason: FinishReason, reply: Message
    ) -> TurnEndPosition:
        """Append the tokens of a sampled turn; `reply` is the message as the client gets it."""
        row = placement.row
        row.begun = row.begun or len(row.tokens)
        start = len(row.tokens)
        row.tokens.extend(token_ids)
        turn = row.last = TurnEndPosition(row, start, len(row.tokens), finish_reason)
        row.is_busy = False
        digests = self._message_digest(reply)
        self._replies.add(digests)
        self._answered_paths.add(placement.bare_path)
        self._seen_paths.add(_next(placement.bare_path, digests))
        self._turns.setdefault(_next(placement.path, digests), []).append(turn)
        return turn

    def identity(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> bytes:
        """Return the digest of a request's tools and messages; equal for requests that get the same place."""
        return _paths(_tools_digest(tools), [self._message_digest(message) for message in messages])[-1]

    def restate(self, placement: RequestPlacement, context: Int32Array) -> RequestPlacement:
        """Give a request the context it had when its reply was recorded, instead of the one rendered now.

        If the context continues its row, the row continues; else a new row begins.
        """
        row, before, old_context = placement.row, placement.before, array("i", context.tobytes())
        if old_context[:before] == row.tokens[:before]:
            del row.tokens[before:]
            row.tokens.extend(old_context[before:])
            return placement
        self.withdraw(placement)
        row = TreeRow(len(self.rows), old_context, is_busy=True)
        self.rows.append(row)
        return replace(placement, row=row, before=0)

    def withdraw(self, placement: RequestPlacement) -> None:
        """Remove the context of a request for which nothing was sampled."""
        del placement.row.tokens[placement.before :]
        placement.row.is_busy = False

    def _message_digest(self, message: Message) -> bytes:
        """Return the digest of a message for comparisons. It ignores white space around the text of a reply, and the
        key order and spelling of arguments, because clients rewrite them. A lone surrogate is a question mark, as
        in requests (`gateway.bodies.parse_json`)."""
        content = message.content.strip() if message.role == "assistant" else message.content
        for pattern in self._volatile:
            content = pattern.sub("", content)
        calls = [(call.id, call.name, _arguments(call.arguments)) for call in message.tool_calls]
        parts = json.dumps((message.role, message.tool_call_id, message.name, calls, content), ensure_ascii=False)
        return hashlib.blake2b(parts.encode("utf-8", "replace"), digest_size=16).digest()

    def _cause(self, messages: Sequence[Message], digests: Sequence[bytes], bare: Sequence[bytes]) -> ForkCause:
        """Return the reason why a request would begin a row; `digests` and `bare` are digests of its messages and of
        its prefixes."""
        num_shared = next((n for n in range(len(messages), -1, -1) if bare[n] in self._seen_paths), 0)
        if self._replies.isdisjoint(digests) and not (
            messages[num_shared:] and bare[num_shared] in self._answered_paths
        ):
            return "conversation"
        if all(message.role != "assistant" for message in messages[num_shared:]):
            return "branch"
        return "reply" if messages[num_shared].role == "assistant" else "history"


def _arguments(arguments: object) -> str:
    """Normalize the spelling of arguments."""
    value = arguments
    if isinstance(value, str):
        value = arguments_alone(value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    try:
        return json.dumps(_with_integers(value), sort_keys=True, ensure_ascii=False, default=dict)
    except (TypeError, ValueError, RecursionError):
        return str(arguments)


def _with_integers(value: Any) -> Any:
    """Write whole numbers as integers, as JavaScript does when it sends back what it received."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _with_integers(item) for key, item in value.items()}
    return [_with_integers(item) for item in value] if isinstance(value, list | tuple) else value


def tools_text(tools: Sequence[ToolSpec]) -> str:
    """Write tools as JSON text; equal for tools that get the same row."""
    digests = [(tool.name, tool.description, tool.parameters) for tool in tools]
    return json.dumps(digests, sort_keys=True, default=dict)


def _tools_digest(tools: Sequence[ToolSpec]) -> bytes:
    return hashlib.blake2b(tools_text(tools).encode(), digest_size=16).digest()


def _paths(start: bytes, digests: Sequence[bytes]) -> list[bytes]:
    """Return the digests of the first 0, 1, … messages after a start."""
    paths = [_next(b"", start)]
    for digest in digests:
        paths.append(_next(paths[-1], digest))
    return paths


def _next(path: bytes, digests: bytes) -> bytes:
    return hashlib.blake2b(path + digests, digest_size=16).digest()
