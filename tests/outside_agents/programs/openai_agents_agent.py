import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


agent = Agent(name="Clerk", instructions="Use the tool for every sum.", model="gpt-4o-mini", tools=[add])
print(Runner.run_sync(agent, sys.argv[1]).final_output)
