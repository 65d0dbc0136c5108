"""Environments of gem (package `gem-llm`): a text goes in, an observation and a reward come out."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl import Task, TaskSource
from agentrl.formats import DrawnTasks, EnvironmentDefinitionError, GameSeedTasks, Split, stated_reward, valid_unicode
from agentrl_formats.session import Call, Session, SessionEnvironment, Start, Step


class Gem(SessionEnvironment):
    """Environments of gem, by id, such as `game:Mastermind-v0-easy` or `rg:chain_sum`."""

    seats = ("player",)
    level = "replay"
    selects = ("id", "arguments")

    @classmethod
    def load(cls) -> None:
        import gem  # noqa: F401 - what it imports writes caches

    def session(self, task: Task) -> Session:
        return _Game(task.data["id"], task.data["seed"], task.data["arguments"])

    @classmethod
    def tasks(
        cls, split: Split, *, seed: int = 0, ids: Sequence[str] = (), arguments: Mapping[str, Any] | None = None
    ) -> TaskSource:
        """Return seeds of environments in turn. 512 seeds are held out.

        Args:
            split: the split.
            seed: seed of the training tasks.
            ids: ids of the environments.
            arguments: further arguments of `gem.make`.

        Raises:
            EnvironmentDefinitionError: there are no ids.
        """
        if isinstance(ids, str) or not ids:
            raise EnvironmentDefinitionError(
                f"ids = {ids!r}: list the ids of gem's environments, such as ['game:X-v0']"
            )
        seeds = GameSeedTasks(split, seed)
        data = dict(arguments or {})

        def draw(index: int, attempt: int) -> Task:
            name, drawn = ids[index % len(ids)], seeds[index]
            return Task(id=f"{name}-{drawn.id}", data={"id": name, "arguments": data, **drawn.data})

        return [draw(index, 0) for index in range(len(seeds))] if split == "held_out" else DrawnTasks(draw)


class _Game(Session):
    def __init__(self, id: str, seed: int, arguments: Mapping[str, Any]) -> None:
        import gem

        self._game, self._seed = gem.make(id, **arguments), seed

    async def start(self) -> Start:
        return {"messages": [self._message(*self._game.reset(seed=self._seed))], "tools": []}

    async def answer(self, text: str, calls: Sequence[Call]) -> Step:
        observation, reward, terminated, truncated, info = self._game.step(text)
        done = bool(terminated or truncated)
        value = stated_reward(reward, f"step() of {type(self._game).__name__}")
        return {"messages": [self._message(observation, info)], "reward": value, "done": done}

    def _message(self, observation: object, info: Mapping[str, Any]) -> dict[str, str]:
        """Return an observation with the prefix and suffix that gem's wrapper of observations adds.

        Raises:
            TypeError: it is not a text.
        """
        if not isinstance(observation, str):
            kind = f"{type(observation).__name__}, {reprlib.repr(observation)}"
            raise TypeError(f"{type(self._game).__name__}: an observation must be text, and is a {kind}")
        text, suffix = f"{info.get('prefix', '')}{observation}", info.get("suffix", "")
        newline = "\n" if text and suffix and not text.endswith("\n") else ""
        return {"role": "user", "content": valid_unicode(f"{text}{newline}{suffix}")}
