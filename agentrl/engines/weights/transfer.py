"""Transfer of full weights from the trainer to an engine: the connection between the two.

An engine asks its owner for full weights (`protocol.WeightsRequest`). The owner makes rank 0 of the trainer send the
file it published, while training continues. Rank 0 connects to the engine's Unix socket or, on another machine, to its
TCP port with a token, offers names, dtypes and shapes, and drives vLLM's protocol over the connection: init, start,
update once or more, finish. `app.engines.connect_engine_to_trainer` chooses the backend of vLLM that carries the bytes:
`ipc` on one GPU, `nccl` between two, `gloo` between machines without GPUs. Elsewhere the engine loads the published
file.

Owns `WeightReceiver` and `IncomingTransfer`, the engine's ends; `WeightTransferConnection` (vLLM's
`VLLMWeightSyncClient`) and `WeightSenders`, the trainer's ends; and `VersionFiles`, by which the engine's owner sends
files. vLLM's trainer engines for `ipc` and `nccl` are in `vllm_senders.py`. Ours for `gloo`, `GlooSender`, stands here
because a trainer without a GPU should not import vLLM; its worker is registered in vLLM's factory (`vllm_worker.py`).
Invariant: if no weights are sent, because the trainer has moved on, is dead or cannot be reached, the engine loads the
published file with the same weights, on another machine after its owner has sent it. Each wait has a limit: `OFFER_S`
for an offer, `WeightOffer.silence_s` for the trainer's next call, at most `ANSWER_S` for the engine's answer, and
`STALL_S` for a tensor by `gloo`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from agentrl.core import rpc
from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, EngineError, EngineLostError, TrainerError, version_refused_error
from agentrl.core.files import WEIGHT_FILES, read_files_in_pieces, read_safetensors_header
from agentrl.core.network import (
    SCHEME,
    SILENT_S,
    Address,
    Listener,
    connect_socket,
    interface_of,
    is_unacknowledged,
    own_address,
)
from agentrl.core.records import PolicyVersion
from agentrl.engines import protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import Work

    from agentrl.config.devices import Transfer
    from agentrl.core.records import WeightsRef

JoinedGroup = TypeVar("JoinedGroup")

CHUNK_BYTES = 1 << 28
"""Maximum bytes of tensors in one update, unless a single tensor is larger."""
STALL_S = 60.0
"""Seconds for one tensor over gloo after which either end gives up."""
JOIN_TIMEOUT = timedelta(seconds=45)
"""Time that a process waits for the others to join a group."""
ANSWER_S = 150.0
"""Maximum seconds for which rank 0 waits for an engine's answer. The other ranks wait for rank 0, and give up
after `ranks.TIMEOUT`."""
REJOIN_S = 600.0
"""Seconds after which rank 0 retries a gloo group with an engine: an attempt may block the engine for
`JOIN_TIMEOUT` and rank 0 for `STALL_S`. One of nccl is made once with a process, because it may never end."""
OFFER_S = 15.0
"""Seconds that an engine waits for a trainer's offer before it loads the published file: the trainer may be busy, or
another engine may hold it up."""
PIECE_BYTES = 4 << 20
"""Number of bytes of a version's file in one message."""
PIECES = 4
"""Number of such messages on the way at a time."""


class WeightOffer(rpc.WireMessage, frozen=True, tag="Offer"):
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

        descriptions = zip(self.names, self.dtype_names, self.shapes, strict=True)
        dtypes = {name: getattr(torch, name, None) for name in set(self.dtype_names)}
        if wrong := [name for name, dtype in dtypes.items() if not isinstance(dtype, torch.dtype)]:
            raise ValueError(f"{wrong[0]!r} is not a dtype")
        return {name: torch.empty(shape, dtype=dtypes[dtype], device="meta") for name, dtype, shape in descriptions}


class TransferCall(rpc.WireMessage, frozen=True):
    """A call of vLLM's protocol."""

    method: Literal["init", "start", "update", "finish"]
    info: dict[str, Any]


class TransferReply(rpc.Reply, frozen=True):
    """Answer to a `WeightOffer` or a `TransferCall`; the engine answers one before the trainer sends the next."""


