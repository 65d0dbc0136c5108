"""Bots: programs that hold a seat. A bot is a function of its seat's conversation and of random numbers.

Owns: how a call to an engine becomes a call of the program, and what it said a completion. The context of a call is the
conversation as JSON lines (`rollout/json_format.py`), a byte a token; so is what comes back, with logprob 0.
Invariants: the random numbers of a turn follow from its call id alone, so a turn that is played again is the same; a
bot that raises, or says what is no text, ends the episode by name.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from agentrl.core.errors import EpisodeError, error_words
from agentrl.core.records import Message
from agentrl.core.rng import stream
from agentrl.engines.outside import completion

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import Completion

MAX_CHARACTERS = 1 << 20
"""Of a turn: all of it goes to the journal."""
Program = Callable[[Sequence[Message], Random], "str | Awaitable[str]"]
"""From the conversation, whose last message is the newest, to what is said."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bot:
    """See `outside.Outside`: the policy that a program is."""

    policy: str
    program: Program

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Ask the program."""
        lines = bytes(request.token_ids.tolist()).decode().split("\n")[:-1]
        told = [line for line in map(json.loads, lines) if "tools" not in line]
        conversation = [Message(role=line["role"], content=line["content"]) for line in told]
        try:
            said = self.program(conversation, stream("bot", request.seed))
            if inspect.isawaitable(said):
                said = await said
        except EpisodeError:
            raise
        except Exception as error:
            raise self._failed(where, f"raised {error_words(error)}") from error
        if not isinstance(said, str):
            raise self._failed(where, f"said {said!r:.200}, which is no text")
        if len(said) > MAX_CHARACTERS:
            raise self._failed(where, f"said {len(said)} characters; at most {MAX_CHARACTERS} are taken")
        line = json.dumps({"role": "assistant", "content": said}, ensure_ascii=False) + "\n"
        return completion(self.policy, line.encode("utf-8", "replace"), "stop")

    def abort(self, request_id: str) -> None:
        """Its turns are over at once, or are waited for."""

    async def close(self) -> None:
        """It holds nothing."""

    def _failed(self, where: str, what: str) -> EpisodeError:
        return EpisodeError(f"{where}, policy {self.policy!r}: the bot {what}", reason="bot_error")
