"""A run over three hosts, of which processes and machines are lost.

    python -m benchmarks.chaos_hosts [--quick]

The hosts are network namespaces with private disks, which needs root.

A fault is the death of a worker, an engine or a rank, of a whole host (its network ends before its processes do, as if
its power had failed), a network that is cut for 5 or 30 s, or a node that is drained by SIGTERM. A host that lost its
Ray node joins again after the run has got on without it. A machine, an engine or a rank is lost at any time, while a
version is published, or while a checkpoint is written.
After each fault, and at the end of each run, both oracles of
`benchmarks.chaos` judge the run directory. Before each fault, what the journal has of unfinished episodes is noted;
tokens of it that the committed episode does not have were sampled again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from agentrl.journal.entries import JournalEntry, PartialTurnTokens, TurnEntry
from benchmarks.chaos import ROLES, Chaos, Kind, Tally
from benchmarks.parts import run
from tests.support.hosts import Hosts, unavailable

FAULTS, QUICK_FAULTS = 60, 8
KIND = Kind(
    "cluster",
    60,
    {"worker": 10, "engine": 10, "rank": 8, "host": 12, "cut 5": 8, "cut 30": 7, "drain": 10},
    calm_s=3.0,
    start_s=0.0,
    after_progress=True,
)
RAYLET = "src/ray/raylet/raylet "
CUT_S = {"cut 5": 5.0, "cut 30": 30.0}
MOMENTS = ("", "versions", "checkpoints")
"""Folders of a run in whose first change a machine or a process is lost; at any time without one."""
MOMENT_S = 20.0
"""Longest wait for such a change, which ends with the run's last step."""
HOSTS = 3
Call = tuple[str, int, str]
"""Episode, attempt, call."""


