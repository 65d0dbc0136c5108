"""A running run is paused, resumed, drained and changed from another process; what cannot be done is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.control import ask_run
from agentrl.cli.main import main
from agentrl.core.control_messages import SOCKET, ControlRequest, short_socket_path
from agentrl.core.errors import InputError
from agentrl.inspection.overview import run_overview
from agentrl.inspection.reader import RunReader, list_runs
from agentrl.observe.run_state import read_run_snapshot

pytestmark = [pytest.mark.e2e]

PROGRAM = """
import asyncio, sys
from pathlib import Path
import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.load import SettingSources
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.engines.scripted import ScriptedEngine
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.recording_trainer import RecordingTrainer

class Slow(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx):
        for _ in range(2):
            turn = await ctx.agent("solver").act(agentrl.user("1 + 1"))
            await asyncio.sleep(0.02)
        ctx.agent("solver").reward(ctx.rng.random())

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"t{n}", data={}) for n in range(4)]

config = RunConfig(
    name="run", steps=100000, max_in_flight=int(sys.argv[1]), environment={"id": "unused"}, model={"path": "unused"},
    policies={"solver": {"step_size": 4}}, credit={"group_size": 2}, evaluation={"tasks": 0}, checkpoint={"every": 5},
)

async def engine(config, versions, tell, log):
    return ScriptedEngine([[ord("1"), STOP_TOKEN]], versions=versions, seconds_per_token=0.02)

def trainer(config, directory):
    return RecordingTrainer(["solver"], clock=SystemClock(), step_seconds=0.1, versions=directory / "versions")

