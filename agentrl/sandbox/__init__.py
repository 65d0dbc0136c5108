"""What a driver of sandboxes is written with: the port of `driver.py`, and the records of files.

A `SandboxDriver` is found by the entry point group `agentrl.sandbox_drivers`. agentrl's own drivers
are in packages/sandbox, which imports only these names. Environments use `agentrl.Sandbox`. The names are loaded on
first use, since a driver's own process needs the records alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.core.errors import InputError
    from agentrl.sandbox.driver import (
        GATEWAY_PORT,
        NAME_BYTES,
        CommandResult,
        SandboxCheck,
        SandboxDriver,
        SandboxError,
        SandboxLease,
        SandboxLimits,
        check_variables,
        work_on,
    )
    from agentrl.sandbox.files import SEARCH_PATH, FileRecord, LinkTarget, Program, contents_limit
    from agentrl.sandbox.state import is_below

_HOME = {
    **dict.fromkeys(("SEARCH_PATH", "FileRecord", "LinkTarget", "Program", "contents_limit"), "sandbox.files"),
    "InputError": "core.errors",
    "is_below": "sandbox.state",
}
"""Modules of the names that are not in `driver.py`."""

__all__ = [
    "GATEWAY_PORT",
    "NAME_BYTES",
    "SEARCH_PATH",
    "CommandResult",
    "FileRecord",
    "InputError",
    "LinkTarget",
    "Program",
    "SandboxCheck",
    "SandboxDriver",
    "SandboxError",
    "SandboxLease",
    "SandboxLimits",
    "check_variables",
    "contents_limit",
    "is_below",
    "work_on",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'agentrl.sandbox' has no attribute {name!r}")
    return getattr(import_module(f"agentrl.{_HOME.get(name, 'sandbox.driver')}"), name)