class ClusterChaos(Chaos):
    """Runs over hosts of which parts are lost, until there were enough faults."""

    def __init__(self, hosts: Hosts, seed: int, tally: Tally) -> None:
        super().__init__(KIND, hosts.directory / "1" / "tmp", seed, tally)
        self.resampled = 0
        """Sampled tokens that were on the disk of the run's host, and were sampled again."""
        self.moments: Counter[str] = Counter()
        """Faults while something was written into a folder of the run, by that folder."""
        self._hosts = hosts
        self._noted: dict[Path, dict[Call, list[tuple[int, bytes]]]] = defaultdict(lambda: defaultdict(list))
        """Tokens on disk before a fault, by run and call: the number of the first in its turn, and the column."""

    def _start(self, directory: Path, number: int, *, resume: bool) -> subprocess.Popen[bytes]:
        command = ["tests.support.chaos_run", self._kind.name, f"/tmp/{directory.name}", str(number)]
        command += [str(self._kind.steps), *(["resume"] if resume else [])]
        with (directory / "said.txt").open("ab") as said:
            started: subprocess.Popen[bytes] = self._hosts.start(
                1,
                [sys.executable, "-m", *command],
                stdout=said,
                stderr=said,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # type: ignore[assignment] # its output is a file
        return started

    def _one_life(self, process: subprocess.Popen[bytes], directory: Path, kills: int) -> int:
        while True:
            begun = time.monotonic()
            if not self._progressed(process, directory):
                return process.wait()
            if self._killed:
                print(f"  the run got on after {time.monotonic() - begun:.0f} s", flush=True)
            self._join_again()
            if self._killed >= kills:
                return self._to_the_end(process, directory)
            try:
                return process.wait(timeout=self._rng.expovariate(1 / self._kind.calm_s))
            except subprocess.TimeoutExpired:
                pass
            self._note(directory)
            fault = self._draw()
            if fault in ("host", "engine", "rank"):
                self._await_moment(directory / "run", self._rng.choice(MOMENTS))
            if not self._strike(fault):
                self._next.append(fault)
                continue
            self._killed += 1
            self._tally.kills[fault] += 1
            self._judge(directory, ended=False)

    def _await_moment(self, run: Path, folder: str) -> None:
        """Wait until something is written into a folder of the run."""
        if not (run / folder).exists() or not folder:
            return
        before, deadline = _changed_ns(run / folder), time.monotonic() + MOMENT_S
        while time.monotonic() < deadline:
            if _changed_ns(run / folder) != before:
                self.moments[folder] += 1
                print(f"  as {folder} are written:", flush=True)
                return
            time.sleep(0.002)

    def _strike(self, fault: str) -> bool:
        """Bring a fault about; False where there is nothing of that kind now."""
        if fault in CUT_S or fault in ("host", "drain"):
            number = self._rng.choice([2, 3])
            print(f"fault {self._killed + 1}: {fault} of host {number}", flush=True)
            self._strike_host(fault, number)
            return True
        victims = [
            (number, pid) for number in range(1, HOSTS + 1) for pid in self._hosts.processes(number, *ROLES[fault])
        ]
        if not victims:
            return False
        number, victim = self._rng.choice(victims)
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:  # it has ended by itself, as one does that is replaced
            return False
        print(f"fault {self._killed + 1}: {fault} on host {number}", flush=True)
        return True

    def _strike_host(self, fault: str, number: int) -> None:
        if fault == "drain":
            for raylet in self._hosts.processes(number, RAYLET):
                os.kill(raylet, signal.SIGTERM)
            return
        self._hosts.cut(number)
        if fault == "host":
            self._hosts.kill(number)
        else:
            time.sleep(CUT_S[fault])
            self._hosts.plug(number)

    def _join_again(self) -> None:
        """Start Ray where its node was lost; what else of it is left is killed, as a restart of the machine does."""
        for number in (2, 3):
            self._hosts.plug(number)
            if not self._hosts.processes(number, RAYLET):
                self._hosts.kill(number)
                self._start_ray(number)
                self._tally.kills["join again"] += 1
                print(f"  host {number} has joined again", flush=True)

    def _start_ray(self, number: int) -> None:
        self._hosts.start_ray([number], hide=self._hosts.directory / "1")

    # --- tokens that were on disk ---------------------------------------------------------------------------------

    def _note(self, directory: Path) -> None:
        """Note the tokens that the journal has of unfinished episodes."""
        ended = {attempt[:2] for attempt in _ended(directory / "run")}
        noted = self._noted[directory]
        for table in ("entries", "partials"):
            for entry, tokens in _sampled(directory / "run", table):
                if (entry.episode_id, entry.attempt) not in ended:
                    noted[entry.episode_id, entry.attempt, entry.call_id].append(tokens)

    def _end(self, directory: Path) -> None:
        super()._end(directory)
        run, noted = directory / "run", self._noted.pop(directory, {})
        partitions = {(episode, attempt): name for episode, attempt, name in _ended(run)}
        attempts = dict(partitions.keys())
        final: dict[tuple[str, str], bytes] = {}
        for partition in {name for name in partitions.values() if name}:
            for entry, (_, tokens) in _sampled(run, "entries", partition):
                if partitions.get((entry.episode_id, entry.attempt)) == partition:
                    final[entry.episode_id, entry.call_id] = tokens
        for (episode, _, call), pieces in noted.items():
            if partitions.get((episode, attempts.get(episode, -1))) is None:
                continue  # it was dropped, which the ledger counts
            tokens = final.get((episode, call), b"")
            self.resampled += sum(
                int(np.count_nonzero(np.frombuffer(piece, "<i4") != _at(tokens, start, len(piece) // 4)))
                for start, piece in pieces
            )
        print(f"{directory.name}: {len(noted)} calls had tokens on disk at a fault", flush=True)


def _changed_ns(folder: Path) -> int:
    """When a folder, or one in it, got or lost a file last."""
    newest = os.stat(folder).st_mtime_ns
    for each in folder.glob("[!.]*/"):
        with contextlib.suppress(FileNotFoundError):  # it is removed just now
            newest = max(newest, each.stat().st_mtime_ns)
    return newest


def _at(tokens: bytes, start: int, count: int) -> np.ndarray:
    """So many tokens of a turn from a number on; -1 where it has none."""
    found = np.frombuffer(tokens, "<i4")[start : start + count]
    return np.pad(found, (0, count - len(found)), constant_values=-1)


def _ended(run: Path) -> list[tuple[str, int, str | None]]:
    """Episode, attempt and partition of what has ended; without one where it was dropped."""
    try:
        with closing(
            sqlite3.connect(f"file:{run / 'journal' / 'control.db'}?mode=ro", uri=True, timeout=20)
        ) as control:
            query = "SELECT episode, attempt, CASE WHEN drop_reason IS NULL THEN partition END FROM episodes"
            return list(control.execute(query))
    except sqlite3.Error:  # the run is only beginning
        return []


def _sampled(run: Path, table: str, partition: str = "turns-*.db") -> Iterator[tuple[JournalEntry, tuple[int, bytes]]]:
    """Entries that hold sampled tokens, and those, with the number of the first in its turn."""
    for path in sorted((run / "journal").glob(partition)):
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)) as turns:
            for row in turns.execute(f"SELECT episode, attempt, call, asked, body FROM {table}"):
                entry = JournalEntry(*row)
                if table == "partials":
                    part = msgspec.msgpack.decode(entry.body, type=PartialTurnTokens)
                    yield entry, (part.start, part.tokens.token_ids)
                elif isinstance(body := entry.decode(), TurnEntry):
                    yield entry, (0, body.tokens.token_ids)


def figures(quick: bool) -> dict[str, float | None]:
    if reason := unavailable():
        print(f"not measured: {reason}", flush=True)
        return {}
    return faults_of(QUICK_FAULTS if quick else FAULTS)


def faults_of(count: int, seed: int = 0) -> dict[str, float | None]:
    """The figures after so many faults."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end with it
    tally = Tally()
    with Hosts(HOSTS) as hosts:
        hosts.start_ray([1, 2, 3], hide=hosts.directory / "1")
        chaos = ClusterChaos(hosts, seed, tally)
        chaos.run(count)
    found = tally.verdict
    errors = found.ledger_errors | tally.violations | set(tally.unexplained)
    for fault in sorted(found.lost | found.twice | errors):
        print(fault, flush=True)
    kinds: Counter[str] = tally.kills
    moments = f"of them as these were written {dict(chaos.moments)}"
    print(f"faults {dict(kinds)}, {moments}, {tally.runs} runs, budgets used up {tally.given_up}", flush=True)
    return {
        "faults": sum(kinds.values()),
        "lost": len(found.lost),
        "twice": len(found.twice),
        "ledger_errors": len(errors),
        "resampled_acknowledged_tokens": chaos.resampled,
    }


if __name__ == "__main__":
    names = ("faults", "lost", "twice", "ledger_errors", "resampled_acknowledged_tokens")
    run("chaos_hosts", names, figures, description=__doc__)
