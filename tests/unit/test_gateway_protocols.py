"""The Messages and Responses protocols: what is read of a conversation, and how a reply is written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import agentrl
from agentrl.core.records import Message, ToolCall
from agentrl.core.reply_formats import parse_hermes
from agentrl.gateway.anthropic_messages import AnthropicMessagesProtocol
from agentrl.gateway.calls import ChatProtocol, ChatReply, ChatRequest, RequestRefusedError
from agentrl.gateway.chat_completions import ChatCompletionsProtocol
from agentrl.gateway.openai_responses import OpenAIResponsesProtocol
from agentrl.journal.entries import ReplyRecord
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.external.token_tree import TokenTree
from tests.support.cpu_time import least_cpu_s
from tests.unit.episodes import Played, play
from tests.unit.test_gateway import CALL, Loop, turns

if TYPE_CHECKING:
    import aiohttp

PARAMETERS = {"type": "object", "properties": {"a": {}, "b": {}}}


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with client.post(url, json=body) as response:
        text = (await response.read()).decode()
    if not body.get("stream"):
        return response.status, json.loads(text)
    return response.status, [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]


class MessagesLoop(Loop):
    """A tool loop over Messages."""

    stream = False
    seen: ClassVar[list[Any]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        tools = [{"name": "add", "description": "", "input_schema": PARAMETERS}]
        messages: list[Any] = [{"role": "user", "content": "1 + 2?"}]
        while True:
            asked = {"model": "main", "max_tokens": 99, "system": "brief", "messages": messages, "tools": tools}
            _, counted = await post(client, f"{endpoint.url}/messages/count_tokens", asked)
            _, reply = await post(client, f"{endpoint.url}/messages", {**asked, "stream": self.stream})
            self.seen.append((counted["input_tokens"], reply))
            content = _content(reply) if self.stream else reply["content"]
            messages.append({"role": "assistant", "content": content})
            calls = [block for block in content if block["type"] == "tool_use"]
            if not calls:
                return content[-1]["text"]
            messages.append(
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "3"}]}
                        for call in calls
                    ],
                }
            )


def _content(events: list[Any]) -> list[Any]:
    """The blocks of a stream."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                blocks[-1]["input"] = json.loads(delta["partial_json"])
            else:
                blocks[-1]["text"] += delta["text"]
    return blocks


class MessagesStream(MessagesLoop):
    """The same, streamed."""

    stream = True


class ResponsesLoop(Loop):
    """A tool loop over Responses."""

    stream = False

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2?"}]}]
        tools = [{"type": "function", "name": "add", "parameters": PARAMETERS}]
        while True:
            body = {"model": "main", "input": items, "tools": tools, "instructions": "brief", "stream": self.stream}
            _, reply = await post(client, f"{endpoint.url}/responses", body)
            output = reply[-1]["response"]["output"] if self.stream else reply["output"]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls:
                return output[-1]["content"][0]["text"]
            items += [{"type": "function_call_output", "call_id": call["call_id"], "output": "3"} for call in calls]


class ResponsesStream(ResponsesLoop):
    """The same, streamed."""

    stream = True


def one_row(played: Played) -> None:
    assert (played.header.drop_reason, played.header.reward) == (None, 1.0)
    first, second = turns(played)
    assert (first.row, second.row) == (0, 0)
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert [message["role"] for message in second.messages] == ["tool"]
    assert played.seen[1][: len(played.seen[0])] == played.seen[0]


@pytest.mark.parametrize("environment", [MessagesLoop, MessagesStream, ResponsesLoop, ResponsesStream])
def test_a_tool_loop_is_one_row_in_every_protocol(environment: type[agentrl.Environment]) -> None:
    one_row(play(environment, [CALL, "3"]))


