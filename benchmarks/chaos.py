"""Real processes, really killed: nothing acknowledged is lost, nothing is trained twice, the run gets to its end.

    python -m benchmarks.chaos [--quick] [--scripted 1000] [--real 100] [--ranks 50] [--directory DIR] [--seed 0]

A run lives until it is killed, in one of its processes and at a random instant, recovery included, and goes on until it
has taken all its steps; then another begins. After each kill two oracles judge the run directory: `chaos_oracle.py` by
what was acknowledged and by the entries with which earlier lives ended, and the tests' second reader of journals
(`tests/journal_oracle.py`).
Now and then the orchestrator is stopped, a second process tries to open its run, and it goes on. In a full run, a
process of each role stands still for a minute (SIGSTOP, then SIGCONT): it goes on, or it was replaced meanwhile.
`--ranks` divides its kills among the runs of `RANKS`, in which two ranks train a mixture of experts. Deterministic
runs all have one seed, and end with the weights of an undisturbed one.

Figures: `kills` and by role, `stops`, `lost`, `twice`, `ledger_errors`, `resampled`, `version_gone`, `violations` (of
the second reader), `runs` that got to their end, `pauses` and the second writers not refused, `reward_rise` of the real
runs (mean of the last ten steps less the first five), `weights_compared` and `weights_differ`: deterministic runs whose
last weights were compared with the undisturbed run's, and had other bits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentrl.cluster import worker_process
from agentrl.engines.process import ChildProgram
from benchmarks.report import Report
from tests import journal_oracle
from tests.support.chaos_oracle import Verdict, entries_on_disk, judge
from tests.support.chaos_run import STOPPED
from tests.support.killed_runs import digests

ROOT = Path(__file__).parents[1]
ROLES = {
    "engine": (ChildProgram("", {}).module,),
    "trainer": ("chaos_trainer",),
    "rank": ("ray::TrainerRank",),
    "node": ("src/ray/gcs/gcs_server ", "src/ray/raylet/raylet "),
    "raylet": ("src/ray/raylet/raylet ",),
    "worker": (worker_process.PROGRAM.module,),
    "harness": ("asking_program.py",),
}
"""What the command lines of a role's processes contain."""
HANGS_S = 900
"""A run that has nothing acknowledged for so long hangs."""
GIVEN_UP = 70
"""The exit code of a run whose budget of losses was used up: it is resumed, as its user would."""


@dataclass(slots=True, frozen=True, eq=False)
class Kind:
    """How runs of one kind are killed."""

    name: str
    steps: int
    weights: dict[str, int]
    """How often each role is killed, relative to the others. `stop` asks the orchestrator to stop by SIGTERM."""
    calm_s: float
    """Mean time between two kills."""
    start_s: float
    """About how long a life takes to start: kills of the orchestrator in recovery fall into it."""
    one_victim: bool = False
    """Of several processes of a role, whether one is killed; else all are."""
    after_progress: bool = False
    """Whether a kill waits until the run has had something acknowledged since the one before, but for kills in
    recovery; else only for time, which says little where the machine is busy."""
    deterministic: bool = False
    """Whether its runs have one seed, and their last weights are compared with an undisturbed run's."""


SCRIPTED = Kind("scripted", 40, {"orchestrator": 35, "engine": 30, "trainer": 30, "pause": 5}, 1.2, 2.5)
REAL = Kind("real", 60, {"orchestrator": 40, "engine": 25, "rank": 20, "node": 10, "pause": 5}, 8.0, 20.0)
_OF_RANKS = {"engine": 30, "worker": 30, "rank": 40}
RANKS = [
    Kind(name, 12, _OF_RANKS, 1.0, 20.0, one_victim=True, after_progress=True, deterministic=deterministic)
    for name, deterministic in (("experts", True), ("admission", False))
]


