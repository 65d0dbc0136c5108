"""Every kind of parameter that a tool may declare takes the values that its schema allows, or its class is refused."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import json
import pathlib
import random
import typing
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NewType, Optional, Union

import jsonschema  # type: ignore[import-untyped]
import pydantic
import pytest
import typing_extensions
from hypothesis import HealthCheck, given, settings
from pydantic import Field, TypeAdapter

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.reply_formats import REPLY_FORMATS, parse_hermes
from agentrl.environment.schema_values import random_value
from agentrl.environment.tool_arguments import split_docstring
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


class Days(enum.Enum):
    FIRST = datetime.date(2026, 1, 1)


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
    "negative": pydantic.NegativeFloat,
    "below": Annotated[float, Field(lt=-5)],
}
UNDRAWN: Mapping[str, Any] = {
    "half_steps": Annotated[float, Field(gt=0, multiple_of=0.5)],
    "letters": Annotated[str, Field(pattern=r"^\p{L}+$")],
    "two_keys": Annotated[dict[str, int], Field(min_length=2)],
    "four_texts": Annotated[set[str], Field(min_length=4)],
    "late": Annotated[datetime.date, Field(ge=datetime.date(2090, 1, 1))],
    "brief": Annotated[datetime.timedelta, Field(le=datetime.timedelta(hours=1))],
    "looked_up": Annotated[str, pydantic.AfterValidator({"known": 1}.__getitem__)],
}
"""Kinds whose rules the values drawn at definition may break: that is no fault of the kind."""
REFUSED: Mapping[str, Any] = {
    "function": Callable[[int], int],
    "set_of_dataclasses": set[Span],
    "set_of_lists": set[list[int]],
    "dict_of_tuples": dict[tuple[int, int], str],
    "complex": complex,
    "type": type[int],
    "lock": random.Random,
    "class_variable": typing.ClassVar[int],
    "enum_of_dates": Days,
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


def test_an_attribute_with_attributes_of_every_name_is_no_tool() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Proxy:
            return self

    environment = class_of(int)
    environment.client = Proxy()  # type: ignore[attr-defined]
    assert list(environment.tool_table()) == ["look"]


def test_a_class_whose_parameter_cannot_arrive_is_refused() -> None:
    for kind in REFUSED:
        with pytest.raises(EnvironmentDefinitionError, match=r"tool Desk\.look"):
            class_of(REFUSED[kind]).tool_table()


NAMES = (
    "_x",
    "model_dump",
    "schema",
    "json",
    "copy",
    "validate",
    "model_config",
    "construct",
    "arguments",
    "call",
    "f0",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_may_have_any_name(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def look(self, {name}: int, f1: str = 'b'):\n    return f'{{{name}}} {{f1}}'", scope)
    environment = class_of(int)
    environment.look = agentrl.tool(scope["look"])  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(environment.tool_table()["look"].spec.parameters["properties"]) == [name, "f1"]
    call = {"name": "look", "arguments": {name: 3}}
    assert play(environment, agentrl.Task(id="1", data={"question": "?"}), [call, "done"]).observations[1] == "3 b"


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that keeps the signature."""

    @functools.wraps(function)
    def inner(*arguments: Any, **named: Any) -> Any:
        return 2 * function(*arguments, **named)

    return inner


def scale(factor: int, n: int) -> int:
    """Scale a number."""
    return factor * n


class Adder:
    """Adds a number to its argument."""

    def __call__(self, n: int) -> int:
        return 100 + n


class Base(agentrl.ToolEnvironment):
    """Methods of every kind."""

    @agentrl.tool
    def inherited(self, n: int) -> int:
        """In a base class."""
        return n + 1

    @agentrl.tool
    def overridden(self, n: int) -> int:
        """Overridden."""
        return -1

    @agentrl.tool
    def removed(self, n: int) -> int:
        """Removed."""
        return -1

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0


