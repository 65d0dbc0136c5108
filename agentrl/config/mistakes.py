"""What is wrong with a file, in words: the key, what is there, what is wanted, and the nearest valid key."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}
_WANTED = {"bool": bool, "float": float, "int": int, "list": list, "string": str, "tuple": tuple}
"""By the first word of pydantic's errors."""
SHOWN = 10
"""Mistakes, at most."""


class _Place(NamedTuple):
    """Where a mistake is."""

    path: list[str]
    """Keys, without what pydantic adds to them."""
    section: type[BaseModel] | None
    """That the last of them belongs to."""
    kinds: list[type[BaseModel]]
    """That the section was chosen from by its `kind`."""
    annotation: Any
    """What may stand there."""
    unnamed: int | None
    """Which of them stands where a name of the user's should."""


def config_error(error: ValidationError, source: str, model: type[BaseModel] = RunConfig) -> ConfigError:
    """A pydantic error about a section in words; `source` is what they call the file."""
    return ConfigError(f"{source}: {mistakes(error, model)}")


def mistakes(error: ValidationError, model: type[BaseModel] = RunConfig) -> str:
    """What a pydantic error about a section says, a line each."""
    told: dict[str, list[str]] = {}
    """What is wanted instead, by what is there: of a union each member has its own."""
    for detail in error.errors(include_url=False):
        problem, wanted = _explain(detail, model)
        told[problem] = told.get(problem, []) + ([wanted] if wanted else [])
    lines = [
        f"{problem}: expected {' or '.join(dict.fromkeys(wanted))}" if wanted else problem
        for problem, wanted in told.items()
    ]
    if len(lines) > SHOWN:
        lines[SHOWN:] = [f"and {len(lines) - SHOWN} more"]
    return "\n  ".join(lines)


def misread(data: Any, read: Any, path: str = "") -> Iterator[str]:
    """What pydantic took for something else than a file says: the text "8" for the number 8."""
    if isinstance(data, Mapping) and isinstance(read, Mapping):
        by_key = {str(key): value for key, value in read.items()}
        for key, value in data.items():
            yield from misread(value, by_key.get(str(key)), f"{path}.{key}" if path else str(key))
    elif isinstance(data, list) and isinstance(read, list | tuple):
        for index, (given, taken) in enumerate(zip(data, read, strict=False)):
            yield from misread(given, taken, f"{path}.{index}")
    elif isinstance(data, str | bool) != isinstance(read, str | bool) and isinstance(read, int | float):
        mend = f", without quotes: {short(read)}" if isinstance(data, str) else ""
        yield f"{path} = {short(data)}: expected {_WORDS[type(read)]}{mend}"
    elif isinstance(read, bool) and not isinstance(data, bool):
        yield f"{path} = {short(data)}: expected true or false: write {short(read)}"


def path_of(location: Sequence[str | int], top: type[BaseModel]) -> list[str]:
    """The keys of an error's location."""
    return _place(location, top).path


def keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every valid key in dotted form, all members of unions included; `<name>` stands for a name of the user's."""
    for name, field in model.model_fields.items():
        members, named = sections_in(field.annotation)
        path = f"{prefix}{name}.<name>" if named else f"{prefix}{name}"
        yield path
        for member in members:
            yield from keys(member, f"{path}.")


