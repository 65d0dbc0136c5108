"""The part `routing` of `benchmarks.parallel`: recorded experts on their way from a worker to a rank.

Turns like those of a mixture of 48 layers with 8 experts per token: 512 tokens of context and 512 sampled ones, and the
experts at each of these positions. One worker sends them to the real receiver on the run's host, whose CPU seconds are
counted; then a rank's reader reads the episodes.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from agentrl.cluster.journal_stream import JournalReceiver, StreamedTurnLog
from agentrl.core.clock import SystemClock
from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrajectoryCredit, Unit, VersionSpan
from agentrl.core.tokens import ExpertRouting, Tokens
from agentrl.journal.entries import BeginEntry, JournalEntry, RewardEntry, TurnEntry, encode_body
from agentrl.journal.routing import RoutingReader, RoutingStore, move_routing
from agentrl.journal.rows import make_row_reader
from agentrl.journal.store import SqliteJournal
from benchmarks.processes import ProcessTree

LAYERS, TOP_K, TURN_TOKENS, TURNS = 48, 8, 512, 8
MEMORY = Path("/dev/shm")
"""The disk of the worker's host: on a file system with the journal, a sync of one writes the files of the other."""
BATCH = 8
"""Number of episodes that are sent together."""
CASES = {"": 0, "_routed": 128, "_routed_512": 512, "_control": 128}
"""Number of experts by case; 0: none are recorded. In the control, entries hold their routing."""


def figures(quick: bool) -> dict[str, float | None]:
    """Measure all figures of the part."""
    with tempfile.TemporaryDirectory() as directory:
        return asyncio.run(_figures(Path(directory), episodes=48 if quick else 128))


async def _figures(directory: Path, episodes: int) -> dict[str, float | None]:
    speeds = {
        name: await _speeds(directory, experts, episodes, inline=name == "_control") for name, experts in CASES.items()
    }
    figures = {
        f"{part}_tokens_per_cpu_s{name}": each[part]
        for name, each in speeds.items()
        if name != "_control"
        for part in ("worker", "receiver", "reader")
    }
    plain = speeds[""]["receiver"]
    return figures | {
        "receiver_routing_ratio": max(plain / speeds[name]["receiver"] for name in ("_routed", "_routed_512")),
        "receiver_routing_control": plain / speeds["_control"]["receiver"],
    }


async def _speeds(directory: Path, experts: int, episodes: int, *, inline: bool) -> Mapping[str, float]:
    """Return the tokens per CPU second of each part, for one kind of turns; `inline` leaves routing in the entries."""
    run, disk = Path(tempfile.mkdtemp(dir=directory)), Path(tempfile.mkdtemp(dir=MEMORY))
    routing = RoutingStore(disk / "routing", "10.0.0.2")
    journal = SqliteJournal(run / "journal")
    receiver = JournalReceiver(
        run / "journal", "127.0.0.1", log=run / "receiver.log", clock=SystemClock(), tell=lambda line: None
    )
    log = await StreamedTurnLog.open(await receiver.grant(0), 0, routing)
    process = ProcessTree(receiver.supervisor.process_id)
    turns = [_turn(number, experts) for number in range(TURNS)]
    tokens = 2 * TURN_TOKENS * TURNS * episodes
    cpu, here = process.cpu_seconds(), time.process_time()
    for start in range(0, episodes, BATCH):
        entries = [list(_entries(f"e{number}", turns, log, inline=inline)) for number in range(start, start + BATCH)]
        for episode in entries:  # all at once, so that the receiver's pauses do not depend on the worker's
            for entry in episode:
                log.append(entry)
            await log.flush()
    sent, received = time.process_time() - here, process.cpu_seconds() - cpu
    await log.close()
    await receiver.close()
    await journal.close()
    units = [
        Unit(
            episode_id=f"e{episode}",
            attempt=0,
            policy="policy",
            location=EpisodeDataLocation(log.name, TURNS + 2),
            credits=(TrajectoryCredit("solver", 0, 1.0, 0.5, 0.5),),
        )
        for episode in range(episodes)
    ]
    here = time.process_time()
    for unit in units:
        rows = make_row_reader(run / "journal")([unit])
        ((trajectory,),) = RoutingReader(routing.read).attach([unit], rows)
        assert len(trajectory.rows[0]) == 2 * TURN_TOKENS * TURNS
        assert (trajectory.rows[0].experts is None) == (not experts)
    read = time.process_time() - here
    for place in (run, disk):
        shutil.rmtree(place)
    print(f"  {experts} experts: worker {sent:.2f}, receiver {received:.2f}, reader {read:.2f} CPU s", flush=True)
    return {"worker": tokens / sent, "receiver": tokens / received, "reader": tokens / read}


def _entries(episode: str, turns: Sequence[TurnEntry], log: StreamedTurnLog, *, inline: bool) -> Iterator[JournalEntry]:
    """Yield an episode's entries as a worker makes them."""
    begin = BeginEntry("routed", "", "t", {}, 0, {"solver": "policy"}, "train", "g", 1, None)
    moved = (turn if inline else move_routing(turn, log, episode, 0) for turn in turns)
    for number, body in enumerate((begin, *moved, RewardEntry("solver", 0, 1.0, None))):
        yield JournalEntry(episode, 0, f"r#{number}" if number else "begin", b"", encode_body(body))


def _turn(number: int, experts: int) -> TurnEntry:
    random, before = np.random.default_rng(number), 2 * TURN_TOKENS * number
    kind = np.min_scalar_type(max(experts - 1, 0))
    routing = random.integers(0, max(experts, 1), (2 * TURN_TOKENS, LAYERS, TOP_K), kind)
    tokens = Tokens(
        token_ids=random.integers(0, 150_000, TURN_TOKENS, np.int32),
        logprobs=random.normal(size=TURN_TOKENS).astype(np.float32),
        spans=(VersionSpan(0, TURN_TOKENS, PolicyVersion("policy", 0, 0)),),
        experts=ExpertRouting(routing, max(before - 1, 0)) if experts else None,
    )
    return TurnEntry(
        seat="solver",
        index=0,
        policy="policy",
        row=0,
        turn=number,
        context_ids=random.integers(0, 150_000, TURN_TOKENS, np.int32).tobytes(),
        tokens=tokens.encode(),
        finish_reason="stop",
        text="x" * (4 * TURN_TOKENS),
        messages=({"role": "user", "content": "x" * (4 * TURN_TOKENS)},),
        temperature=1.0,
        seconds=1.0,
        started=0.0,
        parent_context=before,
    )
