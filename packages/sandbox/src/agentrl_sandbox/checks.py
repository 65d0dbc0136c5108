"""Checks of this machine's isolation: each runs a command that would break a promise without a sandbox."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.sandbox import CommandResult, SandboxCheck, SandboxError, SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentrl.sandbox import SandboxDriver

_SMALL = SandboxLimits(memory_mb=64, seconds=10, disk_mb=8, inodes=200, processes=16, output_bytes=4096)


@dataclass(frozen=True, slots=True)
class _Promise:
    name: str
    script: str
    """For /bin/sh."""
    holds: Callable[[CommandResult], bool]
    result: str
    seconds: float = 10.0
    program: str = "sh"
    """Program that the script needs; the check is skipped without it."""
    container_fix: str = ""
    """Remedy if a container program does not keep the promise."""


def _fails(ran: CommandResult) -> bool:
    return not ran.ok


def _is_silent(ran: CommandResult) -> bool:
    return not ran.stdout


_MEASURED = (
    "a container program's files are on this machine's disk, measured each second; set TMPDIR to a small file system, "
    "or use bubblewrap"
)
_PROMISES = (
    _Promise("files", "cat /etc/shadow /root/.bashrc; ls /home /root /var", _is_silent, "only /usr and its own"),
    _Promise(
        "environment",
        "env | grep -vE '^(PATH|HOME|LANG|PWD|OLDPWD|SHLVL|HOSTNAME|TERM|container|_)='",
        _is_silent,
        "empty",
    ),
    _Promise("network", "grep : /proc/net/dev | grep -v lo:", _is_silent, "a private loopback interface"),
    _Promise("other processes", "ls /proc | grep '^[0-9]' | sed -n '8,$p'", _is_silent, "invisible"),
    _Promise("memory", "head -c 200000000 /dev/zero | tail -c 190000000 | cut -c 1-9", _is_silent, "limited"),
    _Promise(
        "memory of all processes",
        "for i in 1 2 3; do (head -c 30000000 /dev/zero; sleep 3) | tail -c 29000000 > /dev/null & done; wait",
        lambda ran: ran.killed == "memory",
        "limited, and named as the reason",
        container_fix="a container program ends one process at the limit and does not say so; use bubblewrap",
    ),
    _Promise("process count", "for i in $(seq 20); do sleep 2 & done", _fails, "limited"),
    _Promise(
        "disk",
        "for i in 1 2 3 4; do head -c 5000000 /dev/zero > /box/$i || exit 1; done; echo written",
        _is_silent,
        "limited",
        container_fix=_MEASURED,
    ),
    _Promise(
        "file count",
        "for i in $(seq 400); do : > /box/$i || exit 1; done; echo written",
        _is_silent,
        "limited",
        container_fix=_MEASURED,
    ),
    _Promise("output", "head -c 100000 /dev/zero", lambda ran: ran.truncated, "limited"),
    _Promise("time", "trap '' TERM; sleep 30 & sleep 30", lambda ran: ran.killed == "time", "limited", seconds=0.5),
    _Promise(
        "system calls",
        "unshare --user true",
        _fails,
        "filtered",
        program="unshare",
        container_fix="give the container program a stricter seccomp profile (seccomp_profile in containers.conf)",
    ),
)


async def check_driver(driver: SandboxDriver, name: str, find_program: Callable[[], str | None]) -> list[SandboxCheck]:
    """Check every promise on this machine; the first line names the isolation, or the reason for its absence."""
    try:
        ran = await (await driver.create(_SMALL)).run(["true"])
    except SandboxError as error:
        return [SandboxCheck("sandboxes", False, str(error), _remedy(name))]
    if not ran.ok:
        return [SandboxCheck("sandboxes", False, f"`true` failed: {_text(ran)}", _remedy(name))]
    checks = [SandboxCheck("sandboxes", True, f"{name} at {find_program()}")]
    for promise in _PROMISES:
        if shutil.which(promise.program, path="/usr/bin:/bin") is None:
            continue
        lease = await driver.create(_SMALL)
        ran = await lease.run(["sh", "-c", promise.script], seconds=promise.seconds)
        holds = promise.holds(ran)
        fix = "" if holds or name == "bubblewrap" else promise.container_fix
        checks.append(SandboxCheck(promise.name, holds, promise.result if holds else f"not held: {_text(ran)}", fix))
        await lease.close()
    return checks


def _text(ran: CommandResult) -> str:
    """Describe a command's end in one line."""
    output = (ran.stderr or ran.stdout).decode("utf-8", "replace").strip()
    return output[:200] or (f"ended by the limit on {ran.killed}" if ran.killed else f"exit status {ran.status}")


def _remedy(name: str) -> str:
    """Name the setting of this machine that most likely refuses sandboxes."""
    if name != "bubblewrap":
        return f"`{name} info` must work for this user, with limits on memory and processes (cgroups)"
    settings = {
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
        "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
            "1",
            "load the AppArmor profile bwrap-userns-restrict, or sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    }
    for path, (value, fix) in settings.items():
        if Path(path).exists() and Path(path).read_text().strip() == value:
            return fix
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "this is a container: start it with a seccomp profile that allows namespaces and mounts"
    return "agentrl needs a bubblewrap with --bind-fd (0.10 or newer) and a kernel that lets users make user namespaces"
