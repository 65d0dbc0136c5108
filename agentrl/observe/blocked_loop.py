"""Watches the event loop and names, with file and line, code that blocks it and errors that nothing awaits.

Code that blocks the loop stops every episode. A thread checks a timestamp that the loop renews; if it is old, the
thread reads the stack of the loop's thread. Owns that thread. Does not interrupt anything. A loop that waits for work
is not reported. Time in which a busy machine runs other threads does not count, as far as the kernel tells it (Linux).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any

from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, is_user_code
from agentrl.core.event_loop import CALL_THREADS, describe_stack, frame_location, user_frames
from agentrl.core.text import plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

BLOCKED_S = 1.0
COUNTED_S = 0.5
"""Seconds without an iteration from which on the time counts as blocked by the user's code."""
PROGRAM_REMEDY = "await an asynchronous function instead, or `await asyncio.to_thread(…)`"
"""Remedy in a `HarnessEnvironment`."""
REMEDY = (
    "await it (`ctx.sleep`, `ctx.effect` with an async function), or mark the tool @tool(external=True), which runs it "
    f"in a thread; in the `play` of a HarnessEnvironment, {PROGRAM_REMEDY}"
)
_EPISODE = re.compile(r"[a-z]\d+(~.*)?")


@contextlib.contextmanager
def watch_event_loop(
    tell: Callable[[str], None],
    *,
    longest_s: float = BLOCKED_S,
    repeated_s: float | None = None,
    users_only: bool = False,
    count: Callable[[str, float], None] | None = None,
    remedy: str = REMEDY,
    at_end: bool = False,
) -> Iterator[None]:
    """Watch the running loop. `tell` is called once for each place: in the watching thread for code that blocks, in the
    loop for an error of a task or callback that nothing awaits (also after the end of the watch).

    Args:
        tell: prints one line for people. Must be safe to call from a thread; with `at_end`, the loop's thread calls it.
        longest_s: seconds without an iteration after which the loop counts as blocked.
        repeated_s: shorter limit in seconds for a place that blocks twice. None: only `longest_s` counts.
        users_only: report a blocked loop only where the user's code is on the stack and does not import a library.
        count: receives, in the watching thread, a place in the user's code (`file.py:8`) and for how many more seconds
            it has blocked the loop.
        remedy: what the user can do about code that blocks.
        at_end: tell of code that blocks when the watch ends, with the longest time at each place; otherwise at once,
            with the time so far.
    """
    watch = _Watch(
        *(asyncio.get_running_loop(), tell, longest_s, longest_s if repeated_s is None else repeated_s),
        *(users_only, count, remedy, at_end),
    )
    watch.start()
    try:
        yield
    finally:
        watch.stop()


