"""The part of `benchmarks.cluster` about trainer ranks on two hosts.

`gradient_error`: the largest relative difference in float32 between their gradient and that of one rank, adapters and
all weights. `join_timeout_s`: how long a rank waits for one that cannot come, until it names that rank and its node.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from agentrl.core.errors import TrainerLostError
from agentrl.engines.weights.transfer import serve_rendezvous
from agentrl.learn.ranks import DistributedRankGroup
from tests.learn_cases import write_model
from tests.rank_processes import Place, on_ranks
from tests.sharding_cases import FUNCTION, alone, case, gradient_error
from tests.support.hosts import Hosts, unavailable


def figures(quick: bool) -> dict[str, float | None]:
    """See the module."""
    if reason := unavailable():
        print(f"not measured: {reason}", flush=True)
        return {}
    with Hosts(2) as hosts:
        model = write_model(hosts.directory / "model")
        errors = [_error(hosts, str(model), lora=lora) for lora in (True, False)]
        found = hosts.run(1, [sys.executable, "-m", "benchmarks.cluster_ranks", *map(hosts.address, (1, 2))])
        waited = json.loads(found.stdout.splitlines()[-1])
    return {"gradient_error": max(errors), "join_timeout_s": waited}


def _error(hosts: Hosts, model: str, *, lora: bool) -> float:
    places = [Place(hosts.entering(number), hosts.address(number)) for number in (1, 2)]
    folders = [hosts.directory / f"{name}-{lora}" for name in ("two", "one")]
    two, one = (case(Path(model), folder, lora=lora, sharding="none") for folder in folders)
    on_ranks(2, FUNCTION, [two], places=places)
    alone([one])
    return gradient_error(*folders)


def wait_in_vain(addresses: list[str]) -> float:
    """Join, as rank 0, a group whose other rank never comes; the seconds until that is named."""
    rendezvous, store = serve_rendezvous(addresses[0])
    begun = time.monotonic()
    try:
        DistributedRankGroup(rendezvous, rank=0, device=torch.device("cpu"), addresses=addresses, store=store)
    except TrainerLostError as error:
        print(error)
        if f"rank 1 on node {addresses[1]}" not in str(error):
            raise
        return time.monotonic() - begun
    raise SystemExit("the group began without rank 1")


if __name__ == "__main__":
    print(json.dumps(wait_in_vain(sys.argv[1:])))
