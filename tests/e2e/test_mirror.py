"""`agentrl run mirror`: whatever is killed, the copy is a run that goes on, and lacks what was written last alone."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from benchmarks.chaos_oracle import judge
from tests.support.hosts import Hosts, unavailable

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 400


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process of Python that is killed at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-m", *arguments], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def play(place: Path, *more: str) -> tuple[str, ...]:
    return "benchmarks.chaos_run", "scripted", str(place), "0", *more


def steps_of(run: Path) -> int:
    with closing(sqlite3.connect(f"file:{run}/journal/control.db?mode=ro", uri=True)) as control:
        found: int = control.execute("SELECT count(*) FROM steps").fetchone()[0]
    return found


def test_a_run_whose_machine_is_lost_goes_on_from_its_mirror(tmp_path: Path) -> None:
    place, copy = tmp_path / "here", tmp_path / "there"
    place.mkdir()
    copy.mkdir()
    with running(*play(place, str(STEPS))) as run:
        control = place / "run" / "journal" / "control.db"
        while not control.exists() or steps_of(place / "run") < 4:
            assert run.poll() is None, run.communicate()
        with running("agentrl.cli", "run", "mirror", str(place / "run"), f"--to={copy}/run", "--every=0.1") as mirror:
            assert mirror.stdout is not None
            for _ in range(12):
                assert "has what the run wrote until" in mirror.stdout.readline()
            for process in (run, mirror):
                process.kill()
                process.wait()
    written = steps_of(place / "run")
    shutil.rmtree(place)
    mirrored = steps_of(copy / "run")
    assert 4 <= mirrored <= written < STEPS
    verdict = judge(copy, ended=False)
    assert not verdict.lost | verdict.twice | verdict.ledger_errors, verdict
    resumed = subprocess.run(
        [sys.executable, "-m", *play(copy, str(mirrored + 8), "resume")], capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    verdict = judge(copy, ended=True)
    assert not verdict.lost | verdict.twice | verdict.ledger_errors, verdict

    again = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "run", "mirror", str(copy / "run"), f"--to={copy}/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 2
    assert "resumed" in again.stderr


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_another_host_goes_on_when_the_run_s_own_is_lost() -> None:
    with Hosts(2) as hosts:
        hosts.start_ray([1, 2])
        Path(hosts.directory, "1", "tmp", "here").mkdir()
        Path(hosts.directory, "2", "tmp", "there").mkdir()
        run = hosts.start(1, [sys.executable, "-m", *play(Path("/tmp/here"), str(STEPS))], stderr=subprocess.DEVNULL)
        place = f"--to={hosts.address(2)}:/tmp/there/run"
        command = [sys.executable, "-m", "agentrl.cli", "run", "mirror", "/tmp/here/run", place, "--every=0.1"]
        while (
            not (control := hosts.directory / "1/tmp/here/run/journal/control.db").exists()
            or steps_of(control.parents[1]) < 2
        ):
            assert run.poll() is None
        with hosts.start(1, command, stdout=subprocess.PIPE) as mirror:
            for _ in range(3):
                assert "has what the run wrote until" in mirror.stdout.readline()
            hosts.kill(1)
            run.wait()
        mirrored = steps_of(hosts.directory / "2/tmp/there/run")
        verdict = judge(hosts.directory / "2/tmp/there", ended=False)
        assert not verdict.lost | verdict.twice | verdict.ledger_errors, verdict
        resumed = hosts.run(2, [sys.executable, "-m", *play(Path("/tmp/there"), str(mirrored + 4), "resume")])
        assert resumed.returncode == 0, resumed.stderr
        verdict = judge(hosts.directory / "2/tmp/there", ended=True)
        assert not verdict.lost | verdict.twice | verdict.ledger_errors, verdict
