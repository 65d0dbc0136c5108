"""How an execution of an episode over its journal went: a record, made by `app.replays`."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["identical", "departed", "stopped", "not_replayable"]


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """How an execution over a journal went."""

    episode: str
    attempt: int
    outcome: Outcome
    calls: int
    """Recorded calls that came back as they were."""
    recorded: int
    """How many the journal holds."""
    call: str | None = None
    """Where it departed, or stopped."""
    text: str = ""
    """What happened there."""
    acts: list[tuple[str, str]] = []
    """Each call that came back, in words."""
    before: dict[str, float | None] = {}
    """Of a rescore: the recorded reward of each agent."""
    after: dict[str, float | None] = {}
    """Of a rescore: the reward that the program gives it now."""
