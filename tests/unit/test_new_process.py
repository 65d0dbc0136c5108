"""The server that plays episodes of the check in forks: each is as a new process, and costs no import."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import termios
import time
from array import array
from pathlib import Path

import pytest

from agentrl.core.records import Task
from agentrl.testing import new_process
from agentrl.testing.new_process import DeadProcessError, Play, Played, play_in_new_process

SOURCE = """
import os
import agentrl

PLAYED = []


class E(agentrl.Environment):
    seats = ("main",)

    async def run(self, ctx):
        PLAYED.append(ctx.task.id)
        if ctx.task.id == "dies":
            os._exit(3)
        agent = ctx.agent("main")
        seen = [len(PLAYED), os.getcwd(), os.environ.get("OF_TEST"), os.getppid(), hash("a")]
        await agent.act(agentrl.user(repr(seen)))
        agent.reward(1.0)
"""


def seen(played: Played | None) -> list[object]:
    assert played is not None
    outcome = played.outcomes[0]
    assert outcome.failure is None, outcome.failure
    turns = [body for entry in outcome.entries if hasattr(body := entry.decode(), "messages")]
    values: list[object] = eval(turns[0].messages[0]["content"])  # noqa: S307 - written by the class above
    return values


def test_each_request_is_played_in_a_fresh_process_and_one_that_dies_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "environment.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_TEST", "first")

    def play(task_id: str, *, hash_seed: int = 0) -> Played | None:
        name = f"{tmp_path / 'environment.py'}:E"
        return play_in_new_process(Play(name, "random", [(0, Task(id=task_id, data={}))]), hash_seed=hash_seed)

    count, directory, variable, server, hash_of_text = seen(play("a"))
    assert (count, directory, variable) == (1, str(tmp_path), "first")
    with pytest.raises(DeadProcessError):
        play("dies")
    monkeypatch.setenv("OF_TEST", "second")
    assert seen(play("b")) == [1, str(tmp_path), "second", server, hash_of_text]
    assert seen(play("c", hash_seed=1))[3:] != [server, hash_of_text]


def test_the_server_starts_again_after_it_was_killed(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(SOURCE)
    play = Play(f"{tmp_path / 'environment.py'}:E", "random", [(0, Task(id="a", data={}))])
    first = seen(play_in_new_process(play))[3]
    new_process._shared_server(os.getpid()).close()
    assert seen(play_in_new_process(play))[3] != first


def test_reports_that_arrive_together_are_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a loaded machine, where the fork has ended before its start is read."""
    (tmp_path / "environment.py").write_text(SOURCE)
    monkeypatch.setattr(new_process, "IMPORT_S", 5.0)
    server = new_process._PlayerServer(0)
    report = server._report

    def late(seconds: float, too_long: str) -> tuple[int, int]:
        assert server._process is not None
        assert server._process.stdout is not None
        count, waiting = array("i", [0]), new_process._FRAME.size * 3
        while not has_read and count[0] < waiting:
            time.sleep(0.001)
            fcntl.ioctl(server._process.stdout, termios.FIONREAD, count)
        has_read.append(True)
        return report(seconds, too_long)

    has_read: list[bool] = []
    monkeypatch.setattr(server, "_report", late)
    try:
        play = Play(f"{tmp_path / 'environment.py'}:E", "random", [(0, Task(id="a", data={}))])
        assert seen(server.play(play))[0] == 1
    finally:
        server.close()


def test_the_server_has_one_thread(tmp_path: Path) -> None:
    (tmp_path / "environment.py").write_text(SOURCE)
    play = Play(f"{tmp_path / 'environment.py'}:E", "random", [(0, Task(id="a", data={}))])
    server = seen(play_in_new_process(play))[3]
    assert [*Path(f"/proc/{server}/task").iterdir()] == [Path(f"/proc/{server}/task/{server}")]


CHECKED_AT_IMPORT = """
import pathlib
import sys

import agentrl


class E(agentrl.Environment):
    seats = ("main",)

    async def run(self, ctx):
        await ctx.agent("main").act(agentrl.user(ctx.task.id))
        ctx.agent("main").reward(1.0)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}{number}", data={}) for number in range(4)]


with pathlib.Path("imports").open("a") as file:
    print(__name__, file=file)
assert agentrl.check_environment(E).passed
print("passed")
"""


@pytest.mark.parametrize("arguments", [["checked.py"], ["-c", "import checked"]], ids=["script", "module"])
def test_a_check_at_import_begins_no_endless_chain_of_processes(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "checked.py").write_text(CHECKED_AT_IMPORT)
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.stdout == "passed\n", ended.stderr
    assert len((tmp_path / "imports").read_text().splitlines()) <= 3
