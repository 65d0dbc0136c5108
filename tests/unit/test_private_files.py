"""What a dead child leaves in shared memory is removed, and what is in use is not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agentrl.app.engines import engine_program
from agentrl.config.run import RunConfig
from agentrl.engines import process
from agentrl.engines.process import PrivateDirectory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instead of the machine's shared memory."""
    monkeypatch.setattr(process, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def names(root: Path) -> list[str]:
    return sorted(each.name for each in root.iterdir())


def test_everything_under_the_childs_name_goes_and_nothing_else(root: Path) -> None:
    one, other = PrivateDirectory(), PrivateDirectory()
    assert one.path.stat().st_mode & 0o777 == 0o700
    for each in (one, other):
        (each.path / "adapters").mkdir()
        (root / f"{each.path.name}-7-0").touch()
        (root / f"sem.{each.path.name}-x").touch()
    (root / "psm_of_another").touch()
    one.remove()
    one.remove()
    left = [other.path.name, f"{other.path.name}-7-0", f"sem.{other.path.name}-x", "psm_of_another"]
    assert names(root) == sorted(left)
    other.remove()
    assert names(root) == ["psm_of_another"]


_KILLED = """
import os, signal, sys
from pathlib import Path
from agentrl.engines import process
process._SHARED_MEMORY, process._ROOM = Path(sys.argv[1]), int(sys.argv[2])
files = process.PrivateDirectory()
(files.path / "inside").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_parent_left_goes_when_the_next_place_is_made(root: Path, repository: Path) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(root), "0"], cwd=repository, check=False)
    (left,) = names(root)
    (root / f"{left}-9-0").touch()
    used = PrivateDirectory()
    assert names(root) == [used.path.name]
    again = PrivateDirectory()
    assert names(root) == sorted([used.path.name, again.path.name])
    again.remove()
    used.remove()
    assert os.listdir(root) == []


def test_where_shared_memory_is_small_the_place_is_on_disk_and_goes_like_any_other(
    root: Path, repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    command = [sys.executable, "-c", _KILLED, str(root), str(1 << 60)]
    subprocess.run(command, cwd=repository, env={**os.environ, "TMPDIR": str(disk)}, check=False)
    (left,) = names(disk)
    (root / f"{left}-7-0").touch()
    (root / f"sem.{left}-x").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    used = PrivateDirectory()
    assert (names(root), names(disk)) == ([used.path.name], [])
    used.remove()


def test_weights_for_which_shared_memory_is_too_small_go_to_disk(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(process, "_ROOM", 0)
    small, large = PrivateDirectory(1), PrivateDirectory(1 << 60)
    assert (names(root), names(disk)) == ([small.path.name], [large.path.name])
    small.remove()
    large.remove()


@pytest.mark.parametrize("full", [True, False])
def test_an_engine_whose_policy_trains_all_weights_gets_a_place_for_them(full: bool, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    policy = {"learning_rate": 1e-5} | ({} if full else {"lora": {"rank": 2}})
    sections = {"environment": {"id": "unused"}, "model": {"path": str(tmp_path)}, "engine": {"replicas": 1}}
    config = RunConfig.model_validate({**sections, "policies": {"policy": policy}})
    assert engine_program(config.engine_plan, config.bases[0]).weight_bytes == (5 if full else 0)


@pytest.mark.parametrize("name", ["agentrl-runs", "agentrl-4242-session", "agentrl-child-of-mine"])
def test_a_directory_of_such_a_name_that_was_not_made_here_stays(root: Path, name: str) -> None:
    (root / name / "inside").mkdir(parents=True)
    PrivateDirectory().remove()
    assert names(root) == [name]
    assert (root / name / "inside").is_dir()


def test_what_another_user_put_under_the_childs_name_is_left_and_hinders_nobody(root: Path) -> None:
    files = PrivateDirectory()
    (root / f"{files.path.name}-1").mkdir()
    (root / f"{files.path.name}-2").touch()
    files.remove()
    assert names(root) == [f"{files.path.name}-1"]
    PrivateDirectory().remove()
