"""Templates that rewrite former turns: found at load, kept or forked on purpose, no sampled token trained twice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.records import Message, SampledTurn
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.chat.template_checks import RewriteCause
from agentrl.rollout.turn.agent import applicable_rewrite_causes
from tests.support.template_talks import CHATML, PLANTED, Talk, model, play
from tests.unit.test_chat_format import QWEN, QWEN_MARKUP, QWEN_SPECIAL, write_model
from tests.unit.test_gateway import Loop, ask

if TYPE_CHECKING:
    import aiohttp

THOUGHT = "<think>\nHm.\n</think>\n\n"


def user(text: str) -> Message:
    return Message(role="user", content=text)


@pytest.mark.parametrize("cause", get_args(RewriteCause))
def test_each_planted_way_of_rewriting_is_found(cause: RewriteCause, tmp_path: Path) -> None:
    assert TemplateChatFormat.load(model(tmp_path, cause, PLANTED[cause])).rewrites == (cause,)


def test_a_template_that_only_appends_rewrites_nothing(tmp_path: Path) -> None:
    chat = TemplateChatFormat.load(model(tmp_path, "plain", CHATML), history="fork")
    assert (chat.rewrites, chat.forks) == ((), False)


def test_a_fork_holds_what_was_sampled_token_by_token(tmp_path: Path) -> None:
    chat = TemplateChatFormat.load(write_model(tmp_path, QWEN, QWEN_SPECIAL, QWEN_MARKUP), history="fork")
    assert chat.forks
    reply = [chat.encode(letter)[0] for letter in '{"name": "add", "arguments"']  # unlike any tokeniser writes it
    assert reply != chat.encode(chat.decode(reply))
    sampled = [*chat.encode(THOUGHT), *reply, chat.stop_token_ids[0]]
    found = chat.rewritten([SampledTurn([user("one")], sampled)], [user("two")], ())
    assert found is not None
    at = found.index(reply[0], len(chat.start([user("one")], ())))
    assert found[at : at + len(reply)] == reply
    assert "Hm." not in chat.decode(found)
    assert chat.decode(found) == (
        "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
        f"{chat.decode(reply)}<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n"
    )


def test_rows_of_a_forked_episode_are_one_unit_and_train_each_sampled_token_once(tmp_path: Path) -> None:
    directory = model(tmp_path, "thinks", PLANTED["thinking"])
    said = [f"{THOUGHT}One.", "Two.", f"{THOUGHT}Three."]
    _, rows, wrong = play(Talk, TemplateChatFormat.load(directory, history="fork"), said)
    assert (rows, wrong) == (2, {}), "the second question rewrites the first reply, the third nothing more"
    _, rows, wrong = play(Talk, TemplateChatFormat.load(directory, history="keep"), said)
    assert (rows, wrong) == (1, {})


STRICT = """\
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(turns=0) %}
{%- for m in talk if m.role != 'tool' and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.turns % 2 == 0) %}{{ raise_exception('the roles must alternate') }}{% endif %}
{%- set ns.turns = ns.turns + 1 %}
{%- endfor %}
{%- for m in talk %}
{%- if m.role == 'user' %}[INST]
{%- if loop.last and talk | length < messages | length %}{{ messages[0].content }}; {% endif %}{{ m.content }}[/INST]
{%- elif m.tool_calls %}[TOOL_CALLS][
{%- for call in m.tool_calls %}{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{% endfor %}]{{ eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('an id must have 9 characters') }}{% endif -%}
[TOOL_RESULTS]{{ m.content }} for {{ m.tool_call_id }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{{ eos_token }}
{%- endif %}
{%- endfor %}"""
"""Refuses an answer to a turn without a call, but only once a user has spoken again, and moves the system message to
the last question; there is nothing before a turn of the assistant that it could be recognized by."""


class Planned(agentrl.Environment):
    """A system message, a call, its answer, and two more questions."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Ask them."""
        agent = ctx.agent("solver")
        await agent.act(agentrl.system("Be short."), user("Weather?"))
        await agent.act(Message(role="tool", content="rain", name="weather"))
        await agent.act(user("And then?"))
        await agent.act(user("And then?"))
        agent.reward(1.0)


def test_former_turns_have_calls_where_a_template_needs_them_and_moves_the_system_message(tmp_path: Path) -> None:
    marks = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    chat = TemplateChatFormat.load(model(tmp_path, "strict", STRICT, marks), history="fork")
    assert chat.rewrites == ("history",)
    call = '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}, "id": "abcdefghi"}]'
    header, rows, wrong = play(Planned, chat, [call, "Rain.", "Sun.", "Snow."])
    assert (header.drop_reason, rows, wrong) == (None, 4, {})
    asked = [[agentrl.system("Be short."), user("Weather?")], [Message(role="tool", content="rain", name="weather")]]
    turns = [
        SampledTurn(messages, [*chat.encode(said), chat.stop_token_ids[0]])
        for messages, said in zip(asked, (call, "Rain."), strict=True)
    ]
    found = chat.rewritten(turns, [user("And?")], ())
    assert found is not None
    end = chat.decode([chat.stop_token_ids[0]])
    assert chat.decode(found) == (
        f"[INST]Weather?[/INST]{call}{end}[TOOL_RESULTS]rain for call00000[/TOOL_RESULTS]Rain.{end}"
        "[INST]Be short.; And?[/INST]"
    )


class Outside(Loop):
    """Asks once."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> None:
        await ask(client, endpoint, [{"role": "user", "content": "One?"}])


def test_a_forked_history_is_refused_for_agents_from_outside(tmp_path: Path) -> None:
    directory = model(tmp_path, "thinks", PLANTED["thinking"])
    header, _, _ = play(Outside, TemplateChatFormat.load(directory, history="keep"), ["One."])
    assert header.drop_reason is None
    with pytest.raises(EnvironmentDefinitionError, match="'main'"):
        play(Outside, TemplateChatFormat.load(directory, history="fork"), ["One."])


def test_causes_are_counted_where_they_apply() -> None:
    def said(text: str, thinking: str = "") -> Message:
        return Message(role="assistant", content=text, thinking=thinking)

    rewrites, result = ("thinking", "whitespace", "date"), Message(role="tool", content="5")
    assert list(applicable_rewrite_causes(rewrites, [], [user("one")])) == []
    assert list(applicable_rewrite_causes(rewrites, [user("one"), said("x", "Hm.")], [user("two")])) == ["thinking"]
    assert list(applicable_rewrite_causes(rewrites, [user("one"), said("x", "Hm.")], [result])) == []
    assert list(applicable_rewrite_causes(rewrites, [user("one"), said("x ")], [user("two")])) == ["whitespace"]
    assert list(applicable_rewrite_causes(("tools",), [user("one"), said("x")], [user("two")])) == ["tools"]
