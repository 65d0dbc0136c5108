"""The check's clock does not count the time in which other load keeps the check from a processor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from agentrl.core.clock import SystemClock
from agentrl.testing.load_clock import LoadClock

BUSY_CPU_S = 0.2
LOADED = f"""
import os, sys, time
from agentrl.core.clock import SystemClock
from agentrl.testing.load_clock import LoadClock

def compute():
    end = time.thread_time() + {BUSY_CPU_S}
    while time.thread_time() < end:
        pass

os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # all on one processor
parent = os.getpid()
for _ in range(4):
    if os.fork() == 0:
        while os.getppid() == parent:
            pass
        os._exit(0)
clock, start = LoadClock(), SystemClock.monotonic()
compute()
print(clock.monotonic(), SystemClock.monotonic() - start)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how long a thread waited for a processor")
def test_time_lost_to_other_load_does_not_count() -> None:
    ended = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, timeout=120, check=True)
    counted, elapsed = map(float, ended.stdout.split())
    assert counted < elapsed / 2, "four other processes share the processor"
    assert counted > BUSY_CPU_S / 2


def test_the_clock_never_goes_back_and_counts_at_most_all_time() -> None:
    start = SystemClock.monotonic()
    clock = LoadClock()
    times = [clock.monotonic()]
    while times[-1] == times[0]:
        times.append(clock.monotonic())
    assert times == sorted(times)
    assert times[-1] <= SystemClock.monotonic() - start
