"""Adds with a tool, and returns an object that a validator checks."""

import sys

from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry


class Sum(BaseModel):
    total: int
    explanation: str


agent = Agent(
    "openai:gpt-4o-mini",
    output_type=Sum,
    system_prompt="You are an accountant. Use the tool for every sum.",
    model_settings={"temperature": 0.3},
    retries=3,
)


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@agent.output_validator
def check(output: Sum) -> Sum:
    if str(output.total) not in output.explanation:
        raise ModelRetry("The explanation must contain the total.")
    return output


print(agent.run_sync(sys.argv[1]).output.total)
