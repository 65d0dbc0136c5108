import sys

from crewai import Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


clerk = Agent(role="Clerk", goal="Right sums", backstory="You add numbers.", tools=[add], llm="gpt-4o-mini")
task = Task(description="{question}", expected_output="the number", agent=clerk)
print(Crew(agents=[clerk], tasks=[task]).kickoff(inputs={"question": sys.argv[1]}))