class Methods(Base):
    """Methods of every kind."""

    removed = None  # type: ignore[assignment]

    def overridden(self, n: int) -> int:
        return n + 2

    @agentrl.tool
    @staticmethod
    def static(n: int) -> int:
        """Static."""
        return n + 3

    @staticmethod
    @agentrl.tool
    def static_below(n: int) -> int:
        """Static."""
        return n + 4

    @agentrl.tool
    @classmethod
    def of_class(cls, n: int) -> str:
        """Of the class."""
        return f"{cls.__name__} {n}"

    @doubled
    @agentrl.tool
    def decorated_above(self, n: int) -> int:
        """Decorated."""
        return n + 5

    @agentrl.tool
    @doubled
    def decorated_below(self, n: int) -> int:
        """Decorated."""
        return n + 6

    @agentrl.tool
    @functools.lru_cache(maxsize=2)  # noqa: B019 (of a test)
    def cached(self, n: int) -> int:
        """Cached."""
        return n + 7

    def _scaled(self, factor: int, n: int) -> int:
        return scale(factor, n)

    partial = agentrl.tool(functools.partialmethod(_scaled, 10))
    partial_function = agentrl.tool(functools.partial(scale, 20))
    instance = agentrl.tool(Adder())

    @agentrl.tool
    def positional(self, n: int, /, *, m: int = 1) -> int:
        """Positional."""
        return n + m

    @agentrl.tool
    @staticmethod
    async def static_async(n: int) -> int:
        """Asynchronous."""
        return n + 8

    @agentrl.tool
    @doubled
    def wrapped_async(self, n: int) -> str:
        """Asynchronous behind a plain wrapper."""
        return str(n)


METHODS = {
    "inherited": "4",
    "overridden": "5",
    "static": "6",
    "static_below": "7",
    "of_class": "Methods 3",
    "decorated_above": "16",
    "decorated_below": "18",
    "cached": "10",
    "partial": "30",
    "partial_function": "60",
    "instance": "103",
    "positional": "4",
    "static_async": "11",
    "wrapped_async": "33",
}


@pytest.mark.parametrize("name", METHODS)
def test_a_method_of_any_kind_is_called_as_an_instance_has_it(name: str) -> None:
    tools = Methods.tool_table()
    assert set(tools) == set(METHODS)
    assert list(tools[name].spec.parameters["properties"])[:1] == ["n"]
    call = {"name": name, "arguments": {"n": 3}}
    played = play(Methods, agentrl.Task(id="1", data={"question": "?"}), [call, "done"])
    assert played.observations[1] == METHODS[name]


def hiding(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, n: function(self, n)


class Hidden(Base):
    """A tool that its decorator hides."""

    @hiding
    @agentrl.tool
    def look(self, n: int) -> int:
        """Look."""
        return n


def test_a_tool_without_self_is_refused() -> None:
    def look(n: int) -> int:
        return n

    def nothing() -> str:
        return ""

    def only_keywords(*, n: int) -> int:
        return n

    for function in (look, nothing, only_keywords):
        forgotten = type("Forgotten", (Base,), {"look": agentrl.tool(function)})
        with pytest.raises(EnvironmentDefinitionError, match=r"Forgotten\.look: `self` is missing; .* @staticmethod"):
            forgotten.tool_table()  # type: ignore[attr-defined]
    static = type("Static", (Base,), {"look": agentrl.tool(staticmethod(look))})
    assert "look" in static.tool_table()  # type: ignore[attr-defined]


def test_what_cannot_be_a_tool_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"Hidden\.look: the decorator above @agentrl.tool hides it"):
        Hidden.tool_table()
    with pytest.raises(EnvironmentDefinitionError, match="cannot mark <property"):
        agentrl.tool(property(lambda self: 1))  # type: ignore[call-overload]
    for name in ("prompt", "files", "box", "task", "reward", "run", "tasks", "sandbox", "seats", "anchor_state"):
        clashing = type("Clashing", (Base,), {name: agentrl.tool(lambda self: "x"), "reward": Base.reward})
        if name == "reward":
            clashing.reward = agentrl.tool(lambda self: "x")  # type: ignore[attr-defined]
        with pytest.raises(EnvironmentDefinitionError, match=rf"Clashing\.{name}: `self\.{name}` belongs to"):
            clashing.tool_table()  # type: ignore[attr-defined]


