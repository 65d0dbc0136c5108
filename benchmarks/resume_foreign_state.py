"""A digest of everything reachable from an object: equal in two processes exactly where the objects are.

Sees attributes, slots, containers, arrays and the states of random generators. Does not see modules, file handles, or
inside objects of C extensions that have neither attributes nor a `repr` without an address.
"""

from __future__ import annotations

import hashlib
import random
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

_PLAIN = (str, int, float, complex, bool, bytes, type(None))
_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)


def digest(value: Any) -> str:
    """16 hexadecimal digits."""
    return _digest(value, {}, []).hex()


def parts(value: object) -> dict[str, str]:
    """A digest per attribute, to say where two objects differ."""
    return {name: digest(found) for name, found in sorted(_attributes(value).items())}


def _digest(value: Any, seen: dict[int, int], kept: list[Any]) -> bytes:
    if isinstance(value, _PLAIN):
        return _hash(type(value).__name__.encode(), repr(value).encode())
    if isinstance(value, _BY_NAME):
        return _hash(b"name", getattr(value, "__qualname__", getattr(value, "__name__", "")).encode())
    if id(value) in seen:
        return _hash(b"seen", str(seen[id(value)]).encode())
    seen[id(value)] = len(seen)
    kept.append(value)  # so that no other object gets its id
    return _hash(type(value).__qualname__.encode(), *(_digest(part, seen, kept) for part in _inside(value)))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, np.ndarray) and value.dtype != object:
        return [str(value.dtype), list(value.shape), value.tobytes()]
    if isinstance(value, np.generic):
        return [repr(value)]
    if isinstance(value, np.random.Generator | np.random.RandomState):
        generator = getattr(value, "bit_generator", None) or value._bit_generator
        return [generator.state]
    if isinstance(value, np.random.BitGenerator):
        return [value.state]
    if isinstance(value, random.Random):
        return [value.getstate()]
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, set | frozenset):
        return sorted(digest(member) for member in value)
    if isinstance(value, list | tuple | np.ndarray):
        return list(value)
    attributes = _attributes(value)
    if attributes:
        return [part for pair in sorted(attributes.items()) for part in pair]
    shown = repr(value)
    return [] if " at 0x" in shown else [shown]


def _attributes(value: object) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if name not in {"__dict__", "__weakref__"} and hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _hash(*pieces: bytes) -> bytes:
    made = hashlib.blake2b(digest_size=8)
    for piece in pieces:
        made.update(len(piece).to_bytes(4, "little"))
        made.update(piece)
    return made.digest()
