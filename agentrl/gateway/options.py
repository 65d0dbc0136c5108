"""The fields of a request that say how its reply is sampled, read and checked, in all protocols.

Numbers have the ranges of the vendors' APIs. Fields of vLLM's server alone have its ranges.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from agentrl.core.ports import LARGEST_TEMPERATURE, LEAST_TEMPERATURE
from agentrl.gateway.calls import ReplyForm, RequestRefusedError, ToolChoice, bounded_repr

if TYPE_CHECKING:
    from agentrl.core.records import ToolSpec

LEAST_TOP_P = 1e-6
"""A lower `top_p` keeps the likeliest token alone, as 0 does."""
MAX_SCHEMA_CHARACTERS = 1 << 16
"""Maximum length of a reply's JSON schema, which the model reads with every request."""
MAX_IGNORED = 16
"""Number of ignored fields of a request that are named."""


@dataclass(frozen=True, slots=True)
class _Range:
    """Numbers that a field may have."""

    least: float
    most: float
    is_whole: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int if self.is_whole else int | float):
            return False
        return self.least <= value <= self.most  # NaN is in no range

    @property
    def text(self) -> str:
        kind = "an integer" if self.is_whole else "a number"
        return f"{kind} from {self.least:g} to {self.most:.10g}"


_NUMBERS: Mapping[str, _Range] = {
    "temperature": _Range(0, LARGEST_TEMPERATURE),
    "top_p": _Range(0, 1),
    "top_k": _Range(-1, (1 << 31) - 1, is_whole=True),
    "min_p": _Range(0, 1),
    "presence_penalty": _Range(-2, 2),
    "frequency_penalty": _Range(-2, 2),
    "repetition_penalty": _Range(0.01, 100),
}
NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Values of the penalties that change nothing."""
SAMPLING_FIELDS = frozenset(_NUMBERS)
"""Fields of requests that `SamplingParams` has too."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True,),
    "store": (False,),
    "service_tier": ("auto", "default", "standard_only"),
    "metadata": ({},),
    "truncation": ("disabled",),
}
"""Values of fields without effect that ask for nothing."""
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),  # its token ids belong to another tokenizer
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "mcp_servers": (),
    "container": (),
    "name": (),
}
"""Fields that no run supports, and their values that change nothing."""


def unsupported_fields(
    body: Mapping[str, Any], names: Iterable[str], numbers: Iterable[str] = _NUMBERS
) -> dict[str, Any]:
    """Return what a body sets and no run can honor: unsupported fields among `names`, and `numbers` out of their
    range."""
    unsupported = {name: body[name] for name in names if body.get(name) not in (None, *UNSUPPORTED[name])}
    values = {name: body[name] for name in numbers if body.get(name) is not None}
    return unsupported | {name: value for name, value in values.items() if value not in _NUMBERS[name]}


def unsupported_reason(name: str) -> str:
    """Say why a field of `unsupported_fields` is refused."""
    return f"it must be {_NUMBERS[name].text}" if name in _NUMBERS else "no run supports it"


def read_sampling(body: Mapping[str, Any], numbers: Iterable[str] = _NUMBERS) -> dict[str, float]:
    """Return a body's sampling parameters by their name in `SamplingParams`; values out of range are left out."""
    values = {name: body[name] for name in numbers if body.get(name) in _NUMBERS[name]}
    sampling = {name: value if _NUMBERS[name].is_whole else float(value) for name, value in values.items()}
    if sampling.get("top_k") == -1:
        sampling["top_k"] = 0
    if sampling.get("top_p", 1.0) < LEAST_TOP_P:  # only the likeliest token is left
        sampling |= {"top_p": 1.0, "temperature": 0.0}
    if sampling.get("temperature", 1.0) < LEAST_TEMPERATURE:  # an agent means the likeliest token
        sampling["temperature"] = 0.0
    return sampling


_MODES: Mapping[str, Literal["auto", "none", "required"]] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",
}