@dataclass(slots=True)
class Tally:
    """What was done, and what came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    pauses: int = 0
    second_writers: int = 0
    stops: int = 0
    given_up: int = 0
    runs: int = 0
    verdict: Verdict = field(default_factory=Verdict)
    violations: set[str] = field(default_factory=set)
    """Of the second reader."""
    unexplained: list[str] = field(default_factory=list)
    rises: list[float] = field(default_factory=list)
    weights_compared: int = 0
    weights_differ: list[str] = field(default_factory=list)


class Chaos:
    """Runs of one kind, killed until there were enough kills."""

    def __init__(self, kind: Kind, root: Path, seed: int, tally: Tally, *, stop_s: float = 0.0) -> None:
        self._stop_s = stop_s
        self._still = [role for role in kind.weights if role not in ("pause", "stop")] if stop_s else []
        """Roles of which no process has stood still yet."""
        self._kind = kind
        self._root = root
        self._rng = random.Random(f"{kind.name} {seed}")
        self._tally = tally
        self._killed = 0
        self._entries: dict[Path, dict[tuple[Any, ...], bytes]] = {}
        """Digests of the journal entries with which a further life of each run began."""
        self._stopped: tuple[int, ...] = ()
        """Exit codes that the newest blow explains besides that of SIGKILL."""
        self._next = [role for role in kind.weights if role != "pause"]
        """Whose turn it is: each role once, then by weight."""
        self._rng.shuffle(self._next)

    def run(self, kills: int) -> None:
        """Kill `kills` times, and let the last run get to its end."""
        number = spared = 0
        while self._killed < kills:
            directory = self._root / f"{self._kind.name}-{number}"
            directory.mkdir()
            before = self._killed
            self._one_run(directory, number, kills)
            number += 1
            if self._killed == before and self._tally.unexplained:
                raise SystemExit(f"{directory.name} ended before it could be killed: {_tail(directory)}")
            spared = spared + 1 if self._killed == before else 0
            if spared == 3:
                raise SystemExit(
                    f"{directory.name} is the third run without a kill: no process of {self._next} was found"
                )

    def _one_run(self, directory: Path, number: int, kills: int) -> None:
        number = 0 if self._kind.deterministic else number
        resume = False
        while True:
            process = self._start(directory, number, resume=resume)
            try:
                code = self._one_life(process, directory, kills)
            finally:
                process.kill()
                process.wait()
            resume = (directory / "run" / "config.json").exists()
            self._entries.setdefault(directory, {}).update(entries_on_disk(directory))
            self._judge(directory, ended=code == 0)
            if code == 0:
                self._end(directory)
                return
            if code == GIVEN_UP:
                self._tally.given_up += 1
            elif code not in (-signal.SIGKILL, *self._stopped):
                self._tally.unexplained.append(f"{directory.name}: exit code {code}: {_tail(directory)}")
                return

    def _start(self, directory: Path, number: int, *, resume: bool) -> subprocess.Popen[bytes]:
        command = ["tests.support.chaos_run", self._kind.name, str(directory), str(number), str(self._kind.steps)]
        with (directory / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", *command, *(["resume"] if resume else [])],
                cwd=ROOT,
                stdout=said,
                stderr=said,
                start_new_session=True,
                # Ray's workers have niceness 15 else, and start in minutes where anything else runs
                env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"},
            )

    def _one_life(self, process: subprocess.Popen[bytes], directory: Path, kills: int) -> int:
        """Kill processes of a life until it ends; its exit code."""
        early = "orchestrator" in self._kind.weights and not self._next and self._rng.random() < 0.25
        again = False
        while True:
            if self._kind.after_progress and not early and not again and not self._progressed(process, directory):
                return process.wait()
            wait = self._rng.random() * self._kind.start_s if early else self._rng.expovariate(1 / self._kind.calm_s)
            wait = 0.5 if again else wait
            if self._killed >= kills and not self._still:
                return self._to_the_end(process, directory)
            try:
                return process.wait(timeout=wait)
            except subprocess.TimeoutExpired:
                pass
            if self._still:
                self._stand_still(process, directory, self._still[0])
                continue
            role = "orchestrator" if early else self._draw()
            self._stopped = (STOPPED, -signal.SIGTERM) if role == "stop" else ()
            early = False
            if role == "pause":
                self._pause(process, directory)
                continue
            is_main = role in ("orchestrator", "stop")
            victims = [process.pid] if is_main else processes_of(process.pid).get(role, [])
            again = not victims
            if again:  # it is being started: a moment later, then
                self._next.append(role)
                continue
            self._killed += 1
            self._tally.kills[role] += 1
            for victim in [self._rng.choice(victims)] if self._kind.one_victim else victims:
                _kill(victim, signal.SIGTERM if role == "stop" else signal.SIGKILL)
            if is_main:
                return process.wait(timeout=HANGS_S)
            self._judge(directory, ended=False)

    def _progressed(self, process: subprocess.Popen[bytes], directory: Path) -> bool:
        """Wait until something more is acknowledged; False where the life ended first, or hung and was killed."""
        before, deadline = _acknowledged(directory), time.monotonic() + HANGS_S
        while _acknowledged(directory) == before:
            if process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                self._tally.unexplained.append(f"{directory.name} hung: {_tail(directory)}")
                process.kill()
                return False
            time.sleep(0.05)
        return True

    def _to_the_end(self, process: subprocess.Popen[bytes], directory: Path) -> int:
        """Kill no more; a run that acknowledges nothing for five minutes hangs."""
        while True:
            before = _acknowledged(directory)
            try:
                return process.wait(timeout=HANGS_S)
            except subprocess.TimeoutExpired:
                if _acknowledged(directory) == before:
                    self._tally.unexplained.append(f"{directory.name} hung: {_tail(directory)}")
                    return 1

    def _draw(self) -> str:
        if self._next:
            return self._next.pop()
        roles = list(self._kind.weights)
        return self._rng.choices(roles, list(self._kind.weights.values()))[0]

    def _pause(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        """A stopped orchestrator still holds its run: a second one is refused, and changes nothing."""
        if not (directory / "run" / "journal" / "run.lock").exists() or _holder(directory) != process.pid:
            return
        _kill(process.pid, signal.SIGSTOP)
        self._tally.pauses += 1
        try:
            second = self._start(directory, 0, resume=True)
            if second.wait(timeout=300) != 2:
                self._tally.second_writers += 1
        finally:
            _kill(process.pid, signal.SIGCONT)

    def _stand_still(self, process: subprocess.Popen[bytes], directory: Path, role: str) -> None:
        """Stop the processes of a role for so long that somebody may take them for dead, then let them go on."""
        victims = [process.pid] if role == "orchestrator" else processes_of(process.pid).get(role, [])
        if not victims:
            return
        self._still.remove(role)
        for victim in victims:
            _kill(victim, signal.SIGSTOP)
        time.sleep(self._stop_s)
        self._judge(directory, ended=False)
        for victim in victims:
            _kill(victim, signal.SIGCONT)
        self._tally.stops += 1
        print(f"{directory.name}: {role} stood still for {self._stop_s:g} s", flush=True)

    def _judge(self, directory: Path, *, ended: bool) -> None:
        violations = journal_oracle.judge(directory / "run", ended=ended)
        self._tally.violations |= {f"{directory.name}: {violation}" for violation in violations}
        verdict = judge(directory, ended=ended, before=self._entries.get(directory, {}))
        if ended and set(verdict.steps.values()) != {self._kind.steps}:
            verdict.lost.add(f"steps at the end: {verdict.steps}")
        self._tally.verdict.add(verdict, directory.name)

    def _end(self, directory: Path) -> None:
        self._tally.runs += 1
        faults = self._tally.verdict
        wrong = len(faults.faults()) + len(self._tally.violations)
        print(f"{directory.name}: at its end after {self._killed} kills in all, {wrong} faults", flush=True)
        connection = sqlite3.connect(directory / "run" / "journal" / "control.db")
        query = "SELECT step, avg(value) FROM metrics WHERE name = 'reward/mean' GROUP BY step ORDER BY step"
        rewards = [value for _, value in connection.execute(query)]
        connection.close()
        self._tally.rises.append(sum(rewards[-10:]) / len(rewards[-10:]) - sum(rewards[:5]) / len(rewards[:5]))
        if self._kind.deterministic:
            self._tally.weights_compared += 1
            if digests(directory / "run") != self._undisturbed():
                self._tally.weights_differ.append(f"{directory.name}: other weights than the undisturbed run's")

    def _undisturbed(self) -> dict[str, str]:
        """The last weights of an undisturbed run."""
        directory = self._root / f"{self._kind.name}-undisturbed"
        if not directory.exists():
            directory.mkdir()
            if self._start(directory, 0, resume=False).wait():
                raise SystemExit(f"{directory.name} failed: {_tail(directory)}")
        return digests(directory / "run")


def processes_of(parent: int) -> dict[str, list[int]]:
    """The descendants of a process, by role."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                commands[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
    found: dict[str, list[int]] = {}
    for pid, command in commands.items():
        above = pid
        while above > 1 and above != parent:
            above = parents.get(above, 0)
        if above == parent:
            for role, marks in ROLES.items():
                if any(mark in command for mark in marks):
                    found.setdefault(role, []).append(pid)
    return found


