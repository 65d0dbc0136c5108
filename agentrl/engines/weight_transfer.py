"""Transfer of full weights from the trainer to an engine: the connection between the two.

An engine that should serve full weights asks its owner for them (`wire.WeightsRequest`), who makes every rank of the
trainer send them.
Rank 0 connects to the engine's Unix socket, offers names, dtypes and shapes, and drives vLLM's protocol over the
connection: init, start, update once or more, finish. `DevicePlan.transfer_to` chooses what carries the bytes: `ipc` on
one GPU, `nccl` between two, `file` elsewhere, by files in the engine's private directory.

Owns `WeightReceiver` and `IncomingTransfer`, the engine's ends; `WeightTransferConnection` (vLLM's
`VLLMWeightSyncClient`) and `WeightSenders`, the trainer's ends; and `FileSender`. Imports nothing heavy: the senders
for `ipc` and `nccl` are in `vllm/senders.py`.
Invariant: if no weights are sent, because the trainer has moved on, is dead or is on another machine, the engine loads
the published file with the same weights; each end waits for the other for at most `silence_s` seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

from agentrl.core.errors import TrainerError
from agentrl.core.records import PolicyVersion
from agentrl.engines import wire

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.config.devices import Transfer

CHUNK_BYTES = 1 << 28
"""Maximum bytes of tensors in one file, unless a single tensor is larger."""


class WeightOffer(wire.WireMessage, frozen=True, tag="Offer"):
    """The tensors of a version, in the order in which they will be sent."""

    version: PolicyVersion
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    silence_s: float
    """Seconds without a call after which the trainer counts as hung."""

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors without data, by name.

        Raises:
            ValueError: the lists do not describe tensors.
        """
        import torch

        described = zip(self.names, self.dtype_names, self.shapes, strict=True)
        dtypes = {name: getattr(torch, name, None) for name in set(self.dtype_names)}
        if wrong := [name for name, dtype in dtypes.items() if not isinstance(dtype, torch.dtype)]:
            raise ValueError(f"{wrong[0]!r} is not a dtype")
        return {name: torch.empty(shape, dtype=dtypes[dtype], device="meta") for name, dtype, shape in described}


class TransferCall(wire.WireMessage, frozen=True):
    """A call of vLLM's protocol."""

    method: Literal["init", "start", "update", "finish"]
    info: dict[str, Any]


class TransferReply(wire.WireMessage, frozen=True):
    """The answer to a `WeightOffer` or a `TransferCall`."""

    error: str = ""
    """Error message; empty: the request was executed."""
    directory: str = ""
    """Directory for files; sent with an accepted offer."""


_REQUEST: msgspec.msgpack.Decoder[WeightOffer | TransferCall] = msgspec.msgpack.Decoder(WeightOffer | TransferCall)
_REPLY = msgspec.msgpack.Decoder(TransferReply)


class TransferError(Exception):
    """The trainer's end of a connection is gone, hangs, or sent an invalid message."""


# --- the engine's end -------------------------------------------------------------------------------------------------


