"""`TemplateChatFormat`: the chat format of any local Hugging Face model directory, by its tokenizer and template.

Turns messages into the tokens that follow a sampled turn, and the tokens of a completion into a message. Needs only
`tokenizers` and jinja2, not transformers.

Invariants
1. Token in, token out: `extend` returns only the tokens that follow the sampled ones, which are never rendered or
   tokenized again. If a template strips the thinking of earlier turns, the sampled thinking stays in the context.
2. Content never becomes a control token: control tokens come from the template's frame alone.
3. For benign content the tokens are those of the rendered text, encoded in one go (checked on probes at load).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from array import array
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from tokenizers import Tokenizer

from agentrl.core.errors import ModelError
from agentrl.core.files import MAX_TOKENIZER_BYTES, read_json, read_whole
from agentrl.core.model_layers import config_parts
from agentrl.core.records import FinishReason, Message, Role, SampledTurn, ToolCall, ToolSpec
from agentrl.core.reply_formats import (
    ALL_MARKUP,
    HARMONY_THINKING,
    REPLY_FORMATS,
    SPACE,
    THINKING,
    ReplyFormat,
    find_foreign_call,
    is_thinking_open,
    split_thinking,
    thinking_opening,
)
from agentrl.core.text import common_prefix_length, valid_unicode
from agentrl.rollout.chat import tools_in_system
from agentrl.rollout.chat.chat_template import (
    DEFAULT,
    FOR_TOOLS,
    PROBE,
    AddedToken,
    ChatTemplate,
    ControlTokens,
    compared_texts,
    message_for_template,
    read_templates,
    stop_token_ids,
    tool_for_template,
)
from agentrl.rollout.chat.template_checks import detect_thinking_message_form, rewrite_causes, thinking_message_forms

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

DriftCause = Literal["undecodable", "retokenised"]
ToolsIn = Literal["template", "system"]

AUTO = "auto"
"""Name of the reply format that the chat template writes."""

_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_ANCHOR = "\ue002"
_KEPT_CHARACTERS = 1 << 20
"""Number of characters whose tokens are kept for reuse: members of a group get the same prompt, tools often give the
same answers, and half of a small policy's replies are among its last few hundred."""
_MAX_TOKEN_CHARACTERS = 1024
"""Maximum length of an added token; compiling one takes time that grows with the square of its length."""
_SWITCHING: tuple[Role, ...] = ("system", "user")
"""Roles of the messages in which templates look for switches."""
_MAX_OPENING_TOKENS = 32
"""Maximum number of tokens with which a prompt begins the thinking; without merges, a mark has one token per byte."""

_TRANSFORMS: tuple[Callable[[str], str], ...] = (
    lambda content: content,
    lambda content: content.strip(),
    lambda content: json.dumps(content, ensure_ascii=False)[1:-1],
    lambda content: json.dumps(content.strip(), ensure_ascii=False)[1:-1],
)
"""Transformations that templates apply to the content of a message; found by probing."""

_PROBES = ("85", " two words ", '\n{"a": "b\\n"}\n', "é<|x|> </think>\t1.5", "<tool_response>\n1\n</tool_response>", "")


@dataclass(frozen=True, slots=True)
class _Frame:
    """Tokens of messages of which one content varies: `head + plain(before + content + behind) + tail`."""

    head: list[int]
    before: str
    transform: Callable[[str], str]
    behind: str
    tail: list[int]


class _ReplyParts(NamedTuple):
    """A sampled turn without the tokens that end it."""

    thinking: str
    all_ids: list[int]
    reply_ids: list[int]
    """Token ids without thinking and the white space after it."""


