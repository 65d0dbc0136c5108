"""Others' clients, unmodified, each through tool episodes against a scripted engine, streaming and not, in two formats.

    python -m benchmarks.clients

`AGENTRL_CLIENTS_PYTHON` names the Python of an environment that has them (`client_programs.PACKAGES`),
`AGENTRL_HEAVY_CLIENTS_PYTHON` that of one with Codex and Claude Code (`client_programs.HEAVY_PACKAGES`), which always
stream; without one its clients are not measured. `AGENTRL_CLIENTS_CALLS` are the calls of each client, 1,000 by
default; `reply_errors` counts calls too few or too many, and episodes whose client failed or answered wrongly.

A client is replay-stable if, killed at its end and begun again, it gets all its replies from the journal.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import agentrl
from agentrl.core.records import EpisodeHeader, EpisodeSpec, Message, PolicyVersion, SeatBinding, ToolSpec
from agentrl.core.reply_formats import parse_llama
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.memory import MemoryJournal
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.rollout.runner import EpisodeRunner
from agentrl.testing.execution import POLICY, plain_rollout_settings, wire_dispatcher
from benchmarks.client_programs import CLIENTS, HEAVY_CLIENTS
from benchmarks.parts import run

PROGRAMS = Path(__file__).with_name("client_programs.py")
CALLS = 1000
MAX_CONTEXT = 4_000_000
SUM = ("add", {"a": 1, "b": 2})
SUBMIT = ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; expr 1 + 2"})
TURNS: dict[str, tuple[Any, ...]] = {
    "mini_swe_agent": (SUBMIT,),
    "smolagents": (SUM, ("final_answer", {"answer": "3"})),
    "codex": (("exec_command", {"cmd": "expr 1 + 2"}), "3"),
    "claude_code": (("Bash", {"command": "expr 1 + 2", "description": "add"}), "3"),
}
"""What the model says in one task, where it is not a call of `add` and then the answer."""


class LlamaFormat(PlainChatFormat):
    """`PlainChatFormat` with the calls of Llama 3."""

    def parse(self, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), **options: Any) -> Message:
        content, calls = parse_llama(super().parse(token_ids, tools).content, tools)
        return Message(role="assistant", content=content, tool_calls=calls)


FORMATS = {
    "hermes": (PlainChatFormat(), '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'),
    "llama": (LlamaFormat(), '{{"name": "{}", "parameters": {}}}'),
}


class Driven(agentrl.HarnessEnvironment):
    """One client's program, which does its task `tasks_each` times."""

    seats = ("main",)
    failed_reward = -1.0
    tasks_each = 1

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result.splitlines()[-1:] == [f"right answers: {self.tasks_each}"])


async def _played(
    environment: type[Driven], replies: Iterator[str], format_name: str
) -> tuple[EpisodeHeader, int, str]:
    """The end of an episode, the calls that were sampled, and what the worker says of a failure."""
    chat_format, sampled = FORMATS[format_name][0], 0

    class Runner(EpisodeRunner):
        def __init__(self, **services: Any) -> None:
            super().__init__(**{**services, "chat_format": chat_format})

    def script(request: Any, policy: str, version: PolicyVersion) -> list[int]:
        nonlocal sampled
        sampled += 1
        return [*next(replies).encode(), STOP_TOKEN]

    engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)}, max_context=MAX_CONTEXT)
    settings = plain_rollout_settings(
        max_turns=10 * CALLS, max_tokens=512, max_context=MAX_CONTEXT, episode_timeout_s=900.0
    )
    failures: list[BaseException] = []
    dispatcher, _ = wire_dispatcher(environment, engine, MemoryJournal(), settings, failures, runner_type=Runner)
    ended: list[EpisodeHeader] = []
    spec = EpisodeSpec(
        episode_id="e0",
        environment=name_of(environment),
        task=agentrl.Task(id="t", data={}),
        seed=1,
        seats={"main": SeatBinding(POLICY)},
        group_id="g0",
    )
    dispatcher.worker.submit(spec, ended.append)
    await dispatcher.worker.drain()
    if failures:
        raise failures[0]
    return ended[0], sampled, dispatcher.worker.last_failure


def _drive(python: str, client: str, mode: str, format_name: str, *, calls: int, killed: bool = False) -> int:
    """Errors of one episode with so many calls; `killed`: at its end, once, and begun again."""
    said = TURNS.get(client, (SUM, "3"))
    written = FORMATS[format_name][1]
    turns = [turn if isinstance(turn, str) else written.format(turn[0], json.dumps(turn[1])) for turn in said]
    if client in HEAVY_CLIENTS:  # one task of many calls: they start slowly
        times, replies = 1, chain(repeat(turns[0], calls - 1), repeat(turns[1]))
    else:
        times, replies = max(1, calls // len(turns)), cycle(turns)
        calls = times * len(turns)
    with tempfile.TemporaryDirectory() as directory:
        once = [f"KILL_ONCE={directory}/killed"] if killed else []
        command = ("env", *once, python, str(PROGRAMS), client, mode, str(times))
        environment = type("Program", (Driven,), {"command": command, "tasks_each": times, "__module__": __name__})
        header, sampled, failure = asyncio.run(_played(environment, replies, format_name))
    errors = abs(sampled - calls) + abs(header.turns - calls) + (header.reward != 1.0)
    what = "killed and begun again" if killed else f"{mode}, {format_name}"
    print(f"{client}, {what}: reward {header.reward}, {sampled} calls of {calls} {failure}", flush=True)
    return errors


def figures(quick: bool) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    calls = int(os.environ.get("AGENTRL_CLIENTS_CALLS", CALLS))
    errors = 0
    for figure, variable, clients, modes in (
        ("clients", "AGENTRL_CLIENTS_PYTHON", CLIENTS, ("whole", "stream")),
        ("clients_heavy", "AGENTRL_HEAVY_CLIENTS_PYTHON", HEAVY_CLIENTS, ("stream",)),
    ):
        python = os.environ.get(variable)
        if quick or python is None:
            continue
        found[figure] = 0
        for client in clients:
            ways = [(mode, name) for mode in modes for name in FORMATS]
            wrong = sum(_drive(python, client, *way, calls=calls // len(ways)) for way in ways)
            is_stable = not _drive(python, client, modes[0], "hermes", calls=2, killed=True)
            print(f"{client}: {wrong} errors in about {calls} calls, replay-stable: {is_stable}", flush=True)
            found[figure] += not wrong
            errors += wrong
    return {**found, "reply_errors": errors} if found else {}


if __name__ == "__main__":
    run("clients", ("clients", "clients_heavy", "reply_errors"), figures, description=__doc__)
