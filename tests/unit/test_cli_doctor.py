"""`agentrl doctor`: every probe answers for itself, and what is missing comes with the command that brings it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from agentrl.cli import doctor
from agentrl.cli.doctor import Check
from agentrl.cli.main import main
from agentrl.config.fields import shipped_example
from agentrl.config.load import load
from agentrl.core.machine import Gpu, Memory, install_command

if TYPE_CHECKING:
    from pathlib import Path


def test_this_machine_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ready"]
    found = {check["name"]: check for checks in report["sections"].values() for check in checks}
    assert {"Python", "cores", "memory", "GPU", "disk for runs", "torch", "ray", "engine", "trainer"} <= set(found)
    assert found["torch works"]["level"] == "ok"
    assert found["engine"]["result"].startswith("embedded")
    assert found["trainer"]["result"].startswith("in this process")
    on = "on the CPU" if found["torch works"]["result"].endswith("no GPU") else "on the GPU"
    assert found["engine"]["result"].endswith(on)
    assert found["trainer"]["result"].endswith(on)


def test_small_sizes_have_three_digits() -> None:
    told = [doctor._gibibytes(count) for count in (0, 5000, 84_000, 3_355_444, 90 << 20, 300 << 20)]
    assert told == ["0 KiB", "4.88 KiB", "82 KiB", "3.2 MiB", "90 MiB", "0.29 GiB"]


def failing() -> list[Check]:
    raise PermissionError("/proc/meminfo is hidden")


def missing() -> list[Check]:
    return [Check(name="torch", result="not installed", level="missing", fix="pip install '.[train]'")]


def test_a_probe_that_fails_hides_no_other_and_what_is_missing_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "SECTIONS", {"here": (failing, missing, doctor.python_checks)})
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "failing" in said
    assert "/proc/meminfo is hidden" in said
    assert "→ pip install '.[train]'" in said
    assert "Python" in said
    assert "not ready: 1 problem marked" in said
    monkeypatch.setattr(doctor, "SECTIONS", {"here": (failing, doctor.python_checks)})
    assert main(["doctor"]) == 1, "what could not be checked may be missing"
    assert capsys.readouterr().out.splitlines()[-1].startswith("unknown: 1 check marked ? failed to run")
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ready"] is False


OBSERVED = """
import subprocess, sys
from agentrl.cli import doctor
from agentrl.cli.main import main

commands, run = [], subprocess.run
subprocess.run = lambda command, *rest, **options: commands.append(command) or run(command, *rest, **options)

def observe():
    imported = {name.partition(".")[0] for name in sys.modules} & {"torch", "ray"}
    started = [command for command in commands if "import" in str(command)]
    return [doctor.Check(name="observed", result=f"{imported} {started}")]

doctor.SECTIONS["last"] = (observe,)
sys.exit(main(["doctor"]))
"""


def test_torch_is_imported_once_and_ray_only_for_runs_that_need_it() -> None:
    done = subprocess.run([sys.executable, "-c", OBSERVED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"torch works +yes, threads", done.stdout)
    assert re.search(r"observed +\{'torch'\} \[\]", done.stdout)


CRASHING = """
import os, sys
from agentrl.cli import doctor
from agentrl.cli.main import main