class TemplateChatFormat:
    """The `ChatFormat` of a Hugging Face model directory; made by `load`."""

    rewrites: tuple[str, ...]
    forks: bool
    _with_tools: TemplateChatFormat | None = None
    """Format of conversations that offer tools, if the model has another template for them."""
    _unusable_without_tools: ModelError | None = None
    """Why the model's template for conversations without tools cannot be used."""
    _switches: tuple[str, ...] = ()
    """Words in messages that change how the template ends a prompt."""

    def __init__(
        self,
        directory: Path,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        reply_format: str,
        *,
        forks: bool,
        tools_in: ToolsIn,
    ) -> None:
        self._directory, self._tokenizer = directory, tokenizer
        self._template = template
        self._tools_in_system = tools_in == "system"
        made_with = [read_whole(directory / "tokenizer.json", MAX_TOKENIZER_BYTES), template.fingerprint]
        if self._tools_in_system:
            made_with.append(b"tools in system")
        self.fingerprint = hashlib.blake2b(b"".join(made_with), digest_size=8).digest()
        tokens = _added_tokens(tokenizer)
        self._rowless = _rowless_tokens(tokens, _embedding_rows(directory))
        self._arguments_as_text = False
        """Whether the template takes a call's arguments as text."""
        self.reply_format = self._find_reply_format(reply_format, [t.literal for t in tokens if t.special])
        self._thinking = _thinking_marks(template.source, {token.literal for token in tokens})
        markup = {*self.reply_format.markup, *(self._thinking or ()), *THINKING[0]}
        self._control = ControlTokens(
            [t for t in tokens if t.special or t.literal in template.source or t.literal in markup]
        )
        self._control_ids = frozenset(self._control.ids.values())
        self._plain = _without_control(tokenizer, self._control, anchor=False)
        self._marks_start = _marks_start(self._plain)
        self._anchor_tokenizer = _anchored_tokenizer(
            self._plain, _without_control(tokenizer, self._control, anchor=True)
        )
        self._id_mapping = _renumbering(self._anchor_tokenizer or self._plain, tokenizer)
        self._encoded, self._encoded_plain = TokenizedTextCache(_KEPT_CHARACTERS), TokenizedTextCache(_KEPT_CHARACTERS)
        self._check_plain()
        self._silent, self._foreign_marks = _silent_tokens(tokens, markup)
        configured_ids = stop_token_ids(directory)
        self._closing_id = self._find_closing()
        self._call_closing = self._find_call_closing(configured_ids)
        closings = (self._closing_id, self._call_closing)
        stops = [self._control.ids[end] for end in self.reply_format.ends if end in self._control.ids]
        self._ends = frozenset({*configured_ids, *closings, *stops})
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops or (*configured_ids, *closings)))
        prompt, bare = (self._render_text([("user", ".")], prompt=has_prompt) for has_prompt in (True, False))
        opening = "" if self._thinking is None else thinking_opening(prompt, self._thinking)
        self._header = prompt[common_prefix_length(prompt, bare) :].removesuffix(opening)
        self._check_history(forks)
        self.shows_tools = self._tools_in_system or self._renders_tools()
        self._switches = self._find_switches()
        self._openings: dict[object, tuple[_Frame | None, Sequence[ToolSpec]]] = {}
        self._replies: dict[str, _Frame] = {}
        self._last_decoded: tuple[list[int], str] = ([], "")
        """Cache of the last decoded tokens and their text: a turn is decoded several times in a row."""
        self._endings = _endings(tokenizer, self._silent)
        roles: tuple[Role, ...] = ("user", "tool")
        for role in roles:
            frame = self._reply_frame(role)
            if frame is not None:
                self._replies[role] = frame

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        reply_format: str = AUTO,
        history: Literal["keep", "fork"] = "keep",
        tools_in: ToolsIn = "template",
        template_variables: Mapping[str, Any] | None = None,
    ) -> TemplateChatFormat:
        """Load tokenizer and template of a local model directory.

        Args:
            model_dir: directory with tokenizer and template.
            reply_format: a name in `REPLY_FORMATS`, or `auto` for the one that the template writes.
            history: treatment of earlier turns that the template rewrites. `keep`: the model sees them unchanged;
                `fork`: the conversation continues in a new row.
            tools_in: where the model reads its tools. `template`: where the chat template writes them; `system`: in the
                system message, with the Hermes call format, regardless of the template's own tool support.
            template_variables: values of variables that the template reads, such as `enable_thinking`.

        Raises:
            ModelError: a file is missing or unusable, the tokenizer belongs to another model, the template closes no
                turn with a special token, or it rewrites earlier turns so that a sampled conversation cannot be
                continued token for token.
        """
        directory = Path(model_dir)
        if not directory.is_dir():
            name = str(model_dir) if _HUB_NAME.fullmatch(str(model_dir)) else "ORGANIZATION/NAME"
            raise ModelError(
                f"there is no model directory {directory}, and agentrl downloads nothing here; fetch a model from the "
                f"Hugging Face hub with `hf download {name} --local-dir DIR`, and give that DIR"
            )
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ModelError(
                f"{directory} has no tokenizer.json. Give a local Hugging Face model directory, or write the file "
                "with `AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)`"
            )
        tokenizer = read_tokenizer(path)
        _check_vocabulary(directory, tokenizer, _embedding_rows(directory))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        templates = read_templates(directory)
        with_tools: TemplateChatFormat | None = None

        def load(for_tools: bool) -> TemplateChatFormat:
            template = ChatTemplate(directory, template_variables, with_tools=for_tools)
            name = with_tools.reply_format.name if with_tools is not None else reply_format
            chat_format = cls(directory, tokenizer, template, name, forks=history == "fork", tools_in=tools_in)
            chat_format._check_rows()
            return chat_format

        # With `tools_in = "system"`, the template gets no tools.
        if tools_in == "system" or templates.get(FOR_TOOLS, templates.get(DEFAULT)) == templates.get(DEFAULT):
            return load(for_tools=False)
        with_tools = load(for_tools=True)
        try:
            chat_format = load(for_tools=False)
        except ModelError as error:  # an environment may offer tools in all conversations
            with_tools._unusable_without_tools = error
            return with_tools
        chat_format._join(with_tools)
        return chat_format

    @property
    def call_frame(self) -> tuple[str, ...] | None:
        return self.reply_format.call_frame if self._thinking is None else None

    def _join(self, with_tools: TemplateChatFormat) -> None:
        """Use another format of the same tokenizer for conversations that offer tools."""
        self._with_tools = with_tools
        self.fingerprint = hashlib.blake2b(self.fingerprint + with_tools.fingerprint, digest_size=8).digest()
        self.stop_token_ids = tuple(dict.fromkeys((*self.stop_token_ids, *with_tools.stop_token_ids)))
        self.rewrites = tuple(dict.fromkeys((*self.rewrites, *with_tools.rewrites)))
        self.forks, self.shows_tools = self.forks or with_tools.forks, with_tools.shows_tools

    @property
    def reads_earlier(self) -> bool:
        """Whether a word in earlier messages may change how the template ends a prompt."""
        return bool(self._switches) or (self._with_tools is not None and self._with_tools.reads_earlier)

    def _of(self, tools: Sequence[ToolSpec]) -> TemplateChatFormat:
        """Return the format of conversations that offer `tools`.

        Raises:
            ModelError: the model's template for them cannot be used.
        """
        if tools:
            return self._with_tools or self
        if self._unusable_without_tools is not None:
            raise self._unusable_without_tools
        return self

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the token ids of a new conversation, up to the start of the assistant's turn.

        The frame around the last message is cached if all messages before it are system messages. The cache compares
        tools by identity, so pass the same `ToolSpec` objects each time.

        Raises:
            ModelError: the template refuses the conversation.
        """
        if (chat_format := self._of(tools)) is not self:
            return chat_format.start(messages, tools)
        if not self._varies_in_last(messages) or self._has_switch(messages[-1:]):
            return self._encode_pieces(self._opening_pieces(messages, tools))
        last = messages[-1]
        key = (tuple(map(id, tools)), tuple(message.content for message in messages[:-1]))
        opening = self._openings.get(key)
        if opening is None:
            if len(self._openings) >= 64:  # further openings are rendered each time
                return self._encode_pieces(self._opening_pieces(messages, tools))
            specs = tuple(tools)
            frame = self._frame(lambda content: self._opening_pieces((*messages[:-1], _with(last, content)), specs))
            opening = self._openings[key] = (frame, specs)
        if opening[0] is None:
            return self._encode_pieces(self._opening_pieces(messages, tools))
        return self._fill(opening[0], last.content)

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: FinishReason,
        turn: Sequence[int] = (),
        context: Sequence[int] = (),
        earlier: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """Return the token ids that follow a sampled turn: its closing tokens, the new messages, the start of the next
        turn.

        After `stop` the closing token is the completion's last one and is not repeated. Otherwise the turn was cut, and
        thinking that it left open is closed as the template closes it.

        Raises:
            ModelError: the template refuses the messages.
        """
        if (chat_format := self._of(tools)) is not self:
            return chat_format.extend(messages, after=after, turn=turn, context=context, earlier=earlier, tools=tools)
        frame = self._replies.get(messages[0].role) if len(messages) == 1 else None
        if frame is None or self._has_switch(messages) or self._has_switch(earlier):
            ids = self._encode_pieces(self._reply_pieces(messages, earlier))
        else:
            ids = self._fill(frame, messages[0].content)
        if after == "stop":
            return ids
        closing = self._call_closing if messages and messages[0].role == "tool" else self._closing_id
        return [*self._thinking_end(turn, context), closing, *ids]

    def _thinking_opening(self, context: Sequence[int]) -> str:
        """Return the text with which a prompt begins the thinking of its reply; "" if it does not. Some templates do so
        only after some messages."""
        if self._thinking is None:
            return ""
        end = _as_list(context[-_MAX_OPENING_TOKENS:])
        return thinking_opening(self._tokenizer.decode(end, skip_special_tokens=False), self._thinking)

    def _thinking_end(self, turn: Sequence[int], context: Sequence[int]) -> list[int]:
        """Return the token ids that close the thinking of a turn that was cut; none if it is not open."""
        is_open = bool(self._thinking_opening(context))
        if self._thinking is None or not is_thinking_open(self.decode(turn), self._thinking, is_open=is_open):
            return []
        return self._encode_pieces(self._control.split(self._thinking_closing))

    def write_reply(self, text: str, context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> list[int]:
        if (chat_format := self._of(tools)) is not self:
            return chat_format.write_reply(text, context, tools)
        # A reply that never ends the thinking which its prompt begins is an answer without thinking.
        is_continued = self._thinking is not None and self._thinking[1] in text
        read = self.parse(self.encode(text), tools, context=context if is_continued else ())
        ids = self._encode_reply(self._render_reply(read, context), context, has_calls=bool(read.tool_calls))
        if _calls(self.parse(ids, tools, context=context)) == _calls(read):
            return ids
        # The template writes calls in another form than the run reads, or not at all, so they are part of the text.
        frame = self._render_reply(Message(role="assistant", content=PROBE, thinking=read.thinking), context)
        content = self.parse(self.encode(text), context=context if is_continued else (), reads_calls=False).content
        before, _, after = frame.partition(PROBE)
        end = self._encode_reply(after, context, has_calls=True)
        return [*self._encode_pieces(self._control.split(before)), *self.encode(content, context), *end]

    def _render_reply(self, reply: Message, context: Sequence[int]) -> str:
        """Render a reply as the template writes it after a prompt that ends with `context`.

        Raises:
            ModelError: the template refuses the reply, or writes it otherwise than its prompt begins it.
        """
        opening, thinking = self._thinking_opening(context), self._control.escape(reply.thinking, only_special=True)
        calls = tuple(replace(call, id=f"call{n:05}") for n, call in enumerate(reply.tool_calls))
        answer = replace(reply, thinking="", tool_calls=calls)
        [value] = self._values(tools_in_system.as_text([answer]) if self._tools_in_system else [answer])
        if reply.content == PROBE:
            value["content"] = PROBE
        if thinking and self._history_marks is not None:
            forms = list(thinking_message_forms(self._history_marks, thinking, value["content"]))
            value |= forms[self._thinking_form]
        marks = self._thinking or THINKING[0]
        prompt = self._template.render([_value("user", ".")], [], prompt=True)
        frame = prompt.removesuffix(thinking_opening(prompt, marks))
        rendered = self._template.render([_value("user", "."), value], [], prompt=False)
        is_closed = self.decode(context[-_MAX_OPENING_TOKENS:]).rstrip(SPACE).endswith(marks[1])
        if not rendered.startswith(frame) or (is_closed and thinking):
            raise ModelError(
                f"{self._directory}: the chat template writes this reply otherwise than its prompt begins it, so no "
                "policy could sample it. If the prompt rules out thinking, remove it from the reply, or change "
                "model.template_variables"
            )
        body = rendered[len(frame) :]
        remainder = split_thinking(body, marks)[1].lstrip(SPACE)
        if thinking and thinking in body:
            return body[body.index(thinking) :] if opening else body
        if opening or thinking:  # the template leaves out the thinking of this reply
            begin = "" if opening else f"{marks[0]}\n"
            return f"{begin}{thinking}{self._thinking_closing}{remainder}"
        return remainder if is_closed else body

    def _encode_reply(self, rendered: str, context: Sequence[int], *, has_calls: bool) -> list[int]:
        """Return the token ids of a rendered reply up to the token that ends it, which some templates leave to the next
        message."""
        pieces = self._control.split(rendered)
        trailing = len(pieces)
        while trailing and (isinstance(pieces[trailing - 1], int) or not str(pieces[trailing - 1]).strip(SPACE)):
            trailing -= 1
        closing = self._call_closing if has_calls else self._closing_id
        end = next((n for n in range(trailing, len(pieces)) if pieces[n] in self._ends), len(pieces))
        body = [*pieces[:end], *(pieces[end : end + 1] or [closing])]
        if self._marks_start and isinstance(body[0], str) and (ids := self._encode_after(context, body[0])) is not None:
            return [*ids, *self._encode_pieces(body[1:])]
        return self._encode_pieces(body)

    def transcript(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a whole conversation, which nobody continues.

        Raises:
            ModelError: the template refuses the conversation.
        """
        text = self._of(())._template.render(self._answers(messages), [], prompt=False)
        return self._encode_pieces(self._control.split(text))

    def rewritten(
        self, turns: Sequence[SampledTurn], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        if (chat_format := self._of(tools)) is not self:
            return chat_format.rewritten(turns, messages, tools)
        values, replies = list[dict[str, Any]](), list[_ReplyParts]()
        requests = [list(turn.messages) for turn in turns] + [list(messages)]
        if self._tools_in_system:
            requests = [tools_in_system.opening(requests[0], tools), *map(tools_in_system.as_text, requests[1:])]
            tools = ()
        for n, turn in enumerate(turns):
            values += self._answers(requests[n])
            replies.append(self._reply_parts(turn.token_ids, turn.context))
            values.append(self._mark_reply(n, replies[-1], _names(requests[n + 1])))
        values += self._answers(requests[-1])
        specs = [tool_for_template(tool, self._control) for tool in tools]
        rendered = self._template.render(values, specs, prompt=True)
        ids: list[int] = []
        for n, (turn, reply) in enumerate(zip(turns, replies, strict=True)):
            frame, mark, rendered = rendered.partition(_mark("s", n))
            if not mark:
                return None  # the template omits what was sampled; keep the sampled tokens in the context
            frame, thought, _ = frame.partition(_mark("t", n))
            if thought and self._history_marks is not None:
                frame = frame.rpartition(self._history_marks[0])[0] + self._thinking_opening(turn.context)
            elif not reply.reply_ids:
                pass  # cut within its thinking, which the template leaves out: its reply is empty
            elif (has_call := _mark("c", n) in rendered) or self.reply_format.ends:
                if has_call:
                    frame = frame.removesuffix(self._written_call(*_names(requests[n + 1])).partition(PROBE)[0])
                frame = frame[: frame.rfind(self._header) + len(self._header)]
            rendered = rendered.replace(_mark("c", n), "")
            pieces = self._from_closing(frame) if n else self._control.split(frame)
            if not pieces:
                return None
            ids += [
                *self._encode_pieces(pieces),
                *(reply.all_ids if thought or not reply.thinking else reply.reply_ids),
                *(self._thinking_end(reply.all_ids, turn.context) if thought else ()),
            ]
        pieces = self._from_closing(rendered)
        return [*ids, *self._encode_pieces(pieces)] if pieces else None

    def _values(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert messages to the template's values."""
        as_text = self._arguments_as_text
        return [message_for_template(message, self._control, arguments_as_text=as_text) for message in messages]

    def _answers(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert messages to the template's values; a tool's message without the id of a call has a stand-in's."""
        values = self._values(messages)
        for number, value in enumerate(message for message in values if message["role"] == "tool"):
            value["tool_call_id"] = value.get("tool_call_id") or f"call{number:05}"
        return values

    def _from_closing(self, text: str) -> list[int | str]:
        """Return the rendered pieces from the token that ends a turn; none if there is none."""
        pieces = self._control.split(text)
        at = next((at for at, piece in enumerate(pieces) if piece in self._ends), len(pieces))
        return pieces[at:]

    def _mark_reply(self, number: int, reply: _ReplyParts, tool_names: Sequence[str]) -> dict[str, Any]:
        """Return a sampled turn as the template reads it, with marks in place of sampled text.

        Args:
            number: number of the turn.
            reply: its tokens.
            tool_names: names of the tools that answered it.
        """
        speech = _mark("s", number)
        value = _value("assistant", speech)
        if reply.thinking and self._history_marks is not None:
            value = list(thinking_message_forms(self._history_marks, _mark("t", number), speech))[self._thinking_form]
        if tool_names and self._needs_calls:
            calls = self._standin_call(*tool_names)["tool_calls"]
            arguments = {"probe": speech + _mark("c", number)}
            calls[0]["function"]["arguments"] = json.dumps(arguments) if self._arguments_as_text else arguments
            value = {**value, "content": value["content"].replace(speech, ""), "tool_calls": calls}
        return value

    def _reply_parts(self, token_ids: Sequence[int], context: Sequence[int]) -> _ReplyParts:
        """Split sampled tokens into thinking and reply, without the tokens that end the turn."""
        ids = _as_list(token_ids)
        ids = ids[:-1] if ids and (ids[-1] in self._ends or ids[-1] in self.stop_token_ids) else ids

        def text(start: int, stop: int) -> str:
            return str(self._tokenizer.decode(ids[start:stop], skip_special_tokens=False))

        marks, whole = self._history_marks, text(0, len(ids))
        if marks is None or not (self._thinking_opening(context) or whole.lstrip().startswith(marks[0])):
            return _ReplyParts("", ids, ids)
        if (end := marks[1]) not in whole:
            return _ReplyParts(whole, ids, [])
        after = bisect_left(range(len(ids)), True, key=lambda n: end in text(0, n + 1)) + 1
        thinking = text(0, after)
        while after < len(ids) and not text(after, after + 1).strip():
            after += 1
        return _ReplyParts(thinking, ids, ids[after:])

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        context: Sequence[int] = (),
        reads_calls: bool = True,
    ) -> Message:
        if tools and self._with_tools is not None:
            return self._with_tools.parse(token_ids, tools, context=context, reads_calls=reads_calls)
        text, is_open = self._decode_reply(_as_list(token_ids)), bool(self._thinking_opening(context))
        thinking, content, calls = self.reply_format.read(
            text, self._thinking, tools, is_open=is_open, reads_calls=reads_calls
        )
        return Message(role="assistant", content=content, tool_calls=calls, thinking=thinking)

    def foreign_call(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec], *, context: Sequence[int] = ()
    ) -> ToolCall | None:
        if self._with_tools is not None:
            return self._with_tools.foreign_call(token_ids, tools, context=context)
        ids = _as_list(token_ids)
        if self._foreign_marks.isdisjoint(ids):
            text = self._decode_reply(ids)
        else:
            ids = ids[:-1] if ids[-1] in self._ends else ids
            hidden = self._silent - self._foreign_marks
            text = self.decode([token for token in ids if token not in hidden])
        is_open = bool(self._thinking_opening(context))
        answer = self.reply_format.read(text, self._thinking, is_open=is_open, reads_calls=False).content
        return find_foreign_call(answer, tools, self.reply_format.name)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        return self._text_of(_as_list(token_ids))

    def _text_of(self, ids: list[int]) -> str:
        decoded_ids, text = self._last_decoded
        if ids != decoded_ids:
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            self._last_decoded = (list(ids), text)
        return text

    def _decode_reply(self, ids: list[int]) -> str:
        """Return the text of tokens without the silent ones."""
        silent = self._silent
        visible_ids = [token for token in ids if token not in silent]
        ending_text = self._endings.get(ids[-1]) if len(visible_ids) == len(ids) - 1 else None
        if ending_text is None:
            return self._text_of(visible_ids)
        return self._text_of(ids).removesuffix(ending_text)  # the journal needs the decoded text anyway

    def encode(self, text: str, context: Sequence[int] = ()) -> list[int]:
        """Return the token ids of text as the template would tokenize it; control tokens are recognized."""
        if self._marks_start and len(context) and (ids := self._encode_after(context, text)) is not None:
            return ids
        cached = self._encoded.get(text)
        if cached is None:
            cached = self._encoded.keep(text, self._tokenizer.encode(valid_unicode(text), add_special_tokens=False).ids)
        return list(cached)

    def _encode_after(self, context: Sequence[int], text: str) -> list[int] | None:
        """Return the token ids of text that continues the plain text at the end of a prompt; None if tokens of the
        prompt would change. Both texts in which a decoder may show the prompt's end are tried: with and without the
        space that SentencePiece puts after a control token."""
        ids = _as_list(context)
        end = ids[next((at for at in reversed(range(len(ids))) if ids[at] in self._control_ids), 0) :]
        for parts in ([end], [end[:1], end[1:]]):
            before = "".join(self._tokenizer.decode(part, skip_special_tokens=False) for part in parts)
            whole: list[int] = self._tokenizer.encode(valid_unicode(before + text), add_special_tokens=False).ids
            if whole[: len(end)] == end:
                return whole[len(end) :]
        return None

    def drift(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> DriftCause | None:
        """Explain why the text of `token_ids` would be tokenized differently: invalid UTF-8, or other merges; None if
        it would not."""
        ids = _as_list(token_ids)
        text = self._text_of(ids)
        if self.encode(text, context) == ids:
            return None
        return "undecodable" if "\ufffd" in text else "retokenised"

    def _opening_pieces(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int | str]:
        if self._tools_in_system:
            messages, tools = tools_in_system.opening(messages, tools), ()
        values = self._values(messages)
        specs = [tool_for_template(tool, self._control) for tool in tools]
        return self._control.split(self._template.render(values, specs, prompt=True))

    def _reply_pieces(self, messages: Sequence[Message], earlier: Sequence[Message] = ()) -> list[int | str]:
        """Render the pieces after the closing token of a sampled turn, up to the next turn, for new `messages`.

        Earlier messages are rendered too if one may hold a switch. A stand-in replaces the sampled turn, because
        only the pieces after it matter. Before messages of tools it has the calls that they answer, if the
        template accepts them, with their own ids or else with valid ones.

        Raises:
            ModelError: the template refuses the messages.
        """
        if self._tools_in_system:
            messages = tools_in_system.as_text(messages)
        new = self._values(messages)
        answers = list(itertools.takewhile(lambda message: message.role == "tool", messages))
        names = [message.name or "probe" for message in answers]
        valid = [f"call{number:05}" for number in range(len(answers))]
        reply_ids = [value.get("tool_call_id") or number for value, number in zip(new, valid, strict=False)]
        calls = [
            (ids, self._standin_call(*call_names, ids=ids))
            for ids in (reply_ids, valid)
            for call_names in (names, names[:1])
        ]
        plain = [(ids, _value("assistant", PROBE)) for ids in (reply_ids, valid)]
        before = self._switching_values(earlier)
        refusal: ModelError | None = None
        for ids, standin in (*(calls if names else ()), *plain):
            for value, call_id in zip(new, ids, strict=False):
                value["tool_call_id"] = call_id
            try:
                text = self._template.render([*before, _value("user", "."), standin, *new], [], prompt=True)
                pieces = self._control.split(self._checked_rendering(text).rpartition(PROBE)[2])
            except ModelError as error:
                refusal = refusal or error
                continue
            at = next((n for n, piece in enumerate(pieces) if piece in self._ends), None)
            if at is not None:
                return pieces[at + 1 :]
            refusal = ModelError(
                f"{self._directory}: the chat template does not close an assistant turn before new messages"
            )
        assert refusal is not None
        raise refusal

    def _has_switch(self, messages: Sequence[Message]) -> bool:
        """Whether a message may change how the template ends a prompt."""
        return bool(self._switches) and any(
            word in message.content for message in messages if message.role in _SWITCHING for word in self._switches
        )

    def _switching_values(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Convert earlier messages to the template's values, with stand-ins for sampled turns; none without a
        switch."""
        if not self._has_switch(messages):
            return []
        values: list[dict[str, Any]] = []
        for message in messages:
            if message.role in _SWITCHING:
                values += self._values([message])
            if message.role == "user":
                values.append(_value("assistant", "."))
        return values

    def _find_switches(self) -> tuple[str, ...]:
        """Find the words in system and user messages that change how the template ends a prompt, among the texts that
        it compares. SmolLM3 reads `/no_think` in the first message, Nemotron Nano 2 in any."""
        switches: list[str] = []
        content = "probe-content"

        def prompt_end(new: str, *earlier: Message) -> list[int | str] | None:
            try:
                pieces = self._reply_pieces([Message(role="user", content=new)], earlier)
            except ModelError:
                return None
            at = next((n for n, piece in enumerate(pieces) if isinstance(piece, str) and content in piece), None)
            return None if at is None else [str(pieces[at]).rpartition(content)[2], *pieces[at + 1 :]]

        expected = prompt_end(content)
        for word in compared_texts(self._template.source):
            self._switches = (word,)  # so that the earlier message is rendered
            ends = (
                prompt_end(f"{word} {content}"),
                *(prompt_end(content, Message(role=role, content=word)) for role in _SWITCHING),
            )
            if any(end not in (expected, None) for end in ends):
                switches.append(word)
        return tuple(switches)

    @staticmethod
    def _varies_in_last(messages: Sequence[Message]) -> bool:
        return bool(messages) and messages[-1].role == "user" and all(m.role == "system" for m in messages[:-1])

    def _encode_plain(self, text: str) -> Sequence[int]:
        """Return the token ids of plain text that follows a control token."""
        if not text:
            return ()
        cached = self._encoded_plain.get(text)
        if cached is None:
            cached = self._encoded_plain.keep(text, self._encode_text(text))
        return cached

    def _encode_text(self, text: str) -> list[int]:
        if self._anchor_tokenizer is not None:
            anchored_text = _ANCHOR + text.replace(_ANCHOR, "\ufffd")
            ids: list[int] = self._anchor_tokenizer.encode(anchored_text, add_special_tokens=False).ids[1:]
        else:
            ids = self._plain.encode(text, add_special_tokens=False).ids
        return [self._id_mapping.get(token, token) for token in ids] if self._id_mapping else ids

    def _encode_pieces(self, pieces: Sequence[int | str]) -> list[int]:
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                if piece in self._rowless:
                    raise ModelError(
                        f"{self._directory}: the chat template writes the token {self._rowless[piece]!r}, whose id "
                        f"{piece} has no row in the model's embeddings. Copy tokenizer.json, the template and "
                        "config.json from one model again, or add the row with model.resize_token_embeddings and train "
                        "it first"
                    )
                ids.append(piece)
            else:
                ids.extend(self._encode_plain(piece))
        return ids

    def _check_rows(self) -> None:
        """Refuse a template that writes a token without a row into a conversation with all kinds of messages.

        Raises:
            ModelError: it does; the message has the token.
        """
        if not self._rowless:
            return
        question, call = _value("user", "."), self._standin_call("probe")
        answer = {**_value("tool", "."), "name": "probe", "tool_call_id": "call00000"}
        tool = tool_for_template(ToolSpec(name="probe", description=".", parameters={"type": "object"}), self._control)
        forms = thinking_message_forms(self._thinking, ".", ".") if self._thinking is not None else ()
        self._encode_pieces([self._closing_id, self._call_closing])
        for messages, tools in (
            ([question, _value("assistant", "."), question], []),
            ([_value("system", "."), question], []),
            ([question], [tool]),
            ([question, call, answer], [tool]),
            *(([question, form], []) for form in forms),
        ):
            try:
                text = self._template.render(messages, tools, prompt=True)
            except ModelError:
                continue  # the template has no such messages
            self._encode_pieces(self._control.split(text))

    def _fill(self, frame: _Frame, content: str) -> list[int]:
        text = frame.before + frame.transform(valid_unicode(content)) + frame.behind
        return [*frame.head, *self._encode_plain(text), *frame.tail]

    def _frame(self, pieces_of: Callable[[str], list[int | str]]) -> _Frame | None:
        """Return the frame of a rendering in which one content varies; None if more than its place changes."""
        if self._control.strips:
            return None
        try:
            pieces = pieces_of("probe-content")
            expected = [(content, self._encode_pieces(pieces_of(content))) for content in _PROBES]
        except ModelError:
            return None
        at = [n for n, piece in enumerate(pieces) if isinstance(piece, str) and "probe-content" in piece]
        if len(at) != 1 or at[0] == 0:
            return None
        before, _, suffix = str(pieces[at[0]]).rpartition("probe-content")
        head, tail = self._encode_pieces(pieces[: at[0]]), self._encode_pieces([*pieces[at[0] + 1 :]])
        for transform in _TRANSFORMS:
            frame = _Frame(head, before, transform, suffix, tail)
            if all(self._fill(frame, content) == ids for content, ids in expected):
                return frame
        return None

    def _reply_frame(self, role: Role) -> _Frame | None:
        """Return the frame of one new message; None also if the template writes the name of the tool that answers, or
        the id of the call."""
        try:
            one, other = (
                self._reply_pieces([Message(role=role, content="x", name=name, tool_call_id=9 * name)])
                for name in ("a", "b")
            )
        except ModelError:
            return None
        if one != other:
            return None
        return self._frame(lambda content: self._reply_pieces([Message(role=role, content=content)]))

    def _check_plain(self) -> None:
        """Check invariants 2 and 3 on probes."""
        controls = set(self._control.ids.values())
        for literal in self._control.ids:
            if not controls.isdisjoint(self._encode_plain(literal)):
                raise ModelError(
                    f"{self._directory}: the tokenizer turns the plain text {literal!r} into a control token"
                )
        text = self._render_text([("user", "one  two\n\nthree 456."), ("assistant", "seven"), ("user", "é {8}")])
        if self._encode_pieces(self._control.split(text)) != self.encode(text):
            raise ModelError(
                f"{self._directory}: the tokenizer does not tokenize the text between two special tokens "
                "independently, so messages could not be separated from the template's control tokens"
            )

    def _render_text(self, turns: Sequence[tuple[Role, str]], *, prompt: bool = True) -> str:
        return self._template.render([_value(role, content) for role, content in turns], [], prompt=prompt)

    def _checked_rendering(self, rendered: str) -> str:
        """Return `rendered`, after a check that the template has kept the stand-in."""
        if PROBE not in rendered:
            raise ModelError(f"{self._directory}: the chat template omits the content of assistant messages")
        return rendered

    def _find_closing(self) -> int:
        """Find the control token after an assistant's content."""
        text = self._render_text([("user", "."), ("assistant", PROBE), ("user", ".")])
        suffix = text[text.rindex(PROBE) + len(PROBE) :] if PROBE in text else ""
        pieces = self._control.split(suffix) if self._control.ids else []
        for piece in pieces[:2]:
            if isinstance(piece, int):
                return piece
            if piece.strip():
                break
        raise ModelError(
            f"{self._directory}: the chat template does not close an assistant turn with a special token of the "
            "tokenizer, so the end of a sampled turn could not be recognized"
        )

    def _find_call_closing(self, configured_ids: Collection[int]) -> int:
        """Find the control token after an assistant's calls. Some templates open the next message with it (GLM)."""
        if self._tools_in_system:
            return self._closing_id
        call = [_value("user", "."), self._standin_call("probe")]
        answer = {**_value("tool", "."), "name": "probe", "tool_call_id": "call00000"}
        try:
            pieces_with_turn, pieces_without_turn = (
                self._control.split(self._template.render(messages, [], prompt=prompt).rpartition(PROBE)[2])
                for messages, prompt in (([*call, answer], True), (call, False))
            )
        except ModelError:
            return self._closing_id
        prefix_length = common_prefix_length(pieces_with_turn, pieces_without_turn)
        ends = set(self.reply_format.ends)
        markup = {self._control.ids.get(mark) for mark in self.reply_format.markup if mark not in ends} - {
            *configured_ids
        }
        closing_pieces = [piece for piece in pieces_with_turn if piece in configured_ids][:1]
        closing_pieces = (
            closing_pieces or [piece for piece in pieces_with_turn[:prefix_length] if piece not in markup][::-1]
        )
        return next(
            (piece for piece in (*closing_pieces, *pieces_with_turn[prefix_length:]) if isinstance(piece, int)),
            self._closing_id,
        )

    def _check_history(self, forks: bool) -> None:
        """Find how the template rewrites earlier turns."""
        marks = HARMONY_THINKING if self.reply_format.name == "openai" else self._thinking
        call = self._standin_call("probe")
        self.rewrites = rewrite_causes(self._template, call, marks)
        self.forks = forks and not {"thinking", "tools", "prompt", "history"}.isdisjoint(self.rewrites)
        self._history_marks = (marks[0], "<|end|><|start|>assistant") if marks == HARMONY_THINKING else marks
        self._thinking_form = detect_thinking_message_form(self._template, call, marks)
        self._thinking_closing = self._find_thinking_closing()
        self._needs_calls = self._takes_results_of_calls_only()
        question = [Message(role="user", content="one")]
        if self.forks and self.rewritten([SampledTurn(question, self.encode("two"))], question, ()) is None:
            raise ModelError(
                f"{self._directory}: model.history = 'fork': the chat template omits the content of assistant "
                "messages; set 'keep'"
            )

    def _find_thinking_closing(self) -> str:
        """Return the text between thinking and answer, as the template writes it."""
        if self._thinking is None:
            return ""
        thought, speech = _mark("t", 0), _mark("s", 0)
        value = list(thinking_message_forms(self._thinking, thought, speech))[self._thinking_form]
        for calls in ({}, {"tool_calls": self._standin_call("probe")["tool_calls"]}):  # some keep it only before calls
            with contextlib.suppress(ModelError):
                text = self._template.render([_value("user", "."), {**value, **calls}], [], prompt=False)
                before, mark, after = text.partition(thought)[2].partition(self._thinking[1])
                if mark:
                    return before + mark + after[: len(after) - len(after.lstrip(SPACE))]
        return f"\n{self._thinking[1]}\n\n"

    def _renders_tools(self) -> bool:
        """Whether the template writes the tools that it is given into a prompt."""
        name = "probe_of_tools"
        probe = ToolSpec(name=name, description=".", parameters={"type": "object", "properties": {}})
        specs = [tool_for_template(probe, self._control)]
        try:
            return name in self._template.render([_value("system", "."), _value("user", ".")], specs, prompt=True)
        except ModelError:
            return name in self._template.render([_value("user", ".")], specs, prompt=True)

    def _takes_results_of_calls_only(self) -> bool:
        """Whether a tool's message may only follow a turn with a call; the template may notice only turns later."""
        if self._tools_in_system:
            return False
        answer = {**_value("tool", PROBE), "name": "probe", "tool_call_id": "call00000"}
        question, reply = _value("user", "."), _value("assistant", ".")
        try:
            text = self._template.render([question, reply, answer, reply, question], [], prompt=True)
        except ModelError:
            return True
        return PROBE not in text

    def _written_call(self, *names: str) -> str:
        """Render a turn that calls tools, without the prompt before it."""
        call = self._standin_call(*names)
        prompt = self._template.render([_value("user", ".")], [], prompt=True)
        text = self._template.render([_value("user", "."), call], [], prompt=False)
        return text[common_prefix_length(prompt, text) :]

    def _standin_call(self, *names: str, ids: Sequence[str] = ()) -> dict[str, Any]:
        """Make a turn that calls tools, with the probe in the arguments of each call; without `ids` with valid ones."""
        arguments = {"probe": PROBE}
        function_arguments = json.dumps(arguments, ensure_ascii=False) if self._arguments_as_text else arguments
        functions = [{"name": name, "arguments": function_arguments} for name in names]
        ids = ids or [f"call{n:05}" for n in range(len(names))]
        calls = [
            {"type": "function", "id": id_, "function": function} for id_, function in zip(ids, functions, strict=False)
        ]
        return {**_value("assistant", ""), "tool_calls": calls}

    def _find_reply_format(self, name: str, special: Sequence[str]) -> ReplyFormat:
        """Return the format of a name, or the one in which the template writes a call.

        Raises:
            ModelError: there is no such format.
        """
        if self._tools_in_system and name not in (AUTO, "hermes"):
            raise ModelError(
                f"model.reply_format = {name!r} does not go with model.tools_in = 'system', which asks the model for "
                "calls in the format 'hermes'; leave reply_format at 'auto'"
            )
        names = ", ".join(REPLY_FORMATS)
        if name != AUTO and name not in REPLY_FORMATS:
            raise ModelError(f"model.reply_format {name!r} is unknown; there are: {AUTO}, {names}")
        if self._tools_in_system:
            return REPLY_FORMATS["hermes"]
        marks = _thinking_marks(self._template.source, ())
        call_text = ""
        for self._arguments_as_text in (False, True):
            try:
                call_text = self._written_call("probe")
            except ModelError:
                continue
            for reply_format in REPLY_FORMATS.values():
                text = call_text
                for literal in special:
                    text = text if literal in reply_format.markup else text.replace(literal, "")
                calls = reply_format.read(text, marks).tool_calls
                if [(call.name, call.arguments) for call in calls] == [("probe", {"probe": PROBE})]:
                    return REPLY_FORMATS.get(name, reply_format)
        self._arguments_as_text = False
        if name in REPLY_FORMATS:
            return REPLY_FORMATS[name]
        if "probe" in call_text:
            raise ModelError(
                f"{self._directory}: the chat template writes tool calls in an unknown format. Set model.reply_format "
                f"to one that parses the model's calls (or to any, if it calls no tools): {names}"
            )
        return REPLY_FORMATS["hermes"]


class _AddedTokenText(msgspec.Struct):
    content: str = ""


class _AddedTokens(msgspec.Struct):
    added_tokens: list[_AddedTokenText] = []


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`.

    Raises:
        ModelError: it cannot be read, or has an absurdly long added token, whose compilation would not end.
    """
    try:
        content = read_whole(path, MAX_TOKENIZER_BYTES)
        longest = max((token.content for token in _ADDED_TOKENS.decode(content).added_tokens), key=len, default="")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if len(longest) > _MAX_TOKEN_CHARACTERS:
        raise ModelError(
            f"{path}: the added token {longest[:30]!a}… has {len(longest):,} characters, but none has more than "
            f"{_MAX_TOKEN_CHARACTERS:,}: the file is damaged. Copy the directory again"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}") from error


_ADDED_TOKENS = msgspec.json.Decoder(_AddedTokens)


def _embedding_rows(directory: Path) -> int | None:
    """Return the number of rows of a model's embeddings; None if its configuration does not say."""
    parts = config_parts(read_json(directory / "config.json"))
    rows = next((part["vocab_size"] for part in parts if "vocab_size" in part), None)
    return rows if type(rows) is int else None


def _rowless_tokens(tokens: Collection[AddedToken], rows: int | None) -> dict[int, str]:
    """Return the tokens without a row in the model's embeddings, by id."""
    return {token.token_id: token.literal for token in tokens if rows is not None and token.token_id >= rows}


def _check_vocabulary(directory: Path, tokenizer: Tokenizer, rows: int | None) -> None:
    """Refuse a tokenizer with tokens beyond the embedding's rows, or one that leaves much of the embedding unused.

    Special tokens beyond the embedding are allowed, such as those of images in text models (Gemma 3): no text is
    encoded to them, and a template that writes one is refused.
    """
    if rows is None:
        return
    special = {token for token, added_token in tokenizer.get_added_tokens_decoder().items() if added_token.special}
    tokens = set(tokenizer.get_vocab(with_added_tokens=True).values())
    beyond = sorted(token for token in tokens - special if token >= rows)
    remedy = "Copy tokenizer.json and config.json from one model again, or resize the model's embeddings"
    if beyond:
        raise ModelError(
            f"{directory}: the tokenizer has {len(tokens)} tokens, but the model's embeddings have {rows} rows: token "
            f"{beyond[0]} has none. {remedy}"
        )
    # Models are padded to round sizes; the largest padding seen is 1,069 rows.
    if rows - len(tokens) > max(2048, rows // 10):
        raise ModelError(
            f"{directory}: the tokenizer has only {len(tokens)} tokens for {rows} rows of the model's embeddings, so "
            f"it belongs to another model. {remedy}"
        )


def _mark(kind: str, number: int) -> str:
    """Make a mark that replaces thinking (`t`) or speech (`s`) of a turn in a rendering, like `PROBE`."""
    return PROBE.replace("p", f"{kind}{number}.")


def _names(messages: Sequence[Message]) -> list[str]:
    """Return the names of the tools that answer."""
    return [message.name or "probe" for message in messages if message.role == "tool"]


def _calls(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


def _value(role: Role, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _with(message: Message, content: str) -> Message:
    return Message(role=message.role, content=content, name=message.name)


def _as_list(token_ids: Sequence[int]) -> list[int]:
    """Convert token ids, also a numpy array, to plain integers."""
    if type(token_ids) is list:
        return token_ids
    convert = getattr(token_ids, "tolist", None)
    return convert() if convert is not None else list(token_ids)


def _thinking_marks(source: str, literals: Collection[str]) -> tuple[str, str] | None:
    """Return the marks around thinking that a template reads or writes, or else those among the tokens."""
    mark_pairs = (pair for pair in THINKING if pair[1] in source)
    return next(mark_pairs, next((pair for pair in THINKING if pair[1] in literals), None))


def _silent_tokens(tokens: Sequence[AddedToken], markup: Collection[str]) -> tuple[frozenset[int], frozenset[int]]:
    """Return the tokens left out of a reply's text, and which of these are marks of other formats. A mark may be a
    token with text behind it, such as Gemma's `<|channel>thought`."""
    silent = [token for token in tokens if token.special and not any(mark.startswith(token.literal) for mark in markup)]
    return (
        frozenset(token.token_id for token in silent),
        frozenset(token.token_id for token in silent if token.literal in ALL_MARKUP),
    )


def _added_tokens(tokenizer: Tokenizer) -> list[AddedToken]:
    return [
        AddedToken(token_id, token.content, token.special, token.lstrip, token.rstrip)
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.content.strip()
    ]


class TokenizedTextCache:
    """A cache of the tokens of recently encoded texts; the oldest are evicted first.

    Args:
        characters: maximum total length of the texts.
    """

    def __init__(self, characters: int) -> None:
        self._ids_by_text: dict[str, array[int]] = {}
        self.get: Callable[[str], Sequence[int] | None] = self._ids_by_text.get
        """Returns the tokens of a text; None if they are not in the cache."""
        self._room = self._limit = characters

    def keep(self, text: str, token_ids: Sequence[int]) -> Sequence[int]:
        """Cache the tokens of a text, unless it is too long; returns them."""
        if len(text) <= self._limit // 4:
            self._ids_by_text[text] = array("i", token_ids)
            self._room -= len(text)
            while self._room < 0:
                oldest = next(iter(self._ids_by_text))
                del self._ids_by_text[oldest]
                self._room += len(oldest)
        return token_ids


def _endings(tokenizer: Tokenizer, silent: Collection[int]) -> dict[int, str]:
    """Return the texts of silent tokens that never change how the tokens before them are decoded.

    Byte-level decoders qualify: a character that is incomplete before an ASCII one is also incomplete at the end of the
    text. Other decoders add or remove spaces between tokens.
    """
    decoder = json.loads(tokenizer.to_str())["decoder"]
    if not isinstance(decoder, dict) or decoder.get("type") != "ByteLevel":
        return {}
    texts = {token: tokenizer.decode([token], skip_special_tokens=False) for token in silent}
    return {token: text for token, text in texts.items() if text and text[0].isascii()}


def _without_control(tokenizer: Tokenizer, control: ControlTokens, *, anchor: bool) -> Tokenizer:
    """Copy a tokenizer so that it reads control tokens' literals as plain text, with an extra anchor token if
    `anchor`."""
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [t for t in description["added_tokens"] if t["content"] not in control.ids]
    description["post_processor"] = None
    plain = Tokenizer.from_str(json.dumps(description))
    if anchor:
        plain.add_special_tokens([_ANCHOR])
    return plain


def _renumbering(plain: Tokenizer, tokenizer: Tokenizer) -> dict[int, int]:
    """Map ids of added tokens in a copy without control tokens, which numbers them differently, to the original ids."""
    ids = {number: tokenizer.token_to_id(token.content) for number, token in plain.get_added_tokens_decoder().items()}
    return {number: token_id for number, token_id in ids.items() if token_id not in (None, number)}


def _marks_start(plain: Tokenizer) -> bool:
    """Whether a tokenizer reads the start of a text differently from the same text behind a line break, as
    SentencePiece does, which puts a space before it."""
    line, text, both = (plain.encode(sample, add_special_tokens=False).ids for sample in ("\n", "a b", "\na b"))
    return [*line, *text] != both


def _anchored_tokenizer(plain: Tokenizer, candidate: Tokenizer) -> Tokenizer | None:
    """Return `candidate` if the tokenizer treats the beginning of its input differently from text after a control token
    (some put a space before it), so that text must be encoded after an anchor."""
    plain_ids = plain.encode("a b", add_special_tokens=False).ids
    return None if candidate.encode(f"{_ANCHOR}a b", add_special_tokens=False).ids[1:] == plain_ids else candidate