factories = RunFactories(engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat())
sources = SettingSources(named={tuple(key.split(".")): 8 for key in sys.argv[3:]})
asyncio.run(run_training(config, Slow, factories=factories, resume=sys.argv[2] == "resume", sources=sources))
"""


class Running:
    """A run in another process, with a scripted engine and a trainer that learns nothing."""

    def __init__(self, directory: Path, max_in_flight: int = 8, how: str = "new", *named: str) -> None:
        self.path = directory / "runs/run"
        self.output = (directory / "output").open("a+")
        (directory / "program.py").write_text(PROGRAM)
        command = [sys.executable, "program.py", str(max_in_flight), how, *named]
        self.process = subprocess.Popen(command, cwd=directory, stdout=self.output, stderr=self.output)

    def until(self, holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 150
        while not holds():
            assert self.process.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.1)

    def steps(self) -> int:
        metrics = self.path / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def taken(self, more: int) -> None:
        before = self.steps()
        self.until(lambda: self.steps() >= before + more)

    def ask(self, act: str, setting: str = "") -> str:
        reply = ask_run(self.path, ControlRequest(act, setting))  # type: ignore[arg-type]
        if not reply.done:
            raise InputError(reply.text)
        return reply.text

    def told(self) -> str:
        return Path(self.output.name).read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.output.close()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(*options: Any) -> Running:
        started.append(Running(tmp_path, *options))
        return started[-1]

    yield start
    for run in started:
        if not run.output.closed:
            run.kill()


def test_a_run_is_paused_changed_killed_resumed_and_drained(  # noqa: PLR0915 - one run, told in order
    runs: Callable[..., Running], capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs()
    run.until(lambda: run.steps() >= 2 and (run.path / SOCKET).exists())
    assert (run.path / SOCKET).stat().st_mode & 0o777 == 0o600

    assert "pausing" in run.ask("pause")
    with pytest.raises(InputError, match="paused already"):
        run.ask("pause")
    run.until(lambda: (snapshot := read_run_snapshot(run.path)) is not None and snapshot.phase == "paused")
    assert (snapshot := read_run_snapshot(run.path)) is not None
    assert [line.state for line in list_runs(run.path.parent)] == ["running: paused"]
    assert snapshot.bottleneck == "a pause: `agentrl run resume run` continues the run"
    time.sleep(1.5)  # a step that had begun ends
    steps, size = run.steps(), _turns(run.path)
    time.sleep(2.0)
    assert (run.steps(), _turns(run.path)) == (steps, size), "nothing is sampled or trained while it is paused"
    assert run.ask("resume") == "the run continues"
    run.taken(3)

    assert "max_in_flight was 8 and is 4" in run.ask("set", "max_in_flight=4")
    assert "control: set max_in_flight = 4 (was 8) by " in run.told()
    for setting, message in (
        ("max_in_flight=4", "is 4 already"),
        ("max_in_flight=1", "group_size"),
        ("max_in_flight=many", "whole number"),
        ("policies.solver.step_size=8", "cannot change while the run runs.*may change: steps, max_in_flight"),
        ("no_such=1", "no such setting"),
        ("steps", "section.field=value"),
    ):
        with pytest.raises(InputError, match=message):
            run.ask("set", setting)
    run.taken(6)  # a checkpoint
    run.kill()
    with pytest.raises(InputError, match=r"is not running \(killed"):
        run.ask("pause")

    run = runs(8, "resume")
    run.taken(3)
    assert "max_in_flight was 8 and is 4" in run.told()
    snapshot = read_run_snapshot(run.path)
    assert snapshot is not None
    assert snapshot.in_flight <= 4
    run.kill()

    run = runs(8, "resume", "max_in_flight")
    run.taken(3)
    assert "max_in_flight was 4 and is 8" in run.told(), "the caller named it"
    assert main(["run", "set", str(run.path), "max_in_flight=6", "checkpoint.every=4"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in told] == ["max_in_flight was 8 and is 6", "checkpoint.every was 5 and is 4"]
    assert "a resume keeps it, unless it names --max_in_flight" in told[0]
    assert main(["run", "drain", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] is True
    assert run.process.wait(timeout=150) == 0, run.told()
    summary = json.loads((run.path / "summary.json").read_text())
    assert re.fullmatch(r"drained by \S+ \(process \d+\)", summary["ended_early"])
    assert not (run.path / SOCKET).exists()
    reader = RunReader(run.path)
    assert reader.standing() == "finished"
    assert reader.count("status = in_flight") == 0
    acts = [line.split(": ", 1)[1].split()[0] for line in run_overview(reader).controls]
    assert acts == ["pause", "resume", "set", "set", "set", "drain"]
    reader.close()
    assert main(["run", "stats", str(run.path)]) == 0
    assert "set max_in_flight = 4 (was 8) by " in " ".join(capsys.readouterr().out.split())
    assert main(["run", "ledger", str(run.path)]) == 0


def test_a_request_to_a_missing_run_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/first/journal").mkdir(parents=True)
    for arguments in (["drain", "firts"], ["set", "firts", "steps=1", "max_in_flight=8"]):
        assert main(["run", *arguments]) == InputError.exit_code
        assert f"no run firts in {tmp_path}/runs" in (said := capsys.readouterr().err)
        assert "did you mean first?" in said
    assert main(["run", "set", "steps=1", "max_in_flight=8"]) == InputError.exit_code
    assert "first is not running" in capsys.readouterr().err, "the newest run is meant"


def _turns(run: Path) -> int:
    return sum(path.stat().st_size for path in (run / "journal").glob("turns-*.db*"))


def test_a_run_with_a_long_path_is_reached(tmp_path: Path) -> None:
    run = tmp_path / ("x" * 120) / "run"
    run.mkdir(parents=True)
    with short_socket_path(run) as path, socket.socket(socket.AF_UNIX) as listener:
        assert len(path) < 108
        listener.bind(path)
    assert (run / SOCKET).is_socket()


def test_no_request_is_sent_to_a_run_that_is_not_led_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A received directory may contain a socket, or a link to one, of any process."""
    run = tmp_path / "run"
    with pytest.raises(InputError, match="no run run in"):
        ask_run(run, ControlRequest("pause"))
    (run / "journal").mkdir(parents=True)
    heard = tmp_path / "heard"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(heard))
        listener.listen()
        listener.setblocking(False)
        (run / SOCKET).symlink_to(heard)
        with pytest.raises(InputError, match="is not running"):
            ask_run(run, ControlRequest("drain"))
        (run / "process.json").write_text('{"state": "running", "machine": "another"}')
        with pytest.raises(InputError, match="no process of this machine leads it"):
            ask_run(run, ControlRequest("drain"))
        monkeypatch.setattr("agentrl.journal.run_process.find_writing_process", lambda directory: os.getpid())
        with pytest.raises(InputError, match="is not a socket of yours"):
            ask_run(run, ControlRequest("drain"))
        (run / SOCKET).unlink()
        with pytest.raises(InputError, match="starting or ending"):
            ask_run(run, ControlRequest("drain"))
        os.rename(heard, run / SOCKET)
        monkeypatch.setattr("agentrl.journal.run_process.find_writing_process", lambda directory: 1)
        with pytest.raises(InputError, match="belongs to another process than 1"):
            ask_run(run, ControlRequest("drain"))
        connection, _ = listener.accept()
        assert connection.recv(100) == b"", "nothing was sent"
        connection.close()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(InputError, match="belongs to another user"):
        ask_run(run, ControlRequest("drain"))
