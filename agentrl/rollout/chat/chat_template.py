"""A model directory's chat template as a function, and the text of messages made safe to put through it.

Owns the reading of `tokenizer_config.json`, `chat_template.jinja`, `chat_template.json`, `generation_config.json`;
`ControlTokens`, which splits rendered text into control tokens and plain text. `template_process` renders. Does not
tokenize plain text.

Invariant: a control token's literal inside a message (such as `<|im_end|>` in a tool's output) survives rendering as
plain text: it is escaped with private-use characters before rendering, and restored after the frame is split.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.core.errors import ModelError
from agentrl.core.files import read_json, read_whole
from agentrl.core.text import valid_unicode
from agentrl.rollout.chat.template_process import TemplateError, TemplateProcess

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.core.records import Message, ToolSpec

_PROCESS = TemplateProcess()
_ESCAPE, _END = "\ue000", "\ue001"
PROBE = f"{_ESCAPE}p{_END}"
"""Placeholder of a message's content in a rendered frame; escaped content cannot contain it."""


class AddedToken(NamedTuple):
    """A token that the tokenizer matches in text before anything else."""

    token_id: int
    literal: str
    special: bool
    strips_left: bool
    strips_right: bool


class ChatTemplate:
    """Renders conversations with a chat template in `directory`, and the given values of its variables.

    Args:
        directory: model directory.
        variables: values of variables that the template reads.
        with_tools: whether the conversations offer tools; see `choose_template`.

    Raises:
        ModelError: there is no template, it does not compile, or no template of the directory reads a variable.
    """

    def __init__(
        self, directory: Path, variables: Mapping[str, Any] | None = None, *, with_tools: bool = False
    ) -> None:
        self._directory = directory
        self._variables = dict(variables or {})
        config = read_json(directory / "tokenizer_config.json")
        templates = read_templates(directory)
        self.source = choose_template(directory, templates, with_tools=with_tools)
        values = {**read_json(directory / "special_tokens_map.json"), **config}
        self._tokens = {
            key: text for key, value in values.items() if key.endswith("_token") and (text := _literal(value))
        }
        made_with = [self.source, self._tokens, *([self._variables] if self._variables else [])]
        self.fingerprint = json.dumps(made_with, sort_keys=True).encode()
        """Everything that determines a rendering, except the conversation."""
        try:
            _PROCESS.compile(self.source)
        except TemplateError as error:
            raise ModelError(f"{directory}: the chat template does not compile: {error}") from error
        if self._variables:
            self._check_read([templates[name] for name in (DEFAULT, FOR_TOOLS) if name in templates])
        self.takes_parts = False
        """Whether the template reads a message's text only from a list of parts, as some for images and text do."""
        if not self._shows_text():
            self.takes_parts = True
            self.takes_parts = self._shows_text()

    def _shows_text(self) -> bool:
        try:
            return PROBE in self.render([{"role": "user", "content": PROBE}], [], prompt=True)
        except ModelError:
            return False

    def _check_read(self, sources: Sequence[str]) -> None:
        """Refuse a value of a variable that none of the templates reads."""
        of_ours = {"messages", "tools", "documents", "add_generation_prompt", *self._tokens}
        try:
            read = {name for source in sources for name in _PROCESS.variables(source)} - of_ours
        except TemplateError as error:
            raise ModelError(f"{self._directory}: a chat template does not compile: {error}") from error
        if unread := sorted(self._variables.keys() - read):
            raise ModelError(
                f"{self._directory}: model.template_variables.{unread[0]}: the chat template reads no such variable; "
                f"it reads {', '.join(sorted(read)) or 'none'}"
            )

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        """Render a conversation, with `prompt` up to the start of the assistant's next turn.

        Raises:
            ModelError: the template refuses the conversation.
        """
        if self.takes_parts:
            messages = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
        conversation = {"messages": messages, "tools": tools or None, "documents": None}
        try:
            text = _PROCESS.render(
                self.source, {**self._tokens, **self._variables, **conversation, "add_generation_prompt": prompt}
            )
        except TemplateError as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ModelError(
                f"{self._directory}: the chat template cannot render a conversation ({roles}): {error}"
            ) from error
        return valid_unicode(text)


def _pattern(token: AddedToken) -> str:
    space = r"\s*"
    # Match only from the start of the white space; otherwise a long run is scanned again from each of its characters.
    prefix, suffix = rf"(?:(?<!\s){space})?" if token.strips_left else "", space if token.strips_right else ""
    return f"{prefix}({re.escape(token.literal)}){suffix}"


