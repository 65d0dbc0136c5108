"""Environments that would end the process, or change it for everybody: they cost their own episodes, by name."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.supervisor import run_guarding_event_loop
from agentrl.app.training import Run, run_training
from agentrl.cluster.worker_pool import MIN_SUSPECT_DEATHS
from agentrl.core.errors import EnvironmentDefinitionError, EnvironmentFaultError, InputError, StorageError
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import as_environment
from agentrl.inspection.reader import RunReader
from agentrl.journal.run_process import RunProcessRecord, read_failure
from agentrl.journal.store import SqliteJournal
from agentrl.observe.run_directory import run_argument
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.sim.small_run import TASKS, config_for, guess
from tests.support.recording_trainer import RecordingTrainer


class BareError(BaseException):
    """Nothing of Python's own, and no `Exception`."""


async def _exit_in_a_branch(ctx: agentrl.EpisodeContext) -> None:
    async def leave() -> None:
        sys.exit(3)

    await ctx.gather(leave(), ctx.sleep(0.0))


async def _exit(ctx: agentrl.EpisodeContext) -> None:
    sys.exit(3)


async def _bare(ctx: agentrl.EpisodeContext) -> None:
    raise BareError("\x1b[2J no")


async def _generator_exit(ctx: agentrl.EpisodeContext) -> None:
    raise GeneratorExit


async def _interrupt(ctx: agentrl.EpisodeContext) -> None:
    raise KeyboardInterrupt


async def _interrupt_in_a_branch(ctx: agentrl.EpisodeContext) -> None:
    await ctx.gather(_interrupt(ctx), ctx.sleep(0.0))


async def _unprintable(ctx: agentrl.EpisodeContext) -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    raise UnprintableError


async def _cancel_itself_and_return(ctx: agentrl.EpisodeContext) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


async def _cancel_itself(ctx: agentrl.EpisodeContext) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def _deeper(depth: int = 0) -> int:
    return _deeper(depth + 1) + 1


async def _recurse(ctx: agentrl.EpisodeContext) -> None:
    _deeper()


async def _no_memory(ctx: agentrl.EpisodeContext) -> None:
    bytearray(1 << 60)


async def _run_a_loop(ctx: agentrl.EpisodeContext) -> None:
    main = asyncio.sleep(0)
    try:
        asyncio.run(main)
    finally:
        main.close()


class Hostile(agentrl.Environment):
    """Answers once, then does what a test wants it to, on the tasks of the digit 5."""

    seats = ("guesser",)
    act: ClassVar[Callable[[agentrl.EpisodeContext], object]]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        turn = await guesser.act(agentrl.user("Guess a digit."))
        if ctx.task.data["digit"] == "5":
            await type(self).act(ctx)  # type: ignore[misc]
        guesser.reward(float(turn.text.strip(".") == ctx.task.data["digit"]))


def play(
    directory: Path | str,
    act: Callable[[agentrl.EpisodeContext], object],
    *,
    resume: bool = False,
    quiet: bool = True,
    held_out: Sequence[agentrl.Task] | None = None,
    together: Callable[..., Run] = lambda running, directory: asyncio.run(running),
    **changes: object,
) -> Run:
    """A run of it, led by `together`."""

    async def engine(config: object, versions: object, tell: object, log: object) -> ScriptedEngine:
        return ScriptedEngine(guess, versions=versions)  # type: ignore[arg-type]

    environment = type("Evil", (Hostile,), {"act": staticmethod(act)})
    config = config_for(steps=6, name="run", directory=str(directory), checkpoint={"every": 1}, **changes)
    factories = RunFactories(
        engine=engine,
        trainer=lambda config, directory: RecordingTrainer(["guesser"], versions=directory / "versions"),
        chat_format=lambda model: PlainChatFormat(),
    )
    running = run_training(
        config, environment, tasks=TASKS, held_out=held_out, quiet=quiet, factories=factories, resume=resume
    )
    return together(running, Path(directory) / "run")


