"""One attempt of one episode: make the environment, run its program over the journal, commit what happened.

`EpisodeRunner.run` owns an attempt from the first entry to the committed header; `LiveAgent.act` is the engine call
every turn goes through. Neither knows who scheduled the episode or who will train on it.

Invariants:
1. Each act passes through `CallJournal`: recorded acts are compared, new ones performed and appended.
2. A header is returned only after the episode's entries and its commit are on disk.
3. A limit ends an episode as truncated and committed; an error raises, and the worker decides between retry and drop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import math
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from agentrl.core import ids
from agentrl.core.clock import Clock
from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError, RewardError
from agentrl.core.ports import ChatFormat, Engine, EngineSession, EpisodeHost, GenerateRequest, SamplingParams
from agentrl.core.records import (
    Completion,
    DataLocation,
    EpisodeHeader,
    EpisodeSpec,
    Message,
    PolicyVersion,
    StopReason,
    ToolSpec,
    TrajectoryHeader,
    Turn,
    dropped_header,
)
from agentrl.environment.base import Agent, Environment, LimitReachedError, Limits, valid_unicode
from agentrl.journal.entries import Begin, JournalEntry, RewardEntry, Span, TurnEntry, asked_hash
from agentrl.journal.port import JournalStore, TurnLog
from agentrl.rollout.calls import BEGIN, Call, CallJournal, enter_branch
from agentrl.rollout.context import LiveContext
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.turn_entries import completion_of, message_data

CHARACTERS_PER_TOKEN = 64
"""Longer messages are not even tokenised: no tokenizer packs more text than this into a token."""

PRIORITY = {"train": 0, "fork": 1, "replay": 1, "evaluate": 2}
"""Engine priority by purpose; lower is served first, so that evaluation never holds up training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSettings:
    """What is the same for every episode of a worker."""

    sampling: SamplingParams
    limits: Limits
    tool_timeout_s: float
    episode_timeout_s: float


