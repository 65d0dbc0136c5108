"""The forms that all protocols share: a request as a seat gets it, the reply it gives, and a refusal in words.

A protocol module reads a request's body into a `ChatRequest` and writes a `ChatReply` in its own form. Sampling
parameters that a run decides are not applied but carried along as `demands`: the seat compares them with the run's, and
refuses what it cannot honour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from agentrl.core.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.core.records import Message, ToolSpec

RefusalKind = Literal["invalid", "key", "forbidden", "model", "context", "limit", "large", "unavailable"]
STATUS: Mapping[RefusalKind, int] = {
    "invalid": 400,
    "key": 401,
    "forbidden": 403,
    "model": 404,
    "context": 400,
    "limit": 403,
    "large": 413,
    "unavailable": 503,
}
"""HTTP status by kind of refusal. No limit of a run is a 429: clients would ask again and again."""


class RequestRefusedError(AgentRLError):
    """A request that is not answered; its client gets the message in its protocol's own form."""

    def __init__(self, message: str, kind: RefusalKind = "invalid", parameter: str | None = None) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.parameter = parameter

    @property
    def status(self) -> int:
        """The HTTP status."""
        return STATUS[self.kind]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request in any protocol."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    """None: as many as the run allows."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply, which does not contain them."""
    n: int = 1
    """Replies to give."""
    stream: bool = False
    demands: Mapping[str, Any] = field(default_factory=dict)
    """Further parameters by name, as the client gave them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Data that only the protocol itself needs, to write the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One reply; the same on every execution of the episode, so that a client's next request is the same too."""

    reply_id: str
    """Letters and digits; unique within the run."""
    created: int
    """Seconds since the epoch."""
    message: Message
    """Reply of the model; its tool calls have ids that no other reply uses."""
    thinking: str
    finish_reason: Literal["stop", "length", "tool_calls", "stop_text"]
    """`stop_text`: one of the request's texts ended it."""
    stop_text: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Seat(Protocol):
    """A seat of a running episode, as the gateway sees it."""

    seat: str

    def check(self, request: ChatRequest) -> None:
        """Refuse a request of which not all `n` replies can be given.

        Raises:
            RequestRefusedError: a limit, or what the request asks for, forbids one of them.
        """
        ...

    async def reply(self, request: ChatRequest) -> ChatReply:
        """Sample one reply, or recall it from the journal.

        Raises:
            RequestRefusedError: the request cannot be answered.
            AgentRLError: the episode cannot go on.
        """
        ...

    def continues(self, request: ChatRequest) -> bool:
        """Whether the request's history begins with a conversation that a reply of this seat ended."""
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Length of the request's context in tokens.

        Raises:
            RequestRefusedError: the chat template refuses it.
        """
        ...


class ChatProtocol(Protocol):
    """A model protocol."""

    name: str

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """The request in a body.

        Raises:
            RequestRefusedError: the body is none, or asks for what no run has.
        """
        ...

    def whole(self, request: ChatRequest, replies: Sequence[ChatReply]) -> dict[str, Any]:
        """The body of an answer."""
        ...

    def events(self, request: ChatRequest, replies: Sequence[ChatReply]) -> Sequence[tuple[str | None, Any]]:
        """A streamed answer: the name, if it has one, and the data of each server-sent event."""
        ...

    def refusal(self, refused: RequestRefusedError) -> dict[str, Any]:
        """The body of a refusal."""
        ...

    keepalive: bytes
    """The bytes that a stream sends while a reply is awaited."""


def number(body: Mapping[str, Any], name: str, *, least: int = 1) -> int | None:
    """An integer of a body; None if it is not there.

    Raises:
        RequestRefusedError: it is no integer, or less than `least`.
    """
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < least:
        raise RequestRefusedError(
            f"{name} is {shown(value)}; it must be an integer of at least {least}", "invalid", name
        )
    return value


def text(value: Any, where: str) -> str:
    """A string of a body.

    Raises:
        RequestRefusedError: it is none.
    """
    if not isinstance(value, str):
        raise RequestRefusedError(f"{where} is {shown(value)}; it must be text", "invalid", where)
    return value


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects of a body.

    Raises:
        RequestRefusedError: it is none.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestRefusedError(f"{where} must be a list of objects, not {shown(value)}", "invalid", where)
    return value


def stop_texts(value: Any, where: str) -> tuple[str, ...]:
    """The texts that end a reply: one, a list or none.

    Raises:
        RequestRefusedError: they are something else.
    """
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        raise RequestRefusedError(f"{where} must be text or a list of texts, not {shown(value)}", "invalid", where)
    return tuple(item for item in listed if item)


def shown(value: Any) -> str:
    """A value of a request, for a message."""
    written = repr(value)
    return written if len(written) <= 80 else f"{written[:79]}…"