doctor.SECTIONS = {
    "first": (doctor.python_checks,), "torch": (lambda: os.kill(os.getpid(), 4),), "last": (doctor.processor_checks,)
}
sys.exit(main(["doctor"]))
"""


def test_a_library_that_crashes_hides_no_other_section() -> None:
    done = subprocess.run([sys.executable, "-c", CRASHING], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    sections = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert sections == ["first", "torch", "last", "not ready: 1 problem marked ✗"]
    assert "(killed by SIGILL)" in done.stdout
    assert f"→ {install_command('train')} --force-reinstall" in done.stdout
    assert "cores" in done.stdout


def test_a_wrong_model_path_is_what_train_says(tmp_path: Path) -> None:
    config = load(shipped_example("01_tool_use"), [f"model.path={tmp_path}/none"])
    (check,) = doctor.memory_fit_checks(config)
    assert check.level == "missing"
    assert f"{tmp_path}/none: there is no such directory" in check.result


def test_a_missing_model_is_reported_before_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "SECTIONS", {"torch": (doctor.python_checks,)})
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 0)
    for model, words in (("org/nope", "is missing from huggingface_hub's cache"), ("./nope", "no such directory")):
        main(["doctor", str(shipped_example("01_tool_use")), f"--model.path={model}", "--json"])
        sections = json.loads(capsys.readouterr().out)["sections"]
        assert list(sections)[:2] == ["memory", "torch"]
        assert words in sections["memory"][0]["result"]


def test_a_model_may_be_given_as_for_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "SECTIONS", {"torch": (doctor.python_checks,)})
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 0)
    file = str(shipped_example("01_tool_use"))
    main(["doctor", file, "--model", f"{tmp_path}/none", "--json"])
    assert f"{tmp_path}/none: there is no such directory" in capsys.readouterr().out
    assert main(["doctor", file, "--model", "http://127.0.0.1:1/v1"]) == 2
    assert "give the directory of a model" in capsys.readouterr().err
    assert main(["doctor", "--model", f"{tmp_path}/none"]) == 2
    assert "give a TOML file, too" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "more"),
    [
        ((), ["reasoning-gym", "demo model"]),
        ((str(shipped_example("01_tool_use")),), ["reasoning-gym"]),
        ((str(shipped_example("01_tool_use")), "--environment.id=tictactoe"), []),
    ],
)
def test_a_run_is_checked_for_what_it_needs_in_its_own_directory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    more: list[str],
) -> None:
    checks = (doctor.disk_checks, doctor.calculator_checks, doctor.demo_model_checks)
    monkeypatch.setattr(doctor, "SECTIONS", {"here": checks})
    monkeypatch.setattr(doctor, "_num_gpus", lambda: 0)
    main(["doctor", *arguments, f"--directory={tmp_path}/runs", "--model.path=./nope", "--json"])
    found = json.loads(capsys.readouterr().out)["sections"]["here"]
    assert [check["name"] for check in found] == ["disk for runs", "disk for temporary files", *more]
    assert found[0]["result"].endswith(f"at {tmp_path}")


def test_memory_is_listed_by_trainer_and_engine() -> None:
    parts = [check.name for check in doctor.memory_fit_checks(load(shipped_example("01_tool_use"), []))]
    assert parts.count("trainer, in this process") >= 3
    assert parts.count("engine, in this process") >= 3
    assert parts.count("this process") == 2, "Python with its libraries, and their code"


def test_a_package_that_is_absent_or_old_is_told_with_its_command() -> None:
    absent = doctor.distribution_check("no-such-package-here", {}, extra="train", needed=True)
    assert (absent.level, absent.result) == ("missing", "not installed")
    assert absent.fix == install_command("train")
    optional = doctor.distribution_check("no-such-package-here", {}, extra="ray", needed=False)
    assert (optional.level, optional.result) == (
        "note",
        "not installed; needed for several trainer ranks and for cluster.address",
    )
    old = doctor.distribution_check("numpy", {"numpy": "99.1"}, extra="train", needed=True)
    assert old.level == "missing"
    assert "older than 99.1" in old.result
    assert old.fix.endswith("--upgrade")
    assert doctor.distribution_check("numpy", {"numpy": "2.1"}, extra="train", needed=True).level == "ok"


def test_a_missing_library_is_one_line_with_the_extra_that_brings_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def demo(options: object) -> int:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr("agentrl.cli.training.demo", demo)
    assert main(["demo"]) == 2
    expected = (
        f"agentrl: ray is not installed: {install_command('ray')}, or train with one rank and without cluster.address\n"
    )
    assert capsys.readouterr().err.endswith(f" …\n{expected}")


def test_a_gpu_without_a_compiler_shares_no_prefixes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert doctor.prefix_checks() == [] or doctor.gpus()
    card = Gpu(id="0", name="NVIDIA L4", memory=Memory(total=24 << 30, free=24 << 30))
    monkeypatch.setattr(doctor, "gpus", lambda: (card,))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (without,) = doctor.prefix_checks()
    assert (without.level, "compiler" in without.result) == ("note", True)
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert [check.level for check in doctor.prefix_checks()] == ["ok"]


def test_settings_that_train_refuses_are_told_without_the_model() -> None:
    config = load(shipped_example("01_tool_use"), ["--max_in_flight=2", "--model.path=org/absent"])
    (check,) = doctor.setting_checks(config)
    assert (check.name, check.level) == ("settings", "missing")
    assert "max_in_flight = 2" in check.result
