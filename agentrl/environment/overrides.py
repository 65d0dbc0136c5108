"""Checks of what a user's class overrides: attributes have the declared types, methods the declared parameters.

The declarations are those of agentrl's own base classes, so a new attribute is checked without further code.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import reprlib
import types
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

_OWN = "agentrl.environment."
"""Prefix of the modules whose classes declare what can be overridden."""
_SETTINGS = {name: f"sampling.{name}, a setting of the run" for name in ("max_turns", "max_tokens", "temperature")}
_EXAMPLES = {
    "aliases": "{'gpt-4o-mini': 'main'}",
    "command": "['python', '/path/to/agent.py', '{task.question}']",
    "fan_out": "{'Child': 4}",
    "ignored_fields": "('temperature',)",
    "mcp_servers": "[agentrl_mcp.MCPServer(command=['python', '-m', 'server'])]",
    "sandbox": "agentrl.Sandbox()",
    "selects": "('image',)",
    "splits": "('train', 'held_out')",
}


def override_problem(environment: type) -> str:
    """Describe the first override of a class that has another form than its declaration; "" if there is none."""
    for base in environment.__mro__:
        if not base.__module__.startswith(_OWN):
            continue
        for name, declared in declared_attributes(base).items():
            value = inspect.getattr_static(environment, name, None)
            if value is base.__dict__[name] or isinstance(value, property):
                continue
            annotation = evaluated(declared, base)
            if not fits(value, annotation):
                example = f", such as {_EXAMPLES[name]}" if name in _EXAMPLES else ""
                return f".{name} is {reprlib.repr(value)}; it must be {_words(annotation)}{example}"
        for name, declared in vars(base).items():
            value = inspect.getattr_static(environment, name, None)
            is_overridden = value is not declared and not name.startswith("_") and inspect.isroutine(declared)
            if is_overridden and (problem := _method_problem(name, declared, value)):
                return problem
    return ""


def misspelled_attributes(environment: type) -> Iterator[str]:
    """Describe attributes that are almost declared ones, and that no source of the class reads. Another module may read
    them, so they are not refused."""
    bases = [base for base in environment.__mro__ if base.__module__.startswith(_OWN)]
    known = _SETTINGS | {name: name for base in bases for name in declared_attributes(base)}
    classes = [base for base in environment.__mro__ if base not in bases]
    for owner in classes:
        for name, value in vars(owner).items():
            others = [base for base in environment.__mro__ if base is not owner and name in vars(base)]
            if name.startswith("_") or others or inspect.isroutine(value) or isinstance(value, property | type):
                continue
            close = difflib.get_close_matches(
                name, known.keys() - vars(owner).keys() | {name} & _SETTINGS.keys(), 1, 0.8
            )
            if close and all(len(re.findall(rf"\b{name}\b", _source(base))) == (base is owner) for base in classes):
                yield f"{environment.__name__}.{name} is not read in its module; did you mean {known[close[0]]}?"


def _source(owner: type) -> str:
    """Return the source text of a class's module; "" if there is none."""
    try:
        return inspect.getsource(inspect.getmodule(owner) or owner)
    except (OSError, TypeError):
        return ""


def declared_attributes(base: type) -> dict[str, str]:
    """Return the annotations of a class's own public attributes that have a default."""
    return {
        name: annotation
        for name, annotation in inspect.get_annotations(base).items()
        if name in base.__dict__ and not name.startswith("_")
    }


def evaluated(annotation: str, base: type) -> Any:
    """Return the type of an annotation in the module of a class."""
    alone = type(base.__name__, (), {"__annotations__": {"value": annotation}, "__module__": base.__module__})
    return get_type_hints(alone)["value"]


def fits(value: object, annotation: Any) -> bool:
    """Whether a value has a type, as the annotations of this package write them."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is ClassVar:
        return fits(value, arguments[0])
    if origin in (Union, types.UnionType):
        return any(fits(value, member) for member in arguments)
    if origin is Literal:
        return value in arguments
    if origin in (tuple, Sequence):
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str | bytes)
            and all(fits(item, arguments[0]) for item in value)
        )
    if origin is Mapping:
        return isinstance(value, Mapping) and all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if origin is not None:
        return isinstance(value, origin)
    if annotation is int:
        return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0
    if annotation is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return annotation is Any or (value is None if annotation in (None, type(None)) else isinstance(value, annotation))


def _words(annotation: Any) -> str:
    """Describe the values of a type."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is ClassVar:
        return _words(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in (tuple, Sequence):
        return f"a list of {_words(arguments[0]).removeprefix('a ').removeprefix('an ')}s"
    if origin is Mapping:
        return f"a dict from {' to '.join(map(_words, arguments))}"
    names = {
        bool: "True or False",
        int: "a whole number, 0 or more",
        float: "a finite number",
        str: "a string",
        type(None): "None",
    }
    return names.get(annotation, f"an agentrl.{getattr(annotation, '__name__', annotation)}")


def _method_problem(name: str, declared: Any, value: Any) -> str:
    """Describe why a value cannot stand for a declared method; "" if it can."""
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    declared_function = declared.__func__ if isinstance(declared, staticmethod | classmethod) else declared
    parameters = [
        parameter.name
        for parameter in inspect.signature(declared_function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    is_async = inspect.iscoroutinefunction(declared_function)
    form = f"`{'async ' * is_async}def {name}({', '.join(parameters)})`"
    if not inspect.isfunction(function):
        return "" if callable(function) else f".{name} is {reprlib.repr(value)}; it must be a method: {form}"
    if name == "tasks":
        try:
            inspect.signature(function).bind_partial(*parameters[isinstance(value, staticmethod) :], seed=0)
        except TypeError as error:
            return f".tasks cannot be called as `tasks(split, seed=0)`: {error} ({_place(function)})"
    if name in ("tasks", "demonstrate"):  # they take further parameters by choice, or may be generators
        return ""
    try:
        inspect.signature(function).bind(*parameters[isinstance(value, staticmethod) :])
    except TypeError as error:
        return f".{name} cannot be called as {form}: {error} ({_place(function)})"
    if inspect.iscoroutinefunction(function) is not is_async and (name != "reward" or is_async):
        return f".{name} must be {form}, {'with' if is_async else 'without'} `async` ({_place(function)})"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return f".{name} must return its value, not `yield` it ({_place(function)})"
    return ""


def _place(function: types.FunctionType) -> str:
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
