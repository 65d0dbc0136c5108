"""The functions of Python's library, which code that runs in this process can remove.

Guards that run untrusted programs, such as the one of human-eval, set `os.unlink`, `shutil.rmtree`, `subprocess.Popen`
and others to None for the whole process. The next part that needs one of them then fails, far from the cause.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


class LibraryFunctions:
    """The public functions and classes of the loaded modules of Python's library, at the time of construction."""

    def __init__(self) -> None:
        self._functions: list[tuple[ModuleType, str, Callable[..., Any]]] = [
            (module, name, value)
            for module_name, module in list(sys.modules.items())
            if module_name.partition(".")[0] in sys.stdlib_module_names and isinstance(module, ModuleType)
            for name, value in list(vars(module).items())
            if not name.startswith("_") and callable(value)
        ]

    def restore(self) -> list[str]:
        """Put back the functions that are None or missing now; returns their names, such as `os.unlink`, in order."""
        removed = []
        for module, name, value in self._functions:
            if vars(module).get(name) is None:
                setattr(module, name, value)
                removed.append(f"{module.__name__}.{name}")
        return sorted(removed)


def describe_removed(functions: Sequence[str]) -> str:
    """Return what happened to functions, for a message that begins with who did it."""
    names = f"{', '.join(functions[:8])}{f' and {len(functions) - 8} more' if len(functions) > 8 else ''}"
    return f"removed {names} from this process, so its other parts cannot use them"
