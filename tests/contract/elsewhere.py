"""An engine's process as on another machine: it may read no file of its owner's, and takes clients over TCP."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.core.errors import EngineError
from agentrl.core.files import WEIGHT_FILES, sha256_of
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.process import ChildProgram, LocalChildProcess, LocalPlacement
from agentrl.engines.scripted import ScriptedEngine

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
            digest = sha256_of(*(Path(weights.path) / name for name in WEIGHT_FILES[weights.kind]))
        except OSError as error:
            raise EngineError(f"{weights.version} cannot be read: {error}") from error
        if digest != weights.sha256:
            raise EngineError(f"{weights.version} has other files than were published")


def written(directory: Path, step: int, size: int) -> WeightsRef:
    """A version whose files are bytes."""
    directory.mkdir(parents=True)
    for name in WEIGHT_FILES["adapter"]:
        (directory / name).write_bytes(bytes([step]) * size)
    return WeightsRef(
        version=PolicyVersion("solver", 0, step),
        path=str(directory),
        kind="adapter",
        sha256=sha256_of(*(directory / name for name in WEIGHT_FILES["adapter"])),
    )


def program(owner: Path) -> ChildProgram:
    arguments: dict[str, Any] = {"owner": str(owner)}
    return ChildProgram("tests.contract.elsewhere:ReadingEngine", arguments)
