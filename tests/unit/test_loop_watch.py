"""The watch on the event loop names what blocks it and what nobody awaits, once each, and keeps still otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import os
import re
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.core.clock import SystemClock
from agentrl.core.errors import is_user_code
from agentrl.observe.blocked_loop import watch_event_loop
from agentrl.observe.bottleneck import BLOCKED, ActivityClock, find_bottleneck


def told_during(
    act: Callable[[threading.Event], Coroutine[object, object, None]],
    *,
    longest_s: float = 0.05,
    users_only: bool = False,
) -> list[str]:
    """What the watch tells while `act` runs; the event is set when it has told something."""
    said: list[str] = []
    heard = threading.Event()

    def tell(text: str) -> None:
        said.append(text)
        heard.set()

    async def main() -> None:
        with watch_event_loop(tell, longest_s=longest_s, users_only=users_only):
            await act(heard)

    asyncio.run(main())
    gc.collect()
    return said


@contextlib.contextmanager
def shared_processor(programs: int) -> Iterator[None]:
    """Let this thread share its processor with programs that never wait."""
    allowed = os.sched_getaffinity(0)
    processor = min(allowed)
    busy = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(programs)]
    try:
        for pid in (0, *(program.pid for program in busy)):
            os.sched_setaffinity(pid, {processor})
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        for program in busy:
            program.kill()
            program.wait()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell how long threads wait")
def test_a_busy_machine_is_not_blamed_on_the_users_code() -> None:
    walls: list[float] = []

    async def compute(heard: threading.Event) -> None:
        began, end = time.monotonic(), time.thread_time() + 0.1
        while time.thread_time() < end and not heard.is_set():
            pass
        walls.append(time.monotonic() - began)

    with shared_processor(3):
        assert told_during(compute, longest_s=0.25) == []
        assert walls[0] > 0.25  # the time that counted before
        [said] = told_during(compute, longest_s=0.05)
    assert "in compute" in said


def test_code_that_blocks_the_loop_is_named_once_with_its_line() -> None:
    async def block(heard: threading.Event) -> None:
        for _ in range(2):
            heard.wait()  # blocks the loop until the watch has told of it
            await asyncio.sleep(0)

    [said] = told_during(block)
    assert "event loop" in said
    assert "test_loop_watch.py" in said
    assert "in block: `heard.wait()" in said


def test_a_report_at_the_end_has_the_whole_time() -> None:
    said: list[str] = []
    seen, counted = threading.Event(), 0.0

    def count(place: str, seconds: float) -> None:
        nonlocal counted
        counted += seconds
        if counted > 0.45:
            seen.set()

    async def main() -> None:
        with watch_event_loop(said.append, longest_s=0.05, count=count, at_end=True):
            for _ in range(2):
                seen.wait()  # blocks the loop
                assert not said
                await asyncio.sleep(0)

    asyncio.run(main())
    [line] = said
    match = re.search(r"blocked for ([\d.]+) s by .*`seen\.wait\(\)", line)
    assert match is not None
    assert float(match[1]) > 0.4  # the limit alone is .05


def test_libraries_that_block_the_loop_are_named_once_because_no_user_can_mend_them() -> None:
    async def block(heard: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        loop.call_soon(heard.wait)
        await asyncio.sleep(0)
        loop.call_soon(subprocess.run, ["sleep", "0.4"])
        await asyncio.sleep(0)

    [said] = told_during(block)
    assert "no code of yours is in it" in said


def test_a_task_of_another_library_is_no_episode() -> None:
    async def block(heard: threading.Event) -> None:
        async def run() -> None:
            heard.wait()

        await asyncio.get_running_loop().create_task(run(), name="graph.run_1")

    [said] = told_during(block)
    assert "in episode" not in said


def test_an_episode_that_blocks_the_loop_is_named_with_its_stack() -> None:
    async def block(heard: threading.Event) -> None:
        def think() -> None:
            heard.wait()

        async def run() -> None:
            think()

        await asyncio.get_running_loop().create_task(run(), name="e7")

    [said] = told_during(block)
    assert "in episode e7 by" in said
    assert "in think: `heard.wait()`" in said
    assert " in run" in said


def test_the_program_that_runs_the_loop_is_not_what_blocks_it() -> None:
    async def block(heard: threading.Event) -> None:
        asyncio.get_running_loop().call_soon(heard.wait)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    [said] = told_during(block)
    assert "no code of yours" in said
    assert "test_loop_watch.py" not in said


def test_the_command_that_starts_a_program_is_nobodys_code() -> None:
    assert not is_user_code(f"{sysconfig.get_path('scripts')}/agentrl")
    assert is_user_code(__file__)


def test_generated_code_is_nobodys_code() -> None:
    @dataclass
    class Point:
        x: int

    assert not is_user_code(Point.__init__.__code__.co_filename)


def test_a_watch_for_the_users_code_ignores_a_loop_that_others_block() -> None:
    async def block(heard: threading.Event) -> None:
        asyncio.get_running_loop().call_soon(heard.wait, 0.3)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    assert told_during(block, users_only=True) == []


SLOW_LIBRARY = """
import threading
threading.Event().wait(0.3)
"""


@pytest.mark.parametrize("users_only", [True, False])
def test_a_library_that_is_imported_for_the_first_time_is_not_the_users_fault(
    users_only: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"slow_library_{users_only}"
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / f"{name}.py").write_text(SLOW_LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))

    async def block(heard: threading.Event) -> None:
        importlib.import_module(name)

    said = told_during(block, users_only=users_only)
    assert len(said) == (not users_only)
    assert all("import" in text and "await it" not in text for text in said)


def test_a_library_of_another_environment_is_nobodys_code() -> None:
    assert not is_user_code("/opt/other/lib/python3.12/site-packages/aiohttp/web_ws.py")
    assert not is_user_code("/usr/lib/python3/dist-packages/aiohttp/web_ws.py")
    assert not is_user_code("/opt/other/lib/python3.10/json/decoder.py")
    assert not is_user_code("/opt/other/lib64/python3.13t/json/decoder.py")
    assert is_user_code("/home/user/lib/agents/python3.py")


def test_an_error_nobody_awaits_is_named_with_its_line() -> None:
    async def lose(heard: threading.Event) -> None:
        async def fail() -> None:
            raise ValueError("lost")

        task = asyncio.get_running_loop().create_task(fail())
        await asyncio.wait([task])

    [said] = told_during(lose)
    assert said.endswith("ValueError: lost")
    assert "test_loop_watch.py:" in said


def test_a_loop_that_waits_is_left_alone() -> None:
    async def wait(heard: threading.Event) -> None:
        await asyncio.to_thread(heard.wait, 0.3)  # six times as long as blocking would be borne

    assert told_during(wait) == []


def test_the_time_in_which_the_users_code_blocks_the_loop_is_counted_by_place() -> None:
    counted = ActivityClock(SystemClock())
    heard = threading.Event()
    calls: list[tuple[str, float]] = []

    def count(place: str, seconds: float) -> None:
        calls.append((place, seconds))
        counted.count_blocked(place, seconds)
        if len(calls) == 3:
            heard.set()

    async def main() -> None:
        with watch_event_loop(lambda text: None, longest_s=0.05, count=count), counted.during("loop"):
            heard.wait(30)  # blocks the loop

    asyncio.run(main())
    lines = Path(__file__).read_text().splitlines()
    place = f"test_loop_watch.py:{lines.index('            heard.wait(30)  # blocks the loop') + 1}"
    assert {name for name, _ in calls} == {place}
    assert all(seconds > 0.0 for _, seconds in calls)
    totals = counted.totals()
    assert totals[f"{BLOCKED}{place}"] == pytest.approx(sum(seconds for _, seconds in calls))
    assert totals[f"{BLOCKED}{place}"] <= totals["loop"] + 0.05, "no second is counted twice"
    found = find_bottleneck({}, {**totals, "run": 60.0, "engine": 1800.0, "episodes": 1900.0}, max_staleness=1)
    assert found is not None
    assert found.line.startswith(f"tools and environments: the event loop is blocked by {place} ")
    others = {**totals, "loop": 60.0, "run": 60.0, "engine": 1800.0, "episodes": 1900.0}
    assert "blocked" not in str(find_bottleneck({}, others, max_staleness=1)), "a small share of the time"
