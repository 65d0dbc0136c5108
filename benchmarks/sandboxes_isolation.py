"""Attempts to leave a sandbox, commands that take all they can get, kills, and resumed files: suites of
`tests/sandboxes/`, as this user and, if this is root, as an ordinary user too."""

from __future__ import annotations

import signal
import subprocess
import sys

from tests.sandboxes.escapes import escapes_without_sandbox
from tests.sandboxes.limits import BOMBS
from tests.sandboxes.users import as_users

BUSY_PROCESSES = 8
"""They widen the races of `leaked`."""


def figures(quick: bool) -> dict[str, float | None]:
    """Run the suites."""
    return _escapes() | _limits() | _leaks(6 if quick else 100, 0 if quick else BUSY_PROCESSES) | _resumes(quick)


def _escapes() -> dict[str, float | None]:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # an attempt may send it to this process
    inside = as_users("tests.sandboxes.escapes:escapes", control=False)
    for user, found in inside.items():
        print(f"  in a sandbox as {user}: {found}")
    control = escapes_without_sandbox()
    print(f"  without: {len(control) - 1} got through: {', '.join(sorted(control.keys() - {'attempts'}))}")
    return {
        "escapes": sum(len(found) - 1 for found in inside.values()),
        "escape_attempts": min(int(found["attempts"]) for found in inside.values()),
        "escapes_without": len(control) - 1,
    }


def _limits() -> dict[str, float | None]:
    broken = as_users("tests.sandboxes.limits:bombs")
    return {"limits_held": len(BOMBS) - max(len(names) for names in broken.values()), "limits": len(BOMBS)}


def _leaks(kills: int, busy: int) -> dict[str, float | None]:
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        leaked = as_users("tests.sandboxes.leaks:leaks", kills=kills)
    finally:
        for process in load:
            process.kill()
            process.wait()
    print(f"  leaked: {leaked}")
    return {"leaked": sum(leaked.values()), "leak_kills": kills * len(leaked)}


def _resumes(quick: bool) -> dict[str, float | None]:
    results = as_users("tests.sandboxes.resume:problems", kills=3 if quick else None)
    for user, (found, kills) in results.items():
        print(f"  as {user}: {len(found)} of {kills} kills: {found}")
    return {"resumed_equal": min(1 - len(found) / kills for found, kills in results.values())}
