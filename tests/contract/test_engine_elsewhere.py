"""An engine on another machine is sent its versions, also by a second process, and is sampled from over TCP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.core.errors import EngineError
from agentrl.core.network import SCHEME, Address
from agentrl.engines.client import PIECE_BYTES, EngineClient, ProcessEngine
from tests.contract.elsewhere import Elsewhere, program, written
from tests.contract.engine_kinds import START, request, version
from tests.contract.test_engine_process import NoWaiting, kill


def test_versions_travel_as_bytes_and_a_second_process_is_sent_them_again(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ProcessEngine(program(tmp_path), START, placement=Elsewhere(), clock=NoWaiting())
        await engine.ready()
        large = written(tmp_path / "1", 1, 2 * PIECE_BYTES + 17)
        await engine.serve([large], ())
        small = written(tmp_path / "2", 2, 10)
        await engine.serve([small], [large])
        kill(engine)
        while not engine.supervisor.losses:
            await asyncio.sleep(0.01)
        await engine.ready()
        await engine.serve([small], [large])
        session = engine.open("pinned", "solver", pin=version(1))
        completion = await session.generate(request("call", [1, 2]))
        assert [span.version for span in completion.spans] == [version(1)]
        gone = written(tmp_path / "3", 3, 10)
        (tmp_path / "3" / "adapter_config.json").unlink()
        with pytest.raises(EngineError, match=r"solver.* refused: .*adapter_config.json cannot be read"):
            await engine.serve([gone], ())
        (tmp_path / "2" / "adapter_config.json").write_bytes(b"x" * 10)
        await engine.close()

    asyncio.run(main())


def test_files_that_are_not_those_of_the_digest_are_refused(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ProcessEngine(program(tmp_path), START, placement=Elsewhere(), clock=NoWaiting())
        await engine.ready()
        changed = written(tmp_path / "1", 1, 100)
        (tmp_path / "1" / "adapter_config.json").write_bytes(b"others")
        with pytest.raises(EngineError, match="other files than were published"):
            await engine.serve([changed], ())
        await engine.close()

    asyncio.run(main())


def test_a_worker_samples_over_tcp_and_without_the_token_nobody_does(tmp_path: Path) -> None:
    async def main() -> None:
        engine = ProcessEngine(program(tmp_path), START, placement=Elsewhere(), clock=NoWaiting())
        await engine.ready()
        (address,) = engine.addresses
        assert address.startswith(SCHEME)
        client = EngineClient(engine.capabilities)
        client.moved([address])
        completion = await client.open("s", "solver").generate(request("call", [1, 2]))
        assert completion.token_ids.tolist() == [5, 6, 2]
        stranger = EngineClient(engine.capabilities)
        stranger.moved([str(Address.parse(address)._replace(token="00" * 32))])
        call = asyncio.create_task(stranger.open("s", "solver").generate(request("call", [1, 2])))
        while stranger._addresses:
            await asyncio.sleep(0.01)
        assert not call.done()  # it waits for an address that takes it
        call.cancel()
        await asyncio.wait({call})
        await engine.close()

    asyncio.run(main())
