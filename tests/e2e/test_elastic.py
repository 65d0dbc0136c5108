"""Nodes that are drained: a worker leaves before its machine does, by the command in examples/kuberay.yaml."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.journal_oracle import judge
from tests.support.hosts import Hosts, unavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.e2e,
    pytest.mark.exhaustive,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

SETTINGS = """
name = "drained"
directory = "/tmp/runs"
steps = 1000
workers = 2
cluster.address = "auto"
environment.id = "calculator"
model.path = "agentrl.environments:calculator/model"
policies.solver = { learning_rate = 3e-4, step_size = 8 }
credit.group_size = 4
sampling = { max_tokens = 32, max_turns = 4 }
engine = { slots = 16, max_context = 192 }
trainer.loss.normalizer = 64
evaluation.tasks = 0
"""


def drain_command(repository: Path) -> str:
    """The shell command of the pod's `preStop` hook in examples/kuberay.yaml."""
    text = (repository / "examples/kuberay.yaml").read_text()
    found = re.search(r"^ *(ray drain-node .*)$", text, re.MULTILINE)
    assert found is not None
    return found[1]


def plays_episodes(hosts: Hosts, number: int) -> bool:
    """Whether a worker runs on a host."""
    ids = ",".join(map(str, hosts.processes(number)))
    listed = subprocess.run(["ps", "-o", "args=", "-p", ids], capture_output=True, text=True, check=False)
    return "agentrl.app.worker_server" in listed.stdout


def step_of(said: Path) -> int:
    """The newest step that a run has reported."""
    return max(map(int, re.findall(r"step (\d+)/", said.read_text())), default=0)


def test_a_worker_leaves_its_node_when_that_is_drained(repository: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    bin_directory = Path(sys.executable).parent
    with Hosts(2) as hosts, said.open("w") as lines:
        hosts.start_ray([1, 2])
        (hosts.directory / "1" / "tmp" / "run.toml").write_text(SETTINGS)
        command = [sys.executable, "-m", "agentrl.cli", "train", "/tmp/run.toml"]
        run = hosts.start(1, command, stdout=lines, stderr=subprocess.STDOUT)
        metrics = hosts.directory / "1" / "tmp" / "runs" / "drained" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 2:
            assert run.poll() is None, said.read_text()
        shell = f"PATH={bin_directory}:$PATH RAY_ADDRESS={hosts.address(1)}:6379; export PATH RAY_ADDRESS; "
        drained = hosts.run(2, ["bash", "-c", shell + drain_command(repository)])
        assert drained.returncode == 0, drained.stderr
        while "worker 1 leaves (its node is drained)" not in said.read_text():
            assert run.poll() is None, said.read_text()
        while plays_episodes(hosts, 2):
            assert run.poll() is None, said.read_text()
        hosts.kill(2)  # with the engine
        later = step_of(said) + 4
        while step_of(said) < later:
            assert run.poll() is None, said.read_text()
        run.send_signal(signal.SIGINT)
        assert run.wait() == 130, said.read_text()
        assert judge(hosts.directory / "1" / "tmp" / "runs" / "drained") == []
