"""The engine calls of one conversation.

Each interruption of a turn costs one more engine call: an abort, a park, the loss of the engine, the death of the
previous process.

Invariants
1. All engine calls of a turn share one seed and continue its token count, so an interrupted turn has the same tokens
   as an uninterrupted one.
2. No engine session, and so no KV-cache memory, is held after the engine's loss or while the episode is parked.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core.clock import Clock, RetryBudget
from agentrl.core.errors import VERSION_GONE, EngineLostError, EpisodeError, NoRoomError, VersionNotServedError
from agentrl.core.ids import child_depth, stable_hash64
from agentrl.core.ports import GenerateRequest, SamplingParams, generate_when_room
from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import Completion
from agentrl.journal.entries import TurnPause

if TYPE_CHECKING:
    from agentrl.core.ports import EngineSession, NewTokensCallback, Sampler
    from agentrl.core.records import EpisodeSpec, Int32Array
    from agentrl.observe.bottleneck import Activity
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.turn_entries import PartialTurn

LOST_IN_A_ROW = 8
"""Number of times in a row that a call may lose the engine, without a token in between, before it raises the error:
about two minutes in all."""

MAX_PRIORITY_TOKENS = (1 << 20) - 1
"""Largest number of sampled tokens that the priority of a call distinguishes."""
MAX_PRIORITY_DEPTH = 3
"""Largest depth of a child episode that the priority of a call distinguishes."""


class TurnSampler:
    """Samples whole turns of one conversation: owns its engine session and the turn in progress.

    Args:
        episode: the running attempt.
        seat: seat whose policy samples.
        conversation: the conversation among those of the episode, for session ids and messages.
    """

    __slots__ = (
        "_activity",
        "_conversation",
        "_episode",
        "_in_flight",
        "_kept_version",
        "_partial",
        "_pin",
        "_seat",
        "_session",
        "pauses",
        "weights_of",
    )

    def __init__(self, episode: LiveEpisode, seat: str, conversation: str) -> None:
        self._episode = episode
        self._conversation = sys.intern(conversation)  # one string for all episodes
        binding = episode.spec.seats[seat]
        self._pin = binding.pin
        self.weights_of = binding.policy if binding.pin is None else binding.pin.policy
        """Policy whose versions sample; it differs from the seat's policy if a past version of another is pinned."""
        self._activity: Activity = "endpoint" if episode.policy_settings(seat).is_external else "engine"
        self._seat = sys.intern(f"{episode.spec.environment}.{seat}")
        self._session: EngineSession | None = None
        self._kept_version: PolicyVersion | None = None
        """Version to which the next session is pinned, for a policy whose conversations keep their version."""
        self._in_flight: str | None = None
        """Request id of the running engine call."""
        self._partial: PartialTurn | None = None
        """Turn in progress."""
        self.pauses: tuple[TurnPause, ...] = ()
        """Pauses of the turn in progress, or of the last turn."""

    @property
    def _name(self) -> str:
        """The conversation, for session ids and messages."""
        return f"{self._episode.name}:{self._conversation}"

    async def sample(
        self,
        call: JournaledCall,
        context: Int32Array,
        row: int,
        opening: int,
        sampling: SamplingParams,
        sampled_before: int,
    ) -> Completion:
        """Sample one whole turn.

        Args:
            call: the turn's call.
            context: the conversation, `[T]`.
            row: number of the row in the conversation.
            opening: see `GenerateRequest`.
            sampling: sampling parameters of the turn.
            sampled_before: number of tokens that the agent has sampled in earlier turns, for the priority of the call.

        Raises:
            EngineLostError: the engine was gone for too long.
            EpisodeError: the engine returned a logprob that is not finite, or does not serve the version.
        """
        episode, services = self._episode, self._episode.services
        priority = call_priority(episode.spec, sampled_before)
        capabilities = services.engine.capabilities
        has_mask = sampling.grammar != "" or (capabilities.sampling_mask and sampling.is_filtered)
        turn = self._partial = episode.partials.turn(call, masked=has_mask)
        self.pauses = ()
        budget: RetryBudget | None = None
        completion = turn.completion(sampling, routed=capabilities.expert_routing)
        try:
            while completion is None:
                if episode.spec.episode_id in services.parking.waiting:
                    await self._wait_while_parked(turn, call)
                try:
                    request = self._request(turn, call, context, row, opening, sampling, priority)
                    self._in_flight = request.request_id
                    with episode.waiting_for(self._activity) as wait:
                        sample = await self._open().generate(request, turn.on_delta)
                        wait.count_turn(len(sample.token_ids))
                    self._keep_version(sample)
                    if turn.pieces or sample.finish_reason == "abort":
                        turn.call_returned(sample)
                        completion = turn.completion(sampling, routed=capabilities.expert_routing)
                    else:
                        completion = sample
                except NoRoomError:
                    self._in_flight = None
                    if episode.spec.episode_id not in services.parking.waiting:
                        await self._wait_for_room(turn)
                except VersionNotServedError as error:
                    raise self._version_gone(error) from error
                except EngineLostError as error:
                    self._in_flight = None
                    budget = await self._on_lost_engine(error, turn, budget)
                finally:
                    self._in_flight = None
        except BaseException:
            self.close()
            raise
        self._partial = None
        if len(turn.pieces) > 1:
            episode.metric("turns/interrupted", 1.0)
        self._check_finite(completion, call)
        return completion

    def _check_finite(self, completion: Completion, call: JournaledCall) -> None:
        """Refuse logprobs that are not finite.

        Raises:
            EpisodeError: a logprob is NaN or infinite.
        """
        logprobs = completion.logprobs
        # The dot product is five times faster than `isfinite`.
        if not (math.isfinite(logprobs.dot(logprobs)) or np.isfinite(logprobs).all()):
            raise EpisodeError(
                f"the engine returned a non-finite logprob for {self._name}, call {call.call_id}",
                reason="nonfinite_logprob",
            )

    async def _wait_for_room(self, turn: PartialTurn) -> None:
        with self._episode.time_limit_paused(), self._pause(turn, "no_room"), self._episode.waiting_for("memory"):
            await self._open().wait_for_room()
        self._episode.metric("no_room_s", self.pauses[-1].seconds)

    async def _on_lost_engine(
        self, error: EngineLostError, turn: PartialTurn, budget: RetryBudget | None
    ) -> RetryBudget:
        """Wait before the next call, after a call lost the engine.

        Raises:
            EngineLostError: `error`, if the engine was lost too often.
        """
        self._session = None
        budget = budget or RetryBudget(LOST_IN_A_ROW)
        if turn.lost():
            self._keep_version(turn.pieces[-1])
            budget.achieved()
        wait = budget.lost()
        if wait is None:
            raise error
        with (
            self._episode.time_limit_paused(),
            self._pause(turn, "engine_lost"),
            self._episode.waiting_for("lost_engine"),
        ):
            await self._episode.services.clock.sleep(wait)
        return budget

    @contextmanager
    def _pause(self, turn: PartialTurn, why: str) -> Iterator[None]:
        """Record a pause of the turn, with its reason, around a wait."""
        clock = self._episode.services.clock
        since = clock.monotonic()
        yield
        self.pauses = (*self.pauses, TurnPause(turn.sampled, clock.monotonic() - since, why))

    async def _wait_while_parked(self, turn: PartialTurn, call: JournaledCall) -> None:
        """Release the engine's resources, flush the sampled tokens, and wait until the episode is unparked."""
        with self._pause(turn, "parked"), self._episode.waiting_for("parked"):
            self.close()
            await self._episode.partials.flush()
            await self._episode.services.parking.wait_while_parked(self._episode.spec.episode_id, call.call_id)

    def _request(
        self,
        turn: PartialTurn,
        call: JournaledCall,
        context: Int32Array,
        row: int,
        opening: int,
        sampling: SamplingParams,
        priority: int,
    ) -> GenerateRequest:
        """Make the engine call for the tokens that the turn still lacks."""
        num_sampled = turn.sampled
        if num_sampled:
            context = np.concatenate([context, *(piece.token_ids for piece in turn.pieces)])
            sampling = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - num_sampled)
        spec = self._episode.spec
        return GenerateRequest(
            request_id=f"{spec.episode_id}.{spec.attempt}.{call.call_id}",
            token_ids=context,
            sampling=sampling,
            seed=stable_hash64(
                spec.seed, spec.attempt, call.call_id
            ),  # the same seed on every execution of the attempt
            sampled_before=num_sampled,
            priority=priority,
            seat=self._seat,
            opening=opening,
            row=row,
        )

    def _version_gone(self, error: VersionNotServedError) -> EpisodeError:
        """End an episode that needs a version which the engine no longer serves; returns its error.

        The episode restarts if only this conversation was held to the version. If its spec names the version
        (evaluations, opponents, deterministic runs), every attempt needs it, and the episode is dropped.
        """
        why = f"its episode is pinned to {self._pin}"
        if self._pin is None:
            why = (
                f"it was sampled by {self._kept_version} and must stay on it (ctx.branch, or engine.refresh = "
                "'episode')"
            )
        return EpisodeError(
            f"the conversation of {self._name} cannot continue: {why}, which the engine has lost ({error})",
            reason=VERSION_GONE,
            begin_again=self._pin is None,
        )

    def _open(self) -> EngineSession:
        if self._session is None:
            engine = self._episode.services.engine
            pin = self._pin or self._kept_version
            self._session = engine.open(self._name, self.weights_of, pin=pin)
        return self._session

    def keep_version(self, version: PolicyVersion) -> None:
        """Sample all later turns with a version, which the engine serves."""
        if self._pin is None and self._kept_version != version:
            self._kept_version = version
            if self._session is not None:
                try:
                    self._session.hold(version)
                except (VersionNotServedError, EngineLostError):
                    self._session.close()
                    self._session = None  # the next call opens it again, and handles the error

    def _keep_version(self, completion: Completion) -> None:
        """Note the version of the conversation, if its policy keeps versions. Recorded turns do not count: no version
        of an earlier attempt of the run is served."""
        keeps_version = self._episode.services.engine.capabilities.keeps_version
        if self._kept_version is None and completion.spans and self.weights_of in keeps_version:
            self._kept_version = completion.spans[0].version

    def suspend(self) -> None:
        """Release the engine's resources because the episode is parked. A call in flight is cut, and releases them when
        it returns."""
        if self._in_flight is not None:
            self._episode.services.engine.abort(self._in_flight)
        else:
            self.close()

    def close(self) -> None:
        """Release KV, slot and lease. Idempotent."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def running_versions(self) -> Iterator[PolicyVersion]:
        """Yield the versions that sampled the turn in progress, as far as its calls have returned."""
        for piece in () if self._partial is None else self._partial.pieces:
            for span in piece.spans:
                yield span.version


def call_priority(spec: EpisodeSpec, num_sampled: int) -> int:
    """Return the scheduling priority of an agent's call; lower runs first.

    The order is by deadline; then by depth, parents that still have children to spawn before children; then by tokens
    sampled so far, most first: if lengths are heavy-tailed, the episode that has sampled most has most left. Siblings
    are ordered like unrelated episodes.
    """
    depth = min(child_depth(spec.episode_id), MAX_PRIORITY_DEPTH)
    tokens_left = MAX_PRIORITY_TOKENS - min(num_sampled, MAX_PRIORITY_TOKENS)
    return (spec.deadline * (MAX_PRIORITY_DEPTH + 1) + depth) * (MAX_PRIORITY_TOKENS + 1) + tokens_left


async def call_engine(
    engine: Sampler,
    policy: str,
    request: GenerateRequest,
    clock: Clock,
    *,
    pin: PolicyVersion | None = None,
    watch: Callable[[], NewTokensCallback | None] | None = None,
) -> Completion:
    """Make one call in a session of its own; wait while the engine is unavailable.

    Args:
        engine: the engine.
        policy: policy that samples.
        request: the call.
        clock: waits.
        pin: version that samples; None: the current one.
        watch: makes, for each attempt, what receives the tokens; the call may then be aborted. None: an aborted call
            is made again.

    Raises:
        VersionNotServedError: the engine does not serve the version `pin`.
        EngineLostError: the engine was lost `LOST_IN_A_ROW` times in a row.
    """
    budget = RetryBudget(LOST_IN_A_ROW)
    while True:
        try:
            session = engine.open(request.request_id, policy, pin=pin)
            try:
                completion = await generate_when_room(session, request, None if watch is None else watch())
            finally:
                session.close()
            if completion.finish_reason == "abort" and watch is None:
                raise EngineLostError(f"{request.request_id}: the call was aborted")
            return completion
        except EngineLostError:
            wait = budget.lost()
            if wait is None:
                raise
            await clock.sleep(wait)