def test_tokens_are_counted_as_they_are_then_sampled_from() -> None:
    MessagesLoop.seen.clear()
    play(MessagesLoop, [CALL, "3"])
    for counted, reply in MessagesLoop.seen:
        usage = reply["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


MALFORMED = ToolCall(id="abc", name="add", arguments='{"name": "add", "arguments": [1')
SAID = Message(
    role="assistant", content="so", tool_calls=(ToolCall(id="x1", name="add", arguments={"a": 1}), MALFORMED)
)
REPLY = ChatReply(
    reply_id="r",
    created=1,
    message=SAID,
    thinking="hm",
    finish_reason="tool_calls",
    stop_text=None,
    prompt_tokens=5,
    completion_tokens=7,
    cached_tokens=2,
)


def echoed(protocol: ChatProtocol, message: Message = SAID) -> tuple[Any, Message]:
    """What a client gets of the model's message, and the message as it sends it back."""
    request = ChatRequest(
        model="m",
        messages=[],
        options={"include_usage": False, "tools": [], "instructions": None, "compacts": False, "offered": {}},
    )
    whole = protocol.whole(request, [replace(REPLY, message=message)])
    results = [(call.id, "3") for call in message.tool_calls]
    if isinstance(protocol, ChatCompletionsProtocol):
        tools = [{"role": "tool", "tool_call_id": call, "content": said} for call, said in results]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}, whole["choices"][0]["message"], *tools]}
    elif isinstance(protocol, AnthropicMessagesProtocol):
        blocks = [{"type": "tool_result", "tool_use_id": call, "content": said} for call, said in results]
        said = {"role": "assistant", "content": whole["content"]}
        body = {"messages": [{"role": "user", "content": "?"}, said, {"role": "user", "content": blocks}]}
    else:
        outputs = [{"type": "function_call_output", "call_id": call, "output": said} for call, said in results]
        body = {"input": [{"role": "user", "content": "?"}, *whole["output"], *outputs]}
    read = protocol.read({"model": "m", **json.loads(json.dumps(body))}).messages
    assert [message.role for message in read] == ["user", "assistant", *["tool"] * len(results)]
    assert all(message.name == "add" for message in read[2:])
    return whole, read[1]


@pytest.mark.parametrize(
    "protocol",
    [ChatCompletionsProtocol(), AnthropicMessagesProtocol(), OpenAIResponsesProtocol()],
    ids=lambda protocol: protocol.name,
)
def test_a_reply_that_a_client_sends_back_is_known(protocol: ChatProtocol) -> None:
    """Also one whose arguments are no JSON."""
    tree = TokenTree(PlainChatFormat())
    assert tree.identity([echoed(protocol)[1]], ()) == tree.identity([SAID], ())


