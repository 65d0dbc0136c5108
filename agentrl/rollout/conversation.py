"""Message ↔ token bookkeeping of one agent. Sampled tokens are kept as they came; nothing is tokenised twice.

Invariants
1. The row's tokens are, turn by turn, `context_ids + token_ids`: exactly what the engine was sent and what it sampled,
   so the trainer's row is the engine's context to the token.
2. What new messages become in tokens is a function of `question`: where that was asked before, its tokens are known.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentrl.rollout.journaled_data import encode, encode_arguments

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat
    from agentrl.core.records import Completion, FinishReason, Int32Array, Message, ToolSpec


class Conversation:
    """One agent's rows of tokens, the last of them open."""

    __slots__ = ("_after", "_format", "_row_tokens", "_tools", "row")

    def __init__(self, chat_format: ChatFormat, tools: Sequence[ToolSpec]) -> None:
        self._format = chat_format
        self._tools = tools
        self._row_tokens = array("i")
        self._after: FinishReason | None = None
        self.row = 0

    def __len__(self) -> int:
        return len(self._row_tokens)

    def question(self, messages: Sequence[Message]) -> tuple[bytes, ...]:
        """All that the tokens of new messages depend on, to be hashed; shorter than they are, and sooner known."""
        if self._after is None:
            before = encode_arguments([(tool.name, tool.description, dict(tool.parameters)) for tool in self._tools])
        else:
            before = self._after.encode()
        return (self._format.fingerprint, before, *map(_said, messages))

    def ask(self, messages: Sequence[Message]) -> bytes:
        """Append messages; returns the context tokens that are new, as `int32`."""
        if self._after is None:
            context_ids = self._format.start(messages, self._tools)
        else:
            context_ids = self._format.extend(messages, after=self._after)
        context = array("i", context_ids).tobytes()
        self.ask_again(context)
        return context

    def ask_again(self, context: bytes) -> None:
        """Append the tokens that messages became when they were asked before."""
        self._row_tokens.frombytes(context)

    def answer(self, completion: Completion) -> None:
        """Append what the engine sampled."""
        self._row_tokens.frombytes(completion.token_ids.astype(np.intc, copy=False).tobytes())
        self._after = completion.finish_reason

    def restart(self) -> None:
        """Begin a new row."""
        if len(self._row_tokens):
            self.row += 1
        self._row_tokens = array("i")
        self._after = None

    def context(self) -> Int32Array:
        """The whole open row, as the engine is sent it; shape [T]."""
        return np.array(self._row_tokens, dtype=np.int32)


def _said(message: Message) -> bytes:
    """A message, to be hashed."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    beside: bytes = (encode_arguments if calls else encode)((message.role, message.tool_call_id, message.name, calls))
    return beside + message.content.encode("utf-8", "replace")