_REQUEST: msgspec.msgpack.Decoder[WeightOffer | TransferCall] = msgspec.msgpack.Decoder(WeightOffer | TransferCall)
_REPLY: msgspec.msgpack.Decoder[TransferReply | rpc.ErrorReply] = msgspec.msgpack.Decoder(
    TransferReply | rpc.ErrorReply
)


class TransferError(Exception):
    """The trainer's end of a connection is gone, hangs, or sent an invalid message."""


# --- the engine's end -------------------------------------------------------------------------------------------------


class IncomingTransfer:
    """A transfer of one version in progress: the connection of the trainer that sends it."""

    def __init__(self, offer: WeightOffer, connection: rpc.Connection) -> None:
        self.offer = offer
        self._connection = connection

    def answer(self, *, error: str = "") -> None:
        """Answer the last request."""
        refusal = rpc.ErrorReply(kind="EngineError", message=error)
        self._connection.send(refusal if error else TransferReply())

    async def next_call(self) -> TransferCall:
        """Return the next call of the trainer.

        Raises:
            TransferError: there will be no further call, or none has come for `WeightOffer.silence_s`.
        """
        try:
            async with asyncio.timeout(self.offer.silence_s):
                message = await self._connection.receive()
        except TimeoutError as error:
            raise TransferError(f"the trainer has sent nothing for {self.offer.silence_s:g} s") from error
        except ValueError as error:
            raise TransferError(str(error)) from error
        if not isinstance(message, TransferCall):
            raise TransferError("the trainer closed the connection")
        return message

    def close(self) -> None:
        """Close the connection."""
        self._connection.close(EngineError("the transfer ended"))


