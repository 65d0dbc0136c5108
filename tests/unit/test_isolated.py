"""Objects in processes of their own: their crashes are errors of a call, and they leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import EffectError, EnvironmentDefinitionError
from agentrl.core.records import Task
from agentrl.environment.isolated import IsolatedObject, IsolatedObjectError, isolated


class Game:
    """Does whatever it is told."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError("below zero")
        self.value = start

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def process(self) -> int:
        return os.getpid()

    def draws(self) -> list[float]:
        import numpy as np

        return [random.random(), float(np.random.random())]

    def end(self, how: str) -> object:
        match how:
            case "exit":
                os._exit(3)
            case "abort":
                os.abort()
            case "sys.exit":
                sys.exit(3)
            case "raise":
                raise ValueError("no \ud800")
            case "odd":
                return object()
            case "memory":
                return len(bytearray(1 << 34))
            case "forever":
                while True:
                    pass
            case "closed":
                os.closerange(0, 100)
        return "alive"

    def fork(self) -> int:
        child = os.fork()
        if child == 0:
            time.sleep(3600)
        return child


def ask(make: Callable[[], IsolatedObject], play: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        return await play(make())

    return asyncio.run(main())


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def is_gone(process: int) -> bool:
    """Within five seconds; a zombie is gone."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_it_answers_from_a_process_of_its_own() -> None:
    async def play(game: Any) -> None:
        assert await game.process() != os.getpid()
        assert [await game.add(2), await game.add(3)] == [12, 15]

    ask(isolated(Game, 10), play)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("exit", r"exit code 3, in Game\.end"),
        ("abort", r"killed by SIGABRT, in Game\.end"),
        ("forever", r"0\.5 s .*Game\.end"),
        ("closed", r"ended.* in Game\.end"),
    ],
)
def test_the_end_of_its_process_is_an_error_of_the_call(how: str, told: str) -> None:
    async def play(game: Any) -> int:
        process: int = await game.process()
        with pytest.raises(IsolatedObjectError, match=told):
            await game.end(how)
        with pytest.raises(IsolatedObjectError, match="Game"):
            await game.add(1)
        return process

    assert is_gone(ask(isolated(Game, timeout_s=0.5 if how == "forever" else 30.0), play))


@pytest.mark.parametrize(
    ("how", "kind", "told"),
    [
        ("raise", "ValueError", "no "),
        ("sys.exit", "SystemExit", "3"),
        ("odd", "TypeError", "object"),
        ("memory", "MemoryError", "^$"),
    ],
)
def test_what_it_raises_is_raised_under_its_name_and_it_goes_on(how: str, kind: str, told: str) -> None:
    async def play(game: Any) -> None:
        with pytest.raises(IsolatedObjectError, match=told) as caught:
            await game.end(how)
        assert type(caught.value).__name__ == kind
        assert await game.add(1) == 1
        with pytest.raises(IsolatedObjectError, match="nothing"):
            await game.nothing()

    ask(isolated(Game, memory_bytes=1 << 32), play)


def test_a_factory_that_raises_says_so_once_and_then_again() -> None:
    async def play(game: Any) -> None:
        with pytest.raises(IsolatedObjectError, match="below zero"):
            await game.add(1)
        with pytest.raises(IsolatedObjectError, match=r"ended.*below zero"):
            await game.add(1)

    ask(isolated(Game, -1), play)


def test_the_warning_of_slurm_ends_neither_it_nor_its_maker() -> None:
    async def play(game: Any) -> int:
        process = await game.process()
        server = parent_of(process)
        assert server != os.getpid()
        for receiver in (process, server):
            os.kill(receiver, signal.SIGUSR1)
        return int(await game.add(2))

    assert ask(isolated(Game), play) == 2


def test_it_ends_with_its_object_and_what_it_forked_with_it() -> None:
    async def play(game: Any) -> list[int]:
        return [await game.process(), await game.fork()]

    processes = ask(isolated(Game), play)
    gc.collect()
    assert all(map(is_gone, processes))


def test_it_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal, sys\n"
        "from agentrl.environment.isolated import isolated\n"
        "from tests.unit.test_isolated import Game\n"
        "async def main():\n"
        "    game = isolated(Game)()\n"
        "    print(await game.process(), await game.fork(), flush=True)\n"
        "    asyncio.get_running_loop().call_later(0.2, os.kill, os.getpid(), signal.SIGKILL)\n"
        "    await game.end('forever')\n"
        "asyncio.run(main())\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    (tmp_path / "msgspec.py").write_text(
        "raise SystemExit(9)"
    )  # not to be imported: -P keeps the directory off the path
    ended = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert all(map(is_gone, map(int, ended.stdout.split())))


def test_it_ends_with_its_maker_although_another_process_holds_its_line() -> None:
    script = (
        "import asyncio, os\n"
        "from agentrl.environment.isolated import isolated\n"
        "from tests.unit.test_isolated import Game\n"
        "async def main():\n"
        "    game = isolated(Game)()\n"
        "    print(await game.fork(), flush=True)\n"
        "    if os.fork() == 0:\n"
        "        os._exit(len(os.read(0, 1)))\n"
        "asyncio.run(main())\n"
    )
    command, pipe = [sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdin=pipe, stdout=pipe, text=True) as maker:
        assert maker.stdout is not None
        forked = int(maker.stdout.readline())
        assert maker.wait() == 0
        assert is_gone(forked)


IMPATIENT = """
import os, signal, sys
from tests.unit import test_isolated

kill = os.killpg

def told_again(group, number):
    os.kill(os.getpid(), signal.SIGTERM)
    kill(group, number)

if sys.argv[0].endswith("environment/isolated.py"):
    os.killpg = told_again

class Game(test_isolated.Game):
    def maker(self):
        return os.getppid()
"""


def test_told_to_end_while_it_ends_it_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its line is closed by the death of its maker, of which the kernel tells it a moment later."""
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    monkeypatch.syspath_prepend(tmp_path)
    factory = importlib.import_module("impatient").Game

    async def play() -> list[int]:
        games: list[Any] = [isolated(factory)() for _ in range(2)]
        forked = [await game.fork() for game in games]
        server = await games[0].maker()
        os.kill(server, signal.SIGTERM)
        assert is_gone(server)
        return forked

    assert all(map(is_gone, asyncio.run(play())))


def test_its_draws_are_those_of_the_resource() -> None:
    def drawn(seed: int) -> Any:
        random.seed(seed)
        return ask(isolated(Game), lambda game: game.draws())

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("factory", [lambda: Game(), Game().add.__call__])
def test_a_factory_that_no_other_process_can_name_is_refused(factory: Callable[..., Any]) -> None:
    with pytest.raises(EnvironmentDefinitionError, match="top level"):
        isolated(factory)


class Played(agentrl.Environment):
    """Plays a game that crashes now and then."""

    seats = ("player",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        game = ctx.resource(isolated(Game, 1), level="replay")
        player = ctx.agent("player")
        for _ in range(3):
            await player.act(agentrl.user(str([await game.call("add", 2), await game.call("draws")])))
        with pytest.raises(EffectError, match="exit code 3"):
            await game.call("end", "exit")
        player.reward(1.0)


def test_an_environment_with_such_a_resource_comes_back_by_replay() -> None:
    tasks = [Task(id=f"{number}", data={}) for number in range(2)]
    report = agentrl.check_environment(Played, tasks=tasks, episodes=2)
    assert report.passed, report.text
    assert report.figures["resume_class"] == "replay"
    assert report.figures["resumptions"] > 10
