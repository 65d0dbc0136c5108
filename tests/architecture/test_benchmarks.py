"""Every benchmark can be started: its modules import, and their tables are built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(600)  # torch, Ray and vLLM from a cold disk, on a machine that is busy
def test_every_module_of_the_benchmarks_imports(repository: Path) -> None:
    names = sorted(path.stem for path in (repository / "benchmarks").glob("*.py"))
    assert "resume_foreign_games" in names
    code = "\n".join(f"import benchmarks.{name}" for name in names if name != "__init__")
    finished = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
