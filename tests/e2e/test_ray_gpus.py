"""On a Ray with simulated GPUs, each rank and each engine is given its own by Ray, as the plan says, and no other run
takes them meanwhile."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

_TOKEN = secrets.token_hex(32)

_CLUSTER = """
import ray

print(ray.init(num_cpus=0, num_gpus=4, include_dashboard=False, log_to_driver=False,
               object_store_memory=80 << 20).address_info["gcs_address"], flush=True)
input()
"""

_BEGIN = """
import sys
import time

import ray

from agentrl.cluster.session import RaySession
from agentrl.core.errors import ConfigError
from tests.unit.test_device_plan import configuration


class Holder:
    def gpus(self):
        return ray.get_gpu_ids()


def hold(session, ranks, replicas, size):
    plan = session.plan(configuration(ranks, replicas, size))
    actors = []
    for process, (node, count) in plan.reserved().items():
        strategy = session.strategy(node, process)
        actors.append(ray.remote(num_cpus=0, num_gpus=count, scheduling_strategy=strategy)(Holder).remote())
    return actors, ray.get([actor.gpus.remote() for actor in actors])
"""

_EACH_PLAN = f"""{_BEGIN}
for ranks, replicas, size in ((1, 1, 1), (2, 2, 1), (1, 1, 3), (2, 1, 2)):
    session = RaySession(sys.argv[1])
    session.start()
    actors, given = hold(session, ranks, replicas, size)
    flat = [gpu for gpus in given for gpu in gpus]
    print([len(gpus) for gpus in given], len(set(flat)) == len(flat))
    session.stop()
    while sum(node.gpus for node in session.nodes()) < 4:
        time.sleep(0.05)  # Ray is told of it a moment later
"""

_FIRST_RUN = f"""{_BEGIN}
session = RaySession(sys.argv[1])
session.start()
actors, _ = hold(session, 2, 1, 1)
for actor in actors:
    ray.kill(actor)
_, given = hold(session, 2, 1, 1)  # as after the death of each
print([len(gpus) for gpus in given], flush=True)
input()
"""

_SECOND_RUN = f"""{_BEGIN}
session = RaySession(sys.argv[1])
session.start()
for ranks in (2, 1):
    try:
        session.plan(configuration(ranks, 1, 1))
    except ConfigError as error:
        print(error)
"""


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    private = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    environment = {**os.environ, **private, "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Ray with four simulated GPUs."""
    with _start(_CLUSTER) as cluster:
        assert cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        cluster.communicate("\n")


def test_ray_gives_what_the_plan_says(address: str) -> None:
    said, _ = _start(_EACH_PLAN, address).communicate()
    assert said.splitlines() == ["[1, 1] True", "[1, 1, 1, 1] True", "[1, 3] True", "[1, 1, 2] True"]


def test_a_second_run_gets_no_gpu_of_the_first_and_is_told_how_many_it_lacks(address: str) -> None:
    with _start(_FIRST_RUN, address) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "[1, 1, 1]\n"
        said, _ = _start(_SECOND_RUN, address).communicate()
        first.communicate("\n")
    both, one = said.splitlines()
    assert "3 are needed, 2 more than are free" in both
    assert "other programs of the Ray cluster hold 3 GPUs" in both
    assert "2 are needed, 1 more than are free" in one
