"""One agent of a running episode: the engine samples its turns, or the journal replays them.

`LiveAgent.act` handles a turn: it turns new messages into tokens (`AgentTokenRows`), gets the call's id in the journal
and, if the journal does not hold the reply, samples it with the engine. Each interruption costs one more engine call:
an abort, a park, the loss of the engine, the death of the previous process.

Invariants
1. A turn is in the journal before the environment sees it, with the tokens exactly as they were sampled.
2. All engine calls of a turn share one seed and continue its token count, so an interrupted turn has the same tokens
   as an uninterrupted one.
3. No engine session is held after the engine's loss or while the episode is parked. A call begins once its
   conversation holds a reservation in the KV-cache budget (`kv_budget.py`).
"""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from agentrl.core.clock import RetryBudget
from agentrl.core.errors import (
    VERSION_GONE,
    EngineError,
    EngineLostError,
    EnvironmentDefinitionError,
    EpisodeError,
    RewardError,
    VersionNotServedError,
)
from agentrl.core.ids import opening_digest, stable_hash64
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import (
    REWARD,
    Completion,
    Message,
    PolicyVersion,
    SampledTurn,
    ToolSpec,
    TrajectoryHeader,
    Turn,
    VersionSpan,
)
from agentrl.core.text import agent_name, plural, valid_unicode
from agentrl.environment.context import Agent, LimitReachedError
from agentrl.environment.rewards import check_reward_name, finite_reward
from agentrl.journal.entries import RewardEntry, TurnEntry, TurnPause, TurnVersionSpan, gigpo_state_hash, request_hash
from agentrl.observe.metrics import DEMONSTRATED, GATE_PASSED, GATE_REFUSED
from agentrl.rollout.branches import shortened_repr
from agentrl.rollout.call_journal import CallExecution, encode, encode_arguments
from agentrl.rollout.chat.byte_formats import JsonChatFormat
from agentrl.rollout.chat.template_checks import applicable_rewrite_causes
from agentrl.rollout.turn_entries import completion_from_entry, decode_message, encode_message

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, EngineSession
    from agentrl.core.records import EpisodeSpec, FinishReason, Int32Array
    from agentrl.rollout.call_journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.kv_budget import Reservation
    from agentrl.rollout.turn_entries import PartialTurn

CHARACTERS_PER_TOKEN = 64
"""Maximum characters per token of context: longer messages are refused without tokenising, since no tokenizer packs
more text than this into a token."""

LOST_IN_A_ROW = 8
"""Number of times in a row that a call may lose the engine, without a token in between, before it raises the error:
about two minutes in all."""

MOST_WORK = (1 << 20) - 1
"""Largest number of sampled tokens that the priority of a call distinguishes."""
DEEPEST = 3
"""Largest depth of a child episode that the priority of a call distinguishes."""


