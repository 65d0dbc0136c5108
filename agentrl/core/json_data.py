"""The check and the copy of JSON data that other processes and later lives of a run must receive unchanged."""

from __future__ import annotations

import math
import re
import reprlib
from typing import Any

from agentrl.core.text import shorten_middle, valid_unicode

MAX_DEPTH = 100
"""Maximum number of lists and dicts around a value."""
_REMEDIES = {
    "Enum": "write .value",
    "bytes": "write text, such as base64",
    "date": "write .isoformat()",
    "dict": "write dict(…)",
    "frozenset": "write sorted(…)",
    "set": "write sorted(…)",
    "time": "write .isoformat()",
    "tuple": "write list(…)",
}
"""How to write common types as JSON, keyed by the name of the type or a base class."""


class _NotJsonError(Exception):
    """A part of the data that is not JSON."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.keys: tuple[object, ...] = ()
        """Keys and indices that lead to the part, the innermost first."""


def copy_json(value: Any, name: str) -> Any:
    """Return a deep copy of JSON data.

    Only JSON's own types are accepted: the journal returns a subclass, such as an enumeration or a default dict,
    without its additions.

    Args:
        value: the data.
        name: name of the data in messages.

    Raises:
        TypeError: a part, named by its path, is not JSON, or the journal would return something else.

    Example:
        >>> copy_json({"answer": [1, 2.5, None]}, "data")
        {'answer': [1, 2.5, None]}
        >>> copy_json({"answers": [{"pair": (1, 2)}]}, "data")
        Traceback (most recent call last):
        TypeError: data['answers'][0]['pair'] is (1, 2), of type tuple, which is not JSON: write list(…)
    """
    try:
        return _copy(value, 0)
    except _NotJsonError as error:
        path = "".join(f"[{reprlib.repr(key)}]" for key in reversed(error.keys))
        raise TypeError(f"{name}{shorten_middle(path)} {error}") from None


def _copy(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind is dict or kind is list:
        if depth == MAX_DEPTH:
            raise _NotJsonError(f"is inside {MAX_DEPTH} lists and dicts: make the data flatter")
        if kind is list and _is_flat(value):
            return value.copy()
        items: dict[Any, Any] = {}
        for key, item in value.items() if kind is dict else enumerate(value):
            if kind is dict and not _is_text(key):
                raise _NotJsonError(f"has the key {reprlib.repr(key)}: keys must be text, such as str(…)")
            try:
                items[key] = _copy(item, depth + 1)
            except _NotJsonError as error:
                error.keys = (*error.keys, key)
                raise
        return items if kind is dict else list(items.values())
    return _checked_scalar(value)


def _checked_scalar(value: Any) -> Any:
    """Return a value that is no list or dict."""
    kind = type(value)
    if value is None or kind is bool or _is_text(value):
        return value
    if kind is str:
        problem = "which has a lone surrogate: write .encode(errors='replace').decode()"
    elif kind is int:
        if -(2**63) <= value < 2**64:
            return value
        problem = "which has more than 64 bits: write str(…)"
    elif kind is float:
        if math.isfinite(value):
            return value
        problem = "which is not JSON: write None, or text"
    else:
        remedy = "write .tolist()" if kind.__module__ == "numpy" else "write text, numbers, lists or dicts"
        remedy = next((_REMEDIES[base.__name__] for base in kind.__mro__ if base.__name__ in _REMEDIES), remedy)
        problem = f"of type {kind.__name__}, which is not JSON: {remedy}"
    shown = re.sub("^<.*x[0-9a-f]{6,}>$", "an object", reprlib.repr(value))  # an address differs in each process
    raise _NotJsonError(f"is {shown}, {problem}")


def _is_flat(values: list[Any]) -> bool:
    """Whether all values are numbers, or texts, that are JSON, without a step of Python for each: there may be
    millions."""
    kinds = set(map(type, values))
    if kinds == {float}:
        return all(map(math.isfinite, values))
    if kinds == {int}:
        return bool(min(values) >= -(2**63) and max(values) < 2**64)
    return kinds == {str} and all(map(str.isascii, values))


def _is_text(value: object) -> bool:
    """Whether a value is a string that can be encoded."""
    return type(value) is str and (value.isascii() or valid_unicode(value) == value)
