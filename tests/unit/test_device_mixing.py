"""The trainer and the embedded engine on a device that is not the CPU: no operation mixes devices, results are the
CPU's, and the host waits for the device no more than necessary."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.device_cases import CASES, KERNELS, PLANTED, ROUNDED, STEPS, TOLERANCE

QUICK = {
    "adapter",
    "masks",
    "replayed routing",
    "padded rows",
    "engine with adapters and filters",
    "adapter, one step",
}


def cases(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in names]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, repository: Path) -> dict[str, dict[str, Any]]:
    """The results of all cases of the session, from one process: the device must precede its first backward pass."""
    chosen = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in chosen]
    answer = subprocess.run(
        [sys.executable, "-m", "tests.support.device_cases", *dict.fromkeys(names)],
        cwd=repository,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr[-3000:]
    found = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result for result in found}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cases(CASES))
def test_figures_are_those_of_the_cpu(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert "error" not in results[name], results[name]
    assert results[name]["difference"] <= TOLERANCE


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cases(ROUNDED))
def test_rounded_models_compute_on_the_device(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert "error" not in results[name], results[name]
    assert results[name]["loss"] <= 0.01


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", cases(STEPS))
def test_the_host_waits_once_per_step_and_copies_little_per_micro_batch(
    name: str, results: dict[str, dict[str, Any]]
) -> None:
    """It waits for the columns, the sums and the gradient norm of a step, and for no micro-batch."""
    assert results[name]["micro_batches"] >= 4
    assert results[name]["waits"] <= 3
    assert results[name]["copies_per_micro_batch"] <= 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [KERNELS])
def test_nothing_is_compiled_before_the_first_token(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["before_first_token"] == 0
    assert results[name]["in_all"] == 1


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["bfloat16 adapter, one step"])
def test_an_adapter_is_computed_in_the_dtype_of_its_base(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["float32_matmuls_share"] <= 0.05


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, results: dict[str, dict[str, Any]]) -> None:
    assert results[name]["found"]
