"""`agentrl run mirror`: whatever is killed, the copy is a run that goes on, and lacks what was written last alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.observe.run_state import MIRRORS_FILE, RunSnapshot, read_mirrors, read_run_snapshot
from tests.support.chaos_oracle import judge
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
    return "tests.support.chaos_run", "scripted", str(place), "0", *more


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


def next_error(mirror: subprocess.Popen[str]) -> dict[str, object]:
    """The next failed round that a mirror reports with `--json`."""
    assert mirror.stdout is not None
    while "error" not in (line := json.loads(mirror.stdout.readline())):
        pass
    return line


def next_copy(mirror: subprocess.Popen[str]) -> None:
    """Wait until a mirror has completed another round."""
    assert mirror.stdout is not None
    while "seconds" not in json.loads(mirror.stdout.readline()):
        pass


@pytest.mark.exhaustive
def test_a_mirror_outlives_the_loss_of_its_disk_and_the_run_knows(tmp_path: Path) -> None:
    place, copies = tmp_path / "here", tmp_path / "there"
    place.mkdir()
    copies.mkdir()
    command = ("run", "mirror", str(place / "run"), f"--to={copies}/run", "--every=0.1", "--json")
    with running(*play(place, str(STEPS))) as run:
        while not (control := place / "run/journal/control.db").exists() or steps_of(control.parents[1]) < 2:
            assert run.poll() is None, run.communicate()
        with running("agentrl.cli", *command) as mirror:
            next_copy(mirror)
            copies.rename(tmp_path / "lost")
            copies.touch()
            failures = [next_error(mirror) for _ in range(3)]
            assert [failure["retry_s"] for failure in failures] == [1.0, 2.0, 4.0]
            known = read_mirrors(place / "run")[f"{copies}/run"]
            assert known.error == failures[-1]["error"]
            while (read_run_snapshot(place / "run") or RunSnapshot(phase="")).mirrors.get(f"{copies}/run") != known:
                assert run.poll() is None, run.communicate()
            copies.unlink()
            (tmp_path / "lost").rename(copies)
            next_copy(mirror)
            run.kill()
            run.wait()
            mirror.communicate()
            assert mirror.returncode == 0
    assert read_mirrors(place / "run") == {}
    assert not (copies / "run" / MIRRORS_FILE).exists()
    assert steps_of(copies / "run") == steps_of(place / "run")
    verdict = judge(copies, ended=False)
    assert not verdict.lost | verdict.twice | verdict.ledger_errors, verdict


@pytest.mark.parametrize("place", ["inside", "deep/inside"])
def test_a_mirror_inside_a_run_is_refused(sample_run: Path, tmp_path: Path, place: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(sample_run, run, symlinks=True)
    before = sorted(run.rglob("*"))
    (tmp_path / "link").symlink_to(run)
    for base in (run, tmp_path / "link"):
        assert main(["run", "mirror", str(run), f"--to={base / place}", "--once"]) == 2
    assert sorted(run.rglob("*")) == before


def test_a_mirror_has_the_whole_of_each_file_and_the_models_that_a_run_keeps(
    sample_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sample_run, run, symlinks=True)
    (run / "models" / "base").mkdir(parents=True)
    (run / "models" / "base" / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (run / "models" / "sources.json").write_text('{"base": ["/elsewhere"]}')
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100_000], offset))  # a full disk
    assert main(["run", "mirror", str(run), f"--to={tmp_path / 'copy'}", "--once"]) == 0
    files = [path.relative_to(run) for folder in ("models", "versions", "steps") for path in (run / folder).rglob("*")]
    for name in (name for name in files if (run / name).is_file()):
        assert (tmp_path / "copy" / name).read_bytes() == (run / name).read_bytes(), name


def test_a_server_s_run_is_not_mirrored_without_its_requests(
    sample_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(sample_run, run, symlinks=True)
    (run / "journal" / "requests.db").touch()
    assert main(["run", "mirror", str(run), f"--to={tmp_path / 'copy'}", "--once"]) == 2
    assert "would lack the requests" in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.skipif(bool(unavailable()), reason=unavailable())
def test_a_mirror_outlives_its_actor_and_its_node() -> None:
    with Hosts(2) as hosts:
        hosts.start_ray([1, 2])
        Path(hosts.directory, "1", "tmp", "here").mkdir()
        run = hosts.start(1, [sys.executable, "-m", *play(Path("/tmp/here"), "4000")], stderr=subprocess.DEVNULL)
        place = f"--to={hosts.address(2)}:/tmp/there/run"
        command = [sys.executable, "-m", "agentrl.cli", "run", "mirror", "/tmp/here/run", place, "--every=0.1"]
        control = hosts.directory / "1/tmp/here/run/journal/control.db"
        while not control.exists() or steps_of(control.parents[1]) < 2:
            assert run.poll() is None
        with hosts.start(1, [*command, "--json"], stdout=subprocess.PIPE) as mirror:
            next_copy(mirror)
            (actor,) = hosts.processes(2, "ray::RunCopy")
            os.kill(actor, signal.SIGKILL)
            next_error(mirror)
            next_copy(mirror)
            hosts.cut(2)
            next_error(mirror)
            hosts.kill(2)
            hosts.plug(2)
            hosts.start_ray([2])
            next_copy(mirror)
            for process in hosts.processes(1, "tests.support.chaos_run"):
                os.kill(process, signal.SIGKILL)
            run.wait()
            mirror.communicate()
            assert mirror.returncode == 0
        assert steps_of(hosts.directory / "2/tmp/there/run") == steps_of(control.parents[1])
        verdict = judge(hosts.directory / "2/tmp/there", ended=False)
        assert not verdict.lost | verdict.twice | verdict.ledger_errors, verdict


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
