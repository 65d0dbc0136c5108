"""An engine's process as on another machine: it may read no file of its owner's, and takes clients over TCP."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from agentrl.core.errors import EngineError
from agentrl.core.files import DELTA_FILES, WEIGHT_FILES, read_safetensors_header, sha256_of
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.weight_deltas import (
    DeltaEncoder,
    DeltaRecord,
    WeightDeltaError,
    digest_of_version,
    open_weights,
    read_header,
    write_record,
)
from agentrl.engines.process import ChildProgram, LocalChildProcess, LocalPlacement
from agentrl.engines.scripted import ScriptedEngine
from agentrl.engines.weights.gloo import GlooBroadcast, Rendezvous, join_broadcast
from agentrl.engines.weights.reading import read_metadata
from agentrl.engines.weights.receiver import IncomingTransfer, WeightReceiver
from agentrl.engines.weights.version_files import PIECE_BYTES

HOST = "127.0.0.1"
START = {"solver": PolicyVersion("solver", 0, 0)}


class Elsewhere(LocalPlacement):
    """Children of this process that count as being on another machine."""

    async def start(self, program: ChildProgram) -> LocalChildProcess:
        child = await super().start(program)
        child.host = HOST
        return child


class ReadingEngine(ScriptedEngine):
    """Checks the files of a version as real engines do, and that they are no longer where their owner has them."""

    def __init__(self, *, versions: Mapping[str, PolicyVersion], owner: str) -> None:
        super().__init__([[5, 6, 2]], versions=versions)
        self._owner = owner

    async def load(self, weights: WeightsRef) -> None:
        if weights.path.startswith(self._owner):
            raise EngineError(f"{weights.path} is read by path")
        try:
            digest = digest_of_version(Path(weights.path), weights.kind)
        except (OSError, WeightDeltaError) as error:
            raise EngineError(f"{weights.version} cannot be read: {error}") from error
        if digest != weights.sha256:
            raise EngineError(f"{weights.version} has other files than were published")


class AskingEngine(ReadingEngine):
    """Asks trainers for all weights, and its owner for the file of those that no trainer sends."""

    def __init__(self, *, versions: Mapping[str, PolicyVersion], owner: str) -> None:
        super().__init__(versions=versions, owner=owner)
        self.inbox = WeightReceiver()
        self._group: GlooBroadcast | None = None

    async def load(self, weights: WeightsRef) -> None:
        step, (name,) = weights.version.step, WEIGHT_FILES["full"]
        if weights.path.startswith(self._owner) or read_metadata(weights) != {"step": str(step)}:
            raise EngineError("the header has not come")
        file = Path(weights.path, name)
        came = file_size(file)
        incoming = await self.inbox.ask(weights.version)
        tensors = {} if incoming is None else await self._received(incoming)
        if incoming is None:
            await self.inbox.fetch(weights.version)
            if sha256_of(file) != weights.sha256:
                raise EngineError(f"{weights.version} has other files than were published")
            tensors = load_file(file)
        elif not came == file_size(file) == len(read_safetensors_header(file)):
            raise EngineError("more than the header has come")
        if not all(torch.equal(tensors[name], tensor) for name, tensor in tensors_of(step).items()):
            raise EngineError("other weights have come")

    async def _received(self, incoming: IncomingTransfer) -> dict[str, torch.Tensor]:
        received: dict[str, torch.Tensor] = {}
        incoming.answer()
        while (asked := await incoming.next_call()).method != "finish":
            info = asked.info
            if asked.method == "init":
                found = info["info"]
                self._group = await asyncio.to_thread(
                    join_broadcast, Rendezvous(found["host"], found["port"]), rank=1, size=found["size"]
                )
            if asked.method == "update":
                assert self._group is not None
                received |= {
                    name: torch.empty(shape) for name, shape in zip(info["names"], info["shapes"], strict=True)
                }
                for each in self._group.start(received[name] for name in info["names"]):
                    each.wait()
            incoming.answer()
        incoming.answer()
        incoming.close()
        return received


def file_size(path: Path) -> int:
    return path.stat().st_size


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """The weights of a version: more bytes than two messages take."""
    return {"a": torch.full((3, PIECE_BYTES // 4), float(step)), "b": torch.full((5,), -float(step))}


def written_full(directory: Path, step: int) -> WeightsRef:
    """A version of all weights."""
    directory.mkdir(parents=True)
    file = directory / WEIGHT_FILES["full"][0]
    save_file(tensors_of(step), file, {"step": str(step)})
    version = PolicyVersion("solver", 0, step)
    return WeightsRef(version=version, path=str(directory), kind="full", sha256=sha256_of(file))


def written_changes(base: WeightsRef) -> WeightsRef:
    """A version of all weights, stored as changes of the one before, next to it."""
    step = base.version.step + 1
    directory = Path(base.path).with_name(f"0.{step}")
    directory.mkdir()
    (name,) = WEIGHT_FILES["full"]
    with open_weights(Path(base.path) / name) as file:
        header, old = read_header(file), file.read()
    new = np.frombuffer(old, "<u2").copy()
    new[step::1000] += 1
    (directory / name).write_bytes(header + new.tobytes())
    version = PolicyVersion("solver", 0, step)
    weights = WeightsRef(version=version, path=str(directory), kind="full", sha256=sha256_of(directory / name))
    store_as_changes(weights, base)
    return weights


def store_as_changes(weights: WeightsRef, base: WeightsRef) -> None:
    """Replace a version's file by the changes since the one next to it."""
    (name,) = WEIGHT_FILES["full"]
    with open_weights(Path(base.path) / name) as old, Path(weights.path, name).open("rb") as new:
        read_header(old)
        encoder = DeltaEncoder(old)
        parts = (memoryview(read_header(new)), memoryview(new.read()))
        frames = [*itertools.chain.from_iterable(map(encoder.add, parts)), *encoder.finish()]
    Path(weights.path, DELTA_FILES[1]).write_bytes(b"".join(frames))
    write_record(Path(weights.path), DeltaRecord(Path(base.path).name, base.sha256, weights.sha256))
    Path(weights.path, name).unlink()


def written(directory: Path, step: int, size: int) -> WeightsRef:
    """A version whose files are bytes."""
    directory.mkdir(parents=True)
    for name in WEIGHT_FILES["adapter"]:
        (directory / name).write_bytes(bytes([step]) * size)
    return WeightsRef(
        version=PolicyVersion("solver", 0, step),
        path=str(directory),
        kind="adapter",
        sha256=digest_of_version(directory, "adapter"),
    )


def program(owner: Path) -> ChildProgram:
    arguments: dict[str, Any] = {"owner": str(owner)}
    return ChildProgram("tests.contract.elsewhere:ReadingEngine", arguments)


def asking_program(owner: Path) -> ChildProgram:
    """An engine that takes weights from trainers."""
    return ChildProgram("tests.contract.elsewhere:AskingEngine", {"owner": str(owner)})
