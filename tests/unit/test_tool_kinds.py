"""Every kind of parameter that a tool may declare takes the values that its schema allows, or its class is refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import pathlib
import random
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, Union

import jsonschema
import pydantic
import pytest
import typing_extensions
from hypothesis import HealthCheck, given, settings
from pydantic import Field, TypeAdapter

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.reply_formats import parse_hermes
from agentrl.environment.schema_values import random_value
from agentrl.environment.tools import BoundTool
from agentrl.testing.execution import play
from tests.support.json_values import values_of


class Unit(str, enum.Enum):  # noqa: UP042 (as people write it)
    CELSIUS = "celsius"
    KELVIN = "kelvin"
    NUMBER = "1"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Color(enum.Enum):
    RED = "red"
    BLUE = 3
    NONE = None


class Rights(enum.IntFlag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Span:
    low: int
    high: int = 9


@dataclasses.dataclass
class Tree:
    name: str
    children: list[Tree] = dataclasses.field(default_factory=list)


class Point(NamedTuple):
    x: int
    y: float = 0.5


Pair = collections.namedtuple("Pair", ["left", "right"])


class Options(typing.TypedDict, total=False):
    most: typing.Required[int]
    unit: Unit


class Outer(typing.TypedDict):
    options: list[Options]
    note: typing.NotRequired[str | None]


class Portable(typing_extensions.TypedDict):
    a: int


class Model(pydantic.BaseModel):
    name: str
    span: Span | None = None


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    age: int


UserId = NewType("UserId", int)
KINDS: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "none": None,
    "any": Any,
    "object": object,
    "literal": Literal["a", "1", 3, None, True],
    "literal_of_enum": Literal[Unit.CELSIUS, Unit.NUMBER],
    "str_enum": Unit,
    "int_enum": Level,
    "mixed_enum": Color,
    "date": datetime.date,
    "time": datetime.time,
    "datetime": datetime.datetime,
    "timedelta": datetime.timedelta,
    "uuid": uuid.UUID,
    "path": pathlib.Path,
    "pure_path": pathlib.PurePosixPath,
    "decimal": decimal.Decimal,
    "bounded_decimal": Annotated[decimal.Decimal, Field(ge=0, le=10)],
    "bytes": bytes,
    "url": pydantic.AnyUrl,
    "list": list[int],
    "bare_list": list,
    "bare_dict": dict,
    "bare_tuple": tuple,
    "tuple": tuple[int, str],
    "long_tuple": tuple[int, ...],
    "empty_tuple": tuple[()],
    "named_tuple": Point,
    "old_named_tuple": Pair,
    "set": set[str],
    "set_of_enums": set[Level],
    "frozenset": frozenset[datetime.date],
    "deque": collections.deque[int],
    "sequence": Sequence[float],
    "mapping": Mapping[str, int],
    "dict_of_ints": dict[int, str],
    "dict_of_floats": dict[float, str],
    "dict_of_enums": dict[Unit, int],
    "dict_of_dates": dict[datetime.date, Level],
    "default_dict": collections.defaultdict[str, int],
    "counter": collections.Counter[str],
    "dataclass": Span,
    "dataclasses": dict[str, list[Span]],
    "recursive": Tree,
    "typed_dict": Options,
    "nested_typed_dict": Outer,
    "typed_dict_of_extensions": Portable,
    "model": Model,
    "union": int | str | None,
    "union_of_models": Cat | Dog,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "optional": Optional[Level],  # noqa: UP045 (as people write it)
    "old_union": Union[datetime.date, Span],  # noqa: UP007
    "new_type": UserId,
    "bounded": Annotated[int, Field(ge=1, le=5)],
    "multiple": Annotated[int, Field(multiple_of=3, gt=0, lt=30)],
    "bounded_float": Annotated[float, Field(gt=0, lt=1)],
    "bounded_text": Annotated[str, Field(min_length=2, max_length=4)],
    "pattern": Annotated[str, Field(pattern="^[ab]+$")],
    "bounded_list": Annotated[list[int], Field(min_length=1, max_length=2)],
    "described": Annotated[int, "How many."],
    "json": pydantic.Json[Any],
    "fraction": fractions.Fraction,
    "instance": pydantic.InstanceOf[Span],
    "flags": Rights,
    "callable_default": Annotated[list[int], Field(default_factory=list)],
}
REFUSED: Mapping[str, Any] = {
    "function": Callable[[int], int],
    "set_of_dataclasses": set[Span],
    "set_of_lists": set[list[int]],
    "dict_of_tuples": dict[tuple[int, int], str],
    "complex": complex,
    "type": type[int],
    "lock": random.Random,
}


def class_of(annotation: Any, **defaults: Any) -> type[agentrl.ToolEnvironment]:
    """An environment with a tool whose parameter `x` has an annotation."""

    def look(self: Any, x: Any) -> str:
        self.seen.append(x)
        return "called"

    look.__annotations__ = {"x": annotation}
    look.__defaults__ = tuple(defaults.values()) or None

    class Desk(agentrl.ToolEnvironment):
        """A desk."""

        seen: typing.ClassVar[list[Any]] = []

        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return 0.0

    Desk.look = agentrl.tool(look)  # type: ignore[attr-defined]
    return Desk


def received(tool: BoundTool, arguments: Any) -> dict[str, Any]:
    """What a tool gets of arguments that a policy writes."""
    (call,) = parse_hermes(f"<tool_call>{json.dumps({'name': 'look', 'arguments': arguments})}</tool_call>")[1]
    return tool.validate(call.arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_a_kind_arrive(kind: str) -> None:
    environment = class_of(KINDS[kind])
    tool = environment.tool_table()["look"]
    schema = tool.spec.parameters
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    oracle = None if kind.endswith("typed_dict") else TypeAdapter(KINDS[kind])

    @settings(max_examples=12, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(values_of(schema["properties"]["x"], schema))
    def arrives(value: Any) -> None:
        validator.validate({"x": value})
        arrived = received(tool, {"x": value})["x"]
        if oracle is None:
            assert arrived == value
        else:
            expected = oracle.validate_json(json.dumps(value))
            assert type(arrived) is type(expected)
            assert arrived == expected

    arrives()
    value = random_value(schema["properties"]["x"], random.Random(1), schema)
    validator.validate({"x": value})
    call = {"name": "look", "arguments": {"x": value}}
    assert play(environment, agentrl.Task(id="1", data={"question": "?"}), [call, "done"]).observations[1] == "called"


@pytest.mark.parametrize("kind", REFUSED)
def test_a_class_whose_parameter_cannot_arrive_is_refused(kind: str) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"tool Desk\.look"):
        class_of(REFUSED[kind]).tool_table()
