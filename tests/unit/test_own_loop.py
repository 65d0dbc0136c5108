"""Functions that run an event loop, called where one is running: in notebooks and asynchronous tests."""

from __future__ import annotations

import asyncio
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError, EpisodeError
from agentrl.core.own_loop import outside_event_loop
from agentrl.core.records import ScoreRequest
from agentrl.rollout.scoring.function import FunctionScorer
from agentrl.testing import play
from agentrl.testing.plugin import SeededSimulation

if TYPE_CHECKING:
    from agentrl.core.records import Scored

CALLER = ContextVar("CALLER", default="nobody")


class Echo(agentrl.Environment):
    """One turn, rewarded where the caller's context variable has the wanted value."""

    seats = ("main",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("main").act(agentrl.user("say it"))
        ctx.metric("letters", float(len(turn.text)))
        ctx.agent("main").reward(float(CALLER.get() == "a notebook"))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return [agentrl.Task(id=str(number), data={}) for number in range(4)]


TASK = agentrl.Task(id="0", data={})


def in_running_loop(function: Any) -> Any:
    async def main() -> Any:
        CALLER.set("a notebook")
        return function()

    return asyncio.run(main())


def test_an_episode_is_played_and_an_environment_checked_in_a_running_loop() -> None:
    before = signal.getsignal(signal.SIGINT)
    played = in_running_loop(lambda: play(Echo, TASK, ["hello"]))
    assert (played.reward, played.stop_reason, played.metrics) == (1.0, "completed", {"letters": 5.0})
    assert str(played).startswith("PlayResult(reward=1.0, stop_reason='completed', metrics={'letters': 5.0}")
    report = in_running_loop(lambda: agentrl.check_environment(Echo))
    assert report.passed, report.text
    assert report.figures["rewards"] == [1.0] * 4
    assert in_running_loop(lambda: SeededSimulation(range(2)).run(lambda: asyncio.sleep(100, "slept"))) == ["slept"] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_what_it_raises_and_where_it_runs_are_the_callers() -> None:
    with pytest.raises(CheckFailedError, match="asked for reply 1"):
        in_running_loop(lambda: play(Echo, TASK, []))
    where = outside_event_loop(threading.current_thread)
    assert where() is in_running_loop(where) is threading.current_thread()

    async def main() -> bool:  # the caller's loop still works
        play(Echo, TASK, ["x"])
        return await asyncio.sleep(0, True)

    assert asyncio.run(main())


def test_a_warning_names_the_callers_line() -> None:
    for run in (in_running_loop, lambda function: function()):
        with pytest.warns(UserWarning, match="never asked for") as shown:
            run(lambda: play(Echo, TASK, ["x", "y"]))
        assert [warning.filename for warning in shown] == [__file__]


def test_an_error_does_not_begin_with_one_of_the_event_loop() -> None:
    with pytest.raises(CheckFailedError) as failed:
        play(Echo, TASK, [])
    assert "event loop" not in "".join(traceback.format_exception(failed.value))


def test_without_a_running_loop_a_thread_needs_no_signals() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.append(play(Echo, TASK, ["x"]).reward))
    thread.start()
    thread.join()
    assert results == [0.0]


def test_ctrl_c_interrupts_the_function_and_not_the_callers_loop() -> None:
    ended: list[str] = []

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cleaned up")

    async def main() -> str:
        with pytest.raises(KeyboardInterrupt):
            outside_event_loop(lambda: asyncio.run(wait()))()
        return await asyncio.sleep(0, "still runs")

    assert asyncio.run(main()) == "still runs"
    assert ended == ["cleaned up"]


def test_the_callers_loop_keeps_its_task_and_its_signal_handlers() -> None:
    async def main() -> bool:
        loop, task, handled = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR2, handled.set)
        play(Echo, TASK, ["x"])
        with pytest.raises(CheckFailedError):
            play(Echo, TASK, [])
        os.kill(os.getpid(), signal.SIGUSR2)
        async with asyncio.timeout(60):
            await handled.wait()
        loop.remove_signal_handler(signal.SIGUSR2)
        return (asyncio.get_running_loop(), asyncio.current_task()) == (loop, task)

    assert asyncio.run(main())


ALARM = """
import asyncio, signal
import agentrl

def grade():
    try:
        signal.signal(signal.SIGALRM, lambda *frame: None)
        signal.setitimer(signal.ITIMER_REAL, 60.0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return 1.0
    except {caught}:
        return 0.0

class E(agentrl.Environment):
    seats = ("main",)

    async def run(self, ctx):
        await ctx.agent("main").act(agentrl.user("?"))
        ctx.agent("main").reward({reward})

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=split, data={{}})]
"""
IN_THREAD = "await asyncio.to_thread(grade)"