@pytest.mark.parametrize(
    "protocol",
    [ChatCompletionsProtocol(), AnthropicMessagesProtocol(), OpenAIResponsesProtocol()],
    ids=lambda protocol: protocol.name,
)
@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"a": 1}', {"a": 1}),
        (json.dumps('{"a": 1}'), {"a": 1}),
        ("null", {}),
        ('""', {}),
        ("[1, 2]", "[1, 2]"),
        ('"two"', '"two"'),
        ('{"a": NaN}', '{"a": NaN}'),
    ],
)
def test_a_client_gets_the_arguments_alone_and_its_answer_is_known(
    protocol: ChatProtocol, written: str, arguments: Any
) -> None:
    calls = parse_hermes(f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>')[1]
    said = replace(SAID, tool_calls=calls)
    whole, sent_back = echoed(protocol, said)
    if isinstance(protocol, ChatCompletionsProtocol):
        received = whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    elif isinstance(protocol, AnthropicMessagesProtocol):
        (tool_input,) = [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
        received = tool_input.get("malformed_arguments", json.dumps(tool_input))
    else:
        (received,) = [item["arguments"] for item in whole["output"] if item["type"] == "function_call"]
    assert (received if isinstance(arguments, str) else json.loads(received)) == arguments
    tree = TokenTree(PlainChatFormat())
    assert tree.identity([sent_back], ()) == tree.identity([said], ())


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        (AnthropicMessagesProtocol(), {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}),
        (
            AnthropicMessagesProtocol(),
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "bash_20250124"}]},
        ),
        (
            AnthropicMessagesProtocol(),
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}]},
        ),
        (AnthropicMessagesProtocol(), {"messages": [{"role": "user", "content": "a"}], "max_tokens": "many"}),
        (AnthropicMessagesProtocol(), {"messages": [7]}),
        (
            AnthropicMessagesProtocol(),
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {"malformed_arguments": 7}}],
                    },
                    {"role": "user", "content": "a"},
                ]
            },
        ),
        (OpenAIResponsesProtocol(), {"input": "a", "previous_response_id": "resp_1"}),
        (OpenAIResponsesProtocol(), {"input": "a", "background": True}),
        (OpenAIResponsesProtocol(), {"input": "a", "tools": [{"type": "web_search"}]}),
        (OpenAIResponsesProtocol(), {"input": [{"type": "item_reference", "id": "x"}]}),
        (OpenAIResponsesProtocol(), {"input": []}),
        (OpenAIResponsesProtocol(), {"input": [7]}),
        (OpenAIResponsesProtocol(), {"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "a"}]}),
        (OpenAIResponsesProtocol(), {"input": [{"type": "compaction"}]}),
        (OpenAIResponsesProtocol(), {}),
        (ChatCompletionsProtocol(), {"messages": [{"role": "user", "content": {"text": "a"}}]}),
        (ChatCompletionsProtocol(), {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "retrieval"}]}),
        (ChatCompletionsProtocol(), {"messages": [{"role": "user", "content": "a"}], "stop": [1]}),
        (ChatCompletionsProtocol(), {"messages": [{"role": "user", "content": "a"}], "stop": ["a"] * 65}),
    ],
)
def test_what_cannot_be_read_is_refused_in_the_form_of_its_protocol(protocol: ChatProtocol, body: Any) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        protocol.read({"model": "m", **body})
    assert refused.value.status == 400
    assert str(refused.value) in json.dumps(protocol.refusal(refused.value), ensure_ascii=False)


def test_a_held_conversation_is_refused_so_that_its_client_sends_whole_ones() -> None:
    """The error code is the one on which the tool runner of the anthropic package stops using `thread`."""
    protocol = AnthropicMessagesProtocol()
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        with pytest.raises(RequestRefusedError, match="thread is not supported") as refused:
            protocol.read({"model": "m", "messages": [{"role": "user", "content": "a"}], "thread": thread})
        assert refused.value.status == 400
        details = protocol.refusal(refused.value)["error"]["details"]
        assert details == {"error_code": "thread_unsupported_request"}
    with pytest.raises(RequestRefusedError) as other:
        protocol.read({"model": "m", "messages": []})
    assert "details" not in protocol.refusal(other.value)["error"]


@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        (ChatCompletionsProtocol(), {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}}),
        (OpenAIResponsesProtocol(), {"text": {"format": {"type": "json_schema", "schema": {"a": 1}}}}),
        (AnthropicMessagesProtocol(), {"output_config": {"format": {"type": "json_schema", "schema": {"a": 1}}}}),
        (AnthropicMessagesProtocol(), {"output_format": {"type": "json_schema", "schema": {"a": 1}}}),
    ],
)
def test_a_reply_form_is_the_same_in_every_protocol(protocol: ChatProtocol, body: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}]
    request = protocol.read({"model": "m", "messages": messages, "input": messages, **body})
    assert (request.reply_form, request.demands) == (("json_schema", '{"a": 1}'), {})


