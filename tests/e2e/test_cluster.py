"""One run over three hosts that share nothing but TCP: ranks on two, engines on two, workers on all three."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.journal_oracle import judge
from tests.learn_cases import write_model
from tests.rank_processes import Place, on_ranks
from tests.sharding_cases import FUNCTION, alone, case, gradient_error
from tests.support.hosts import Hosts, unavailable

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

SETTINGS = """
name = "three"
directory = "/tmp/runs"
steps = 3
workers = 3
cluster.address = "auto"
environment.id = "/tmp/sums.py:Sums"
model.path = "agentrl.environments:calculator/model"
policies.solver = { learning_rate = 3e-4, step_size = 8 }
credit.group_size = 4
sampling = { max_tokens = 32, max_turns = 4 }
engine = { replicas = 2, slots = 16, max_context = 192 }
trainer = { workers = 2, loss.normalizer = 64 }
evaluation.tasks = 0
"""
SUMS = """
from agentrl.environments.calculator.env import Calculator


class Sums(Calculator):
    pass
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts; their disks lie outside /tmp, which each of them has its own of."""
    if reason := unavailable():
        pytest.skip(reason)
    directory = Path(tempfile.mkdtemp(prefix="agentrl-hosts-", dir="/var/tmp"))
    try:
        with Hosts(directory, 3) as made:
            yield made
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "agentrl.cli", *arguments]


def test_two_ranks_on_two_hosts_give_the_gradient_of_one(hosts: Hosts) -> None:
    model = write_model(hosts.directory / "model")
    places = [Place(hosts.entering(number), hosts.address(number)) for number in (1, 2)]
    two, one = (case(model, hosts.directory / name, lora=True, sharding="none") for name in ("two", "one"))
    on_ranks(2, FUNCTION, [two], places=places)
    alone([one])
    assert gradient_error(hosts.directory / "two", hosts.directory / "one") <= 1e-6


def test_one_run_over_three_hosts(hosts: Hosts) -> None:
    home = hosts.directory / "1" / "tmp"
    (home / "run.toml").write_text(SETTINGS)
    (home / "sums.py").write_text(SUMS)  # on no other host

    refused = hosts.run(1, command("train", "/tmp/run.toml", f"--cluster.address={hosts.address(1)}:6379"))
    assert refused.returncode == 2
    assert f"cluster.address is '{hosts.address(1)}:6379', and no Ray answers there" in refused.stderr

    hosts.start_ray([1, 2, 3])
    found = hosts.run(1, command("train", "/tmp/run.toml"))
    assert found.returncode == 0, found.stdout + found.stderr
    lines = (found.stdout + found.stderr).splitlines()
    for number, parts in ((1, "trainer rank 0, worker 0"), (2, "trainer rank 1, engine 1, worker 1")):
        assert any(line.startswith(f"node {hosts.address(number)}") and line.endswith(parts) for line in lines)
    assert f"node {hosts.address(3)}: engine 0, worker 2" in lines
    run = home / "runs" / "three"
    assert judge(run) == []
    partitions = sorted((run / "journal").glob("turns-*.db"))
    assert [path.name for path in partitions] == ["turns-0.db", "turns-1.db", "turns-2.db"]
    for number in (2, 3):
        assert not (hosts.directory / str(number) / "tmp" / "runs").exists()
