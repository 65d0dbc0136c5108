"""The arguments of a tool: from a Python signature to the JSON schema that a policy is shown, and back to values.

Each parameter is a field of a pydantic model under a neutral name, so that `schema`, `_x` or `model_config` are names
like any other. Arguments are validated as the JSON they are: an enumeration, a date or a tuple takes the value that the
schema shows. A type whose values cannot arrive is refused when the class is first used (`resolve`): at its definition,
annotations may name types that do not exist yet.
"""

from __future__ import annotations

import functools
import inspect
import random
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional, Union

import msgspec
import typing_extensions
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.reply_formats import describe_malformed_call
from agentrl.core.text import shorten_middle
from agentrl.environment.schema_values import UnknownSchemaError, random_value

NUM_DRAWS = 8
"""Values of each schema that are tried when a class is first used."""
_PARAMETER = re.compile(r"\*{0,2}(\w+)\s*(?:\(.*?\))?\s*:\s*(.*)")
_SECTION = re.compile(r"(Args|Arguments|Parameters|Returns?|Raises|Yields?|Examples?|Notes?|Warnings?):\s*")
_ARGUMENTS = ("Args", "Arguments", "Parameters")
_NUMBER_KEYS = {"integer": r"^(0|-?[1-9][0-9]{0,17})$", "number": r"^-?[0-9]{1,17}(\.[0-9]{1,17})?$"}
"""Patterns of the keys of an object, which JSON writes as text."""
_RULES = re.compile(
    r"value_error|assertion_error|(date|datetime)_(past|future)|timezone_.*|decimal_.*"
    r"|(greater|less)_than(_equal)?|multiple_of|(string_)?too_(short|long)|(bytes|set|list)_too_(short|long)"
    r"|string_pattern_mismatch"
)
"""Kinds of pydantic's errors for rules beyond the type, some of which a JSON schema cannot express."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolArguments:
    """The parameters of a tool."""

    model: type[BaseModel]
    """Its field `f0` is the first parameter."""
    names: Sequence[str]
    """Names of the parameters, positional-only ones first."""
    num_positional: int
    """Number of positional-only parameters."""
    schema: Mapping[str, Any]
    description: str
    """The tool's docstring before its first section."""

    def validate(self, arguments: Mapping[str, Any] | str) -> dict[str, Any]:
        """Return the values of all parameters by name.

        Raises:
            ValueError: the arguments do not fit; the text is an observation for the policy.
        """
        if isinstance(arguments, str):
            raise ValueError(describe_malformed_call(arguments))
        try:
            model = self._model(dict(arguments))
        except ValidationError as error:
            first, *others = error.errors(include_url=False, include_context=False, include_input=False)
            same = [first, *(other for other in others if other["type"] == first["type"] == "missing")]
            where = ", ".join(shorten_middle(".".join(map(str, each["loc"]))) or "arguments" for each in same)
            raise ValueError(f"{where}: {first['msg']}") from None
        values = vars(model)
        return {name: values[f"f{n}"] for n, name in enumerate(self.names)}

    def call(self, method: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call a method with the values of its parameters."""
        if not self.num_positional:
            return method(**values)
        positional = self.names[: self.num_positional]
        named = {name: value for name, value in values.items() if name not in positional}
        return method(*(values[name] for name in positional), **named)

    def _model(self, arguments: dict[str, Any]) -> BaseModel:
        try:
            return self.model.model_validate_json(msgspec.json.encode(arguments), strict=True)
        except ValidationError:
            whole = _with_integers(arguments)  # JSON Schema calls 3.0 an integer, and pydantic does not
            if whole is arguments:
                raise
            return self.model.model_validate_json(msgspec.json.encode(whole), strict=True)


def _with_integers(value: Any) -> Any:
    """Return JSON data with each whole number as an integer, or the same object if there is none to change."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, dict):
        inner = {key: _with_integers(item) for key, item in value.items()}
        return inner if any(inner[key] is not item for key, item in value.items()) else value
    if isinstance(value, list):
        items = [_with_integers(item) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


class _ToolSchema(GenerateJsonSchema):
    """Schemas without titles made of names, and without values that pydantic refuses."""

    ignored_warning_kinds: set[Any] = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 (as in its base)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def decimal_schema(self, schema: Any) -> dict[str, Any]:
        alternatives: list[dict[str, Any]] = super().decimal_schema(schema)["anyOf"]
        return alternatives[0]  # a number; the other is any text

    def dict_schema(self, schema: Any) -> dict[str, Any]:
        json_schema = super().dict_schema(schema)
        kind = self.generate_inner(schema["keys_schema"]).get("type") if "keys_schema" in schema else None
        if kind in _NUMBER_KEYS:
            json_schema["propertyNames"] = {"pattern": _NUMBER_KEYS[kind]}
        return json_schema


def read_arguments(where: str, bound: Callable[..., Any], owner: type, docstring: str) -> ToolArguments:
    """Read the parameters of a tool.

    Args:
        where: names the tool in messages.
        bound: the tool as an instance has it, without `self`.
        owner: its class.
        docstring: its docstring, in Google's style.

    Raises:
        EnvironmentDefinitionError: a parameter has no type, or one whose values cannot arrive as JSON.
    """
    try:
        parameters = list(inspect.signature(bound).parameters.values())
        hints = _type_hints(bound, owner)
    except NameError as error:
        raise EnvironmentDefinitionError(f"tool {where}: annotation cannot be resolved: {error}") from error
    except Exception as error:
        raise EnvironmentDefinitionError(f"tool {where}: its parameters cannot be read: {error}") from error
    description, texts = split_docstring(docstring, [parameter.name for parameter in parameters])
    fields: dict[str, Any] = {}
    for n, parameter in enumerate(parameters):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise EnvironmentDefinitionError(f"tool {where}: *{parameter.name} has no schema; name each parameter")
        if parameter.name not in hints:
            raise EnvironmentDefinitionError(
                f"tool {where}: parameter {parameter.name!r} has no type; annotate it, e.g. `{parameter.name}: int`"
            )
        fields[f"f{n}"] = _field(parameter, hints[parameter.name], texts.get(parameter.name))
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        schema = model.model_json_schema(schema_generator=_ToolSchema)
    except Exception as error:  # of pydantic, or of what the user's types define
        problem = str(error).partition("\n")[0].partition(". Set ")[0]
        raise EnvironmentDefinitionError(
            f"tool {where}: no JSON schema for its annotations: {problem}; use types that JSON can carry, such as str, "
            "int, list, an Enum or a dataclass"
        ) from error
    if len(schema.get("properties", ())) < len(parameters):
        raise EnvironmentDefinitionError(
            f"tool {where}: a parameter has no JSON schema, such as one that is a ClassVar"
        )
    parts = ("properties", "required", "$defs")
    schema = {"type": "object", "properties": {}, "required": [], "additionalProperties": False} | {
        key: schema[key] for key in parts if key in schema
    }
    arguments = ToolArguments(
        model=model,
        names=[parameter.name for parameter in parameters],
        num_positional=sum(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters),
        schema=schema,
        description=description,
    )
    _check_values(where, arguments)
    return arguments


def _check_values(where: str, arguments: ToolArguments) -> None:
    """Refuse a tool whose schema allows values that do not arrive.

    Raises:
        EnvironmentDefinitionError: one that was drawn does not.
    """
    draw = random.Random(0)
    for parameter, (name, schema) in zip(arguments.names, arguments.schema["properties"].items(), strict=True):
        for _ in range(NUM_DRAWS):
            try:
                value = random_value(schema, draw, arguments.schema)
            except UnknownSchemaError:
                break
            try:
                arguments.model.model_validate_json(msgspec.json.encode({name: value}), strict=True)
            except ValidationError as error:
                for problem in error.errors(include_url=False, include_context=False):
                    if problem["type"] != "missing" and not _RULES.fullmatch(problem["type"]):
                        raise EnvironmentDefinitionError(
                            f"tool {where}: parameter {parameter!r} cannot take {value!r}, which its JSON schema "
                            f"allows ({problem['msg']}); give it another type"
                        ) from error
            except Exception:  # noqa: BLE001 - the user's validator raises it for a value that it does not expect
                break


def _field(parameter: inspect.Parameter, hint: Any, text: str | None) -> tuple[Any, Any]:
    """Return the type and default of a model's field for a parameter.

    A name and a description in `Field(…)` come before a text in `Annotated`, and that before the docstring.
    """
    metadata: tuple[Any, ...] = ()
    if typing.get_origin(hint) is Annotated:
        hint, metadata = hint.__origin__, hint.__metadata__
    default = ... if parameter.default is parameter.empty else parameter.default
    if (default.default if isinstance(default, FieldInfo) else default) is None:
        hint = Optional[hint]  # noqa: UP045 (of a value)
    texts = [part if isinstance(part, str) else getattr(part, "documentation", None) for part in metadata]
    text = next((part for part in texts if isinstance(part, str)), text)
    named = Field(alias=parameter.name, description=text) if text else Field(alias=parameter.name)
    return Annotated[(hint, named, *metadata)], default


def _type_hints(bound: Any, owner: type) -> dict[str, Any]:
    function = bound
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or hasattr(function, "__wrapped__")):
        function = type(function).__call__
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except NameError:  # perhaps a class inside the class
        hints = typing.get_type_hints(function, localns=dict(vars(owner)), include_extras=True)
    return {name: hint if sys.version_info >= (3, 12) else _portable(hint, {}) for name, hint in hints.items()}


def _portable(hint: Any, known: dict[Any, Any]) -> Any:
    """Replace each `typing.TypedDict` by that of typing_extensions, which pydantic needs before Python 3.12."""
    if typing_extensions.is_typeddict(hint) and type(hint).__module__ == "typing":
        if hint in known:
            raise TypeError(f"{hint.__name__} refers to itself; import TypedDict from typing_extensions")
        known = {**known, hint: None}
        fields: dict[str, Any] = {}
        for name, kind in typing.get_type_hints(hint, include_extras=True).items():
            qualifier = typing.get_origin(kind)
            if qualifier not in (typing.Required, typing.NotRequired):
                qualifier = typing.Required if name in hint.__required_keys__ else typing.NotRequired
            else:
                kind = typing.get_args(kind)[0]
            fields[name] = qualifier[_portable(kind, known)]
        portable: Any = typing_extensions.TypedDict(hint.__name__, fields)  # type: ignore[misc]
        portable.__doc__, portable.__module__ = hint.__doc__, hint.__module__
        return portable
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is None or origin in (Literal, typing_extensions.Literal) or not arguments:
        return hint
    if origin is Annotated:
        return Annotated[(_portable(hint.__origin__, known), *hint.__metadata__)]
    converted = tuple(_portable(part, known) for part in arguments)
    if all(new is old for new, old in zip(converted, arguments, strict=True)):
        return hint
    return Union[converted] if origin in (Union, types.UnionType) else origin[converted]  # noqa: UP007 (of values)


def split_docstring(docstring: str, names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Split a docstring in Google's style into its description and the texts of its parameters.

    Example:
        >>> split_docstring("Guess.\\n\\nArgs:\\n    word: Five letters,\\n        in brackets.", ["word"])
        ('Guess.', {'word': 'Five letters, in brackets.'})
    """
    lines = inspect.cleandoc(docstring).splitlines()
    starts = [n for n, line in enumerate(lines) if _SECTION.fullmatch(line)]
    description = "\n".join(lines[: starts[0]] if starts else lines).strip()
    texts: dict[str, list[str]] = {}
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=False):
        if not lines[start].startswith(_ARGUMENTS):
            continue
        block = [line for line in lines[start + 1 : end] if line.strip()]
        indents = [len(line) - len(line.lstrip()) for line in block]
        name = ""
        for line, indent in zip(block, indents, strict=True):
            if indent < indents[0]:
                break  # the section has ended
            entry = _PARAMETER.fullmatch(line.strip()) if indent == indents[0] else None
            if entry and entry[1] in names:
                name = entry[1]
                texts[name] = [entry[2]]
            elif name:
                texts[name].append(line.strip())
    return description, {name: " ".join(filter(None, parts)) for name, parts in texts.items() if any(parts)}
