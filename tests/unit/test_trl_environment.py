"""A class written for TRL's environment_factory runs unchanged."""

from __future__ import annotations

import json

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment.registry import resolve
from agentrl.journal.entries import ToolEntry, TurnEntry
from tests.unit.episodes import play


class CounterEnv:
    """As in TRL's documentation: a plain class, state on self, docstrings in Google style."""

    def __init__(self) -> None:
        self.counter = 0
        self.target = 0

    def reset(self, **kwargs: object) -> str | None:
        self.counter = 0
        self.target = int(str(kwargs["target"]))
        return f" Reach {self.target}."

    def increment(self, step: int) -> int:
        """Increment the counter.

        Args:
            step: how much.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

    async def peek(self) -> str:
        """Look at the counter."""
        return str(self.counter)

    def _private(self) -> None:
        raise AssertionError("not a tool")

    def get_reward(self) -> float:
        return 1.0 if self.counter == self.target else 0.0


class NamedRow(CounterEnv):
    def reset(self, target: int) -> str | None:  # type: ignore[override]
        super().reset(target=target)
        return None

    async def get_reward(self) -> float:  # type: ignore[override]
        return -1.0


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_it_runs_unchanged() -> None:
    environment = resolve(CounterEnv)
    assert issubclass(environment, agentrl.Environment)
    assert resolve(CounterEnv) is environment
    row = {"prompt": "Count.", "target": 5, "extra": 1}
    played = play(environment, [call("increment", step=2), call("increment", step=3), call("peek"), "ok"], data=row)
    assert played.header.reward == 1.0
    assert [entry.observation for entry in played.entries if isinstance(entry, ToolEntry)] == ["2", "5", "5"]
    first = next(entry for entry in played.entries if isinstance(entry, TurnEntry))
    assert first.messages[0]["content"] == "Count. Reach 5."


def test_chat_prompts_named_parameters_and_async_rewards() -> None:
    row = {"prompt": [{"role": "user", "content": "Count."}], "target": 5, "other": 0}
    played = play(resolve(NamedRow), ["no"], data=row)
    assert played.header.reward == -1.0


@pytest.mark.parametrize("reward", [True, None, "1.0", float("nan"), float("inf"), [1.0]])
def test_a_reward_that_is_no_number_is_refused_by_name(reward: object) -> None:
    class Wrong(CounterEnv):
        def get_reward(self) -> float:
            return reward  # type: ignore[return-value]

    played = play(resolve(Wrong), ["no"], data={"prompt": "", "target": 1})
    assert (played.header.reward, played.header.drop_reason) == (None, "bad_reward")
    assert "Wrong.get_reward(): the reward is" in played.said


def test_private_methods_are_no_tools() -> None:
    played = play(resolve(CounterEnv), [call("_private"), "x"], data={"prompt": "", "target": 1})
    [entry] = [entry for entry in played.entries if isinstance(entry, ToolEntry)]
    assert "'_private'" in entry.observation


def test_a_class_without_get_reward_is_refused_at_the_start() -> None:
    class Unjudged:
        def reset(self, **row: object) -> str:
            return "hello"

    with pytest.raises(EnvironmentDefinitionError, match="reward_funcs"):
        resolve(Unjudged)
