"""Programs that always crash: their reward hides nothing, and calls of the user's code are counted by their ends."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import aiohttp
import pytest

import agentrl
from agentrl.core.clock import SystemClock
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.environment.harness import missing_program
from agentrl.environment.registry import resolve
from agentrl.observe.alarms import ALWAYS_IN_A_ROW, find_alarms
from agentrl.observe.bottleneck import (
    MAX_CALLED,
    MAX_ERRORS,
    OTHER_ERRORS,
    ActivityClock,
    FailingCalls,
    failing_calls,
)
from agentrl.observe.metrics import EFFECT_ERROR, TOOL_ERROR
from agentrl.observe.run_state import RunDisplaySettings, RunSnapshot, RunState
from agentrl.testing import check
from tests.unit.episodes import Played, play


class Crashing(agentrl.HarnessEnvironment):
    """Gets a reply, and then raises."""

    seats = ("main",)
    failed_reward: ClassVar[float | None] = 0.25

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        body = {"model": "main", "messages": [{"role": "user", "content": "?"}]}
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as client,
            client.post(f"{endpoint.url}/chat/completions", json=body) as response,
        ):
            await response.read()
        return self.result()

    def result(self) -> str:
        raise TypeError("the JSON object must be str, not NoneType")

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0


class Sound(Crashing):
    def result(self) -> str:
        return "done"


ASK = """
import os, urllib.request
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    b'{"model": "main", "messages": [{"role": "user", "content": "?"}]}',
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
urllib.request.urlopen(request).read()
raise SystemExit(3)
"""


class Command(agentrl.HarnessEnvironment):
    """A command that gets a reply, and exits with a status of 3."""

    seats = ("main",)
    command: ClassVar[list[str]] = [sys.executable, "-c", ASK]
    failed_reward: ClassVar[float | None] = 0.25

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 1.0


class Lost(Crashing):
    """Adds `/v1` to an address that ends in it, and hides the answer."""

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as client,
            client.post(f"{endpoint.url}/v1/chat/completions", json={}) as response,
        ):
            await response.read()
        raise RuntimeError("no answer after 4 attempts")


def ended(played: Played) -> tuple[float | None, float, str]:
    return played.header.reward, played.metrics.get("program/failed", 0.0), played.told


def test_a_failed_program_is_a_metric_and_the_detail_of_its_episode() -> None:
    reward, failed, detail = ended(play(Crashing, ["yes"]))
    assert (reward, failed) == (0.25, 1.0)
    assert "program failed: TypeError: the JSON object must be str" in detail
    assert ended(play(Sound, ["yes"])) == (1.0, 0.0, "")


def test_so_is_a_command_with_another_status_than_0() -> None:
    reward, failed, detail = ended(play(Command, ["yes"]))
    assert (reward, failed) == (0.25, 1.0)
    assert "exit status 3" in detail


@pytest.mark.parametrize(("environment", "alarms"), [(Crashing, ["always_fails"]), (Sound, [])])
def test_a_program_that_always_fails_raises_an_alarm_with_its_commonest_error(
    environment: type[agentrl.Environment], alarms: list[str]
) -> None:
    played = [play(environment, ["yes"]) for _ in range(4)]
    totals: dict[str, float] = {}
    for episode in played:
        for name, value in episode.activity.items():
            totals[name] = totals.get(name, 0.0) + value
    state = RunState(plan=RunDisplaySettings(), status=RunSnapshot(phase="", failing=failing_calls(totals)))
    found = find_alarms(state)
    assert [alarm.name for alarm in found] == alarms
    for alarm in found:
        assert "the program of Crashing failed in all of its 4 calls" in alarm.text
        assert "TypeError: the JSON object must be str" in alarm.text
        assert "metric.program/failed > 0" in alarm.advice


@pytest.mark.parametrize(
    "error",
    [
        "OutputTokenLimitExceeded: Model token limit (provider default) exceeded",
        "LengthFinishReasonError: length limit",
    ],
)
def test_a_program_whose_replies_are_cut_is_told_the_limit_of_the_run(error: str) -> None:
    failing = {"the program of Clerk": FailingCalls(4.0, 4.0, 4.0, error)}
    plan = RunDisplaySettings(limits={"sampling.max_tokens": 64})
    (alarm,) = find_alarms(RunState(plan=plan, status=RunSnapshot(phase="", failing=failing)))
    assert alarm.text.endswith(f"{error}; this run cuts replies at sampling.max_tokens = 64")


class Confused(Crashing):
    """Fails over each reply in another way."""

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> Any:
        with contextlib.suppress(TypeError):
            await super().play(task, endpoint)
        raise ValueError(f"this is no {task.id}")


class Parsing(Crashing):
    """Takes the reply for JSON."""

    def result(self) -> str:
        return str(json.loads("hello"))


def test_a_program_that_fails_alike_in_every_episode_fails_the_check() -> None:
    """Other errors may come from random replies."""
    tasks = [agentrl.Task(id=name, data={}) for name in ("ant", "bee", "cow")]
    report = agentrl.check_environment(Crashing, tasks=tasks)
    (fault,) = [text for text in report.findings if "failed in all of 3 episodes" in text]
    assert "failed_reward = 0.25" in fault
    line = Crashing.result.__code__.co_firstlineno + 1
    assert f"TypeError: the JSON object must be str, not NoneType at {__file__}:{line} in result" in fault
    assert "end without an error" in fault
    for environment in (Confused, Parsing):
        report = agentrl.check_environment(environment, tasks=tasks)
        assert report.passed, report.text
        assert [text for text in report.warnings if "failed in all of 3 episodes" in text]
    assert not [text for text in agentrl.check_environment(Sound, tasks=tasks).warnings if "failed in all" in text]


HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["no-such-agent"], "there is no program 'no-such-agent' on PATH"),
        ([sys.executable, "agnt.py"], f"there is no file {HERE}/agnt.py"),
        ([sys.executable, str(HERE / "episode.py")], f"did you mean {HERE}/episodes.py?"),
        ([sys.executable, "episodes.py"], "write str(Path(__file__).with_name('episodes.py'))"),
        ([sys.executable, __file__], ""),
        ([sys.executable, "-c", ASK], ""),
        (["{task.program}", "{task.script}.py"], ""),
        (["touch", "answer.py"], ""),  # a file that the program makes
    ],
)
def test_a_program_that_does_not_exist_is_named_before_anything_is_played(command: list[str], problem: str) -> None:
    environment = type("Starting", (Command,), {"command": command, "__module__": __name__})
    assert problem in missing_program(environment)
    assert bool(problem) == bool(missing_program(environment))
    if problem:
        (fault,) = agentrl.check_environment(environment, tasks=[agentrl.Task(id="t", data={})]).findings
        assert problem in fault


# --- advice for a class with neither `ctx.agent` nor tools ------------------------------------------------------------


class Marked(Sound):
    @agentrl.tool
    def add(self, a: int) -> int:
        """Add."""
        return a


class Writing(Sound):
    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        with tempfile.TemporaryDirectory():
            return 1.0


class Unpaid(Sound):
    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> dict[str, float]:
        return {}


def definition_error() -> str:
    with pytest.raises(EnvironmentDefinitionError) as raised:
        resolve(Marked)
    return str(raised.value)


def checked(environment: type[agentrl.Environment]) -> str:
    return agentrl.check_environment(environment, tasks=[agentrl.Task(id="t", data={})]).text


def alarm_of_calls_without_tools() -> str:
    state = RunState(plan=RunDisplaySettings())
    metrics = {"format/broken_turns": 1.0, "episodes/turns": 1.0, "tool/not_offered": 1.0, "program/failed": 1.0}
    state.record("main", 1, metrics)
    (alarm,) = [alarm for alarm in find_alarms(state) if alarm.name == "illegal_output"]
    return alarm.line


def tasks_left_out() -> str:
    tasks = [agentrl.Task(id=f"t{number}", data={}) for number in range(4)]
    with patch.object(check, "PLAYING_S", 0.0):
        return agentrl.check_environment(Sound, tasks=tasks).text


ADVICE = {
    "a method marked as a tool": (definition_error, "tools that are offered to no seat"),
    "a side effect in reward": (lambda: checked(Writing), "changes files"),
    "a seat without a reward": (lambda: checked(Unpaid), "was given no reward"),
    "calls where no tool is offered": (alarm_of_calls_without_tools, "requests of the program offer no tool"),
    "tasks left out": (tasks_left_out, "Left out, because the check plays for about 0 s of an idle machine"),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_names_nothing_that_a_program_does_not_have(name: str) -> None:
    advice, told = ADVICE[name]
    text = advice()
    assert told in text
    assert not [part for part in ("ctx.agent", "@agentrl.tool", "@tool(", "agent.reward", "ctx.effect") if part in text]


# --- the counts -------------------------------------------------------------------------------------------------------


def counted(*errors: str | None, name: str = "effect 'grade'") -> ActivityClock:
    activity = ActivityClock(SystemClock())
    for error in errors:
        activity.count_call(name, error, EFFECT_ERROR)
    return activity


def is_alarming(activity: ActivityClock, standing: str = "running") -> bool:
    status = RunSnapshot(phase="", failing=failing_calls(activity.totals()))
    return bool(find_alarms(RunState(plan=RunDisplaySettings(), status=status, standing=standing)))


@pytest.mark.parametrize(
    ("errors", "alarming"),
    [
        ([], False),
        (["a"] * 3, False),
        (["a"] * 4, True),
        ([*["a"] * 9, None], False),
        ([None, *["a"] * 9], False),
        ([None, *["a"] * ALWAYS_IN_A_ROW], True),
        ([None, *["a"] * ALWAYS_IN_A_ROW, None], False),
        (["a", None] * 99, False),
    ],
)
def test_what_always_fails_or_has_failed_for_long_is_alarming(errors: list[str | None], alarming: bool) -> None:
    assert is_alarming(counted(*errors)) == alarming


def test_after_the_end_a_single_call_is_enough() -> None:
    assert not is_alarming(counted("a"))
    assert is_alarming(counted("a"), "finished")
    assert not is_alarming(counted("a", None), "finished")


def test_calls_are_counted_by_name_and_the_commonest_error_is_told() -> None:
    activity = counted("a", "b", "b", "c\nd")
    activity.count_call("tool search", None, "tool/error")
    assert failing_calls(activity.totals()) == {"effect 'grade'": FailingCalls(4.0, 4.0, 4.0, "b", EFFECT_ERROR)}


def test_the_counts_of_many_names_and_errors_are_bounded() -> None:
    activity = counted()
    for number in range(3 * MAX_CALLED):
        activity.count_call("name " + "x" * number, "error " + "y" * number, EFFECT_ERROR)
    assert len(failing_calls(activity.totals())) == MAX_CALLED
    activity.count_call("search", "no words", TOOL_ERROR)
    assert "search" in failing_calls(activity.totals()), "effects leave room for tools"
    for number in range(2 * MAX_ERRORS):
        activity.count_call("name ", f"late error {number}", EFFECT_ERROR)
    calls = 1.0 + 2 * MAX_ERRORS
    assert failing_calls(activity.totals())["name "] == FailingCalls(calls, calls, calls, OTHER_ERRORS, EFFECT_ERROR)


def test_a_path_that_the_gateway_does_not_have_is_named_where_the_program_hides_it() -> None:
    played = play(Lost, ["yes"])
    assert "there is no POST '/v1/v1/chat/completions' here" in played.told
    assert "endpoint.url already ends with /v1, which this request repeats" in played.told
