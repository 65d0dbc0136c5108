"""Keys of one server: what one of them has queued, holds or sends slowly delays another by at most one request."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.gateway import bodies
from agentrl.tinker import tables
from agentrl.tinker.http_server import TinkerServer
from tests.support.tinker_client import (
    KEY,
    MODEL,
    OTHER_KEY,
    OWNERS,
    Client,
    Refused,
    Samples,
    row,
    server_config,
    serving,
)

PROMPT = [5, 6, 7]
ROWS = [row([5, 6, 7, 8, 9, 10]), row([5, 6, 7, 11, 12])]


def finished(directory: Path) -> list[str]:
    """The ids of the finished requests, in order."""
    with contextlib.closing(sqlite3.connect(directory / "server/journal/requests.db")) as connection:
        return [str(request) for (request,) in connection.execute("SELECT id FROM results ORDER BY rowid")]


async def served_before(
    directory: Path,
    others: Sequence[Mapping[str, Any]],
    send: Callable[[], Awaitable[Mapping[str, Any]]],
    client: Client,
) -> int:
    """How many of others' requests finish between the acceptance of a request and its result."""
    promise = await send()
    at = len(finished(directory))
    await client.result(promise)
    order = finished(directory)
    names = {other["request_id"] for other in others}
    return sum(name in names for name in order[at : order.index(promise["request_id"])])


async def base_sampler(client: Client) -> str:
    created = await client.post(
        "create_sampling_session", session_id=client.session, sampling_session_seq_id=0, base_model=MODEL
    )
    return str(created["sampling_session_id"])


@pytest.mark.parametrize(("requests", "samples", "most"), [(16, 16, 2), (300, 1, 60)])
def test_a_short_sample_does_not_wait_for_another_key_s_samples(
    tmp_path: Path, requests: int, samples: int, most: int
) -> None:
    async def work() -> int:
        async with (
            serving(server_config(tmp_path)) as (address, _),
            Client(address) as alice,
            Client(address, OTHER_KEY) as bob,
        ):
            many, one = await base_sampler(alice), await base_sampler(bob)
            others = [await alice.submit_sample(many, PROMPT, samples, max_tokens=60, stop=[]) for _ in range(requests)]

            def send() -> Awaitable[Mapping[str, Any]]:
                return bob.submit_sample(one, PROMPT, 1, max_tokens=4, stop=[])

            return await served_before(tmp_path, others, send, bob)

    assert asyncio.run(work()) <= most


def test_an_interrupted_sample_has_the_tokens_that_it_has_alone(tmp_path: Path) -> None:
    """Two places, both held by long samples of one key: a short one of another key finishes first."""

    async def work() -> None:
        async with (
            serving(server_config(tmp_path, engine=config.engine.model_copy(update={"slots": 2}))) as (address, _),
            Client(address) as alice,
            Client(address, OTHER_KEY) as bob,
        ):
            many, one = await base_sampler(alice), await base_sampler(bob)
            settings = {"max_tokens": 60, "stop": [], "seed": 3, "prompt_logprobs": True}
            alone = await alice.sample(many, PROMPT, 4, **settings)
            beside = await alice.submit_sample(many, PROMPT, 4, **settings)
            for _ in range(3):
                await bob.sample(one, PROMPT, 1, max_tokens=2, stop=[])
            assert beside["request_id"] not in finished(tmp_path)
            found = Samples(await alice.result(beside))
            assert found.tokens == alone.tokens
            for logprobs, expected in zip(found.logprobs, alone.logprobs, strict=True):
                assert np.abs(logprobs - expected).max() < 1e-4

    config = server_config(tmp_path)
    asyncio.run(work())


def test_a_model_is_created_beside_another_key_s_hundred(tmp_path: Path) -> None:
    async def work() -> int:
        async with (
            serving(server_config(tmp_path)) as (address, _),
            Client(address) as alice,
            Client(address, OTHER_KEY) as bob,
        ):

            def create(client: Client, number: int) -> Awaitable[Mapping[str, Any]]:
                lora = {"rank": 4, "seed": 1}
                return client.post(
                    "create_model",
                    session_id=client.session,
                    model_seq_id=number,
                    base_model=MODEL,
                    lora_config=lora,
                )

            others = await asyncio.gather(*(create(alice, number) for number in range(100)))
            return await served_before(tmp_path, others, lambda: create(bob, 0), bob)

    assert asyncio.run(work()) <= 2


def test_a_pass_waits_for_one_of_another_key_s_many_models_and_its_model_stays(tmp_path: Path) -> None:
    """More models than fit in memory: the key that has many replaces its own."""

    async def work() -> None:
        async with (
            serving(server_config(tmp_path, max_models=3)) as (address, service),
            Client(address) as alice,
            Client(address, OTHER_KEY) as bob,
        ):
            mine = await bob.model()
            models = [await alice.model(number) for number in range(8)]
            others = [await alice.forward_backward(model, ROWS) for model in models for _ in range(4)]
            for _ in range(3):
                assert await served_before(tmp_path, others, lambda: bob.forward_backward(mine, ROWS), bob) <= 2
                assert service.tables.bases[MODEL].trainer.has(mine)
            for other in others:
                await alice.result(other)
            assert service.tables.bases[MODEL].trainer.has(mine)

    asyncio.run(work())