@pytest.mark.parametrize("has_calls", [True, False])
def test_items_of_one_message_are_read_in_linear_time(has_calls: bool) -> None:
    """Reading blocks all episodes of a worker; a body may hold thousands of items."""

    def read(count: int) -> None:
        if has_calls:
            ids = list(map(str, range(count // 2)))
            items: list[Any] = [{"type": "function_call", "call_id": call_id, "name": "f"} for call_id in ids]
            items += [{"type": "function_call_output", "call_id": call_id, "output": ""} for call_id in reversed(ids)]
        else:
            items = [{"role": "assistant", "content": "abcdefgh"}] * count
        body = {"model": "m", "input": [*items, {"role": "user", "content": "a"}]}
        said, *_ = OpenAIResponsesProtocol().read(body).messages
        assert (2 * len(said.tool_calls) or said.content.count("abcdefgh")) == count

    few = least_cpu_s(lambda: read(250))
    assert least_cpu_s(lambda: read(8_000), enough=100 * few) < 200 * few  # linear, it is 32, quadratic, 1,024


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    protocol = OpenAIResponsesProtocol()
    body = {"model": "m", "input": "a", "tools": [{"type": "custom", "name": "apply", "description": "patch"}]}
    request = protocol.read(body)
    assert list(request.tools[0].parameters["properties"]) == ["input"]
    call = ToolCall(id="c", name="apply", arguments={"input": "*** begin"})
    said = Message(role="assistant", content="", tool_calls=(call,))
    (item,) = protocol.whole(request, [replace(REPLY, message=said, thinking="")])["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", "*** begin")
    for written, text in (('{"name": "apply", "arguments": "ls -l"}', "ls -l"), ('{"name": "apply", "arg', None)):
        malformed = replace(said, tool_calls=(replace(call, arguments=written),))
        (broken,) = protocol.whole(request, [replace(REPLY, message=malformed, thinking="")])["output"]
        assert broken["input"] == (written if text is None else text), "never the wrapper of a whole call"
    output = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    again = protocol.read({**body, "input": [{"role": "user", "content": "a"}, item, output]})
    assert again.messages[1].tool_calls == (call,)


def test_a_tool_of_a_namespace_is_called_by_both_names() -> None:
    protocol = OpenAIResponsesProtocol()
    tool = {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {"at": {}}}}
    body = {
        "model": "m",
        "input": "a",
        "tools": [tool, {"type": "namespace", "name": "agents", "tools": [tool, {"type": "custom", "name": "say"}]}],
    }
    request = protocol.read(body)
    assert [offered.name for offered in request.tools] == ["close", "agents.close", "agents.say"]
    calls = (
        ToolCall(id="c", name="agents.close", arguments={"at": 1}),
        ToolCall(id="d", name="agents.say", arguments={"input": "x"}),
        ToolCall(id="e", name="close", arguments={"at": 2}),
    )
    said = Message(role="assistant", content="", tool_calls=calls)
    items = protocol.whole(request, [replace(REPLY, message=said, thinking="")])["output"]
    assert [(item["type"], item.get("namespace"), item["name"]) for item in items] == [
        ("function_call", "agents", "close"),
        ("custom_tool_call", "agents", "say"),
        ("function_call", None, "close"),
    ]
    outputs = [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in "cde"]
    again = protocol.read({**body, "input": [{"role": "user", "content": "a"}, *items, *outputs]})
    assert again.messages[1].tool_calls == calls


@pytest.mark.parametrize("tools", [7, [7], None])
def test_a_namespace_without_tools_is_refused(tools: Any) -> None:
    with pytest.raises(RequestRefusedError, match=r"tools\.agents\.tools"):
        OpenAIResponsesProtocol().read(
            {"model": "m", "input": "a", "tools": [{"type": "namespace", "name": "agents", "tools": tools}]}
        )


def test_a_compaction_is_a_summary_that_the_client_sends_back() -> None:
    protocol = OpenAIResponsesProtocol()
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    request = protocol.read({"model": "m", "input": [*asked, {"type": "compaction_trigger"}]})
    assert [message.role for message in request.messages] == ["user", "assistant", "user"]
    said = Message(role="assistant", content="so far: b")
    (item,) = protocol.whole(request, [replace(REPLY, message=said)])["output"]
    assert item["type"] == "compaction"
    done = [
        event for name, event in protocol.events(request, [replace(REPLY, message=said)]) if name and "done" in name
    ]
    assert [event["item"] for event in done] == [item]
    again = protocol.read({"model": "m", "input": [item, {"role": "user", "content": "c"}]})
    assert [message.content for message in again.messages] == ["so far: b", "c"]


# --- messages of group chats, and calls in the form before tools ------------------------------------------------------


def read_chat(*messages: dict[str, Any], **body: Any) -> ChatRequest:
    return ChatCompletionsProtocol().read({"model": "m", "messages": list(messages), **body})


def test_the_model_reads_who_speaks() -> None:
    request = read_chat(
        {"role": "system", "name": "moderator", "content": "Be brief."},
        {"role": "user", "name": "user", "content": "Begin."},
        {"role": "assistant", "name": "coder", "content": "I write code."},
        {"role": "user", "name": "critic", "content": "Too long."},
    )
    texts = [message.content for message in request.messages]
    assert texts == ["moderator: Be brief.", "Begin.", "I write code.", "critic: Too long."]
    assert "name" not in request.demands


def test_two_speakers_in_the_role_of_the_model_are_a_demand() -> None:
    one, other = ({"role": "assistant", "name": name, "content": "a"} for name in ("coder", "critic"))
    assert read_chat(one, user_message(), other, user_message()).demands["name"] == ["coder", "critic"]
    assert "name" not in read_chat(one, user_message(), one, user_message()).demands


def user_message() -> dict[str, Any]:
    return {"role": "user", "content": "a"}


def test_a_call_of_a_function_is_a_call_of_a_tool() -> None:
    request = read_chat(
        user_message(),
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "look", "content": "one"},
        {"role": "assistant", "content": None, "function_call": {"name": "look", "arguments": ""}},
        {"role": "function", "name": "look", "content": "two"},
    )
    _, first, one, second, two = request.messages
    assert [(call.name, call.arguments) for call in (*first.tool_calls, *second.tool_calls)] == [
        ("look", {"a": 1}),
        ("look", {}),
    ]
    assert (one.role, one.name, one.content, one.tool_call_id) == ("tool", "look", "one", first.tool_calls[0].id)
    assert two.tool_call_id == second.tool_calls[0].id != one.tool_call_id


def test_answers_to_calls_without_ids_keep_their_names() -> None:
    calls = [{"id": None, "function": {"name": name, "arguments": "{}"}} for name in ("search", "add")]
    answers = [{"role": "tool", "tool_call_id": None, "name": name, "content": "1"} for name in ("search", "add")]
    request = read_chat(user_message(), {"role": "assistant", "content": None, "tool_calls": calls}, *answers)
    assert [call.id for call in request.messages[1].tool_calls] == ["", ""]
    assert [message.name for message in request.messages[2:]] == ["search", "add"]
    request = read_chat(user_message(), {"role": "assistant", "content": None, "tool_calls": calls}, *answers[::-1])
    assert [message.name for message in request.messages[2:]] == ["search", "add"]


@pytest.mark.parametrize("arguments", ["", "  ", None, "{}", {}])
def test_a_call_without_arguments_has_none_however_a_client_writes_it(arguments: Any) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    assistant = {"role": "assistant", "content": None, "tool_calls": [call]}
    request = read_chat(user_message(), assistant, {"role": "tool", "tool_call_id": "a", "content": "9"})
    assert request.messages[1].tool_calls[0].arguments == {}


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "a", "tool_calls": [{"id": "a", "function": {"name": "b"}}]}, "its role is user"),
        ({"role": "assistant", "content": None, "audio": {"id": "a"}}, "has audio"),
        ({"role": "assistant", "content": None, "function_call": "look"}, "has a call without a function"),
        ({"role": "user", "content": "a", "name": 7}, "name is 7"),
    ],
)
def test_parts_of_a_message_are_refused_rather_than_dropped(message: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestRefusedError, match=words):
        read_chat(message, user_message())


