"""What an episode costs where no machine changes it: memory in flight, garbage it leaves, bytes of its end."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from agentrl.cluster.worker_wire import encode_episode_ended
from agentrl.core.ports import PolicyCounts
from agentrl.core.records import PolicyVersion
from benchmarks.overhead import TURNS, run_config, train_once, wire
from tests.support.builders import make_episode_header, make_spec

KB_IN_FLIGHT = 12.0
"""As Python allocates it: 11.8, alone or after other tests. The resident set grows by a tenth more."""
EVENT_BYTES = 256


async def bytes_in_flight(directory: Path, episodes: int) -> int:
    """That episodes held in their second turn have allocated."""
    config = run_config(episodes // 64 + 1, in_flight=episodes, staleness=episodes // 64)
    wired = await wire(directory, config, hold=True)
    gc.collect()
    before, _ = tracemalloc.get_traced_memory()
    running = asyncio.get_running_loop().create_task(wired.orchestrator.run())
    while wired.asked[0] < episodes:
        await asyncio.sleep(0)
    wired.engine.release_held()
    wired.engine.hold_calls()
    while wired.asked[0] < 2 * episodes:
        await asyncio.sleep(0)
    await wired.journal.flush()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    wired.orchestrator.stop()
    running.cancel()
    await asyncio.wait({running})
    await wired.journal.close()
    return after - before


def test_an_episode_in_flight_takes_no_more_memory_than_promised(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        asyncio.run(bytes_in_flight(tmp_path / "warm", 64))  # what a first run alone allocates would be taken off
        fewer = asyncio.run(bytes_in_flight(tmp_path / "fewer", 256))
        more = asyncio.run(bytes_in_flight(tmp_path / "more", 1280))
    finally:
        tracemalloc.stop()
    assert (more - fewer) / 1024 / 1000 <= KB_IN_FLIGHT, "kB per episode; see benchmarks/bounds.toml"


def left_by(directory: Path, steps: int) -> Counter[str]:
    """What a run leaves that only a collection finds, by type."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        asyncio.run(train_once(directory, steps))
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_an_episode_leaves_no_cyclic_garbage(tmp_path: Path) -> None:
    """Else what ended stays until a collection, and collections walk what runs."""
    asyncio.run(train_once(tmp_path / "warm", 1))
    grown = left_by(tmp_path / "three", 3)
    grown.subtract(left_by(tmp_path / "one", 1))
    kept_by_the_run = {
        "EpisodeDataLocation",
        "TrajectoryCredit",
        "Unit",
        "tuple",
        "ReferenceType",
    }  # its batches and weak sets
    of_episodes = {name: n for name, n in grown.items() if n >= 64 and name not in kept_by_the_run}
    assert not of_episodes, f"of 128 episodes: {of_episodes}"


@pytest.mark.parametrize("agents", [1, 2])
def test_the_end_of_an_episode_crosses_in_no_more_bytes_than_promised(agents: int) -> None:
    version = PolicyVersion("policy", 0, 12_345)
    spec = make_spec("e1234567", seats={f"seat{number}": "policy" for number in range(agents)})
    header = make_episode_header(spec, turns=TURNS, tokens=100_000, version=version, seconds=3601.123)
    metrics = {"tool/ok": float(TURNS), "tool/error": 1.0}
    counted = {
        "policy": PolicyCounts(header.turns, {"tool/ok": float(TURNS)})
    }  # another than `metrics`: it travels too
    ended = encode_episode_ended(1_234_567, header, digest=b"d" * 16, metrics=metrics, counts=counted)
    assert len(msgspec.msgpack.encode(ended)) <= EVENT_BYTES