def dropped(directory: Path) -> dict[str, str]:
    """Reasons and details of the run's dropped episodes."""
    connection = sqlite3.connect(directory / "run/journal/control.db")
    rows = connection.execute("SELECT drop_reason, detail FROM episodes WHERE drop_reason IS NOT NULL").fetchall()
    connection.close()
    return {reason: detail for reason, detail in rows if reason != "run_ended"}


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (_exit, "run() raised SystemExit: 3 at "),
        (_exit_in_a_branch, "run() raised SystemExit: 3 at "),
        (_bare, "run() raised BareError: \x1b[2J no at "),
        (_generator_exit, "run() raised GeneratorExit:  at "),
        (_interrupt, "run() raised KeyboardInterrupt:  at "),
        (_interrupt_in_a_branch, "run() raised KeyboardInterrupt:  at "),
        (_unprintable, "UnprintableError: (its text cannot be made: KeyboardInterrupt) at "),
        (_cancel_itself, "the task of its run() was cancelled 3 times, and not by agentrl"),
        (_cancel_itself_and_return, "the task of its run() was cancelled 3 times, and not by agentrl"),
        (_recurse, "RecursionError: maximum recursion depth exceeded"),
        (_no_memory, "MemoryError"),
        (_run_a_loop, "RuntimeError: asyncio.run() cannot be called from a running event loop"),
    ],
)
def test_what_would_end_the_process_ends_the_episode(
    tmp_path: Path, act: Callable[[agentrl.EpisodeContext], object], told: str
) -> None:
    assert play(tmp_path, act).summary["steps"] == 6
    found = dropped(tmp_path)
    assert list(found) == ["environment_error"]
    assert told in found["environment_error"]


def _stop_the_loop() -> None:
    asyncio.get_running_loop().stop()


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def _cancel_all_and_return() -> None:
    _cancel_all()


async def _exit_soon() -> None:
    sys.exit(5)


async def _interrupt_soon() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (_stop_the_loop, "event loop"),
        (_cancel_all, "cancelled"),
        (_cancel_all_and_return, "cancelled"),
        (lambda: asyncio.ensure_future(_exit_soon()), "SystemExit: 5 at .*_exit_soon"),
        (lambda: asyncio.ensure_future(_interrupt_soon()), "KeyboardInterrupt"),
    ],
)
def test_who_breaks_the_loop_ends_the_run_with_the_names_of_the_episodes(
    tmp_path: Path, act: Callable[[], object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    broken: list[str] = []

    async def break_it(ctx: agentrl.EpisodeContext) -> None:
        if not broken:
            broken.append("now")
            act()
            if act is not _cancel_all_and_return:
                await asyncio.sleep(0.05)

    with pytest.raises(EnvironmentFaultError, match=told) as caught:
        play(tmp_path, break_it, together=run_guarding_event_loop)
    assert "(task 'digit-5')" in str(caught.value)
    assert caught.value.exit_code == 1
    (record,) = tmp_path.rglob("process.json")
    assert re.match(f"an environment .*{told}", read_failure(record.parent)), "the error that ended the run"
    assert play(tmp_path, break_it, resume=True, quiet=False).metrics[-1]["step"] == 6
    assert re.search(rf"WARNING .*{told}", capsys.readouterr().err)


def die_in(directory: Path, *, resume: bool, by: Callable[[], None]) -> int:
    """The exit code of one process of a run, which an episode ends before it has said anything."""

    async def kill(ctx: agentrl.EpisodeContext) -> None:
        by()

    child = os.fork()
    if child == 0:
        play(directory, kill, resume=resume)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leave() -> None:
    os._exit(3)


@pytest.mark.parametrize(("by", "code"), [(_kill, -signal.SIGKILL), (_leave, 3)])
def test_a_process_that_was_killed_is_told_of_with_its_episodes_and_two_are_suspicious(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], by: Callable[[], None], code: int
) -> None:
    async def nothing(ctx: agentrl.EpisodeContext) -> None: ...

    assert die_in(tmp_path, resume=False, by=by) == code
    first = RunProcessRecord.read(tmp_path / "run")
    assert (first.state, first.is_playing) == ("running", True)
    assert die_in(tmp_path, resume=True, by=by) == code
    second = RunProcessRecord.read(tmp_path / "run")
    assert second.process != first.process
    store = SqliteJournal(tmp_path / "run/journal")
    following = second.next(store)
    suspects = {s.task.id for s in second.running(store.unfinished) if following.deaths(s) >= MIN_SUSPECT_DEATHS}
    asyncio.run(store.close())
    assert "digit-5" in suspects
    play(tmp_path, nothing, resume=True, quiet=False)
    told = capsys.readouterr().err
    assert re.search(r"WARNING .* died .*\(task 'digit-5'\)", told)
    assert re.search(r"\(task 'digit-5'\).* 2 such deaths in a row: .*worker processes.* chat format", told)
    last = RunProcessRecord.read(tmp_path / "run")
    assert (last.state, last.is_playing, last.has_killer) == ("finished", False, False)


def test_a_forked_child_ends_as_it_asks_to(tmp_path: Path) -> None:
    ended = []

    async def fork(ctx: agentrl.EpisodeContext) -> None:
        child = os.fork()
        if child == 0:
            os._exit(7)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))  # noqa: ASYNC222 - it has ended

    assert play(tmp_path, fork).summary["steps"] == 6
    assert set(ended) == {7}
    assert dropped(tmp_path) == {}


