"""Episodes of OpenEnv (openenv-core 0.3): what its server sends reaches the policy, and actions reach the server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import ClientSession, web

from agentrl_formats import servers
from agentrl_formats.servers import OpenEnv
from tests.support.served import served
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

PYTHON = "openenv/bin/python"
GUESS = Path(__file__).parents[2] / "benchmarks" / "format_references" / "openenv_guess.py"


def application(results: list[Any], reset: Any, posted: list[Any], full: int) -> web.Application:
    """A server with recorded results, which refuses its first `full` connections."""
    refusals = [full]

    async def session(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse()
        await connection.prepare(request)
        if refusals[0]:
            refusals[0] -= 1
            data = {
                "message": "Server at capacity: 1/1",
                "code": "CAPACITY_REACHED",
                "active_sessions": 1,
                "max_sessions": 1,
            }
            await connection.send_json({"type": "error", "data": data})
            await connection.close()
            return connection
        steps = iter(results)
        async for message in connection:
            asked = message.json()
            posted.append(asked)
            answer = reset if asked["type"] == "reset" else next(steps)
            kind = "error" if "code" in answer else "observation"
            await connection.send_json({"type": kind, "data": answer})
        return connection

    made = web.Application()
    made.router.add_get("/ws", session)
    return made


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    """Play an episode; the grader's part is the messages that reach the server, and the reward."""
    if "places" in input:
        return real(input)
    posted: list[Any] = []
    reset = {"observation": {"board": "start"}, "reward": None, "done": False, **input.get("reset", {})}
    with (
        served(lambda: application(input["steps"], reset, posted, input.get("full", 0))) as url,
        mock.patch.object(servers, "POLL_S", 0.01),
        warnings.catch_warnings(record=True) as told,
    ):
        warnings.simplefilter("always")
        played = play(OpenEnv, input["replies"], data={"url": url, "seed": 7})
    sees = seen(played)
    places = [str(warning.message).partition(" ")[2].partition(",")[0] for warning in told]
    return [*sees, *places], [*posted, played.header.reward]


