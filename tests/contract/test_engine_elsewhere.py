"""An engine on another machine is sent its versions, also by a second process, and is sampled from over TCP."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from agentrl.core.errors import EngineError, EngineLostError, EngineStorageError, VersionsRefusedError
from agentrl.core.network import SCHEME, Address
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines import protocol
from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE
from agentrl.engines.remote.client import EngineClient, ProcessEngine
from agentrl.engines.remote.connection import EngineConnection
from agentrl.engines.weights import version_files
from agentrl.engines.weights.version_files import PIECE_BYTES, VersionFiles
from tests.contract.elsewhere import (
    START,
    Elsewhere,
    program,
    written,
)
from tests.support.frames import bodies

REQUEST = GenerateRequest(
    request_id="call", token_ids=np.array([1, 2], np.int32), sampling=SamplingParams(max_tokens=8), seed=0
)


async def made(directory: Path) -> ProcessEngine:
    return await ProcessEngine(program(directory), START, placement=Elsewhere()).ready()


def received_versions(process_id: int | None) -> Path:
    """The directory of a process with the versions that its owner sent."""
    environment = Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    (private,) = [
        line.partition(b"=")[2] for line in environment if line.startswith(PRIVATE_DIRECTORY_VARIABLE.encode())
    ]
    return Path(os.fsdecode(private), "versions")


def refuse_versions(process_id: int | None) -> Path:
    """Have a process's disk refuse further versions, as a full one does, while a file is there."""
    versions = received_versions(process_id)
    versions.rename(versions.with_name("moved"))
    versions.write_text("no directory can be made here")
    return versions