class Described(Base):
    """Descriptions and defaults."""

    class Inner(enum.Enum):
        A = "a"

    @agentrl.tool
    def find(  # noqa: D417 (with parameters that the docstring leaves out)
        self,
        word: str,
        most: int = Field(default=3, ge=1, description="From the field."),
        unit: Annotated[Unit, "From the annotation."] = Unit.KELVIN,
        day: Annotated[datetime.date, typing_extensions.Doc("From PEP 727.")] = datetime.date(2026, 1, 2),
        tags: list[str] = Field(default_factory=lambda: ["x"]),  # noqa: B008 (as pydantic documents it)
        note: str = None,  # type: ignore[assignment]  # noqa: RUF013 (as people write it)
        inner: Inner = Inner.A,
        lock: Any = functools,
    ) -> str:
        """Find a word.

        More about it.

        Args:
            word (str): The word, in
                square brackets: [apple].
            most: Not shown.
            unit: Not shown.
            note:
                A remark.

        Returns:
            word: not a parameter.
        """
        return f"{word} {most} {unit!r} {day} {tags} {note} {inner} {lock.__name__}"


def test_descriptions_and_defaults_are_offered_and_arrive() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        spec = Described.tool_table()["find"].spec
    assert spec.description == "Find a word."
    properties = spec.parameters["properties"]
    assert {name: part["description"] for name, part in properties.items() if "description" in part} == {
        "word": "The word, in square brackets: [apple].",
        "most": "From the field.",
        "unit": "From the annotation.",
        "day": "From PEP 727.",
        "note": "A remark.",
    }
    assert (properties["most"]["default"], properties["most"]["minimum"]) == (3, 1)
    assert (properties["unit"]["default"], properties["day"]["default"]) == ("kelvin", "2026-01-02")
    assert properties["note"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert spec.parameters["required"] == ["word"]
    call = {"name": "find", "arguments": {"word": "w", "note": None}}
    played = play(Described, agentrl.Task(id="1", data={"question": "?"}), [call, "done"])
    assert played.observations[1] == ("w 3 <Unit.KELVIN: 'kelvin'> 2026-01-02 ['x'] None Inner.A functools")


def test_arguments_are_strict_and_3_0_is_an_integer() -> None:
    tool = class_of(int).tool_table()["look"]
    assert received(tool, {"x": 3.0}) == {"x": 3}
    for wrong in ("3", True, 3.5, None, [3]):
        with pytest.raises(ValueError, match=r"^x: "):
            received(tool, {"x": wrong})
    with pytest.raises(ValueError, match="x: Input should be a valid string"):
        received(class_of(str).tool_table()["look"], {"x": 3})
    with pytest.raises(ValueError, match="y: Extra inputs"):
        received(tool, {"x": 3, "y": 1})


@pytest.mark.parametrize(
    "docstring",
    [
        "Guess.\n\nArgs:\n    word: Five letters.\n    n: A number.\n\nReturns:\n    n: other",
        "Guess.\nArgs:\n    word (str): Five\n        letters.\n    n (int): A number.\nRaises:\n    word: no",
        "\n    Guess.\n\n    Parameters:\n        word: Five letters.\n\n        n: A number.\n    ",
        "Guess.\n\nArgs:\nword: Five letters.\nn: A number.",
    ],
)
def test_google_style_docstrings_are_split(docstring: str) -> None:
    assert split_docstring(docstring, ["word", "n"]) == ("Guess.", {"word": "Five letters.", "n": "A number."})


def test_kinds_whose_values_cannot_be_drawn_are_offered() -> None:
    for kind in UNDRAWN:
        assert "x" in class_of(UNDRAWN[kind]).tool_table()["look"].spec.parameters["properties"]


def test_the_random_policy_draws_values_that_the_schema_allows() -> None:
    for kind in KINDS:
        schema = class_of(KINDS[kind]).tool_table()["look"].spec.parameters
        validator = jsonschema.Draft202012Validator(schema)
        for seed in range(20):
            validator.validate({"x": random_value(schema["properties"]["x"], random.Random(seed), schema)})


RESULTS: dict[str, tuple[Any, str]] = {
    "model": (Model(name="a"), '{"name":"a","span":null}'),
    "dataclass": (Span(1), '{"low":1,"high":9}'),
    "path": (pathlib.Path("a/b"), "a/b"),
    "date": (datetime.date(2024, 3, 10), "2024-03-10"),
    "time": (datetime.datetime(2024, 3, 10, 12, 30, tzinfo=datetime.UTC), "2024-03-10T12:30:00Z"),
    "enum_of_texts": (Unit.KELVIN, Unit.KELVIN.value),
    "enum_of_numbers": (Level.HIGH, "2"),
    "bytes": (b'a "b"', 'a "b"'),
    "none": (None, "null"),
    "nested": ([{"at": pathlib.Path("a")}, Level.HIGH, datetime.date(2026, 1, 2)], '[{"at":"a"},2,"2026-01-02"]'),
    "tuple": ((1, "a"), '[1,"a"]'),
    "url": (pydantic.AnyUrl("https://example.com/"), "https://example.com/"),
}


LETTERS = frozenset("gfbeacdh")
SORTED = json.dumps(sorted(LETTERS), separators=(",", ":"))


class Place(enum.Enum):
    """An enum whose members are data classes."""

    HERE = Span(1)


class Bag(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    content: set[str] = Field(serialization_alias="holds")
    kinds: dict[str, tuple[frozenset[str], int]] = {}

    @functools.cached_property
    def size(self) -> int:
        return len(self.content)


BAG = Bag(content=set(LETTERS), kinds={"a": (LETTERS, 1)}, other=LETTERS)
assert BAG.size == 8  # its cache lies beside the fields, and is not shown


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    content: Any
    count: int = dataclasses.field(default=8, init=False)


@pydantic.dataclasses.dataclass
class Crate:
    content: set[str] = Field(serialization_alias="holds")


class Pair(NamedTuple):
    left: Any
    right: Any


RESULTS |= {
    "set": (set(LETTERS), SORTED),
    "set_in_tuple": ((1, set(LETTERS)), f"[1,{SORTED}]"),
    "set_in_named_tuple": ({"a": Pair(LETTERS, None)}, f'{{"a":[{SORTED},null]}}'),
    "set_in_deque": (collections.deque([LETTERS]), f"[{SORTED}]"),
    "set_in_dataclass": ([Box(LETTERS)], f'[{{"content":{SORTED},"count":8}}]'),
    "set_of_dataclasses": ({Box((LETTERS,))}, f'[{{"content":[{SORTED}],"count":8}}]'),
    "set_of_tuples": ({(letter, 1) for letter in LETTERS}, json.dumps([[x, 1] for x in "abcdefgh"]).replace(" ", "")),
    "set_in_pydantic_dataclass": (Crate(set(LETTERS)), f'{{"holds":{SORTED}}}'),
    "set_in_model": (BAG, f'{{"holds":{SORTED},"kinds":{{"a":[{SORTED},1]}},"other":{SORTED}}}'),
    "enum_of_dataclasses": (Place.HERE, '{"low":1,"high":9}'),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_of_these_kinds_are_shown_as_json(kind: str) -> None:
    result, shown = RESULTS[kind]
    environment = class_of(int)
    environment.look = agentrl.tool(lambda self: result)  # type: ignore[attr-defined]
    played = play(
        environment, agentrl.Task(id="1", data={"question": "?"}), [{"name": "look", "arguments": {}}, "done"]
    )
    assert played.observations[1] == shown


def test_values_between_tags_arrive_too() -> None:
    """In formats whose values have no quotes."""
    for kind in sorted(KINDS.keys() - {"any", "object", "literal", "union", "new_type"}):
        tool = class_of(KINDS[kind]).tool_table()["look"]
        schema = tool.spec.parameters
        for seed in range(4):
            value = random_value(schema["properties"]["x"], random.Random(seed), schema)
            written = value if isinstance(value, str) else json.dumps(value)  # as chat templates write it
            for name, text in {
                "qwen3_coder": "<tool_call><function=look>"
                f"<parameter=x>\n{written}\n</parameter></function></tool_call>",
                "glm45": f"<tool_call>look<arg_key>x</arg_key><arg_value>{written}</arg_value></tool_call>",
                "minimax_m2": '<minimax:tool_call><invoke name="look">'
                f'<parameter name="x">{written}</parameter></invoke>',
            }.items():
                (call,) = REPLY_FORMATS[name].read(text, None, [tool.spec]).tool_calls
                assert tool.validate(call.arguments) == tool.validate({"x": value}), (name, written)
