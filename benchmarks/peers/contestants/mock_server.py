"""A chat server that answers at once: three tool calls, then a number; prints its port."""

import json

from aiohttp import web

CALL = {"name": "calculate", "arguments": json.dumps({"a": 12, "op": "+", "b": 7})}


async def answer(request):
    messages = (await request.json())["messages"]
    turn = sum(message["role"] == "tool" for message in messages)
    message = {"role": "assistant", "content": "19"}
    if turn < 3:
        call = {"id": f"call-{turn}", "type": "function", "function": CALL}
        message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if turn < 3 else "stop"}
    usage = {"prompt_tokens": 60, "completion_tokens": 16, "total_tokens": 76}
    body = {"id": "mock", "object": "chat.completion", "created": 0, "model": "mock"}
    return web.json_response({**body, "choices": [choice], "usage": usage})


async def announce(app):
    print(app["socket"].getsockname()[1], flush=True)


if __name__ == "__main__":
    import socket

    listening = socket.create_server(("127.0.0.1", 0))
    app = web.Application()
    app["socket"] = listening
    app.router.add_post("/v1/chat/completions", answer)
    app.on_startup.append(announce)
    web.run_app(app, sock=listening, print=None)
