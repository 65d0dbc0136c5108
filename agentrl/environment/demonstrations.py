"""The replies of an environment's `demonstrate`, one conversation at a time."""

from __future__ import annotations

import inspect
import json
from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING

from agentrl.core.errors import AgentRLError, CheckFailedError, InputError, describe_user_code_error
from agentrl.core.ids import random_stream
from agentrl.core.reply_formats import CLOSE, OPEN
from agentrl.environment.environment import Environment

if TYPE_CHECKING:
    from agentrl.core.records import Task
    from agentrl.environment.environment import Reply


def has_demonstrations(environment: type[Environment]) -> bool:
    """Whether a class overrides `demonstrate`."""
    return environment.demonstrate.__func__ is not Environment.demonstrate.__func__  # type: ignore[attr-defined]


class DemonstratedReplies:
    """The replies of `demonstrate` in one conversation.

    Args:
        environment: class with demonstrations.
        task: task of the episode.
        seat: seat that speaks.
        index: number of the seat's agent.
        seed: seed of the demonstration's random choices.
    """

    def __init__(self, environment: type[Environment], task: Task, seat: str, index: int, seed: int) -> None:
        self._environment = environment
        self._task = task
        self._seat = seat
        self._random = random_stream("demonstration", seed, task.id, seat, index)
        self._replies: Iterator[Reply] | None = None
        self._num_replies = 0

    def next(self, answer: str) -> Reply:
        """Return the reply to the environment's answer or, at first, to its first message.

        Raises:
            CheckFailedError: the demonstration failed, or has no further reply.
        """
        try:
            if self._replies is None:
                self._replies = self._begin(answer)
            is_answered = isinstance(self._replies, Generator) and self._num_replies > 0
            reply: Reply = self._replies.send(answer) if is_answered else next(self._replies)  # type: ignore[attr-defined]
        except StopIteration:
            raise CheckFailedError(
                f"demonstrate() of task {self._task.id!r} ended after {self._num_replies} replies, and the environment "
                "asked for another; the last reply must end the episode"
            ) from None
        except AgentRLError:
            raise
        except Exception as error:
            raise CheckFailedError(
                f"demonstrate() of task {self._task.id!r} raised {describe_user_code_error(error)}"
            ) from error
        self._num_replies += 1
        return reply

    def _begin(self, first_message: str) -> Iterator[Reply]:
        """Call `demonstrate` with the optional parameters that its signature names."""
        parameters = inspect.signature(self._environment.demonstrate).parameters
        arguments = {"seat": self._seat, "first_message": first_message}
        optional = {name: value for name, value in arguments.items() if name in parameters}
        replies = self._environment.demonstrate(self._task, self._random, **optional)
        return replies if isinstance(replies, Generator) else iter(replies)


def format_reply(reply: Reply) -> str:
    """Write a reply as the policy would."""
    if isinstance(reply, str):
        return reply
    encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
    try:
        calls = [reply] if isinstance(reply, Mapping) else list(reply)
        call_objects = [{"name": call["name"], "arguments": dict(call["arguments"])} for call in calls]
        return "".join(f"{OPEN}{encode(call)}{CLOSE}" for call in call_objects)
    except (TypeError, KeyError, ValueError) as error:
        raise InputError(
            f"demonstrate() gave {str(reply)[:200]!r}: a reply is text, a call as {{'name': …, 'arguments': {{…}}}} "
            "or a list of calls"
        ) from error