def test_a_working_directory_that_changes_takes_no_file_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    async def move(ctx: agentrl.EpisodeContext) -> None:
        os.chdir(tmp_path / "elsewhere")

    run = play("runs", move)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert run.path == Path("runs/run")
    assert len(list((tmp_path / run.path / "checkpoints").iterdir())) > 1


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_a_run_directory_that_goes_away_under_its_run_ends_it(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"

    async def take_away(ctx: agentrl.EpisodeContext) -> None:
        if not run.exists():
            return
        if how == "removed":
            shutil.rmtree(run)
            return
        run.rename(tmp_path / "kept")
        if how == "replaced":
            shutil.copytree(tmp_path / "kept", run, ignore=shutil.ignore_patterns("control.sock"))

    with pytest.raises(StorageError, match="removed"):
        play(tmp_path, take_away)
    if how == "moved":
        (tmp_path / "kept").rename(run)
        assert play(tmp_path, lambda ctx: ctx.sleep(0.0), resume=True).metrics[-1]["step"] == 6


def test_ctrl_c_twice_ends_a_run_whose_loop_is_blocked(tmp_path: Path) -> None:
    is_blocked = threading.Event()

    async def block(ctx: agentrl.EpisodeContext) -> None:
        is_blocked.set()
        while True:
            time.sleep(0.05)  # noqa: ASYNC251 - as an environment should not

    child = os.fork()
    if child == 0:

        def press() -> None:
            is_blocked.wait()
            for _ in range(2):
                time.sleep(1.0)
                os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=press, daemon=True).start()
        play(tmp_path, block)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130
    reader = RunReader(tmp_path / "run")
    assert reader.standing() == "stopped"
    reader.close()


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), None, "low"])
def test_an_illegal_reward_nothing_can_be_below_or_above_is_refused(value: object) -> None:
    class Lake(agentrl.GymEnvironment):
        illegal_reward: ClassVar[float] = value  # type: ignore[assignment]
        make = render = parse = lambda self, *arguments: None  # type: ignore[assignment]

    with pytest.raises(EnvironmentDefinitionError, match="illegal_reward"):
        as_environment(Lake, where="lake")


