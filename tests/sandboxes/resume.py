"""An episode whose sandbox changes files in every way, killed at each of its entries and resumed by another process."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - an ordinary user may not read it when it is needed
import difflib
import os
import signal
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import agentrl
from agentrl.core.records import EpisodeSpec, PolicyVersion, SeatBinding, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.entries import JournalEntry, ResourceCallEntry
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.store import SqliteJournal
from agentrl.rollout import episode_context
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.sandbox import JournaledSandbox, changed_files
from agentrl.sandbox.sandbox import as_bytes
from agentrl.sandbox.state import FileState
from agentrl.testing.execution import POLICY, plain_rollout_settings, wire_dispatcher

if TYPE_CHECKING:
    from agentrl.sandbox.driver import SandboxLease

REPOSITORY = {f"/box/src/{number:03}.txt": f"{number}\n" * number for number in range(40)}
MAKE = r"""
    mkdir -p a/b empty shut; echo one > a/b/one; ln a/b/one two; ln -s /etc/passwd link; mkfifo pipe
    printf x > "$(printf 'byte\377')"; chmod 751 a/b/one; touch -d @1000000000.5 old; echo inner > shut/in; chmod 0 shut
    echo temporary > /tmp/t; head -c 300000 /dev/zero > zeros; echo 7 >> src/007.txt; rm src/001.txt
"""
CHANGE = "mv a c; rm -r empty link; cp zeros zeros2; echo more >> two; rm src/00[2-6].txt; mkdir link; echo 1 > link/x"
LIST = (
    r"chmod 700 shut; find . /tmp ! -type d -printf '%p %y %m %l %s\n' | LC_ALL=C sort; chmod 0 shut;"
    r"find . /tmp -type d -printf '%p %m\n' | LC_ALL=C sort; chmod 700 shut; find . /tmp -type f | LC_ALL=C sort |"
    r"xargs -d '\n' cksum; chmod 0 shut; date +%N"
)
"""What the files are, and last the time, which no execution repeats."""


class Files(agentrl.Environment):
    """Changes files; the last command lists them."""

    box = agentrl.Sandbox(disk_mb=8)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, box = ctx.agent("agent"), ctx.sandbox(self.box)
        await box.write(REPOSITORY)
        await box.run(["sh", "-c", MAKE])
        await agent.act(agentrl.user("go on"))
        assert (await box.read("/box/a/b/one")) == b"one\n"
        await box.run(["sh", "-c", CHANGE])
        async with box.copy(only=["/box/src"]) as judge:
            counted = await judge.run(["sh", "-c", "ls -R /box | wc -l; echo judged > src/x"])
            listed = await judge.run(["sh", "-c", "cat src/x; ls -A /tmp"])
        assert listed.output == "judged\n", listed
        await box.run(["sh", "-c", "exit 3"], files={"src/007.txt": "7\n" * 7, "/tmp/new": b"\0"})
        await box.run(["sh", "-c", LIST])
        agent.reward(float(counted.output))


def spec() -> EpisodeSpec:
    """Return the episode of the benchmark."""
    return EpisodeSpec(
        episode_id="e0",
        environment=name_of(Files),
        task=Task(id="t0", data={}),
        seed=3,
        seats={"agent": SeatBinding(POLICY)},
        group_id="g0",
    )


class _CheckedSandbox(JournaledSandbox):
    """Compares the files that it restores with what the journal says of them."""

    async def _open_lease(self) -> SandboxLease:
        is_new = self._lease is None
        lease = await super()._open_lease()
        if is_new:
            files, _ = await changed_files(lease, everything=True)
            assert FileState.of(files).digest == self._state.digest, "other files were restored"
        return lease


async def play(directory: Path, kill_at: int | None) -> list[JournalEntry]:
    """Play the episode, or resume it; kill this process once `kill_at` entries are on disk."""
    episode_context.JournaledSandbox = _CheckedSandbox  # type: ignore[misc]
    journal = SqliteJournal(directory, info={})
    engine = ScriptedEngine(
        lambda request, policy, version: [*b"ok", STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)}
    )
    _, runner = wire_dispatcher(Files, engine, journal, plain_rollout_settings(episode_timeout_s=300), [])
    log = journal.turn_log("0")
    recorded = log.read("e0", 0)
    append, written = log.append, len(recorded)

    def append_and_die(entry: JournalEntry) -> None:
        nonlocal written
        append(entry)
        written += 1
        if written == kill_at:
            dying.append(asyncio.get_running_loop().create_task(die()))

    async def die() -> None:
        await log.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    dying: list[asyncio.Task[None]] = []
    log.append = append_and_die  # type: ignore[method-assign]
    await asyncio.get_running_loop().create_task(runner.run(spec(), Files, recorded))
    entries = log.read("e0", 0)
    await journal.close()
    return entries


def read(directory: Path) -> list[JournalEntry]:
    """Return the entries on disk."""
    return TurnLogReader(directory).read("turns-0.db", "e0", 0)


def listing(entries: list[JournalEntry]) -> list[str]:
    """Return what the last command said of the files."""
    bodies = [body for entry in entries if isinstance(body := entry.decode(), ResourceCallEntry)]
    output: str | bytes = bodies[-1].value["stdout"]
    return as_bytes(output).decode("utf-8", "replace").splitlines()[:-1]


def _play_in_process(directory: Path, kill_at: int | None) -> int:
    """Play in another process; return its exit code, or minus the signal that ended it."""
    process = os.fork()  # as it is: what an ordinary user could not import again has been imported
    if process == 0:
        try:
            asyncio.run(play(directory, kill_at))
            os._exit(0)
        except Exception:  # noqa: BLE001 - it must not reach the caller, which this process is a copy of
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def problem_after_kill(kill_at: int, expected: list[str]) -> str:
    """Kill the episode once it has this many entries, and resume it. Returns what differs; empty if nothing does."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "journal"
        if _play_in_process(directory, kill_at) != -signal.SIGKILL:
            return "it was not killed"
        before = read(directory)
        if _play_in_process(directory, None):
            return "it could not be resumed"
        after = read(directory)
        if after[: len(before)] != before or len(before) < kill_at:
            return "recorded entries changed"
        changed = difflib.unified_diff(expected, listing(after), "before", "after", n=0, lineterm="")
        return "; ".join(changed)


def problems(kills: int | None) -> tuple[list[str], int]:
    """Kill the episode at each entry, or at some; return the problems, and the number of kills."""
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "journal"
        if _play_in_process(directory, None):
            return ["it could not be played"], 1
        entries = read(directory)
    at = range(1, len(entries) + 1, 1 if kills is None else len(entries) // kills + 1)
    found = [(number, problem_after_kill(number, listing(entries))) for number in at]
    return [f"kill at entry {number}: {problem}" for number, problem in found if problem], len(at)
