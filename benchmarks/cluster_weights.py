"""The part of `benchmarks.cluster` about versions on their way to an engine on another host.

`adapter_publish_ms`: from the request to serve an adapter of the calculator until an embedded engine on another host
serves it; `adapter_publish_over_one_host`: over the same with the engine in a process beside the run, median of
interleaved pairs. `full_publish_gb_s`: all weights of a model from a trainer to an engine on another host, over gloo;
`full_file_gb_s`: the same as a file, which the engine asks for, keeps and checks; `bare_copy_gb_s`: the same bytes over
a bare connection, into a file. No engine loads them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentrl.app.engines import make_engine
from agentrl.cluster.engine_actors import RayPlacement
from agentrl.cluster.session import RaySession
from agentrl.config.devices import Node
from agentrl.config.load import load
from agentrl.core.files import sha256_of
from agentrl.core.machine import Gpu
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.weights.transfer import GlooSender, PublishedWeightSource, WeightDestination, WeightSenders
from benchmarks.cluster_run import EXAMPLE
from benchmarks.embedded_engine import random_adapter
from tests.contract.elsewhere import AskingEngine
from tests.support.hosts import Hosts, unavailable

START = {"solver": PolicyVersion("solver", 0, 0)}
LORA = ["--policies.solver.lora.rank=8"]
PAIRS = 30
FULL_BYTES, COPIES = 256 << 20, 5
QUICK = 8
"""So many times fewer pairs and bytes."""
COPY_PORT = 7000
BLOCK = 1 << 20
TENSOR_BYTES = 4 << 20


def figures(quick: bool) -> dict[str, float | None]:
    """See the module."""
    if reason := unavailable():
        print(f"not measured: {reason}", flush=True)
        return {}
    with Hosts(2) as hosts:
        hosts.start_ray([1, 2], hide=hosts.directory / "1")
        program = [sys.executable, "-m", "benchmarks.cluster_weights"]
        receiving = hosts.start(2, [*program, "receive", hosts.address(2)])
        found = hosts.run(1, [*program, hosts.address(2), str(QUICK if quick else 1)])
        receiving.kill()
        receiving.wait()
        if found.returncode:
            raise SystemExit(found.stdout + found.stderr)
        print(found.stdout, end="", flush=True)
        measured: dict[str, float | None] = json.loads(found.stdout.splitlines()[-1])
        return measured


async def measure(receiver: str, fewer: int) -> dict[str, float]:
    """All figures; runs on host 1."""
    root = Path(tempfile.mkdtemp())
    there, here = await adapters(root, PAIRS // fewer)
    full, filed, bare = await whole(root, receiver, FULL_BYTES // fewer)
    ratio = statistics.median(a / b for a, b in zip(there, here, strict=True))
    return {
        "adapter_publish_ms": 1e3 * statistics.median(there),
        "adapter_publish_over_one_host": ratio,
        "full_publish_gb_s": full,
        "full_file_gb_s": filed,
        "bare_copy_gb_s": bare,
    }


async def adapters(root: Path, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds until adapters are served on another host and on this one, by turns."""
    elsewhere = load(EXAMPLE, [*LORA, "--cluster.address=auto"])
    beside = load(EXAMPLE, [*LORA, "--engine.replicas=1"])
    model = AutoModelForCausalLM.from_pretrained(elsewhere.model.path)
    engines = [await make_engine(config, START, print) for config in (elsewhere, beside)]
    taken: tuple[list[float], list[float]] = ([], [])
    for step in range(1, pairs + 3):
        path = root / str(step)
        version = PolicyVersion("solver", 0, step)
        weights = WeightsRef(version=version, path=str(path), kind="adapter", sha256=random_adapter(model, path, step))
        for engine, times in zip(engines, taken, strict=True):
            begun = time.perf_counter()
            await engine.serve([weights])
            times.append(time.perf_counter() - begun)
    for engine in engines:
        await engine.close()
    for name, times in zip(("another host", "this host"), taken, strict=True):
        print(f"adapters to {name}: {' '.join(f'{1e3 * each:.1f}' for each in times)} ms", flush=True)
    return taken[0][2:], taken[1][2:]  # without what is set up once