def read_tool_choice(value: Any, tools: Sequence[ToolSpec]) -> ToolChoice:
    """Read `tool_choice` of any protocol: a mode, or an object with a mode or a tool's name.

    Raises:
        RequestRefusedError: the value is no choice, or names a tool that the request does not offer.
    """
    if value is None or not tools:
        return ToolChoice()
    if isinstance(value, dict):
        kind, function = value.get("type"), value.get("function")
        if kind == "allowed_tools":  # see `names_allowed_tools`
            allowed = value.get("allowed_tools")
            value = (allowed if isinstance(allowed, dict) else value).get("mode")
        elif kind in ("function", "custom", "tool"):
            name = function.get("name") if isinstance(function, dict) else value.get("name")
            if name not in [tool.name for tool in tools]:
                raise RequestRefusedError(
                    f"tool_choice names {bounded_repr(name)}, which is none of the tools", "invalid", "tool_choice"
                )
            return ToolChoice("required", name)
        else:
            value = kind
    mode = _MODES.get(value) if isinstance(value, str) else None
    if mode is None:
        raise RequestRefusedError(
            f"tool_choice is {bounded_repr(value)}; it must be auto, none, required or a tool", "invalid", "tool_choice"
        )
    return ToolChoice(mode)


def names_allowed_tools(value: Any) -> bool:
    """Whether a `tool_choice` lists the tools that the model may call, which is not enforced."""
    return isinstance(value, dict) and value.get("type") == "allowed_tools"


def read_reply_form(value: Any, location: str) -> ReplyForm:
    """Read the format that a request asks of the reply.

    Raises:
        RequestRefusedError: the format is unknown, or its schema is not an object or too long.
    """
    if value is None:
        return ReplyForm()
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text" | "json_object":
            return ReplyForm(kind)
        case "json_schema":
            inner = value.get("json_schema", value)
            schema = inner.get("schema") if isinstance(inner, dict) else None
            if not isinstance(schema, dict):
                raise RequestRefusedError(
                    f"{location} has the schema {bounded_repr(schema)}, which is not an object", "invalid", location
                )
            text = json.dumps(schema, ensure_ascii=False)
            if len(text) > MAX_SCHEMA_CHARACTERS:
                raise RequestRefusedError(
                    f"{location} has a schema of {len(text)} characters; at most {MAX_SCHEMA_CHARACTERS} are read",
                    "invalid",
                    location,
                )
            return ReplyForm(kind, text)
    raise RequestRefusedError(
        f"{location} is {bounded_repr(value)}; its type must be text, json_object or json_schema", "invalid", location
    )


def ignored_fields(body: Mapping[str, Any], known: Collection[str], unread: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields of a request without effect: unknown ones of the body, unless their value asks for nothing, and
    `unread` ones with a value."""
    asking = (name for name, value in body.items() if value is not None and value not in NEUTRAL.get(name, ()))
    names = sorted(name[:40] for name in asking if name not in known)
    return (*names[:MAX_IGNORED], *(name for name, value in unread.items() if value))


def ignored_fields_line(names: Sequence[str]) -> str:
    """Return the line with which an environment's class ignores fields of requests.

    Example:
        >>> ignored_fields_line(["logit_bias"])
        'ignored_fields = ("logit_bias",)'
    """
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"ignored_fields = ({quoted}{',' * (len(names) == 1)})"


def instructions(choice: ToolChoice, form: ReplyForm) -> str:
    """Return what a model is told instead of being forced: which tool to call, and the format of its reply."""
    sentences = []
    if choice.mode == "required":
        sentences.append(f"Call the tool {choice.tool}." if choice.tool else "Call a tool.")
    match form.kind:
        case "json_object":
            sentences.append("Reply with a JSON object and no other text.")
        case "json_schema":
            sentences.append(f"Reply with JSON that fits this JSON schema, and no other text: {form.schema}")
    return " ".join(sentences)
