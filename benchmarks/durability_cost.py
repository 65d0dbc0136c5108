"""What durability costs: the journal beside none, a resume of many episodes in flight, memory over a long run.

`journal_cost_zero_latency`: the share of CPU seconds that SQLite takes where engine, tools and trainer cost nothing,
against a store that forgets everything; medians of interleaved pairs.
`resume_10k_cpu_s`: CPU seconds from opening the journal of 10,000 episodes in flight, of 20 calls each, until every one
has asked the engine for its next turn.
`soak_bytes_per_episode`: growth of the resident set per episode over a run, its first tenth left out.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.recovery import read_resume_state
from agentrl.core.clock import SystemClock
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, StepReport
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.testing.recording_trainer import RecordingTrainer
from benchmarks import overhead

CALLS = 20
PAIRS = 7


class ForgetfulTrainer(RecordingTrainer):
    """Keeps no batches, so that what grows is the run's."""

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        report = await super().optim_step(policy, step_id)
        self.batches.clear()
        return report


def figures(quick: bool) -> dict[str, float | None]:
    """The three figures."""
    with tempfile.TemporaryDirectory() as scratch:
        return {
            "journal_cost_zero_latency": _journal_cost(Path(scratch), steps=8 if quick else 48),
            "resume_10k_cpu_s": None if quick else _resume(Path(scratch) / "resume", 10_000),
            "soak_bytes_per_episode": None if quick else asyncio.run(_soak(Path(scratch) / "soak", 100_000)),
        }


def _journal_cost(scratch: Path, *, steps: int) -> float:
    shares = []
    asyncio.run(_run(SqliteJournal(scratch / "warm"), 4))
    for pair in range(PAIRS):
        kept = asyncio.run(_run(SqliteJournal(scratch / f"run{pair}"), steps))
        shares.append((kept - asyncio.run(_run(MemoryJournal(keeps=False), steps))) / kept)
    quartiles = statistics.quantiles(shares, n=4)
    print(
        f"cost: journal's share at zero latency {quartiles[1]:.3f} ({quartiles[0]:.3f}-{quartiles[2]:.3f})", flush=True
    )
    return statistics.median(shares)


async def _run(store: Any, steps: int) -> float:
    """CPU seconds of a run."""
    orchestrator, _ = await _wired(store, overhead.run_config(steps, in_flight=256))
    gc.collect()
    before = time.process_time()
    await orchestrator.run()
    await store.close()
    return time.process_time() - before


async def _wired(store: Any, config: Any, *, hold: bool = False, trainer: RecordingTrainer | None = None) -> Any:
    chat_format = TemplateChatFormat.load(overhead.MODEL)
    text = '<tool_call>{"name":"calculate","arguments":{"a":12,"op":"+","b":7}}</tool_call>'
    call = [*chat_format.encode(text), chat_format.stop_token_ids[0]]

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
        return call

    engine = Counting(script, versions={"policy": PolicyVersion("policy", 0, 0)}, hold=hold)
    trainer = trainer or RecordingTrainer(["policy"])
    resume_state = (
        read_resume_state(store, {}, group_size=config.credit.group_size) if isinstance(store, SqliteJournal) else None
    )
    served = ServedVersions(engine)
    await served.make_current(await trainer.publish("policy", PolicyVersion("policy", 0, 0)))
    parts = RunParts(
        served=served,
        trainer=trainer,
        chat_format=chat_format,
        store=store,
        observer=overhead.Silent(),
        clock=SystemClock(),
        tasks=overhead.TASKS,
        **({} if resume_state is None else {"resume_state": resume_state}),
    )
    return assemble_orchestrator(config, overhead.Arithmetic, parts), engine


class Counting(ScriptedEngine):
    """Counts the calls it was asked for."""

    asked = 0

    def start(self, *arguments: Any, **options: Any) -> Any:
        self.asked += 1
        return super().start(*arguments, **options)


def _resume(directory: Path, episodes: int) -> float:
    config = overhead.run_config(episodes // 64 + 1, in_flight=episodes, staleness=episodes // 64)
    sampling = config.sampling.model_copy(update={"max_turns": CALLS})
    config = config.model_copy(update={"sampling": sampling})
    asyncio.run(_fill(directory, config, episodes))
    gc.collect()
    return asyncio.run(_resumed(directory, config, episodes))


async def _fill(directory: Path, config: Any, episodes: int) -> None:
    """Play every episode to `CALLS` calls, half of them tools, and leave them in flight."""
    store = SqliteJournal(directory)
    orchestrator, engine = await _wired(store, config, hold=True)
    running = asyncio.get_running_loop().create_task(orchestrator.run())
    for turn in range(CALLS // 2 + 1):
        while engine.asked < episodes * (turn + 1):
            await asyncio.sleep(0.05)
        if turn < CALLS // 2:
            engine.release_held()
            engine.hold_calls()
    await store.flush()
    running.cancel()
    await asyncio.wait({running})
    await store.close()


async def _resumed(directory: Path, config: Any, episodes: int) -> float:
    before = time.process_time()
    store = SqliteJournal(directory)
    orchestrator, engine = await _wired(store, config, hold=True)
    running = asyncio.get_running_loop().create_task(orchestrator.run())
    while engine.asked < episodes:
        await asyncio.sleep(0.05)
    spent = time.process_time() - before
    running.cancel()
    await asyncio.wait({running})
    await store.close()
    print(f"cost: {episodes} episodes resumed in {spent:.1f} CPU s", flush=True)
    return spent


async def _soak(directory: Path, episodes: int) -> float:
    """Least-squares slope of the resident set over episodes, in bytes."""
    steps = episodes // 64
    store = SqliteJournal(directory)
    orchestrator, _ = await _wired(
        store, overhead.run_config(steps, in_flight=256), trainer=ForgetfulTrainer(["policy"])
    )
    points: list[tuple[float, float]] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.5)
            ledger = orchestrator.buffer.ledger
            if ledger.trained > episodes / 10:
                points.append((float(ledger.trained), overhead.resident_kb() * 1000))

    descriptors = overhead.open_descriptors()
    watching = asyncio.get_running_loop().create_task(watch())
    await orchestrator.run()
    watching.cancel()
    opened = overhead.open_descriptors() - descriptors
    await store.close()
    slope = statistics.linear_regression(*zip(*points, strict=True)).slope
    print(f"cost: {slope:.0f} B per episode over {episodes}; {opened} descriptors more", flush=True)
    return slope
