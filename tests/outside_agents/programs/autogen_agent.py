import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


async def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


async def main() -> None:
    client = OpenAIChatCompletionClient(model="gpt-4o-mini")
    agent = AssistantAgent("clerk", client, tools=[add], reflect_on_tool_use=True)
    result = await agent.run(task=sys.argv[1])
    print(result.messages[-1].content)


asyncio.run(main())