def _holder(directory: Path) -> int:
    text = (directory / "run" / "journal" / "run.lock").read_text().strip()
    return int(text) if text.isdecimal() else 0


def _acknowledged(directory: Path) -> int:
    """Bytes of what the run was promised to have on disk."""
    file = directory / "acknowledged.jsonl"
    return file.stat().st_size if file.exists() else 0


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _tail(directory: Path) -> str:
    return " | ".join((directory / "said.txt").read_text(errors="replace").splitlines()[-4:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--scripted", type=int, default=None)
    parser.add_argument("--real", type=int, default=None)
    parser.add_argument("--real-steps", type=int, default=REAL.steps)
    parser.add_argument("--ranks", type=int, default=None, help="of two ranks that train a mixture of experts")
    parser.add_argument("--stop-s", type=float, default=60.0, help="how long a process stands still; 0: none does")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="where the runs are left, to be looked at")
    options = parser.parse_args()
    scripted = (20 if options.quick else 1000) if options.scripted is None else options.scripted
    real = (0 if options.quick else 100) if options.real is None else options.real
    of_ranks = (0 if options.quick else 50) if options.ranks is None else options.ranks
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the runs along
    tally = Tally()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        root = options.directory or Path(scratch)
        root.mkdir(exist_ok=True)
        stop_s = 0.0 if options.quick else options.stop_s
        Chaos(SCRIPTED, root, options.seed, tally, stop_s=stop_s).run(scripted)
        tally.rises.clear()
        Chaos(replace(REAL, steps=options.real_steps), root, options.seed, tally, stop_s=stop_s).run(real)
        rises = list(tally.rises)
        for left, kind in zip(range(len(RANKS), 0, -1), RANKS, strict=True):
            kills = round(of_ranks / left)
            Chaos(kind, root, options.seed, tally).run(kills)
            of_ranks -= kills
    faults = tally.verdict
    for fault in sorted([*faults.faults(), *tally.violations, *tally.unexplained, *tally.weights_differ]):
        print(fault)
    report = Report(
        "chaos",
        quick=options.quick,
        repeats=1,
        compared_with="nothing lost, nothing twice",
        figures={
            "kills": tally.kills.total(),
            "lost": len(faults.lost),
            "twice": len(faults.twice),
            "ledger_errors": len(faults.ledger_errors),
            "resampled": len(faults.resampled),
            "version_gone": len(faults.version_gone),
            "violations": len(tally.violations),
            "runs": tally.runs,
            "runs_unexplained": len(tally.unexplained),
            "budgets_used_up": tally.given_up,
            "pauses": tally.pauses,
            "stops": tally.stops,
            "second_writers": tally.second_writers,
            "reward_rise": min(rises, default=None),
            "weights_compared": tally.weights_compared,
            "weights_differ": len(tally.weights_differ) if tally.weights_compared else None,
            "seconds": time.monotonic() - started,
            **{f"kills_{role}": float(count) for role, count in sorted(tally.kills.items())},
        },
    )
    report.print()
    wrong = faults.faults() | tally.violations | {*tally.unexplained, *tally.weights_differ}
    return 1 if wrong or tally.second_writers else 0


if __name__ == "__main__":
    sys.exit(main())
