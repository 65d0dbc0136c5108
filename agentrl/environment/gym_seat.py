"""A seat of an environment as a `gymnasium.Env`: text in, text out, for trainers and tools that speak gymnasium.

Owns: `SeatEnv` and the thread whose event loop runs the episode between two steps. Importing this imports gymnasium.
Invariants: the same seed and actions give the same episode, if the environment keeps to its rules; the answer to an
action is the seat's next messages or the end; `reset` or `step` raises an exception of the environment.
"""

from __future__ import annotations

import asyncio
import string
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.records import Message, Task
from agentrl.environment.base import Environment, EpisodeLimits, LimitReachedError, TaskSource
from agentrl.environment.unjournaled_context import ParseText, UnjournaledContext

Asked = tuple[tuple[Message, ...], "asyncio.Future[str]"]
CHARACTERS = string.printable
"""Default characters of the text space; other characters become `?`, since a space must contain every observation."""


class SeatEnv(gymnasium.Env[str, str]):
    """One seat of an environment as a `gymnasium.Env`; callables hold the other seats.

    Args:
        environment: the class.
        tasks: tasks that `reset` draws from, unless `options={"task": task}` names one.
        seat: name of the seat; default: the first.
        others: a callable for each other seat; it maps new messages to a reply.
        parse: finds tool calls in a seat's reply, e.g. `agentrl.core.reply_formats.parse_hermes`.
        max_turns: turns of one agent after which the episode is truncated.
        max_characters: longest observation and action; longer observations lose their beginning.
        characters: allowed characters.

    Example:
        >>> from agentrl.environment.gym_seat import SeatEnv
        >>> from agentrl.environments.frozen_lake import FrozenLake
        >>> env = SeatEnv(FrozenLake, FrozenLake.tasks("train"))
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step("R")
        >>> env.close()
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - so declared by gymnasium

    def __init__(
        self,
        environment: type[Environment],
        tasks: TaskSource,
        *,
        seat: str | None = None,
        others: Mapping[str, Callable[[Sequence[Message]], str]] | None = None,
        parse: ParseText | None = None,
        max_turns: int = 64,
        max_characters: int = 4096,
        characters: str = CHARACTERS,
    ) -> None:
        self._environment = environment
        self._tasks = tasks
        self._seat = environment.seats[0] if seat is None else seat
        if self._seat not in environment.seats:
            raise EnvironmentDefinitionError(
                f"{environment.__name__} has no seat {self._seat!r}; its seats: {', '.join(environment.seats)}"
            )
        self._others = dict(others or {})
        self._parse = parse
        self._limits = EpisodeLimits(max_turns=max_turns, max_tokens=max_characters, max_context=1 << 30)
        self._characters = frozenset(characters)
        self._max_characters = max_characters
        self.observation_space = spaces.Text(max_characters, min_length=0, charset=characters)
        self.action_space = spaces.Text(max_characters, min_length=0, charset=characters)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._episode: _Episode | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode; the observation is the seat's first messages.

        Raises:
            EnvironmentDefinitionError: the episode ends without asking the seat, or another seat has no callable.
        """
        super().reset(seed=seed)
        task = (options or {}).get("task")
        if task is None:
            task = self._tasks[int(self.np_random.integers(len(self._tasks)))]
        self._abandon()
        self._episode = _Episode(self._environment, self._context(task))
        self._wait(self._episode.start())
        if self._episode.asked is None:
            raise EnvironmentDefinitionError(
                f"{self._environment.__name__}, task {task.id!r}: seat {self._seat!r} never had a turn"
            )
        return self._observation(), {"task": task.id}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Send a reply; the reward is the seat's since the last step."""
        if self._episode is None or self._episode.asked is None:
            raise EnvironmentDefinitionError("step() after the episode's end: call reset() first")
        before = self._reward()
        self._wait(self._episode.answer(action))
        ended, truncated = self._episode.asked is None, self._episode.context.truncated
        info = {"metrics": dict(self._episode.context.metrics)} if ended else {}
        return self._observation(), self._reward() - before, ended and not truncated, truncated, info

    def close(self) -> None:
        """End the episode and the thread."""
        self._abandon()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None
        super().close()

    def _context(self, task: Task) -> UnjournaledContext:
        def speaker(say: Callable[[Sequence[Message]], str]) -> Callable[[Sequence[Message]], Awaitable[str]]:
            async def speak(messages: Sequence[Message]) -> str:
                return say(messages)

            return speak

        async def ask(messages: Sequence[Message]) -> str:
            assert self._episode is not None
            return await self._episode.ask(messages)

        speakers = {**{seat: speaker(say) for seat, say in self._others.items()}, self._seat: ask}
        seed = int(self.np_random.integers(1 << 62))
        return UnjournaledContext(task, speakers, limits=self._limits, seed=seed, parse=self._parse)

    def _observation(self) -> str:
        assert self._episode is not None
        if self._episode.asked is None:
            return ""
        text = "\n".join(message.content for message in self._episode.asked[0])
        known = "".join(letter if letter in self._characters else "?" for letter in text)
        return known[-self._max_characters :]

    def _reward(self) -> float:
        assert self._episode is not None
        agents = self._episode.context.agents.items()
        return sum(sum(agent.rewards) for (seat, _), agent in agents if seat == self._seat)

    def _abandon(self) -> None:
        if self._episode is not None:
            self._wait(self._episode.abandon())
            self._episode = None

    def _wait(self, step: Any) -> None:
        """Run a coroutine on the episode's own event loop: the caller may already run one, as notebooks do."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="SeatEnv", daemon=True).start()
        asyncio.run_coroutine_threadsafe(step, self._loop).result()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Episode:
    """A running `run()` that suspends whenever the seat must act."""

    def __init__(self, environment: type[Environment], context: UnjournaledContext) -> None:
        self.context = context
        self.asked: Asked | None = None
        """The seat's last request and the future for its answer; None once the episode has ended."""
        self._environment = environment
        self._questions: asyncio.Queue[Asked | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Run up to the first question."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        await self._advance()

    async def answer(self, text: str) -> None:
        """Answer the question and run up to the next one."""
        assert self.asked is not None
        self.asked[1].set_result(text)
        await self._advance()

    async def ask(self, messages: Sequence[Message]) -> str:
        """Wait for the seat's answer; called by the environment."""
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._questions.put_nowait((tuple(messages), future))
        return await future

    async def abandon(self) -> None:
        """Cancel the episode if it still runs."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _advance(self) -> None:
        self.asked = await self._questions.get()
        if self.asked is None and self._task is not None:
            await self._task

    async def _run(self) -> None:
        try:
            await self._environment().run(self.context)
        except LimitReachedError as limit:
            self.context.truncate(limit)
            value = self._environment.truncated_reward
            for agent in self.context.agents.values():
                if value is not None and agent.turns and not agent.rewards:
                    agent.reward(value)
        finally:
            self._questions.put_nowait(None)