def _environment(tmp_path: Path, caught: str, reward: str) -> str:
    (tmp_path / "grader.py").write_text(ALARM.format(caught=caught, reward=reward))
    return f"{tmp_path / 'grader.py'}:E"


def test_a_grader_with_an_alarm_gives_the_same_reward_in_a_running_loop(tmp_path: Path) -> None:
    environment = _environment(tmp_path, "Exception", "grade()")
    for run in (in_running_loop, lambda function: function()):
        assert run(lambda: play(environment, TASK, ["x"])).reward == 1.0
        report = run(lambda: agentrl.check_environment(environment))
        assert set(report.figures["rewards"]) == {1.0}, report.text


IN_EFFECT = f"await ctx.effect('grade', lambda: {IN_THREAD.removeprefix('await ')})"


@pytest.mark.parametrize(
    ("reward", "caught"),
    [
        pytest.param(IN_THREAD, "BaseException", id="thread"),
        pytest.param(IN_EFFECT, "Exception", id="effect"),
        pytest.param(IN_THREAD, "Exception", id="thread, Exception", marks=pytest.mark.exhaustive),
        pytest.param(IN_EFFECT, "BaseException", id="effect, BaseException", marks=pytest.mark.exhaustive),
    ],
)
def test_an_alarm_outside_the_main_thread_fails_the_episode_by_name(tmp_path: Path, reward: str, caught: str) -> None:
    environment = _environment(tmp_path, caught, reward)
    for run in (in_running_loop, lambda function: function()):
        with pytest.raises(CheckFailedError, match=r"signal\.signal.*main thread"):
            run(lambda: play(environment, TASK, ["x"]))
        report = run(lambda: agentrl.check_environment(environment))
        assert "main thread" in report.text
        assert not report.passed


def test_an_alarm_fails_the_episode_where_the_caller_is_no_main_thread(tmp_path: Path) -> None:
    environment, errors = _environment(tmp_path, "Exception", "grade()"), list[str]()

    def work() -> None:
        try:
            play(environment, TASK, ["x"])
        except CheckFailedError as error:
            errors.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in "".join(errors)


def test_a_tool_in_a_thread_cannot_hide_its_alarm() -> None:
    class Tool(agentrl.ToolEnvironment):
        """A tool that limits its own time."""

        @agentrl.tool(external=True)
        def calculate(self, expression: str) -> str:
            """Calculate.

            Args:
                expression: what to calculate.
            """
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
            except:  # noqa: E722 - as graders do
                return "wrong"
            return "right"

        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return 0.0

        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
            return [agentrl.Task(id="0", data={"question": "1"})]

    call = {"name": "calculate", "arguments": {"expression": "1"}}
    with pytest.raises(CheckFailedError, match="main thread"):
        play(Tool, Tool.tasks("train")[0], [call, "wrong"])


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
def test_a_scorer_in_a_thread_cannot_hide_its_alarm(tmp_path: Path, caught: str) -> None:
    _environment(tmp_path, caught, "0.0")
    grade = runpy.run_path(str(tmp_path / "grader.py"))["grade"]
    request = ScoreRequest(call_id="main.0.0?graded", where="here", seed=0, scored=cast("Scored", None))
    scorer = FunctionScorer(name="graded", function=lambda scored: asyncio.to_thread(grade))
    with pytest.raises(EpisodeError, match="main thread"):
        asyncio.run(scorer.score(request))


def test_a_signal_of_code_outside_episodes_stays_a_value_error() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [type(error) for error in errors] == [ValueError]


def test_the_module_is_the_command(tmp_path: Path) -> None:
    script = "import sys; from agentrl.cli.main import main; sys.exit(main())"
    for arguments in (["--version"], ["run", "list", "--help"], ["run", "stats", "nowhere"]):
        module, command = (
            subprocess.run([sys.executable, *start, *arguments], cwd=tmp_path, capture_output=True, check=False)
            for start in (["-m", "agentrl"], ["-c", script])
        )
        assert (module.returncode, module.stdout, module.stderr) == (command.returncode, command.stdout, command.stderr)


def test_a_message_of_the_assistant_is_part_of_the_prompt() -> None:
    class Shown(Echo):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            await ctx.agent("main").act(agentrl.user("1 + 1"), agentrl.assistant("two"), agentrl.user("2 + 2"))
            ctx.agent("main").reward(1.0)

    assert play(Shown, TASK, ["four"]).observations == ("1 + 1\ntwo\n2 + 2",)
    assert agentrl.assistant("two").role == "assistant"
