"""How commands print: JSON for programs, rich renderables for people; at once, or as it comes (`--follow`)."""

from __future__ import annotations

import contextlib
import select
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.render import Page

T = TypeVar("T")

INTERNAL, INTERRUPTED = 70, 130
"""Exit codes that belong to no `AgentRLError`."""
INTERVAL_S = 1.0
"""Between two reads of a run that is followed."""


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


def follow(
    reader: RunReader,
    options: argparse.Namespace,
    ask: Callable[[], Sequence[T]],
    key: Callable[[T], Hashable],
    page: Callable[[Sequence[T]], Page],
    ended: Callable[[], bool] = lambda: False,
) -> None:
    """Print the new items of a run as they come, as pages or a line of JSON each, until the run has ended or Ctrl-C.

    Args:
        reader: of the run.
        options: of the command.
        ask: returns the items, in order; asked every `INTERVAL_S`.
        key: identifies an item, which is printed once.
        page: renders items.
        ended: whether nothing more will come although the run goes on.
    """
    seen: set[Hashable] = set()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            has_ended = reader.standing() != "running" or ended()  # asked first: what came before is then on disk
            new = [item for item in ask() if key(item) not in seen]
            seen.update(map(key, new))
            if options.json:
                for item in new:
                    print_json_line(item)
            elif new:
                print_text(page(new))
            if has_ended:
                return
            select.select([], [], [], INTERVAL_S)


def _bytes(value: Any) -> str:
    return bytes(value).hex()