def test_a_forked_child_that_comes_back_from_run_ends_and_its_parent_goes_on(tmp_path: Path) -> None:
    children: list[int] = []

    async def fork(ctx: agentrl.EpisodeContext) -> None:
        child = os.fork()
        if child == 0:
            raise ValueError("in the child")
        children.append(child)

    assert play(tmp_path, fork).summary["steps"] == 6
    assert {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children} == {1}
    assert dropped(tmp_path) == {}


def test_a_forked_child_that_stays_does_not_keep_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    store = SqliteJournal(directory)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    asyncio.run(store.close())
    asyncio.run(SqliteJournal(directory).close())
    os.close(writing)
    os.waitpid(child, 0)


def test_a_clock_that_an_environment_replaces_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def patch(ctx: agentrl.EpisodeContext) -> None:
        monkeypatch.setattr(time, "time", lambda: float("nan"))

    assert play(tmp_path, patch).summary["steps"] == 6


def test_text_no_database_can_hold_reaches_the_policy_without_it(tmp_path: Path) -> None:
    async def say(ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("a file called \ud800\x1b[2J"))

    assert play(tmp_path, say).summary["steps"] == 6
    assert dropped(tmp_path) == {}


@pytest.mark.parametrize("value", [1e308, -1e7, float("nan"), float("inf"), 10**400])
def test_rewards_nothing_can_be_computed_from_are_refused(tmp_path: Path, value: float) -> None:
    async def reward(ctx: agentrl.EpisodeContext) -> None:
        ctx.agent("guesser").reward(value)

    assert play(tmp_path, reward).summary["steps"] == 6
    assert "finite" in dropped(tmp_path)["bad_reward"]


def test_a_run_without_training_tasks_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    class Idle(Hostile):
        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
            return []

    config = config_for(name="run", directory=str(tmp_path))
    factories = RunFactories(chat_format=lambda model: PlainChatFormat())
    with pytest.raises(InputError, match=r"Idle\.tasks\('train', seed=0\) is empty"):
        asyncio.run(run_training(config, Idle, factories=factories))
    assert list(tmp_path.iterdir()) == []


def test_a_run_without_held_out_tasks_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def nothing(ctx: agentrl.EpisodeContext) -> None: ...

    play(tmp_path, nothing, quiet=False, held_out=[], evaluation={"tasks": 4})
    assert "nothing is evaluated: there are no held-out tasks" in capsys.readouterr().err


async def _remove_the_working_directory(ctx: agentrl.EpisodeContext) -> None:
    place = tempfile.mkdtemp()
    os.chdir(place)
    os.rmdir(place)


def test_a_working_directory_that_is_removed_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a run with a relative directory, and with alarms, whose commands name the run."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    run = play("home/runs", _remove_the_working_directory, together=run_guarding_event_loop)
    assert run.summary["steps"] == 6
    assert dropped(tmp_path / "home/runs") == {}
    assert run_argument(run.path) == "home/runs/run"
    assert run_argument((tmp_path / run.path).absolute()) == str(tmp_path / "home/runs/run")


@pytest.mark.parametrize(("module", "name"), [(os, "replace"), (os, "unlink"), (json, "dumps"), (shutil, "rmtree")])
def test_a_function_that_an_environment_removes_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str
) -> None:
    """As guards of untrusted programs do, for the whole process."""
    before = getattr(module, name)

    async def remove(ctx: agentrl.EpisodeContext) -> None:
        monkeypatch.setattr(module, name, None)

    with pytest.raises(EnvironmentFaultError, match=f"{module.__name__}.{name}") as caught:
        play(tmp_path, remove, together=run_guarding_event_loop)
    assert caught.value.exit_code == 1
    assert getattr(module, name) is before, "the caller's process is whole again"
    assert RunProcessRecord.read(tmp_path / "run").has_killer, "a resume plays its episodes in worker processes"
    assert f"{module.__name__}.{name}" in read_failure(tmp_path / "run")
