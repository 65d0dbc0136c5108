"""A seat held by an external agent: every request to the gateway is a turn of the seat.

`ExternalAgent.reply` finds the row of tokens a request continues (`token_tree.py`), samples the reply or recalls it,
and records the turn. Calls run concurrently, each row with its own engine session.

Invariants
1. The seat is one agent with one reward, however many rows its client's conversations become: they are one unit.
2. A call is named by its content, without volatile text, and by a number among equal calls. So a restarted attempt
   recalls the replies of earlier attempts in any order of requests; replies that are not requested again
   are not part of it.
3. A recalled reply is written with the context it was sampled from, to the token.
4. A client gets a reply after it is on disk: a reply that it has seen is never sampled again, despite any kills.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from array import array
from bisect import bisect_left
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
import numpy as np

from agentrl.core import ids
from agentrl.core.errors import (
    EnvironmentDefinitionError,
    GrammarNotCheckedError,
    GrammarRefusedError,
    InfrastructureError,
    ModelError,
    describe_user_code_error,
)
from agentrl.core.ids import stable_hash64
from agentrl.core.records import Message
from agentrl.core.reply_formats import UNWRITTEN_ID
from agentrl.core.text import common_prefix_length, plural, shorten_lines
from agentrl.core.tokens import Completion, KeptCount, Tokens
from agentrl.environment.context import Endpoint, LimitReachedError, read_aliases
from agentrl.gateway.calls import (
    ChatReply,
    ChatRequest,
    ReplyEnd,
    ReplyForm,
    RequestRefusedError,
    TokenLogprob,
    ToolChoice,
    bounded_repr,
)
from agentrl.gateway.options import SAMPLING_FIELDS, ignored_fields_line, instructions, unsupported_reason
from agentrl.journal.entries import ExternalRequestParameters, TurnEntry, encode_body, request_hash
from agentrl.observe.metrics import CALLS_OUTSIDE, PROGRAM_FAILED, PROGRAM_OK
from agentrl.rollout.calls.journal_data import encode
from agentrl.rollout.calls.mismatch import FORK_REMEDY, REPLAY_REMEDY, describe_entry, shortened_repr
from agentrl.rollout.chat.byte_formats import JsonChatFormat
from agentrl.rollout.effects import count_call, perform_effect
from agentrl.rollout.external.reply_grammar import reply_grammar
from agentrl.rollout.external.token_tree import TokenTree, tools_text
from agentrl.rollout.turn.agent import CHARACTERS_PER_TOKEN
from agentrl.rollout.turn.recorder import TurnRecorder
from agentrl.rollout.turn.sampler import TurnSampler
from agentrl.rollout.turn_entries import completion_from_entry, encode_message, ended_by_text

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from agentrl.core.ports import SamplingParams
    from agentrl.core.records import ToolSpec
    from agentrl.environment.context import Aliases, EpisodeLimits
    from agentrl.gateway.server import AttemptEndpoint
    from agentrl.journal.entries import JournalEntry
    from agentrl.rollout.calls.journal import JournaledCall
    from agentrl.rollout.episode import LiveEpisode
    from agentrl.rollout.external.token_tree import RequestPlacement

T = TypeVar("T")

_ENDPOINT_FIELDS = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
"""Sampling parameters that a remote endpoint takes."""
BYTES_PER_TOKEN = 4
"""Bytes of text per token, to estimate lengths where another program tokenizes, or nothing does."""
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class ExternalAgent(TurnRecorder):
    """The agent of a seat whose turns an external agent requests.

    Args:
        episode: the running attempt.
        seat: seat of the environment.
        volatile: patterns of text that differs between requests by nature; see `TokenTree`.
        ignored_parameters: request fields that have no effect and are not refused.
    """

    __slots__ = (
        "_answered_one",
        "_conversation",
        "_ignored_parameters",
        "_in_progress",
        "_row_of_last_turn",
        "_row_samplers",
        "_tree",
        "difference",
        "edited_calls",
        "limit_reached",
    )

    def __init__(
        self, episode: LiveEpisode, seat: str, volatile: Sequence[re.Pattern[str]], ignored_parameters: Collection[str]
    ) -> None:
        super().__init__(episode, seat, 0)
        if self._settings.chat_format.forks:
            raise EnvironmentDefinitionError(
                f"seat {seat!r} is held by an external agent, which sends its own history: set model.history = 'keep'"
            )
        self._tree = TokenTree(self._settings.chat_format, volatile)
        self._row_samplers: dict[int, TurnSampler] = {}
        self._row_of_last_turn = 0
        """Number of tokens of the row that the last turn continued."""
        self._ignored_parameters = ignored_parameters
        self._in_progress = 0
        self._conversation: Sequence[Message] = ()
        self.limit_reached: LimitReachedError | None = None
        """First limit that refused a request."""
        self._answered_one = asyncio.Event()
        self.difference = ""
        """First request that is not recorded, and its difference from a recorded one that was not requested yet; empty
        if all were."""
        self.edited_calls: set[str] = set()
        """Calls whose replies a fork has replaced."""

    async def act(
        self,
        *messages: Message,
        max_tokens: int | None = None,
        reply: str | None = None,
        state: str | None = None,
        choices: Sequence[str] = (),
    ) -> NoReturn:
        raise EnvironmentDefinitionError(
            f"the turns of seat {self.seat!r} are requested through ctx.endpoint(); act() is not available"
        )

    def restart(self, *messages: Message) -> NoReturn:
        raise EnvironmentDefinitionError(
            f"the rows of seat {self.seat!r} are determined by its client through ctx.endpoint(); restart() is not "
            "available"
        )

    @property
    def conversation(self) -> Sequence[Message]:
        """The newest request and its reply; `messages` has all rows."""
        return self._conversation

    def count_tokens(self, request: ChatRequest) -> int:
        request = self._as_answered(request)
        self._check_length(request)
        length = self._render(self._tree.count_tokens, request)
        return length // BYTES_PER_TOKEN if self._settings.is_external else length

    def check(self, request: ChatRequest) -> None:
        self._check_stops(self._as_answered(request))
        self._check_limits(self._settings.limits, replies=request.n)

    async def reply(self, request: ChatRequest) -> ChatReply:
        request = self._as_answered(request)
        self._check_stops(request)
        run_sampling = self._sampling(request.max_tokens)
        sampling = dataclasses.replace(run_sampling, **dict(request.sampling))  # type: ignore[arg-type]
        self._check_limits(self._settings.limits)
        self._check_length(request)
        path = self._tree.identity(request.messages, request.tools)
        digest = request_hash(path, sampling.max_tokens.to_bytes(4, "little"), *map(_to_bytes, request.stop))
        if sampling != run_sampling or request.tool_choice.mode == "none":
            differences = json.dumps([dict(request.sampling), request.tool_choice.mode], sort_keys=True)
            digest = request_hash(digest, differences.encode())
        self._in_progress += 1
        try:
            return await self._episode.journal.call_named(
                f"{self.seat}:{digest.hex()}.",
                digest,
                partial(_asks, request),
                self._next_turn,
                partial(self._inherit, request),
                partial(self._recall, request, sampling),
                partial(self._sample_new, request, sampling),
            )
        finally:
            self._in_progress -= 1

    async def _next_turn(self) -> None:
        self._answered_one.clear()
        await self._answered_one.wait()

    def _inherit(self, request: ChatRequest, call: JournaledCall, recorded_turn: TurnEntry) -> ChatReply:
        """Return the reply of the episode that a fork came from.

        Raises:
            ReplayMismatchError: the program requests turns in another order than before.
        """
        placement = self._find_row(request)
        then = (recorded_turn.turn, recorded_turn.row, recorded_turn.parent_context)
        if then != (len(self._turns), placement.row.number, placement.before):
            self._episode.journal.mismatch(
                call.call_id,
                f"the journal holds turn {then[0]} of row {then[1]}",
                f"the program now requests it as turn {len(self._turns)} of row {placement.row.number}",
                remedy="",
            )
        context = np.concatenate([placement.context()[: placement.before], recorded_turn.context().token_ids])
        return self._recalled(request, call, self._tree.restate(placement, context), recorded_turn)

    def _recall(
        self, request: ChatRequest, sampling: SamplingParams, call: JournaledCall, recorded_turn: TurnEntry
    ) -> ChatReply:
        """Return the reply of an earlier attempt, whose entry holds its whole context."""
        placement = self._tree.restate(self._find_row(request), recorded_turn.context().token_ids)
        entry = msgspec.structs.replace(
            recorded_turn,
            row=placement.row.number,
            turn=len(self._turns),
            context_ids=placement.context_ids,
            parent_context=placement.before,
            messages=tuple(encode_message(message) for message in _new(request, placement)),
            request=_request_entry(request, placement, sampling),
        )
        self._count_untrained(sampling)
        self._episode.journal.record_again(call, entry)
        self._episode.partials.turn_recorded(call)
        self._episode.metric("replies/recalled", 1.0, self)
        return self._recalled(request, call, placement, recorded_turn)

    def _recalled(
        self, request: ChatRequest, call: JournaledCall, placement: RequestPlacement, recorded_turn: TurnEntry
    ) -> ChatReply:
        completion = completion_from_entry(recorded_turn)
        context, tools = placement.context_ids, _callable_tools(request)
        answer = self._parse(context, completion, tools)
        named = self._name_foreign_call(answer, context, completion, tools, recorded_turn)
        return self._reply(request, call, placement, completion, answer, named, recorded_turn.started)

    async def _sample_new(self, request: ChatRequest, sampling: SamplingParams, call: JournaledCall) -> ChatReply:
        """Sample a reply and write its turn."""
        clock = self._episode.services.clock
        placement = self._find_row(request)
        sampler = self._row_samplers.get(placement.row.number)
        if sampler is None:
            sampler = TurnSampler(self._episode, self.seat, f"{self.seat}.0.{placement.row.number}")
            self._row_samplers[placement.row.number] = sampler
        start_s = clock.monotonic()
        try:
            self._note_difference(call, request, placement, sampling)
            if len(placement.row.tokens) >= self._settings.limits.max_context:
                self._refuse_context(len(placement.row.tokens))
            if self._episode.services.engine.capabilities.grammars:
                grammar = reply_grammar(request, self._settings.chat_format.call_frame)
                sampling = dataclasses.replace(sampling, grammar=grammar)
            with self._episode.time_limit_paused():
                completion = await self._completion(request, sampler, call, placement, sampling)
            context, tools = placement.context_ids, _callable_tools(request)
            answer = self._parse(context, completion, tools)
            named = self._name_foreign_call(answer, context, completion, tools)
            entry = self._entry(
                _new(request, placement),
                placement.row.number,
                context,
                placement.before,
                completion,
                named,
                clock.monotonic() - start_s,
                sampler.pauses,
            )
            entry = msgspec.structs.replace(
                entry, temperature=sampling.temperature, request=_request_entry(request, placement, sampling)
            )
            self._record(call, entry)
        except GrammarRefusedError as error:
            self._tree.withdraw(placement)
            location = "tools" if request.tool_choice.mode == "required" else "response_format"
            raise RequestRefusedError(f"{location}: {error}", "invalid", location) from None
        except GrammarNotCheckedError as error:
            failure = InfrastructureError(str(error))
            self._episode.journal.fail(failure)
            raise failure from error
        except BaseException:
            self._tree.withdraw(placement)
            raise
        return self._reply(request, call, placement, completion, answer, named, entry.started)

    async def _completion(
        self,
        request: ChatRequest,
        sampler: TurnSampler,
        call: JournaledCall,
        placement: RequestPlacement,
        sampling: SamplingParams,
    ) -> Completion:
        """Sample a reply, or return the one with which a fork replaces it."""
        row, opening = placement.row.number, placement.opening()
        sample = partial(sampler.sample, call, placement.context(), row, opening, sampled_before=self._sampled)
        if not call.edits:
            completion = self._cut(await sample(sampling=sampling), request.stop)
            is_partial = completion.kept is not None and KeptCount.MISSING in completion.kept.counts
            return completion.lost(masked=self._count_untrained(sampling, lacks_sets=is_partial))
        self.edited_calls.add(call.call_id)
        one = dataclasses.replace(sampling, max_tokens=1)  # one sampled token reveals which version plays the seat
        completion = await sample(sampling=one)
        context = array("i", placement.context_ids)
        token_ids = self._settings.chat_format.write_reply(str(call.edits[-1]["content"]), context, request.tools)
        tokens = Tokens.of_version(np.array(token_ids, np.int32), completion.spans[-1].version)
        return Completion.of(tokens, "stop", completion.cached_tokens)

    def _count_untrained(self, sampling: SamplingParams, *, lacks_sets: bool = False) -> bool:
        """Count a turn with tokens that cannot be trained, because of how they are sampled; returns whether that is all
        of them.

        At temperature 0 a token has no gradient. Training computes no penalties, and needs the kept sets of filters.

        Args:
            sampling: how the turn is sampled.
            lacks_sets: whether some of its tokens have no kept sets.
        """
        if self._settings.is_external:  # no policy of a remote endpoint is trained
            return False
        cause = None
        if sampling.is_greedy:
            cause = "greedy"
        elif sampling.is_penalized:
            cause = "penalty"
        elif sampling.is_filtered and not self._episode.services.engine.capabilities.sampling_mask:
            cause = "filter"
        elif lacks_sets and sampling.grammar:
            cause = "grammar"
        if cause is not None and self._episode.spec.purpose == "train":
            self._episode.metric(f"untrained/{cause}", 1.0, self)
        return cause not in (None, "grammar")

    def _note_difference(
        self, call: JournaledCall, request: ChatRequest, placement: RequestPlacement, sampling: SamplingParams
    ) -> None:
        """Note how a request that is not recorded differs from the recorded ones; a replay ends there, and so does a
        fork before its turn."""
        journal = self._episode.journal
        if not self.difference and (open_turns := journal.unasked_turns(self.seat)):
            messages = [encode_message(message) for message in _new(request, placement)]
            request_parameters = _request_entry(request, placement, sampling, with_tools=True)
            self.difference = describe_request_difference(open_turns, messages, request_parameters)
        journal.check_new(call, self.difference)

    def _reply(
        self,
        request: ChatRequest,
        call: JournaledCall,
        placement: RequestPlacement,
        completion: Completion,
        answer: Message | LimitReachedError,
        named: Message | LimitReachedError,
        start_s: float,
    ) -> ChatReply:
        """Append a turn that is in the journal, and return the client's reply, with the calls that the run reads.
        `named` also has a call that it does not read.

        Raises:
            RequestRefusedError: a remote endpoint refused the turn.
        """
        chat_format = self._settings.chat_format
        token_ids, context = completion.token_ids.tolist(), array("i", placement.context_ids)
        prompt_tokens, completion_tokens = len(placement.row.tokens), self._tokens_of(completion)
        text = chat_format.decode(token_ids)
        refusal = answer if isinstance(answer, LimitReachedError) else None
        message = answer if isinstance(answer, Message) else Message(role="assistant", content="")
        calls = message.tool_calls
        if isinstance(chat_format, JsonChatFormat):  # an endpoint identifies calls by the ids that it assigned
            text = message.content
            prompt_tokens = chat_format.usage(token_ids).get("prompt_tokens", prompt_tokens)
        else:
            id_counts = Counter(tool_call.id for tool_call in calls)
            calls = tuple(
                tool_call
                if id_counts[tool_call.id] == 1 and not tool_call.id.startswith(UNWRITTEN_ID)
                else dataclasses.replace(tool_call, id=self._tool_call_id(call.call_id, n))
                for n, tool_call in enumerate(calls)
            )
        temperature = request.sampling.get("temperature", self._settings.sampling.temperature)
        is_greedy = temperature == 0  # then the recorded log-probabilities are 0
        # The token that ends the model's turn is no text, also if the agent names it as one.
        has_ended = bool(request.stop and token_ids) and token_ids[-1] in chat_format.stop_token_ids
        before_end = chat_format.decode(token_ids[:-1]) if has_ended else text
        stop_text = min((stop for stop in request.stop if stop in before_end), key=before_end.find, default=None)
        content = message.content if stop_text is None else message.content.partition(stop_text)[0]
        message = dataclasses.replace(message, content=content, tool_calls=calls)
        self._tree.answer(placement, token_ids, completion.finish_reason, message)
        self._row_of_last_turn = len(placement.row.tokens)
        if placement.cause is not None:
            self._episode.metric(f"rows/{placement.cause}", 1.0, self)
        completion = ended_by_text(completion, text, request.stop)
        tools = _callable_tools(request)
        read = message if tools or refusal is not None else chat_format.parse(token_ids, context=context)
        if isinstance(named, Message) and any(tool_call.form for tool_call in named.tool_calls):
            read = named
        self._count_reply(read, completion, tools, is_cut=completion.finish_reason == "length")
        if tools and read.tool_calls and not read.tool_calls[0].form:
            self._episode.metric(CALLS_OUTSIDE, float(len(read.tool_calls)), self)
        if self._episode.limit is not None:
            self._episode.limit.restart()
        self._conversation = (*request.messages, message)
        self._append(call, _new(request, placement), message, completion)
        self._answered_one.set()
        if refusal is not None:
            self._refuse(refusal)
        return ChatReply(
            reply_id=f"{self._key(call.call_id):016x}",
            created=int(start_s),
            message=message,
            thinking=message.thinking,
            finish_reason=_finish_reason(completion, message, stop_text),
            stop_text=stop_text,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=completion.cached_tokens,
            logprobs=self._logprobs(completion) if request.logprobs and not is_greedy else None,
        )

    def _logprobs(self, completion: Completion) -> list[TokenLogprob] | None:
        chat_format = self._settings.chat_format
        if isinstance(chat_format, JsonChatFormat):  # an endpoint's tokens are unknown
            return None
        pairs = zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True)
        return [TokenLogprob(chat_format.decode([token]), logprob) for token, logprob in pairs]

    def _parse(self, context: bytes, completion: Completion, tools: Sequence[ToolSpec]) -> Message | LimitReachedError:
        """Parse a reply. Without `tools`, calls are text, as OpenAI's and vLLM's servers return them."""
        answer, chat_format = super()._parse(context, completion, tools), self._settings.chat_format
        if tools or isinstance(answer, LimitReachedError) or isinstance(chat_format, JsonChatFormat):
            return answer
        if not answer.tool_calls:
            return answer
        return chat_format.parse(completion.token_ids.tolist(), context=array("i", context), reads_calls=False)

    def _check_length(self, request: ChatRequest) -> None:
        """Refuse a request whose texts cannot fit the context, before anything looks through them.

        Raises:
            RequestRefusedError: the request does not fit the context.
        """
        # Each message and tool has at least one token.
        characters = CHARACTERS_PER_TOKEN * (len(request.messages) + len(request.tools))
        characters += sum(map(_characters, request.messages))
        characters += sum(len(tool.name) + len(tool.description) + len(str(tool.parameters)) for tool in request.tools)
        characters += sum(map(len, request.stop))
        if characters > CHARACTERS_PER_TOKEN * self._settings.limits.max_context:
            self._refuse_context(characters // CHARACTERS_PER_TOKEN)

    def _find_row(self, request: ChatRequest) -> RequestPlacement:
        """Find or begin the row of a request.

        Raises:
            RequestRefusedError: the chat template refuses the request.
        """
        return self._render(self._tree.find_row, request)

    def _render(self, render: Callable[[Sequence[Message], Sequence[ToolSpec]], T], request: ChatRequest) -> T:
        """Render a request's messages and tools, which may be anything.

        Raises:
            RequestRefusedError: the chat template refuses the request, or fails over it.
        """
        try:
            return render(request.messages, request.tools)
        except ModelError as error:
            raise RequestRefusedError(f"the model's chat template refuses the messages: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError, RecursionError) as error:
            raise RequestRefusedError(
                f"the model's chat format cannot express the messages or tools: {describe_user_code_error(error)}"
            ) from error

    def _as_answered(self, request: ChatRequest) -> ChatRequest:
        """Return a request as it is answered: without the fields that have no effect here, and with instructions that
        say in words what is not enforced.

        Raises:
            RequestRefusedError: the request has a field that is refused.
        """
        ignored = set(self._ignored_parameters)
        mode = self._episode.services.settings.gateway_sampling
        if mode == "run":
            ignored |= SAMPLING_FIELDS
        refused = {name: unsupported_reason(name) for name in request.demands if name not in ignored}
        if mode == "refuse":
            refused |= {name: reason for name, reason in self._differences(request).items() if name not in ignored}
        if refused and mode != "check":
            self._refuse_fields({**_request_fields(request), **request.demands}, refused)
        if self._settings.is_external:
            ignored |= request.sampling.keys() - set(_ENDPOINT_FIELDS)
        without_effect = (
            name for name in (*_request_fields(request), *request.demands) if name in ignored | refused.keys()
        )
        max_tokens, clamped = request.max_tokens, None
        if max_tokens is not None and (mode == "check" or max_tokens > self._settings.sampling.max_tokens):
            clamped = max_tokens
        if mode == "check" and max_tokens is not None:
            max_tokens *= BYTES_PER_TOKEN  # a token of the checker's policy is a byte
        request = dataclasses.replace(
            request,
            max_tokens=max_tokens,
            clamped_max_tokens=clamped,
            sampling={name: value for name, value in request.sampling.items() if name not in ignored},
            tool_choice=ToolChoice() if "tool_choice" in ignored else request.tool_choice,
            reply_form=ReplyForm() if "response_format" in ignored else request.reply_form,
            ignored=(*request.ignored, *without_effect),
        )
        return _with_instructions(request, instructions(request.tool_choice, request.reply_form))

    def _differences(self, request: ChatRequest) -> dict[str, str]:
        """Return the fields of a request that differ from the run's sampling, and the run's values."""
        run_sampling = self._settings.sampling
        run_values = {name: getattr(run_sampling, name) for name in request.sampling}
        differences = {
            name: f"the run uses {bounded_repr(run_values[name])}"
            for name, value in request.sampling.items()
            if value != run_values[name]
        }
        enforced = [name for name in _request_fields(request) if name in ("tool_choice", "response_format")]
        return differences | dict.fromkeys(enforced, "this run does not honor it (gateway.sampling = 'refuse')")

    def _refuse_fields(self, values: Mapping[str, Any], refused: Mapping[str, str]) -> NoReturn:
        reasons = [f"{name} is {bounded_repr(values[name])}, but {reason}" for name, reason in refused.items()]
        raise RequestRefusedError(
            f"{'; '.join(reasons)}. Remove {'it' if len(refused) == 1 else 'them'} from the request, or "
            f"write `{ignored_fields_line((*self._ignored_parameters, *refused))}` in the environment's class",
            "setting",
            next(iter(refused)),
        )

    def _check_stops(self, request: ChatRequest) -> None:
        if request.stop and self._episode.services.engine.capabilities.expert_routing:
            raise RequestRefusedError(
                "stop: a run that records expert routing cannot end a reply at a stop string; remove it"
            )

    def _check_limits(self, limits: EpisodeLimits, replies: int = 1) -> None:
        """Refuse turns beyond the limits.

        Raises:
            RequestRefusedError: a limit is reached.
        """
        if self._episode.journal.is_over_time:
            self._refuse(LimitReachedError("the episode has used its time", stop_reason="time_limit"))
        if len(self._turns) + self._in_progress + replies > limits.max_turns:
            message = f"seat {self.seat!r} has used its {plural(limits.max_turns, 'turn')}"
            self._refuse(LimitReachedError(message, stop_reason="max_turns"))

    def _refuse_context(self, tokens: int) -> NoReturn:
        limit = self._settings.limits.max_context
        message = f"the conversation has at least {tokens} tokens, and the maximum context length is {limit}"
        self._refuse(LimitReachedError(message, stop_reason="context_length"))

    def _refuse(self, limit: LimitReachedError) -> NoReturn:
        self.limit_reached = self.limit_reached or limit
        raise RequestRefusedError(str(limit), "context" if limit.stop_reason == "context_length" else "limit")

    def _cut(self, completion: Completion, stops: Sequence[str]) -> Completion:
        """Cut a completion at the texts of `stops`; see `cut_at_text`."""
        if self._settings.is_external:
            return completion  # its tokens are a line of JSON; the text is cut when the reply is returned
        return cut_at_text(completion, stops, self._settings.chat_format.decode) or completion

    def _key(self, *parts: object) -> int:
        return stable_hash64(self._episode.spec.episode_id, *parts)

    def _tool_call_id(self, call_id: str, number: int) -> str:
        """Make the id of a tool call: nine letters and digits, which every chat template accepts."""
        key, letters = self._key(call_id, number), ""
        for _ in range(9):
            key, at = divmod(key, len(_LETTERS))
            letters += _LETTERS[at]
        return letters

    def _samplers(self) -> Iterable[TurnSampler]:
        return self._row_samplers.values()

    def _row_length(self) -> int:
        return self._row_of_last_turn


def cut_at_text(
    completion: Completion, stops: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Completion | None:
    """Cut a completion after the token in which a text of `stops` ends, as if sampling had stopped there; None if it
    holds none.

    The result has no closing token, like one that a limit ended.
    """
    ids = completion.token_ids.tolist()
    if completion.finish_reason == "stop":
        ids = ids[:-1]  # the token that ends the model's turn is no text

    def holds_stop(count: int) -> bool:
        text = decode(ids[:count])
        return any(stop in text for stop in stops)

    if not (stops and holds_stop(len(ids))):
        return None
    end = bisect_left(range(1, len(ids) + 1), True, key=holds_stop) + 1
    return Completion.of(completion.slice(0, end), "length", completion.cached_tokens)


@asynccontextmanager
async def open_endpoint(
    episode: LiveEpisode,
    agents: list[TurnRecorder],
    aliases: Aliases,
    volatile: Sequence[str],
    ignored_fields: Collection[str],
    *,
    recall: bool,
) -> AsyncIterator[Endpoint]:
    """Open the endpoint of `EpisodeContext.endpoint`; adds the agents of the seats to `agents`."""
    spec, journal = episode.spec, episode.journal
    journal.begin_external(recall=recall)
    if agents:
        raise EnvironmentDefinitionError(
            "ctx.endpoint() was called after ctx.agent(); call it first, before any seat has an agent"
        )
    try:
        patterns = [re.compile(pattern) for pattern in volatile]
    except re.error as error:
        raise EnvironmentDefinitionError(f"volatile: {error.pattern!r} is not a regular expression: {error}") from error
    models = read_aliases(aliases, list(spec.seats))
    seats = {seat: ExternalAgent(episode, seat, patterns, ignored_fields) for seat in spec.seats}
    agents.extend(seats.values())
    async with episode.services.gateway.open(seats, models) as endpoint:
        perform = partial(perform_effect, episode, is_program=True)
        serve = partial(episode.services.gateway.serve, endpoint)
        ended = partial(_count_program, episode)
        runs = partial(setattr, episode, "external")
        yield LiveEndpoint(endpoint, tuple(seats.values()), perform, journal.fail, serve, ended, runs)
    _check_requests(episode, seats)


def _check_requests(episode: LiveEpisode, seats: Mapping[str, ExternalAgent]) -> None:
    """Check that the external agent has requested the recorded turns, and the turn whose reply a fork replaces. An
    attempt that restarted gets a note instead.

    Raises:
        ReplayMismatchError: the agent of a replay or a fork left out such a turn.
    """
    spec, journal = episode.spec, episode.journal
    is_replay = spec.purpose == "replay"
    for seat, agent in seats.items():
        if open_turns := journal.unasked_turns(seat):
            if is_replay or journal.inherits_turns(seat):
                then = f"the journal holds {describe_entry(open_turns[0])}"
                now = "the external agent no longer requests it"
                now += f": {episode.note}" if episode.note else ""
                journal.mismatch(f"turn {open_turns[0].turn}", then, now, remedy="")
            if agent.difference:
                episode.add_note(
                    f"its external agent sent different requests on replay: {agent.difference}; {REPLAY_REMEDY}"
                )
    if spec.fork is not None and not is_replay:
        for call_id in spec.fork.edits.keys() - set().union(*(agent.edited_calls for agent in seats.values())):
            journal.mismatch(
                call_id,
                "the fork replaces the reply to this request",
                "the external agent did not send it",
                remedy=FORK_REMEDY,
            )


def _count_program(episode: LiveEpisode, error: str | None, place: str) -> None:
    episode.metric(PROGRAM_OK if error is None else PROGRAM_FAILED, 1.0)
    if error is not None:
        at = f" at {place}" if place else ""
        episode.add_note(f"its program failed: {shorten_lines(error, 500)}{at}")
    count_call(episode, f"the program of {episode.spec.environment.rpartition(':')[2]}", error, PROGRAM_FAILED, place)


class LiveEndpoint(Endpoint):
    """Address and keys of the gateway for one attempt."""

    __slots__ = ("_agents", "_ended", "_fail", "_opened", "_perform", "_runs", "_serve", "key", "keys", "url")

    def __init__(
        self,
        endpoint: AttemptEndpoint,
        agents: Sequence[ExternalAgent],
        perform: Callable[..., Awaitable[Any]],
        fail: Callable[[InfrastructureError], None],
        serve: Callable[[socket.socket], None],
        ended: Callable[[str | None, str], None],
        runs: Callable[[asyncio.Task[Any] | None], None],
    ) -> None:
        self.url, self.key, self.keys = endpoint.url, endpoint.key, endpoint.keys
        self._opened = endpoint
        self._agents = agents
        self._perform = perform
        self._fail = fail
        self._serve = serve
        self._ended = ended
        self._runs = runs

    def program_ended(self, error: str | None, place: str = "") -> None:
        self._ended(error, place)

    def serve(self, listening: socket.socket) -> None:
        self._serve(listening)

    def variables(self, url: str | None = None) -> dict[str, str]:
        url = url or self.url
        return {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": self.key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.key,
        }

    @property
    def refusal(self) -> RequestRefusedError | None:
        return self._opened.refusal

    def limit_reached(self) -> LimitReachedError | None:
        return next((agent.limit_reached for agent in self._agents if agent.limit_reached is not None), None)

    async def run_program(self, name: str, program: Callable[[], Awaitable[T]]) -> T:
        result: T = await self._perform(name, lambda: self._unless_it_fails(program), "idempotent")
        return result

    async def _unless_it_fails(self, program: Callable[[], Awaitable[T]]) -> T:
        """Await a program, and cancel it when the episode cannot continue."""
        running = asyncio.get_running_loop().create_task(_await_program(program()))
        self._runs(running)
        try:
            await asyncio.wait({running, self._opened.failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._opened.failure.done():
                self._opened.failure.result()
            result: T = await running
            return result
        except InfrastructureError as error:
            self._fail(error)  # the attempt has the turns of this run of the program, so it must not run again here
            raise
        finally:
            running.cancel()
            await asyncio.wait({running})
            self._runs(None)


def describe_request_difference(
    recorded_turns: Sequence[TurnEntry], new_messages: Sequence[Mapping[str, Any]], request: ExternalRequestParameters
) -> str:
    """Name the part of a request that differs from the recorded one, with both values.

    Args:
        recorded_turns: recorded turns; the one most similar to the request is compared.
        new_messages: the request's new messages.
        request: its other parameters, with its tools.
    """
    then = max(recorded_turns, key=lambda turn: common_prefix_length(str(turn.messages), str(tuple(new_messages))))
    where = f"turn {then.turn} of seat {then.seat!r}"
    before = then.request or request
    if before.tools is not None and before.tools != request.tools:
        return f"{where}, tools: {_two_values(before.tools, request.tools)}"
    for n, (was, came) in enumerate(zip(then.messages, new_messages, strict=False)):
        for field in sorted(was.keys() | came.keys()):
            if was.get(field) != came.get(field):
                return f"{where}, new message {n}, {field}: {_two_values(was.get(field), came.get(field))}"
    if len(then.messages) != len(new_messages):
        return f"{where}, number of new messages: {len(then.messages)}, now {len(new_messages)}"
    if before.max_tokens != request.max_tokens:
        return f"{where}, max_tokens: {before.max_tokens}, now {request.max_tokens}"
    if before.stop != request.stop:
        return f"{where}, stop: {shortened_repr(before.stop)}, now {shortened_repr(request.stop)}"
    if before.asked and before.asked != request.asked:  # empty in earlier versions
        return f"{where}, fields: {_two_values(before.asked, request.asked)}"
    return f"{where}: an earlier message"


def _two_values(was: object, came: object) -> str:
    """Quote two values, starting shortly before their first difference."""
    first, second = str(was), str(came)
    at = max(common_prefix_length(first, second) - 20, 0)
    return f"{shortened_repr(first[at:])}, now {shortened_repr(second[at:])}"


def is_external_turn(entry: JournalEntry) -> bool:
    """Whether an entry is a turn that an external agent requested: its call is named by its content."""
    return not ids.has_call_number(entry.call_id) and isinstance(entry.decode(), TurnEntry)


def external_turns_with_context(entries: Iterable[JournalEntry]) -> Iterator[JournalEntry]:
    """Yield the turns that external agents requested in one attempt, in order, each with its whole context and its
    tools."""
    rows: dict[tuple[str, int], bytes] = {}
    tools: dict[tuple[str, int], str] = {}
    for entry in filter(is_external_turn, entries):
        body = entry.decode()
        assert isinstance(body, TurnEntry)
        context = rows.get((body.seat, body.row), b"")[: 4 * body.parent_context] + body.context_ids
        rows[body.seat, body.row] = context + body.tokens.token_ids
        request = body.request
        if request is not None:
            if request.tools is not None:
                tools[body.seat, body.row] = request.tools
            request = msgspec.structs.replace(request, tools=tools.get((body.seat, body.row)))
        body = msgspec.structs.replace(body, context_ids=context, parent_context=0, request=request)
        yield msgspec.structs.replace(entry, body=encode_body(body))


async def _await_program(program: Awaitable[Any]) -> Any:
    return await program


def _characters(message: Message) -> int:
    """Characters of a message and its calls, or about that."""
    calls = sum(len(call.id) + len(call.name) + len(str(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.name or "") + len(message.tool_call_id or "") + calls


def _asks(request: ChatRequest, entry: JournalEntry) -> bool:
    """Whether a recorded turn has the last messages of a request, volatile text included."""
    turn = entry.decode()
    if not isinstance(turn, TurnEntry):
        return False
    messages = [encode_message(message) for message in request.messages[-len(turn.messages) :]]
    return encode(messages) == encode(turn.messages)


def _new(request: ChatRequest, placement: RequestPlacement) -> Sequence[Message]:
    return request.messages[len(request.messages) - placement.new_messages :]


def _request_fields(request: ChatRequest) -> dict[str, float | str | bool]:
    """Return what a request sets besides messages, tools and stop texts, as the journal records it."""
    choice, form = request.tool_choice, request.reply_form
    fields: dict[str, float | str | bool] = dict(request.sampling)
    if choice.mode != "auto":
        fields["tool_choice"] = choice.tool or choice.mode
    if form.kind != "text":
        fields["response_format"] = form.kind
    if request.logprobs:
        fields["logprobs"] = True
    if request.clamped_max_tokens is not None:
        fields["max_tokens"] = request.clamped_max_tokens
    return fields


def _with_instructions(request: ChatRequest, text: str) -> ChatRequest:
    """Return a request whose first message ends with a text. Requests with equal texts continue each other's rows."""
    if not text:
        return request
    first, *others = request.messages
    if first.role in ("system", "user"):
        first = dataclasses.replace(first, content=f"{first.content}\n\n{text}")
    else:
        first, others = Message(role="system", content=text), [first, *others]
    return dataclasses.replace(request, messages=[first, *others])


def _callable_tools(request: ChatRequest) -> Sequence[ToolSpec]:
    """Return the tools whose calls are read in the reply: the model sees tools that it must not call, too."""
    return () if request.tool_choice.mode == "none" else request.tools


def _request_entry(
    request: ChatRequest, placement: RequestPlacement, sampling: SamplingParams, *, with_tools: bool = False
) -> ExternalRequestParameters:
    """Return a request's parameters besides messages; with its tools if `with_tools`, or if it begins a row."""
    tools = tools_text(request.tools) if with_tools or not placement.before else None
    return ExternalRequestParameters(
        max_tokens=sampling.max_tokens,
        stop=tuple(request.stop),
        tools=tools,
        asked=_request_fields(request),
        ignored=request.ignored,
    )


def _finish_reason(completion: Completion, message: Message, stop_text: str | None) -> ReplyEnd:
    if completion.finish_reason == "length":  # also after a complete call, as in OpenAI's API: there may have been more
        return "length"
    if message.tool_calls:
        return "tool_calls"
    return "stop" if stop_text is None else "stop_text"


def _to_bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")
