"""The record of one agent, driven by the program or by an external agent."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

import msgspec

from agentrl.core.errors import RewardError
from agentrl.core.records import REWARD, Message, PolicyVersion, TrajectoryHeader, Turn
from agentrl.core.tokens import Completion
from agentrl.environment.context import Agent, LimitReachedError
from agentrl.environment.rewards import check_reward_name, finite_reward
from agentrl.journal.entries import ReplyRecord, RewardEntry, TurnEntry, TurnPause, gigpo_state_hash, sum_by_key
from agentrl.observe.metrics import FOREIGN_CALLS, GATE_PASSED, GATE_REFUSED, TOOLS_HIDDEN, TOOLS_OFFERED
from agentrl.rollout.chat.byte_formats import JsonChatFormat
from agentrl.rollout.turn_entries import encode_message, record_reply

if TYPE_CHECKING:
    from agentrl.core.ports import SamplingParams
    from agentrl.core.records import Int32Array, StopReason, ToolSpec
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.turn.sampler import TurnSampler

REPEATED_TOKENS = 96
"""Maximum number of tokens at the end of a turn in which a repetition is looked for."""


def repeats_itself(token_ids: Int32Array) -> bool:
    """Whether the end of a turn is one piece of text, three times or more.

    Example:
        >>> import numpy as np; repeats_itself(np.array([7, 1, 2, 3] + 12 * [1, 2, 3]))
        True
    """
    tail = token_ids[-min(REPEATED_TOKENS, 2 * len(token_ids) // 3) :]
    return len(tail) >= 24 and any((tail[n:] == tail[:-n]).all() for n in range(1, len(tail) // 3 + 1))


class TurnRecorder(Agent):
    """One agent's turns and rewards as the journal holds them, and its part of the episode's header.

    Subclasses decide where the turns come from: `LiveAgent` from the program, `ExternalAgent` from the gateway.

    Args:
        episode: the running attempt.
        seat: seat that the agent holds.
        index: number of the agent within its seat.
    """

    __slots__ = (
        "_episode",
        "_messages",
        "_sampled",
        "_settings",
        "_turn_states",
        "_turns",
        "counts",
        "index",
        "inherited",
        "is_void",
        "policy",
        "rewards",
        "seat",
    )

    def __init__(self, episode: LiveEpisode, seat: str, index: int) -> None:
        self.seat = seat
        self.index = index
        binding = episode.spec.seats[seat]
        self.policy = binding.policy
        self._episode = episode
        self._settings = episode.policy_settings(seat)
        self.rewards: tuple[RewardEntry, ...] = ()
        """Rewards so far, in the order in which they were given."""
        self.counts: dict[str, float] = {}
        self.is_void = False
        """Whether the header leaves the rewards out, so that the unit is dropped."""
        self.inherited = 0
        """Number of turns that a fork inherited, the first of `turns`; the others were sampled here."""
        self._turns: list[Turn] = []
        self._messages: list[Message] = []
        self._sampled = 0
        """Number of tokens sampled so far."""
        self._turn_states = b""

    @abstractmethod
    def _samplers(self) -> Iterable[TurnSampler]:
        """The samplers of the agent's conversations."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The agent's turns so far."""
        return self._turns

    @property
    def sampled_turns(self) -> int:
        """Number of turns that were sampled in this episode."""
        return len(self._turns) - self.inherited

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return self._messages

    @property
    def conversation(self) -> Sequence[Message]:
        """The conversation of the newest turn, for scorers."""
        return self._messages

    def reward(self, value: float | Mapping[str, float], turn: int | None = None, *, name: str = REWARD) -> None:
        """Journal a reward with the weight of its name."""
        where = f"episode {self._episode.spec.episode_id}, seat {self.seat!r}"
        if isinstance(value, Mapping):
            for reward_name, part in value.items():
                self.reward(part, turn, name=reward_name)
            return
        number = finite_reward(value, where if name == REWARD else f"{where}, {name!r}")
        is_turn = isinstance(turn, Integral) and not isinstance(turn, bool) and turn in range(len(self._turns))
        if turn is not None and not is_turn:
            raise RewardError(
                f"{where}: a reward for turn {turn!r}, but there are {len(self._turns)} turns, counted from 0"
            )
        weight, at = self.weight_of(name, where), None if turn is None else int(turn)  # it may be numpy's
        recorded = self._episode.journal.reward(RewardEntry(self.seat, self.index, number, at, name, weight))
        self.rewards = (*self.rewards, recorded)

    def replace_rewards(self, value: float) -> None:
        """Journal the opposite of each of the agent's rewards, for the same turn and name, and `value`."""
        for given in [given for given in self.rewards if given.value]:
            opposite = self._episode.journal.reward(msgspec.structs.replace(given, value=-given.value))
            self.rewards = (*self.rewards, opposite)
        self.reward(value)

    def cut_by(self) -> StopReason | None:
        """Return the limit that cut the agent's last turn; None if none did."""
        if not (self._turns and self._turns[-1].is_cut):
            return None
        return "context_length" if self._row_length() >= self._settings.limits.max_context else "max_tokens"

    @abstractmethod
    def _row_length(self) -> int:
        """Number of tokens of the row that the last turn continued."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return self._sampled

    def weight_of(self, name: str, where: str) -> float:
        """Return the weight of a reward that is given now; raise `RewardError` if the configuration gives weights to
        other names but not to this one. Rewards without a name weigh 1, unless it names `reward`."""
        check_reward_name(name, where)
        weights = self._episode.services.settings.reward_weights
        if weights and name not in weights and name != REWARD:
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

    def _parse(self, context: bytes, completion: Completion, tools: Sequence[ToolSpec]) -> Message | LimitReachedError:
        """Parse the reply to a prompt that ends with `context` and offers `tools`; an error if it is the refusal of a
        remote endpoint."""
        try:
            return self._settings.chat_format.parse(completion.token_ids.tolist(), tools, context=array("i", context))
        except LimitReachedError as refusal:
            return refusal

    def _name_foreign_call(
        self,
        reply: Message | LimitReachedError,
        context: bytes,
        completion: Completion,
        tools: Sequence[ToolSpec],
        recorded_turn: TurnEntry | None = None,
    ) -> Message | LimitReachedError:
        """Add to a reply without a complete call the one that it holds in another form than the run reads.

        The text stays the content, because some environments read it themselves. A recorded turn is read as it was when
        it was played: earlier versions named no such calls.
        """
        if (
            isinstance(reply, LimitReachedError)
            or not tools
            or any(not isinstance(call.arguments, str) for call in reply.tool_calls)
            or (recorded_turn is not None and not _has_foreign_call(recorded_turn))
        ):
            return reply
        token_ids = completion.token_ids.tolist()
        call = self._settings.chat_format.foreign_call(token_ids, tools, context=array("i", context))
        return reply if call is None else dataclasses.replace(reply, tool_calls=(call,))

    def _count_reply(
        self, message: Message, completion: Completion, tools: Sequence[ToolSpec], *, is_cut: bool
    ) -> None:
        """Count a turn that was cut off by `max_tokens`, says nothing, calls a tool although none is offered, or holds
        a call in a form that is not read; and the first turn with tools."""
        if tools and TOOLS_OFFERED not in self.counts:
            self._episode.metric(TOOLS_OFFERED, 1.0, self)
            if not self._settings.chat_format.shows_tools:
                self._episode.metric(TOOLS_HIDDEN, 1.0, self)
        if message.tool_calls and not tools and not is_cut:
            self._episode.metric("tool/not_offered", 1.0, self)
        if message.tool_calls and message.tool_calls[0].form and not is_cut:
            self._episode.metric(f"{FOREIGN_CALLS}{message.tool_calls[0].form}", 1.0, self)
        if (
            is_cut and len(completion.token_ids) > 1
        ):  # a reply of one token may be whole, as in a game of one-token moves
            self._episode.metric("turns/length", 1.0, self)
            if repeats_itself(completion.token_ids):
                self._episode.metric("turns/repeating", 1.0, self)
        if not (message.content.strip() or message.thinking or message.tool_calls):
            self._episode.metric("turns/empty", 1.0, self)

    def _sampling(self, max_tokens: int | None) -> SamplingParams:
        """Return the policy's sampling parameters, limited to `max_tokens`."""
        sampling = self._settings.sampling
        if max_tokens is None or max_tokens >= sampling.max_tokens:
            return sampling
        return dataclasses.replace(sampling, max_tokens=max_tokens)

    def _entry(
        self,
        messages: Sequence[Message],
        row: int,
        context: bytes,
        before: int,
        completion: Completion,
        reply: Message | LimitReachedError,
        seconds: float,
        pauses: tuple[TurnPause, ...],
    ) -> TurnEntry:
        """Make the journal entry of the agent's next turn.

        Args:
            messages: new messages.
            row: number of the agent's row that the turn continues.
            context: the new context tokens, as `int32`.
            before: number of tokens of the row before these.
            completion: the sampled completion.
            reply: the parsed completion.
            seconds: duration of the turn.
            pauses: pauses of the turn.
        """
        chat_format, sampled = self._settings.chat_format, completion.token_ids.tolist()
        drift = chat_format.drift(sampled, array("i", context))
        if drift is not None:
            self._episode.metric(f"drift/{drift}", 1.0, self)
        return TurnEntry(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            row=row,
            turn=len(self._turns),
            context_ids=context,
            tokens=completion.encode(),
            finish_reason=completion.finish_reason,
            text=chat_format.decode(sampled),
            messages=tuple([encode_message(message) for message in messages]),
            temperature=self._settings.sampling.temperature,
            seconds=seconds,
            started=self._episode.services.clock.wall() - seconds,
            drift=drift,
            cached_tokens=completion.cached_tokens,
            parent_context=before,
            pauses=pauses,
            reply=ReplyRecord() if isinstance(reply, LimitReachedError) else record_reply(reply),
        )

    def _record(self, call: JournaledCall, entry: TurnEntry) -> None:
        """Append the entry of a turn to the journal, and remove its partials."""
        self._episode.journal.record(call, entry)
        self._episode.partials.turn_recorded(call)

    def _append(
        self,
        call: JournaledCall,
        messages: Sequence[Message],
        message: Message,
        completion: Completion,
        state: str | None = None,
    ) -> Turn:
        """Append a turn that is in the journal: the new messages, and the policy's answer.

        `state` is the environment's state before the turn, if the program named it.
        """
        own = call.own(1)
        self.inherited += 1 - own
        self._sampled += own * self._tokens_of(completion)
        if self._episode.services.settings.compares_turns:
            self._turn_states += gigpo_state_hash(state, messages)
        self._messages.extend(messages)
        self._messages.append(message)
        turn = Turn(text=message.content, message=message, completion=completion)
        self._turns.append(turn)
        if self._episode.scores is not None:
            self._episode.scores.start_per_turn(self)
        return turn

    def _tokens_of(self, completion: Completion) -> int:
        """Return the number of sampled tokens; for a remote endpoint its own count, else the bytes of its line."""
        chat_format, sampled = self._settings.chat_format, len(completion.token_ids)
        if not isinstance(chat_format, JsonChatFormat):
            return sampled
        return chat_format.usage(completion.token_ids.tolist()).get("completion_tokens", sampled)

    def versions(self) -> Iterator[PolicyVersion]:
        """Yield the versions that sampled the agent's tokens here, including returned calls of turns in progress."""
        for turn in self._turns[self.inherited :]:
            for span in turn.completion.spans:
                yield span.version
        for sampler in self._samplers():
            yield from sampler.running_versions()

    def newest_version(self) -> PolicyVersion | None:
        """Return the version that sampled the agent's newest token; None before its first."""
        sampled = (turn.completion.spans[-1] for turn in reversed(self._turns) if turn.completion.spans)
        newest = next(sampled, None)
        return None if newest is None else newest.version

    def header(self) -> TrajectoryHeader:
        """Make the agent's part of the episode's header.

        Raises:
            RewardError: rewards of one name, or of one turn, are too large together.
        """
        oldest = min(self.versions(), key=_age, default=None) or self.newest_version()
        rewards = () if self.is_void else self.rewards
        named = sum_by_key((given.name, given.value) for given in rewards)
        by_turn = sum_by_key((given.turn, given.weighted) for given in rewards if given.turn is not None)
        for total in (*named.values(), *by_turn.values()):
            finite_reward(total, f"episode {self._episode.spec.episode_id}, seat {self.seat!r}")
        reward = math.fsum(given.weighted for given in rewards) if rewards else None
        return TrajectoryHeader(
            seat=self.seat,
            index=self.index,
            policy=self.policy,
            reward=reward,
            tokens=self._sampled,
            oldest_step=oldest.step if oldest else 0,
            lineage=oldest.lineage if oldest else 0,
            turn_rewards=tuple(by_turn.items()),
            named_rewards=() if named == {REWARD: reward} else tuple(named.items()),
            turn_states=self._turn_states,
        )

    def suspend(self) -> None:
        """Cut the calls in flight, and release the engine's resources, because the episode is parked."""
        for sampler in self._samplers():
            sampler.suspend()

    def close(self) -> None:
        """Release the engine's resources. Idempotent."""
        for sampler in self._samplers():
            sampler.close()


def _has_foreign_call(entry: TurnEntry) -> bool:
    return entry.reply is not None and any("form" in call for call in entry.reply.calls)


def _age(version: PolicyVersion) -> tuple[int, int]:
    return version.lineage, version.step
