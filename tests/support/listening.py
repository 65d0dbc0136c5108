"""A placement of worker processes that counts what crosses to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.cluster import worker_wire
from agentrl.engines.process import LocalPlacement
from tests.support.frames import bodies


class Listening(LocalPlacement):
    """Counts the bytes of each frame, as they cross."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.frames: list[tuple[object, int]] = []
        """What was said, and in how many bytes."""

    async def start(self, program: Any) -> Any:
        child: Any = await super().start(program)
        frames, reader, writer = self.frames, child.reader, child.writer

        class Reader:
            head = True

            async def readexactly(self, size: int) -> bytes:
                data: bytes = await reader.readexactly(size)
                if not self.head:
                    frames.append((worker_wire.FROM_WORKER.decode(data), 4 + size))
                self.head = not self.head
                return data

        class Writer:
            def write(self, data: bytes) -> None:
                frames.extend((worker_wire.TO_WORKER.decode(body), 4 + len(body)) for body in bodies(data))
                writer.write(data)

            def close(self) -> None:
                writer.close()

        child.reader, child.writer = Reader(), Writer()
        return child