def sections_in(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The sections an annotation can hold, and whether they stand under names of the user's."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return sections_in(arguments[1])[0], bool(sections_in(arguments[1])[0])
    if get_origin(annotation) in (Literal, tuple, list):
        return [], False
    return [member for argument in arguments for member in sections_in(argument)[0]], False


def short(value: Any) -> str:
    """A value as a file has it, or its beginning."""
    text = repr(value) if not isinstance(value, str | bool) else json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- one mistake ------------------------------------------------------------------------------------------------------


def _explain(detail: ErrorDetails, top: type[BaseModel]) -> tuple[str, str]:
    """What is wrong, and what is wanted where that is something else than what is there."""
    place = _place(detail["loc"], top)
    dotted, kind, given = ".".join(place.path), detail["type"], detail["input"]
    if place.unnamed is not None:
        before, key = place.path[: place.unnamed], place.path[place.unnamed]
        return f"{'.'.join([*before, key])}: a name is missing: {'.'.join([*before, 'NAME', key])}", ""
    if kind == "extra_forbidden":
        return f"unknown key {dotted}{_nearest(place, top)}", ""
    if kind == "missing":
        return f"{dotted} is missing", _in_words(place.annotation, dotted)
    if kind == "value_error":
        message = detail["msg"].removeprefix("Value error, ")
        return (f"{dotted}: {message}" if dotted else message), ""
    if kind == "too_short":
        return f"{dotted} is empty", f"at least {detail['ctx']['min_length']}"
    if kind == "union_tag_invalid":
        tag, expected = detail["ctx"]["discriminator"].strip("'"), detail["ctx"]["expected_tags"]
        return f"{dotted}.{tag} = {short(detail['ctx']['tag'])}", f"one of {expected}"
    problem = f"{dotted} = {short(given)}"
    if place.path[-1] == "[key]":
        problem = f"{'.'.join(place.path[:-2])}, key {short(given)}"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return problem, _in_words(place.annotation, dotted)
    what = kind.partition("_")[0]
    if kind.endswith(("_type", "_parsing", "_from_float")) and what in _WANTED:
        return problem, _WORDS[_WANTED[what]]
    message = detail["msg"].removeprefix("Input should be ")
    return problem, f"{message[:1].lower()}{message[1:]}"


def _place(location: Sequence[str | int], top: type[BaseModel]) -> _Place:
    path: list[str] = []
    section: type[BaseModel] | None = None
    kinds: list[type[BaseModel]] = []
    unnamed: int | None = None
    annotation: Any = top
    for part in map(str, location):
        annotation = _bare(annotation)
        members, named = sections_in(annotation)
        if len(_choices(annotation)) > 1:  # the member that pydantic tried
            kinds, annotation = members, next((member for member in members if part in _tags(member)), None)
            continue
        path.append(part)
        if members and not named:
            section = members[0]
            field = section.model_fields.get(part)
            annotation = None if field is None else field.annotation
        else:
            if unnamed is None and any(part in member.model_fields for member in members):
                unnamed = len(path) - 1
            section, kinds, annotation = None, [], _item(annotation, part)
    return _Place(path, section, kinds, _bare(annotation), unnamed)


def _bare(annotation: Any) -> Any:
    """Without bounds, and without `None` beside it."""
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    choices = _choices(annotation)
    return _bare(choices[0]) if len(choices) == 1 else annotation


def _choices(annotation: Any) -> list[Any]:
    """The members of a union but `None`; none where it is no union."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return []
    return [choice for choice in get_args(annotation) if choice is not types.NoneType]


def _item(annotation: Any, part: str) -> Any:
    """What a table or a list holds."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    if get_origin(annotation) in (tuple, list) and part.isdecimal():
        index = 0 if Ellipsis in arguments else int(part)
        return arguments[index] if index < len(arguments) else None
    return None


def _in_words(annotation: Any, dotted: str = "") -> str:
    """What is to be written under a key."""
    bare = _bare(annotation)
    members, named = sections_in(bare)
    if named:
        return f"tables [{dotted}.NAME]"
    if members:
        needed = [name for name, field in members[0].model_fields.items() if field.is_required()]
        return "a table { " + ", ".join(f"{name} = ..." for name in needed or members[0].model_fields) + " }"
    if get_origin(bare) is dict:
        key, value = map(_in_words, get_args(bare))
        return f"a table {{ {'NAME' if key == 'text' else key} = {value}, ... }}"
    return " or ".join(map(_in_words, _choices(bare))) or _WORDS.get(get_origin(bare) or bare, "a value")


def _nearest(place: _Place, top: type[BaseModel]) -> str:
    name, section = place.path[-1], place.section
    prefix = "".join(f"{part}." for part in place.path[:-1])
    siblings = [] if section is None else list(section.model_fields)
    for other in place.kinds:
        if name in other.model_fields and section is not None:
            return f" for kind = {_tags(section)[0]!r}; {prefix}{name} belongs to {prefix}kind = {_tags(other)[0]!r}"
    by_name: dict[str, str] = {}
    for key in keys(top):
        by_name.setdefault(key.removesuffix(".<name>").rpartition(".")[2], key.removesuffix(".<name>"))
    if name in by_name:
        return f"; did you mean {by_name[name]}?"
    if close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{close[0]}?"
    if close := difflib.get_close_matches(name, by_name, n=1, cutoff=0.75):
        return f"; did you mean {by_name[close[0]]}?"
    return f"; there are: {', '.join(siblings)}" if siblings else ""


def _tags(section: type[BaseModel]) -> tuple[str, ...]:
    field = section.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()
