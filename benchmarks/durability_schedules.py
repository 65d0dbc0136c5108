"""Turns that survive being cut: schedules of interruptions in virtual time, and real kills in the middle of turns.

    python -m benchmarks.durability_schedules [--quick]

`sim_seeds`, `sim_violations`: schedules of pause, update, abort, park, engine loss and process kill, and how many of
them broke a promise: an episode that did not end, a token, logprob or version that is not what it should be, a token
sampled again that was on disk (`tests/sim/interrupted_run.py`).
`tokens_resampled`: over runs of a process that is killed with SIGKILL again and again while its engine samples, tokens
that were in the SQLite journal when a process died and were sampled again by the next one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

from agentrl.core.records import PolicyVersion
from agentrl.journal.entries import TurnEntry
from agentrl.journal.store import SqliteJournal
from benchmarks.report import Report
from tests.sim.interrupted_run import (
    POLICIES,
    Life,
    Turn,
    WatchedEngine,
    check_schedule,
    episode_of,
    request_name,
    tokens_on_disk,
    undisturbed,
    what_was_said,
)

SEEDS, RUNS, KILLS = 2_000, 8, 6
"""Schedules; runs with real kills; kills per run."""


def figures(quick: bool) -> dict[str, float | None]:
    """What this part adds to `benchmarks.durability`."""
    seeds = 100 if quick else SEEDS
    resampled = sum(killed_run(seed, kills=3 if quick else KILLS) for seed in range(1 if quick else RUNS))
    return {
        "sim_seeds": float(seeds),
        "sim_violations": float(sum(violates(seed) for seed in range(seeds))),
        "tokens_resampled": float(resampled),
    }


def violates(seed: int) -> bool:
    """Whether a schedule broke a promise; which one is printed."""
    try:
        check_schedule(seed)
    except Exception as error:  # noqa: BLE001 - whatever comes out of a schedule is a violation
        print(f"seed {seed}: {type(error).__name__}: {str(error)[:300]}")
        return True
    return False


# --- real kills -------------------------------------------------------------------------------------------------------


def killed_run(seed: int, *, kills: int) -> int:
    """Kill a run `kills` times, let it end, and return how many tokens were sampled again.

    Raises:
        AssertionError: a turn is not that of the undisturbed run, or no kill hit a turn that had been written.
    """
    moments = random.Random(seed)
    resampled = recovered = 0
    with tempfile.TemporaryDirectory() as directory:
        for life in range(kills + 1):
            lived = live(Path(directory), None if life == kills else moments.uniform(0.3, 1.3))
            resampled += sum(line["resampled"] for line in lived)
            recovered += sum(line["recovered"] for line in lived)
        wanted = undisturbed(0)
        turns = asyncio.run(read_turns(Path(directory), {episode_of(name) for name in wanted}))
    assert turns == wanted, f"{sum(turns.get(name) != turn for name, turn in wanted.items())} turns differ"
    assert recovered > 0, "no process began with a turn that another had begun"
    print(f"run {seed}: {kills} kills, {recovered} tokens of cut turns taken over, {resampled} sampled again")
    return resampled


def live(directory: Path, seconds: float | None) -> list[dict[str, int]]:
    """One process, killed `seconds` after it began to sample; what it said of each call it made."""
    command = [sys.executable, "-m", "benchmarks.durability_schedules", "--process", str(directory)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).resolve().parents[1])
    assert process.stdout is not None
    said = process.stdout.readline()
    if seconds is not None:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    said += process.stdout.read()
    code = process.wait()
    assert code in ((0,) if seconds is None else (0, -signal.SIGKILL)), f"the process ended with {code}"
    return [json.loads(line) for line in said.splitlines() if line.endswith(b"}")]


class ToldEngine(WatchedEngine):
    """Prints what each call takes over and samples again."""

    def start(self, request, policy, version, *, pinned, on_delta):  # type: ignore[no-untyped-def]
        before = self.resampled
        call = super().start(request, policy, version, pinned=pinned, on_delta=on_delta)
        line = {"resampled": self.resampled - before, "recovered": request.sampled_before}
        os.write(1, json.dumps(line).encode() + b"\n")
        return call


async def process_main(directory: Path) -> None:
    """Run, or go on with, the episodes of a journal."""
    journal = SqliteJournal(directory)
    known = tokens_on_disk(journal.turn_log("0"), [spec.episode_id for spec in journal.unfinished()])
    engine = ToldEngine({policy: PolicyVersion(policy, 0, 0) for policy in POLICIES}, known)
    life = Life(journal=journal, engine=engine, run_seed=0)
    await life.worker.drain()
    if life.failure.done():
        life.failure.result()
    await journal.close()


async def read_turns(directory: Path, episodes: Collection[str]) -> dict[str, Turn]:
    """The turns of episodes that have all ended."""
    journal = SqliteJournal(directory)
    log = journal.turn_log("0")
    turns: dict[str, Turn] = {}
    for episode in episodes:
        for entry in log.read(episode, 0):
            body = entry.decode()
            if isinstance(body, TurnEntry):
                turns[request_name(entry)] = what_was_said(body)
        assert not log.read_partials(episode, 0), f"{episode} left partials"
    assert not journal.unfinished(), "an episode has not ended"
    await journal.close()
    return turns


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer schedules and kills")
    parser.add_argument("--process", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.process is not None:
        asyncio.run(process_main(arguments.process))
        return
    report = Report("durability_schedules", quick=arguments.quick, repeats=1, compared_with="an undisturbed run")
    report.figures.update(figures(arguments.quick))
    report.print()


if __name__ == "__main__":
    main()
