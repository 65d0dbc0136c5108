"""Each benchmark behind a published figure runs, and has every figure that `benchmarks/bounds.toml` names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import Benchmark, read_bounds
from tests.support.hosts import unavailable

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

NEEDS = {"clients": "a package index", "gpu": "a GPU", "installation": "a package index"}
"""Why a benchmark is not started here."""


@pytest.mark.parametrize("benchmark", read_bounds()[1], ids=lambda benchmark: benchmark.name)
def test_a_quick_run_has_every_figure(benchmark: Benchmark, repository: Path) -> None:
    reason = NEEDS.get(benchmark.name) or (unavailable() if benchmark.name == "chaos_hosts" else "")
    if reason:
        pytest.skip(reason)
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", "--quick"]
    finished = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    figures = json.loads(finished.stdout.splitlines()[-1])["figures"]
    assert {bound.figure for bound in benchmark.bounds} | set(benchmark.shown) <= figures.keys()
    assert any(value is not None for value in figures.values())
