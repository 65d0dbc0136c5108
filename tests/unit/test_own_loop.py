"""Functions that run an event loop, called where one is running: in notebooks and asynchronous tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core import own_loop
from agentrl.core.errors import CheckFailedError
from agentrl.core.own_loop import outside_event_loop
from agentrl.testing import play
from agentrl.testing.plugin import SeededSimulation

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
    assert report.rewards == [1.0] * 4
    assert in_running_loop(lambda: SeededSimulation(range(2)).run(lambda: asyncio.sleep(100, "slept"))) == ["slept"] * 2
    assert signal.getsignal(signal.SIGINT) is before


def test_what_it_raises_and_where_it_runs_are_the_callers() -> None:
    with pytest.raises(CheckFailedError, match="asked for reply 1"):
        in_running_loop(lambda: play(Echo, TASK, []))
    where = outside_event_loop(threading.current_thread)
    assert where() is threading.current_thread()
    assert in_running_loop(where) is not threading.current_thread()

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


def test_ctrl_c_cancels_what_runs_in_the_thread() -> None:
    ended: list[str] = []

    async def wait() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cleaned up")

    with pytest.raises(KeyboardInterrupt):
        in_running_loop(outside_event_loop(lambda: own_loop.run(wait())))
    assert ended == ["cleaned up"]


def press(handled: threading.Event) -> None:
    handled.clear()
    os.kill(os.getpid(), signal.SIGINT)
    assert handled.wait(60)


def test_signals_of_one_press_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loop, "SAME_PRESS_S", 3600.0)
    handled = threading.Event()

    def work() -> str:
        with own_loop.on_interrupt(handled.set, handled.set):
            press(handled)
            os.kill(os.getpid(), signal.SIGINT)
            threading.Event().wait(0.2)  # the main thread handles the signal meanwhile
        return "drained"

    assert in_running_loop(outside_event_loop(work)) == "drained"


def test_a_second_ctrl_c_cancels_a_drain_and_returns_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_loop, "SAME_PRESS_S", 0.0)
    monkeypatch.setattr(own_loop, "ENDING_S", 3600.0)
    handled, ended = threading.Event(), list[str]()

    async def drain() -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)
            handled.set()

        with own_loop.on_interrupt(handled.set, cancel):
            press(handled)
            press(handled)
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.3)
                ended.append("closed")

    with pytest.raises(KeyboardInterrupt):
        in_running_loop(outside_event_loop(lambda: asyncio.run(drain())))
    assert ended == ["closed"]


@pytest.mark.parametrize(("ending_s", "presses"), [(0.0, 2), (3600.0, 3)])
def test_what_does_not_end_is_abandoned_late_or_at_the_third_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, ending_s: float, presses: int
) -> None:
    monkeypatch.setattr(own_loop, "SAME_PRESS_S", 0.0)
    monkeypatch.setattr(own_loop, "ENDING_S", ending_s)
    handled, abandoned = threading.Event(), threading.Event()

    def work() -> None:
        with own_loop.on_interrupt(handled.set, handled.set):
            press(handled)
            press(handled)
            if presses > 2:
                os.kill(os.getpid(), signal.SIGINT)
            abandoned.wait(60)

    with pytest.raises(KeyboardInterrupt, match="still runs in a thread"):
        in_running_loop(outside_event_loop(work))
    abandoned.set()


def test_ctrl_c_before_the_loop_runs_counts() -> None:
    def start() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(0.2)  # the main thread handles the signal meanwhile
        own_loop.run(asyncio.sleep(3600))

    with pytest.raises(KeyboardInterrupt):
        in_running_loop(outside_event_loop(start))


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