class WeightReceiver:
    """Receiving end of weight transfers in an engine. Before `listen`, it requests nothing."""

    def __init__(self) -> None:
        self._address = ""
        self._listener = Listener(self._receive)
        self._tell: Callable[[int, PolicyVersion, str], None] = lambda number, version, address: None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[PolicyVersion | None, asyncio.Future[IncomingTransfer | None]]] = {}
        """Requests by number, each with the version that a trainer may send; None: it asks for a file."""

    async def listen(self, path: str, tell: Callable[[int, PolicyVersion, str], None], *, host: str = "") -> None:
        """Accept trainers at a Unix socket or at a TCP port.

        Args:
            path: of the Unix socket, in a directory that only this user can enter.
            tell: passes a request to the engine's owner: its number, the version, and the address of this end; "" asks
                for the version's file.
            host: address of this machine, for trainers on other machines, which then use a TCP port and a token; "":
                they use the Unix socket.
        """
        self._tell = tell
        listener = self._listener
        self._address = str(await listener.listen(host)) if host else await listener.listen_locally(path)

    def close(self) -> None:
        """Refuse further deliveries."""
        self._address = ""
        self._listener.close()

    async def ask(self, version: PolicyVersion) -> IncomingTransfer | None:
        """Request a version; returns its delivery, or None if no trainer offers it within `OFFER_S`."""
        return await self._request(version, self._address, OFFER_S) if self._address else None

    async def fetch(self, version: PolicyVersion) -> None:
        """Wait until the owner has sent the missing part of a version's file, or has failed to: the file's digest tells
        which."""
        if self._address:
            await self._request(version, "", None)

    async def _request(self, version: PolicyVersion, address: str, limit_s: float | None) -> IncomingTransfer | None:
        number = next(self._numbers)
        future: asyncio.Future[IncomingTransfer | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (version if address else None, future)
        self._tell(number, version, address)
        try:
            await asyncio.wait({future}, timeout=limit_s)
            return future.result() if future.done() else None
        finally:
            del self._waiting[number]

    def not_sent(self, number: int) -> None:
        """Note the owner's answer that nothing more will be sent: no trainer sends the version, or all was sent."""
        _, future = self._waiting.get(number, (None, None))
        if future is not None and not future.done():
            future.set_result(None)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = rpc.Connection(reader, writer, _REQUEST)
        try:
            offer = await connection.receive()
        except ValueError:
            offer = None
        for version, future in self._waiting.values():
            if isinstance(offer, WeightOffer) and offer.version == version and not future.done():
                future.set_result(IncomingTransfer(offer, connection))
                with contextlib.suppress(OSError):
                    await writer.wait_closed()  # the listener closes the connection when this returns
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

    number: int
    """Number of the engine, which its next process will have too."""
    address: str = field(repr=False)
    """Path of the engine's Unix socket, or its `core.network.Address`, which holds its token."""
    transfer: Transfer
    processes: int
    """Number of processes that hold the engine's model."""
    silence_s: float
    """Seconds without a message after which either end considers the other hung."""

    @property
    def redacted_address(self) -> str:
        """The address without its token, for messages."""
        return self.host or self.address

    @property
    def host(self) -> str:
        """Address of the engine's machine; "": it is on this one, without a cluster."""
        return Address.parse(self.address).host if self.address.startswith(SCHEME) else ""

    @property
    def interface(self) -> str:
        """This machine's network interface on the route to the engine."""
        return interface_of(own_address(self.host)) if self.host else "lo"


@runtime_checkable
class WeightSendingTrainer(Protocol):
    """A trainer that sends weights to engines."""

    async def send(self, version: PolicyVersion, recipient: WeightDestination) -> None:
        """Send the full weights of a policy's current version.

        Raises:
            SupersededVersionError: the version is no longer current.
            TrainerError: the engine did not accept the weights.
        """
        ...


@dataclass(slots=True)
class PublishedWeightSource:
    """vLLM's `WeightSource` for a policy's published tensors.

    `tensors` is iterated once.
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
        from agentrl.engines.models import dtype_name

        tensors = self.layout.values()
        return WeightOffer(
            version=version,
            names=list(self.layout),
            dtype_names=[dtype_name(tensor.dtype) for tensor in tensors],
            shapes=[list(tensor.shape) for tensor in tensors],
            silence_s=silence_s,
        )


class WeightTransferConnection:
    """The connection to an engine; each method returns when the engine has executed the call.

    Raises, from every method:
        TrainerError: the engine refused, hangs, or is gone.
    """

    def __init__(self, recipient: WeightDestination) -> None:
        self.on_failure: Callable[[], None] = lambda: None
        """Called when an update failed, in whose broadcast another thread may wait for the engine."""
        self._recipient = recipient
        self._silence_s = min(recipient.silence_s, ANSWER_S)
        self._socket: socket.socket | None = None

    def offer(self, offer: WeightOffer) -> None:
        """Connect, and offer tensors."""
        self.close()
        address, silence_s = self._recipient.address, self._silence_s
        try:
            self._socket = connect_socket(address, silence_s)
        except OSError as error:
            why = error.strerror or str(error) or "it does not answer"
            raise TrainerError(f"no engine accepts weights at {self._recipient.redacted_address} ({why})") from error
        self._request(offer)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See vLLM's `VLLMWeightSyncClient`."""
        self._request(TransferCall(method="init", info=init_info))

    def start_weight_update(self) -> None:
        """See vLLM's `VLLMWeightSyncClient`; the engine pauses here."""
        self._request(TransferCall(method="start", info={}))

    def update_weights(self, update_info: Any) -> None:
        """See vLLM's `VLLMWeightSyncClient`."""
        try:
            self._request(TransferCall(method="update", info=update_info))
        except TrainerError:
            self.on_failure()
            raise

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
            reply: TransferReply = rpc.ask_blocking(self._socket, message, _REPLY)
        except AgentRLError as error:
            raise TrainerError(f"the engine refused the weights: {error}") from error
        except TimeoutError as error:
            method = message.method if isinstance(message, TransferCall) else "offer"
            silence_s = SILENT_S if is_unacknowledged(error) else self._silence_s
            raise TrainerError(
                f"the engine at {self._recipient.redacted_address} has not answered {method!r} for {silence_s:g} s, so "
                "nothing more is sent to it; when it answers again, it loads the published file"
            ) from error
        except (OSError, ValueError) as error:
            raise TrainerError(f"the engine closed the connection while weights were sent ({error})") from error
        return reply


def in_chunks(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Group tensors, each contiguous, into chunks of `CHUNK_BYTES`."""
    chunk: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if chunk and sum(part.nbytes for part in chunk.values()) + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk = {}
        chunk[name] = tensor.contiguous()
    yield chunk


class Rendezvous(NamedTuple):
    """Address of rank 0's store, the rendezvous of a group."""

    host: str
    port: int


def serve_rendezvous(host: str) -> tuple[Rendezvous, TCPStore]:
    """Serve the store of a group on one address of this machine and a free port, as rank 0."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    # Given a listening socket, the store listens only at that address, and owns the socket.
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=JOIN_TIMEOUT, master_listen_fd=listener.detach()
    )
    return Rendezvous(host, port), store


class GlooBroadcast:
    """A group of a trainer's rank 0 and the processes of an engine, on the network between their machines.

    It is a separate group, bound to one address regardless of gloo's environment variables.

    Args:
        store: where the group meets.
        rank: number of this process; rank 0 sends.
        size: number of processes.
        host: address of this machine on the route to the others.

    Raises:
        RuntimeError: the others did not come within `STALL_S`; so do `start` and the result's `wait`.
    """

    def __init__(self, store: TCPStore, *, rank: int, size: int, host: str) -> None:
        import torch.distributed

        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=STALL_S)
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(store, rank, size, options)
        self._store = store

    def start(self, tensors: Iterable[Tensor]) -> list[Work]:
        """Start to send contiguous tensors or to receive into them; a waiting list keeps them alive."""
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        flat = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]  # gloo lacks some dtypes
        return [self._group.broadcast([flat_tensor], options) for flat_tensor in flat]


def join_broadcast(rendezvous: Rendezvous, *, rank: int, size: int) -> GlooBroadcast:
    """Join a group at the store that rank 0 serves.

    Raises:
        RuntimeError: see `GlooBroadcast`.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=JOIN_TIMEOUT)
    return GlooBroadcast(store, rank=rank, size=size, host=own_address(rendezvous.host))


def join_with_engine(join: Callable[[], JoinedGroup], ask_engine: Callable[[], None], *, grace_s: float) -> JoinedGroup:
    """Join a group as rank 0 while the engine joins on request: each blocks until the other joins.

    Args:
        join: joins as rank 0; returns the group.
        ask_engine: returns when the engine has joined.
        grace_s: seconds for which rank 0's attempt is waited for after the engine has refused: a process that exits
            in the middle of an attempt is aborted. One that lasts longer is left to its thread.

    Raises:
        TrainerError: the engine, rank 0 or both did not join; the message has the errors of both.
    """
    group = Future[JoinedGroup]()

    def join_in_thread() -> None:
        try:
            group.set_result(join())
        except Exception as error:  # noqa: BLE001 - read below
            group.set_exception(error.with_traceback(None))  # its frames would keep the group's store and its port

    thread = Thread(target=join_in_thread, daemon=True)
    thread.start()
    try:
        ask_engine()
    except TrainerError as error:
        thread.join(grace_s)
        if group.done() and group.exception() is not None:
            raise TrainerError(f"{error}; rank 0 did not join either: {group.exception()}") from error
        raise
    thread.join(JOIN_TIMEOUT.total_seconds())
    join_error = (
        group.exception() if group.done() else TimeoutError(f"nothing came for {JOIN_TIMEOUT.total_seconds():g} s")
    )
    if join_error is not None:
        raise TrainerError(f"the engine joined, but rank 0 did not: {join_error}") from join_error
    return group.result()


class GlooSender:
    """Broadcasts weights over the network to the processes of an engine on another machine, without GPUs."""

    def __init__(
        self, recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
    ) -> None:
        self.link = link
        self.source = source
        host, size = own_address(recipient.host), 1 + recipient.processes
        rendezvous, store = serve_rendezvous(host)
        info = {"host": host, "port": rendezvous.port, "size": size}
        self._group = join_with_engine(
            lambda: GlooBroadcast(store, rank=0, size=size, host=host),
            lambda: link.init_weight_transfer_engine({"backend": "gloo", "info": info}),
            grace_s=STALL_S,
        )

    def send_weights(self) -> None:
        """See vLLM's `TrainerWeightTransferEngine`."""
        from agentrl.engines.models import dtype_name

        self.link.start_weight_update()
        missing = set(self.source.layout)
        for chunk in in_chunks(self.source):
            missing -= chunk.keys()
            transfers = self._group.start(chunk.values())
            self.link.update_weights(
                {
                    "names": list(chunk),
                    "dtype_names": [dtype_name(item.dtype) for item in chunk.values()],
                    "shapes": [list(item.shape) for item in chunk.values()],
                }
            )
            for item in transfers:
                item.wait()
        if missing:
            raise TrainerError(f"{len(missing)} offered tensors do not exist: {', '.join(sorted(missing)[:4])}")
        self.link.finish_weight_update()

    def shutdown(self) -> None:
        """Leave the process group."""
        del self._group


class FailedJoin(NamedTuple):
    """A failed attempt to form a group with an engine's process; `retry_at` is a time of the monotonic clock."""

    recipient: WeightDestination
    retry_at: float
    error: str


class WeightSenders:
    """The senders of rank 0: one per engine for `ipc` and `nccl`, which connect to a process only once; otherwise one
    per transfer.

    Args:
        make: makes the sender of an engine, on the rank's device.
    """

    def __init__(
        self, make: Callable[[WeightDestination, WeightTransferConnection, PublishedWeightSource], Any]
    ) -> None:
        self._make = make
        self._clock = SystemClock()
        self._senders: dict[int, tuple[WeightDestination, WeightTransferConnection, Any]] = {}
        """Engines, connections and senders, keyed by the engine's number."""
        self._failed_joins: dict[int, FailedJoin] = {}
        """Engines with which no group could be formed, keyed by the engine's number."""

    def send(self, source: PublishedWeightSource, version: PolicyVersion, recipient: WeightDestination) -> None:
        """Send the weights of a source to an engine.

        Raises:
            TrainerError: the engine refused the weights or is gone, or no group could be formed with it lately.
        """
        failed = self._failed_joins.get(recipient.number)
        if failed is not None and failed.recipient == recipient and self._clock.monotonic() < failed.retry_at:
            raise TrainerError(f"joining its process group failed recently, and is not retried yet: {failed.error}")
        last_recipient, link, sender = self._senders.pop(recipient.number, (None, None, None))
        # The first time, or the next process, which has another address.
        if link is None or last_recipient != recipient:
            if sender is not None:
                sender.shutdown()
            link, sender = WeightTransferConnection(recipient), None
        try:
            link.offer(source.offer(version, recipient.silence_s))
            if sender is None:
                try:
                    sender = self._make(recipient, link, source)
                except Exception as error:
                    retry_at = math.inf if recipient.transfer == "nccl" else self._clock.monotonic() + REJOIN_S
                    self._failed_joins[recipient.number] = FailedJoin(recipient, retry_at, str(error))
                    raise
            sender.source = source
            sender.send_weights()
            if recipient.transfer in ("ipc", "nccl"):
                self._senders[recipient.number] = (recipient, link, sender)
                sender = None
        finally:
            link.close()  # first: the engine then leaves the group, which ends broadcasts that have begun
            if sender is not None:
                sender.shutdown()


# --- files from the engine's owner ------------------------------------------------------------------------------------


class Requests(Protocol):
    """The connection to an engine's process; see `EngineConnection`."""

    def next_call(self) -> int:
        """Return a number for a call."""
        ...

    async def ask(self, call: int, message: protocol.Request) -> protocol.Reply:
        """Send a message and wait for its answer."""
        ...


class VersionFiles:
    """Sends the files of versions to a process that cannot read those of its owner, piece by piece.

    Args:
        connection: connection to the process.
        host: machine of the process, for messages.
        only_headers: whether the process requests full weights; only the headers of their files are sent first.
    """

    def __init__(self, connection: Requests, host: str, *, only_headers: bool) -> None:
        self._connection = connection
        self._host = host
        self._only_headers = only_headers
        self._sent: set[str] = set()
        """Digests of the versions that the process has, at least their headers."""
        self._headers_only: dict[str, tuple[WeightsRef, int]] = {}
        """Versions of which only a header was sent, and its bytes, keyed by digest: steps that change nothing publish
        the same file again."""
        self._digests: dict[PolicyVersion, str] = {}
        """Digests of the versions that the process may request."""
        self._failures: dict[PolicyVersion, EngineError] = {}
        """Why a version could not be sent."""

    async def send(self, versions: Iterable[WeightsRef], pieces: list[asyncio.Task[None]]) -> None:
        """Send what the process needs to be asked for versions; add the answers to `pieces`, of which at most `PIECES`
        are open.

        Files that fit into one message's size are on the way together, with the request that follows them: over Ray
        each write is acknowledged before the next one leaves. `take_failures` returns what could not be sent.
        """
        for weights in versions:
            self._digests[weights.version] = weights.sha256
            if weights.sha256 in self._sent:
                continue
            try:
                if self._only_headers and weights.kind == "full":
                    await self._send_header(weights, pieces)
                else:
                    await self._send_files(weights, pieces)
            except EngineError as error:
                self._failures[weights.version] = error

    async def send_remainder(self, version: PolicyVersion) -> None:
        """Send the rest of a version's file, if only its header was sent; returns when it is there."""
        weights, start = self._headers_only.pop(self._digests.get(version, ""), (None, 0))
        if weights is None:
            return
        pieces: list[asyncio.Task[None]] = []
        try:
            await self._send_files(weights, pieces, start)
        except EngineError as error:
            self._failures[version] = error
        for answer in await asyncio.gather(*pieces, return_exceptions=True):
            if isinstance(answer, EngineError):
                self._failures.setdefault(version, answer)

    def take_failures(self, versions: Iterable[WeightsRef]) -> dict[PolicyVersion, EngineError]:
        """Return why some of these versions could not be sent, and forget it."""
        names = [weights.version for weights in versions]
        return {version: self._failures.pop(version) for version in names if version in self._failures}

    def keep_only(self, versions: Collection[WeightsRef]) -> None:
        """Note that the process serves these versions, and has removed its copies of others."""
        self._digests = {weights.version: weights.sha256 for weights in versions}
        self._sent = set(self._digests.values())
        self._headers_only = {digest: header for digest, header in self._headers_only.items() if digest in self._sent}

    async def _send_header(self, weights: WeightsRef, pieces: list[asyncio.Task[None]]) -> None:
        (name,) = WEIGHT_FILES["full"]
        try:
            header = await asyncio.to_thread(read_safetensors_header, Path(weights.path) / name)
        except (OSError, ValueError) as error:
            raise version_refused_error(weights, f"{weights.path}/{name} cannot be read ({error})") from error
        self._headers_only[weights.sha256] = (weights, len(header))
        self._send_piece(weights, pieces, name, 0, header)

    async def _send_files(self, weights: WeightsRef, pieces: list[asyncio.Task[None]], start: int = 0) -> None:
        names = WEIGHT_FILES[weights.kind]
        pieces_to_read = read_files_in_pieces(Path(weights.path), names, PIECE_BYTES, start=start)
        is_last = False
        while not is_last:
            try:
                read, is_last = await asyncio.to_thread(next, pieces_to_read)
            except OSError as error:
                raise version_refused_error(
                    weights, f"{error.filename or weights.path} cannot be read ({error.strerror})"
                ) from error
            for name, before, data in read:
                self._send_piece(weights, pieces, name, before, data)
            if not is_last and len(pieces) >= PIECES:
                await asyncio.wait({oldest := pieces[-PIECES]})
                if oldest.cancelled() or oldest.exception() is not None or weights.version in self._failures:
                    return

    def _send_piece(
        self, weights: WeightsRef, pieces: list[asyncio.Task[None]], name: str, start: int, data: bytes
    ) -> None:
        call = self._connection.next_call()
        chunk = protocol.WeightChunk(call=call, sha256=weights.sha256, name=name, start=start, data=data)
        pieces.append(asyncio.get_running_loop().create_task(self._confirm_chunk(weights, chunk)))

    async def _confirm_chunk(self, weights: WeightsRef, chunk: protocol.WeightChunk) -> None:
        try:
            await self._connection.ask(chunk.call, chunk)
        except EngineLostError:
            raise
        except EngineError as error:
            reason = f"machine {self._host} cannot store them: {error}"
            self._failures.setdefault(weights.version, version_refused_error(weights, reason, type(error)))
