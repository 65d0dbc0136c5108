"""Runs a function as this user and, where this is root, as an ordinary user too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOBODY = 65534


def as_users(function: str, **arguments: Any) -> dict[str, Any]:
    """Call `module:function` in a process of each user; return its results by user."""
    results = {"root" if os.getuid() == 0 else "user": _call(function, None, arguments)}
    if os.getuid() == 0:
        results["nobody"] = _call(function, NOBODY, arguments)
    return results


def _call(function: str, uid: int | None, arguments: dict[str, Any]) -> Any:
    """Import as this user, change to the other, and call. The keeper of an ordinary user is the system's Python."""
    module, name = function.split(":")
    lines = [
        "import importlib, json, os, sys",
        f"call = getattr(importlib.import_module({module!r}), {name!r})",
        "import asyncio, concurrent.futures.thread, agentrl_sandbox.bubblewrap as driver",
    ]
    with tempfile.TemporaryDirectory() as scratch:
        if uid is not None:
            package, root = Path(scratch) / "agentrl", Path(__file__).parents[2]
            shutil.copytree(root / "agentrl" / "sandbox", package / "sandbox")
            (package / "__init__.py").touch()  # the system's Python may be too old for the whole
            shutil.copytree(root / "packages/sandbox/src/agentrl_sandbox", Path(scratch) / "agentrl_sandbox")
            for path in (Path(scratch), *Path(scratch).rglob("*")):
                path.chmod(0o755)
            lines += [
                f"driver.PACKAGES = [{scratch!r}]",
                "sys.executable = '/usr/bin/python3'",
                f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})",
                "import ctypes; ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)",  # dumpable again, as a process of that user is
            ]
        lines += [f"print(json.dumps(call(**json.loads({json.dumps(arguments)!r}))))"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=900,
            check=False,
            env=environment,
        )
    if done.returncode:
        raise SystemExit(f"{function} failed")
    *printed, result = done.stdout.splitlines()
    print(*printed, sep="\n")
    return json.loads(result)
