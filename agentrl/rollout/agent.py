"""One agent of a running episode: every turn is an engine call, or the journal's memory of one.

Owns: the conversation's tokens, what a turn's entry holds. The engine call itself is in `turn_sampler.py`.
Invariant: a turn is in the journal before the environment sees it, with the tokens exactly as they were sampled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from agentrl.core.errors import EngineError, EnvironmentDefinitionError, EpisodeError, RewardError
from agentrl.core.ports import SamplingParams
from agentrl.core.records import Completion, Message, PolicyVersion, ToolSpec, TrajectoryHeader, Turn
from agentrl.core.words import plural
from agentrl.environment.base import Agent, LimitReachedError, finite_reward, valid_unicode
from agentrl.journal.entries import RewardEntry, Span, TurnEntry, asked_hash
from agentrl.observe.metrics import GATE_PASSED, GATE_REFUSED
from agentrl.rollout.conversation import Conversation
from agentrl.rollout.json_format import JsonFormat
from agentrl.rollout.recorded_words import shortened
from agentrl.rollout.turn_entries import completion_of, message_data, message_of
from agentrl.rollout.turn_sampler import TurnSampler, rank

if TYPE_CHECKING:
    from agentrl.rollout.calls import Call
    from agentrl.rollout.episode import LiveEpisode

CHARACTERS_PER_TOKEN = 64
"""Longer messages are not even tokenised: no tokenizer packs more text than this into a token."""


class LiveAgent(Agent):
    """One conversation, played against an engine and written to the journal."""

    __slots__ = (
        "_conversation",
        "_episode",
        "_messages",
        "_number",
        "_pending",
        "_sampled",
        "_sampler",
        "_spoken_to",
        "_turn_rewards",
        "_turns",
        "counts",
        "index",
        "policy",
        "rewards",
        "seat",
    )

    def __init__(self, episode: LiveEpisode, seat: str, index: int, tools: Sequence[ToolSpec]) -> None:
        self.seat = seat
        self.index = index
        self.rewards: tuple[float, ...] = ()
        self.counts: dict[str, float] = {}
        self._episode = episode
        binding = episode.spec.seats[seat]
        self.policy = binding.policy
        self._spoken_to = episode.spoken_to(seat)
        self._conversation = Conversation(self._spoken_to.chat_format, tools)
        room, place = episode.services.room, None
        if room.is_bounded and not self._spoken_to.is_outside:
            place = room.place((episode.spec.environment, seat), weights=(binding.policy, binding.pin))
        self._sampler = TurnSampler(episode, binding, f"{seat}.{index}", place)
        self._turns: list[Turn] = []
        self._sampled = 0
        self._turn_rewards: dict[int, float] | None = None
        self._messages: list[Message] = []
        self._pending: tuple[Message, ...] = ()
        self._number = len(episode.agents)
        episode.agents.append(self)

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
        services = self._episode.services
        limits = self._spoken_to.limits
        if len(self._turns) >= limits.max_turns:
            raise LimitReachedError(
                f"agent {self.seat!r} has used its {plural(limits.max_turns, 'turn')}", stop_reason="max_turns"
            )
        messages, self._pending = tuple(map(_valid, (*self._pending, *messages))), ()
        messages = tuple(map(message_of, self._episode.journal.told_instead())) or messages
        sampling = self._sampling(max_tokens)
        journal = self._episode.journal
        asked = asked_hash(sampling.max_tokens.to_bytes(4, "little"), *self._conversation.question(messages))
        before, known = len(self._conversation), journal.ahead(asked)
        if isinstance(known, TurnEntry):
            context = known.context_ids
            self._conversation.ask_again(context)
        elif known is not None:  # it fitted then: a context that is smaller now bounds what is new
            context = self._conversation.ask(messages)
        else:
            context = self._ask(messages, limits.max_context)
        call = journal.open(asked, partial(_asked, self.seat, messages))
        if journal.must_wait(call):
            await journal.reach(call)
        recorded = journal.recall(call, TurnEntry)
        if recorded is not None:
            completion = completion_of(recorded)
            sampled = completion.token_ids.tolist()
        else:
            started = services.clock.monotonic()
            if journal.is_over_time:
                journal.refuse_for_time(call)
            # A turn's time is the engine's, and not the program's, unless a bot or an endpoint takes it.
            limit = None if self._spoken_to.is_outside else self._episode.limit
            try:
                with journal.performing(call, "a turn", limit):
                    priority = rank(self._episode.spec, self._sampled)
                    completion = await self._sampler.sample(call, self._conversation.context(), sampling, priority)
            except EngineError as error:
                journal.fail(error)
                raise
            sampled = completion.token_ids.tolist()
            self._write(call, messages, context, before, completion, sampled, services.clock.monotonic() - started)
        return self._answered(call, messages, completion, sampled)

    def _ask(self, messages: Sequence[Message], max_context: int) -> bytes:
        """The tokens of new messages, which must fit."""
        characters = sum([len(message.content) for message in messages])
        if characters > CHARACTERS_PER_TOKEN * max_context:
            self._full(characters // CHARACTERS_PER_TOKEN)
        context = self._conversation.ask(messages)
        if len(self._conversation) >= max_context:
            self._full(len(self._conversation))
        return context

    def restart(self, *messages: Message) -> None:
        """Begin a new row; the messages are sent with the next `act`."""
        self._conversation.restart()
        self._sampler.restart()
        self._messages = []
        self._pending = messages

    def reward(self, value: float, turn: int | None = None) -> None:
        """Journal a reward."""
        where = f"episode {self._episode.spec.episode_id}, seat {self.seat!r}"
        number = finite_reward(value, where)
        if turn is not None and turn not in range(len(self._turns)):
            raise RewardError(f"{where}: a reward for turn {turn!r}, and there are {len(self._turns)}, counted from 0")
        self._episode.journal.reward(RewardEntry(self.seat, self.index, number, turn))
        self.rewards = (*self.rewards, number)
        if turn is not None:
            given = self._turn_rewards = self._turn_rewards or {}
            given[turn] = finite_reward(given.get(turn, 0.0) + number, where)

    def gate(self, accepted: bool, *, penalty: float) -> bool:
        """Count the answer; where it is no, journal the penalty as a reward."""
        self._episode.metric(GATE_PASSED if accepted else GATE_REFUSED, 1.0, self)
        if not accepted:
            self.reward(penalty)
        return accepted

    def suspend(self) -> None:
        """Cut the call in flight and give the engine's KV and slot back: the episode is parked."""
        self._sampler.suspend()

    def close(self) -> None:
        """Give the engine's KV and slot back."""
        self._sampler.close()

    def versions(self) -> Iterator[PolicyVersion]:
        """Who sampled the agent's tokens, those of the running turn included, as far as its calls have returned."""
        running = self._sampler.turn
        pieces = () if running is None else running.pieces
        for completion in (*(turn.completion for turn in self._turns), *pieces):
            for span in completion.spans:
                yield span.version

    def header(self) -> TrajectoryHeader:
        """What the control path needs to know."""
        oldest = min(self.versions(), key=_age, default=None)
        return TrajectoryHeader(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            reward=math.fsum(self.rewards) if self.rewards else None,
            tokens=self._sampled,
            oldest_step=oldest.step if oldest else 0,
            lineage=oldest.lineage if oldest else 0,
            turn_rewards=tuple(sorted(self._turn_rewards.items())) if self._turn_rewards else (),
        )

    def _tokens_of(self, completion: Completion) -> int:
        """How many tokens were sampled; by an endpoint, as many as it says, or else the bytes of its line."""
        chat_format, own = self._spoken_to.chat_format, len(completion.token_ids)
        if not isinstance(chat_format, JsonFormat):
            return own
        return chat_format.usage(completion.token_ids.tolist()).get("completion_tokens", own)

    def _answered(
        self, call: Call, messages: Sequence[Message], completion: Completion, sampled: Sequence[int]
    ) -> Turn:
        """The turn that a call's completion is; the conversation goes on behind it."""
        if completion.finish_reason == "length":
            self._episode.metric("turns/length", 1.0, self)
        assert call.branch is not None
        call.branch.speaker = self._number
        self._episode.got_on()
        message = self._spoken_to.chat_format.parse(sampled)
        self._conversation.answer(completion)
        self._sampled += self._tokens_of(completion)
        self._messages.extend(messages)
        self._messages.append(message)
        turn = Turn(text=message.content, message=message, completion=completion)
        self._turns.append(turn)
        return turn

    def _full(self, tokens: int) -> NoReturn:
        """The conversation does not fit; a first prompt that does not is told apart from a long episode."""
        limit = self._spoken_to.limits.max_context
        if not self._turns:
            raise EpisodeError(
                f"the first prompt of {self.seat!r} has at least {tokens} tokens, the context {limit}; "
                "raise engine.max_context",
                reason="prompt_too_long",
            )
        raise LimitReachedError(
            f"agent {self.seat!r} has used its context of {limit} tokens", stop_reason="context_length"
        )

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        """The policy's sampling parameters, with a shorter turn where one is asked for."""
        sampling = self._spoken_to.sampling
        if max_tokens is None or max_tokens >= sampling.max_tokens:
            return sampling
        return dataclasses.replace(sampling, max_tokens=max_tokens)

    def _write(
        self,
        call: Call,
        messages: Sequence[Message],
        context: bytes,
        before: int,
        completion: Completion,
        sampled: Sequence[int],
        seconds: float,
    ) -> None:
        services = self._episode.services
        chat_format = self._spoken_to.chat_format
        drift = chat_format.drift(sampled)
        if drift is not None:
            self._episode.metric(f"drift/{drift}", 1.0, self)
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
            spans=tuple([Span(s.start, s.stop, s.version.lineage, s.version.step) for s in completion.spans]),
            text=chat_format.decode(sampled),
            messages=tuple([message_data(message) for message in messages]),
            temperature=self._spoken_to.sampling.temperature,
            seconds=seconds,
            started=services.clock.wall() - seconds,
            expert_routing=None if routing is None else routing.tobytes(),
            routing_shape=() if routing is None else routing.shape,
            routing_start=completion.routing_start,
            mask_counts=None if mask is None else mask.counts.tobytes(),
            mask_ids=None if mask is None else mask.token_ids.tobytes(),
            drift=drift,
            cached_tokens=completion.cached_tokens,
            parent_context=before,
            routing_breaks=completion.routing_breaks,
            weights_of="" if self._sampler.weights_of == self.policy else self._sampler.weights_of,
            pauses=self._sampler.pauses,
        )
        self._episode.journal.write(call, entry)
        self._episode.partials.ended(call)


def _asked(seat: str, messages: Sequence[Message]) -> str:
    return f"a turn of {seat} asked {shortened(' / '.join(message.content for message in messages))}"


def _valid(message: object) -> Message:
    """A message whose text any tokenizer and database can take.

    Raises:
        EnvironmentDefinitionError: it is none.
    """
    if not isinstance(message, Message):
        raise EnvironmentDefinitionError(
            f"act() and restart() take messages, such as agentrl.user('…'), not {type(message).__name__}"
        )
    content = message.content if message.content.isascii() else valid_unicode(message.content)
    return message if content == message.content else dataclasses.replace(message, content=content)


def _age(version: PolicyVersion) -> tuple[int, int]:
    return version.lineage, version.step
