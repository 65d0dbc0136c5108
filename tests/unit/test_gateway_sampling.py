"""What requests ask of sampling: how they are sampled, what is recorded, trained and refused."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import GrammarNotCheckedError, GrammarRefusedError
from agentrl.core.reply_formats import REPLY_FORMATS
from agentrl.core.tokens import KeptCount, TrajectoryRow
from agentrl.engines.scripted import ScriptedEngine
from agentrl.gateway.anthropic_messages import AnthropicMessagesProtocol
from agentrl.gateway.calls import ChatProtocol, RequestRefusedError, TokenLogprob, openai_logprobs
from agentrl.gateway.chat_completions import ChatCompletionsProtocol
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol
from agentrl.gateway.options import MAX_SCHEMA_CHARACTERS
from agentrl.journal.entries import BeginEntry, JournalEntry, TurnEntry, encode_body
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.external.agent import external_turns_with_context
from agentrl.testing.check import check_environment
from agentrl.testing.execution import ExecutedEpisode, execute_episode, spec_of
from tests.unit.episodes import Played, play
from tests.unit.test_gateway import CALL, TOOLS, Loop, user

if TYPE_CHECKING:
    import aiohttp

    from agentrl.core.ports import GenerateRequest

PATHS = {"chat": "/chat/completions", "responses": "/responses", "messages": "/messages"}
RESPONSES_TOOL = {"type": "function", **TOOLS[0]["function"]}
MESSAGES_TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}
PLAN = {"type": "object", "properties": {"plan": {"type": "string"}}}


class Asks(Loop):
    """Sends requests, each of a protocol and with fields, and keeps the answers."""

    sent: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    answers: ClassVar[list[tuple[int, dict[str, Any]]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for protocol, fields in self.sent:
            body: dict[str, Any] = {"model": "main", "max_tokens": 200, "messages": [user("a")], **fields}
            if protocol == "responses":
                body["input"] = body.pop("messages")
                body["max_output_tokens"] = body.pop("max_tokens")
            async with client.post(endpoint.url + PATHS[protocol], json=body) as response:
                self.answers.append((response.status, json.loads(await response.read())))


def asks(*sent: tuple[str, dict[str, Any]], **changes: Any) -> type[Asks]:
    return type("Asked", (Asks,), {"sent": list(sent), "answers": [], "__module__": __name__, **changes})


def turns(played: Played) -> list[TurnEntry]:
    return [entry for entry in played.entries if isinstance(entry, TurnEntry)]


def rows(played: Played) -> list[TrajectoryRow]:
    """Return the rows of a played episode, as training reads them."""
    begin = BeginEntry("e", "", "t", {}, 0, {"main": "policy"}, "train", "g0", 1, None)
    bodies = [begin, *turns(played)]
    entries = [JournalEntry("e0", 0, f"r#{n}", b"", encode_body(body)) for n, body in enumerate(bodies)]
    return [row for trajectory in assemble_trajectories(entries) for row in trajectory.rows]


def trained(played: Played) -> list[bool]:
    """Of each turn, whether its tokens are trained."""
    found: dict[int, bool] = {}
    for row in rows(played):
        for part in row.trainable():
            for number in np.unique(part.turn_index[part.turn_index >= 0]):
                found[int(number)] = bool(part.loss_mask[part.turn_index == number].all())
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("protocol", PATHS)
def test_a_call_is_sampled_as_it_asks_and_recorded(protocol: str) -> None:
    environment = asks((protocol, {"temperature": 0.7, "top_p": 0.9}), (protocol, {}), (protocol, {"temperature": 1.3}))
    played = play(environment, ["x", "y", "z"])
    assert [(each.temperature, each.top_p) for each in played.sampling] == [(0.7, 0.9), (1.0, 1.0), (1.3, 1.0)]
    assert [turn.temperature for turn in turns(played)] == [0.7, 1.0, 1.3]
    asked = [turn.request.asked for turn in turns(played) if turn.request]
    assert asked == [{"temperature": 0.7, "top_p": 0.9}, {}, {"temperature": 1.3}]


def test_a_limit_that_the_run_does_not_grant_is_recorded() -> None:
    played = play(asks(("chat", {"max_tokens": 900}), ("messages", {"max_tokens": 100})), ["x", "y"], max_tokens=512)
    asked = [(turn.request.asked, turn.request.max_tokens) for turn in turns(played) if turn.request]
    assert asked == [({"max_tokens": 900}, 512), ({}, 100)]


UNTRAINED = [
    ({"temperature": 0}, "greedy"),
    ({"temperature": 0.001}, "greedy"),
    ({"top_p": 0}, "greedy"),
    ({"frequency_penalty": 0.5}, "penalty"),
    ({"repetition_penalty": 1.1}, "penalty"),
    ({"top_p": 0.5}, "filter"),  # the scripted engine records no kept sets
]


@pytest.mark.parametrize(("fields", "cause"), UNTRAINED)
def test_what_cannot_be_trained_is_played_and_counted(fields: dict[str, Any], cause: str) -> None:
    played = play(asks(("chat", fields), ("chat", {"temperature": 0.5})), ["x", "y"])
    assert played.header.drop_reason is None
    assert trained(played) == [False, True]
    assert {name: value for name, value in played.metrics.items() if name.startswith("untrained/")} == {
        f"untrained/{cause}": 1.0
    }
    kept = turns(played)[0].sampled().kept
    assert kept is not None
    assert set(kept.counts.tolist()) == {KeptCount.MISSING}


def test_penalties_of_no_effect_are_trained() -> None:
    fields = {"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1, "top_k": -1, "min_p": 0}
    played = play(asks(("chat", fields)), ["x"])
    assert trained(played) == [True]
    assert not [name for name in played.metrics if name.startswith("untrained/")]


def test_a_row_has_the_temperatures_of_its_calls() -> None:
    class Chat(Loop):
        async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
            messages: list[Any] = [user("a")]
            for temperature in (0.5, 2.0):
                body = {"model": "main", "messages": messages, "temperature": temperature}
                async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    messages += [(await response.json())["choices"][0]["message"], user("b")]

    played = play(Chat, ["x", "y"])
    (row,) = rows(played)
    assert row.temperatures is not None
    assert row.temperatures[row.turn_index == 0].tolist() == [0.5, 0.5]
    assert row.temperatures[row.turn_index == 1].tolist() == [2.0, 2.0]
    assert set(row.temperatures[row.turn_index == -1].tolist()) == {1.0}


@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_a_reply_at_the_end_is_followed_by_another_turn(protocol: str) -> None:
    said = [user("a"), {"role": "assistant", "content": "x"}]
    program = asks((protocol, {}), (protocol, {"messages": said}))
    played = play(program, ["x", "y"])
    assert [status for status, _ in program.answers] == [200, 200]
    assert len(rows(played)) == 2
    assert trained(played) == [True, True]


def test_a_run_may_insist_on_its_sampling() -> None:
    environment = asks(("chat", {"temperature": 0, "top_p": 0.5, "presence_penalty": 1}))
    played = play(environment, ["x"], gateway_sampling="run")
    (sampling,) = played.sampling
    assert (sampling.temperature, sampling.top_p, sampling.is_penalized) == (1.0, 1.0, False)
    assert trained(played) == [True]
    (turn,) = turns(played)
    assert turn.request is not None
    assert (turn.request.asked, turn.request.ignored) == ({}, ("temperature", "top_p", "presence_penalty"))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.5},
        {"presence_penalty": 1},
        {"tool_choice": "required", "tools": TOOLS},
        {"response_format": {"type": "json_object"}},
    ],
)
def test_a_run_may_refuse_what_differs(fields: dict[str, Any]) -> None:
    environment = asks(
        ("chat", fields), ("chat", {"temperature": 1.0, "top_p": 1, "response_format": {"type": "text"}})
    )
    play(environment, ["x"], gateway_sampling="refuse")
    (refused, error), (answered, _) = environment.answers
    name = next(iter(fields))
    assert (refused, answered) == (400, 200)
    assert error["error"]["message"].startswith(f"{name} is ")
    assert f'`ignored_fields = ("{name}",)`' in error["error"]["message"]


def seen(played: Played, call: int = 0) -> str:
    return bytes(token for token in played.seen[call] if token < 256).decode()


FORMS: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"response_format": {"type": "json_object"}}, "Reply with a JSON object and no other text."),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PLAN}}}, '"plan"'),
    ("responses", {"text": {"format": {"type": "json_schema", "name": "p", "schema": PLAN}}}, '"plan"'),
    ("messages", {"output_config": {"format": {"type": "json_schema", "schema": PLAN}}}, '"plan"'),
    ("chat", {"tools": TOOLS, "tool_choice": "required"}, "Call a tool."),
    ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}, "Call a tool."),
    (
        "chat",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "Call the tool add.",
    ),
    (
        "responses",
        {"tools": [RESPONSES_TOOL], "tool_choice": {"type": "function", "name": "add"}},
        "Call the tool add.",
    ),
    ("messages", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "add"}}, "Call the tool add."),
]


@pytest.mark.parametrize(("protocol", "fields", "words"), FORMS)
def test_what_is_not_enforced_is_said_to_the_model_and_trained(
    protocol: str, fields: dict[str, Any], words: str
) -> None:
    environment = asks((protocol, fields))
    played = play(environment, ["x"])
    assert environment.answers[0][0] == 200
    assert words in seen(played)
    assert trained(played) == [True]


def test_a_conversation_whose_requests_ask_for_the_same_form_is_one_row() -> None:
    class Chat(Loop):
        async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
            messages: list[Any] = [user("a")]
            for _ in range(3):
                body = {"model": "main", "messages": messages, "response_format": {"type": "json_object"}}
                async with client.post(f"{endpoint.url}/chat/completions", json=body) as response:
                    messages += [(await response.json())["choices"][0]["message"], user("b")]

    played = play(Chat, ["x", "y", "z"])
    assert [turn.row for turn in turns(played)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("protocol", "tools", "choice"),
    [
        ("chat", TOOLS, "none"),
        ("responses", [RESPONSES_TOOL], "none"),
        ("messages", [MESSAGES_TOOL], {"type": "none"}),
    ],
)
def test_without_a_choice_of_tools_calls_are_text(protocol: str, tools: list[Any], choice: Any) -> None:
    environment = asks((protocol, {"tools": tools, "tool_choice": choice}), (protocol, {"tools": tools}))
    played = play(environment, [CALL, CALL])
    (_, none), (_, auto) = environment.answers
    assert "<tool_call>" in json.dumps(none)
    assert "<tool_call>" not in json.dumps(auto)
    assert played.metrics["tool/not_offered"] == 1.0


def test_logprobs_are_returned_in_the_form_of_each_protocol() -> None:
    environment = asks(
        ("chat", {"logprobs": True}),
        ("chat", {}),
        ("responses", {"include": ["message.output_text.logprobs"]}),
    )
    play(environment, ["xy", "xy", "xy"])
    (_, chat), (_, without), (_, responses) = environment.answers
    content = chat["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content[:2]] == ["x", "y"]
    assert content[0]["bytes"] == [120]
    assert openai_logprobs([TokenLogprob("\ufffd", -1.0)])[0]["bytes"] is None, "a part of a character"
    assert all(each["logprob"] <= 0 for each in content)
    assert without["choices"][0]["logprobs"] is None
    assert responses["output"][0]["content"][0]["logprobs"] == content


IGNORED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        "chat",
        {"seed": 3, "reasoning_effort": "low", "prediction": {}, "user": "u"},
        ("prediction", "reasoning_effort", "seed", "user"),
    ),
    ("chat", {"parallel_tool_calls": False, "top_logprobs": 3}, ("parallel_tool_calls", "top_logprobs")),
    ("chat", {"parallel_tool_calls": True, "store": False, "service_tier": "auto", "metadata": {}}, ()),
    ("chat", {"tools": [{"type": "function", "function": {"name": "add", "strict": True}}]}, ("tools.strict",)),
    (
        "responses",
        {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "store": False, "truncation": "disabled"},
        ("reasoning", "text.verbosity"),
    ),
    ("responses", {"truncation": "auto", "include": ["reasoning.encrypted_content"]}, ("truncation", "include")),
    ("responses", {"tools": [{**RESPONSES_TOOL, "strict": True}]}, ("tools.strict",)),
    ("messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {}}, ("thinking",)),
    ("messages", {"metadata": {"user_id": "u"}, "cache_control": {"type": "ephemeral"}}, ("cache_control", "metadata")),
    ("messages", {"tools": [{**MESSAGES_TOOL, "strict": True}]}, ("tools.strict",)),
]


@pytest.mark.parametrize(("protocol", "fields", "names"), IGNORED)
def test_fields_without_effect_are_recorded(protocol: str, fields: dict[str, Any], names: tuple[str, ...]) -> None:
    (turn,) = turns(play(asks((protocol, fields)), ["x"]))
    assert turn.request is not None
    assert turn.request.ignored == names


HONORED = {
    "chat": {
        *("messages", "model", "max_tokens", "max_completion_tokens", "stop", "n", "stream_options"),
        *("temperature", "top_p", "presence_penalty", "frequency_penalty", "logprobs"),
        *("tools", "tool_choice", "response_format"),
    },
    "responses": {
        *("input", "instructions", "model", "max_output_tokens", "stream_options"),
        *("temperature", "top_p", "include", "tools", "tool_choice", "text"),
    },
    "messages": {
        *("messages", "system", "model", "max_tokens", "stop_sequences"),
        *("temperature", "top_p", "top_k", "tools", "tool_choice", "output_config"),
    },
}
"""Parameters of the vendors' clients that other tests show to be honored."""


