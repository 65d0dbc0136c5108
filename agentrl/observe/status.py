"""Where a run stands between steps: what the loop says of itself, and `status.json`, where others read it.

Owns the record and its file. The file is a courtesy to `agentrl run view`: nothing of the run depends on it, and what
cannot be read counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from agentrl.core.files import open_regular, read_at_most
from agentrl.core.words import plural
from agentrl.observe.files import replace_file

MAX_BYTES = 1 << 20
"""Of a file that anyone may have put there."""
FILE = "status.json"
SILENT_S = 15.0
"""A status older than this is old: a run that goes on writes it every second."""
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""An integer that a float can hold, and a screen show."""
Outcome = Literal["", "finished", "stopped", "failed", "killed"]
"""How a process left a run: by itself, by Ctrl-C or SIGTERM, with an error, without a word."""
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A moment of a run."""

    phase: str
    """What the run does now, in words."""
    progress: tuple[Whole, Whole] | None = None
    """Held-out episodes that have ended, and of how many, while an evaluation runs."""
    waits: tuple[str, ...] = ()
    """Who waits for whom, in words."""
    in_flight: Whole = 0
    ready: Whole = 0
    trained: Whole = 0
    dropped: Mapping[str, Whole] = field(default_factory=dict)
    """Episodes by reason."""
    engine_busy_s: float = 0.0
    """Seconds the engine has spent in forward passes since it was started."""
    engine_share: float | None = None
    """Share of the last seconds the engine was busy; the observer fills it in."""
    wall: Seconds = 0.0
    """When, in seconds since the epoch; the observer fills it in."""
    seconds: Seconds = 0.0
    """Wall seconds since the run was started; the observer fills it in."""
    ended: bool = False
    """Whether the process has left the run."""
    outcome: Outcome = ""
    """How it left; empty until then."""


def write_status(directory: Path, status: Status) -> None:
    """Write `status.json`, whole or not at all; a full disk is left to those who cannot do without it."""
    try:
        replace_file(directory / FILE, msgspec.json.encode(status))
    except OSError:
        return


def read_status(directory: Path) -> Status | None:
    """The newest status of a run; None where there is none, or none this version reads."""
    try:
        with open_regular(directory / FILE) as file:
            return msgspec.json.decode(read_at_most(file, MAX_BYTES), type=Status)
    except (OSError, ValueError, RecursionError):
        return None


def with_engine_share(status: Status, share: float | None) -> Status:
    """The status with what the engine did lately, also in words."""
    waits = status.waits
    if share is not None and status.in_flight:
        if share >= 0.9:
            waits = (
                *waits,
                f"engine saturated: busy {share:.0%} of the time with {plural(status.in_flight, 'episode')}",
            )
        elif share < 0.5:
            waits = (*waits, f"engine waits for tools, environments or other processes: busy {share:.0%} of the time")
    return replace(status, engine_share=share, waits=waits)
