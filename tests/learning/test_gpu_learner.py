"""`make gpu-learner`, driven as far as CPUs go: the whole command, without what its machine may lack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = ("ray", "vllm", "aiohttp", "gymnasium", "reasoning_gym", "pytest", "hypothesis")
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from benchmarks.gpu_learner import main
main({arguments})
"""


@pytest.mark.learning
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_the_whole_command_runs_without_what_the_machine_may_lack(repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    arguments = ["--device", "cpu", "--small", "--output", str(output)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(repository)}
    program = PROGRAM.format(absent=ABSENT, arguments=arguments)
    answer = subprocess.run(
        [sys.executable, "-c", program], cwd=repository, env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(output.read_text())
    assert json.loads(answer.stdout.splitlines()[-1]) == found
    assert "failed" not in answer.stdout, answer.stdout
    assert found["device"] == "CPU"
    assert all(error < 1e-5 for error in found["attention"]["error"].values())
    assert all(error < 1e-4 for family in ("Qwen3", "Llama 4") for error in found["families"][family].values())
    assert all(len(found[run]["rewards"]) == 1 for run in ("smollm2", "training"))
    assert found["training"]["last_step"]["mismatch/k3"] < 1e-6
