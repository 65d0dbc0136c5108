"""Stops that nothing else would end: each in a process of its own, which must end by itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.supervisor import run_guarding_event_loop
from agentrl.app.training import run_training
from agentrl.core import event_loop
from agentrl.core.records import StepReport
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.reader import RunReader
from agentrl.journal.run_process import RunProcessRecord
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.sim.small_run import TASKS, config_for, guess
from tests.support.recording_trainer import RecordingTrainer

STOP_SECONDS = 0.5


def _never() -> None:
    threading.Event().wait()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _terminate_and_hang() -> None:
    _terminate()
    _never()


def _interrupt_and_hang() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(60)


class Guess(agentrl.Environment):
    """Guesses once, and does `act` in the first episode."""

    seats = ("guesser",)
    act: Callable[[], object] | None = None

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Guess a digit."))
        act, Guess.act = Guess.act, None
        if act is not None:
            await act()  # type: ignore[misc]
        ctx.agent("guesser").reward(1.0)


class NeverTrains(RecordingTrainer):
    """Is told to stop in its second step, and never ends it."""

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        if step_id == 2:
            await asyncio.to_thread(_terminate_and_hang)
        return await super().optim_step(policy, step_id)


class NeverCloses(RecordingTrainer):
    """Never ends when it is closed."""

    async def close(self) -> None:
        await asyncio.to_thread(_never)


async def _block_the_loop() -> None:
    _terminate_and_hang()


async def _interrupt() -> None:
    _interrupt_and_hang()


async def _hang_in_a_thread() -> None:
    await asyncio.to_thread(_terminate_and_hang)


async def _stop() -> None:
    _terminate()


def play(directory: str, what: str) -> None:
    """One run, in this process."""

    async def engine(plan: object, versions: Mapping[str, object], tell: object, log: object) -> ScriptedEngine:
        if what == "start":
            await asyncio.to_thread(_terminate_and_hang)
        return ScriptedEngine(guess, versions=versions)  # type: ignore[arg-type]

    acts = {"loop": _block_the_loop, "ctrl-c": _interrupt, "thread": _hang_in_a_thread, "close": _stop}
    trainers = {"step": NeverTrains, "close": NeverCloses}
    Guess.act = acts.get(what)
    factories = RunFactories(
        engine=engine,
        trainer=lambda plan, run: trainers.get(what, RecordingTrainer)(["guesser"], versions=run / "versions"),
        chat_format=lambda model: PlainChatFormat(),
    )
    config = config_for(
        steps=6, name="run", directory=directory, checkpoint={"every": 1}, max_in_flight=4, stop_seconds=STOP_SECONDS
    )
    run = run_training(config, Guess, tasks=TASKS, factories=factories, resume=what == "resume")
    try:
        interrupted = run_guarding_event_loop(run, Path(directory, "run")).interrupted
    except KeyboardInterrupt:
        interrupted = True
    sys.exit(130 if interrupted else 0)  # as the command line does


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("start", ""),
        ("step", "finishing step 2 of guesser"),
        ("loop", "stop_seconds"),
        ("thread", ""),
        ("close", "waiting for the end of its processes"),
    ],
)
def test_a_stop_ends_within_its_limit(tmp_path: Path, what: str, told: str) -> None:
    program = f"import sys; from tests.unit.test_stops import play; play(sys.argv[1], {what!r})"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 130, done.stderr
    assert told in done.stderr
    reader = RunReader(tmp_path / "run")
    assert reader.standing() == "stopped"
    assert reader.ledger().holds
    reader.close()
    assert not RunProcessRecord.read(tmp_path / "run").is_playing, "it does not count as a death"


def _press_ctrl_c_until_it_ends(program: subprocess.Popen[str]) -> str:
    """Return the line that answers the first Ctrl-C, which the program sent itself; then press until it ends."""
    assert program.stderr is not None
    answer = next((line for line in program.stderr if "stopping" in line), "")
    with program:
        while program.poll() is None:  # presses within `SAME_PRESS_S` count as one
            program.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(0.2)
    return answer


def _line_of(code: str) -> int:
    return Path(__file__).read_text().splitlines().index(code) + 1


def test_ctrl_c_is_answered_while_code_blocks_the_loop_and_pressed_again_loses_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from tests.unit.test_stops import play; play(*sys.argv[1:])"]
    program = subprocess.Popen([*command, str(tmp_path), "ctrl-c"], stderr=subprocess.PIPE, text=True)
    answer = _press_ctrl_c_until_it_ends(program)
    assert (
        f"{__file__}:{_line_of('    threading.Event().wait(60)')} in _interrupt_and_hang: `threading.Event().wait(60)`"
        in answer
    )
    assert "Another signal, or Ctrl-C, ends at once, and --resume continues the run" in answer
    assert program.returncode == 130
    reader = RunReader(tmp_path / "run")
    assert reader.standing() == "stopped"
    reader.close()
    subprocess.run([*command, str(tmp_path), "resume"], capture_output=True, timeout=60, check=True)
    reader = RunReader(tmp_path / "run")
    assert reader.standing() == "finished"
    assert reader.ledger().holds
    reader.close()


def block() -> None:
    """A command that plays episodes without training, whose loop is blocked when Ctrl-C arrives."""

    async def play_episode() -> None:
        _interrupt_and_hang()

    event_loop.run(play_episode())


def test_a_command_without_a_run_answers_ctrl_c_and_ends_when_it_is_pressed_again() -> None:
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # background jobs ignore it
    command = [sys.executable, "-c", f"{listen}; from tests.unit.test_stops import block; block()"]
    program = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    answer = _press_ctrl_c_until_it_ends(program)
    assert answer.startswith("agentrl: the event loop is blocked by ")
    assert "in _interrupt_and_hang" in answer
    assert program.returncode == -signal.SIGINT


def test_the_limit_includes_the_teardown_of_python() -> None:
    """No thread runs meanwhile; with torch, it took more seconds than the rest of a stop."""
    program = """
