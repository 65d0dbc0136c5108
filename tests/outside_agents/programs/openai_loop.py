"""Adds with a tool, checks the answer as JSON, and explains it, with the OpenAI client."""

import json
import sys

from openai import OpenAI

client = OpenAI()
MODEL = "gpt-4o-mini"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two integers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]

messages = [
    {"role": "system", "content": "You are an accountant. Use the tool for every sum."},
    {"role": "user", "content": sys.argv[1]},
]
for turn in range(5):
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        tools=TOOLS,
        tool_choice="required" if turn == 0 else "auto",
        temperature=0.2,
        parallel_tool_calls=True,
    )
    message = reply.choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        content = str(arguments["a"] + arguments["b"]) if call.function.name == "add" else "no such tool"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

answer = None
messages.append({"role": "user", "content": 'Answer in JSON, as {"sum": …}.'})
for temperature in (0.0, 0.7, 1.0):
    reply = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=temperature, response_format={"type": "json_object"}, seed=1
    )
    try:
        answer = json.loads(reply.choices[0].message.content)["sum"]
        break
    except (ValueError, TypeError, KeyError):
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
        messages.append({"role": "user", "content": "That is no such JSON. Try again."})

explanation = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": f"Say in one sentence that {sys.argv[1]} has the answer {answer}."}],
    temperature=1.3,
    top_p=0.95,
    max_tokens=60,
    stream=True,
)
for chunk in explanation:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="")
print()
print(answer)
