"""A policy without a model, for tests of environments: it calls tools, takes legal actions, or babbles."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.ids import stream
from agentrl.environment.games import LEGAL_ACTIONS, PettingZooEnvironment
from agentrl.environment.tools import ToolEnvironment
from agentrl.rollout.byte_formats import STOP_TOKEN, PlainFormat

if TYPE_CHECKING:
    import random

    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import PolicyVersion
    from agentrl.engines.scripted import Script
    from agentrl.environment.base import Environment

_FIRST_LINE = re.compile(r"\n|<\|")
"""Ends with the line, or with the message."""


def random_policy(environment: type[Environment]) -> Script:
    """A policy that calls tools with arguments of their schemas, takes legal actions it was shown, or says something
    short.

    Its reply depends only on the request.
    """
    tools = list(environment.tool_table().values()) if issubclass(environment, ToolEnvironment) else []
    is_told = issubclass(environment, PettingZooEnvironment)
    chat_format = PlainFormat()

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = stream("check", request.seed)
        text = draw.choice(["yes", "no", "0", "1", "2", "[0]", "left", "a", "hello world"])
        if is_told and draw.random() < 0.9:
            told = chat_format.decode(request.token_ids.tolist()).rpartition(LEGAL_ACTIONS)
            text = draw.choice(_FIRST_LINE.split(told[2])[0].split(", ")) if told[1] else text
        if tools and draw.random() < 0.7:
            spec = draw.choice(tools).spec
            schemas = spec.parameters.get("properties", {})
            arguments = {name: _value(schema, draw) for name, schema in schemas.items()}
            call = msgspec.json.encode({"name": spec.name, "arguments": arguments}).decode()
            text = f"<tool_call>{call}</tool_call>"
        return [*text.encode(), STOP_TOKEN]

    return script


def _value(schema: dict[str, Any], draw: random.Random) -> Any:
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if "anyOf" in schema:
        return _value(draw.choice(schema["anyOf"]), draw)
    match schema.get("type"):
        case "integer":
            return draw.randint(0, 99)
        case "number":
            return float(draw.randint(0, 99))
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return [_value(schema.get("items", {}), draw) for _ in range(2)]
        case "object":
            return {name: _value(inner, draw) for name, inner in schema.get("properties", {}).items()}
        case "null":
            return None
    return draw.choice(["a", "b", "some text"])
