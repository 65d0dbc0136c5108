"""Test tools for users: `play` plays one episode with given replies; the pytest plugin adds fixtures.

Names are imported on first use, so the pytest plugin takes no time until a test uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.testing.execution import PlayResult, play

__all__ = ["PlayResult", "play"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from agentrl.testing import execution

    return getattr(execution, name)
