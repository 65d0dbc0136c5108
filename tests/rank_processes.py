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

from agentrl.learn.ranks import ProcessGroup, Rendezvous, serve_rendezvous

PATIENCE_S = 600.0


class Place(NamedTuple):
    """Where a rank runs: the words before its command, and its machine's address."""

    entering: Sequence[str] = ()
    address: str = "127.0.0.1"


def on_ranks(size: int, function: str, *arguments: Any, places: Sequence[Place] = ()) -> list[Any]:
    """What `module:function(ranks, *arguments)` returns on each rank; arguments and results are JSON."""
    places = places or [Place()] * size
    with tempfile.TemporaryDirectory(dir="/var/tmp") as directory:  # which hosts of `support.hosts` have, too
        started = [
            subprocess.Popen(
                [
                    *(*place.entering, sys.executable, "-m", "tests.rank_processes"),
                    *(directory, str(rank), ",".join(place.address for place in places), function),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
                text=True,
            )
            for rank, place in enumerate(places)
        ]
        try:
            for process in started:
                assert process.stdin is not None
                process.stdin.write(json.dumps(arguments))
                process.stdin.close()
                process.stdin = None
            said = [process.communicate(timeout=PATIENCE_S)[0] for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert all(process.returncode == 0 for process in started), said
    return [json.loads(text.splitlines()[-1]) for text in said]


def join(meeting: Path, *, rank: int, addresses: Sequence[str]) -> ProcessGroup:
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
    return ProcessGroup(rendezvous, rank=rank, device=device, addresses=addresses, store=store)


def main() -> None:
    """One rank: arguments on standard input, the result on the last line of standard output."""
    directory, rank, addresses, function = sys.argv[1:]
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    ranks = join(Path(directory, "rendezvous"), rank=int(rank), addresses=addresses.split(","))
    result = getattr(importlib.import_module(module), name)(ranks, *json.load(sys.stdin))
    ranks.close()
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    # Device meshes keep their groups beyond `destroy_process_group`, and gloo's threads then now and then abort the
    # interpreter's own exit ("terminate called without an active exception"). Ranks under Ray are killed.
    os._exit(0)


if __name__ == "__main__":
    main()