class TurnSampler:
    """Samples whole turns of one conversation: owns its engine session, its KV reservation, and the turn in progress.

    Args:
        episode: the running attempt.
        seat: seat whose policy samples.
        index: number of the agent within its seat.
    """

    __slots__ = (
        "_episode",
        "_in_flight",
        "_kept_version",
        "_partial",
        "_reservation",
        "_sampled",
        "_session",
        "_settings",
        "_weights_of",
        "index",
        "pauses",
        "policy",
        "seat",
    )

    def __init__(self, episode: LiveEpisode, seat: str, index: int) -> None:
        self.seat = seat
        self.index = index
        self._episode = episode
        binding = episode.spec.seats[seat]
        self.policy = binding.policy
        self._weights_of = binding.policy if binding.pin is None else binding.pin.policy
        """Policy whose versions sample; it differs from the seat's policy if a past version of another is pinned."""
        self._settings = episode.policy_settings(seat)
        kv_budget = episode.services.kv_budget
        self._reservation: Reservation | None = None
        """KV reservation; None if the engine reports no KV budget, or if another engine than the run's samples."""
        if kv_budget.is_bounded and not self._settings.is_external:
            kind = (episode.spec.environment, seat)
            self._reservation = kv_budget.reservation(kind, weights=(binding.policy, binding.pin))
        self._session: EngineSession | None = None
        self._kept_version: PolicyVersion | None = None
        """Version to which the next session is pinned, for a policy whose conversations keep their version."""
        self._in_flight: str | None = None
        """Request id of the running engine call."""
        self._partial: PartialTurn | None = None
        """Turn in progress."""
        self.pauses: tuple[TurnPause, ...] = ()
        """Pauses of the turn in progress, or of the last turn."""
        self._sampled = 0
        """Number of tokens sampled so far, which determines the priority of a call."""

    async def sample(
        self, call: JournaledCall, context: Int32Array, opening: int, sampling: SamplingParams
    ) -> Completion:
        """Sample one whole turn after `context`, `[T]`, of a conversation with this `GenerateRequest.opening`.

        Raises:
            EngineLostError: the engine was gone for too long.
            EpisodeError: the engine returned a logprob that is not finite, or does not serve the version.
        """
        episode, services, reservation = self._episode, self._episode.services, self._reservation
        priority = call_priority(episode.spec, self._sampled)
        capabilities = services.engine.capabilities
        masked, routed = capabilities.sampling_mask and sampling.is_filtered, capabilities.expert_routing
        turn = self._partial = episode.partials.turn(call, self._weights_of, masked=masked)
        self.pauses = ()
        budget: RetryBudget | None = None
        completion = turn.completion(sampling, routed=routed) if turn.pieces else None
        try:
            while completion is None:
                if episode.spec.episode_id in services.parking.waiting:
                    await self._wait_while_parked(turn, call)
                if reservation is not None and not reservation.reserve(len(context) + turn.sampled, context):
                    await self._wait_for_kv(turn, reservation, priority)
                    continue  # the episode may have been parked in the meantime
                try:
                    request = self._request(turn, call, context, opening, sampling, priority)
                    self._in_flight = request.request_id
                    sampled = await self._open().generate(request, turn.on_delta)
                    self._keep_version(sampled)
                    if turn.pieces or sampled.finish_reason == "abort":
                        turn.call_returned(sampled)
                        completion = turn.completion(sampling, routed=routed)
                    else:
                        completion = sampled
                except VersionNotServedError as error:
                    raise self._version_gone(error) from error
                except EngineLostError as error:
                    self._in_flight = None
                    budget = await self._lost(error, turn, budget)
                finally:
                    self._in_flight = None
        except BaseException:
            self._release_kv()
            raise
        if reservation is not None:
            reservation.idle(len(context) + len(completion.token_ids))
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

    @property
    def _name(self) -> str:
        """Episode, attempt, seat and index, for messages and session ids."""
        return f"{self._episode.name}:{self.seat}.{self.index}"

    async def _wait_for_kv(self, turn: PartialTurn, reservation: Reservation, priority: int) -> None:
        with self._episode.time_limit_paused(), self._pausing(turn, "no_room"):
            await reservation.wait(priority)
        self._episode.metric("no_room_s", self.pauses[-1].seconds)

    async def _lost(self, error: EngineLostError, turn: PartialTurn, budget: RetryBudget | None) -> RetryBudget:
        """Wait before the next call, after a call lost the engine.

        Raises:
            EngineLostError: `error`, if the engine was lost too often.
        """
        self._session = None
        self._release_kv()
        budget = budget or RetryBudget(LOST_IN_A_ROW)
        if turn.lost():
            self._keep_version(turn.pieces[-1])
            budget.achieved()
        wait = budget.lost()
        if wait is None:
            raise error
        with self._episode.time_limit_paused(), self._pausing(turn, "engine_lost"):
            await self._episode.services.clock.sleep(wait)
        return budget

    @contextmanager
    def _pausing(self, turn: PartialTurn, why: str) -> Iterator[None]:
        """Record a pause of the turn, with its reason, around a wait."""
        clock = self._episode.services.clock
        since = clock.monotonic()
        yield
        self.pauses = (*self.pauses, TurnPause(turn.sampled, clock.monotonic() - since, why))

    def _release_kv(self) -> None:
        if self._reservation is not None:
            self._reservation.release()

    async def _wait_while_parked(self, turn: PartialTurn, call: JournaledCall) -> None:
        """Release the engine's resources, flush the sampled tokens, and wait until the episode is unparked."""
        with self._pausing(turn, "parked"):
            self.close()
            await self._episode.partials.flush()
            await self._episode.services.parking.wait_while_parked(self._episode.spec.episode_id, call.call_id)

    def _request(
        self,
        turn: PartialTurn,
        call: JournaledCall,
        context: Int32Array,
        opening: int,
        sampling: SamplingParams,
        priority: int,
    ) -> GenerateRequest:
        """Make the engine call for the tokens that the turn still lacks."""
        sampled = turn.sampled
        if sampled:
            context = np.concatenate([context, *(piece.token_ids for piece in turn.pieces)])
            sampling = dataclasses.replace(sampling, max_tokens=sampling.max_tokens - sampled)
        spec = self._episode.spec
        return GenerateRequest(
            request_id=f"{spec.episode_id}.{spec.attempt}.{call.call_id}",
            token_ids=context,
            sampling=sampling,
            seed=stable_hash64(
                spec.seed, spec.attempt, call.call_id
            ),  # the same seed on every execution of the attempt
            sampled_before=sampled,
            priority=priority,
            opening=opening,
        )

    def _version_gone(self, error: VersionNotServedError) -> EpisodeError:
        """End an episode that needs a version which the engine no longer serves; returns its error.

        The episode restarts if only this conversation was held to the version. If its spec names the version
        (evaluations, opponents, deterministic runs), every attempt needs it, and the episode is dropped.
        """
        pin = self._episode.spec.seats[self.seat].pin
        why = f"its episode is pinned to {pin}"
        if pin is None:
            why = f"it was sampled by {self._kept_version} and must stay on it (engine.refresh = 'episode')"
        gone = EpisodeError(
            f"the conversation of {self._name} cannot continue: {why}, which the engine has lost ({error})",
            reason=VERSION_GONE,
            begin_again=pin is None,
        )
        self._episode.journal.fail(gone)  # a program that catches the error must not turn it into a reward
        return gone

    def _open(self) -> EngineSession:
        if self._session is None:
            engine = self._episode.services.engine
            pin = self._episode.spec.seats[self.seat].pin or self._kept_version
            self._session = engine.open(self._name, self._weights_of, pin=pin)
        return self._session

    def _keep_version(self, sampled: Completion) -> None:
        """Note the version of the conversation, if its policy keeps versions. Recorded turns do not count: no version
        of an earlier attempt of the run is served."""
        keeps_version = self._episode.services.engine.capabilities.keeps_version
        if self._kept_version is None and sampled.spans and self._weights_of in keeps_version:
            self._kept_version = sampled.spans[0].version

    def suspend(self) -> None:
        """Release the engine's resources because the episode is parked. A call in flight is cut, and releases them when
        it returns."""
        if self._in_flight is not None:
            self._episode.services.engine.abort(self._in_flight)
        else:
            self.close()

    def close(self) -> None:
        """Release KV, slot and lease. Idempotent."""
        self._release_kv()
        if self._session is not None:
            self._session.close()
            self._session = None

    def running_versions(self) -> Iterator[PolicyVersion]:
        """Yield the versions that sampled the turn in progress, as far as its calls have returned."""
        for piece in () if self._partial is None else self._partial.pieces:
            for span in piece.spans:
                yield span.version