class LiveAgent(Agent):
    """One conversation, played against an engine and written to the journal."""

    __slots__ = (
        "_binding",
        "_context",
        "_conversation",
        "_messages",
        "_pending",
        "_session",
        "_turns",
        "index",
        "rewards",
        "seat",
    )

    def __init__(self, context: LiveContext, seat: str, index: int, tools: Sequence[ToolSpec]) -> None:
        self.seat = seat
        self.index = index
        self.rewards: list[float] = []
        self._context = context
        self._binding = context.spec.seats[seat]
        self._conversation = Conversation(context.runner.chat_format, tools)
        self._session: EngineSession | None = None
        self._turns: list[Turn] = []
        self._messages: list[Message] = []
        self._pending: tuple[Message, ...] = ()

    @property
    def policy(self) -> str:
        """Who holds the seat."""
        return self._binding.policy

    @property
    def turns(self) -> Sequence[Turn]:
        """The agent's turns so far."""
        return self._turns

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._messages

    async def act(self, *messages: Message, max_tokens: int | None = None) -> Turn:
        """Ask the policy; from the journal where it was asked before."""
        runner = self._context.runner
        limits = self._context.limits
        if len(self._turns) >= limits.max_turns:
            raise LimitReachedError(
                f"agent {self.seat!r} has used its {limits.max_turns} turns", stop_reason="max_turns"
            )
        messages, self._pending = (*self._pending, *messages), ()
        if sum(len(message.content) for message in messages) > CHARACTERS_PER_TOKEN * limits.max_context:
            self._full(sum(len(message.content) for message in messages) // CHARACTERS_PER_TOKEN)
        before = len(self._conversation)
        context_ids = np.array(self._conversation.ask(messages), dtype=np.int32)
        if len(self._conversation) >= limits.max_context:
            self._full(len(self._conversation))
        sampling = runner.sampling_for(max_tokens)
        context_bytes = context_ids.tobytes()
        call = self._context.journal.open(asked_hash(context_bytes, sampling.max_tokens.to_bytes(4, "little")))
        recorded = self._context.journal.expect(call, TurnEntry)
        if recorded is not None:
            completion = completion_of(recorded)
        else:
            started = runner.clock.monotonic()
            completion = await self._generate(call, sampling)
            self._write(call, messages, context_bytes, before, completion, runner.clock.monotonic() - started)
        if completion.finish_reason == "length":
            self._context.metric("turns/length", 1.0)
        self._conversation.answer(completion)
        self._messages.extend(messages)
        message = runner.chat_format.parse(completion.token_ids.tolist())
        self._messages.append(message)
        turn = Turn(text=message.content, message=message, completion=completion)
        self._turns.append(turn)
        return turn

    def restart(self, *messages: Message) -> None:
        """Begin a new row; the messages are sent with the next `act`."""
        self._conversation.restart()
        self._messages = []
        self._pending = messages

    def reward(self, value: float, turn: int | None = None) -> None:
        """Journal a reward."""
        number = finite_reward(value, f"episode {self._context.spec.episode_id}, seat {self.seat!r}")
        call = self._context.journal.open()
        if self._context.journal.expect(call, RewardEntry) is None:
            self._context.journal.write(call, RewardEntry(self.seat, self.index, number, turn))
        self.rewards.append(number)

    def close(self) -> None:
        """Give the engine's KV and slot back."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def header(self) -> TrajectoryHeader:
        """What the control path needs to know."""
        oldest = min((span.version for turn in self._turns for span in turn.completion.spans), key=_age, default=None)
        return TrajectoryHeader(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            reward=math.fsum(self.rewards) if self.rewards else None,
            tokens=sum(len(turn.completion.token_ids) for turn in self._turns),
            oldest_step=oldest.step if oldest else 0,
            lineage=oldest.lineage if oldest else 0,
        )

    def _full(self, tokens: int) -> NoReturn:
        """The conversation does not fit; a first prompt that does not is told apart from a long episode."""
        limit = self._context.limits.max_context
        if not self._turns:
            raise EpisodeError(
                f"the first prompt of {self.seat!r} has at least {tokens} tokens, the context {limit}; "
                "raise engine.max_context",
                reason="prompt_too_long",
            )
        raise LimitReachedError(
            f"agent {self.seat!r} has used its context of {limit} tokens", stop_reason="context_length"
        )

    async def _generate(self, call: Call, sampling: SamplingParams) -> Completion:
        spec = self._context.spec
        if self._session is None:
            name = f"{spec.episode_id}.{spec.attempt}:{self.seat}.{self.index}"
            engine = self._context.runner.engine
            self._session = engine.open(name, self.policy, pin=self._binding.pin, priority=PRIORITY[spec.purpose])
        request = GenerateRequest(
            request_id=f"{spec.episode_id}.{spec.attempt}.{call.call_id}",
            token_ids=self._conversation.context(),
            sampling=sampling,
            seed=ids.key64(spec.seed, spec.attempt, call.call_id),
        )
        completion = await self._session.generate(request)
        if not np.isfinite(completion.logprobs).all():
            raise EpisodeError(
                f"the engine returned a non-finite logprob for {request.request_id}", reason="nonfinite_logprob"
            )
        return completion

    def _write(
        self,
        call: Call,
        messages: Sequence[Message],
        context: bytes,
        before: int,
        completion: Completion,
        seconds: float,
    ) -> None:
        runner = self._context.runner
        sampled = completion.token_ids.tolist()
        drift = runner.chat_format.drift(sampled)
        if drift is not None:
            self._context.metric(f"drift/{drift}", 1.0)
        routing, mask = completion.expert_routing, completion.sampling_mask
        entry = TurnEntry(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            row=self._conversation.row,
            turn=len(self._turns),
            context_ids=context,
            token_ids=completion.token_ids.tobytes(),
            logprobs=completion.logprobs.tobytes(),
            finish_reason=completion.finish_reason,
            spans=tuple(Span(s.start, s.stop, s.version.lineage, s.version.step) for s in completion.spans),
            text=runner.chat_format.decode(sampled),
            messages=tuple(message_data(message) for message in messages),
            temperature=runner.settings.sampling.temperature,
            seconds=seconds,
            started=runner.clock.wall() - seconds,
            expert_routing=None if routing is None else routing.tobytes(),
            routing_shape=() if routing is None else routing.shape,
            routing_start=completion.routing_start,
            mask_counts=None if mask is None else mask.counts.tobytes(),
            mask_ids=None if mask is None else mask.token_ids.tobytes(),
            drift=drift,
            cached_tokens=completion.cached_tokens,
            parent_context=before,
        )
        self._context.journal.write(call, entry)


class EpisodeRunner:
    """Runs attempts of episodes for one worker."""

    def __init__(
        self,
        *,
        engine: Engine,
        chat_format: ChatFormat,
        store: JournalStore,
        log: TurnLog,
        host: EpisodeHost,
        clock: Clock,
        settings: RolloutSettings,
    ) -> None:
        self.engine = engine
        self.chat_format = chat_format
        self.host = host
        self.clock = clock
        self.settings = settings
        self._store = store
        self._log = log
        self._code_hashes: dict[type[Environment], str] = {}

    def sampling_for(self, max_tokens: int | None) -> SamplingParams:
        """The run's sampling parameters, with a shorter turn where one is asked for."""
        sampling = self.settings.sampling
        if max_tokens is None or max_tokens >= sampling.max_tokens:
            return sampling
        return dataclasses.replace(sampling, max_tokens=max_tokens)

    def agent(self, context: LiveContext, seat: str, index: int, tools: Sequence[ToolSpec]) -> LiveAgent:
        """A new agent of a running episode."""
        return LiveAgent(context, seat, index, tools)

    async def run(
        self, spec: EpisodeSpec, environment: type[Environment], recorded: Iterable[JournalEntry] = ()
    ) -> EpisodeHeader:
        """Run one attempt to its commit; `recorded` entries of an earlier execution are replayed first.

        Must be called in a task of its own: the task owns the episode's root branch.

        Raises:
            EpisodeError: the episode cannot go on, with its drop reason. Other exceptions are the environment's.
        """
        started = self.clock.monotonic()
        missing = [seat for seat in environment.seats if seat not in spec.seats]
        if missing:
            raise EnvironmentDefinitionError(
                f"episode {spec.episode_id}: seat {missing[0]!r} is bound to no policy; add it to [seats]"
            )
        journal = CallJournal(self._log, spec.episode_id, spec.attempt, recorded)
        enter_branch(ids.ROOT_BRANCH)
        self._begin(journal, spec, environment)
        context = LiveContext(self, spec, journal)
        try:
            try:
                await self._play(environment, context)
                stop_reason: StopReason = context.stop_reason or "completed"
            except LimitReachedError as limit:
                stop_reason = limit.stop_reason
            if stop_reason != "completed":
                self._reward_truncated(context, environment)
        finally:
            context.close()
        header = EpisodeHeader(
            episode_id=spec.episode_id,
            group_id=spec.group_id,
            attempt=spec.attempt,
            purpose=spec.purpose,
            parent_id=spec.parent_id,
            stop_reason=stop_reason,
            drop_reason=None,
            turns=sum(len(agent.turns) for agent in context.agents.values()),
            tokens=sum(len(turn.completion.token_ids) for agent in context.agents.values() for turn in agent.turns),
            seconds=self.clock.monotonic() - started,
            trajectories=tuple(agent.header() for agent in context.agents.values() if agent.turns),
            location=DataLocation(self._log.name, journal.written),
        )
        await _whatever_happens(self._store.commit_episode(spec, header, journal.digest, context.metrics))
        self.host.measured(spec, header, context.metrics)
        return header

    def recorded(self, spec: EpisodeSpec) -> list[JournalEntry]:
        """What the journal holds of an attempt."""
        return self._log.read(spec.episode_id, spec.attempt)

    async def drop(self, spec: EpisodeSpec, reason: str, detail: str, seconds: float) -> EpisodeHeader:
        """Record that an episode ends without being trained, with its reason."""
        header = dropped_header(spec, reason, seconds=seconds)
        await _whatever_happens(self._store.commit_episode(spec, header, b"", {}, valid_unicode(detail)))
        return header

    async def _play(self, environment: type[Environment], context: LiveContext) -> None:
        """The program of the episode, within its time. The commit is outside: what is on disk is what is told."""
        limit = self.settings.episode_timeout_s
        try:
            async with asyncio.timeout(limit) as deadline:
                await environment().run(context)
        except TimeoutError:
            if deadline.expired():
                raise EpisodeError(f"the episode took longer than {limit:g} s", reason="episode_timeout") from None
            raise

    def _begin(self, journal: CallJournal, spec: EpisodeSpec, environment: type[Environment]) -> None:
        code_hash = self._code_hashes.get(environment)
        if code_hash is None:
            code_hash = hashlib.blake2b(environment.source().encode(), digest_size=8).hexdigest()
            self._code_hashes[environment] = code_hash
        call = journal.at(BEGIN)
        if journal.expect(call, Begin) is None:
            begin = Begin(
                environment=spec.environment,
                code_hash=code_hash,
                task_id=spec.task.id,
                task=dict(spec.task.data),
                seed=spec.seed,
                seats={seat: binding.policy for seat, binding in spec.seats.items()},
                purpose=spec.purpose,
                group_id=spec.group_id,
                group_size=spec.group_size,
                parent_id=spec.parent_id,
            )
            journal.write(call, begin)

    def _reward_truncated(self, context: LiveContext, environment: type[Environment]) -> None:
        value = environment.truncated_reward
        if value is not None:
            for agent in context.agents.values():
                if agent.turns and not agent.rewards:
                    agent.reward(value)


async def _whatever_happens(commit: Coroutine[Any, Any, None]) -> None:
    """Wait for a commit through a cancellation: an episode that reached the disk is reported as it is there."""
    writing = asyncio.get_running_loop().create_task(commit)
    while not writing.done():
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            if writing.cancelled():
                raise
    writing.result()


def finite_reward(value: object, where: str) -> float:
    """A reward as a float.

    Raises:
        RewardError: None, a string, NaN, infinite, or anything else that is not a finite real number.
    """
    if isinstance(value, str) or not isinstance(value, Real | np.generic):
        raise RewardError(f"{where}: the reward is {value!r} ({type(value).__name__}); it must be a finite number")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"{where}: the reward is {number}; it must be finite")
    return number


def _age(version: PolicyVersion) -> tuple[int, int]:
    return version.lineage, version.step
