"""The forms shared by all protocols: a request to a seat, its reply, and a refusal.

A protocol module reads a request's body into a `ChatRequest` and writes a `ChatReply` in its own form. Fields that no
seat can honor are passed on as `demands`, which the seat refuses unless its environment ignores them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from agentrl.core.errors import AgentRLError

if TYPE_CHECKING:
    from agentrl.core.records import Message, ToolCall, ToolSpec

RefusalKind = Literal[
    "invalid",
    "setting",
    "key",
    "forbidden",
    "foreign_conversation",
    "model",
    "context",
    "limit",
    "large",
    "slow",
    "busy",
    "unavailable",
]
MOST_STOPS = 64
"""Maximum number of stop texts of a request: each is looked for in every reply."""
MAX_NAME_CHARACTERS = 1024
"""Maximum length of the name of a model or tool, and of the id of a call."""
MAX_INTEGER = (1 << 53) - 1
"""Largest integer of a field, which every reader of JSON keeps exactly."""
MOST_ITEMS = 8192
"""Maximum length of a list of messages, tools, calls or parts of a request: reading one takes longer than parsing."""
STATUS: Mapping[RefusalKind, int] = {
    "invalid": 400,
    "setting": 400,  # a field that is not supported, or with `gateway.sampling = "refuse"` is not the run's
    "key": 401,
    "forbidden": 403,
    "foreign_conversation": 403,
    "model": 404,
    "context": 400,
    "limit": 403,
    "large": 413,
    "slow": 408,
    "busy": 429,  # of a queue, which gets shorter
    "unavailable": 503,
}
"""HTTP status of each kind of refusal. No limit of a run is a 429: clients would retry forever."""


class RequestRefusedError(AgentRLError):
    """A request is refused; its client gets the message in its protocol's form."""

    def __init__(self, message: str, kind: RefusalKind = "invalid", parameter: str | None = None) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.parameter = parameter

    @property
    def status(self) -> int:
        """HTTP status of the refusal."""
        return STATUS[self.kind]


class ToolChoice(NamedTuple):
    """Whether a reply must call a tool."""

    mode: Literal["auto", "none", "required"] = "auto"
    """`none`: calls in the reply are part of its text."""
    tool: str = ""
    """Name of the tool that must be called; "": any."""


class ReplyForm(NamedTuple):
    """The format that a request asks of the reply."""

    kind: Literal["text", "json_object", "json_schema"] = "text"
    schema: str = ""
    """JSON schema, as JSON text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request in any protocol."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[ToolSpec] = ()
    max_tokens: int | None = None
    """Maximum number of tokens in the reply; None: the run's maximum."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply, which does not contain them."""
    n: int = 1
    """Number of replies."""
    stream: bool = False
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters that the request asks for, by their name in `SamplingParams`."""
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    reply_form: ReplyForm = field(default_factory=ReplyForm)
    logprobs: bool = False
    """Whether the client reads the log-probabilities of the reply's tokens."""
    demands: Mapping[str, Any] = field(default_factory=dict)
    """Fields that are not supported, unchanged, by name."""
    clamped_max_tokens: int | None = None
    """`max_tokens` of the request, if the run allows fewer; a check lists it in any case."""
    ignored: tuple[str, ...] = ()
    """Names of fields that have no effect."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Data that the protocol needs to write the reply."""

    def __post_init__(self) -> None:
        """Check the lengths of names and ids, which are recorded and written into replies.

        Raises:
            RequestRefusedError: one is too long.
        """
        names = [("model", "name", self.model), *(("tools", "name", tool.name) for tool in self.tools)]
        for message in self.messages:
            names += [("messages", "tool call id", call.id) for call in message.tool_calls]
            names += [("messages", "tool name", call.name) for call in message.tool_calls]
        for location, what, name in names:
            if len(name) > MAX_NAME_CHARACTERS:
                raise RequestRefusedError(
                    f"{location} has a {what} of {len(name)} characters; at most {MAX_NAME_CHARACTERS} are read",
                    "invalid",
                    location,
                )


