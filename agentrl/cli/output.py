"""Output of commands: JSON for programs, rich renderables for people."""

from __future__ import annotations

import math
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType


INTERNAL, INTERRUPTED = 70, 130
"""Exit codes without an `AgentRLError`."""
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

    plain = _finite(msgspec.to_builtins(value, builtin_types=(bytes,)))
    json.dump(plain, sys.stdout, indent=2, default=_bytes, allow_nan=False)
    sys.stdout.write("\n")


def print_json_line(value: Any) -> None:
    """Print a value as JSON on one line and flush it, for programs that read along."""
    import json

    import msgspec

    plain = _finite(msgspec.to_builtins(value, builtin_types=(bytes,)))
    sys.stdout.write(json.dumps(plain, default=_bytes, allow_nan=False) + "\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    """Replace numbers that JSON does not have by null, as exports do."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def print_text(renderable: RenderableType) -> None:
    """Print a renderable in the terminal's width, or in 120 characters if there is no terminal."""
    from rich.console import Console

    class OpenConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1; `main` maps the error to the command's exit code

    console = OpenConsole(soft_wrap=True) if sys.stdout.isatty() else OpenConsole(width=160, soft_wrap=True)
    console.print(renderable, highlight=False)


def _bytes(value: Any) -> str:
    return bytes(value).hex()
