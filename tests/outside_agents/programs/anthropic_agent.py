import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def add(a: int, b: int) -> str:
    """Add two integers."""
    return str(a + b)


runner = Anthropic().beta.messages.tool_runner(
    model="claude-sonnet-4-5",
    max_tokens=1024,
    tools=[add],
    messages=[{"role": "user", "content": sys.argv[1]}],
)
print(runner.until_done().content[-1].text)
