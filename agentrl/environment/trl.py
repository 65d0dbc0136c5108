"""Classes written for TRL's `environment_factory` run unchanged: `reset(**row)`, `get_reward()`, methods as tools.

They draw from the global random generators as they like (`own_random`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.core.errors import EnvironmentDefinitionError, RewardError
from agentrl.core.records import Message, Task
from agentrl.environment.base import EpisodeContext, LimitReachedError, Split, TaskSource, user
from agentrl.environment.tools import BoundTool, ToolEnvironment, ToolEpisode, bind_tools, run_tool

_RESERVED = {"reset", "get_reward", "tasks"}


def is_trl_class(candidate: type) -> bool:
    """Whether a class follows TRL's contract: it has a `reset` method."""
    return callable(getattr(candidate, "reset", None))


class TrlEnvironment(ToolEnvironment):
    """Runs one instance of a TRL-style class as an episode.

    The task's data is the dataset row: `reset` gets it as keyword arguments, a `prompt` entry is the first message, and
    the observation `reset` returns is appended to it.
    """

    own_random = True
    wrapped: ClassVar[type]

    instance: Any
    """The wrapped class's object, from the start of `run` on."""

    def prompt(self, task: Task) -> str:
        """The row's prompt: a string, or the last message of a list of messages."""
        prompt = task.data.get("prompt", "")
        if isinstance(prompt, list):
            return str(prompt[-1]["content"]) if prompt else ""
        return str(prompt)

    def reward(self, task: Task, episode: ToolEpisode) -> float:
        """Not used: the wrapped class judges through `get_reward`."""
        raise EnvironmentDefinitionError(f"{self.wrapped.__qualname__} has no get_reward()")

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        """The wrapped class's own `tasks(split, seed=…)`, if it has one."""
        own = getattr(cls.wrapped, "tasks", None)
        if own is None:
            return super().tasks(split, seed=seed)
        source: TaskSource = own(split, seed=seed)
        return source

    @classmethod
    def tool_table(cls) -> dict[str, BoundTool]:
        """The public methods of the wrapped class."""
        if "_tools" not in cls.__dict__ or cls._tools is None:
            names = [
                name
                for name, function in inspect.getmembers(cls.wrapped, inspect.isfunction)
                if not name.startswith("_") and name not in _RESERVED
            ]
            cls._tools = bind_tools(cls.wrapped, names)
        return cls._tools

    async def run(self, ctx: EpisodeContext) -> None:
        """Reset, converse, and ask the instance for its reward."""
        tools = self.tool_table()
        agent = ctx.agent(self.seats[0], tools=[bound.spec for bound in tools.values()])
        self.instance = self.wrapped()
        observation = await _awaited(self.instance.reset(**self._row(ctx.task.data)))
        text = self.prompt(ctx.task) + (observation if isinstance(observation, str) else "")
        pending: list[Message] = [user(text)]
        try:
            while pending:
                turn = await agent.act(*pending)
                pending = [await run_tool(ctx, self.instance, tools, call) for call in turn.tool_calls]
        except LimitReachedError as limit:
            ctx.truncate(limit)
        if not hasattr(self.instance, "get_reward"):
            raise EnvironmentDefinitionError(
                f"{self.wrapped.__qualname__} has no get_reward(): agentrl needs the reward from the class"
            )
        value = await _awaited(self.instance.get_reward())
        if value is None:
            raise RewardError(f"{self.wrapped.__qualname__}.get_reward returned None; return a number")
        agent.reward(value)

    def _row(self, data: Mapping[str, Any]) -> dict[str, Any]:
        parameters = inspect.signature(self.instance.reset).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return dict(data)
        return {parameter.name: data[parameter.name] for parameter in parameters if parameter.name in data}


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def adapt_trl(wrapped: type) -> type[TrlEnvironment]:
    """An `Environment` class that runs `wrapped` unchanged; the same class each time."""
    cached = wrapped.__dict__.get("__agentrl_environment__")
    if cached is not None:
        return cached  # type: ignore[no-any-return]
    namespace = {"wrapped": wrapped, "__module__": wrapped.__module__, "__doc__": wrapped.__doc__}
    adapted: type[TrlEnvironment] = type(wrapped.__name__, (TrlEnvironment,), namespace)
    adapted.tool_table()
    wrapped.__agentrl_environment__ = adapted  # type: ignore[attr-defined]
    return adapted
