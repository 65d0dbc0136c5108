"""Proposals as the run remembers them: what an episode made, and what was known of it then."""

from __future__ import annotations

from typing import NamedTuple


class Proposal(NamedTuple):
    """A task that an episode thought up, as `ctx.remember` was told of it."""

    number: int
    """Its place among all the run remembers, in the order they were told."""
    episode_id: str
    attempt: int
    call_id: str
    environment: str
    key: str
    """Digest of what is the same in equal proposals, as the environment normalises them."""
    structure: str
    """What like proposals have in common, as the environment says; empty where it says nothing."""

    @property
    def made_by(self) -> tuple[str, int, str]:
        """The call that made it: told again, it is the same proposal."""
        return self.episode_id, self.attempt, self.call_id


class Recollection(NamedTuple):
    """What the run remembered when a proposal was made."""

    times: int
    """How often the same one had been made; 0: it is new."""
    share: float
    """Of the newest remembered proposals (100 at most) of its environment, how many had the same structure."""
