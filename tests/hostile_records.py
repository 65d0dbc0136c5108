"""Recorded states of sandboxes that name files outside of them, and what a command reaches after each.

The tests of the drivers share them.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from agentrl.sandbox import FileRecord
from agentrl.sandbox.driver import DriverName
from agentrl.sandbox.sandbox import Sandbox, make_driver

ATTACK = """
cat /box/secret /tmp/secret /app/secret /etc/passwd /box/*/secret /box/hard
for place in /box /tmp /app /box/*; do echo owned > $place/owned; done
echo owned > /box/hard
"""


def link(path: str, target: str) -> FileRecord:
    return FileRecord(path, "link", 0o777, 0, 0, target)


def file(path: str, size: int = 4, mode: int = 0o644, modified: int = 0) -> FileRecord:
    return FileRecord(path, "file", mode, modified, size, "")


def directory(path: str, mode: int = 0o755, target: str = "") -> FileRecord:
    return FileRecord(path, "directory", mode, 0, 0, target)


def other_name(path: str, target: str) -> FileRecord:
    return FileRecord(path, "same", 0o644, 0, 0, target)


def hostile_records(victim: str) -> dict[str, list[FileRecord]]:
    """States that must be refused; `victim` is a directory of the user."""
    return {
        "box is a link": [link("box", victim)],
        "tmp is a link": [link("tmp", "/")],
        "a writable directory is a link": [link("app", victim)],
        "a mounted file is a link": [link("etc/passwd", f"{victim}/secret")],
        "a directory of mounted files is a link": [link("etc", victim)],
        "zeros are a link": [link("zero", f"{victim}/secret")],
        "box is a file": [file("box")],
        "box is closed": [directory("box", 0)],
        "box is opaque": [directory("box", target="opaque")],
        "a new directory beside box": [directory("more"), link("more/x", victim)],
        "absolute": [file("/box/x")],
        "parent": [file("../x")],
        "parent inside": [file("box/../../x")],
        "double slash": [file("box//x")],
        "dot": [file("box/./x")],
        "empty": [file("")],
        "through a link": [link("box/l", victim), file("box/l/owned")],
        "directory through a link": [link("box/l", victim), directory("box/l/d")],
        "mode through a link": [link("box/l", victim), directory("box/l", 0o777)],
        "another name of a mounted file": [other_name("box/hard", "etc/passwd")],
        "another name of zeros": [other_name("box/hard", "zero")],
        "another name of a parent's file": [other_name("box/hard", f"box/../../../..{victim}/secret")],
        "another name through a link": [link("box/l", victim), other_name("box/hard", "box/l/secret")],
        "a device": [FileRecord("box/x", "device", 0o666, 0, 0, "")],
        "a removed file of no root": [FileRecord("box/x", "none", 0, 0, 0, "")],
        "longer than the contents": [file("box/x", 5)],
        "of negative size": [file("box/x", -1)],
        "of no mode": [file("box/x", mode=1 << 20)],
        "of no time": [file("box/x", modified=1 << 70)],
        "a name of 256 bytes": [file("box/" + "n" * 256)],
        "NUL": [file("box/a\0b")],
        "a lone surrogate": [file("box/\ud800")],
        "a link to NUL": [link("box/l", "a\0b")],
        "a file in a file": [file("box/x"), file("box/x/y", 0)],
    }


def _changes(directory: Path) -> tuple[int, int, bytes]:
    found = directory.stat()
    return found.st_mode, found.st_ctime_ns, (directory / "secret").read_bytes()


async def _faults(driver_name: DriverName, victim: Path) -> list[str]:
    driver, faults, before = make_driver(driver_name), [], _changes(victim)
    try:
        for name, records in hostile_records(str(victim)).items():
            lease = await driver.create(Sandbox(writable=("/app",)))
            try:
                await lease.restore(records, b"data")
                faults.append(f"{name}: restored")
            except OSError:
                pass
            ran = await lease.run(["sh", "-c", ATTACK])
            if b"host secret" in ran.stdout or os.listdir(victim) != ["secret"] or _changes(victim) != before:
                faults.append(f"{name}: got through")
            if not ran.stdout.startswith(b"root:x:0:0::/box"):
                faults.append(f"{name}: {ran.stdout!r} {ran.stderr!r}")
            await lease.close()
    finally:
        await driver.close()
    return faults


def faults(driver_name: DriverName = "bubblewrap") -> list[str]:
    """Restore each hostile state and run a command; return what was restored or reached."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        victim = Path(scratch)
        victim.chmod(0o777)
        (victim / "secret").write_text("host secret")
        (victim / "secret").chmod(0o666)
        return asyncio.run(_faults(driver_name, victim))
