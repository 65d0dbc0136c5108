"""Adds by writing Python that calls a tool."""

import sys

from smolagents import CodeAgent, OpenAIModel, tool


@tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: the first
        b: the second
    """
    return a + b


model = OpenAIModel("gpt-4o-mini", temperature=0.6, top_p=0.9)
agent = CodeAgent(tools=[add], model=model, max_steps=5, additional_authorized_imports=["math"])
print(agent.run(sys.argv[1]))
