"""Probes of a chat template: whether rendering a longer conversation keeps the earlier turns unchanged.

Invariant: a probe only renders; it knows no sampled tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from agentrl.core.errors import ModelError
from agentrl.core.text import common_prefix_length
from agentrl.rollout.chat.chat_template import PROBE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from agentrl.rollout.chat.chat_template import ChatTemplate

RewriteCause = Literal["thinking", "whitespace", "tool_results", "tools", "date", "prompt", "history"]
"""Ways in which a template rewrites earlier turns.

* `thinking`: it omits the thinking of earlier turns.
* `whitespace`: it trims the text.
* `tool_results`: it merges consecutive tool results, or later renders them differently.
* `tools`: it moves the tools as the conversation grows.
* `date`: it writes the date; agentrl renders every prompt with the same date.
* `prompt`: a turn starts differently in the history than in its generation prompt.
* `history`: other changes.
"""

_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe": {"type": "string", "description": "probe"}}},
    },
}
_SYSTEM = {"role": "system", "content": "zero"}
_ASK, _MORE = {"role": "user", "content": "one"}, {"role": "user", "content": "two"}
_REPLY = {"role": "assistant", "content": PROBE}
_THOUGHT = PROBE.replace("p", "thought")


def rewrite_causes(
    template: ChatTemplate, call: Mapping[str, Any], thinking: tuple[str, str] | None
) -> tuple[RewriteCause, ...]:
    """Find the ways in which a template rewrites earlier turns, on a few conversations.

    Args:
        template: template of a model.
        call: assistant message that calls the tool `probe`.
        thinking: the marks around thinking.
    """
    check = _TemplateCheck(template, call)
    causes = {*check.of_turns(thinking), *check.of_tools()}
    if thinking is not None and check.leaves_out_thinking(thinking):
        causes.add("thinking")
    if "strftime_now" in template.source:
        causes.add("date")
    if "history" in causes:
        causes -= {"tools", "tool_results"}  # "history" already covers rewrites that depend on tools
    return tuple(cause for cause in get_args(RewriteCause) if cause in causes)


def thinking_message_forms(thinking: tuple[str, str], thought: str, content: str) -> Iterator[dict[str, Any]]:
    """Yield the forms in which templates accept a turn with thinking, as messages."""
    yield {"role": "assistant", "content": content, "reasoning_content": thought}
    yield {"role": "assistant", "content": content, "thinking": thought}
    yield {"role": "assistant", "content": f"{thinking[0]}\n{thought}\n{thinking[1]}\n\n{content}"}


def detect_thinking_message_form(
    template: ChatTemplate, call: Mapping[str, Any], thinking: tuple[str, str] | None
) -> int:
    """Return the number of the form in `thinking_message_forms` from which the template reads thinking."""
    check = _TemplateCheck(template, call)
    forms = list(thinking_message_forms(thinking, _THOUGHT, PROBE)) if thinking is not None else []
    return next((n for n, form in enumerate(forms) if check.shows_thinking(form)), 0)


class _TemplateCheck:
    """Renders conversations around a few words, and compares longer ones with shorter ones."""

    def __init__(self, template: ChatTemplate, call: Mapping[str, Any]) -> None:
        self._template = template
        self._call = call

    def _text(self, *messages: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = (), prompt: bool = True) -> str:
        """Render a conversation; "" if the template refuses it."""
        try:
            return self._template.render([dict(message) for message in messages], tools, prompt=prompt)
        except ModelError:
            return ""

    def of_turns(self, thinking: tuple[str, str] | None) -> Iterator[RewriteCause]:
        """Yield the causes that show in plain turns."""
        first, second = self._text(_ASK), self._text(_ASK, _REPLY, _MORE)
        place = second.partition(PROBE)[0]
        if second and not place.startswith(first):
            prefix_length = common_prefix_length(first, place)
            if thinking is not None and _bare(place, thinking) == _bare(first, thinking):
                yield "thinking"
            else:
                yield "prompt" if "one" in first[:prefix_length] else "history"
        shorter, longer = self._text(_SYSTEM, _ASK), self._text(_SYSTEM, _ASK, _REPLY, _MORE)
        if longer and "zero" in shorter and "zero" not in longer.partition(PROBE)[0]:
            yield "history"
        third = self._text(_ASK, _REPLY, _MORE, {"role": "assistant", "content": "three"}, _user("four"))
        if third and not third.startswith(second.rpartition("two")[0]):
            yield "history"
        if second and f" \n{PROBE}\n " not in self._text(_ASK, {**_REPLY, "content": f" \n{PROBE}\n "}, _MORE):
            yield "whitespace"

    def leaves_out_thinking(self, thinking: tuple[str, str]) -> bool:
        """Whether thinking disappears after the user's next message."""
        forms = list(thinking_message_forms(thinking, _THOUGHT, PROBE))
        is_kept = any(_THOUGHT in self._text(_ASK, form, _MORE) for form in forms)
        is_known = any(self.shows_thinking(form) for form in forms)
        return not is_kept and (is_known or thinking[1] in self._template.source)

    def shows_thinking(self, form: Mapping[str, Any]) -> bool:
        """Whether the thinking of a turn stays as long as only tools have answered, or only the user."""
        silent = {**form, "content": str(form["content"]).replace(PROBE, "")}
        calls = [(_ASK, {**self._call, **call_form}, _result("r1")) for call_form in (form, silent)]
        conversations = (*calls, (_ASK, form), (_ASK, form, _MORE))
        return any(_THOUGHT in self._text(*messages) for messages in conversations)

    def of_tools(self) -> Iterator[RewriteCause]:
        """Yield the causes that show with tools."""
        first_text, longer = self._text(_ASK, tools=[_TOOL]), self._text(_ASK, _REPLY, _MORE, tools=[_TOOL])
        if longer and "one" in first_text[common_prefix_length(first_text, longer) :]:
            yield "tools"
        one = self._text(_ASK, self._call, _result("r1"), prompt=False)
        two = self._text(_ASK, self._call, _result("r1"), _result("r2"), prompt=False)
        if "r1" in one and two and not two.startswith(one.rstrip()):
            yield "tool_results"


def _result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "probe", "tool_call_id": "call00000", "content": content}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _bare(text: str, thinking: tuple[str, str]) -> str:
    """Remove from rendered text the parts that thinking templates insert and remove."""
    return text.replace(thinking[0], "").replace(thinking[1], "").rstrip()