class _Watch:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tell: Callable[[str], None],
        longest_s: float,
        repeated_s: float,
        users_only: bool,
        count: Callable[[str, float], None] | None,
        remedy: str,
        at_end: bool,
    ) -> None:
        self._loop = loop
        self._tell = tell
        self._longest_s = longest_s
        self._repeated_s = repeated_s
        self._users_only = users_only
        self._count = count
        self._remedy = remedy
        self._at_end = at_end
        self._longest: dict[tuple[str, int], tuple[float, str]] = {}
        """Longest seconds at each place, and the line about them, which `stop` tells."""
        self._counted_mark, self._counted_s = 0.0, 0.0
        """The newest iteration after which time was counted, and the seconds that were."""
        self._blocked_at: dict[tuple[str, int], float] = {}
        """Timestamp at which each place first blocked."""
        self._clock = SystemClock()
        self._owner, self._owner_id = threading.get_ident(), threading.get_native_id()
        self._mark = self._running_s()
        self._reported_locations: set[tuple[str, int]] = set()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, name="loop-watch", daemon=True)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop.set_exception_handler(self._on_lost_error)
        self._renew()
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()
        for _, line in self._longest.values():
            self._tell(line)

    def _running_s(self) -> float:
        """Return the time, without the seconds in which the loop's thread waited for a processor."""
        waiting_ns = 0
        with (
            contextlib.suppress(OSError, LookupError, ValueError),
            open(f"/proc/self/task/{self._owner_id}/schedstat") as file,
        ):
            waiting_ns = int(file.read().split()[1])  # of Linux
        return self._clock.monotonic() - waiting_ns / 1e9

    def _renew(self) -> None:
        self._mark = self._running_s()
        self._timer = self._loop.call_later(self._repeated_s / 4, self._renew)

    def _on_lost_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None:
            loop.default_exception_handler(context)
            return
        trace = traceback.extract_tb(error.__traceback__)
        place = next((f"{f.filename}:{f.lineno}: " for f in reversed(trace) if is_user_code(f.filename)), "")
        kind = "" if isinstance(error, AgentRLError) else f"{type(error).__name__}: "
        if (place, 0) not in self._reported_locations:
            self._reported_locations.add((place, 0))
            self._tell(f"{place}{kind}{error}")

    def _look(self) -> None:
        while not self._stopped.wait(self._repeated_s / 4):
            mark = self._mark
            seconds = self._running_s() - mark
            is_looked_at = seconds > min(self._repeated_s, COUNTED_S)
            frame = sys._current_frames().get(self._owner) if is_looked_at else None
            if frame is None or frame.f_globals.get("__name__") in ("selectors", "asyncio.base_events"):
                continue
            if self._stopped.is_set():  # the frame is that of `stop`, below code that did not block
                return
            stack, is_import = user_frames(frame)
            place = (stack[0].f_code.co_filename, stack[0].f_lineno)
            if is_user_code(place[0]) and self._count is not None:
                counted_s = self._counted_s if self._counted_mark == mark else 0.0
                self._counted_mark, self._counted_s = mark, seconds
                self._count(f"{os.path.basename(place[0])}:{place[1]}", seconds - counted_s)
            if seconds <= self._repeated_s or (self._users_only and (is_import or not is_user_code(place[0]))):
                continue
            if is_user_code(place[0]):
                key = place
                is_blocked = seconds > self._longest_s or self._blocked_at.setdefault(place, mark) < mark
            else:  # all lines of libraries count as one place: the user can mend none of them
                key = ("", -1)
                is_blocked = seconds > self._longest_s
            if not is_blocked:
                continue
            if self._at_end:
                if seconds > self._longest.get(key, (0.0, ""))[0]:
                    self._longest[key] = seconds, self._describe(stack, seconds, is_import=is_import)
            elif key not in self._reported_locations:
                self._reported_locations.add(key)
                self._tell(self._describe(stack, seconds, is_import=is_import))

    def _describe(self, stack: Sequence[FrameType], seconds: float, *, is_import: bool) -> str:
        task = asyncio.current_task(self._loop)
        name = "" if task is None or not _EPISODE.fullmatch(task.get_name()) else f" in episode {task.get_name()}"
        description = (
            f"the event loop has been blocked for {seconds:.1f} s{name} by {describe_stack(stack)}. Meanwhile, no "
            "episode makes progress: "
        )
        if not is_user_code(stack[0].f_code.co_filename):
            return f"{description}no code of yours is in it; agentrl or a library works, or the machine is busy"
        if is_import:
            return f"{description}it imports a library for the first time; import it at the top of your module"
        return f"{description}{self._remedy}"


def calls_left_running() -> str:
    """Name the user's code that still runs in threads; empty if there is none."""
    stacks = [user_frames(frame)[0][0] for frame in CALL_THREADS.stacks()]
    places = Counter(frame_location(frame) for frame in stacks if is_user_code(frame.f_code.co_filename))
    if not places:
        return ""
    named = ", ".join(f"{place} ({plural(count, 'call')})" for place, count in places.most_common(4))
    return f"{plural(places.total(), 'call')} in threads did not end, and will end with this process: {named}"
