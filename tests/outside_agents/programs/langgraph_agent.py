import sys

from langchain.agents import create_agent


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


graph = create_agent("openai:gpt-4o-mini", tools=[add], system_prompt="Use the tool for every sum.")
state = graph.invoke({"messages": [{"role": "user", "content": sys.argv[1]}]})
print(state["messages"][-1].content)
