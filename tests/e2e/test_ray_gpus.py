"""On a Ray with simulated GPUs, each rank and each engine is given its own by Ray, as the plan says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.e2e]

_PROGRAM = """
import ray

ray.init(num_cpus=0, num_gpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)

from agentrl.cluster.session import RaySession, on_node
from tests.unit.test_device_plan import configuration

session = RaySession("auto")
session.start()


class Holder:
    def gpus(self):
        return ray.get_gpu_ids()


for ranks, replicas, size in ((1, 1, 1), (2, 2, 1), (1, 1, 3), (2, 1, 2)):
    plan = session.plan(configuration(ranks, replicas, size)).devices
    held = [(plan.gpu_of_rank(rank),) for rank in range(ranks)]
    held += [plan.gpus_of_engine(replica) for replica in range(replicas)]
    here = on_node(session.nodes()[0])
    actors = [ray.remote(num_cpus=0, num_gpus=len(gpus), scheduling_strategy=here)(Holder).remote() for gpus in held]
    given = ray.get([actor.gpus.remote() for actor in actors])
    flat = [gpu for gpus in given for gpu in gpus]
    print([len(gpus) for gpus in given], len(set(flat)) == len(flat))
    for actor in actors:
        ray.kill(actor)
ray.shutdown()
"""


def test_ray_gives_what_the_plan_says() -> None:
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    answer = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    expected = ["[1, 1] True", "[1, 1, 1, 1] True", "[1, 3] True", "[1, 1, 2] True"]
    assert answer.stdout.splitlines() == expected, answer.stdout + answer.stderr