async def send_slowly(address: str, count: int) -> list[asyncio.StreamWriter]:
    """Begin a number of bodies that never end."""
    head = f"POST /api/v1/asample HTTP/1.1\r\nHost: {address[7:]}\r\nX-API-Key: {KEY}\r\nContent-Length: 100\r\n\r\n{{"
    writers = []
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(head.encode())
        writers.append(writer)
    return writers


def test_slow_bodies_take_no_connection_of_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.core.connections.file_limit", lambda: 64)

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address, OTHER_KEY) as first:
            writers = await send_slowly(address, 200)
            for _ in range(3):
                async with Client(address, OTHER_KEY) as bob:
                    assert bob.session in (await first.get("sessions"))["sessions"]
                writers += await send_slowly(address, 50)
            for writer in writers:
                writer.close()

    asyncio.run(work())


def test_keys_take_turns_with_their_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    parse = bodies.parse_json_body

    def noted(body: bytes) -> dict[str, Any]:
        found = parse(body)
        parsed.append(found["session_id"])
        return found

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (_, service):
            server = TinkerServer(service, OWNERS, "127.0.0.1")
            async with server.listen(0) as port:
                address = f"http://127.0.0.1:{port}"
                async with Client(address) as alice, Client(address, OTHER_KEY) as bob, asyncio.TaskGroup() as group:
                    monkeypatch.setattr(bodies, "parse_json_body", noted)
                    async with server._reading:  # until all wait for it
                        for client, owner in (*[(alice, "ALICE")] * 8, (bob, "BOB")):
                            group.create_task(client.post("session_heartbeat", session_id=client.session))
                            while not server._next_to_read[owner].locked():
                                await asyncio.sleep(0.01)
                assert parsed[:2] == [alice.session, bob.session]

    asyncio.run(work())


def test_a_body_that_does_not_arrive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.gateway.http.BODY_S", 0.1)

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as client:
            may_end = asyncio.Event()

            async def slow() -> Any:
                yield b"{"
                await may_end.wait()

            with pytest.raises(Refused, match="408: the body did not arrive"):
                await client.send("POST", "create_session", data=slow())
            await client.post("session_heartbeat", session_id=client.session)

    asyncio.run(work())


def test_what_a_key_keeps_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"sessions": 3, "models": 2, "samplers": 2, "bytes of user_metadata": 100}
    monkeypatch.setattr(tables, "MAX_OF_OWNER", most)
    monkeypatch.setattr("agentrl.tinker.service.MAX_WAITING", 4)

    async def fill(client: Client) -> dict[str, str]:
        """What a key is refused, by what it does again and again."""
        refused: dict[str, str] = {}
        model = await client.model(metadata={"a": "x" * 40})
        sampler = await base_sampler(client)
        doings: dict[str, Callable[[int], Awaitable[Any]]] = {
            "sessions": lambda _: client.post("create_session", tags=[], user_metadata={}, sdk_version="0"),
            "metadata": lambda number: client.model(number, metadata={"a": "x" * 60}),
            "saved metadata": lambda number: client.submit(
                "save_weights", model, path=f"p{number}", user_metadata={"a": "x" * 60}
            ),
            "models": client.model,
            "samplers": lambda number: client.post(
                "create_sampling_session",
                session_id=client.session,
                sampling_session_seq_id=number,
                base_model=MODEL,
            ),
            "samples": lambda _: client.submit_sample(sampler, PROMPT, 1024, max_tokens=60, stop=[]),
        }
        for name, do in doings.items():
            try:
                for number in range(1, 9):
                    await do(number)
            except Refused as error:
                refused[name] = f"{error.status} {error.sentence}"
        return refused

    async def work() -> None:
        async with serving(server_config(tmp_path)) as (address, _), Client(address) as alice:
            refused = await fill(alice)
            assert {name: sentence[:3] for name, sentence in refused.items()} == {
                **dict.fromkeys(("sessions", "metadata", "saved metadata", "models", "samplers"), "400"),
                "samples": "429",
            }
            assert "3 sessions" in refused["sessions"]
            async with Client(address, OTHER_KEY) as bob:
                sampler = await base_sampler(bob)
                await bob.model(metadata={"a": "x" * 40})
                await bob.sample(sampler, PROMPT)
        async with serving(server_config(tmp_path)) as (address, _):  # also of what an earlier process accepted
            client = Client(address)
            with pytest.raises(Refused, match="3 sessions"):
                await client.post("create_session", tags=[], user_metadata={}, sdk_version="0")
            await client.__aexit__()

    asyncio.run(work())