class IncomingTransfer:
    """A transfer of one version in progress: the connection of the trainer that sends it."""

    def __init__(self, offer: WeightOffer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.offer = offer
        self._reader = reader
        self._writer = writer

    def answer(self, *, error: str = "", directory: str = "") -> None:
        """Answer the last request."""
        wire.send(self._writer, TransferReply(error=error, directory=directory))

    async def next_call(self) -> TransferCall:
        """Return the next call of the trainer.

        Raises:
            TransferError: there will be no further call, or none has come for `WeightOffer.silence_s`.
        """
        try:
            async with asyncio.timeout(self.offer.silence_s):
                body = await wire.read_frame(self._reader)
            message = None if body is None else _REQUEST.decode(body)
        except TimeoutError as error:
            raise TransferError(f"the trainer has sent nothing for {self.offer.silence_s:g} s") from error
        except (ValueError, msgspec.MsgspecError) as error:
            raise TransferError(str(error)) from error
        if not isinstance(message, TransferCall):
            raise TransferError("the trainer closed the connection")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


class WeightReceiver:
    """Receiving end of weight transfers in an engine. Before `listen`, it requests nothing."""

    def __init__(self) -> None:
        self._address = ""
        self._server: asyncio.Server | None = None
        self._tell: Callable[[int, PolicyVersion, str], None] = lambda number, version, address: None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[PolicyVersion, asyncio.Future[IncomingTransfer | None]]] = {}

    async def listen(self, address: str, tell: Callable[[int, PolicyVersion, str], None]) -> None:
        """Accept trainers at a Unix socket.

        Args:
            address: path in a directory that only this user can enter.
            tell: passes a request to the engine's owner: its number, the version, the address.
        """
        self._server = await asyncio.start_unix_server(self._receive, address)
        self._address, self._tell = address, tell

    def close(self) -> None:
        """Refuse further deliveries."""
        self._address = ""
        if self._server is not None:
            self._server.close()

    async def ask(self, version: PolicyVersion) -> IncomingTransfer | None:
        """Request a version; returns its delivery, or None if no trainer sends it."""
        if not self._address:
            return None
        number = next(self._numbers)
        future: asyncio.Future[IncomingTransfer | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (version, future)
        self._tell(number, version, self._address)
        try:
            return await future
        finally:
            del self._waiting[number]

    def not_sent(self, number: int) -> None:
        """Note the owner's answer that no trainer will send, or is still sending, the requested version."""
        _, future = self._waiting.get(number, (None, None))
        if future is not None and not future.done():
            future.set_result(None)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            body = await wire.read_frame(reader)
            offer = None if body is None else _REQUEST.decode(body)
        except (ValueError, msgspec.MsgspecError):
            offer = None
        for version, future in self._waiting.values():
            if isinstance(offer, WeightOffer) and offer.version == version and not future.done():
                future.set_result(IncomingTransfer(offer, reader, writer))
                return
        writer.close()


@runtime_checkable
class WeightReceivingEngine(Protocol):
    """An engine that takes weights from trainers."""

    inbox: WeightReceiver


# --- the trainer's end ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDestination:
    """A trainer's description of an engine that requested weights."""

    address: str
    """Path of the engine's Unix socket."""
    transfer: Transfer
    processes: int
    """Number of processes that hold the engine's model."""
    silence_s: float
    """Seconds without a message after which either end considers the other hung."""


@runtime_checkable
class WeightSendingTrainer(Protocol):
    """A trainer that sends weights to engines."""

    async def send(self, version: PolicyVersion, recipient: WeightDestination) -> None:
        """Send the full weights of a policy's current version.

        Raises:
            TrainerError: the version is no longer current, or the engine did not accept the weights.
        """
        ...


@dataclass(slots=True)
class PublishedWeightSource:
    """vLLM's `WeightSource` for a policy's published tensors.

    All ranks of a sharded model make each tensor together, so `tensors` is iterated once, while the other ranks iterate
    over theirs.
    """

    layout: Mapping[str, Tensor]
    """Tensors without data."""
    tensors: Iterator[tuple[str, Tensor]]

    def metadata(self) -> list[Any]:
        """Return name, dtype and shape of each tensor, in order, as vLLM's `ParamMeta`."""
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.layout.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.tensors

    def offer(self, version: PolicyVersion, silence_s: float) -> WeightOffer:
        """Make the offer of a version with these tensors; for `silence_s`, see `WeightOffer`."""
        described = self.layout.values()
        return WeightOffer(
            version=version,
            names=list(self.layout),
            dtype_names=[str(tensor.dtype).removeprefix("torch.") for tensor in described],
            shapes=[list(tensor.shape) for tensor in described],
            silence_s=silence_s,
        )


class WeightTransferConnection:
    """The connection to an engine; each method returns when the engine has executed the call.

    Raises, from every method:
        TrainerError: the engine refused, hangs, or is gone.
    """

    def __init__(self, recipient: WeightDestination) -> None:
        self.directory = Path()
        """Directory from which the engine reads files."""
        self._recipient = recipient
        self._socket: socket.socket | None = None

    def offer(self, offer: WeightOffer) -> None:
        """Connect, and offer tensors."""
        self.close()
        address = self._recipient.address
        try:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.settimeout(self._recipient.silence_s)
            self._socket.connect(address)
        except OSError as error:
            raise TrainerError(f"no engine accepts weights at {address} ({error.strerror})") from error
        self.directory = Path(self._request(offer).directory)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM's `VLLMWeightSyncClient`."""
        self._request(TransferCall(method="init", info=init_info))

    def start_weight_update(self) -> None:
        """See vLLM's `VLLMWeightSyncClient`; the engine pauses here."""
        self._request(TransferCall(method="start", info={}))

    def update_weights(self, update_info: Any) -> None:
        """See vLLM's `VLLMWeightSyncClient`."""
        self._request(TransferCall(method="update", info=update_info))

    def finish_weight_update(self) -> None:
        """See vLLM's `VLLMWeightSyncClient`; the engine knows the version's label."""
        self._request(TransferCall(method="finish", info={}))

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _request(self, message: WeightOffer | TransferCall) -> TransferReply:
        if self._socket is None:
            raise TrainerError("no engine is connected")
        try:
            self._socket.sendall(wire.encode_frame(message))
            said = _REPLY.decode(self._read(int.from_bytes(self._read(wire.HEAD_BYTES), "little")))
        except TimeoutError as error:
            what, silence_s = (
                message.method if isinstance(message, TransferCall) else "offer",
                self._recipient.silence_s,
            )
            raise TrainerError(
                f"the engine at {self._recipient.address} has not answered {what!r} for {silence_s:g} s, so nothing "
                "more is sent to it; when it answers again, it loads the published file"
            ) from error
        except (OSError, msgspec.MsgspecError) as error:
            raise TrainerError(f"the engine closed the connection while weights were sent ({error})") from error
        if said.error:
            raise TrainerError(f"the engine refused the weights: {said.error}")
        return said

    def _read(self, size: int) -> bytes:
        assert self._socket is not None
        read = bytearray()
        while len(read) < size:
            if not (more := self._socket.recv(min(size - len(read), 1 << 16))):
                raise ConnectionResetError("the connection was closed")
            read += more
        return bytes(read)


class FileSender:
    """Sends weights as files, written before the engine pauses."""

    def __init__(
        self, recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
    ) -> None:
        self.link = link
        self.source = source

    def send_weights(self) -> None:
        """See vLLM's `TrainerWeightTransferEngine`."""
        files = list(self._written())
        self.link.start_weight_update()
        for file in files:
            self.link.update_weights({"path": str(file), "is_last": file is files[-1]})
        self.link.finish_weight_update()

    def _written(self) -> Iterator[Path]:
        chunk: dict[str, Tensor] = {}
        for number, (name, tensor) in enumerate(self.source):
            if chunk and sum(each.nbytes for each in chunk.values()) + tensor.nbytes > CHUNK_BYTES:
                yield self._write(number, chunk)
                chunk.clear()
            chunk[name] = tensor.contiguous()
        yield self._write(-1, chunk)

    def _write(self, number: int, chunk: dict[str, Tensor]) -> Path:
        from safetensors.torch import save_file

        path = self.link.directory / f"{number}.safetensors"
        save_file(chunk, path)
        return path

    def shutdown(self) -> None:
        """See `TrainerWeightTransferEngine.shutdown`; nothing to release."""


class WeightSenders:
    """The senders of rank 0: one per engine, because `ipc` and `nccl` connect to an engine only once.

    Args:
        make: makes the sender of an engine, on the rank's device.
    """

    def __init__(
        self, make: Callable[[WeightDestination, WeightTransferConnection, PublishedWeightSource], Any]
    ) -> None:
        self._make = make
        self._senders: dict[str, tuple[WeightTransferConnection, Any]] = {}
        """Connections and senders, keyed by the engine's address."""

    def send(self, source: PublishedWeightSource, version: PolicyVersion, recipient: WeightDestination) -> None:
        """Send the weights of a source to an engine.

        Raises:
            TrainerError: the engine refused the weights, or is gone.
        """
        for address in [each for each in self._senders if not Path(each).exists()]:
            self._senders.pop(address)[1].shutdown()
        link, sender = self._senders.pop(recipient.address, (WeightTransferConnection(recipient), None))
        try:
            link.offer(source.offer(version, recipient.silence_s))
            sender = sender or self._make(recipient, link, source)
            sender.source = source
            sender.send_weights()
            self._senders[recipient.address] = (link, sender)
        except BaseException:
            if sender is not None:
                sender.shutdown()
            raise
        finally:
            link.close()
