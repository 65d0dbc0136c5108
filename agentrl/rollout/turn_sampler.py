"""An agent's calls of the engine: one turn is as many of them as its interruptions make it.

Owns: the engine session, the call in flight, and the loop that goes on after a call was cut: by an abort, by a park,
by the engine's loss, by the death of the process before. Does not know messages or entries.
Invariants: all calls of a turn have one seed and count their tokens through, so that the turn is what it would have
been; after the engine's loss, and while the episode is parked, no session is held; a call begins when its conversation
has a place in the engine's memory (`room.py`).
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core.budget import RetryBudget
from agentrl.core.errors import EngineLostError, EpisodeError
from agentrl.core.ports import GenerateRequest
from agentrl.journal.entries import Pause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.core.ports import EngineSession, SamplingParams
    from agentrl.core.records import Completion, EpisodeSpec, Int32Array, SeatBinding
    from agentrl.rollout.calls import Call
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.partials import PartialTurn
    from agentrl.rollout.room import Place

LOST_IN_A_ROW = 8
"""How often in a row a call may find the engine gone, without a token in between, before the error is raised: about two
minutes in all."""

MOST_WORK = (1 << 20) - 1
"""Tokens; who sampled more ranks with them."""
DEEPEST = 3
"""Children of deeper episodes rank with them."""


def rank(spec: EpisodeSpec, sampled: int) -> int:
    """The priority of an agent's call among those that wait; lower is served first.

    By deadline; then those with children to come before their children; then by the tokens sampled so far, most first:
    where some episodes are very long, who has worked most has most left. It tells no sibling from any other episode.
    """
    depth = min(spec.episode_id.count("~"), DEEPEST)
    return (spec.deadline * (DEEPEST + 1) + depth) * (MOST_WORK + 1) + MOST_WORK - min(sampled, MOST_WORK)


class TurnSampler:
    """Samples the turns of one agent; `name` is the agent's, for messages, `place` its conversation's in the engine's
    memory, None where that is not counted."""

    __slots__ = ("_agent", "_binding", "_episode", "_in_flight", "_place", "_session", "pauses", "turn", "weights_of")

    def __init__(self, episode: LiveEpisode, binding: SeatBinding, name: str, place: Place | None) -> None:
        self._episode = episode
        self._binding = binding
        self._agent = name
        self._place = place
        self.weights_of = binding.policy if binding.pin is None else binding.pin.policy
        """The policy whose versions sample: another than the seat's where a past version of it is pinned."""
        self._session: EngineSession | None = None
        self._in_flight: str | None = None
        self.turn: PartialTurn | None = None
        """The turn that is being sampled."""
        self.pauses: tuple[Pause, ...] = ()
        """Of the turn that is being sampled, or was last."""

    async def sample(self, call: Call, context: Int32Array, sampling: SamplingParams, priority: int) -> Completion:
        """One turn after `context`, `[T]`, whole; `priority` of its calls, see `rank`.

        Raises:
            EngineLostError: the engine was gone for too long.
            EpisodeError: the engine returned a logprob that is not finite.
        """
        episode, place = self._episode, self._place
        services = episode.services
        capabilities = services.engine.capabilities
        masked, routed = capabilities.sampling_mask and sampling.is_filtered, capabilities.expert_routing
        turn = self.turn = episode.partials.turn(call, self.weights_of, masked=masked)
        self.pauses = ()
        budget: RetryBudget | None = None
        completion = turn.completion(sampling, routed=routed)
        try:
            while completion is None:
                if services.parking.is_parked(episode.spec.episode_id):
                    await self._passage(turn, call)
                if place is not None and not place.take(len(context) + turn.sampled, context):
                    await self._wait_for_place(turn, place, priority)
                    continue  # it may have been parked meanwhile
                try:
                    request = self._request(turn, call, context, sampling, priority)
                    self._in_flight = request.request_id
                    sampled = await self._open().generate(request, turn.on_delta)
                    if turn.pieces or sampled.finish_reason == "abort":
                        turn.ended(sampled)
                        completion = turn.completion(sampling, routed=routed)
                    else:
                        completion = sampled
                except EngineLostError as error:
                    self._in_flight = None
                    budget = await self._lost(error, turn, budget)
                finally:
                    self._in_flight = None
        except BaseException:
            self._leave_place()
            raise
        if place is not None:
            place.rest(len(context) + len(completion.token_ids))
        self.turn = None
        if len(turn.pieces) > 1:
            episode.metric("turns/interrupted", 1.0)
        if not np.isfinite(completion.logprobs).all():
            raise EpisodeError(
                f"the engine returned a non-finite logprob for {self._name}, call {call.call_id}",
                reason="nonfinite_logprob",
            )
        return completion

    @property
    def _name(self) -> str:
        return f"{self._episode.name}:{self._agent}"

    async def _wait_for_place(self, turn: PartialTurn, place: Place, priority: int) -> None:
        with self._episode.standing_still(), self._pausing(turn, "no_room"):
            await place.wait(priority)
        self._episode.metric("no_room_s", self.pauses[-1].seconds)

    async def _lost(self, error: EngineLostError, turn: PartialTurn, budget: RetryBudget | None) -> RetryBudget:
        """The engine was lost in the middle of a call: wait before the next.

        Raises:
            EngineLostError: `error`, when it was lost too often.
        """
        self._session = None
        self._leave_place()
        budget = budget or RetryBudget(LOST_IN_A_ROW)
        if turn.lost():
            budget.achieved()
        wait = budget.lost()
        if wait is None:
            raise error
        with self._episode.standing_still(), self._pausing(turn, "engine_lost"):
            await self._episode.services.clock.sleep(wait)
        return budget

    def restart(self) -> None:
        """The conversation begins anew: nothing of it is worth keeping."""
        self._leave_place()

    def suspend(self) -> None:
        """Give the engine back what it holds; a call in flight is cut, and gives it back when it returns."""
        if self._in_flight is not None:
            self._episode.services.engine.abort(self._in_flight)
        else:
            self.close()

    def close(self) -> None:
        """Give KV, slot and lease back. Idempotent."""
        self._leave_place()
        if self._session is not None:
            self._session.close()
            self._session = None

    @contextmanager
    def _pausing(self, turn: PartialTurn, why: str) -> Iterator[None]:
        """Within, the turn stands still."""
        clock = self._episode.services.clock
        since = clock.monotonic()
        yield
        self.pauses = (*self.pauses, Pause(turn.sampled, clock.monotonic() - since, why))

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.leave()

    async def _passage(self, turn: PartialTurn, call: Call) -> None:
        """While the episode is parked: hold nothing, have everything on disk, wait."""
        with self._pausing(turn, "parked"):
            self.close()
            await self._episode.partials.flush()
            await self._episode.services.parking.passage(self._episode.spec.episode_id, call.call_id)

    def _request(
        self, turn: PartialTurn, call: Call, context: Int32Array, sampling: SamplingParams, priority: int
    ) -> GenerateRequest:
        """One engine call, for what the turn lacks."""
        sampled = turn.sampled
        if sampled:
            context = np.concatenate([context, *(piece.token_ids for piece in turn.pieces)])
            sampling = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - sampled)
        episode = self._episode
        return GenerateRequest(
            request_id=f"{episode.name}.{call.call_id}",
            token_ids=context,
            sampling=sampling,
            seed=episode.sampling_seed(call.call_id),
            sampled_before=sampled,
            priority=priority,
        )

    def _open(self) -> EngineSession:
        if self._session is None:
            engine = self._episode.services.engine
            self._session = engine.open(self._name, self.weights_of, pin=self._binding.pin)
        return self._session
