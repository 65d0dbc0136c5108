"""A process that an environment forks gets the default signal handlers back."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from agentrl.app.stops import STOP_SIGNALS, handle_signals


def ended_child(number: signal.Signals) -> int:
    """Fork a child that only sleeps, send it the signal, and return its wait status."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(done, b"!")
        while True:
            time.sleep(1.0)
    os.read(ready, 1)
    os.kill(child, number)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("number", STOP_SIGNALS[1:])
def test_a_forked_child_ends_at_once_by_a_signal(number: signal.Signals) -> None:
    stops: list[str] = []

    async def main() -> int:
        with handle_signals(
            lambda: stops.append("then"), lambda: None, stop_seconds=3600.0, give_up=lambda: None, tell=stops.append
        ):
            status = ended_child(number)
            assert signal.getsignal(number) is not signal.SIG_DFL, "the run keeps its own"
        return status

    status = asyncio.run(main())
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == number
    assert stops == []
