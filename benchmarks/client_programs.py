"""Programs of others' client libraries, each an ordinary tool loop: `python client_programs.py CLIENT MODE [TIMES]`.

Run with the Python of an environment that has the libraries (`PACKAGES`), which is not ours. A program asks model
`main` at the endpoint that the usual environment variables name, offers one tool, and prints how often the
model's last text was right. `MODE` is `whole` or `stream`, `TIMES` how often it does so. If `KILL_ONCE` names a file
that does not exist, it makes it and kills itself at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
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
    "inspect_ai": "inspect-ai anthropic",
}
"""The packages that each needs from the index."""
HEAVY_PACKAGES = {"codex": "openai-codex-cli-bin", "claude_code": "claude-agent-sdk"}
"""The same for programs of some hundred megabytes."""
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


def inspect_ai(stream: bool) -> str:
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.tool import tool

    @tool(name="add")
    def offered() -> Any:
        async def execute(a: int, b: int) -> int:
            """Add two integers.

            Args:
                a: the first.
                b: the second.
            """
            return a + b

        return execute

    model = get_model("anthropic/main", config=GenerateConfig(max_tokens=100), streaming=stream)
    _, output = asyncio.run(model.generate_loop(QUESTION, tools=[offered()]))
    return str(output.completion)


def codex(stream: bool) -> str:
    provider = (
        f'{{name="agentrl",base_url="{os.environ["OPENAI_BASE_URL"]}",env_key="OPENAI_API_KEY",wire_api="responses"}}'
    )
    settings = ['web_search="disabled"', 'model_provider="agentrl"', f"model_providers.agentrl={provider}"]
    settings.append("model_context_window=4000000")
    options = [part for setting in settings for part in ("-c", setting)]
    command = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "main", *options]
    return _run_beside("codex_cli_bin", "bin/codex", command, "CODEX_HOME")


def claude_code(stream: bool) -> str:
    command = ["--model", "main", "--allowedTools", "Bash", "-p"]
    return _run_beside("claude_agent_sdk", "_bundled/claude", command, "CLAUDE_CONFIG_DIR")


def _run_beside(package: str, program: str, command: list[str], home: str) -> str:
    """The last line that a program says which a package contains."""
    path = Path(str(import_module(package).__file__)).parent / program
    with tempfile.TemporaryDirectory() as directory:
        more = {home: directory, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        ran = subprocess.run(
            [path, *command, QUESTION],
            env={**os.environ, **more},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
    if ran.returncode:
        raise SystemExit(ran.stdout[-1000:] + ran.stderr[-1000:])
    return ran.stdout.strip().splitlines()[-1]


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
        inspect_ai,
    )
}
HEAVY_CLIENTS: dict[str, Callable[[bool], str]] = {"codex": codex, "claude_code": claude_code}


def main() -> None:
    client, mode, *times = sys.argv[1:]
    answers = [{**CLIENTS, **HEAVY_CLIENTS}[client](mode == "stream") for _ in range(int(*times or ("1",)))]
    print("right answers:", answers.count("3"), flush=True)
    killed = os.environ.get("KILL_ONCE")
    if killed and not os.path.exists(killed):
        Path(killed).touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
