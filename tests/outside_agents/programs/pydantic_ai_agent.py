import sys

from pydantic_ai import Agent

agent = Agent("openai:gpt-4o-mini", system_prompt="Use the tool for every sum.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


print(agent.run_sync(sys.argv[1]).output)
