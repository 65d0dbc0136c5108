"""On a Ray with simulated GPUs, each rank and engine is given its own by Ray, on the node of the plan, and no other run
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
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "num_gpus": 2, "include_dashboard": False,
                                                        "object_store_memory": 80 << 20})
cluster.add_node(num_cpus=0, num_gpus=2, object_store_memory=80 << 20)
print(cluster.address, flush=True)
input()
"""

_BEGIN = """
import asyncio
import sys

import ray

from agentrl.cluster.session import RaySession, process_scheduling_strategy, gpu_reservation
from agentrl.core.errors import ConfigError
from tests.unit.test_device_plan import configuration


class Holder:
    def place(self):
        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()


def hold(config):
    session = RaySession(sys.argv[1])
    session.start()
    plan, actors = session.plan(config.device_demand), []
    for process, (node, count) in plan.gpu_bundles().items():
        strategy = process_scheduling_strategy(node, process)
        actors.append(ray.remote(num_cpus=0, num_gpus=count, scheduling_strategy=strategy)(Holder).remote())
    places = ray.get([actor.place.remote() for actor in actors])
    assert [node for node, _ in places] == [node.id for node, _ in plan.gpu_bundles().values()]
    assert plan.ranks[0] == plan.nodes[0]
    gpus = [(node, gpu) for node, held in places for gpu in held]
    assert len(set(gpus)) == len(gpus)
    for actor in actors:
        ray.kill(actor)
    session.stop()  # as after the loss of a trainer, when all parts of a run are closed
    return [len(held) for _, held in places]
"""

_EACH_PLAN = f"""{_BEGIN}
async def main():
    for size in ((2, 2, 1), (2, 1, 2)):
        async with gpu_reservation():
            print(hold(configuration(*size)), hold(configuration(*size)))

asyncio.run(main())
"""

_FIRST_RUN = f"""{_BEGIN}
async def main():
    async with gpu_reservation():
        print(hold(configuration(2, 1, 1)), flush=True)
        input()
        print(hold(configuration(2, 1, 1)), flush=True)

asyncio.run(main())
"""

_SECOND_RUN = f"""{_BEGIN}
async def main():
    async with gpu_reservation():
        for ranks in (2, 1):
            try:
                hold(configuration(ranks, 1, 1))
            except ConfigError as error:
                print(error)

asyncio.run(main())
"""

_LOST_NODE = f"""{_BEGIN}
from ray.cluster_utils import Cluster

settings = {{"num_cpus": 0, "object_store_memory": 80 << 20}}
cluster = Cluster(initialize_head=True, head_node_args={{**settings, "num_gpus": 1, "include_dashboard": False}})
lost = cluster.add_node(num_gpus=1, **settings)
cluster.add_node(num_gpus=2, **settings)


async def main():
    async with gpu_reservation():
        sys.argv.append(cluster.address)
        print(hold(configuration(2, 1, 1)))
        cluster.remove_node(lost)
        print(hold(configuration(2, 1, 1)))
        session = RaySession(cluster.address)
        session.start()
        plan, *others = [session.plan(configuration(2, 1, 1).device_demand) for _ in range(3)]
        print(all(each == plan for each in others), plan.ranks[1] == plan.engines[0])

asyncio.run(main())
"""


def _start(program: str, *arguments: str) -> subprocess.Popen[str]:
    private = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": _TOKEN}
    environment = {**os.environ, **private, "RAY_USAGE_STATS_ENABLED": "0"}
    del environment["CUDA_VISIBLE_DEVICES"]  # hides GPUs, simulated ones too
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
    """The address of a Ray with two nodes of two simulated GPUs."""
    with _start(_CLUSTER) as cluster:
        assert cluster.stdout is not None
        yield cluster.stdout.readline().strip()
        cluster.communicate("\n")


@pytest.mark.exhaustive
def test_each_process_has_the_gpus_of_the_plan_also_once_all_were_started_again(address: str) -> None:
    said, _ = _start(_EACH_PLAN, address).communicate()
    assert said.splitlines() == ["[1, 1, 1, 1] [1, 1, 1, 1]", "[1, 1, 2] [1, 1, 2]"]


@pytest.mark.exhaustive
def test_a_second_run_gets_no_gpu_of_the_first_and_is_told_how_many_it_lacks(address: str) -> None:
    with _start(_FIRST_RUN, address) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "[1, 1, 1]\n"
        said, _ = _start(_SECOND_RUN, address).communicate()
        again, _ = first.communicate("\n")
    both, one = said.splitlines()
    assert "3 are needed" in both
    assert "hold 3 GPUs" in both
    assert "2 are needed" in one
    assert again == "[1, 1, 1]\n"


@pytest.mark.exhaustive
def test_a_rank_whose_node_is_lost_takes_a_free_gpu_of_another_and_keeps_it() -> None:
    said, _ = _start(_LOST_NODE).communicate()
    assert said.splitlines() == ["[1, 1, 1]", "[1, 1, 1]", "True True"]
