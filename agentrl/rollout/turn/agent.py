"""One agent of a running episode: the engine samples its turns, or the journal recalls them.

Invariants
1. A turn is in the journal before the environment sees it, with the tokens exactly as they were sampled.
2. A turn that the journal holds is not sampled again: it gets the recorded tokens, of the same context.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from array import array
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NoReturn, get_args

import msgspec
import numpy as np

from agentrl.core.errors import EnvironmentDefinitionError, EpisodeError
from agentrl.core.ids import opening_digest
from agentrl.core.records import Message, Role, SampledTurn, ToolSpec, Turn
from agentrl.core.text import agent_name, plural, valid_unicode
from agentrl.core.tokens import Completion, Tokens
from agentrl.environment.context import LimitReachedError
from agentrl.journal.entries import TurnEntry, framed, request_hash
from agentrl.observe.metrics import DEMONSTRATED
from agentrl.rollout.calls.journal import current_strand
from agentrl.rollout.calls.journal_data import encode, encode_arguments
from agentrl.rollout.calls.mismatch import shortened_repr
from agentrl.rollout.turn.recorder import TurnRecorder
from agentrl.rollout.turn.sampler import TurnSampler
from agentrl.rollout.turn_entries import completion_from_entry, decode_message

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, SamplingParams
    from agentrl.core.records import FinishReason, Int32Array, PolicyVersion
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode

CHARACTERS_PER_TOKEN = 64
"""Maximum characters per token of context: longer messages are refused without tokenizing, since no tokenizer packs
more text than this into a token."""


@dataclass(slots=True, eq=False)
class TurnInProgress:
    """One `act`: its arguments, checked once it has asked, and its answer. Smaller than functions inside `act`."""

    _agent: LiveAgent
    messages: tuple[Message, ...]
    max_tokens: int | None
    reply: str | None
    state: str | None
    choices: Sequence[str]
    place: asyncio.Future[None] | None = None
    """Ends when the turns before it have ended; None if there are none."""
    sampled: tuple[Completion, Message | LimitReachedError] | None = None
    call: JournaledCall = field(init=False)
    sampling: SamplingParams = field(init=False)

    def describe(self) -> str:
        text = " / ".join(message.content for message in self.messages)
        return f"a turn of {agent_name(self._agent.seat, self._agent.index)} asked {shortened_repr(text)}"

    def ask(self, call: JournaledCall) -> bytes:
        return self._agent.ask(call, self)

    def __call__(self, call: JournaledCall) -> Awaitable[TurnEntry]:
        """Sample the turn; without a name, which a call in flight would hold as a bound method."""
        return self._agent.generate(call, self)


class LiveAgent(TurnRecorder):
    """One conversation that the program leads."""

    __slots__ = ("_number", "_pending", "_queue", "_refused", "_rows", "_sampler")

    def __init__(self, episode: LiveEpisode, seat: str, index: int, tools: Sequence[ToolSpec]) -> None:
        super().__init__(episode, seat, index)
        self._sampler = TurnSampler(episode, seat, f"{seat}.{index}")
        self._rows = AgentTokenRows(self._settings.chat_format, tools)
        self._pending: tuple[Message, ...] = ()
        self._refused: tuple[str, ...] = ()
        """Strands whose turns a limit has refused since the last turn."""
        self._queue: tuple[TurnInProgress, ...] = ()
        """The new turn in progress, and the turns that wait for it in the order of their arrival."""
        self._number = len(episode.agents)
        """Index in `LiveEpisode.agents`."""

    def _samplers(self) -> tuple[TurnSampler]:
        return (self._sampler,)

    async def act(
        self,
        *messages: Message,
        max_tokens: int | None = None,
        reply: str | None = None,
        state: str | None = None,
        choices: Sequence[str] = (),
    ) -> Turn:
        """Take one turn: wait for its place, render its context, recall or generate the completion, and parse it."""
        journal, turn = self._episode.journal, TurnInProgress(self, messages, max_tokens, reply, state, choices)
        # A turn waits until no other strand has one of the agent in progress, in the order of arrival.
        if self._queue:
            turn.place = asyncio.get_running_loop().create_future()
        self._queue = (*self._queue, turn)
        try:
            # The time limit pauses while the run's engine samples, but not while a bot or an endpoint does.
            limit = None if self._settings.is_external else self._episode.limit
            entry = await journal.call(turn.ask, turn.describe, TurnEntry, turn, memoised="a turn", limit=limit)
            if turn.sampled is not None:
                completion, answer = turn.sampled
                self._episode.partials.turn_recorded(turn.call)
            else:
                self._rows.ask_again(entry.context_ids, turn.messages, entry.row)
                completion = completion_from_entry(entry)
                answer = self._parse(entry.context_ids, completion, self._rows.tools)
                answer = self._name_foreign_call(answer, entry.context_ids, completion, self._rows.tools, entry)
            return self._answer(turn, completion, answer)
        except LimitReachedError as error:
            path = current_strand().path
            if path in self._refused:
                self._episode.add_note("run() caught a limit of an agent, and asked the agent again")
                journal.end_with(error)
            self._refused = (*self._refused, path)
            raise
        finally:
            at = self._queue.index(turn)
            self._queue = (*self._queue[:at], *self._queue[at + 1 :])
            if self._queue and self._queue[0].place and not self._queue[0].place.done():
                self._queue[0].place.set_result(None)

    def ask(self, call: JournaledCall, turn: TurnInProgress) -> bytes:
        """Check the arguments of an `act`, and hash everything that determines the turn, without a tokenizer.

        Raises:
            EnvironmentDefinitionError: a message or the state is of another type.
        """
        messages = tuple(map(_valid, (*self._pending, *turn.messages)))
        messages = tuple(map(decode_message, call.edits)) or messages
        if turn.state is not None and not isinstance(turn.state, str):
            raise EnvironmentDefinitionError(f"act() takes its state as text, not as {type(turn.state).__name__}")
        turn.call, turn.messages = call, messages
        turn.sampling = self._sampling(turn.max_tokens if turn.reply is None else 1)
        parts: tuple[bytes, ...] = ()
        if turn.reply is not None:
            turn.reply = valid_unicode(turn.reply)
            parts = (b"reply", turn.reply.encode())
        if turn.state is not None:
            turn.state = valid_unicode(turn.state)
            parts = (*parts, b"state", turn.state.encode())
        parts = (*parts, *(b"choice" + valid_unicode(choice).encode() for choice in turn.choices))
        opening = _opening_of_question(
            self.seat, self.index, turn.sampling.max_tokens, self._settings.chat_format.fingerprint
        )
        return request_hash(*self._rows.question(messages), *parts, opening=opening)

    async def generate(self, call: JournaledCall, turn: TurnInProgress) -> TurnEntry:
        """Wait for the turn's place, render its context, sample it or take the demonstrated reply, and parse it.

        Raises:
            LimitReachedError: the agent has no turn left, or its messages or reply do not fit.
        """
        if turn.place is not None:
            await turn.place
        call.question = self.ask(call, turn)
        max_turns = self._settings.limits.max_turns
        clock, rows, position = self._episode.services.clock, self._rows, self._rows.position()
        start_s = clock.monotonic()
        if self._episode.journal.is_over_time:
            raise self._episode.journal.time_is_up()
        if len(self._turns) >= max_turns:
            raise LimitReachedError(
                f"agent {self.seat!r} has used its {plural(max_turns, 'turn')}", stop_reason="max_turns"
            )
        try:
            context = self._ask(turn.messages, self._settings.limits.max_context)
            if turn.choices and turn.reply is None and not self._settings.is_external:
                turn.sampling = self._among(turn, context)
            completion = await self._sampler.sample(
                call, rows.context(), rows.row, rows.opening, turn.sampling, self._sampled
            )
            if turn.reply is not None:
                completion = self._completion_of_reply(turn.reply, context, completion)
        except BaseException:  # the program may catch a timeout or a limit, and ask something else
            rows.withdraw(position)
            raise
        seconds = clock.monotonic() - start_s
        answer = self._parse(context, completion, rows.tools)
        answer = self._name_foreign_call(answer, context, completion, rows.tools)
        entry = self._entry(
            turn.messages, rows.row, context, rows.before, completion, answer, seconds, self._sampler.pauses
        )
        if turn.state is not None:
            entry = msgspec.structs.replace(entry, state=turn.state)
        turn.sampled = completion, answer
        return entry

    def _among(self, turn: TurnInProgress, context: bytes) -> SamplingParams:
        """Return sampling parameters that allow only the turn's choices.

        Raises:
            EpisodeError: the engine or the model cannot be held to them, or the turn is too short for one.
        """
        engine, chat_format = self._episode.services.engine.capabilities, self._settings.chat_format
        texts = [tuple(chat_format.encode(choice, array("i", context))) for choice in turn.choices]
        longest = max(map(len, texts))
        problems = {
            "the model thinks before it answers": chat_format.call_frame is None,
            f"the engine {engine.name!r} cannot be held to choices": not (engine.choices or engine.grammars),
            f"one has {longest} tokens, so raise sampling.max_tokens": longest > turn.sampling.max_tokens,
        }
        for problem in (text for text, is_met in problems.items() if is_met):
            raise EpisodeError(
                f"{self._episode.name}:{self.seat}.{self.index}: act(choices={[*turn.choices]}): {problem}",
                reason="environment_error",
            )
        grammar = {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in turn.choices]}
        tag = json.dumps({"type": "structural_tag", "format": grammar})
        return dataclasses.replace(turn.sampling, choices=tuple(texts), grammar=tag)

    def _answer(self, turn: TurnInProgress, completion: Completion, answer: Message | LimitReachedError) -> Turn:
        """Append the policy's answer to the conversation, and return it as a turn.

        Raises:
            LimitReachedError: the answer is the refusal of a remote endpoint.
        """
        self._pending = ()
        if turn.reply is not None:
            self._episode.metric(DEMONSTRATED, 1.0, self)
        assert turn.call.strand is not None
        turn.call.strand.speaker = self._number
        if self._episode.limit is not None:
            self._episode.limit.restart()
        if isinstance(answer, LimitReachedError):
            raise answer
        self._rows.answer(completion)
        self._refused = ()
        self._count_reply(answer, completion, self._rows.tools, is_cut=completion.finish_reason == "length")
        return self._append(turn.call, turn.messages, answer, completion, turn.state)

    def _completion_of_reply(self, reply: str, context: bytes, completion: Completion) -> Completion:
        """Make the completion of a given reply to a prompt that ends with `context`.

        It replaces the one token of `completion`, which shows the version that acts.

        Raises:
            EpisodeError: the policy's turns cannot be trained on (external, filtered or expert-routed).
            LimitReachedError: it is longer than the context.
        """
        settings, has_routing = self._settings, self._episode.services.engine.capabilities.expert_routing
        if settings.is_external or settings.sampling.is_filtered or has_routing:
            raise EpisodeError(
                f"{self._episode.name}:{self.seat}.{self.index}: a demonstrated reply needs a trained policy without "
                "top_k, top_p and min_p, which could exclude some of its tokens, and without engine.capture_routing",
                reason="environment_error",
            )
        tokens = np.array(settings.chat_format.write_reply(reply, array("i", context), self._rows.tools), np.int32)
        if len(self._rows) + len(tokens) > settings.limits.max_context:
            self._full(len(self._rows) + len(tokens))
        self._sampler.close()  # close the session, because its KV cache contains the sampled token
        return Completion.of(Tokens.of_version(tokens, completion.spans[0].version), "stop")

    def _ask(self, messages: Sequence[Message], max_context: int) -> bytes:
        """Convert new messages to tokens, check that they fit, and count rewrites of the conversation."""
        characters = sum([len(message.content) for message in messages])
        if characters > CHARACTERS_PER_TOKEN * max_context:
            self._full(characters // CHARACTERS_PER_TOKEN)
        context = self._rows.ask(messages)
        if len(self._rows) >= max_context:
            self._full(len(self._rows))
        rewrites = self._settings.chat_format.rewrites
        for cause in rewrites and applicable_rewrite_causes(rewrites, self._messages, messages):
            self._episode.metric(f"history/{cause}", 1.0, self)
        return context

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

    def _row_length(self) -> int:
        return len(self._rows)

    def keep_version(self, version: PolicyVersion) -> None:
        """Sample all later turns with a version."""
        self._sampler.keep_version(version)

    def restart(self, *messages: Message) -> None:
        """Begin a new row; the messages are sent with the next `act`.

        Raises:
            EpisodeError: another strand has a turn of the agent in progress.
        """
        if self._queue:
            error = EpisodeError(
                f"{self._episode.name}:{self.seat}.{self.index}: restart() during a turn that another coroutine of "
                "ctx.gather, or another tool call of the same turn, asked for. Give each its own agent: "
                f"ctx.agent({self.seat!r}, index)",
                reason="environment_error",
            )
            self._episode.journal.end_with(error)
        self._rows.restart()
        self._messages = []
        self._pending = messages


@dataclass(slots=True, eq=False)
class AgentTokenRows:
    """Message ↔ token bookkeeping of one agent: its rows of tokens, the last of them open.

    1. A row's tokens are, turn by turn, `context_ids + token_ids`: exactly the engine's input and output, so the
       trainer's row equals the engine's context token for token. Sampled tokens are never tokenized again.
    2. The tokens of new messages are a function of the earlier turns and `question`: for a repeated question, they are
       known.
    """

    _format: ChatFormat
    tools: Sequence[ToolSpec]
    _row_tokens: array[int] = field(default_factory=lambda: array("i"))
    _after: FinishReason | None = None
    _turn: Sequence[int] = ()
    """Tokens of the last turn, if it was cut."""
    _context: Sequence[int] = ()
    """New context tokens of that turn."""
    _pending_messages: Sequence[Message] = ()
    _earlier: tuple[Message, ...] = ()
    """Answered messages of the conversation, if the template reads them."""
    _turns: tuple[SampledTurn, ...] = ()
    """Sampled turns of the conversation, if the template may rewrite its history."""
    row: int = 0
    before: int = 0
    """Number of tokens of the row before the newest messages; 0 in a new row."""
    opening: int = 0
    """`GenerateRequest.opening` of the conversation, from its first row; 0 before its first turn."""

    def __len__(self) -> int:
        return len(self._row_tokens)

    def question(self, messages: Sequence[Message]) -> tuple[bytes, ...]:
        """Return all inputs that determine the tokens of new messages, besides the format, for hashing without a
        tokenizer."""
        if self._after is None:
            before = encode_arguments([(tool.name, tool.description, dict(tool.parameters)) for tool in self.tools])
        else:
            before = self._after.encode() + (b"" if self._after == "stop" else array("i", self._turn).tobytes())
        return (before, *map(_hashable, messages))

    def ask(self, messages: Sequence[Message]) -> bytes:
        """Append messages, and return the new context tokens as `int32`. If the template rewrites earlier tokens and
        the run forks then, a new row begins, and these are the whole context."""
        row = self.row
        if self._after is None:
            context_ids = self._format.start(messages, self.tools)
        else:
            context_ids = self._format.extend(
                messages,
                after=self._after,
                turn=self._turn,
                context=self._context,
                earlier=self._earlier,
                tools=self.tools,
            )
            rewritten = self._format.rewritten(self._turns, messages, self.tools) if self._turns else None
            if rewritten is not None and not self._is_same([*self._row_tokens, *context_ids], rewritten):
                context_ids, row = rewritten, row + 1
        context = array("i", context_ids).tobytes()
        self.ask_again(context, messages, row)
        return context

    def _is_same(self, first: Sequence[int], second: Sequence[int]) -> bool:
        """Whether two contexts have the same text, except for white space and the tokens that end a turn."""
        if list(first) == list(second):
            return True
        ends = {*self._format.stop_token_ids}
        texts = ["".join(self._format.decode([t for t in ids if t not in ends]).split()) for ids in (first, second)]
        return texts[0] == texts[1]

    def ask_again(self, context: bytes, messages: Sequence[Message], row: int) -> None:
        """Append the context tokens of a journal entry; begin its row if it is not the open one."""
        if row != self.row:
            self._row_tokens = array("i")
            self.row = row
        is_kept = self._format.forks or self._format.reads_earlier
        self._pending_messages, self.before = messages if is_kept else (), len(self._row_tokens)
        self._row_tokens.frombytes(context)
        self.opening = self.opening or opening_digest(context)

    def position(self) -> tuple[int, array[int], int, int]:
        """Return the end of the open row, to `withdraw` a question without an answer."""
        return self.row, self._row_tokens, len(self._row_tokens), self.opening

    def withdraw(self, position: tuple[int, array[int], int, int]) -> None:
        """Remove the tokens of messages that were not answered."""
        self.row, self._row_tokens, length, self.opening = position
        del self._row_tokens[length:]

    def answer(self, completion: Completion) -> None:
        """Append the tokens the engine sampled."""
        self._after = completion.finish_reason
        context = self._row_tokens[self.before :] if self._after != "stop" or self._format.forks else ()
        self._row_tokens.frombytes(completion.token_ids.astype(np.intc, copy=False).tobytes())
        if self._format.reads_earlier:
            self._earlier = (*self._earlier, *self._pending_messages)
        self._turn, self._context = ((), ()) if self._after == "stop" else (completion.token_ids.tolist(), context)
        if self._format.forks:
            turn = SampledTurn(self._pending_messages, completion.token_ids.tolist(), context)
            self._turns = (*self._turns, turn)

    def restart(self) -> None:
        """Begin a new row."""
        if len(self._row_tokens):
            self.row += 1
        self._row_tokens = array("i")
        self._after = None
        self._turns, self._earlier = (), ()

    def context(self) -> Int32Array:
        """The whole open row, as sent to the engine; shape [T]."""
        return np.frombuffer(self._row_tokens.tobytes(), dtype=np.int32)


@lru_cache(maxsize=256)
def _opening_of_question(seat: str, index: int, max_tokens: int, fingerprint: bytes) -> bytes:
    """Return the parts of a question that an agent's turns share."""
    return framed(encode((seat, index)), max_tokens.to_bytes(4, "little"), fingerprint)


