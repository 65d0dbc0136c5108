"""External policies, which no engine of the run serves: behind an endpoint (`remote_policy.py`), or programs (bots).

Owns: the sessions of external policies, and the calls of bots; `EngineRouter` routes to them. An external policy
receives the conversation as JSON lines (`rollout/chat/byte_formats.py`), one token per byte; its completion is such a
line with logprob 0, recorded and replayed like any other and never trained.
Invariants: a bot's random numbers depend only on the call id of its turn, so a replayed turn is the same; a bot that
raises, or returns something other than text, ends the episode with an error.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Protocol

import numpy as np

from agentrl.core.errors import ConfigError, EpisodeError, format_foreign_error
from agentrl.core.ids import random_stream
from agentrl.core.records import Message, PolicyVersion
from agentrl.core.tokens import Completion, Tokens

if TYPE_CHECKING:
    from agentrl.config.policies import RemotePolicy
    from agentrl.core.ports import GenerateRequest, NewTokensCallback
    from agentrl.core.records import FinishReason

MAX_CHARACTERS = 1 << 20
"""Maximum length of a bot's turn, in characters: all of it goes to the journal."""
Program = Callable[[Sequence[Message], Random], "str | Awaitable[str]"]
"""Maps a conversation, newest message last, to the reply."""


def read_api_key(policy: str, config: RemotePolicy) -> str:
    """Return the key of a remote policy; empty if it has none.

    Raises:
        ConfigError: the environment has no such variable, or it cannot be sent.
    """
    name = config.api_key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError(f"policies.{policy}.api_key_env: the environment has no variable {name}; set it")
    if not key.isprintable() or not key.isascii():
        raise ConfigError(
            f"policies.{policy}.api_key_env: {name} contains characters that are not allowed in an HTTP header; "
            "correct it"
        )
    return key


class ExternalPolicy(Protocol):
    """A policy that no engine of the run serves."""

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Request a turn; `where` names episode and seat, for messages."""
        ...

    def abort(self, request_id: str) -> None:
        """End a call in flight without a token; does nothing if it is not in flight."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ExternalSession:
    """A session of an external policy. It holds no resources."""

    external: ExternalPolicy
    session_id: str

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        """Make one call. `on_delta` gets the whole reply at once."""
        return await self.external.generate(request, f"episode and seat {self.session_id}")

    async def wait_for_room(self) -> None: ...

    def hold(self, version: PolicyVersion) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bot:
    """A policy that is a program instead of a model."""

    policy: str
    program: Program

    async def generate(self, request: GenerateRequest, where: str) -> Completion:
        """Ask the program."""
        lines = bytes(request.token_ids.tolist()).decode().split("\n")[:-1]
        message_lines = [line for line in map(json.loads, lines) if "tools" not in line]
        conversation = [Message(role=line["role"], content=line["content"]) for line in message_lines]
        try:
            reply = self.program(conversation, random_stream("bot", request.seed))
            if inspect.isawaitable(reply):
                reply = await reply
        except EpisodeError:
            raise
        except Exception as error:
            raise self._failed(where, f"raised {format_foreign_error(error)}") from error
        if not isinstance(reply, str):
            raise self._failed(where, f"returned {reply!r:.200}; it must return text")
        if len(reply) > MAX_CHARACTERS:
            raise self._failed(where, f"returned {len(reply)} characters; at most {MAX_CHARACTERS} are allowed")
        line = json.dumps({"role": "assistant", "content": reply}, ensure_ascii=False) + "\n"
        return external_completion(self.policy, line.encode("utf-8", "replace"), "stop")

    def abort(self, request_id: str) -> None:
        """Do nothing: turns of a bot end at once, or are awaited."""

    async def close(self) -> None:
        """Do nothing: a bot holds no resources."""

    def _failed(self, where: str, problem: str) -> EpisodeError:
        return EpisodeError(f"{where}, policy {self.policy!r}: the bot {problem}", reason="bot_error")


def external_completion(policy: str, reply: bytes, reason: FinishReason) -> Completion:
    """Make the completion of an external policy from the bytes of its line."""
    token_ids = np.frombuffer(reply, dtype=np.uint8).astype(np.int32)
    return Completion.of(Tokens.of_version(token_ids, PolicyVersion(policy, 0, 0)), reason)