class LiveAgent(TurnSampler, Agent):
    """One conversation, sampled by an engine and written to the journal."""

    __slots__ = (
        "_messages",
        "_named_rewards",
        "_number",
        "_pending",
        "_rows",
        "_turn_rewards",
        "_turn_states",
        "_turns",
        "counts",
        "rewards",
    )

    def __init__(self, episode: LiveEpisode, seat: str, index: int, tools: Sequence[ToolSpec]) -> None:
        super().__init__(episode, seat, index)
        self.rewards: tuple[float, ...] = ()
        self.counts: dict[str, float] = {}
        self._rows = AgentTokenRows(self._settings.chat_format, tools)
        self._turns: list[Turn] = []
        self._turn_rewards: dict[int, float] | None = None
        self._turn_states = b""
        """See `TrajectoryHeader.turn_states`."""
        self._named_rewards: dict[str, float] | None = None
        self._messages: list[Message] = []
        self._pending: tuple[Message, ...] = ()
        self._number = len(episode.agents)
        """Index in `LiveEpisode.agents`."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The agent's turns so far."""
        return self._turns

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._messages

    async def act(
        self,
        *messages: Message,
        max_tokens: int | None = None,
        reply: str | None = None,
        state: str | None = None,
    ) -> Turn:
        """Sample a turn, take the given reply for one, or recall it from the journal."""
        services = self._episode.services
        limits = self._settings.limits
        if len(self._turns) >= limits.max_turns:
            raise LimitReachedError(
                f"agent {self.seat!r} has used its {plural(limits.max_turns, 'turn')}", stop_reason="max_turns"
            )
        messages, self._pending = tuple(map(_valid, (*self._pending, *messages))), ()
        journal = self._episode.journal
        if not journal.is_new:
            messages = tuple(map(decode_message, journal.fork_edits())) or messages
        sampling = self._sampling(max_tokens if reply is None else 1)
        state, given = _given(reply, state)
        asked = request_hash(
            encode((self.seat, self.index)),
            sampling.max_tokens.to_bytes(4, "little"),
            *self._rows.question(messages),
            *given,
        )
        known = None if journal.is_new else journal.peek(asked)
        if isinstance(known, TurnEntry):
            context = known.context_ids
            self._rows.ask_again(context, messages, known.row)
        elif known is not None:  # a recorded call fitted then; a context limit lowered since bounds only new calls
            context = self._rows.ask(messages)
        else:
            context = self._ask(messages, limits.max_context)
        before = self._rows.before
        call = journal.open(asked, partial(_described, agent_name(self.seat, self.index), messages))
        if call.waits:
            await journal.reach(call)
        recorded = None if call.recorded is None else journal.recall(call, TurnEntry)
        if recorded is not None:
            completion = completion_from_entry(recorded)
        else:
            started = services.clock.monotonic()
            if journal.is_over_time:
                journal.refuse_for_time(call)
            # The time limit pauses while the run's engine samples, but not while a bot or an endpoint does.
            limit = None if self._settings.is_external else self._episode.limit
            try:
                with CallExecution(journal, call, "a turn", limit):
                    completion = await self.sample(call, self._rows.context(), self._rows.opening, sampling)
                    if reply is not None:
                        completion = self._demonstrated(valid_unicode(reply), completion)
            except EngineError as error:
                journal.fail(error)
                raise
            seconds = services.clock.monotonic() - started
            self._write(
                call,
                self.entry(messages, self._rows.row, context, before, completion, seconds, self.pauses, state),
            )
        if reply is not None:
            self._episode.metric(DEMONSTRATED, 1.0, self)
        return self._answered(call, messages, completion, completion.token_ids.tolist(), state)

    def _demonstrated(self, reply: str, sampled: Completion) -> Completion:
        """Make the completion of a given reply; it replaces the one token of `sampled`, which shows the version that
        acts.

        Raises:
            EpisodeError: nobody could train on it.
            LimitReachedError: it is longer than the context.
        """
        settings = self._settings
        if settings.is_external or settings.sampling.is_filtered or sampled.expert_routing is not None:
            raise EpisodeError(
                f"{self._name}: a demonstrated reply needs a trained policy without top_k, top_p and min_p, which "
                "could exclude some of its tokens, and without engine.capture_routing",
                reason="environment_error",
            )
        chat_format = settings.chat_format
        written, stop = chat_format.encode(reply), chat_format.stop_token_ids
        tokens = np.array(written if written[-1:] and written[-1] in stop else [*written, stop[0]], np.int32)
        if len(self._rows) + len(tokens) > settings.limits.max_context:
            self._full(len(self._rows) + len(tokens))
        self.close()  # close the session, because its KV cache contains the sampled token
        return Completion(
            token_ids=tokens,
            logprobs=np.zeros(len(tokens), np.float32),
            finish_reason="stop",
            spans=(VersionSpan(0, len(tokens), sampled.spans[0].version),),
            prompt_tokens=sampled.prompt_tokens,
        )

    def _ask(self, messages: Sequence[Message], max_context: int) -> bytes:
        """Convert new messages to tokens, and check that they fit."""
        characters = sum([len(message.content) for message in messages])
        if characters > CHARACTERS_PER_TOKEN * max_context:
            self._full(characters // CHARACTERS_PER_TOKEN)
        row = self._rows.row
        context = self._rows.ask(messages)
        if self._rows.row != row:
            self._release_kv()
        if len(self._rows) >= max_context:
            self._full(len(self._rows))
        for cause in applicable_rewrite_causes(self._settings.chat_format.rewrites, self._messages, messages):
            self._episode.metric(f"history/{cause}", 1.0, self)
        return context

    def _note_state(self, state: str | None, messages: Sequence[Message]) -> None:
        """Note the anchor state of a turn that is in the journal, if the run's advantage compares turns."""
        if self._episode.services.settings.compares_turns:
            self._turn_states += gigpo_state_hash(state, messages)

    def restart(self, *messages: Message) -> None:
        """Begin a new row; the messages are sent with the next `act`."""
        self._rows.restart()
        self._release_kv()
        self._messages = []
        self._pending = messages

    def reward(self, value: float | Mapping[str, float], turn: int | None = None, *, name: str = REWARD) -> None:
        """Journal a reward with the weight of its name."""
        where = f"episode {self._episode.spec.episode_id}, seat {self.seat!r}"
        if isinstance(value, Mapping):
            for each, part in value.items():
                self.reward(part, turn, name=each)
            return
        number = finite_reward(value, where if name == REWARD else f"{where}, {name!r}")
        if turn is not None and turn not in range(len(self._turns)):
            raise RewardError(
                f"{where}: a reward for turn {turn!r}, but there are {len(self._turns)} turns, counted from 0"
            )
        weight = self._weight(name, where)
        given = self._episode.journal.reward(RewardEntry(self.seat, self.index, number, turn, name, weight))
        self.rewards = (*self.rewards, given.weighted)
        if turn is not None:
            turns = self._turn_rewards = self._turn_rewards or {}
            turns[turn] = finite_reward(turns.get(turn, 0.0) + given.weighted, where)
        named = self._named_rewards = self._named_rewards or {}
        named[name] = finite_reward(named.get(name, 0.0) + number, where)

    def _weight(self, name: str, where: str) -> float:
        """Return the weight of a named reward; raise `RewardError` if the configuration gives weights to others but not
        to this one."""
        check_reward_name(name, where)
        weights = self._episode.services.settings.reward_weights
        if weights and name not in weights:
            raise RewardError(
                f"{where}: the reward {name!r} has no weight; add it to credit.reward_weights, which has "
                f"{', '.join(sorted(weights))}"
            )
        return weights.get(name, 1.0)

    def gate(self, accepted: bool, *, penalty: float) -> bool:
        """Count the decision; on a refusal, journal the penalty as a reward."""
        self._episode.metric(GATE_PASSED if accepted else GATE_REFUSED, 1.0, self)
        if not accepted:
            self.reward(penalty)
        return accepted

    def versions(self) -> Iterator[PolicyVersion]:
        """Yield the versions that sampled the agent's tokens, including returned calls of the turn in progress."""
        for turn in self._turns:
            for span in turn.completion.spans:
                yield span.version
        yield from self.running_versions()

    def header(self) -> TrajectoryHeader:
        """Make the agent's part of the episode's header."""
        oldest = min(self.versions(), key=_age, default=None)
        named = self._named_rewards or {}
        return TrajectoryHeader(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            reward=math.fsum(self.rewards) if self.rewards else None,
            tokens=self._sampled,
            oldest_step=oldest.step if oldest else 0,
            lineage=oldest.lineage if oldest else 0,
            turn_rewards=tuple(sorted(self._turn_rewards.items())) if self._turn_rewards else (),
            named_rewards=tuple(sorted(named.items())) if named.keys() - {REWARD} else (),
            turn_states=self._turn_states,
        )

    def _tokens_of(self, completion: Completion) -> int:
        """Return the number of sampled tokens; for a remote endpoint its own count, else the bytes of its line."""
        chat_format, own = self._settings.chat_format, len(completion.token_ids)
        if not isinstance(chat_format, JsonChatFormat):
            return own
        return chat_format.usage(completion.token_ids.tolist()).get("completion_tokens", own)

    def _answered(
        self,
        call: JournaledCall,
        messages: Sequence[Message],
        completion: Completion,
        sampled: Sequence[int],
        state: str | None,
    ) -> Turn:
        """Append a completion to the conversation and return it as a turn."""
        if completion.finish_reason == "length":
            self._episode.metric("turns/length", 1.0, self)
        assert call.branch is not None
        call.branch.speaker = self._number
        if self._episode.limit is not None:
            self._episode.limit.restart()
        message = self._settings.chat_format.parse(sampled, self._rows.tools)
        self._rows.answer(completion)
        self._sampled += self._tokens_of(completion)
        self._note_state(state, messages)
        self._messages.extend(messages)
        self._messages.append(message)
        turn = Turn(text=message.content, message=message, completion=completion)
        self._turns.append(turn)
        return turn

    def _full(self, tokens: int) -> NoReturn:
        """Raise the error of a conversation that does not fit: a first prompt drops the episode, a later turn truncates
        it."""
        limit = self._settings.limits.max_context
        if not self._turns:
            raise EpisodeError(
                f"the first prompt of {self.seat!r} has at least {tokens} tokens, but the context is limited to "
                f"{limit}; raise engine.max_context",
                reason="prompt_too_long",
            )
        raise LimitReachedError(
            f"agent {self.seat!r} has used its context of {limit} tokens", stop_reason="context_length"
        )

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        """Return the policy's sampling parameters, limited to `max_tokens`."""
        sampling = self._settings.sampling
        if max_tokens is None or max_tokens >= sampling.max_tokens:
            return sampling
        return dataclasses.replace(sampling, max_tokens=max_tokens)

    def entry(
        self,
        messages: Sequence[Message],
        row: int,
        context: bytes,
        before: int,
        completion: Completion,
        seconds: float,
        pauses: tuple[TurnPause, ...],
        state: str | None = None,
    ) -> TurnEntry:
        """Make the journal entry of the agent's next turn.

        Args:
            messages: new messages.
            row: number of the agent's row that the turn continues.
            context: the new context tokens, as `int32`.
            before: number of tokens of the row before these.
            completion: the sampled completion.
            seconds: duration of the turn.
            pauses: pauses of the turn.
            state: the environment's state before the turn, if the program said it.
        """
        chat_format, sampled = self._settings.chat_format, completion.token_ids.tolist()
        drift = chat_format.drift(sampled)
        if drift is not None:
            self._episode.metric(f"drift/{drift}", 1.0, self)
        routing, mask = completion.expert_routing, completion.sampling_mask
        return TurnEntry(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            row=row,
            turn=len(self._turns),
            context_ids=context,
            token_ids=completion.token_ids.tobytes(),
            logprobs=completion.logprobs.tobytes(),
            finish_reason=completion.finish_reason,
            spans=tuple(
                [TurnVersionSpan(s.start, s.stop, s.version.lineage, s.version.step) for s in completion.spans]
            ),
            text=chat_format.decode(sampled),
            messages=tuple([encode_message(message) for message in messages]),
            temperature=self._settings.sampling.temperature,
            seconds=seconds,
            started=self._episode.services.clock.wall() - seconds,
            expert_routing=None if routing is None else routing.tobytes(),
            routing_shape=() if routing is None else routing.shape,
            routing_start=completion.routing_start,
            mask_counts=None if mask is None else mask.counts.tobytes(),
            mask_ids=None if mask is None else mask.token_ids.tobytes(),
            drift=drift,
            cached_tokens=completion.cached_tokens,
            parent_context=before,
            routing_breaks=completion.routing_breaks,
            weights_of="" if self._weights_of == self.policy else self._weights_of,
            pauses=pauses,
            state=state,
        )

    def _write(self, call: JournaledCall, entry: TurnEntry) -> None:
        """Append the entry of a turn, and remove its partials."""
        self._episode.journal.write(call, entry)
        self._episode.partials.turn_recorded(call)


class AgentTokenRows:
    """Message ↔ token bookkeeping of one agent: its rows of tokens, the last of them open.

    1. A row's tokens are, turn by turn, `context_ids + token_ids`: exactly the engine's input and output, so the
       trainer's row equals the engine's context token for token. Sampled tokens are never tokenised again.
    2. The tokens of new messages are a function of `question`: for a repeated question, they are known.
    """

    __slots__ = ("_after", "_asked", "_format", "_row_tokens", "_turns", "before", "opening", "row", "tools")

    def __init__(self, chat_format: ChatFormat, tools: Sequence[ToolSpec]) -> None:
        self._format = chat_format
        self.tools = tools
        self._row_tokens = array("i")
        self._after: FinishReason | None = None
        self._asked: Sequence[Message] = ()
        self._turns: tuple[SampledTurn, ...] = ()
        """Sampled turns of the conversation, if the template may rewrite its history."""
        self.row = 0
        self.before = 0
        """Number of tokens of the row before the newest messages; 0 in a new row."""
        self.opening = 0
        """`GenerateRequest.opening` of the conversation, from its first row; 0 before its first turn."""

    def __len__(self) -> int:
        return len(self._row_tokens)

    def question(self, messages: Sequence[Message]) -> tuple[bytes, ...]:
        """Return all inputs that determine the tokens of new messages, for hashing without a tokenizer."""
        if self._after is None:
            before = encode_arguments([(tool.name, tool.description, dict(tool.parameters)) for tool in self.tools])
        else:
            before = self._after.encode()
        return (self._format.fingerprint, before, *map(_said, messages))

    def ask(self, messages: Sequence[Message]) -> bytes:
        """Append messages, and return the new context tokens as `int32`. If the template rewrites earlier tokens and
        the run forks then, a new row begins, and these are the whole context."""
        row = self.row
        if self._after is None:
            context_ids = self._format.start(messages, self.tools)
        else:
            context_ids = self._format.extend(messages, after=self._after)
            rewritten = self._format.rewritten(self._turns, messages, self.tools) if self._turns else None
            if rewritten is not None and not self._is_same([*self._row_tokens, *context_ids], rewritten):
                context_ids, row = rewritten, row + 1
        context = array("i", context_ids).tobytes()
        self.ask_again(context, messages, row)
        return context

    def _is_same(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether two contexts have the same text, apart from white space and the tokens that end a turn."""
        if list(one) == list(other):
            return True
        ends = {*self._format.stop_token_ids}
        texts = ["".join(self._format.decode([t for t in ids if t not in ends]).split()) for ids in (one, other)]
        return texts[0] == texts[1]

    def ask_again(self, context: bytes, messages: Sequence[Message], row: int) -> None:
        """Append the context tokens of a journal entry; begin its row if it is not the open one."""
        if row != self.row:
            self._row_tokens = array("i")
            self.row = row
        self._asked, self.before = messages if self._format.forks else (), len(self._row_tokens)
        self._row_tokens.frombytes(context)
        self.opening = self.opening or opening_digest(context)

    def answer(self, completion: Completion) -> None:
        """Append the tokens the engine sampled."""
        self._row_tokens.frombytes(completion.token_ids.astype(np.intc, copy=False).tobytes())
        self._after = completion.finish_reason
        if self._format.forks:
            self._turns = (*self._turns, SampledTurn(self._asked, completion.token_ids.tolist()))

    def restart(self) -> None:
        """Begin a new row."""
        if len(self._row_tokens):
            self.row += 1
        self._row_tokens = array("i")
        self._after = None
        self._turns = ()

    def context(self) -> Int32Array:
        """The whole open row, as sent to the engine; shape [T]."""
        return np.frombuffer(self._row_tokens.tobytes(), dtype=np.int32)


def call_priority(spec: EpisodeSpec, sampled: int) -> int:
    """Return the scheduling priority of an agent's call; lower runs first.

    The order is by deadline; then by depth, parents that still have children to spawn before children; then by tokens
    sampled so far, most first: if lengths are heavy-tailed, the episode that has sampled most has most left. Siblings
    are ordered like unrelated episodes.
    """
    depth = min(spec.episode_id.count("~"), DEEPEST)
    return (spec.deadline * (DEEPEST + 1) + depth) * (MOST_WORK + 1) + MOST_WORK - min(sampled, MOST_WORK)


def _described(agent: str, messages: Sequence[Message]) -> str:
    return f"a turn of {agent} asked {shortened_repr(' / '.join(message.content for message in messages))}"


def _valid(message: object) -> Message:
    """Return a message whose text any tokenizer and database can process.

    Raises:
        EnvironmentDefinitionError: the value is not a message.
    """
    if not isinstance(message, Message):
        raise EnvironmentDefinitionError(
            f"act() and restart() need messages, such as agentrl.user('…'), not {type(message).__name__}"
        )
    content = message.content if message.content.isascii() else valid_unicode(message.content)
    return message if content == message.content else dataclasses.replace(message, content=content)


def _given(reply: str | None, state: object) -> tuple[str | None, tuple[bytes, ...]]:
    """Return a turn's state as the journal can hold it, and the parts of the turn's hash for its reply and its state.

    Raises:
        EnvironmentDefinitionError: the state is not text.
    """
    given = () if reply is None else (b"reply", valid_unicode(reply).encode())
    if state is None:
        return None, given
    if not isinstance(state, str):
        raise EnvironmentDefinitionError(f"act() takes its state as text, not as {type(state).__name__}")
    state = valid_unicode(state)
    return state, (*given, b"state", state.encode())


def _age(version: PolicyVersion) -> tuple[int, int]:
    return version.lineage, version.step


def _said(message: Message) -> bytes:
    """Encode a message for hashing."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    thinking = (message.thinking,) if message.thinking else ()
    beside: bytes = (encode_arguments if calls else encode)(
        (message.role, message.tool_call_id, message.name, calls, *thinking)
    )
    return beside + message.content.encode("utf-8", "replace")
