"""Messages between two ends of a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from agentrl.core import rpc
from agentrl.core.errors import AgentRLError, EngineError, EngineLostError, JournalError

LOST = EngineLostError("the peer is gone")


class Add(rpc.WireMessage, frozen=True):
    call: int
    terms: list[int]


class Note(rpc.WireMessage, frozen=True):
    text: str


class Sum(rpc.Reply, frozen=True):
    value: int


class PartialSum(rpc.Part, frozen=True):
    value: int


DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    Add | Note | Sum | PartialSum | rpc.Acknowledgement | rpc.ErrorReply | rpc.CancelCall
)


@contextlib.asynccontextmanager
async def connected(
    handle: Callable[[rpc.Connection, Any], Any], *, errors: tuple[type[AgentRLError], ...] = (AgentRLError,)
) -> AsyncIterator[rpc.Connection]:
    """Yield a connection whose peer handles messages with `handle`."""
    ours, theirs = socket.socketpair()
    client = rpc.Connection(*await asyncio.open_connection(sock=ours), DECODER, errors=errors)
    server = rpc.Connection(*await asyncio.open_connection(sock=theirs), DECODER)
    client.start(lambda message: None, on_end=lambda why: client.close(LOST), name="client")
    server.start(lambda message: handle(server, message), on_end=lambda why: server.close(LOST), name="server")
    yield client
    client.close(LOST)
    await server.drain(LOST)
    await client.drain(LOST)


async def add(server: rpc.Connection, message: Add) -> Sum:
    total = 0
    for term in message.terms:
        total += term
        server.send(PartialSum(call=message.call, value=total))
    return Sum(call=message.call, value=total)


def answer_sums(server: rpc.Connection, message: Add) -> None:
    server.answer(message.call, add(server, message))


def test_answers_reach_their_calls_after_their_parts() -> None:
    async def main() -> None:
        async with connected(answer_sums) as client:
            parts: dict[int, list[int]] = {1: [], 2: []}
            sums = await asyncio.gather(
                *(
                    client.ask(
                        call, Add(call=call, terms=[call, 10]), on_part=lambda part: parts[part.call].append(part.value)
                    )
                    for call in (1, 2)
                )
            )
            assert [each.value for each in sums] == [11, 12]
            assert parts == {1: [1, 11], 2: [2, 12]}
            assert not client.calls_in_flight

    asyncio.run(main())


def test_an_error_keeps_its_class_only_where_the_caller_expects_it() -> None:
    raised: list[Exception] = [EngineError("refused"), JournalError("the disk is full"), ZeroDivisionError("a bug")]

    async def fail() -> None:
        raise raised.pop(0)

    async def main() -> None:
        async with connected(
            lambda server, message: server.answer(message.call, fail()), errors=(EngineError,)
        ) as client:
            for text in ("refused", "the disk is full", "ZeroDivisionError: a bug"):
                with pytest.raises(EngineError) as error:
                    await client.ask(1, Add(call=1, terms=[]))
                assert type(error.value) is EngineError
                assert str(error.value) == text

    asyncio.run(main())


def test_a_failing_listener_cancels_its_call_at_the_peer() -> None:
    async def main() -> None:
        cancelled = asyncio.Event()

        async def never(server: rpc.Connection, call: int) -> None:
            server.send(PartialSum(call=call, value=1))
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        async with connected(
            lambda server, message: server.answer(message.call, never(server, message.call))
        ) as client:
            with pytest.raises(KeyError):
                await client.ask(1, Add(call=1, terms=[]), on_part=lambda part: {}[part.value])
            await cancelled.wait()

            cancelled.clear()
            started = asyncio.Event()
            call = asyncio.create_task(
                client.ask(2, Add(call=2, terms=[]), on_part=lambda part: started.set(), is_cancellable=True)
            )
            await started.wait()
            call.cancel()
            await cancelled.wait()

    asyncio.run(main())


def test_a_deadline_ends_a_call_and_not_the_connection() -> None:
    async def main() -> None:
        async with connected(lambda server, message: answer_sums(server, message) if message.terms else None) as client:
            with pytest.raises(TimeoutError):
                await client.ask(1, Add(call=1, terms=[]), limit_s=0.01)
            assert (await client.ask(2, Add(call=2, terms=[7]))).value == 7

    asyncio.run(main())


class Writer:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.written.append(b"closed")


def test_calls_of_one_moment_share_a_write_and_so_do_their_answers() -> None:
    async def answered(call: int) -> rpc.Acknowledgement:
        return rpc.Acknowledgement(call=call)

    async def main() -> None:
        writer = Writer()
        connection = rpc.Connection(asyncio.StreamReader(), writer, DECODER)
        calls = [Add(call=number, terms=[number]) for number in (1, 2, 3)]
        asking = [asyncio.create_task(connection.ask(call.call, call)) for call in calls]
        await asyncio.sleep(0.01)
        assert writer.written == [b"".join(map(rpc.encode_frame, calls))]
        for number in (7, 8):
            connection.answer(number, answered(number))
        await asyncio.sleep(0.01)
        answers = [rpc.encode_frame(rpc.Acknowledgement(call=number)) for number in (7, 8)]
        assert writer.written[1:] == [b"".join(answers)]
        connection.close(LOST)
        for task in asking:
            with pytest.raises(EngineLostError):
                await task

    asyncio.run(main())


def test_queued_messages_keep_their_order_and_share_a_write() -> None:
    async def main() -> None:
        writer = Writer()
        connection = rpc.Connection(asyncio.StreamReader(), writer, DECODER)
        frames = [rpc.encode_frame(Note(text=text)) for text in "abcde"]
        connection.queue(Note(text="a"))
        connection.queue(Note(text="b"))
        connection.send(Note(text="c"))
        assert writer.written == [frames[0] + frames[1], frames[2]]
        connection.queue(Note(text="d"))
        await asyncio.sleep(0)
        assert writer.written[2:] == [frames[3]]
        connection.queue(Note(text="e"))
        connection.close(LOST)
        connection.send(Note(text="after the end"))
        assert writer.written[3:] == [frames[4], b"closed"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        (rpc.MAX_FRAME_BYTES + 1).to_bytes(rpc.HEAD_BYTES, "little"),
        rpc.encode_frame(["Unknown", 1]),
        rpc.encode_frame({"call": 1}),
        (1).to_bytes(rpc.HEAD_BYTES, "little") + b"\xc1",
        rpc.encode_frame(Add(call=1, terms=[1]))[:-1],
        b"",
    ],
)
def test_an_invalid_message_or_the_end_fails_unanswered_calls(sent: bytes) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        client = rpc.Connection(*await asyncio.open_connection(sock=ours), DECODER)
        client.start(lambda message: None, on_end=lambda why: client.close(LOST), name="client")
        call = asyncio.create_task(client.ask(1, Add(call=1, terms=[])))
        _, writer = await asyncio.open_connection(sock=theirs)
        writer.write(sent)
        writer.write_eof()
        with pytest.raises(EngineLostError, match="peer"):
            await call
        with pytest.raises(EngineLostError, match="peer"):
            await client.ask(2, Add(call=2, terms=[]))
        writer.close()

    asyncio.run(main())
