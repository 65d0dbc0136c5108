"""The checker plays tool calls that no tool can answer, and reports what they end."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.clock import SystemClock
from agentrl.environment.environment import Split, TaskSource
from agentrl.testing import load_clock
from agentrl.testing.check import check_environment
from agentrl.testing.wrong_calls import BROKEN_JSON, OTHER_FORM, UNKNOWN, WRONG_ARGUMENTS
from tests.support.checks import keep_checks


@pytest.fixture(autouse=True)
def _only_these_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_checks(monkeypatch, "tasks", "episodes", "wrong_calls")


class Tasks(agentrl.Environment):
    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [agentrl.Task(id=f"{split}-{n}", data={"question": f"{split} {n}?"}) for n in range(4)]


class Adding(Tasks, agentrl.ToolEnvironment):
    @agentrl.tool
    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0


class OwnTools(Tasks):
    """Answers calls itself, and forgets that a name or the arguments may be wrong."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent", tools=(Adding.tool_table()["add"].spec,))
        message = agentrl.user(ctx.task.data["question"])
        for _ in range(3):
            turn = await agent.act(message)
            for call in turn.tool_calls:
                if isinstance(call.arguments, Mapping):
                    message = agentrl.user(str(self.answer(call.name, call.arguments)))
        agent.reward(0.0)

    def answer(self, name: str, arguments: Mapping[str, Any]) -> int:
        return {"add": lambda a, b: a + b}[name](**arguments)


class Forgiving(OwnTools):
    def answer(self, name: str, arguments: Mapping[str, Any]) -> int:
        return 0


def test_tools_answer_wrong_calls_themselves() -> None:
    for environment in (Adding, Forgiving):
        report = check_environment(environment)
        assert report.passed, report.text
        assert report.figures["wrong_calls"]["kinds"] == [UNKNOWN, WRONG_ARGUMENTS, OTHER_FORM, BROKEN_JSON]
        kinds = "an unknown tool, wrong arguments, a form that the run does not read, broken JSON"
        assert f"Wrong tool calls ({kinds}) caused no errors in 8 episodes." in report.text


def test_own_code_that_a_wrong_call_breaks_is_found_with_its_line() -> None:
    unknown, wrong_arguments = check_environment(OwnTools).findings
    line = OwnTools.answer.__code__.co_firstlineno + 1
    assert (
        f"every turn is a tool call with {UNKNOWN}: run() raised KeyError: 'no_such_tool' at {__file__}:{line}"
        in unknown
    )
    assert f"tool call with {WRONG_ARGUMENTS}: run() raised TypeError" in wrong_arguments
    assert "no_such_argument" in wrong_arguments
    assert "(in 2 of 2 episodes)" in wrong_arguments


class Slow(Adding):
    """Each episode takes half a minute of an idle machine."""

    now_s: ClassVar[float] = 0.0

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        Slow.now_s += 30.0
        return 0.0


def test_slow_episodes_are_played_with_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class EpisodeClock(SystemClock):
        monotonic = staticmethod(lambda: Slow.now_s)

    monkeypatch.setattr(load_clock, "LoadClock", EpisodeClock)
    report = check_environment(Slow)
    assert report.figures["wrong_calls"]["kinds"] == [UNKNOWN]
    assert f"20 s of an idle machine: wrong tool calls ({WRONG_ARGUMENTS}, {OTHER_FORM}, {BROKEN_JSON})." in report.text


PROGRAM = """
import json, os, urllib.request

tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]
messages = [{"role": "user", "content": "Add."}]
for _ in range(3):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "main", "messages": messages, "tools": tools}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as answer:
        message = json.load(answer)["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        tool = {"add": lambda a: a}[call["function"]["name"]]
        if not FORGIVES:
            tool(**json.loads(call["function"]["arguments"]))
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "0"})
"""


class Program(Tasks, agentrl.HarnessEnvironment):
    """A program that fails over each kind of wrong call."""

    seats = ("main",)
    command = (sys.executable, "-c", PROGRAM.replace("FORGIVES", "False"))

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 0.0


class Rewarded(Program):
    failed_reward = 0.0


class RefusesNames(Program):
    command = (sys.executable, "-c", PROGRAM.replace("FORGIVES", "True"))


def test_programs_that_wrong_calls_end_are_named_with_the_remedy() -> None:
    report = check_environment(Program, episodes=1)
    assert report.passed, report.text
    (warning,) = report.warnings
    assert warning.startswith(
        "wrong tool calls ended 3 of 4 episodes as an error (an unknown tool, wrong arguments, broken JSON): "
        "KeyError: 'no_such_tool'. Training drops"
    )
    assert "Set failed_reward = 0.0 in the class" in warning
    (warning,) = check_environment(RefusesNames, episodes=1).warnings
    assert "ended 1 of 4 episodes as an error (an unknown tool): KeyError" in warning


def test_programs_whose_failure_is_rewarded_are_counted() -> None:
    report = check_environment(Rewarded, episodes=1)
    assert report.passed, report.text
    assert report.warnings == []
    assert (
        "caused no errors in 4 episodes; in 3 of them the agent's program failed and got failed_reward = 0.0."
        in report.text
    )
