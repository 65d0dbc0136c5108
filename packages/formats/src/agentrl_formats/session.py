"""Tasks played through a session: what the policy says goes in, and messages and rewards come out.

A session is an object of a library in this process, or a connection to a server. Its calls are journaled, so they
return JSON.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, TypedDict

from agentrl import (
    Agent,
    Environment,
    EpisodeContext,
    LimitReachedError,
    Message,
    Task,
    ToolCall,
    ToolSpec,
    Turn,
)
from agentrl.formats import EffectError, IsolatedObject, IsolatedObjectError, ResourceLevel


class Call(TypedDict):
    """A tool call of the policy."""

    id: str
    name: str
    arguments: Any
    """A JSON object, or the text of arguments that are none."""


class Start(TypedDict):
    """The beginning of a session."""

    messages: list[dict[str, Any]]
    """The messages before the first turn, each with `role` and `content`; answers to calls also with `tool_call_id` and
    `name`, and messages of the model with `tool_calls`."""
    tools: list[dict[str, Any]]
    """The tools, each with `name`, `description` and `parameters`, a JSON schema."""


class Step(TypedDict):
    """What follows a turn."""

    messages: list[dict[str, Any]]
    """The messages before the next turn."""
    reward: float
    """Reward of the turn."""
    done: bool


class Session(ABC):
    """A task in progress."""

    @abstractmethod
    async def start(self) -> Start:
        """Begin the task."""

    @abstractmethod
    async def answer(self, text: str, calls: Sequence[Call]) -> Step:
        """Take in a turn of the policy."""

    async def cut(self) -> float:
        """Return the reward of a task that a limit ended, in addition to those of its turns. A turn that a limit on
        tokens cut ends it too, and is not answered."""
        return 0.0

    async def close(self) -> None:
        """Release what the session holds."""


class SessionEnvironment(Environment):
    """Base of the environments whose tasks are sessions."""

    level: ClassVar[ResourceLevel]
    """Recovery of a session; see `ctx.resource`."""
    failed_reward: ClassVar[float | None] = None
    """Reward of a turn that a session fails to answer, as the policy's calls may cause; it is the last one. None: the
    episode fails."""

    @abstractmethod
    def session(self, task: Task) -> Session | IsolatedObject:
        """Make the session of a task."""

    async def run(self, ctx: EpisodeContext) -> None:
        """Converse until the session is done, or a limit is reached."""
        sessions: list[Session | IsolatedObject] = []

        def make() -> Session | IsolatedObject:  # under the resource's random state
            sessions.append(self.session(ctx.task))
            return sessions[0]

        resource = ctx.resource(make, level=self.level, seed=ctx.task.data.get("seed"))
        try:
            start: Start = await resource.call("start")
            agent = ctx.agent(self.seats[0], tools=[ToolSpec(**tool) for tool in start["tools"]])
            step = Step(messages=start["messages"], reward=0.0, done=False)
            try:
                while not step["done"]:
                    turn = await agent.act(*map(_message, step["messages"]))
                    if turn.is_cut:
                        agent.reward(await resource.call("cut"))
                        break
                    try:
                        step = await resource.call("answer", turn.text, calls_of(turn))
                    except EffectError:
                        if self.failed_reward is None:
                            raise
                        step = Step(messages=[], reward=self.failed_reward, done=True)
                    reward_turn(agent, step["reward"])
            except LimitReachedError as limit:
                ctx.truncate(limit)
                agent.reward(await resource.call("cut"))
        finally:
            with contextlib.suppress(IsolatedObjectError):  # its process may have ended
                await sessions[0].close()


def calls_of(turn: Turn) -> list[Call]:
    """Return the tool calls of a turn as JSON data."""
    return [Call(id=call.id, name=call.name, arguments=call.arguments) for call in turn.tool_calls]


def reward_turn(agent: Agent, reward: float) -> None:
    """Reward the agent's newest turn."""
    agent.reward(reward, turn=len(agent.turns) - 1)


def message_data(message: Message) -> dict[str, Any]:
    """Return a message as JSON data."""
    calls = [Call(id=call.id, name=call.name, arguments=call.arguments) for call in message.tool_calls]
    return {**asdict(message), "tool_calls": calls}


def _message(data: Mapping[str, Any]) -> Message:
    calls = tuple(ToolCall(**call) for call in data.get("tool_calls", ()))
    return Message(**{**data, "tool_calls": calls})


def tool_message(call: Call, content: str) -> dict[str, str]:
    """Return the answer to a call."""
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["name"]}
