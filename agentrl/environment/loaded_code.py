"""Whether the code that this process imported is still what its files say: what ran, graded and is recorded is one."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from agentrl.core.errors import EnvironmentDefinitionError, is_user_code


class _Loaded(NamedTuple):
    """A module as it was first seen after its import."""

    digest: bytes
    definitions: tuple[Any, ...]
    """Its functions and classes, which a reload replaces."""


_loaded: dict[str, _Loaded] = {}


def modules_below(directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the absolute path and the names of each imported module of users whose file is in a directory or below."""
    for module in list(sys.modules.values()):
        # `vars` and `getattr` would import a lazy module; `isinstance` believes cffi's libraries, which are none.
        names = ModuleType.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else {}
        path = os.path.abspath(str(names.get("__file__")))
        if path.endswith(".py") and path.startswith(os.path.join(directory, "")) and is_user_code(path):
            yield path, names


def check_loaded_code(definition: Any) -> None:
    """Refuse a class or function if its file, or a module beside or below it, was edited after its import here.

    Raises:
        EnvironmentDefinitionError: one was; the message names it.
    """
    try:
        directory = os.path.dirname(os.path.abspath(inspect.getfile(definition)))
    except (OSError, TypeError):  # no file defines the class
        return
    for path, names in modules_below(directory):
        with contextlib.suppress(OSError):  # the file went
            digest = hashlib.blake2b(Path(path).read_bytes()).digest()
            definitions = tuple(v for v in names.values() if isinstance(v, type | FunctionType))
            before = _loaded.get(path, _Loaded(digest, ()))
            if digest == before.digest or [*map(id, definitions)] != [*map(id, before.definitions)]:
                _loaded[path] = _Loaded(digest, definitions)
            else:
                raise EnvironmentDefinitionError(
                    f"{path} was edited after this process imported it. Restart the process (in a notebook, the "
                    "kernel), so that the code that runs is the code that the run records"
                )
