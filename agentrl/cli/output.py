"""How commands print: JSON for programs, rich renderables for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

INTERNAL, INTERRUPTED = 70, 130
"""Exit codes that belong to no `AgentRLError`."""


def print_json(value: Any) -> None:
    """One JSON document, ASCII only, so that no content reaches the terminal as it is."""
    import json

    import msgspec

    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    json.dump(plain, sys.stdout, indent=2, default=_bytes)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """A value on one line, as `print_json` writes it; at once, for who reads along."""
    import json

    import msgspec

    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    sys.stdout.write(json.dumps(plain, default=_bytes) + "\n")
    sys.stdout.flush()


def print_text(renderable: RenderableType) -> None:
    """A renderable, as wide as the terminal; at least 120 characters where there is none."""
    from rich.console import Console

    class OpenConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would leave with 1; `main` knows what it means for the command

    console = OpenConsole(soft_wrap=True) if sys.stdout.isatty() else OpenConsole(width=160, soft_wrap=True)
    console.print(renderable, highlight=False)


def _bytes(value: Any) -> str:
    return bytes(value).hex()
