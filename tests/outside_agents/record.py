"""Records what the whole programs of `programs/` send, for the tests that need no library.

    python -m tests.outside_agents.record

plays each program of `PROGRAMS` once, unmodified, against a scripted policy, and writes `sessions.json`: each program's
requests in order, with the policy's replies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl.gateway import http, server
from tests.outside_agents.environments import AGENTS, install
from tests.outside_agents.runs import call
from tests.unit.episodes import play

SESSIONS = Path(__file__).with_name("sessions.json")
PROGRAMS: Mapping[str, Sequence[str]] = {
    "openai_loop": (
        call("add", a=70_000, b=7_000) + call("add", a=1, b=2),  # two calls at once
        "The sum is 77000.",
        "sum: 77000",  # no JSON, so it is asked again, at another temperature
        '{"sum": 77000}',
        "70000 and 7000 make 77000.",
    ),
    "pydantic_ai_output": (
        call("add", a=70_000, b=7_000),
        call("final_result", total=77_000, explanation="I added them."),  # refused by the validator
        call("final_result", total=77_000, explanation="70000 + 7000 = 77000"),
    ),
    "smolagents_code": (
        "I add them.\n<code>\ntotal = add(70000, 7000)\nprint(total)\n</code>",
        "It is done.\n<code>\nfinal_answer(77000)\n</code>",
    ),
}
"""Programs written as people write them, with the policy's reply to each request."""


def record(program: str, replies: Sequence[str]) -> list[dict[str, Any]]:
    """Play a program; return its requests in order, each with `path`, `body` and `reply`."""
    sent: list[tuple[str, dict[str, Any]]] = []

    def digest_of(*parts: str | bytes) -> bytes:
        if len(parts) == 2:  # of a request: its path and its body
            sent.append((str(parts[0]), json.loads(parts[1])))
        return http.digest_of(*parts)

    environment = AGENTS[program]
    with mock.patch.object(server, "digest_of", digest_of):
        played = play(
            environment,
            replies,
            data=dict(environment.tasks("train")[0].data),
            max_context=1 << 16,
            episode_timeout_s=300.0,
        )
    assert (played.header.reward, len(sent)) == (1.0, len(replies)), played.told
    return [
        {"path": path.removeprefix("/v1"), "body": body, "reply": reply}
        for (path, body), reply in zip(sent, replies, strict=True)
    ]


def main() -> None:
    sessions = {}
    for program, replies in PROGRAMS.items():
        install(program)
        sessions[program] = record(program, replies)
    SESSIONS.write_text(json.dumps(sessions, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
