"""One agent of a running episode: the engine samples its turns, or the journal recalls them.

Invariants
1. A turn is in the journal before the environment sees it, with the tokens exactly as they were sampled.
2. A turn that the journal holds is not sampled again: it gets the recorded tokens, of the same context.
"""

from __future__ import annotations

import asyncio
import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, get_args

import msgspec
import numpy as np

from agentrl.core.errors import EngineError, EnvironmentDefinitionError, EpisodeError
from agentrl.core.ids import opening_digest
from agentrl.core.records import Message, Role, SampledTurn, ToolSpec, Turn, is_cut
from agentrl.core.text import agent_name, plural, valid_unicode
from agentrl.core.tokens import Completion, Tokens
from agentrl.environment.context import LimitReachedError
from agentrl.journal.entries import CancelEntry, EffectEntry, TimeLimitEntry, TurnEntry, request_hash
from agentrl.observe.metrics import DEMONSTRATED
from agentrl.rollout.calls.journal import CallExecution
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


class TurnRequest(NamedTuple):
    """The arguments of one `act`, checked."""

    messages: tuple[Message, ...]
    sampling: SamplingParams
    reply: str | None
    state: str | None


class LiveAgent(TurnRecorder):
    """One conversation that the program leads."""

    __slots__ = ("_is_acting", "_number", "_pending", "_queue", "_rows", "_sampler")

    def __init__(self, episode: LiveEpisode, seat: str, index: int, tools: Sequence[ToolSpec]) -> None:
        super().__init__(episode, seat, index)
        self._sampler = TurnSampler(episode, seat, f"{seat}.{index}")
        self._rows = AgentTokenRows(self._settings.chat_format, tools)
        self._pending: tuple[Message, ...] = ()
        self._is_acting = False
        """Whether a new turn is in progress that other strands must wait for."""
        self._queue: tuple[asyncio.Future[None], ...] = ()
        """Strands that wait for it, in the order of their arrival."""
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
    ) -> Turn:
        """Take one turn: render its context, open its call, recall or generate the completion, record and parse it."""
        self._episode.check_not_stopped("act()")
        self._episode.check_seat_acted(self)
        journal = self._episode.journal
        holds = not journal.has_strands or await self._begin_turn(messages, max_tokens, reply, state)
        try:
            pending, before = self._pending, self._rows.position()
            request = self._request(messages, max_tokens, reply, state)
            digest = self._digest(request)
            try:
                context = self._render(request, digest)
                call = journal.open(digest, partial(self._describe, request.messages))
                if call.waits:
                    await journal.reach(call)
                recorded_turn = journal.recall(call, TurnEntry)
                if recorded_turn is not None:
                    completion = completion_from_entry(recorded_turn)
                    answer = self._parse(context, completion, self._rows.tools)
                    answer = self._name_foreign_call(answer, context, completion, self._rows.tools, recorded_turn)
                else:
                    completion, answer, entry = await self._generate(call, request, context)
                    self._record(call, entry)
            except BaseException:  # the program may catch a timeout or a limit, and ask something else
                self._pending = pending
                if holds:
                    self._rows.withdraw(before)
                raise
            return self._answer(call, request, completion, answer)
        finally:
            if holds and self._is_acting:
                self._end_turn()

    async def _begin_turn(
        self, messages: tuple[Message, ...], max_tokens: int | None, reply: str | None, state: str | None
    ) -> bool:
        """Wait until no other strand has a turn of the agent in progress, in the order of arrival. Returns whether the
        turn is now the one in progress; one that is recorded as cancelled never is.

        A wait is a call of its own, so re-execution asks for the turns in the recorded order. During replay, a turn is
        rendered only when it is due, because it continues the recorded turns before it.
        """
        journal = self._episode.journal
        digest = request_hash(b"wait", encode((self.seat, self.index)))
        name = agent_name(self.seat, self.index)
        recorded = journal.next_recorded()
        is_wait = journal.peek(digest) is not None
        if not is_wait and isinstance(recorded, CancelEntry):
            return False
        if journal.is_replaying and not is_wait and isinstance(recorded, TurnEntry | TimeLimitEntry | None):
            if recorded is None:
                self._check_limits(messages, max_tokens, reply, state)
            try:
                await journal.reach_next()
            except asyncio.CancelledError:
                if recorded is None:
                    journal.cancel(journal.open(digest, lambda: f"a wait for another turn of {name}"))
                raise
        if is_wait or self._is_acting:
            call = journal.open(digest, lambda: f"a wait for another turn of {name}")
            await journal.reach(call)
            if journal.recall(call, EffectEntry) is None:
                clock = self._episode.services.clock
                start_s = clock.monotonic()
                with CallExecution(journal, call):
                    await self._wait_for_turn()
                entry = EffectEntry(f"wait for {name}", "read", None, None, clock.monotonic() - start_s)
                try:
                    journal.record(call, entry)
                except BaseException:
                    self._end_turn()
                    raise
        self._is_acting = True
        return True

    def _check_limits(
        self, messages: tuple[Message, ...], max_tokens: int | None, reply: str | None, state: str | None
    ) -> None:
        """Raise the error of a turn that a limit refuses before the turns that it waits for.

        Raises:
            LimitReachedError: the agent has no turn left, or the messages do not fit.
        """
        pending, before = self._pending, self._rows.position()
        try:
            self._append_within(
                self._request(messages, max_tokens, reply, state).messages, self._settings.limits.max_context
            )
        finally:
            self._pending = pending
            self._rows.withdraw(before)

    async def _wait_for_turn(self) -> None:
        """Wait until the turn in progress, and those that waited before, have ended."""
        if self._is_acting:
            place = asyncio.get_running_loop().create_future()
            self._queue = (*self._queue, place)
            try:
                await place
            except BaseException:
                if place.cancelled():
                    self._queue = tuple(other for other in self._queue if other is not place)
                else:
                    self._end_turn()
                raise

    def _end_turn(self) -> None:
        """Let the strand continue that has waited longest, if one waits."""
        while self._queue:
            place, *others = self._queue
            self._queue = tuple(others)
            if not place.done():
                place.set_result(None)
                return
        self._is_acting = False

    def _describe(self, messages: Sequence[Message]) -> str:
        text = " / ".join(message.content for message in messages)
        return f"a turn of {agent_name(self.seat, self.index)} asked {shortened_repr(text)}"

    def _request(
        self, messages: tuple[Message, ...], max_tokens: int | None, reply: str | None, state: object
    ) -> TurnRequest:
        """Check the arguments of an `act`.

        Raises:
            EnvironmentDefinitionError: a message or the state is of another type.
            LimitReachedError: the agent has no turn left.
        """
        limit, journal = self._settings.limits.max_turns, self._episode.journal
        if len(self._turns) >= limit:
            raise LimitReachedError(
                f"agent {self.seat!r} has used its {plural(limit, 'turn')}", stop_reason="max_turns"
            )
        messages, self._pending = tuple(map(_valid, (*self._pending, *messages))), ()
        if not journal.is_new:
            messages = tuple(map(decode_message, journal.fork_edits())) or messages
        if state is not None and not isinstance(state, str):
            raise EnvironmentDefinitionError(f"act() takes its state as text, not as {type(state).__name__}")
        return TurnRequest(
            messages,
            self._sampling(max_tokens if reply is None else 1),
            None if reply is None else valid_unicode(reply),
            None if state is None else valid_unicode(state),
        )

    def _digest(self, request: TurnRequest) -> bytes:
        """Hash everything that determines the turn, without a tokenizer."""
        return request_hash(
            encode((self.seat, self.index)),
            request.sampling.max_tokens.to_bytes(4, "little"),
            *self._rows.question(request.messages),
            *(() if request.reply is None else (b"reply", request.reply.encode())),
            *(() if request.state is None else (b"state", request.state.encode())),
        )

    def _render(self, request: TurnRequest, digest: bytes) -> bytes:
        """Append the messages to the conversation's tokens, and return the new ones as `int32`.

        A recorded turn brings its tokens along. Only a new turn must fit the context: the limit may have been lowered
        since.
        """
        journal = self._episode.journal
        entry = None if journal.is_new else journal.peek(digest)
        if isinstance(entry, TurnEntry):
            self._rows.ask_again(entry.context_ids, request.messages, entry.row)
            return entry.context_ids
        if entry is not None:
            return b""  # the turn was cancelled, or refused for time
        return self._ask(request.messages, self._settings.limits.max_context)

    async def _generate(
        self, call: JournaledCall, request: TurnRequest, context: bytes
    ) -> tuple[Completion, Message | LimitReachedError, TurnEntry]:
        """Reserve the context's KV, sample the turn or take the demonstrated reply for it, and parse it."""
        journal, clock = self._episode.journal, self._episode.services.clock
        start_s = clock.monotonic()
        if journal.is_over_time:
            journal.refuse_for_time(call)
        # The time limit pauses while the run's engine samples, but not while a bot or an endpoint does.
        limit = None if self._settings.is_external else self._episode.limit
        rows, sampler = self._rows, self._sampler
        row, before = rows.row, rows.before
        try:
            with CallExecution(journal, call, "a turn", limit):
                completion = await sampler.sample(
                    call, rows.context(), row, rows.opening, request.sampling, self._sampled
                )
                if request.reply is not None:
                    completion = self._completion_of_reply(request.reply, context, completion)
        except EngineError as error:
            journal.fail(error)
            raise
        seconds = clock.monotonic() - start_s
        answer = self._parse(context, completion, rows.tools)
        answer = self._name_foreign_call(answer, context, completion, rows.tools)
        entry = self._entry(request.messages, row, context, before, completion, answer, seconds, sampler.pauses)
        if request.state is not None:
            entry = msgspec.structs.replace(entry, state=request.state)
        return completion, answer, entry

    def _answer(
        self, call: JournaledCall, request: TurnRequest, completion: Completion, answer: Message | LimitReachedError
    ) -> Turn:
        """Append the policy's answer to the conversation, and return it as a turn.

        Raises:
            LimitReachedError: the answer is the refusal of a remote endpoint.
        """
        if request.reply is not None:
            self._episode.metric(DEMONSTRATED, 1.0, self)
        assert call.strand is not None
        call.strand.speaker = self._number
        if self._episode.limit is not None:
            self._episode.limit.restart()
        if isinstance(answer, LimitReachedError):
            raise answer
        self._rows.answer(completion)
        self._count_reply(answer, completion, self._rows.tools, is_cut=is_cut(completion.finish_reason))
        return self._append(call, request.messages, answer, completion, request.state)

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
        chat_format = settings.chat_format
        reply_ids, stop = chat_format.encode(reply, array("i", context)), chat_format.stop_token_ids
        tokens = np.array(reply_ids if reply_ids[-1:] and reply_ids[-1] in stop else [*reply_ids, stop[0]], np.int32)
        if len(self._rows) + len(tokens) > settings.limits.max_context:
            self._full(len(self._rows) + len(tokens))
        self._sampler.close()  # close the session, because its KV cache contains the sampled token
        return Completion.of(Tokens.of_version(tokens, completion.spans[0].version), "stop")

    def _ask(self, messages: Sequence[Message], max_context: int) -> bytes:
        """Convert new messages to tokens, check that they fit, and count rewrites of the conversation."""
        context = self._append_within(messages, max_context)
        for cause in applicable_rewrite_causes(self._settings.chat_format.rewrites, self._messages, messages):
            self._episode.metric(f"history/{cause}", 1.0, self)
        return context

    def _append_within(self, messages: Sequence[Message], max_context: int) -> bytes:
        """Convert new messages to tokens, and check that they fit."""
        characters = sum([len(message.content) for message in messages])
        if characters > CHARACTERS_PER_TOKEN * max_context:
            self._full(characters // CHARACTERS_PER_TOKEN)
        context = self._rows.ask(messages)
        if len(self._rows) >= max_context:
            self._full(len(self._rows))
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
        if self._is_acting:
            error = EpisodeError(
                f"{self._episode.name}:{self.seat}.{self.index}: restart() during a turn that another coroutine of "
                "ctx.gather, or another tool call of the same turn, asked for. Give each its own agent: "
                f"ctx.agent({self.seat!r}, index)",
                reason="environment_error",
            )
            self._episode.journal.fail(error)
            raise error
        self._rows.restart()
        self._messages = []
        self._pending = messages


class AgentTokenRows:
    """Message ↔ token bookkeeping of one agent: its rows of tokens, the last of them open.

    1. A row's tokens are, turn by turn, `context_ids + token_ids`: exactly the engine's input and output, so the
       trainer's row equals the engine's context token for token. Sampled tokens are never tokenized again.
    2. The tokens of new messages are a function of the earlier turns and `question`: for a repeated question, they are
       known.
    """

    __slots__ = (
        "_after",
        "_context",
        "_earlier",
        "_format",
        "_pending_messages",
        "_row_tokens",
        "_turn",
        "_turns",
        "before",
        "opening",
        "row",
        "tools",
    )

    def __init__(self, chat_format: ChatFormat, tools: Sequence[ToolSpec]) -> None:
        self._format = chat_format
        self.tools = tools
        self._row_tokens = array("i")
        self._after: FinishReason | None = None
        self._turn: Sequence[int] = ()
        """Tokens of the last turn, if it was cut."""
        self._context: Sequence[int] = ()
        """New context tokens of that turn."""
        self._pending_messages: Sequence[Message] = ()
        self._earlier: tuple[Message, ...] = ()
        """Answered messages of the conversation, if the template reads them."""
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
            before = self._after.encode() + (b"" if self._after == "stop" else array("i", self._turn).tobytes())
        return (self._format.fingerprint, before, *map(_hashable, messages))

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
    content = valid_unicode(message.content)
    is_valid = type(message.content) is str and content == message.content
    return message if is_valid else dataclasses.replace(message, content=content)


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
