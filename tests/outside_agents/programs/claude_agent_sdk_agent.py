import asyncio
import sys

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, create_sdk_mcp_server, query, tool


@tool("add", "Add two integers.", {"a": int, "b": int})
async def add(args):
    return {"content": [{"type": "text", "text": str(args["a"] + args["b"])}]}


OPTIONS = ClaudeAgentOptions(
    model="claude-sonnet-4-5",
    mcp_servers={"sums": create_sdk_mcp_server("sums", tools=[add])},
    allowed_tools=["mcp__sums__add"],
)


async def main() -> None:
    async for message in query(prompt=sys.argv[1], options=OPTIONS):
        if isinstance(message, ResultMessage):
            print(message.result)


asyncio.run(main())
