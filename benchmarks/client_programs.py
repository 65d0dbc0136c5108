"""Programs of others' client libraries, each an ordinary tool loop: `python client_programs.py CLIENT [stream]`.

Run with the Python of an environment that has the libraries (`PACKAGES`), which is not ours. A program asks model
`main` at the endpoint that the usual environment variables name, offers one tool, and prints the model's last text.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from typing import Any

PACKAGES = {
    "openai": "openai",
    "openai_responses": "openai",
    "anthropic": "anthropic",
    "litellm": "litellm",
    "langgraph": "langgraph langchain-openai",
    "langchain_anthropic": "langgraph langchain-anthropic",
    "openai_agents": "openai-agents",
    "openai_agents_chat": "openai-agents",
    "smolagents": "smolagents[openai]",
    "mini_swe_agent": "mini-swe-agent",
}
"""The packages that each needs from the index."""
QUESTION = "What is 1 + 2?"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
FUNCTION = {"name": "add", "description": "Add two integers.", "parameters": PARAMETERS}


def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def openai(stream: bool) -> str:
    from openai import OpenAI

    client, messages = OpenAI(), [{"role": "user", "content": QUESTION}]
    while True:
        asked: Any = {"model": "main", "messages": messages, "tools": [{"type": "function", "function": FUNCTION}]}
        if stream:
            with client.chat.completions.stream(**asked) as events:
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(**asked).choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            content = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def openai_responses(stream: bool) -> str:
    from openai import OpenAI

    client, items = OpenAI(), [{"role": "user", "content": QUESTION}]
    while True:
        asked: Any = {"model": "main", "input": items, "tools": [{"type": "function", **FUNCTION}], "store": False}
        if stream:
            with client.responses.stream(**asked) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**asked)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        for call in calls:
            output = str(add(**json.loads(call.arguments)))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def anthropic(stream: bool) -> str:
    from anthropic import Anthropic

    client, messages = Anthropic(), [{"role": "user", "content": QUESTION}]
    tools = [{"name": "add", "description": "Add two integers.", "input_schema": PARAMETERS}]
    counted = client.messages.count_tokens(model="main", messages=messages, tools=tools).input_tokens
    while True:
        asked: Any = {"model": "main", "messages": messages, "tools": tools, "max_tokens": 100, "system": "Be brief."}
        if stream:
            with client.messages.stream(**asked) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**asked)
        assert 0 < counted < message.usage.input_tokens + message.usage.cache_read_input_tokens
        messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in message.content if block.type == "text")
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))} for call in calls]
        messages.append({"role": "user", "content": results})


def litellm(stream: bool) -> str:
    import litellm as library

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    tools = [{"type": "function", "function": FUNCTION}]
    while True:
        asked: Any = {"model": "openai/main", "messages": messages, "tools": tools}
        if stream:
            chunks = list(library.completion(**asked, stream=True))
            reply: Any = library.stream_chunk_builder(chunks, messages=messages)
        else:
            reply = library.completion(**asked)
        message = reply.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            content = str(add(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def langgraph(stream: bool) -> str:
    from langchain_openai import ChatOpenAI

    return _graph(ChatOpenAI(model="main", streaming=stream))


def langchain_anthropic(stream: bool) -> str:
    from langchain_anthropic import ChatAnthropic

    return _graph(ChatAnthropic(model="main", streaming=stream))


def _graph(model: Any) -> str:
    from langgraph.prebuilt import create_react_agent

    state = create_react_agent(model, [add]).invoke({"messages": [("user", QUESTION)]})
    content = state["messages"][-1].content
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def openai_agents(stream: bool) -> str:
    return asyncio.run(_agents(stream, "main"))


def openai_agents_chat(stream: bool) -> str:
    from agents import set_default_openai_api

    set_default_openai_api("chat_completions")
    return asyncio.run(_agents(stream, "main"))


async def _agents(stream: bool, model: str) -> str:
    from agents import Agent, Runner, function_tool, set_tracing_disabled

    set_tracing_disabled(True)
    agent = Agent(name="adder", instructions="Be brief.", model=model, tools=[function_tool(add)])
    if not stream:
        return str((await Runner.run(agent, QUESTION)).final_output)
    running = Runner.run_streamed(agent, QUESTION)
    async for _ in running.stream_events():
        pass
    return str(running.final_output)


def smolagents(stream: bool) -> str:
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("main", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    return str(ToolCallingAgent(tools=[tool(add)], model=model, stream_outputs=stream).run(QUESTION))


def mini_swe_agent(stream: bool) -> str:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(model_name="openai/main", cost_tracking="ignore_errors")
    templates = {"system_template": "Be brief.", "instance_template": "{{task}}"}
    ended = DefaultAgent(model, LocalEnvironment(), **templates).run(QUESTION)
    return str(ended.get("submission", ended)).strip()


CLIENTS: dict[str, Callable[[bool], str]] = {
    function.__name__: function
    for function in (
        openai,
        openai_responses,
        anthropic,
        litellm,
        langgraph,
        langchain_anthropic,
        openai_agents,
        openai_agents_chat,
        smolagents,
        mini_swe_agent,
    )
}

if __name__ == "__main__":
    print("answer:", CLIENTS[sys.argv[1]]("stream" in sys.argv[2:]))
