"""A run whose agent is a child process, killed with SIGKILL again and again: process, gateway and harness at once.

A reply that was recorded is never sampled again: in whatever attempt a program asks the same, it gets the same.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import agentrl
from agentrl.journal.entries import JournalEntry, TurnEntry
from benchmarks.killed_runs import Job

KILLS = 20
STEPS = 24
PROGRAM = """
import json, os, sys, time, urllib.request

def ask(messages):
    body = {"model": "main", "messages": messages, "max_tokens": 8, "user": str(time.time())}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

messages = [{"role": "user", "content": "It is %s. %s" % (time.strftime("%Y-%m-%dT%H:%M:%SZ"), sys.argv[1])}]
for turn in range(3):
    messages.append(ask(messages))
    time.sleep(0.02)
    messages.append({"role": "user", "content": "And %d?" % turn})
print(len(messages[-2]["content"] or ""))
"""


class Asking(agentrl.HarnessEnvironment):
    """A program that asks thrice, with a date in its first message."""

    seats = ("main",)
    command = (sys.executable, "-S", "-c", PROGRAM, "{task.question}")

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result.strip()) / 10

    tasks_of: ClassVar[list[agentrl.Task]] = [
        agentrl.Task(id=f"t{n}", data={"question": f"What is {n}?"}) for n in range(64)
    ]

    @classmethod
    def tasks(cls, split: Any, *, seed: int = 0) -> agentrl.TaskSource:
        return cls.tasks_of


CONFIG = """
name = "outside"
steps = 1
[environment]
id = "benchmarks.outside_kills:Asking"
[model]
path = "agentrl.environments:calculator/model"
[policies.main]
step_size = 8
[credit]
group_size = 4
[sampling]
max_tokens = 8
max_turns = 6
[engine]
slots = 8
max_context = 256
[trainer]
kind = "in_process"
[evaluation]
tasks = 0
[checkpoint]
every = 2
"""


def figures(quick: bool) -> dict[str, float | None]:
    """See `benchmarks.outside`."""
    if quick:
        return {}
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch, "outside.toml")
        config.write_text(CONFIG)
        job = Job(config=config, settings=(), directory=Path(scratch), most_entries=(8, 16, 32, 64))
        run = job.train("killed", steps=STEPS, kills=KILLS)
        replies: dict[tuple[str, str], set[bytes]] = defaultdict(set)
        attempts: dict[tuple[str, str], set[int]] = defaultdict(set)
        for entry in _entries(run):
            body = entry.decode()
            if isinstance(body, TurnEntry):
                replies[entry.episode_id, entry.call_id].add(body.token_ids)
                attempts[entry.episode_id, entry.call_id].add(entry.attempt)
        with sqlite3.connect(run / "journal" / "control.db") as control:
            (dropped,) = control.execute("SELECT count(*) FROM episodes WHERE drop_reason IS NOT NULL").fetchone()
        return {
            "resampled_replies": sum(len(tokens) - 1 for tokens in replies.values()),
            "recalled_replies": sum(len(numbers) - 1 for numbers in attempts.values()),
            "kills": KILLS,
            "harness_failures": dropped,
        }


def _entries(run: Path) -> list[JournalEntry]:
    """All entries of a run, of whatever attempt."""
    found = []
    for path in sorted((run / "journal").glob("turns*.db")):
        with sqlite3.connect(path) as partition:
            rows = partition.execute("SELECT episode, attempt, call, asked, body FROM entries")
            found += [msgspec.convert(row, JournalEntry) for row in map(_named, rows)]
    return found


def _named(row: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(("episode_id", "attempt", "call_id", "asked", "body"), row, strict=True))
