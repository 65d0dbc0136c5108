"""The trainer's end of weight transfers, in rank 0: it offers full weights to engines and sends them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from agentrl.core import rpc
from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, TrainerError
from agentrl.core.network import (
    SCHEME,
    SILENT_S,
    Address,
    connect_socket,
    interface_of,
    is_unacknowledged,
    own_address,
)
from agentrl.engines.weights.transfer import REPLY_DECODER, TransferCall, TransferReply, WeightOffer
from agentrl.engines.weights.transports import WeightSender, transport_named

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.core.records import PolicyVersion

JoinedGroup = TypeVar("JoinedGroup")
MakeSender: TypeAlias = "Callable[[WeightDestination, WeightTransferConnection, PublishedWeightSource], WeightSender]"

CHUNK_BYTES = 1 << 28
"""Maximum bytes of tensors in one update, unless a single tensor is larger."""
JOIN_TIMEOUT = timedelta(seconds=45)
"""Time that a process waits for the others to join a group."""
ANSWER_S = 150.0
"""Maximum seconds for which rank 0 waits for an engine's answer. The other ranks wait for rank 0, and give up
after `ranks.TIMEOUT`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightDestination:
    """A trainer's description of an engine that requested weights."""

    number: int
    """Number of the engine, which its next process will have too."""
    address: str = field(repr=False)
    """Path of the engine's Unix socket, or its `core.network.Address`, which holds its token."""
    transport: str
    """Name in `transports.TRANSPORTS`."""
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

    @property
    def buffer_bytes(self) -> int:
        """Size of a buffer that holds each tensor, for transports that pack tensors."""
        return max(CHUNK_BYTES, *(tensor.nbytes for tensor in self.layout.values()))

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
        self._request(TransferCall(method="init", info={"transport": self._recipient.transport, "info": init_info}))

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
            reply: TransferReply = rpc.ask_blocking(self._socket, message, REPLY_DECODER)
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


class FailedJoin(NamedTuple):
    """A failed attempt to form a group with an engine's process; `retry_at` is a time of the monotonic clock."""

    recipient: WeightDestination
    retry_at: float
    error: str


def make_sender(
    recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
) -> WeightSender:
    """Make the sender of an engine, on the rank's device."""
    return transport_named(recipient.transport).load().make_sender(recipient, link, source)


class WeightSenders:
    """The senders of rank 0: one per engine for the transports that keep one, otherwise one per transfer.

    Args:
        make: see `make_sender`.
    """

    def __init__(self, make: MakeSender = make_sender) -> None:
        self._make = make
        self._clock = SystemClock()
        self._senders: dict[int, tuple[WeightDestination, WeightTransferConnection, WeightSender]] = {}
        """Engines, connections and senders, keyed by the engine's number."""
        self._failed_joins: dict[int, FailedJoin] = {}
        """Engines with which no group could be formed, keyed by the engine's number."""

    def send(self, source: PublishedWeightSource, version: PolicyVersion, recipient: WeightDestination) -> None:
        """Send the weights of a source to an engine.

        Raises:
            TrainerError: the engine refused the weights or is gone, or no group could be formed with it lately.
        """
        transport = transport_named(recipient.transport)
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
                    retry_at = self._clock.monotonic() + transport.rejoin_s
                    self._failed_joins[recipient.number] = FailedJoin(recipient, retry_at, str(error))
                    raise
            sender.source = source
            sender.send_weights()
            if transport.keeps_sender:
                self._senders[recipient.number] = (recipient, link, sender)
                sender = None
        finally:
            link.close()  # first: the engine then leaves the group, which ends broadcasts that have begun
            if sender is not None:
                sender.shutdown()
