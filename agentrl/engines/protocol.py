"""Messages between an engine's process and its clients, over a `core.rpc.Connection`."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from agentrl.core import rpc
from agentrl.core.ports import EngineCapabilities, GenerateRequest, SamplingParams
from agentrl.core.records import FinishReason, PolicyVersion, WeightsRef
from agentrl.core.tokens import EncodedTokens


class LoadEngineRequest(rpc.WireMessage, frozen=True):
    """Request to make the engine: `factory` is `module:name.of.callable`, called with `versions` and the arguments; its
    result may have to be awaited."""

    factory: str
    arguments: dict[str, Any]
    versions: dict[str, PolicyVersion]
    host: str = ""
    """Address of the process's machine, at which it accepts other clients, if that differs from its owner's; "" if
    not.
    """


class OpenSessionRequest(rpc.WireMessage, frozen=True):
    """Request to open a session; `session` is the client's number for it."""

    session: int
    name: str
    policy: str
    pin: PolicyVersion | None


class HoldVersionRequest(rpc.WireMessage, frozen=True):
    """Request to keep a session on a version."""

    session: int
    version: PolicyVersion


class CloseSessionRequest(rpc.WireMessage, frozen=True):
    """Request to close a session."""

    session: int


class StartGenerationRequest(rpc.WireMessage, frozen=True):
    """Request to sample in a session; `deltas` states whether the client wants new tokens as they come."""

    call: int
    session: int
    request_id: str
    token_ids: bytes
    sampling: SamplingParams
    seed: int
    sampled_before: int
    priority: int
    seat: str
    row: int
    deltas: bool


class WaitForRoomRequest(rpc.WireMessage, frozen=True):
    """Request to wait for the room that the session's last call lacked."""

    call: int
    session: int


class AbortRequest(rpc.WireMessage, frozen=True):
    """Request to end a call, which returns its tokens so far."""

    request_id: str


class ServeVersionsRequest(rpc.WireMessage, frozen=True):
    """Request to serve these versions and no others."""

    call: int
    current: list[WeightsRef]
    pinned: list[WeightsRef]


class WeightChunk(rpc.WireMessage, frozen=True):
    """The next bytes of a version's file, for a process that cannot read its owner's files; `sha256` belongs to the
    version."""

    call: int
    sha256: str
    name: str
    start: int
    """Number of bytes before these."""
    data: bytes


class LogprobsRequest(rpc.WireMessage, frozen=True):
    """Request for the log-probabilities of tokens, and of the `top` likeliest tokens at each position."""

    call: int
    version: PolicyVersion | str
    token_ids: bytes
    temperature: float
    top: int


Request = (
    LoadEngineRequest
    | OpenSessionRequest
    | HoldVersionRequest
    | CloseSessionRequest
    | StartGenerationRequest
    | WaitForRoomRequest
    | rpc.CancelCall
    | AbortRequest
    | ServeVersionsRequest
    | WeightChunk
    | LogprobsRequest
)


class EngineLoadedReply(rpc.Reply, frozen=True):
    """Answer to `LoadEngineRequest`: the engine is ready. Other clients reach it at `address`, the path of a Unix
    socket or a `core.network.Address`, if that is not empty."""

    capabilities: EngineCapabilities
    address: str


class CompletionReply(rpc.Reply, frozen=True):
    """Answer to `StartGenerationRequest`."""

    tokens: EncodedTokens
    finish_reason: FinishReason
    cached_tokens: int


class VersionsServedReply(rpc.Reply, frozen=True):
    """Answer to `ServeVersionsRequest`."""

    refused: list[tuple[PolicyVersion, str, str]]
    """Versions that are not served, each with the class of the error and its text."""


class LogprobsReply(rpc.Reply, frozen=True):
    """Answer to `LogprobsRequest`: `core.ports.TokenScores`, with `top` columns."""

    logprobs: bytes
    top: int
    top_ids: bytes
    top_logprobs: bytes


class NewTokens(rpc.Part, frozen=True):
    """New tokens of a `StartGenerationRequest`."""

    tokens: EncodedTokens


class BusyHeartbeat(rpc.WireMessage, frozen=True):
    """Heartbeat with the seconds that the engine has spent computing."""

    seconds: float


Reply = (
    EngineLoadedReply
    | CompletionReply
    | VersionsServedReply
    | LogprobsReply
    | rpc.Acknowledgement
    | rpc.ErrorReply
    | NewTokens
    | BusyHeartbeat
)

REQUESTS: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def message_from_generate_request(
    call: int, session: int, request: GenerateRequest, *, deltas: bool
) -> StartGenerationRequest:
    """Convert a request to a message."""
    return StartGenerationRequest(
        call=call,
        session=session,
        request_id=request.request_id,
        token_ids=request.token_ids.astype("<i4", copy=False).tobytes(),
        sampling=request.sampling,
        seed=request.seed,
        sampled_before=request.sampled_before,
        priority=request.priority,
        seat=request.seat,
        row=request.row,
        deltas=deltas,
    )


def generate_request_from_message(message: StartGenerationRequest) -> GenerateRequest:
    """Convert a message to a request."""
    return GenerateRequest(
        request_id=message.request_id,
        token_ids=np.frombuffer(message.token_ids, "<i4"),
        sampling=message.sampling,
        seed=message.seed,
        sampled_before=message.sampled_before,
        priority=message.priority,
        seat=message.seat,
        row=message.row,
    )
