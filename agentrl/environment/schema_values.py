"""Random values of a JSON schema, for what a policy may send."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Any

_DEPTH = 4
"""Levels of nesting, from which values are as small as their schema allows."""
_NUMBERS = ("0", "1.5", "-12", "42")
_FORMATS: Mapping[str, tuple[str, ...]] = {
    "date": ("2026-01-02", "1999-12-31"),
    "time": ("12:30:00", "23:59:59Z"),
    "date-time": ("2026-01-02T03:04:05Z", "1999-12-31T23:59:59+02:00", "2026-01-02T03:04:05"),
    "duration": ("P3D", "PT1H30M", "P1DT12H"),
    "uuid": ("00000000-0000-4000-8000-000000000001",),
    **{f"uuid{n}": (f"00000000-0000-{n}000-8000-000000000001",) for n in (1, 3, 4, 5, 6, 7, 8)},
    "ipv4": ("127.0.0.1",),
    "ipv6": ("::1",),
    "email": ("ada@example.com",),
    "uri": ("https://example.com/a",),
    "regex": ("a+",),
    "base64url": ("YWI=",),
    "fraction": ("1/2", "3"),
    **dict.fromkeys(("binary", "path", "password"), ("a", "b", "some text")),
}
_WORDS = ("a", "b", "some text")
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


class UnknownSchemaError(Exception):
    """A schema of which no value is known."""


def random_value(schema: Any, draw: random.Random, root: Mapping[str, Any], depth: int = 0) -> Any:
    """Return a value that a schema allows.

    Args:
        schema: the schema.
        draw: random generator.
        root: the schema with the `$defs` that references name.
        depth: levels of nesting above the value.

    Raises:
        UnknownSchemaError: the schema has a pattern, a format or a keyword whose values are not known.
    """
    if not isinstance(schema, Mapping):
        return draw.choice(_WORDS)
    if "$ref" in schema:
        return random_value(_definition(schema["$ref"], root), draw, root, depth)
    if "enum" in schema or "const" in schema:
        return draw.choice(schema.get("enum") or [schema.get("const")])
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema and (key != "allOf" or len(schema[key]) == 1):
            return _alternative(schema[key], draw, root, depth)
    if "not" in schema or "allOf" in schema:
        raise UnknownSchemaError
    kind = schema.get("type")
    make: Callable[..., Any] = _KINDS.get(draw.choice(kind) if isinstance(kind, list) and kind else kind, _text)
    return make(schema, draw, root, depth)


def _definition(reference: Any, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for name in str(reference).removeprefix("#/").split("/"):
        if not isinstance(part, Mapping) or name not in part:
            raise UnknownSchemaError
        part = part[name]
    return part


def _alternative(schemas: Any, draw: random.Random, root: Mapping[str, Any], depth: int) -> Any:
    chosen = list(schemas)
    draw.shuffle(chosen)
    if depth >= _DEPTH:
        chosen.sort(key=lambda schema: "$ref" in schema)  # which may refer to what it is a part of
    for schema in chosen:
        try:
            return random_value(schema, draw, root, depth)
        except UnknownSchemaError:
            continue
    raise UnknownSchemaError


def _integer(schema: Mapping[str, Any], draw: random.Random, *_: Any) -> int:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -1) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", max(low, 0) + 100) - 1)
    if "minimum" not in schema and "exclusiveMinimum" not in schema:
        low = min(low, high)
    step = schema.get("multipleOf", 1)
    low, high = -(-low // step), high // step
    if low > high:
        raise UnknownSchemaError
    return int(draw.randint(int(low), int(high)) * step)


def _number(schema: Mapping[str, Any], draw: random.Random, *_: Any) -> float:
    if not schema.keys() & _BOUNDS:
        return float(draw.randint(0, 99))
    lows = [schema[key] for key in ("minimum", "exclusiveMinimum") if key in schema]
    highs = [schema[key] for key in ("maximum", "exclusiveMaximum") if key in schema]
    low = max(lows) if lows else min(0, min(highs, default=0) - 100)
    high = min(highs) if highs else max(lows, default=0) + 100
    step = schema.get("multipleOf")
    value = low + (high - low) * draw.uniform(0.1, 0.9) if step is None else step * round((low + high) / 2 / step)
    if not low <= value <= high or value in (schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")):
        raise UnknownSchemaError
    return float(value)


def _array(schema: Mapping[str, Any], draw: random.Random, root: Mapping[str, Any], depth: int) -> list[Any]:
    first = schema.get("prefixItems", ())
    items = [random_value(item, draw, root, depth + 1) for item in first]
    length = 2 if depth < _DEPTH else 0
    length = min(max(length, schema.get("minItems", 0)), schema.get("maxItems", max(length, schema.get("minItems", 0))))
    others = schema.get("items", {})
    for _ in range(20 * length):
        if len(items) >= length or others is False:
            break
        item = random_value(others, draw, root, depth + 1)
        if not schema.get("uniqueItems") or item not in items:
            items.append(item)
    if len(items) < schema.get("minItems", 0):
        raise UnknownSchemaError
    return items


def _object(schema: Mapping[str, Any], draw: random.Random, root: Mapping[str, Any], depth: int) -> dict[str, Any]:
    required = schema.get("required", ())
    named = {
        name: random_value(part, draw, root, depth + 1)
        for name, part in schema.get("properties", {}).items()
        if name in required or depth < _DEPTH
    }
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping) and others and depth < _DEPTH:
        names = schema.get("propertyNames", {})
        named[str(random_value({"type": "string", **names}, draw, root))] = random_value(others, draw, root, depth + 1)
    if "patternProperties" in schema or len(named) < schema.get("minProperties", 0):
        raise UnknownSchemaError
    return named


def _text(schema: Mapping[str, Any], draw: random.Random, *_: Any) -> str:
    texts: tuple[str, ...] = _WORDS
    if schema.get("contentMediaType") == "application/json":
        texts = ('{"a": 1}', "[1, 2]")
    elif "format" in schema:
        if schema["format"] not in _FORMATS:
            raise UnknownSchemaError
        texts = _FORMATS[schema["format"]]
    elif "pattern" in schema:
        try:
            pattern = re.compile(schema["pattern"])
        except re.error:  # of another dialect, such as `\p{L}`
            raise UnknownSchemaError from None
        texts = tuple(text for text in (*_WORDS, *_NUMBERS) if pattern.search(text))
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not texts:
        raise UnknownSchemaError
    text = draw.choice(texts)
    if "pattern" not in schema and "format" not in schema:
        text = text.ljust(least, "a")[:most]
    if len(text) < least or (most is not None and len(text) > most):
        raise UnknownSchemaError
    return text


_KINDS: Mapping[Any, Callable[..., Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda _schema, draw, *_: draw.choice([False, True]),
    "array": _array,
    "object": _object,
    "null": lambda *_: None,
}