import atexit, threading
from agentrl.app.stops import STOP_LIMIT

class Never:
    def __del__(self, wait=threading.Event().wait):
        wait()

atexit.register(STOP_LIMIT.end_process)
atexit.register(print, "told")
STOP_LIMIT.start(3600.0, print)
STOP_LIMIT.cancel()
STOP_LIMIT.resume()
never = Never()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "told\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_stops_a_run_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    """SIGUSR1 is what Slurm sends before its limit."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)

    class Told(RecordingTrainer):
        async def optim_step(self, policy: str, step_id: int) -> StepReport:
            if step_id == 2:
                os.kill(os.getpid(), number)
            return await super().optim_step(policy, step_id)

    async def engine(plan: object, versions: Mapping[str, object], tell: object, log: object) -> ScriptedEngine:
        return ScriptedEngine(guess, versions=versions)  # type: ignore[arg-type]

    factories = RunFactories(
        engine=engine,
        trainer=lambda plan, run: Told(["guesser"], versions=run / "versions"),
        chat_format=lambda model: PlainChatFormat(),
    )
    config = config_for(steps=6, name="run", directory=str(tmp_path), stop_seconds=3600.0)
    run = asyncio.run(run_training(config, Guess, tasks=TASKS, factories=factories, quiet=True))
    signal.signal(signal.SIGHUP, ignored)
    assert run.interrupted
    assert run.summary["steps"] == 2
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1


def test_the_warning_of_slurm_ends_no_process_of_a_run() -> None:
    """It reaches every process of a job step, also engines and trainers."""
    program = """
import os, signal
from agentrl.core.parent_death import die_with_parent

die_with_parent(os.getppid())
os.kill(os.getpid(), signal.SIGUSR1)
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n")
