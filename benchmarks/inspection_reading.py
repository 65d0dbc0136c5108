"""How fast the commands read a run of 100,000 episodes of 10 turns, each as a process of its own.

`first_screen_s`: `episode list` from start to end; `filter_s`: the query of `--where 'reward < 0.2 and stop_reason =
max_turns'`, 50 lines and their number, in a process that has started; `search_s`: the same for `--match`, once its
index is built; `rss_mb`: the most memory any of these processes took. Medians of 5.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

from agentrl.core.ids import random_stream
from agentrl.core.records import EpisodeDataLocation, EpisodeHeader, EpisodeSpec, PolicyVersion, Task
from agentrl.journal import control_rows
from agentrl.journal.control_rows import row_checksum
from agentrl.journal.entries import (
    BeginEntry,
    JournalEntry,
    RewardEntry,
    TurnEntry,
    TurnVersionSpan,
    encode_body,
    entry_checksum,
    episode_digest,
)
from agentrl.journal.store import SqliteJournal
from tests.support.builders import make_episode_header, make_spec

EPISODES, TURNS, REPEATS = 100_000, 10, 5
SAMPLED = 16
"""Tokens of a turn."""
QUICK_EPISODES = 2_000
WORDS = [*"abcdefgh", "looked", "red", "green", "blue", "small", "box", "ball", "key", "door", "opened", "took"]
RARE = "walrus"
IDS = range(3, 30_000)
LOGPROBS = [-((place / 1000) ** 4) for place in range(1500)]
QUERY = """
import json, resource, sys, time
from agentrl.inspection.reader import RunReader
from agentrl.inspection.search import episodes_with_words
run, where, match = sys.argv[1:]
reader = RunReader(run)
started = time.perf_counter()
among = episodes_with_words(reader, match) if match else None
lines = reader.episodes(where, among=among)
total = reader.count(where, among=among)
seconds = time.perf_counter() - started
print(json.dumps([seconds, total, len(lines), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def figures(quick: bool) -> dict[str, float | None]:
    count = QUICK_EPISODES if quick else EPISODES
    with tempfile.TemporaryDirectory(prefix="agentrl-inspection-") as directory:
        run = Path(directory) / "large"
        started = time.perf_counter()
        write_large_run(run, count)
        print(f"  wrote {count} episodes of {TURNS} turns in {time.perf_counter() - started:.0f} s", flush=True)
        first = [screen(run) for _ in range(REPEATS)]
        filtered = [ask(run, "reward < 0.2 and stop_reason = max_turns", "") for _ in range(REPEATS)]
        built = ask(run, "", RARE)
        searched = [ask(run, "", RARE) for _ in range(REPEATS)] + [ask(run, "", "red") for _ in range(REPEATS)]
        print(f"  built the index in {built[0]:.0f} s; {RARE}: {searched[0][1]}, red: {searched[-1][1]} episodes")
    memory = max(answer[3] for answer in [*filtered, *searched])
    return {
        "first_screen_s": statistics.median(first),
        "filter_s": statistics.median(answer[0] for answer in filtered),
        "search_s": max(statistics.median(a[0] for a in part) for part in (searched[:REPEATS], searched[REPEATS:])),
        "rss_mb": max(memory, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024),
    }


def screen(run: Path) -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "agentrl.cli", "episode", "list", str(run)]
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def ask(run: Path, where: str, match: str) -> tuple[float, int, int, float]:
    command = [sys.executable, "-c", QUERY, str(run), where, match]
    answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds, total, lines, memory = json.loads(answer)
    assert lines == min(total, 50) > 0, answer
    return seconds, total, lines, memory


# --- a large run ------------------------------------------------------------------------------------------------------


def write_large_run(run: Path, count: int, sampled: int = SAMPLED) -> None:
    """Straight into the tables of a journal that the real one has made: hours of training in minutes."""
    import asyncio

    async def make() -> None:
        journal = SqliteJournal(run / "journal", info={"name": "large", "config": {}})
        journal.turn_log("0")
        await journal.close()

    asyncio.run(make())
    import sqlite3

    log = sqlite3.connect(run / "journal" / "control.db", isolation_level=None)
    turns = sqlite3.connect(run / "journal" / "turns-0.db", isolation_level=None)
    for connection in (log, turns):
        connection.execute("PRAGMA synchronous = OFF")
        connection.execute("BEGIN")
    for number in range(count):
        spec, header, entries = episode(number, sampled)
        turns.executemany(
            "INSERT INTO entries (episode, attempt, call, asked, body, checksum) VALUES (?, ?, ?, ?, ?, ?)",
            [
                (
                    e.episode_id,
                    0,
                    e.call_id,
                    e.request_hash,
                    e.body,
                    entry_checksum(e.episode_id, 0, e.call_id, e.request_hash, e.body),
                )
                for e in entries
            ],
        )
        rows = [
            ("admissions", control_rows.encode_admission_row(spec, 1e9 + number)),
            (
                "episodes",
                control_rows.encode_episode_row(spec, header, episode_digest(entries), {}, "", 1e9 + number + 60, None),
            ),
            *(("trajectories", row) for row in control_rows.encode_trajectory_rows(header)),
        ]
        for table, row in rows:
            values = (*row, row_checksum(table, row))
            log.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)
    for connection in (log, turns):
        connection.execute("COMMIT")
        connection.close()


def episode(number: int, sampled: int) -> tuple[EpisodeSpec, EpisodeHeader, list[JournalEntry]]:
    draw = random_stream("large", number)
    spec = make_spec(
        f"e{number}",
        environment=("calculator", "frozen_lake")[number % 2],
        task=Task(id=f"t{number // 8}", data={"question": " ".join(draw.choices(WORDS, k=20))}),
        seed=number,
        seats={"solver": "solver"},
        group_id=f"g{number // 8}",
        group_size=8,
    )
    entries = [
        JournalEntry(spec.episode_id, 0, f"r#{at}", b"", body) for at, body in enumerate(bodies(spec, draw, sampled))
    ]
    reward, stopped = round(draw.random(), 3), ("completed", "max_turns")[draw.random() < 0.1]
    header = make_episode_header(
        spec,
        reward=reward,
        turns=TURNS,
        tokens=sampled * TURNS,
        version=PolicyVersion("solver", 0, number // 1000),
        seconds=1.0 + draw.random(),
        stop_reason=stopped,  # type: ignore[arg-type]
        location=EpisodeDataLocation("turns-0.db", len(entries)),
    )
    return spec, header, entries


def bodies(spec: EpisodeSpec, draw: object, sampled: int) -> Iterator[bytes]:
    choices = draw.choices  # type: ignore[attr-defined]
    yield encode_body(
        BeginEntry(
            spec.environment,
            "0",
            spec.task.id,
            dict(spec.task.data),
            spec.seed,
            {"solver": "solver"},
            "train",
            spec.group_id,
            8,
            None,
        )
    )
    for turn in range(TURNS):
        rare = f" {RARE}" if spec.seed % 1000 == 0 and turn == 3 else ""
        yield encode_body(
            TurnEntry(
                seat="solver", index=0, policy="solver", row=0, turn=turn, context_ids=b"\1\0\0\0" * 24,
                token_ids=array("i", choices(IDS, k=sampled)).tobytes(),
                logprobs=array("f", choices(LOGPROBS, k=sampled)).tobytes(), finish_reason="stop",
                spans=(TurnVersionSpan(0, sampled, 0, 1),), text=" ".join(choices(WORDS, k=12)) + rare,
                messages=({"role": "user", "content": " ".join(choices(WORDS, k=12))},), temperature=1.0,
                seconds=0.1, started=1e9 + spec.seed + turn,
            )
        )  # fmt: skip
    yield encode_body(RewardEntry("solver", 0, 1.0, None))