class ControlTokens:
    """The tokens of a model that structure a conversation, as opposed to text; see the module's invariant."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        longest_first = sorted(tokens, key=lambda token: -len(token.literal))
        self.ids = {token.literal: token.token_id for token in longest_first}
        self.strips = any(token.strips_left or token.strips_right for token in longest_first)
        self._literals = [token.literal for token in longest_first]
        self._index = {literal: index for index, literal in enumerate(self._literals)}
        self._frame = re.compile("|".join(_pattern(token) for token in longest_first) or "(?!)")  # none: no match
        self._any = re.compile("|".join(map(re.escape, (*self._literals, _ESCAPE))))
        special = [token.literal for token in longest_first if token.special]
        self._special = re.compile("|".join(map(re.escape, (*special, _ESCAPE))))
        self._escape_pattern = re.compile(rf"{_ESCAPE}(\d*){_END}")

    def escape(self, text: str, *, only_special: bool = False) -> str:
        """Replace the literals of control tokens in `text` with private-use characters."""
        return (self._special if only_special else self._any).sub(self._replacement, valid_unicode(text))

    def escape_value(self, value: Any, *, only_special: bool = False) -> Any:
        """Apply `escape` to every string of a JSON value."""
        if isinstance(value, str):
            return self.escape(value, only_special=only_special)
        if isinstance(value, Mapping):
            return {
                self.escape(str(key)): self.escape_value(item, only_special=only_special) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape_value(item, only_special=only_special) for item in value]
        return value

    def _replacement(self, match: re.Match[str]) -> str:
        return f"{_ESCAPE}{self._index.get(match[0], '')}{_END}"

    def split(self, text: str) -> list[int | str]:
        """Split rendered text into control token ids and the plain text between them, and undo escapes."""
        pieces: list[int | str] = []
        at = 0
        for match in self._frame.finditer(text):
            if match.start() > at:
                pieces.append(self._restore(text[at : match.start()]))
            pieces.append(self.ids[match[match.lastindex or 0]])
            at = match.end()
        if at < len(text):
            pieces.append(self._restore(text[at:]))
        return pieces

    def _restore(self, text: str) -> str:
        if _ESCAPE not in text:
            return text
        return self._escape_pattern.sub(lambda match: self._literals[int(match[1])] if match[1] else _ESCAPE, text)


def message_for_template(
    message: Message, control: ControlTokens, *, arguments_as_text: bool = False
) -> dict[str, Any]:
    """Convert a message to the template's value. An assistant's own markup (thinking, tool calls) keeps its meaning."""
    is_assistant = message.role == "assistant"
    value: dict[str, Any] = {
        "role": message.role,
        "content": control.escape(message.content, only_special=is_assistant),
    }
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "type": "function",
                "id": control.escape(call.id),
                "function": {
                    "name": control.escape(call.name),
                    "arguments": _template_arguments(
                        control.escape_value(call.arguments, only_special=is_assistant), arguments_as_text
                    ),
                },
            }
            for call in message.tool_calls
        ]
    if message.thinking:
        value["reasoning_content"] = control.escape(message.thinking, only_special=is_assistant)
    if message.tool_call_id is not None:
        value["tool_call_id"] = control.escape(message.tool_call_id)
    if message.name is not None:
        value["name"] = control.escape(message.name)
    return value


def _template_arguments(arguments: Any, as_text: bool) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if as_text and not isinstance(arguments, str) else arguments


def tool_for_template(tool: ToolSpec, control: ControlTokens) -> dict[str, Any]:
    """Convert a tool to the template's value."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": control.escape_value(function)}


_TEXT = r"""(?:'([^'\\\n]{1,40})'|"([^"\\\n]{1,40})")"""
_COMPARED = re.compile(rf"{_TEXT}\s+(?:not\s+)?in\b|(?:[!=]=|(?:starts|ends)with\()\s*{_TEXT}")


def compared_texts(source: str) -> list[str]:
    """Return the texts that a template compares with something.

    Example:
        >>> compared_texts("{% if '/no_think' in text or text == 'a' %}{{ 'b' }}{% endif %}")
        ['/no_think', 'a']
    """
    return list(dict.fromkeys(next(filter(None, match.groups())) for match in _COMPARED.finditer(source)))


def stop_token_ids(directory: Path) -> list[int]:
    """Return `eos_token_id` of `generation_config.json`, else of `config.json`.

    Raises:
        ModelError: the value is neither a token id nor a list of token ids.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(item) is int and 0 <= item <= 2**31 - 1 for item in ids):
                raise ModelError(
                    f"{directory / name}: eos_token_id is {ascii(value)[:80]}, not a token id or a list of ids"
                )
            return ids
    return []


DEFAULT, FOR_TOOLS = "default", "tool_use"
"""Names of the templates that a conversation without tools, and one with tools, is rendered with."""
TEMPLATE_FILE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of the templates with other names than `default`."""


def read_templates(directory: Path) -> dict[str, str]:
    """Return the sources of a model directory's chat templates by name; a single one is named `default`. As in
    transformers, templates in files replace those of `tokenizer_config.json`.

    Raises:
        ModelError: one cannot be read.
    """
    files = {path.stem: path for path in sorted((directory / NAMED_TEMPLATES).glob("*.jinja")) if path.is_file()}
    if (directory / TEMPLATE_FILE).is_file():
        files[DEFAULT] = directory / TEMPLATE_FILE
    if files:
        return {name: _read_text(path) for name, path in files.items()}
    for name in ("tokenizer_config.json", "chat_template.json"):  # the second belongs to a processor
        value = read_json(directory / name).get("chat_template")
        if isinstance(value, list):
            named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        else:
            named = {DEFAULT: value}
        templates = {name: source for name, source in named.items() if isinstance(source, str)}
        if templates:
            return templates
    return {}


def choose_template(directory: Path, templates: Mapping[str, str], *, with_tools: bool) -> str:
    """Return the source of the template that transformers takes: `tool_use` if there are tools, else `default`.

    Raises:
        ModelError: there is none.
    """
    if with_tools and FOR_TOOLS in templates:
        return templates[FOR_TOOLS]
    if DEFAULT in templates:
        return templates[DEFAULT]
    if templates:
        raise ModelError(
            f"{directory}: there is no chat template for conversations with{'' if with_tools else 'out'} tools: none "
            f"of {', '.join(map(repr, sorted(templates)))} is named {DEFAULT!r}. Save the one that the model was "
            f"trained with as {TEMPLATE_FILE}"
        )
    raise ModelError(
        f"{directory} has no chat template, neither chat_template.jinja nor one in tokenizer_config.json or "
        "chat_template.json. Use an instruction-tuned model, or put the template that the model was trained with into "
        "chat_template.jinja"
    )


def _read_text(path: Path) -> str:
    try:
        return read_whole(path).decode().replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable UTF-8 text: {error}") from error


def _literal(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
