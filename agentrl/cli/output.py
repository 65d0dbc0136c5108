"""Output of commands: JSON for programs, rich renderables for people; once, or continuously (`--follow`)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.render import TerminalPage

T = TypeVar("T")

INTERNAL, INTERRUPTED = 70, 130
"""Exit codes without an `AgentRLError`."""
INTERVAL_S = 1.0
"""Seconds between two reads of a run that is followed."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that stop a run, besides Ctrl-C."""


def end_as_interrupted_on_signals() -> dict[signal.Signals, Any]:
    """Make the signals that stop a run end the process at once, with the exit code of an interrupted command. Ignored
    ones stay ignored. Returns the handlers before."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(INTERRUPTED))
    return before


def ignore_stop_signals() -> None:
    """Ignore signals until the process has ended: at its end Python resets all other handlers, and a late signal would
    replace the exit code."""
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)


def print_json(value: Any) -> None:
    """Print one JSON document in ASCII, so that no content reaches the terminal unescaped."""
    import json

    import msgspec

    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    json.dump(plain, sys.stdout, indent=2, default=_bytes)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """Print a value as JSON on one line and flush it, for programs that read along."""
    import json

    import msgspec

    plain = msgspec.to_builtins(value, builtin_types=(bytes,))
    sys.stdout.write(json.dumps(plain, default=_bytes) + "\n")
    sys.stdout.flush()


def print_text(renderable: RenderableType) -> None:
    """Print a renderable in the terminal's width, or in 120 characters if there is no terminal."""
    from rich.console import Console

    class OpenConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; `main` maps the error to the command's exit code

    console = OpenConsole(soft_wrap=True) if sys.stdout.isatty() else OpenConsole(width=160, soft_wrap=True)
    console.print(renderable, highlight=False)


def follow(
    reader: RunReader,
    options: argparse.Namespace,
    ask: Callable[[], Sequence[T]],
    key: Callable[[T], Hashable],
    page: Callable[[Sequence[T]], TerminalPage],
    is_ended: Callable[[], bool] = lambda: False,
) -> None:
    """Print new items of a run as they appear, as pages or lines of JSON, until the run ends or Ctrl-C.

    Args:
        reader: reader of the run.
        options: options of the command.
        ask: returns the items in order; called every `INTERVAL_S`.
        key: identifies an item, which is printed once.
        page: renders items.
        is_ended: whether no more items will come even if the run continues.
    """
    shown_keys: set[Hashable] = set()
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            # Check first: items written before the end are then on disk.
            has_ended = reader.standing() != "running" or is_ended()
            new = [item for item in ask() if key(item) not in shown_keys]
            shown_keys.update(map(key, new))
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