def test_a_refusal_and_a_failed_tool_are_read() -> None:
    request = read_chat({"role": "assistant", "content": None, "refusal": "I will not."}, user_message())
    assert request.messages[0].content == "I will not."
    use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "no such file"}
    for is_error, text in ((True, "error: no such file"), (False, "no such file")):
        messages = [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [{**result, "is_error": is_error}]},
        ]
        assert AnthropicMessagesProtocol().read({"model": "m", "messages": messages}).messages[1].content == text


class Headers(Loop):
    """Sends headers of several lengths."""

    answers: ClassVar[list[tuple[int, Any]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for size in (8000, 9000):
            headers = {"baggage": "a" * size}
            body = {"model": "main", "messages": [user_message()]}
            async with client.post(f"{endpoint.url}/chat/completions", json=body, headers=headers) as response:
                self.answers.append((response.status, json.loads(await response.read())))


def test_long_headers_are_read_or_refused_in_the_form_of_the_protocols() -> None:
    Headers.answers.clear()
    play(Headers, ["yes"])
    (read, _), (refused, body) = Headers.answers
    assert (read, refused) == (200, 400)
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert "8192 bytes" in body["error"]["message"]


# --- replies to requests that offer no tools --------------------------------------------------------------------------


class NoTools(Loop):
    """Asks in each protocol, streamed and not, without and with a tool."""

    answers: ClassVar[list[Any]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        messages = [user_message()]
        function = {"name": "add", "parameters": PARAMETERS}
        for path, body, tool in (
            ("chat/completions", {"messages": messages}, {"type": "function", "function": function}),
            ("responses", {"input": messages}, {"type": "function", **function}),
            ("messages", {"messages": messages, "max_tokens": 99}, {"name": "add", "input_schema": PARAMETERS}),
        ):
            for more in ({}, {"stream": True}, {"tools": []}, {"tools": [tool]}):
                _, answer = await post(client, f"{endpoint.url}/{path}", {"model": "main", **body, **more})
                self.answers.append(answer)


def test_a_call_that_no_tool_was_offered_for_is_text_in_every_protocol() -> None:
    NoTools.answers.clear()
    played = play(NoTools, [f"so {CALL}"] * 12, max_turns=12)
    assert played.header.drop_reason is None
    text = f"so {CALL}"
    for first in (0, 2):
        chat, responses, messages = NoTools.answers[first::4]
        choice = chat["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]
        (item,) = responses["output"]
        assert item["content"][0]["text"] == text
        assert (messages["content"], messages["stop_reason"]) == ([{"type": "text", "text": text}], "end_turn")
    chat, responses, messages = NoTools.answers[1::4]
    deltas = [choice["delta"] for event in chat for choice in event["choices"]]
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert responses[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert _content(messages) == [{"type": "text", "text": text}]
    chat, responses, messages = NoTools.answers[3::4]
    assert chat["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert [item["type"] for item in responses["output"]] == ["message", "function_call"]
    assert [block["type"] for block in messages["content"]] == ["text", "tool_use"]
    replies = [turn.reply for turn in turns(played)]
    offered = ReplyRecord(content="so", calls=({"name": "add", "arguments": {"a": 1, "b": 2}},))
    assert replies == [ReplyRecord(), ReplyRecord(), ReplyRecord(), offered] * 3
    assert played.metrics["tool/not_offered"] == 9


class Continuing(Loop):
    """Sends back a reply that looks like a call."""

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        messages = [user_message()]
        _, reply = await post(client, f"{endpoint.url}/chat/completions", {"model": "main", "messages": messages})
        messages += [reply["choices"][0]["message"], user_message()]
        await post(client, f"{endpoint.url}/chat/completions", {"model": "main", "messages": messages})


def test_a_call_returned_as_text_continues_its_row_and_replays() -> None:
    played = play(Continuing, [CALL, "done"])
    assert [turn.row for turn in turns(played)] == [0, 0]
    one_row_tokens = played.seen[1][: len(played.seen[0])]
    assert one_row_tokens == played.seen[0]