ReplyEnd = Literal["stop", "length", "tool_calls", "stop_text"]
"""Reason why a reply ended; `stop_text`: at one of the request's stop texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """One reply. It is the same on every execution of the episode, so that the client's next request is the same
    too.
    """

    reply_id: str
    """Id of the reply, of letters and digits; unique within the run."""
    created: int
    """Time of the reply, in seconds since the epoch."""
    message: Message
    """Reply of the model; its tool calls have ids that no other reply uses."""
    thinking: str
    finish_reason: ReplyEnd
    stop_text: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    logprobs: Sequence[TokenLogprob] | None = None
    """Log-probabilities of the sampled tokens, after temperature and filters; None: the request did not ask for them,
    or they are unknown."""


class TokenLogprob(NamedTuple):
    """A sampled token."""

    text: str
    logprob: float


class GatewaySeat(Protocol):
    """The gateway's interface to a seat of a running episode."""

    seat: str

    def check(self, request: ChatRequest) -> None:
        """Refuse a request unless all of its `n` replies are possible.

        Raises:
            RequestRefusedError: a limit, or a parameter of the request, rules one out.
        """
        ...

    async def reply(self, request: ChatRequest) -> ChatReply:
        """Sample one reply, or recall it from the journal.

        Raises:
            RequestRefusedError: the request cannot be answered.
            AgentRLError: the episode cannot continue.
        """
        ...

    def count_tokens(self, request: ChatRequest) -> int:
        """Return the length of the request's context in tokens.

        Raises:
            RequestRefusedError: the chat template refuses the request.
        """
        ...


