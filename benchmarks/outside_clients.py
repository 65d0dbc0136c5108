"""Others' clients, unmodified, each through a tool episode against a scripted engine, streaming and not.

`AGENTRL_CLIENTS_PYTHON` names the Python of an environment that has them (`client_programs.PACKAGES`); without it
nothing is measured.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import agentrl
from benchmarks.client_programs import CLIENTS
from tests.unit.episodes import play

PROGRAMS = Path(__file__).with_name("client_programs.py")
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
SHELL = json.dumps({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; expr 1 + 2"})
REPLIES = {
    "mini_swe_agent": (CALL % ("bash", SHELL),),
    "smolagents": (CALL % ("add", '{"a": 1, "b": 2}'), CALL % ("final_answer", '{"answer": "3"}')),
}


class Driven(agentrl.HarnessEnvironment):
    """One client's program."""

    seats = ("main",)
    ignored_fields = ("tool_choice", "temperature", "top_p", "parallel_tool_calls")
    failed_reward = -1.0

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float("answer: 3" in episode.result)


def figures(quick: bool) -> dict[str, float | None]:
    """See `benchmarks.outside`."""
    python = os.environ.get("AGENTRL_CLIENTS_PYTHON")
    if quick or python is None:
        return {}
    passed, failed = 0, 0
    for name in CLIENTS:
        rewards = []
        for mode in ("whole", "stream"):
            command = (python, str(PROGRAMS), name, mode)
            environment = type("Program", (Driven,), {"command": command, "__module__": __name__})
            replies = REPLIES.get(name, (CALL % ("add", '{"a": 1, "b": 2}'), "3"))
            played = play(environment, [*replies, "3", "3"], max_context=60_000, episode_timeout_s=300.0)
            rewards.append(played.header.reward)
            print(
                f"{name}, {mode}: reward {played.header.reward}, {played.header.turns} turns {played.said}", flush=True
            )
        passed += rewards == [1.0, 1.0]
        failed += rewards != [1.0, 1.0]
    return {"clients": passed, "reply_errors": failed}
