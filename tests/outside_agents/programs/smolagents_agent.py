import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: the first
        b: the second
    """
    return a + b


agent = ToolCallingAgent(tools=[add], model=OpenAIModel("gpt-4o-mini"), max_steps=6)
print(agent.run(sys.argv[1]))
