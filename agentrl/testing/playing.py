"""`play`: one episode of an environment with replies given in advance, for the tests of an environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import CheckFailedError
from agentrl.core.records import EpisodeSpec, SeatBinding
from agentrl.environment.registry import name_of, resolve
from agentrl.journal.entries import TurnEntry
from agentrl.rollout.byte_formats import STOP_TOKEN
from agentrl.testing.execution import POLICY, execute

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest
    from agentrl.core.records import PolicyVersion, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The result of an episode."""

    reward: float
    """Summed over all agents."""
    told: tuple[str, ...]
    """Text of the new messages before each turn of the policy."""
    stop_reason: str


def play(environment: str | type, task: Task, replies: Sequence[str | Mapping[str, Any]], *, seed: int = 0) -> Played:
    """Play one episode in which the policy gives `replies` in order, for all seats.

    Args:
        environment: a class, a registered name, `module:Class` or a path.
        task: the task.
        replies: text, or a tool call as `{"name": …, "arguments": {…}}`.
        seed: seed of `ctx.rng`.

    Raises:
        CheckFailedError: the environment failed, or needed more replies than there are.
    """
    found = resolve(environment)
    remaining = [_text(reply) for reply in replies]
    asked = 0

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        nonlocal asked
        asked += 1
        if asked > len(remaining):
            raise CheckFailedError(f"the environment asked for reply {asked}, but only {len(remaining)} are given")
        return [*remaining[asked - 1].encode(), STOP_TOKEN]

    spec = EpisodeSpec(
        episode_id="e0",
        environment=name_of(found),
        task=task,
        seed=seed,
        seats={seat: SeatBinding(POLICY) for seat in found.seats},
        group_id="g0",
    )
    outcome = asyncio.run(execute(found, spec, script))
    if isinstance(outcome, str):
        raise CheckFailedError(f"{spec.environment}: {outcome}")
    header = outcome.header
    turns = [body for entry in outcome.entries if isinstance(body := entry.decode(), TurnEntry)]
    told = tuple("\n".join(str(message["content"]) for message in turn.messages) for turn in turns)
    return Played(reward=header.reward or 0.0, told=told, stop_reason=header.stop_reason or "")


def _text(reply: str | Mapping[str, Any]) -> str:
    return reply if isinstance(reply, str) else f"<tool_call>{msgspec.json.encode(dict(reply)).decode()}</tool_call>"
