"""Clients of an engine's processes: they sample like its owner, find it when it has moved, and may nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Coroutine
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from agentrl.core import rpc
from agentrl.core.errors import EngineError, EngineLostError
from agentrl.core.tokens import Tokens
from agentrl.engines import protocol
from agentrl.engines.remote.client import EngineClient, ProcessEngine
from agentrl.engines.router import EngineRouter
from tests.contract.engine_kinds import START, prompt, request, version
from tests.contract.test_engine_process import SCRIPTED, kill, made, weights_of

Hosted = Callable[[ProcessEngine, EngineClient], Coroutine[Any, Any, None]]


def with_guest(scenario: Hosted) -> None:
    """An engine in a process of its own, and a client of it that is told where it is."""

    async def main() -> None:
        engine, _ = await made()
        client = EngineClient(engine.capabilities)
        engine.on_move(lambda: client.moved(engine.addresses))
        client.moved(engine.addresses)
        try:
            await scenario(engine, client)
        finally:
            await engine.close()

    asyncio.run(main())


def test_a_guest_samples_what_the_owner_would() -> None:
    async def scenario(engine: ProcessEngine, client: EngineClient) -> None:
        owners = await engine.open("a", "solver").generate(request("a", prompt(9), seed=3))
        got: list[int] = []
        session = client.open("a", "solver")
        completion = await session.generate(
            request("a", prompt(9), seed=3), lambda _, tokens: got.extend(tokens.token_ids.tolist())
        )
        assert completion.token_ids.tolist() == owners.token_ids.tolist()
        assert completion.logprobs.tolist() == owners.logprobs.tolist()
        assert completion.spans == owners.spans
        await engine.serve([weights_of(1)])
        assert (await session.generate(request("b", prompt(9)))).spans[0].version == version(1)
        session.close()
        with pytest.raises(EngineError, match="the session is closed"):
            await session.generate(request("c", prompt(9)))

    with_guest(scenario)


def test_a_guest_gets_the_log_probabilities_that_the_owner_gets() -> None:
    async def scenario(engine: ProcessEngine, client: EngineClient) -> None:
        tokens = prompt(9)
        scores, expected = [await one.score("solver", tokens, top=3) for one in (client, engine)]
        for column in ("logprobs", "top_ids", "top_logprobs"):
            assert getattr(scores, column).tolist() == getattr(expected, column).tolist()

    with_guest(scenario)


def test_a_request_arrives_as_it_was_sent() -> None:
    sent = replace(request("r", prompt(5), seed=1, sampled_before=2, priority=3), seat="environment.seat", row=4)
    message = protocol.message_from_generate_request(1, 2, sent, deltas=True)
    arrived = protocol.generate_request_from_message(message)
    for field in fields(sent):
        if field.name != "opening":  # the client uses it to choose the replica
            assert getattr(sent, field.name) is not field.default, "the test sends every field"
            np.testing.assert_equal(getattr(arrived, field.name), getattr(sent, field.name))


def test_two_guests_may_name_their_calls_alike_and_each_aborts_its_own() -> None:
    async def scenario(engine: ProcessEngine, client: EngineClient) -> None:
        other = EngineClient(engine.capabilities)
        other.moved(engine.addresses)
        calls = []
        for each, on_delta in ((client, lambda *_: client.abort("same")), (other, lambda *_: None)):
            session = each.open("s", "solver")
            calls.append(asyncio.create_task(session.generate(request("same", prompt(9), max_tokens=590), on_delta)))
        assert (await calls[0]).finish_reason == "abort"
        assert len((await calls[1]).token_ids) == 590

    with_guest(scenario)


def test_a_guest_whose_engine_dies_keeps_what_was_delivered_and_waits_for_the_next() -> None:
    async def scenario(engine: ProcessEngine, client: EngineClient) -> None:
        await engine.serve([weights_of(1)])
        got: list[int] = []
        began = asyncio.Event()

        def on_delta(request_id: str, tokens: Tokens) -> None:
            got.extend(tokens.token_ids.tolist())
            began.set()

        session = client.open("s", "solver")
        call = asyncio.create_task(session.generate(request("r", prompt(9), max_tokens=590), on_delta))
        await began.wait()
        kill(engine)
        with pytest.raises(EngineLostError):
            await call
        assert 0 < len(got) < 590
        completion = None
        while completion is None:  # a dying process may take one call more; its callers ask again, as a turn does
            with contextlib.suppress(EngineLostError):
                completion = await session.generate(request("r", prompt(9)))  # waits until it is told where
        assert completion.spans[0].version == version(1)
        assert completion.token_ids.tolist() == got[: len(completion.token_ids)]

    with_guest(scenario)


@pytest.mark.parametrize(
    "message",
    [
        protocol.ServeVersionsRequest(call=1, current=[weights_of(1)], pinned=[]),
    ],
)
def test_a_guest_that_asks_for_more_than_samples_is_shown_out(message: rpc.WireMessage) -> None:
    async def scenario(engine: ProcessEngine, client: EngineClient) -> None:
        reader, writer = await asyncio.open_unix_connection(engine.addresses[0])
        rpc.send(writer, message)
        assert await rpc.read_frame(reader) is None
        writer.close()
        assert (await client.open("s", "solver").generate(request("r", prompt(9)))).spans[0].version == START["solver"]

    with_guest(scenario)


def test_the_door_is_for_this_user_alone() -> None:
    async def scenario(engine: ProcessEngine, client: EngineClient) -> None:
        (address,) = engine.addresses
        assert stat.S_IMODE(os.stat(os.path.dirname(address)).st_mode) == 0o700

    with_guest(scenario)


def test_conversations_that_begin_alike_go_to_one_replica_and_none_to_one_that_is_fenced() -> None:
    async def main() -> None:
        engines = [(await made())[0] for _ in range(2)]
        (engine,) = EngineRouter(engines).fleets
        client = EngineClient(engine.capabilities)
        moves: list[tuple[str, ...]] = []

        def moved() -> None:
            moves.append(engine.addresses)
            client.moved(engine.addresses)

        engine.on_move(moved)
        moved()
        sessions = [client.open(f"s{number}", "solver") for number in range(8)]
        for number, session in enumerate(sessions):
            await session.generate(request(f"r{number}", prompt(9, seed=number)))
        both = set(engine.addresses)
        assert len(both) == 2
        assert set(client._connections) == both
        kill(engines[0])
        while len(moves) < 2:
            await asyncio.sleep(0)
        assert moves[1] == engines[1].addresses
        await engine.serve([weights_of(1)])
        for number, session in enumerate(sessions):
            completion = await session.generate(request(f"again{number}", prompt(9, seed=number)))
            assert completion.spans[0].version == version(1)
        await engine.close()

    asyncio.run(main())


def test_a_replica_that_comes_late_is_not_given_all_that_is_new() -> None:
    """Conversations that have ended are no load: those of the others, in a long run, would be thousands."""

    async def main() -> None:
        engines = [(await made())[0] for _ in range(2)]
        first, second = (engine.addresses[0] for engine in engines)
        client = EngineClient(engines[0].capabilities)
        client.moved((first,))
        for number in range(20):
            session = client.open(f"s{number}", "solver")
            await session.generate(request(f"r{number}", prompt(9, seed=number)))
            session.close()
        client.moved((first, second))
        for number in range(8):
            await client.open(f"t{number}", "solver").generate(request(f"u{number}", prompt(9, seed=number)))
        loads = [(await client._open_connection(address)).sessions for address in (first, second)]
        assert (sum(loads), min(loads) >= 3) == (8, True), loads
        for engine in engines:
            await engine.close()

    asyncio.run(main())


def test_a_first_burst_is_shared_by_all_replicas() -> None:
    """Conversations whose line is still being opened are a load."""

    async def main() -> None:
        engines = [(await made())[0] for _ in range(2)]
        client = EngineClient(engines[0].capabilities)
        client.moved([engine.addresses[0] for engine in engines])
        sessions = [client.open(f"s{number}", "solver") for number in range(20)]
        await asyncio.gather(*(each.generate(request(f"r{number}", prompt(9))) for number, each in enumerate(sessions)))
        loads = sorted([(await client._open_connection(engine.addresses[0])).sessions for engine in engines])
        assert (sum(loads), loads[0] >= 7) == (20, True), loads
        for engine in engines:
            await engine.close()

    asyncio.run(main())


def test_a_process_without_a_private_place_has_no_door(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Where its path is longer than a Unix socket's may be."""
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("agentrl.engines.process._root", lambda size: deep)

    async def main() -> None:
        engine = await ProcessEngine(SCRIPTED, START).ready()
        assert engine.addresses == ()
        await engine.open("s", "solver").generate(request("r", prompt(9)))
        await engine.close()

    asyncio.run(main())


def test_a_connection_to_a_machine_that_became_unreachable_has_ended() -> None:
    """TCP then raises an OSError that is no ConnectionError."""

    async def main() -> None:
        reader = asyncio.StreamReader()
        reader.set_exception(TimeoutError("110"))
        assert await rpc.read_frame(reader) is None

    asyncio.run(main())