class ChatProtocol(Protocol):
    """A model protocol."""

    name: str

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Read the request in a body.

        Raises:
            RequestRefusedError: the body is malformed, or requests an unsupported feature.
        """
        ...

    def whole(self, request: ChatRequest, replies: Sequence[ChatReply]) -> dict[str, Any]:
        """Write the body of an answer."""
        ...

    def events(self, request: ChatRequest, replies: Sequence[ChatReply]) -> Sequence[tuple[str | None, Any]]:
        """Write a streamed answer: the name (or None) and the data of each server-sent event."""
        ...

    def refusal(self, error: RequestRefusedError) -> dict[str, Any]:
        """Write the body of a refusal."""
        ...

    keepalive: bytes
    """Bytes that a stream sends while a reply is pending."""


def read_integer(body: Mapping[str, Any], name: str, *, minimum: int = 1) -> int | None:
    """Return an integer of a body; None if it is absent.

    Raises:
        RequestRefusedError: the value is not an integer, or not between `minimum` and `MAX_INTEGER`.
    """
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int or value < minimum:
        raise RequestRefusedError(
            f"{name} is {bounded_repr(value)}; it must be an integer of at least {minimum}", "invalid", name
        )
    if value > MAX_INTEGER:  # the journal could not record it
        raise RequestRefusedError(f"{name} is {bounded_repr(value)}; it may be {MAX_INTEGER} at most", "invalid", name)
    return value


def require_text(value: Any, location: str) -> str:
    """Check that a value of a body is a string.

    Raises:
        RequestRefusedError: the value is not a string.
    """
    if not isinstance(value, str):
        raise RequestRefusedError(f"{location} is {bounded_repr(value)}; it must be text", "invalid", location)
    return value


def require_object_list(value: Any, location: str) -> list[dict[str, Any]]:
    """Check that a value of a body is a list of objects.

    Raises:
        RequestRefusedError: the value is not a list of objects, or has more than `MOST_ITEMS`.
    """
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise RequestRefusedError(
            f"{location} must be a list of objects, not {bounded_repr(value)}", "invalid", location
        )
    if len(value) > MOST_ITEMS:
        raise RequestRefusedError(
            f"{location} has {len(value)} items; at most {MOST_ITEMS} are read", "large", location
        )
    return value


def order_tool_results(messages: Sequence[Message], location: str) -> list[Message]:
    """Put tool results in the order of the calls that they answer: many chat templates write no ids, so the model reads
    results in this order. Clients may send them in the order in which the tools ended.

    Results directly follow the message with their calls, one for each call. Ids need to be distinct only within a
    message. A result without an id answers the only call, or the only one of its name.

    Args:
        messages: messages of a request.
        location: field of the request that holds them.

    Raises:
        RequestRefusedError: a result answers no call, a call has no result or two, or it is unknown which call a result
            answers.
    """
    ordered: list[Message] = []
    calls: Sequence[ToolCall] = ()
    results: dict[int, Message] = {}
    numbers: dict[_CallKey, list[int]] = {}
    for message in (*messages, None):
        if message is not None and message.role == "tool":
            number = _answered_call(message, numbers, location)
            if number in results:
                raise _misplaced_result(location, f"the call {_named(calls[number])} has two results")
            results[number] = message
            continue
        for number, call in enumerate(calls):
            if number not in results:
                raise _misplaced_result(location, f"the call {_named(call)} has no result")
            ordered.append(results[number])
        if message is not None:
            calls, results, numbers = message.tool_calls, {}, {}
            for number, call in enumerate(calls):
                for key in (("id", call.id), ("name", call.name), ("name", None)):
                    numbers.setdefault(key, []).append(number)
            ordered.append(message)
    return ordered


_CallKey = tuple[Literal["id", "name"], str | None]
"""The id or the name of calls; the name None is that of all calls."""


def _answered_call(result: Message, numbers: Mapping[_CallKey, Sequence[int]], location: str) -> int:
    """Return the number of the call that a tool's message answers; `numbers` has those of the calls before it.

    Raises:
        RequestRefusedError: it is none of them, or unknown.
    """
    key: _CallKey
    if result.tool_call_id:
        key, which = ("id", result.tool_call_id), f"the id {bounded_repr(result.tool_call_id)}"
    else:
        key = ("name", result.name)
        which = "no id" if result.name is None else f"no id and the name {bounded_repr(result.name)}"
    fitting = numbers.get(key, ())
    if len(fitting) != 1:
        fits = f"fits {len(fitting)} calls" if fitting else "fits no call"
        raise _misplaced_result(location, f"a tool result with {which} {fits} of the message before it")
    return fitting[0]


def _named(call: ToolCall) -> str:
    return f"{bounded_repr(call.id)} of {bounded_repr(call.name)}"


def _misplaced_result(location: str, problem: str) -> RequestRefusedError:
    return RequestRefusedError(
        f"{location}: {problem}. Send one result for each call, with the call's id, directly after the message with "
        "the calls",
        "invalid",
        location,
    )


def openai_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Write log-probabilities in the form of OpenAI's protocols. The bytes of a token that is a part of a character are
    unknown."""
    return [
        {
            "token": text,
            "bytes": None if "\ufffd" in text else list(text.encode()),
            "logprob": logprob,
            "top_logprobs": [],
        }
        for text, logprob in logprobs
    ]


def stop_texts(value: Any, location: str) -> tuple[str, ...]:
    """Return the stop texts in a body: one, a list or none.

    Raises:
        RequestRefusedError: the value is something else, or there are too many.
    """
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(item, str) for item in texts):
        raise RequestRefusedError(
            f"{location} must be text or a list of texts, not {bounded_repr(value)}", "invalid", location
        )
    if len(texts) > MOST_STOPS:
        raise RequestRefusedError(
            f"{location} has {len(texts)} texts; at most {MOST_STOPS} are read", "invalid", location
        )
    return tuple(item for item in texts if item)


def bounded_repr(value: Any) -> str:
    """Format a value of a request, for a message, without looking through all of it."""
    text = _SHORT.repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