class TakingEngine(AskingEngine):
    """Takes all weights from a trainer; if none sends them, takes their file, and checks its digest as real engines
    do."""

    async def load(self, weights: WeightsRef) -> None:
        incoming = await self.inbox.ask(weights.version)
        if incoming is not None:
            await self._received(incoming)
            return
        await self.inbox.fetch(weights.version)
        if await asyncio.to_thread(sha256_of, Path(weights.path, "model.safetensors")) != weights.sha256:
            raise SystemExit("other bytes than were sent")


async def whole(root: Path, receiver: str, size: int) -> tuple[float, float, float]:
    """Gigabytes a second of all weights to an engine on another host, from a trainer and as a file, and of a bare copy
    there; medians, by turns."""

    def choose(session: RaySession) -> tuple[Node | None, list[Gpu]]:
        return session.nodes()[-1], []

    placement = RayPlacement(choose, address="auto")
    program = ChildProgram("benchmarks.cluster_weights:TakingEngine", {"owner": "/nowhere"})
    engine = await ProcessEngine(program, START, placement=placement, tell=print).ready()
    senders = WeightSenders(GlooSender)
    tensors = {f"tensor.{number}": torch.randn(TENSOR_BYTES // 4) for number in range(size // TENSOR_BYTES)}

    async def deliver(version: PolicyVersion, address: str) -> None:
        source = PublishedWeightSource({name: each.to("meta") for name, each in tensors.items()}, iter(tensors.items()))
        destination = WeightDestination(number=0, address=address, transfer="gloo", processes=1, silence_s=60.0)
        await asyncio.to_thread(senders.send, source, version, destination)

    async def published(step: int) -> float:
        directory = root / f"full-{step}"
        directory.mkdir()
        file = directory / "model.safetensors"
        await asyncio.to_thread(save_file, tensors, file, {"step": str(step)})
        version = PolicyVersion("solver", 0, step)
        weights = WeightsRef(version=version, path=str(directory), kind="full", sha256=sha256_of(file))
        begun = time.perf_counter()
        await engine.serve([weights])
        return size / (time.perf_counter() - begun) / 1e9

    sent, filed, copied = [], [], []
    for step in range(1, COPIES + 1):
        engine.deliver = deliver
        sent.append(await published(2 * step))
        engine.deliver = None
        filed.append(await published(2 * step + 1))
        begun = time.perf_counter()
        await asyncio.to_thread(copy, receiver, root / f"full-{2 * step}" / "model.safetensors")
        copied.append(size / (time.perf_counter() - begun) / 1e9)
        for number in (2 * step, 2 * step + 1):
            shutil.rmtree(root / f"full-{number}")
    await engine.close()
    print(
        f"all weights, {size >> 20} MiB: from a trainer {sent} GB/s, as a file {filed} GB/s, a bare copy {copied} GB/s",
        flush=True,
    )
    return statistics.median(sent), statistics.median(filed), statistics.median(copied)


def copy(receiver: str, file: Path) -> None:
    """Send a file; returns when it is there."""
    with socket.create_connection((receiver, COPY_PORT)) as connection, file.open("rb") as content:
        connection.sendfile(content)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)


def receive(host: str) -> None:
    """Take files, for ever; runs on host 2."""
    with socket.create_server((host, COPY_PORT)) as listener:
        while True:
            connection, _ = listener.accept()
            with connection, tempfile.TemporaryFile() as file:
                while data := connection.recv(BLOCK):
                    file.write(data)
                connection.sendall(b"1")


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        print(json.dumps(asyncio.run(measure(sys.argv[1], int(sys.argv[2])))))
