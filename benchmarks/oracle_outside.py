"""Runs whose agent is a child process, killed with SIGKILL again and again: the run, a worker with its gateway, or the
agent itself, in the middle of calls.

`resampled_replies` counts replies of one id and several contents, as the agents saw them, and calls whose attempts have
other tokens in the journal. After each kill both oracles of `benchmarks.chaos` judge the run; `violations` are theirs.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec

import agentrl
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.entries import JournalEntry, TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.check import check_environment
from agentrl.testing.execution import POLICY, plain_rollout_settings, wire_dispatcher
from benchmarks.chaos import Chaos, Kind, Tally

KILLS = 100
KIND = Kind(
    "outside",
    40,
    {"orchestrator": 2, "stop": 1, "worker": 4, "harness": 4},
    calm_s=0.3,
    start_s=6.0,
    one_victim=True,
    after_progress=True,
)
PROGRAM = Path(__file__).parents[1] / "tests" / "support" / "asking_program.py"


class Asking(agentrl.HarnessEnvironment):
    """A program that asks thrice, with an id of its own in its first message."""

    seats = ("solver",)
    command = (sys.executable, "-S", str(PROGRAM), "{task.question}")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        try:
            await super().run(ctx)
        except Exception as error:
            if not getattr(error, "begin_again", False):  # the next attempt samples its replies anew
                with Path(os.environ["ASKING_LOG"]).with_name("failures.txt").open("a") as failures:
                    failures.write(f"{time.ctime()} {ctx.task.id}: {type(error).__name__}: {error}\n")
            raise

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return float(episode.result.strip()) / 10

    tasks_of: ClassVar[list[agentrl.Task]] = [
        agentrl.Task(id=f"t{n}", data={"question": f"What is {n}?"}) for n in range(64)
    ]

    @classmethod
    def tasks(cls, split: Any, *, seed: int = 0) -> agentrl.TaskSource:
        return cls.tasks_of


class Undeclared(Asking):
    """The same, where that id is not declared volatile."""

    volatile = ()


def figures(quick: bool) -> dict[str, float | None]:
    if quick:
        return {}
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="outside-kills-") as scratch:
        Chaos(KIND, Path(scratch), 0, tally).run(KILLS)
        seen: dict[tuple[str, str], set[str]] = defaultdict(set)
        sampled: dict[tuple[str, str, str], set[bytes]] = defaultdict(set)
        attempts: dict[tuple[str, str, str], set[int]] = defaultdict(set)
        dropped: list[str] = []
        for run in sorted(Path(scratch).glob(f"{KIND.name}-*/run")):
            for line in (run.parent / "replies.jsonl").read_bytes().split(b"\n")[:-1]:
                reply_id, content = json.loads(line)
                seen[run.parent.name, reply_id].add(content)
            for entry in _entries(run):
                if isinstance(body := entry.decode(), TurnEntry):
                    call = (run.parent.name, entry.episode_id, entry.call_id)
                    sampled[call].add(body.tokens.token_ids)
                    attempts[call].add(entry.attempt)
            if (failures := run.parent / "failures.txt").exists():
                print(f"{run.parent.name}: failed attempts:\n{failures.read_text()}", flush=True)
            with sqlite3.connect(run / "journal" / "control.db") as control:
                asked = "SELECT episode, drop_reason, detail FROM episodes WHERE drop_reason IS NOT NULL"
                dropped += [f"{run.parent.name}: dropped {each}" for each in control.execute(asked)]
        os.environ["ASKING_LOG"] = str(Path(scratch, "checked.jsonl"))
        told = [*check_environment(Undeclared).findings, asyncio.run(_killed_once(Path(scratch)))]
    for said in told:
        print(f"of an undeclared id: {said}", flush=True)
    faults = tally.verdict.faults() | tally.violations
    for fault in sorted({*faults, *tally.unexplained, *dropped}):
        print(fault, flush=True)
    print(f"kills {dict(tally.kills)}, {tally.runs} runs, {len(seen)} replies seen", flush=True)
    resampled = [each for each in (*seen.values(), *sampled.values()) if len(each) > 1]
    return {
        "resampled_replies": len(resampled),
        "recalled_replies": sum(len(numbers) - 1 for numbers in attempts.values()),
        "kills": tally.kills.total(),
        "harness_failures": len(dropped) + len(tally.unexplained),
        "violations": len(faults),
        "divergence_named": float(
            len(told) == 2
            and all(
                "turn 0 of seat 'solver'" in said and said.partition("content: ")[2].count("Request ") == 2
                for said in told
            )
        ),
    }


async def _killed_once(directory: Path) -> str:
    """Return the detail committed with an episode of `Undeclared` that is killed at its end."""
    mark = directory / "killed"
    script = f'"$0" -S "$1" "$2"; [ -e {mark} ] || {{ : > {mark}; kill -9 $$; }}'
    command = ("sh", "-c", script, sys.executable, str(PROGRAM), "{task.question}")
    environment = type("KilledOnce", (Undeclared,), {"command": command, "__module__": __name__})
    engine = ScriptedEngine(
        lambda request, policy, version: [*b"yes", STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)}
    )
    journal, failures, ended = MemoryJournal(), list[BaseException](), list[EpisodeHeader]()
    dispatcher, _ = wire_dispatcher(environment, engine, journal, plain_rollout_settings(), failures)
    spec = EpisodeSpec(
        episode_id="e0",
        environment=name_of(environment),
        task=Asking.tasks_of[0],
        seed=1,
        seats={"solver": SeatBinding(POLICY)},
        group_id="g0",
    )
    dispatcher.worker.submit(spec, ended.append)
    await dispatcher.worker.drain()
    if failures or ended[0].attempt != 1:
        raise SystemExit(
            f"an episode that is killed once does not end well: {failures or dispatcher.worker.last_failure}"
        )
    return journal.of_kind(EpisodeEnd)[0].detail


def _entries(run: Path) -> Iterator[JournalEntry]:
    """All entries of a run, of whatever attempt."""
    for path in sorted((run / "journal").glob("turns*.db")):
        with sqlite3.connect(path) as partition:
            for row in partition.execute("SELECT episode, attempt, call, asked, body FROM entries"):
                named = dict(zip(("episode_id", "attempt", "call_id", "request_hash", "body"), row, strict=True))
                yield msgspec.convert(named, JournalEntry)
