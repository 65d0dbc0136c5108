"""Really killed: a few of the kills of `make chaos`, a disk that fills up, and the example that kills itself."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.chaos_oracle import judge

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]


def figures_of(repository: Path, *arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.chaos", *arguments]
    finished = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])["figures"]
    return figures


@pytest.mark.parametrize("kills", [8, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_kills_lose_nothing_and_train_nothing_twice(repository: Path, kills: int) -> None:
    figures = figures_of(repository, f"--scripted={kills}", "--real=0", "--ranks=0", "--stop-s=0")
    assert figures["kills"] == kills
    assert figures["runs"] >= 1
    assert min(figures[f"kills_{role}"] for role in ("orchestrator", "engine", "trainer")) > 0
    assert figures["lost"] == figures["twice"] == figures["ledger_errors"] == 0


@pytest.mark.ray
@pytest.mark.exhaustive
def test_three_kills_of_the_main_job_lose_nothing(repository: Path) -> None:
    figures = figures_of(repository, "--scripted=0", "--real=3", "--real-steps=40", "--ranks=0", "--stop-s=0")
    assert figures["kills"] == 3
    assert figures["runs"] >= 1
    assert len([name for name in figures if name.startswith("kills_")]) == 3
    assert figures["lost"] == figures["twice"] == figures["ledger_errors"] == 0


@pytest.mark.ray
@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_kills_of_runs_that_divide_experts_and_contexts_change_no_weights(repository: Path) -> None:
    figures = figures_of(repository, "--scripted=0", "--real=0", "--ranks=6")
    assert figures["kills"] == 6
    assert figures["lost"] == figures["twice"] == figures["ledger_errors"] == 0
    assert figures["weights_compared"] >= 2
    assert figures["weights_differ"] == 0


def _with_small_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, resource.RLIM_INFINITY))


def test_a_full_disk_ends_the_run_with_74_and_it_goes_on_when_there_is_room(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.chaos_run", "scripted", str(tmp_path), "0", "8"]
    full = subprocess.run(
        command, cwd=repository, capture_output=True, text=True, check=False, preexec_fn=_with_small_files
    )
    assert full.returncode == 74, full.stderr
    said = [line for line in full.stderr.splitlines() if "StorageError" in line]
    assert len(said) == 1
    assert "--resume" in said[0]
    verdict = judge(tmp_path, ended=False)
    assert not verdict.lost | verdict.twice | verdict.ledger_errors
    again = subprocess.run([*command, "resume"], cwd=repository, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    verdict = judge(tmp_path, ended=True)
    assert not verdict.lost | verdict.twice | verdict.ledger_errors
    assert verdict.steps == {"asker": 8, "solver": 8}


SMALLER = {"STEPS = 12": "STEPS = 6", "KILL_AFTER = 5": "KILL_AFTER = 3", '"step_size": 32': '"step_size": 16'}


@pytest.mark.exhaustive
@pytest.mark.parametrize("changes", [SMALLER, {}], ids=["smaller", "whole"])
def test_the_example_that_kills_itself_loses_nothing(repository: Path, tmp_path: Path, changes: dict[str, str]) -> None:
    text = (repository / "examples" / "04_crash_and_resume.py").read_text()
    for written, smaller in changes.items():
        assert text.count(written) == 1
        text = text.replace(written, smaller)
    copy = tmp_path / "crash_and_resume.py"
    copy.write_text(text)
    finished = subprocess.run([sys.executable, copy], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    counts = [line.split(":")[1].strip() for line in finished.stdout.splitlines() if "lost:" in line or "time:" in line]
    assert counts == ["0", "0", "0"], finished.stdout
    assert "episodes trained twice:        0" in finished.stdout
