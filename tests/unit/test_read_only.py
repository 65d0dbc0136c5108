"""Machines on which little can be written, such as containers: what to set is said."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.choices import Choices
from agentrl.core.errors import InputError

pytestmark = pytest.mark.needs("bubblewrap")

TOML = """
name = "mine"
[environment]
id = "calculator"
[model]
path = "agentrl.environments:calculator/model"
[policies.solver]
"""
SET_TMPDIR = "set TMPDIR to a directory that can be written to"


def command_in_read_only_system(*arguments: str | Path, writable: Path | None = None, **variables: str) -> list[str]:
    """A command where nothing can be written to, not even /tmp, the home and the working directory, except below
    `writable`."""
    binds = [] if writable is None else ["--bind", str(writable), str(writable)]
    variables = {"HOME": "/root", **variables}
    settings = [word for name, value in variables.items() for word in ("--setenv", name, value)]
    box = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--chdir", "/usr", *binds]
    return [*box, "--unsetenv", "TMPDIR", *settings, sys.executable, "-m", "agentrl", *map(str, arguments)]


def ran(*arguments: str | Path, writable: Path | None = None, **variables: str) -> tuple[int, str, str]:
    command = command_in_read_only_system(*arguments, writable=writable, **variables)
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert "Traceback" not in ended.stderr
    assert "internal error" not in ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(TOML)
    (tmp_path / "writable").mkdir()
    return tmp_path / "run.toml"


def test_without_temporary_files_commands_say_what_to_set_before_anything_is_loaded(configuration: Path) -> None:
    runs = configuration.parent / "writable"
    for arguments in (
        ("train", configuration, f"--directory={runs}"),
        ("evaluate", configuration, "--journal", runs / "evaluated"),
        ("env", "check", "calculator"),
    ):
        code, _, error = ran(*arguments, writable=None if arguments[0] == "env" else runs)
        # A bind mount below /tmp is no directory for temporary files, since nobody names it.
        assert code == 74, error
        assert SET_TMPDIR in error
        assert "loading" not in error.replace("loading the checks", "")
    assert not any(runs.iterdir())


def test_doctor_finds_that_nothing_can_be_written(configuration: Path) -> None:
    code, out, _ = ran("doctor", configuration)
    assert code == 1
    assert "no writable directory for them" in out
    assert "TMPDIR=DIR" in out
    assert "--directory=DIR" in out


def test_with_the_named_setting_it_works(tmp_path: Path) -> None:
    code, out, error = ran("env", "check", "calculator", writable=tmp_path, TMPDIR=str(tmp_path))
    assert code == 0, error
    assert "calculator: passed" in out


def test_a_run_of_a_read_only_disk_is_read_served_and_exported_elsewhere(sample_run: Path, tmp_path: Path) -> None:
    code, out, _ = ran("run", "stats", sample_run)
    assert (code, "solver" in out) == (0, True)
    code, _, error = ran("run", "export", sample_run, "--to", "jsonl", "--limit", "2")
    assert code == 74
    assert "(Read-only file system); make it writable, or name another place with --out" in error
    code, out, _ = ran("run", "export", sample_run, "--to", "html", "--out", tmp_path / "page.html", writable=tmp_path)
    assert (code, (tmp_path / "page.html").is_file()) == (0, True)
    command = command_in_read_only_system("run", "serve", sample_run)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as served:
        assert served.stdout is not None
        assert f"{sample_run} is at http://127.0.0.1:" in served.stdout.readline()
        os.killpg(served.pid, signal.SIGTERM)


def test_a_killed_run_on_a_read_only_disk_is_said_to_be_whole(sample_run: Path, tmp_path: Path) -> None:
    shutil.copytree(sample_run, tmp_path / "killed")
    journal = tmp_path / "killed" / "journal"
    code = f"""
import os, sqlite3
connection = sqlite3.connect({str(journal / "control.db")!r}, isolation_level=None)
connection.execute("INSERT INTO metrics (policy, step, name, value, recorded_at) VALUES ('solver', 1, 'x', 1.0, 1.0)")
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (journal / "control.db-wal").stat().st_size
    for index in journal.glob("*-shm"):  # copies and mounts of other machines may lack it
        index.unlink()
    code_of_command, _, error = ran("run", "stats", tmp_path / "killed")
    assert code_of_command == 74
    assert "its newest records are in control.db-wal" in error
    assert "copy the run to one" in error
    assert "damaged" not in error


@pytest.mark.parametrize("home", ["/dev/null", "/proc/1"])
def test_a_home_that_holds_nothing_is_read_as_empty_and_another_place_named(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    choices = Choices.of(tmp_path)
    assert choices == Choices.nothing(tmp_path)
    with pytest.raises(InputError, match="or set XDG_STATE_HOME to another directory"):
        choices.save()
