"""Runs a function on every rank of a group of processes, gloo over loopback, without Ray."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from agentrl.learn.ranks import DistributedRankGroup, Rendezvous, serve_rendezvous
from tests.support.warm import WARM

PATIENCE_S = 600.0
ARGUMENTS = "arguments"
"""The file of them, beside the ranks' results."""


class Place(NamedTuple):
    """Where a rank runs: the words before its command, and its machine's address."""

    entering: Sequence[str] = ()
    address: str = "127.0.0.1"


def on_ranks(size: int, function: str, *arguments: Any, places: Sequence[Place] = ()) -> list[Any]:
    """What `module:function(ranks, *arguments)` returns on each rank; arguments and results are JSON."""
    addresses = ",".join(place.address for place in places or [Place()] * size)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # which hosts of `support.hosts` have, too
        Path(directory, ARGUMENTS).write_text(json.dumps(arguments))
        each = [(directory, str(rank), addresses, function) for rank in range(size)]
        codes = _entered(each, places) if places else _forked(each)
        assert codes == [0] * size, "see the error stream"
        return [json.loads(Path(directory, str(rank)).read_text()) for rank in range(size)]


def _entered(each: Sequence[tuple[str, ...]], places: Sequence[Place]) -> list[int]:
    """Run ranks in places; their exit codes."""
    started = [
        subprocess.Popen(
            [*place.entering, sys.executable, "-m", "tests.rank_processes", *arguments],
            env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
        )
        for arguments, place in zip(each, places, strict=True)
    ]
    try:
        return [process.wait(PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


def _forked(each: Sequence[tuple[str, ...]]) -> list[int | None]:
    """Run ranks here, where the parent has imported torch for them; their exit codes."""
    started = [WARM.Process(target=run_rank, args=arguments) for arguments in each]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(PATIENCE_S)
        return [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()


def join(meeting: Path, *, rank: int, addresses: Sequence[str]) -> DistributedRankGroup:
    """Join a group; rank 0 writes where they meet into a file."""
    store = None
    if rank == 0:
        rendezvous, store = serve_rendezvous(addresses[rank])
        meeting.with_suffix(".new").write_text(json.dumps(rendezvous))
        meeting.with_suffix(".new").rename(meeting)
    while not meeting.exists():
        time.sleep(0.01)
    rendezvous = Rendezvous(*json.loads(meeting.read_text()))
    device = torch.device("cpu")
    return DistributedRankGroup(rendezvous, rank=rank, device=device, addresses=addresses, store=store)


def run_rank(directory: str, rank: str, addresses: str, function: str) -> None:
    """One rank, which leaves its result in a file."""
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    arguments = json.loads(Path(directory, ARGUMENTS).read_text())
    ranks = join(Path(directory, "rendezvous"), rank=int(rank), addresses=addresses.split(","))
    result = getattr(importlib.import_module(module), name)(ranks, *arguments)
    ranks.close()
    Path(directory, rank).write_text(json.dumps(result))
    # Device meshes keep their groups beyond `destroy_process_group`, and gloo's threads then now and then abort the
    # interpreter's own exit ("terminate called without an active exception"). Ranks under Ray are killed.
    os._exit(0)


if __name__ == "__main__":
    run_rank(*sys.argv[1:])
