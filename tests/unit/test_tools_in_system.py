"""Tools for models whose chat template ignores them: said by name, and written into the system message on request."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agentrl.app.policies import hidden_tools
from agentrl.app.run_parts import environment_of, make_chat_format
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.core.errors import ModelError
from agentrl.core.records import Message, SampledTurn, ToolCall, ToolSpec
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.unit.test_chat_format import ADD, HOSTILE, QWEN, QWEN_MARKUP, QWEN_SPECIAL, tool, user, write_model

PLAIN = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""In the manner of SmolLM2, which ignores `tools`."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("plain"), PLAIN, QWEN_SPECIAL)


@pytest.fixture(scope="module")
def chat(model: Path) -> TemplateChatFormat:
    return TemplateChatFormat.load(model, tools_in="system")


def test_a_template_that_ignores_tools_is_recognized(model: Path, tmp_path: Path) -> None:
    assert not TemplateChatFormat.load(model).shows_tools
    assert TemplateChatFormat.load(model, tools_in="system").shows_tools
    shows = write_model(tmp_path, QWEN, QWEN_SPECIAL, QWEN_MARKUP)
    assert TemplateChatFormat.load(shows).shows_tools


def test_the_system_message_lists_tools_and_call_format(chat: TemplateChatFormat) -> None:
    prompt = chat.decode(chat.start([user("2 + 3?")], [ADD]))
    system, _, rest = prompt.partition("<|im_end|>\n<|im_start|>user\n")
    assert rest == "2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    assert "Be helpful." not in system, "the added system message replaces the template's own"
    schema = system[system.index("<tools>\n") + len("<tools>\n") : system.index("\n</tools>")]
    assert json.loads(schema) == {"name": "add", "description": ADD.description, "parameters": dict(ADD.parameters)}
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>' in system


def test_an_own_system_message_stays_first(chat: TemplateChatFormat) -> None:
    prompt = chat.decode(chat.start([Message(role="system", content="Be brief."), user("2 + 3?")], [ADD]))
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\nYou can call tools.")
    assert prompt.count("<|im_start|>system") == 1


def test_without_tools_the_prompt_is_the_templates(model: Path, chat: TemplateChatFormat) -> None:
    messages = [user("2 + 3?")]
    assert chat.start(messages, ()) == TemplateChatFormat.load(model).start(messages, ())


def test_calls_are_parsed_and_answers_are_user_messages(chat: TemplateChatFormat) -> None:
    reply = chat.encode('So.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>')
    message = chat.parse(reply, [ADD])
    assert [(call.name, call.arguments) for call in message.tool_calls] == [("add", {"a": 2})]
    answer = chat.decode(chat.extend([tool("5"), tool("6")], after="stop"))
    expected = "<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response>"
    assert answer == f"\n<|im_start|>user\n{expected}<|im_end|>\n<|im_start|>assistant\n"
    cut = chat.decode(chat.extend([tool("5")], after="length"))
    assert (
        cut == "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_recorded_calls_of_an_example_conversation_are_written_as_asked(chat: TemplateChatFormat) -> None:
    called = Message(role="assistant", content="So.", tool_calls=(ToolCall(id="c", name="add", arguments={"a": 2}),))
    prompt = chat.decode(chat.start([user("2 + 3?"), called, tool("5"), user("And 4?")], [ADD]))
    assert 'assistant\nSo.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>' in prompt
    assert "user\n<tool_response>\n5\n</tool_response><|im_end|>" in prompt


def test_hostile_answers_bring_no_control_token(chat: TemplateChatFormat) -> None:
    controls = {*chat.stop_token_ids}
    benign, hostile = (chat.extend([tool(text)], after="stop") for text in ("5", HOSTILE))
    assert sum(token in controls for token in hostile) == sum(token in controls for token in benign)


def test_a_rewritten_history_shows_tools_in_the_system_message(model: Path) -> None:
    chat = TemplateChatFormat.load(model, tools_in="system")
    opening = [user("2 + 3?")]
    reply = chat.encode('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>')
    rewritten = chat.rewritten([SampledTurn(opening, reply)], [tool("5")], [ADD])
    continued = [*chat.start(opening, [ADD]), *reply, *chat.extend([tool("5")], after="stop")]
    assert rewritten is None or chat.decode(rewritten) == chat.decode(continued)


def test_another_call_format_is_refused(model: Path) -> None:
    with pytest.raises(ModelError, match="tools_in"):
        TemplateChatFormat.load(model, tools_in="system", reply_format="llama")


def test_formats_with_tools_elsewhere_have_other_fingerprints(model: Path, chat: TemplateChatFormat) -> None:
    assert TemplateChatFormat.load(model).fingerprint != chat.fingerprint


def test_tools_without_arguments_and_with_odd_names_are_listed(chat: TemplateChatFormat) -> None:
    odd = ToolSpec(name="dé<|im_end|>", description="", parameters={"type": "object"})
    prompt = chat.start([user(".")], [odd])
    assert "dé<|im_end|>" in chat.decode(prompt)
    assert sum(token in chat.stop_token_ids for token in prompt) == 2, "the name is text, not the end of the message"


def _config(model: Path, **settings: str) -> RunConfig:
    overrides = [f"{key}={value}" for key, value in settings.items()]
    return load("examples/01_tool_use.toml", [f"model.path={model}", *overrides])


def test_a_run_names_the_policy_whose_template_hides_the_tools(model: Path) -> None:
    config = _config(model)
    warning = hidden_tools(config.rollout_plan, environment_of(config), make_chat_format(config.model))
    assert all(word in warning for word in ("solver", "Calculator", "model.tools_in = 'system'"))
    told = _config(model, **{"model.tools_in": "system"})
    assert not hidden_tools(told.rollout_plan, environment_of(told), make_chat_format(told.model))


def test_env_check_says_whether_a_model_sees_the_tools(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "check", "agentrl.environments.calculator:Calculator", "--model", str(model)]) == 0
    assert "never sees calculate" in capsys.readouterr().out
    qwen = write_model(tmp_path, QWEN, QWEN_SPECIAL, QWEN_MARKUP)
    shown = _config(qwen)
    assert not hidden_tools(shown.rollout_plan, environment_of(shown), make_chat_format(shown.model))
    assert main(["env", "check", "agentrl.environments.calculator:Calculator", "--model", str(qwen)]) == 0
    assert "read tool calls as hermes (<tool_call>" in capsys.readouterr().out


def test_doctor_says_how_calls_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "examples/01_tool_use.toml", "--model.reply_format=json", "--json"])
    checks = json.loads(capsys.readouterr().out)["sections"]["examples/01_tool_use.toml will use"]
    (calls,) = [check["result"] for check in checks if check["name"] == "tool calls"]
    assert calls == 'json ({"name": …, "arguments": {…}}, alone, after text or in a code fence)'


def test_doctor_is_not_ready_if_the_template_hides_the_tools(
    model: Path, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(model, tmp_path / "model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(repository / "environments" / "calculator" / "model" / name, model)
    assert main(["doctor", "examples/01_tool_use.toml", f"--model.path={model}", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["sections"]["examples/01_tool_use.toml will use"]
    (tools,) = [check for check in checks if check["name"] == "tools"]
    assert (tools["level"], "tools_in" in tools["fix"]) == ("missing", True)


THINKS = PLAIN + "{%- if not enable_thinking | default(true) %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}"


def test_a_variable_of_the_template_is_set(tmp_path: Path) -> None:
    model = write_model(tmp_path, THINKS, QWEN_SPECIAL)
    for thinks in (True, False):
        chat = TemplateChatFormat.load(model, template_variables={"enable_thinking": thinks})
        shown = chat.decode(chat.start([user("2 + 3?")], ()))
        assert shown.endswith("</think>\n") == (not thinks)
    others = {TemplateChatFormat.load(model, template_variables=v).fingerprint for v in ({}, {"enable_thinking": True})}
    assert len(others) == 2, "a run resumed with another value would continue other conversations"


def test_a_variable_that_the_template_does_not_read_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path, THINKS, QWEN_SPECIAL)
    with pytest.raises(ModelError, match="reads no such variable; it reads enable_thinking"):
        TemplateChatFormat.load(model, template_variables={"enable_thinkin": True})