def real(input: dict[str, Any]) -> tuple[Any, Any]:
    """Play against the package's own server while its only place is taken."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    python = Path(os.environ["AGENTRL_FORMATS"]) / PYTHON
    server = subprocess.Popen([str(python), str(GUESS), "serve", str(port), str(input["places"])])
    try:
        until(port)
        taken = threading.Event()
        holder = threading.Thread(target=hold, args=(port, taken))
        holder.start()
        taken.wait()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            OpenEnv.tasks("train", url=f"http://127.0.0.1:{port}")
            played = play(OpenEnv, input["replies"], data={"url": f"http://127.0.0.1:{port}", "seed": 1})
        holder.join()
        told_at_start = str(told[0].message).partition(" ")[2].partition(",")[0]
        return [*seen(played), told_at_start], played.header.reward
    finally:
        server.kill()
        server.wait()


def until(port: int) -> None:
    """Wait until the server listens."""
    for _ in range(600):
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return
        time.sleep(0.1)
    raise TimeoutError


def hold(port: int, taken: threading.Event) -> None:
    """Take the server's place for two seconds."""
    import asyncio

    async def connected() -> None:
        async with ClientSession() as client, client.ws_connect(f"ws://127.0.0.1:{port}/ws") as connection:
            await connection.send_json({"type": "reset", "data": {"seed": 1}})
            await connection.receive_json()
            taken.set()
            await asyncio.sleep(2.0)

    asyncio.run(connected())


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the seed."""
    ask = servers._OpenEnvSession._ask

    def without(self: Any, kind: str, data: Any) -> Any:
        return ask(self, kind, {name: value for name, value in data.items() if name != "seed"})

    with mock.patch.object(servers._OpenEnvSession, "_ask", without):
        yield


RESET = {"type": "reset", "data": {"seed": 7}}
START = ["user", '{"board": "start"}']
LAST = {"observation": {"board": "end"}, "reward": 1.0, "done": True}
NEXT = {"observation": {"board": "next", "moves": [1, None, 2.5, {"a": True}]}, "reward": 0.5, "done": False}
MORE = ["user", json.dumps(NEXT["observation"])]
ERRORS = [{"type": "missing", "loc": ["column"], "msg": "Field required", "input": {}}]
MOVE = {"column": 3, "note": "ü", "path": [1, {"deep": None}]}


def row(name: str, steps: list[Any], replies: list[str], sees: Any, grader: Any, **input: Any) -> Row:
    return Row(name=name, input={"steps": steps, "replies": replies, **input}, sees=sees, grader=[RESET, *grader])


def step(action: Any) -> dict[str, Any]:
    return {"type": "step", "data": action}


ROWS = [
    row("an action", [LAST], [json.dumps(MOVE)], [START], [step(MOVE), 1.0]),
    row("two turns", [NEXT, LAST], ['{"a": 1}', '{"a": 2}'], [START, MORE], [step({"a": 1}), step({"a": 2}), 1.5]),
    row("a null reward", [{**NEXT, "reward": None}, LAST], ["{}", "{}"], [START, MORE], [step({}), step({}), 1.0]),
    row("a whole number", [{**LAST, "reward": 2}], ["{}"], [START], [step({}), 2.0]),
    *(
        row(
            f"no action, {name}",
            [LAST],
            [text, "{}"],
            [START, ["user", f"error: the action is {problem}; write one JSON object and nothing else"]],
            [step({}), 1.0],
        )
        for name, text, problem in (
            ("text", "left", "not JSON: Expecting value: line 1 column 1 (char 0)"),
            ("nothing", "", "not JSON: Expecting value: line 1 column 1 (char 0)"),
            ("a list", "[1]", "JSON, but not an object"),
            ("NaN", '{"a": NaN}', "not JSON: NaN is not a finite number"),
        )
    ),
    row("a large number", [LAST], ['{"a": 100000000000000000000}'], [START], [step({"a": 10**20}), 1.0]),
    row(
        "an action that the server refuses",
        [{"message": "no", "code": "VALIDATION_ERROR"}, LAST],
        ["{}", "{}"],
        [START, ["user", "error: no"]],
        [step({}), step({}), 1.0],
    ),
    row(
        "a refusal with fields",
        [{"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ERRORS}, LAST],
        ["{}", "{}"],
        [START, ["user", "error: Invalid message: column: Field required"]],
        [step({}), step({}), 1.0],
    ),
    row(
        "an observation of many kinds",
        [LAST],
        ["{}"],
        [["user", '{"grid": [[0, 1]], "done_by": null, "t": 0.5}']],
        [step({}), 1.0],
        reset={"observation": {"grid": [[0, 1]], "done_by": None, "t": 0.5}},
    ),
    row(
        "a server without a free place",
        [LAST],
        ["{}"],
        [START, "has 1 place(s)", "has 1 place(s)"],
        [step({}), 1.0],
        full=2,
    ),
    Row(
        name="the package's server without a free place",
        needs=PYTHON,
        input={"places": 1, "replies": ['{"number": 3}']},
        sees=[["user", '{"hint": "1 to 9"}'], "has 1 place(s)"],
        grader=1.0,
    ),
    *(
        Row(name=name, input={"steps": [{**LAST, **result}], "replies": ["{}"]}, refused=words)
        for name, result, words in [
            ("a reward as text", {"reward": "1"}, "the reward is '1' (str)"),
            ("a truth value as reward", {"reward": True}, "the reward is True"),
            ("no end", {"done": None}, "`done` is 'None', which is neither true nor false"),
        ]
    ),
    Row(
        name="done after the reset",
        input={"steps": [], "replies": ["{}"], "reset": {"done": True}},
        refused="the episode is done after its reset",
    ),
]