def vendor_parameters(protocol: str) -> set[str]:
    """Return the parameters that the installed client of the vendor documents."""
    modules = {
        "chat": ("openai.types.chat.completion_create_params", "CompletionCreateParamsBase"),
        "responses": ("openai.types.responses.response_create_params", "ResponseCreateParamsBase"),
        "messages": ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
    }
    name, base = modules[protocol]
    pytest.importorskip(name.partition(".")[0])
    headers = {"user_profile_id", "workspace_id"}
    return set(getattr(importlib.import_module(name), base).__annotations__) - headers


@pytest.mark.parametrize("protocol", PATHS)
def test_each_parameter_of_the_vendors_clients_is_honored_refused_or_listed(protocol: str, repository: Path) -> None:
    names = sorted(vendor_parameters(protocol) - HONORED[protocol])
    environment = asks(*((protocol, {name: {"x": 1}}) for name in names))
    played = play(environment, ["x"] * len(names), max_turns=len(names))
    refused = {name for name, (status, _) in zip(names, environment.answers, strict=True) if status == 400}
    listed = {name for turn in turns(played) if turn.request is not None for name in turn.request.ignored}
    assert refused | listed == set(names)
    page = (repository / "docs/reference/gateway.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


PROTOCOLS: list[ChatProtocol] = [ChatCompletionsProtocol(), OpenAIResponsesProtocol(), AnthropicMessagesProtocol()]
OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.5),
    ("temperature", "NaN"),
    ("temperature", True),
    ("temperature", 10**400),
    ("temperature", [1]),
    ("top_p", 2),
    ("top_p", -1),
    ("top_k", 0.5),
    ("top_k", -2),
]
OUT_OF_RANGE_CHAT: list[tuple[str, Any]] = [
    ("min_p", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
]


@pytest.mark.parametrize(
    ("protocol", "name", "value"),
    [
        *((protocol, name, value) for protocol in PATHS for name, value in OUT_OF_RANGE),
        *(("chat", name, value) for name, value in OUT_OF_RANGE_CHAT),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_number_out_of_range_is_refused_by_name_unless_the_class_ignores_it(
    protocol: str, name: str, value: Any
) -> None:
    environment = asks((protocol, {name: value}))
    play(environment, [])
    ((status, answer),) = environment.answers
    assert status == 400
    message = answer["error"]["message"]
    assert message.startswith(f"{name} is ")
    assert "but it must be a" in message
    assert f'`ignored_fields = ("{name}",)`' in message
    assert len(message) < 300

    played = play(asks((protocol, {name: value}), ignored_fields=(name,)), ["x"])
    (turn,) = turns(played)
    assert turn.request is not None
    assert (turn.request.asked, turn.request.ignored) == ({}, (name,))
    assert trained(played) == [True]


def test_a_run_that_insists_replaces_a_number_out_of_range() -> None:
    played = play(asks(("chat", {"temperature": 3})), ["x"], gateway_sampling="run")
    assert [sampling.temperature for sampling in played.sampling] == [1.0]


BAD: list[tuple[str, Any]] = [
    ("tool_choice", "perhaps"),
    ("tool_choice", {"type": "function", "function": {"name": "no_such"}}),
    ("tool_choice", {"type": "allowed_tools", "allowed_tools": [3]}),
    ("tool_choice", {"type": ["x"]}),
    ("tool_choice", 7),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_choice_that_does_not_exist_is_refused_by_name(protocol: ChatProtocol, name: str, value: Any) -> None:
    tools: Mapping[str, Any] = {
        "chat completions": TOOLS,
        "responses": [RESPONSES_TOOL],
        "messages": [MESSAGES_TOOL],
    }
    messages = [user("a")]
    body = {"model": "m", "messages": messages, "input": messages, "tools": tools[protocol.name], name: value}
    with pytest.raises(RequestRefusedError) as refused:
        protocol.read(body)
    assert str(refused.value).startswith(f"{name} ")
    assert len(str(refused.value)) < 300
    assert refused.value.status == 400
    assert protocol.refusal(refused.value)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", "json"),
        ("response_format", {"type": "grammar"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": []}}),
        ("response_format", {"type": "json_schema", "json_schema": 3}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"a": "x" * MAX_SCHEMA_CHARACTERS}}}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_chat_completion_with_a_bad_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        ChatCompletionsProtocol().read({"model": "m", "messages": [user("a")], name: value})
    assert str(refused.value).startswith(f"{name} ")
    assert len(str(refused.value)) < 300


def test_a_program_that_is_refused_goes_on_with_other_requests() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"a": "x" * 1_000_000}}}
    environment = asks(("chat", {"temperature": -1}), ("chat", {"response_format": schema}), ("chat", {}))
    played = play(environment, ["x"])
    assert [status for status, _ in environment.answers] == [400, 400, 200]
    assert environment.answers[0][1]["error"]["param"] == "temperature"
    assert (played.header.reward, trained(played)) == (1.0, [True])


def test_a_restarted_program_gets_recorded_replies_to_requests_that_ask_for_the_same_sampling() -> None:
    """A reply at one temperature is none to a request for another."""
    fields = ("chat", {"temperature": 0.5}), ("chat", {"temperature": 0}), ("chat", {})

    async def main() -> None:
        environment = asks(*fields)
        spec = spec_of(environment, agentrl.Task(id="t", data={}), 0, 0)
        first = await execute_episode(environment, spec, lambda *_: [120, STOP_TOKEN])
        assert isinstance(first, ExecutedEpisode)
        answers = list(external_turns_with_context(first.entries))
        for change, recalled in (({"temperature": 0.5}, 3.0), ({"temperature": 0.7}, 2.0), ({"top_k": 3}, 2.0)):
            environment.sent = [("chat", change), *fields[1:]]
            again = await execute_episode(
                environment, replace(spec, attempt=1), lambda *_: [121, STOP_TOKEN], answers=answers
            )
            assert isinstance(again, ExecutedEpisode)
            assert again.metrics["replies/recalled"] == recalled
            assert again.metrics["untrained/greedy"] == 1.0
            bodies = [body for entry in again.entries if isinstance(body := entry.decode(), TurnEntry)]
            assert [turn.temperature for turn in bodies] == [change.get("temperature", 1.0), 0.0, 1.0]

    asyncio.run(main())


def test_env_check_lists_at_once_what_requests_ask_for() -> None:
    class Several(Asks):
        sent: ClassVar = [
            ("chat", {"temperature": 0, "seed": 3, "logit_bias": {"1": 1}}),
            ("chat", {"tools": TOOLS, "tool_choice": "required", "web_search_options": {"a": 1}}),
            ("chat", {"response_format": {"type": "json_object"}, "presence_penalty": 1.0}),
            ("chat", {"top_p": 7}),
        ]

        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
            return [agentrl.Task(id=split, data={"split": split})]

    report = check_environment(Several)
    assert not report.passed
    assert "with logit_bias, web_search_options, top_p (a value out of its range) will be refused" in report.text
    assert '`ignored_fields = ("logit_bias", "web_search_options", "top_p")`' in report.text
    assert "asked for temperature 0: their tokens are played, but not trained" in report.text
    assert "asked for presence_penalty: their tokens" in report.text
    ignored = ("logit_bias", "web_search_options", "top_p")
    own = type("Own", (Several,), {"ignored_fields": ignored, "__module__": __name__})
    report = check_environment(own)
    assert report.passed
    assert "4 requests asked for temperature = 0.0 (1 time), " in report.text
    assert "Fields without effect: seed (1 time), logit_bias (1 time)" in report.text
    assert "The prompt asks for response_format and tool_choice. vLLM enforces it" in report.text
    report = check_environment(own, gateway_sampling="run")
    assert report.passed
    assert "not trained" not in report.text


def test_env_check_names_a_limit_that_the_run_does_not_grant() -> None:
    class Long(Asks):
        sent: ClassVar = [("chat", {"max_tokens": 1024}), ("chat", {"max_tokens": 64})]

        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
            return [agentrl.Task(id=split, data={"split": split})]

    assert "max_tokens" not in check_environment(Long).text, "the limit is unknown"
    assert "max_tokens" not in check_environment(Long, sampling={"max_tokens": 1024}).text
    report = check_environment(Long, sampling={"max_tokens": 64})
    assert report.passed
    assert "1 of 2 requests asked for up to 1024 tokens, and sampling.max_tokens = 64 cuts their replies" in report.text
    assert "Set sampling.max_tokens = 1024" in report.text


def test_env_check_accuses_no_request_that_changes_nothing() -> None:
    class Neutral(Asks):
        sent: ClassVar = [("chat", {"presence_penalty": 0, "frequency_penalty": 0, "logprobs": True})]

        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
            return [agentrl.Task(id=split, data={"split": split})]

    for mode in ("agent", "refuse"):
        report = check_environment(Neutral, gateway_sampling=mode)
        assert report.passed
        assert "not trained" not in report.text


TALLY = {"type": "object", "properties": {"tally": {"type": "integer"}}}
REFUSED = {"type": "object", "properties": {"refused": {"type": "string"}}}


@pytest.fixture
def enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted engine enforces grammars, all but those with a property `refused`. It fails to check one."""
    make, failures = ScriptedEngine.__init__, ["unchecked"]

    def with_grammars(engine: ScriptedEngine, script: Any, **options: Any) -> None:
        def checked(request: GenerateRequest, *more: Any) -> Any:
            if "refused" in request.sampling.grammar:
                raise GrammarRefusedError("the grammar of the reply does not compile: it is refused")
            if failures and failures[0] in request.sampling.grammar:
                failures.clear()
                raise GrammarNotCheckedError("the grammar of the reply is not checked")
            return script(request, *more)

        make(engine, checked, **options)
        engine.capabilities = replace(engine.capabilities, grammars=True)

    monkeypatch.setattr(ScriptedEngine, "__init__", with_grammars)
    monkeypatch.setattr(PlainChatFormat, "call_frame", REPLY_FORMATS["hermes"].call_frame)


def grammars(played: Played) -> list[Any]:
    return [json.loads(each.grammar)["format"] if each.grammar else None for each in played.sampling]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}


@pytest.mark.usefixtures("enforced")
def test_an_engine_gets_the_grammar_of_each_call() -> None:
    both = {"tools": TOOLS, "response_format": schema_format(TALLY)}
    played = play(
        asks(
            ("chat", {"response_format": {"type": "json_object"}}),
            ("responses", {"text": {"format": {"type": "json_schema", "name": "p", "schema": PLAN}}}),
            ("messages", {"output_config": {"format": {"type": "json_schema", "schema": PLAN}}}),
            ("chat", {"tools": TOOLS, "tool_choice": "required"}),
            ("chat", both),
            ("chat", {**both, "tool_choice": "none"}),
            ("chat", {"tools": TOOLS}),
            ("chat", {}),
        ),
        ["{}"] * 8,
    )
    first, second, third, call, either, answer, *free = grammars(played)
    assert first["json_schema"] == {"type": "object"}
    assert second["json_schema"] == third["json_schema"] == PLAN
    (tag,) = call["tags"]
    assert call["at_least_one"]
    assert tag["begin"] == '<tool_call>\n{"name": "add", "arguments": '
    assert tag["content"]["json_schema"] == TOOLS[0]["function"]["parameters"]
    assert tag["end"] == "}\n</tool_call>"
    assert either == {"type": "or", "elements": [answer, call]}
    assert answer["json_schema"] == TALLY
    assert free == [None, None]
    assert "Reply with a JSON object" in bytes(t for t in played.seen[0] if t < 256).decode(), "the model reads it, too"


@pytest.mark.usefixtures("enforced")
def test_a_schema_that_the_engine_refuses_harms_no_other_call() -> None:
    environment = asks(
        ("chat", {"response_format": schema_format(REFUSED)}), ("chat", {"response_format": schema_format(PLAN)})
    )
    played = play(environment, ["{}"])
    (status, body), (second, _) = environment.answers
    assert (status, second) == (400, 200)
    assert body["error"]["message"] == "response_format: the grammar of the reply does not compile: it is refused"
    assert body["error"]["param"] == "response_format"
    assert played.header.drop_reason is None
    assert len(turns(played)) == 1


@pytest.mark.usefixtures("enforced")
def test_an_episode_is_retried_if_its_schema_could_not_be_checked() -> None:
    """It neither ends the run nor becomes a reward."""
    schema = schema_format({"type": "object", "properties": {"unchecked": {"type": "string"}}})
    environment = asks(("chat", {"response_format": schema}))
    played = play(environment, ["{}"])
    assert [status for status, _ in environment.answers][-1] == 200
    assert (played.header.drop_reason, len(turns(played))) == (None, 1)


def test_without_an_engine_for_grammars_the_prompt_alone_asks() -> None:
    assert grammars(play(asks(("chat", {"response_format": schema_format(REFUSED)})), ["x"])) == [None]
