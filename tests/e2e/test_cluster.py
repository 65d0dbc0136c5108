"""One run over three hosts that share nothing but TCP: ranks on two, engines on two, workers on all three; one of them
is lost, and joins again."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journal_oracle import judge
from tests.learn_cases import write_model
from tests.learning.test_other_models import random_model
from tests.rank_processes import Place, on_ranks
from tests.sharding_cases import FUNCTION, alone, case, gradient_error
from tests.support.hosts import Hosts, unavailable

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

SETTINGS = """
name = "three"
directory = "/tmp/runs"
steps = 5000
workers = 3
cluster = { address = "auto" }
environment.id = "/tmp/sums.py:Sums"
model.path = "agentrl.environments:calculator/model"
policies.solver = { learning_rate = 3e-4, step_size = 8 }
credit.group_size = 4
sampling = { max_tokens = 32, max_turns = 4 }
engine = { replicas = 2, slots = 16, max_context = 192 }
trainer = { ranks = 2, loss.normalizer = 64 }
evaluation.tasks = 0
"""
SUMS = """
from agentrl.environments.calculator.env import Calculator


class Sums(Calculator):
    async def run(self, ctx):
        await ctx.sleep(2.0)
        await super().run(ctx)
"""
"""Its episodes begin with a wait, so that the hosts do little while Ray waits for the lost one."""
ROUTED = """
name = "routed"
directory = "/tmp/runs"
steps = 3
workers = 2
cluster = {{ address = "auto" }}
environment.id = "/tmp/patient.py:Patient"
model.path = "{model}"
policies.solver = {{ learning_rate = 3e-3, step_size = 16 }}
credit.group_size = 4
sampling.max_tokens = 12
engine = {{ replicas = 2, slots = 16, max_context = 192, vllm = false, capture_routing = true }}
trainer = {{ ranks = 2, loss.normalizer = 64 }}
evaluation.tasks = 0
"""
PATIENT = """
import agentrl


class Patient(agentrl.ToolEnvironment):
    def reward(self, task, episode):
        return float(len(episode.answer) % 2)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}-{n}", data={"question": f"{n} + {n} ="}) for n in range(12)]
"""
MISSED = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "4",
}
"""Ray gives a silent node up after a quarter of a minute instead of a whole one."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts; their disks lie outside /tmp, which each of them has its own of."""
    if reason := unavailable():
        pytest.skip(reason)
    with Hosts(3) as made:
        yield made


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", *arguments]


@pytest.mark.exhaustive
def test_two_ranks_on_two_hosts_give_the_gradient_of_one(hosts: Hosts) -> None:
    model = write_model(hosts.directory / "model")
    places = [Place(hosts.entering(number), hosts.address(number)) for number in (1, 2)]
    two, one = (case(model, hosts.directory / name, lora=True, sharding="none") for name in ("two", "one"))
    on_ranks(2, FUNCTION, [two], places=places)
    alone([one])
    assert gradient_error(hosts.directory / "two", hosts.directory / "one") <= 1e-6


def said(log: Path, words: str, process: subprocess.Popen[str]) -> None:
    """Wait until the run has said something."""
    while words not in (text := log.read_text()):
        assert process.poll() is None, text
        time.sleep(0.1)


def steps_of(log: Path) -> int:
    """The number of the newest step that the run has told of."""
    return max(map(int, re.findall(r"step (\d+)/", log.read_text())))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # three nodes of Ray, on a machine that is busy
def test_one_run_uses_three_hosts_and_outlives_one(hosts: Hosts, tmp_path: Path) -> None:
    home, log = hosts.directory / "1" / "tmp", tmp_path / "said"
    (home / "run.toml").write_text(SETTINGS)
    (home / "sums.py").write_text(SUMS)  # on no other host

    refused = hosts.run(1, command("train", "/tmp/run.toml", f"--cluster.address={hosts.address(1)}:6379"))
    assert refused.returncode == 2
    assert f"'{hosts.address(1)}:6379'" in refused.stderr

    hosts.start_ray([1, 2, 3], env=MISSED, hide=hosts.directory / "1")
    with log.open("w") as output:
        process = hosts.start(1, command("train", "/tmp/run.toml"), stdout=output, stderr=output)
    try:
        said(log, "step 1/", process)
        hosts.cut(3)
        hosts.kill(3)
        said(log, "WARNING worker 2 was lost", process)
        said(log, "WARNING the engine's process was lost", process)
        said(log, f"step {steps_of(log) + 3}/", process)
        hosts.plug(3)
        hosts.start_ray([3], hide=hosts.directory / "1")
        said(log, f"step {steps_of(log) + 3}/", process)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130, log.read_text()
    finally:
        process.kill()
        process.wait()
    lines = log.read_text().splitlines()
    for number, parts in ((1, "trainer rank 0, worker 0"), (2, "trainer rank 1, engine 1, worker 1")):
        assert any(line.startswith(f"node {hosts.address(number)}") and line.endswith(parts) for line in lines)
    assert f"node {hosts.address(3)}: engine 0, worker 2" in lines
    run = home / "runs" / "three"
    assert judge(run) == []
    partitions = sorted((run / "journal").glob("turns-*.db"))
    assert [path.name for path in partitions] == ["turns-0.db", "turns-1.db", "turns-2.db"]
    for number in (2, 3):
        assert not (hosts.directory / str(number) / "tmp" / "runs").exists()


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_ranks_read_expert_routing_from_the_hosts_that_recorded_it(hosts: Hosts) -> None:
    home = hosts.directory / "1" / "tmp"
    shipped = Path(__file__).parents[2] / "environments/calculator/model"
    model = random_model("qwen3_moe", shipped, hosts.directory / "moe")
    (home / "routed.toml").write_text(ROUTED.format(model=model))
    (home / "patient.py").write_text(PATIENT)
    hosts.start_ray([1, 2], env=MISSED, hide=hosts.directory / "1")
    done = hosts.run(1, command("train", "/tmp/routed.toml"))
    assert done.returncode == 0, done.stdout + done.stderr
    run = home / "runs" / "routed"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3
    for step in steps:
        assert (step["lost_routing"], step["unrouted_share"]) == (0, 0)
        assert step.get("mismatch/k3", 0) < 1e-5
    assert any("mismatch/k3" in step for step in steps)
    (there,) = (hosts.directory / "2" / "tmp").glob("agentrl-routing-*")
    for place in (there, run / "journal/routing"):
        assert any(place.glob("*/*")), f"nothing in {place}"
    assert judge(run) == []