_ROLES = get_args(Role)


def _valid(message: object) -> Message:
    """Return a message whose text any tokenizer and database can process.

    Raises:
        EnvironmentDefinitionError: the value is not a message.
    """
    if not isinstance(message, Message):
        raise EnvironmentDefinitionError(
            f"act() and restart() need messages, such as agentrl.user('…'), not {type(message).__name__}"
        )
    if message.role not in _ROLES:  # chat templates leave out messages of roles that they do not know
        raise EnvironmentDefinitionError(f"a message has role {message.role!r}; use one of {', '.join(_ROLES)}")
    if not isinstance(message.content, str):
        kind = type(message.content).__name__
        raise EnvironmentDefinitionError(f"the content of a {message.role} message is {kind}; it must be a string")
    if type(message.content) is str and message.content.isascii():
        return message
    return dataclasses.replace(message, content=valid_unicode(message.content))


def _hashable(message: Message) -> bytes:
    """Encode a message for hashing."""
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    thinking = (message.thinking,) if message.thinking else ()
    fields: bytes = (encode_arguments if calls else encode)(
        (message.role, message.tool_call_id, message.name, calls, *thinking)
    )
    return fields + message.content.encode("utf-8", "replace")


def applicable_rewrite_causes(
    rewrites: Sequence[str], conversation: Sequence[Message], messages: Sequence[Message]
) -> Iterator[str]:
    """Yield the causes for which a template rewrites a conversation when new messages arrive."""
    replies = [message for message in conversation if message.role == "assistant"]
    if not replies:
        return
    for cause in rewrites:
        if cause == "thinking":
            applies = any(message.thinking for message in replies) and any(
                message.role == "user" for message in messages
            )
        elif cause == "whitespace":
            applies = replies[-1].content != replies[-1].content.strip()
        else:
            applies = cause in ("tools", "prompt", "history")
        if applies:
            yield cause
