"""Hypothesis strategies for the values that a JSON schema allows, as far as tools use its keywords."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

INT64 = 2**63
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = st.none() | st.booleans() | st.integers(-INT64, INT64 - 1) | st.floats(allow_nan=False, width=32) | TEXTS
ANYTHING = st.recursive(
    SCALARS.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
FORMATS: Mapping[str, st.SearchStrategy[str]] = {
    "date": st.dates().map(str),
    "time": st.times().map(str),
    "date-time": st.datetimes().map(lambda value: f"{value.isoformat()}Z"),
    "duration": st.builds("P{}DT{}H{}M{}S".format, *(st.integers(0, 99) for _ in range(4))),
    "uuid": st.uuids().map(str),
    "ipv4": st.ip_addresses(v=4).map(str),
    "uri": st.sampled_from(["https://example.com/a?b=c", "http://localhost:8000"]),
    "email": st.sampled_from(["ada@example.com", "a.b+c@example.org"]),
    "fraction": st.fractions().map(str),
}


def values_of(schema: Any, root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return the values that a schema allows. `root` has the definitions that it refers to."""
    if schema in (True, {}) or not isinstance(schema, Mapping):
        return ANYTHING
    if "$ref" in schema:
        definition = root["$defs"][schema["$ref"].rpartition("/")[2]]
        return st.deferred(lambda: values_of(definition, root))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of([values_of(part, root) for part in schema[key]])
    if "allOf" in schema:
        (part,) = schema["allOf"]
        return values_of(part, root)
    kind = schema.get("type")
    return ANYTHING if kind is None else MAKERS[kind](schema, root)


def _integers(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum", -INT64 - 1) + 1)
    high = schema.get("maximum", schema.get("exclusiveMaximum", INT64) - 1)
    step = schema.get("multipleOf", 1)
    whole = st.integers(-(-low // step), high // step).map(lambda value: value * step)
    return whole | whole.filter(lambda value: abs(value) < 2**53).map(float)  # which JSON Schema calls an integer


def _numbers(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    bounds: dict[str, Any] = {
        "exclude_min": "exclusiveMinimum" in schema,
        "exclude_max": "exclusiveMaximum" in schema,
    }
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **bounds)


def _texts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"], fullmatch=True).filter(lambda text: text.isprintable())
    if schema.get("contentMediaType") == "application/json":
        return ANYTHING.map(json.dumps)
    if schema.get("format") in FORMATS:
        return FORMATS[schema["format"]]
    return st.text(
        st.characters(codec="utf-8"), min_size=schema.get("minLength", 0), max_size=schema.get("maxLength", 12)
    )


def _lists(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    first = [values_of(item, root) for item in schema.get("prefixItems", ())]
    least, most = schema.get("minItems", 0), schema.get("maxItems", 4)
    items = st.lists(
        values_of(schema.get("items", {}), root),
        min_size=max(least - len(first), 0),
        max_size=max(most - len(first), 0),
        unique_by=repr if schema.get("uniqueItems") else None,
    )
    return st.tuples(st.tuples(*first), items).map(lambda parts: [*parts[0], *parts[1]])


def _objects(schema: Mapping[str, Any], root: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    parts = {name: values_of(part, root) for name, part in schema.get("properties", {}).items()}
    required = {name: part for name, part in parts.items() if name in schema.get("required", ())}
    optional = {name: part for name, part in parts.items() if name not in required}
    named = st.fixed_dictionaries(required, optional=optional)
    others = schema.get("additionalProperties", not parts)
    if others is False:
        return named
    names = values_of({"type": "string", **schema.get("propertyNames", {})}, root)
    more = st.dictionaries(names, values_of(others, root), max_size=2)
    return st.tuples(more, named).map(lambda both: both[0] | both[1])


MAKERS = {
    "integer": _integers,
    "number": _numbers,
    "string": _texts,
    "boolean": lambda schema, root: st.booleans(),
    "null": lambda schema, root: st.none(),
    "array": _lists,
    "object": _objects,
}
