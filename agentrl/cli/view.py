"""`agentrl run view` and `metrics`: how a run goes, for people and for other programs. Read-only."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json, print_text
from agentrl.cli.reading import open_run
from agentrl.core.clock import SystemClock

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from agentrl.inspection.reader import RunReader

INTERVAL_S = 1.0
READING_SHARE = 0.1
"""Of the time, at most so much is spent reading: a long run is read less often."""


def run_view(options: argparse.Namespace) -> int:
    """`agentrl run view [RUN] [--once]`: until q, Ctrl-C, or the end of the run."""
    with open_run(options) as reader:
        if options.json:
            from agentrl.inspection.statistics import latest_metrics, run_state

            state = run_state(reader)
            print_json({"status": state.status, "metrics": latest_metrics(state), "problem": state.problem})
        elif options.once or not sys.stdout.isatty():
            print_text(_frame(reader, 100)[0])
        else:
            _follow(reader)
    return 0


def run_metrics(options: argparse.Namespace) -> int:
    """`agentrl run metrics [RUN] [--prometheus]`: the newest value of each metric."""
    from agentrl.inspection.statistics import latest_metrics, run_state

    with open_run(options) as reader:
        state = run_state(reader)
    latest = latest_metrics(state)
    if options.prometheus:
        from agentrl.observe.sinks import prometheus

        sys.stdout.write(prometheus(state.plan.name, latest))
    elif options.json:
        print_json(latest)
    else:
        from agentrl.inspection.render import metric_table

        print_text(metric_table(latest))
    return 0


def _frame(reader: RunReader, width: int) -> tuple[RenderableType, bool]:
    """What to show, and whether the run has ended."""
    from agentrl.inspection.statistics import run_state
    from agentrl.observe.view import view

    state = run_state(reader)
    status = state.status
    age_s = SystemClock().wall() - status.wall if status is not None and status.wall else None
    return view(state, width=width, age_s=age_s), status is not None and status.ended


def _follow(reader: RunReader) -> None:
    from rich.console import Console
    from rich.live import Live

    clock, console = SystemClock(), Console()
    with (
        contextlib.suppress(KeyboardInterrupt),
        _keys() as pressed,
        Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live,
    ):
        has_ended, wait_s = False, 0.0
        while not has_ended and not pressed(wait_s):
            started = clock.monotonic()
            frame, has_ended = _frame(reader, console.width)
            live.update(frame, refresh=True)
            wait_s = max(INTERVAL_S, (clock.monotonic() - started) / READING_SHARE)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """A function that waits so many seconds, or until a key is pressed, and says whether it was q."""
    import termios
    import tty

    watched = [sys.stdin] if sys.stdin is not None and sys.stdin.isatty() else []

    def pressed(seconds: float) -> bool:
        ready, _, _ = select.select(watched, [], [], seconds)
        return bool(ready) and os.read(sys.stdin.fileno(), 1) in (b"q", b"Q", b"\x04", b"")

    if not watched:
        yield pressed
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)

    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
