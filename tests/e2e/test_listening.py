"""Who can be reached while a real run is going on: its own process, Ray, trainer ranks, vLLM in an actor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_engine_vllm_process import needs_vllm
from tests.processes import is_loopback

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

_RUN = """
import json, os, stat, sys
from pathlib import Path
import agentrl
from agentrl.config.load import load
from tests.processes import can_be_reached, descendants

class Looks:
    def on_step(self, policy, step, metrics):
        processes = descendants(os.getpid())
        reached = {}
        for each in can_be_reached(processes):
            kind, _, where = each.partition(" ")
            above = Path(where).parents if kind == "unix" and where.startswith("/") else ()
            reached[each] = [stat.S_IMODE(directory.stat().st_mode) for directory in above]
        print(json.dumps([sorted(processes.values()), reached]), flush=True)

    def on_evaluation(self, versions, metrics):
        pass

agentrl.train(load(Path(sys.argv[1]), sys.argv[2:]), observers=[Looks()], quiet=True)
"""
SMALL = ["steps=1", "evaluation.tasks=0", "policies.solver.step_size=16", "max_in_flight=32"]
RAY = ["trainer.workers=2", "engine.placement=ray"]


@needs_vllm
def test_a_run_is_reached_from_its_own_machine_only(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _RUN, str(repository / "examples" / "05_vllm.toml"), *SMALL, *RAY]
    ran = subprocess.run(
        [*command, f"directory={tmp_path}"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    processes, reached = json.loads(ran.stdout)
    for name in ("gcs_server", "raylet", "ray::TrainerRank", "ray::EngineActor", "VLLM::Worker"):
        assert any(each.startswith(name[:15]) for each in processes), name
    assert any(each.startswith("tcp") for each in reached)
    assert [each for each in reached if not is_loopback(each)] == []
    for each, modes in reached.items():
        if each.startswith("unix"):
            assert 0o700 in modes, f"{each}: open to other users"
