"""All weights of a run on a cluster: from its trainer to a real vLLM on another host, at every step."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.contract.test_engine_vllm_process import needs_vllm
from tests.e2e.test_cluster import SUMS, command
from tests.journal_oracle import judge
from tests.support.hosts import Hosts, unavailable

pytestmark = [needs_vllm, pytest.mark.ray, pytest.mark.e2e, pytest.mark.vllm, pytest.mark.exhaustive]

STEPS = 6
SETTINGS = f"""
name = "two"
directory = "/tmp/runs"
steps = {STEPS}
workers = 2
cluster.address = "auto"
environment.id = "/tmp/sums.py:Sums"
model.path = "agentrl.environments:calculator/model"
policies.solver = {{ learning_rate = 3e-4, step_size = 8 }}
credit.group_size = 4
sampling = {{ max_tokens = 32, max_turns = 4 }}
engine = {{ replicas = 1, slots = 16, max_context = 192, publish = "full", vllm = {{}} }}
evaluation.tasks = 0
"""
RECEIVED = "stat -c '%n %s' /dev/shm/agentrl-child-*/versions/*/* /tmp/agentrl-child-*/versions/*/* 2>/dev/null"
"""Prints path and size of what an engine's process keeps of the files of versions."""


@pytest.mark.timeout(1200)  # Ray and vLLM, on a machine that is busy
def test_of_each_version_an_engine_on_another_host_gets_the_tensors_and_only_the_header_of_the_file(
    tmp_path: Path,
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    log, received = tmp_path / "said", dict[str, int]()
    with Hosts(2) as hosts:
        home = hosts.directory / "1" / "tmp"
        (home / "run.toml").write_text(SETTINGS)
        (home / "sums.py").write_text(SUMS)
        hosts.start_ray([1, 2], hide=hosts.directory / "1")
        with log.open("w") as output:
            process = hosts.start(1, command("train", "/tmp/run.toml"), stdout=output, stderr=output)
        try:
            while process.poll() is None:
                for line in hosts.run(2, ["sh", "-c", RECEIVED]).stdout.splitlines():
                    path, size = line.rsplit(" ", 1)
                    received[path] = max(received.get(path, 0), int(size))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, log.read_text()
        assert f"node {hosts.address(2)}: engine 0" in log.read_text()
        run = home / "runs" / "two"
        assert judge(run) == []
        published = [path.stat().st_size for path in run.glob("versions/solver/*/model.safetensors")]
    assert "did not send" not in log.read_text()
    assert len(received) > STEPS // 2, "each is there until the next one serves"
    assert max(received.values()) < min(published) / 10