def test_versions_travel_as_bytes_and_a_second_process_is_sent_them_again(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await made(tmp_path)
        large = written(tmp_path / "1", 1, 2 * PIECE_BYTES + 17)
        await engine.serve([large], ())
        small = written(tmp_path / "2", 2, 10)
        await engine.serve([small], [large])
        assert engine.supervisor.process_id is not None
        os.kill(engine.supervisor.process_id, signal.SIGKILL)
        while not engine.supervisor.losses:
            await asyncio.sleep(0.01)
        await engine.ready()
        await engine.serve([small], [large])
        session = engine.open("pinned", "solver", pin=PolicyVersion("solver", 0, 1))
        completion = await session.generate(REQUEST)
        assert [span.version for span in completion.spans] == [PolicyVersion("solver", 0, 1)]
        gone = written(tmp_path / "3", 3, 10)
        (tmp_path / "3" / "adapter_config.json").unlink()
        with pytest.raises(EngineError, match=r"solver.* refused: .*adapter_config.json cannot be read"):
            await engine.serve([gone], ())
        await engine.close()

    asyncio.run(main())


def test_a_version_that_two_requests_need_is_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an evaluation ends, and releases its version, while the next version is published."""
    sent: list[tuple[str, str, int]] = []
    send_piece = VersionFiles._send_piece

    def send(
        files: VersionFiles, weights: WeightsRef, pieces: list[asyncio.Task[None]], name: str, start: int, data: bytes
    ) -> None:
        sent.append((weights.sha256, name, start))
        send_piece(files, weights, pieces, name, start, data)

    monkeypatch.setattr(VersionFiles, "_send_piece", send)

    async def main() -> None:
        engine = await made(tmp_path)
        first, pinned = written(tmp_path / "1", 1, 10), written(tmp_path / "3", 3, 3 * PIECE_BYTES)
        await engine.serve([first], ())
        new = written(tmp_path / "2", 2, 6 * PIECE_BYTES)
        await asyncio.gather(engine.serve([new], [first]), engine.serve([new], [pinned]), engine.serve([new], [pinned]))
        assert len(sent) == len(set(sent))
        await engine.serve([new], [pinned])
        assert len(sent) == len(set(sent)), "the process has kept both"
        for pin in (None, pinned.version):
            session = engine.open(f"session of {pin}", "solver", pin=pin)
            completion = await session.generate(REQUEST)
            session.close()
            assert [span.version for span in completion.spans] == [pin or new.version]
        await engine.close()

    asyncio.run(main())


class UnansweredWriter:
    """Notes what is written in one iteration of the event loop; nothing is answered."""

    def __init__(self) -> None:
        self.sent: list[list[str]] = []
        self._written: list[str] = []

    def write(self, data: bytes) -> None:
        if not self._written:
            asyncio.get_running_loop().call_soon(self._send)
        self._written += [type(protocol.REQUESTS.decode(body)).__name__ for body in bodies(data)]

    def _send(self) -> None:
        self.sent.append(self._written)
        self._written = []

    def close(self) -> None:
        pass


def test_an_adapter_and_the_request_to_serve_it_take_one_round_trip(tmp_path: Path) -> None:
    async def main() -> None:
        writer, reader = UnansweredWriter(), asyncio.StreamReader()
        connection = EngineConnection(reader, writer, on_message=lambda reply: None, on_end=lambda why: None)
        connection.files = VersionFiles(connection, "another")
        serving = asyncio.create_task(connection.serve([written(tmp_path / "1", 1, 1000)], ()))
        while not writer.sent:
            await asyncio.sleep(0.01)
        assert writer.sent == [["WeightChunk", "WeightChunk", "ServeVersionsRequest"]]
        reader.feed_eof()
        await connection.drain(EngineLostError("it is over"))
        with pytest.raises(EngineLostError):
            await serving

    asyncio.run(main())


class FullDisk:
    """A connection to a process whose disk takes no piece."""

    def __init__(self) -> None:
        self.asked = 0

    def next_call(self) -> int:
        return 1

    async def ask(self, call: int, message: protocol.Request) -> protocol.Reply:
        self.asked += 1
        raise EngineStorageError("no space")


@pytest.mark.exhaustive
def test_a_machine_that_refuses_a_piece_is_sent_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_files, "PIECE_BYTES", 1 << 16)

    async def main() -> None:
        connection, weights = FullDisk(), written(tmp_path / "1", 1, 20 << 16)
        files = VersionFiles(connection, "another")
        pieces: list[asyncio.Task[None]] = []
        await files.send(0, [weights], pieces)
        await asyncio.gather(*pieces)
        assert connection.asked == version_files.PIECES
        (error,) = files.take_failures([weights]).values()
        assert isinstance(error, EngineStorageError)

    asyncio.run(main())


def test_files_that_are_not_those_of_the_digest_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await made(tmp_path)
        changed = written(tmp_path / "1", 1, 100)
        (tmp_path / "1" / "adapter_config.json").write_bytes(b"others")
        with pytest.raises(EngineError, match="other files than were published"):
            await engine.serve([changed], ())
        await engine.close()

    asyncio.run(main())


@pytest.mark.exhaustive
def test_a_version_that_cannot_be_sent_is_refused_alone(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await made(tmp_path)
        unreadable, kept, new = (written(tmp_path / str(step), step, 10) for step in (1, 2, 3))
        (tmp_path / "1" / "adapter_model.safetensors").unlink()
        with pytest.raises(VersionsRefusedError) as refusal:
            await engine.serve([new], [unreadable, kept])
        assert list(refusal.value.refused) == [unreadable.version]
        engine.open("pinned", "solver", pin=kept.version).close()
        completion = await engine.open("session", "solver").generate(REQUEST)
        assert [span.version for span in completion.spans] == [new.version]
        await engine.close()

    asyncio.run(main())


@pytest.mark.exhaustive
def test_a_machine_that_cannot_keep_a_version_is_named_and_serves_the_one_before(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await made(tmp_path)
        await engine.serve([written(tmp_path / "1", 1, 10)], ())
        refusing = refuse_versions(engine.supervisor.process_id)
        with pytest.raises(VersionsRefusedError, match=r"solver@0\.2 refused") as refusal:
            await engine.serve([written(tmp_path / "2", 2, 10)], ())
        assert [type(error) for error in refusal.value.refused.values()] == [EngineStorageError]
        completion = await engine.open("session", "solver").generate(REQUEST)
        assert [span.version.step for span in completion.spans] == [1]
        refusing.unlink()
        await engine.serve([written(tmp_path / "3", 3, 2 * PIECE_BYTES + 17)], ())
        await engine.close()

    asyncio.run(main())


def test_a_worker_samples_over_tcp_and_without_the_token_nobody_does(tmp_path: Path) -> None:
    async def main() -> None:
        engine = await made(tmp_path)
        (address,) = engine.addresses
        assert address.startswith(SCHEME)
        client = EngineClient(engine.capabilities)
        client.moved([address])
        completion = await client.open("s", "solver").generate(REQUEST)
        assert completion.token_ids.tolist() == [5, 6, 2]
        stranger = EngineClient(engine.capabilities)
        stranger.moved([str(Address.parse(address)._replace(token="00" * 32))])
        call = asyncio.create_task(stranger.open("s", "solver").generate(REQUEST))
        while stranger._addresses:
            await asyncio.sleep(0.01)
        assert not call.done()  # it waits for an address that takes it
        call.cancel()
        await asyncio.wait({call})
        await engine.close()

    asyncio.run(main())
