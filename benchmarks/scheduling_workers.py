"""What workers in processes of their own cost, and what crosses to them. A part of `benchmarks.scheduling`.

The episodes of `benchmarks.overhead` (four turns, a tool call in each), with a scripted engine in a process of its own
that answers at once: played by the run's process, and by two workers. CPU seconds are those of all processes, and of
the run's own, after the first steps: neither start-up nor anything but the machinery is in them.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.run_parts import make_workers
from agentrl.cluster import worker_wire
from agentrl.core.clock import SystemClock
from agentrl.core.records import PolicyVersion, StepReport
from agentrl.engines.process import ChildProgram, LocalPlacement
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.testing.recording_trainer import RecordingTrainer
from benchmarks.overhead import MODEL, TASKS, TURNS, Arithmetic, Silent, run_config
from benchmarks.processes import ProcessTree
from tests.support.frames import bodies

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig
    from agentrl.core.ports import Observer
    from agentrl.orchestrator.loop import Orchestrator

WARM = 4
"""Steps before anything is measured."""
START = {"policy": PolicyVersion("policy", 0, 0)}


def tool_call() -> list[int]:
    """Tokens of a turn that calls the tool."""
    chat_format = TemplateChatFormat.load(MODEL)
    text = '<tool_call>{"name":"calculate","arguments":{"a":12,"op":"+","b":7}}</tool_call>'
    return [*chat_format.encode(text), chat_format.stop_token_ids[0]]


def tool_caller(versions: Mapping[str, PolicyVersion]) -> ScriptedEngine:
    """Calls the tool in every turn, at once."""
    call = tool_call()
    return ScriptedEngine(lambda *_: call, versions=versions)


class ForgettingTrainer(RecordingTrainer):
    """Keeps nothing of a step, as a run's process does whose trainer is elsewhere."""

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        report = await super().optim_step(policy, step_id)
        self.batches.clear()
        self._trained[policy].clear()
        return report


class Listening(LocalPlacement):
    """Counts the bytes of each frame, as they cross."""

    def __init__(self, log: Path) -> None:
        super().__init__(log)
        self.frames: list[tuple[object, int]] = []
        """What was said, and in how many bytes."""

    async def start(self, program: Any) -> Any:
        child: Any = await super().start(program)
        frames, reader, writer = self.frames, child.reader, child.writer

        class Reader:
            head = True

            async def readexactly(self, size: int) -> bytes:
                data: bytes = await reader.readexactly(size)
                if not self.head:
                    frames.append((worker_wire.FROM_WORKER.decode(data), 4 + size))
                self.head = not self.head
                return data

        class Writer:
            def write(self, data: bytes) -> None:
                frames.extend((worker_wire.TO_WORKER.decode(body), 4 + len(body)) for body in bodies(data))
                writer.write(data)

            def close(self) -> None:
                writer.close()

        child.reader, child.writer = Reader(), Writer()
        return child


class Spent(NamedTuple):
    """CPU seconds per turn."""

    all_processes: float
    run_process: float


class FromStep(Silent):
    """Reads the clocks after a step and at the end."""

    def __init__(self, tree: ProcessTree, steps: int) -> None:
        self._tree = tree
        self._steps = steps
        self.readings: list[Spent] = []

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Reads."""
        if step in (WARM, self._steps):
            self.readings.append(Spent(self._tree.cpu_seconds(), time.process_time()))


@contextlib.asynccontextmanager
async def wired(
    directory: Path,
    config: RunConfig,
    program: ChildProgram,
    observer: Observer,
    placement: LocalPlacement | None = None,
) -> AsyncIterator[Orchestrator]:
    """The loop of a run in `directory`, ready to start; its worker processes are there, and placed by `placement`."""
    async with contextlib.AsyncExitStack() as stack:
        journal = SqliteJournal(directory)
        stack.push_async_callback(journal.close)
        engine = await ProcessEngine(program, START).ready()
        stack.push_async_callback(engine.close)
        log = directory / "workers.log"
        pool = make_workers(config, Arithmetic, engine, directory, lambda line: None, log, SystemClock())
        if pool is not None:
            stack.push_async_callback(pool.close)
            pool.placements = pool.placements if placement is None else [placement] * len(pool.placements)
        trainer = ForgettingTrainer(["policy"])
        served = ServedVersions(engine)
        await served.make_current(await trainer.publish("policy", START["policy"]))
        parts = RunParts(
            served=served,
            trainer=trainer,
            chat_format=TemplateChatFormat.load(MODEL),
            store=journal,
            observer=observer,
            clock=SystemClock(),
            tasks=TASKS,
            workers=pool,
        )
        yield assemble_orchestrator(config, Arithmetic, parts)


async def train_once(directory: Path, workers: int, steps: int, listening: Listening | None = None) -> Spent:
    """A whole run."""
    config = run_config(steps, in_flight=256).model_copy(update={"workers": workers})
    observer = FromStep(ProcessTree(), steps)
    program = ChildProgram("benchmarks.scheduling_workers:tool_caller", {})
    async with wired(directory, config, program, observer, listening) as orchestrator:
        await orchestrator.run()
    turns = (steps - WARM) * 64 * TURNS
    before, after = observer.readings
    return Spent(*((late - early) / turns for early, late in zip(before, after, strict=True)))


def event_bytes(listening: Listening) -> tuple[float, int]:
    """Mean bytes of an episode's events in both directions, its task left out, and the largest event."""
    given = (
        worker_wire.WorkerSetup,
        worker_wire.EngineAddresses,
        worker_wire.StartEpisode,
        worker_wire.SpawnChildEpisodes,
        worker_wire.WorkerHeartbeat,
    )
    sizes = [size for said, size in listening.frames if not isinstance(said, given)]
    ended = sum(isinstance(said, worker_wire.EpisodeEnded) for said, _ in listening.frames)
    return sum(sizes) / ended, max(sizes)


def figures(quick: bool) -> dict[str, float | None]:
    """CPU with two workers over that with none, of all processes and of the run's own; bytes of events."""
    repeats, steps = (1, 12) if quick else (5, 36)
    one, two = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            one.append(asyncio.run(train_once(Path(scratch) / f"one{repeat}", 1, steps)))
            two.append(asyncio.run(train_once(Path(scratch) / f"two{repeat}", 2, steps)))
        listening = Listening(Path(scratch) / "log")
        asyncio.run(train_once(Path(scratch) / "bytes", 2, WARM + 1, listening))
    mean, largest = event_bytes(listening)
    for name, spent in (("one process", one), ("two workers", two)):
        print(
            f"{name}: CPU µs per turn {[round(each.all_processes * 1e6) for each in spent]}, of these the run's own "
            f"process {[round(each.run_process * 1e6) for each in spent]}"
        )
    print(f"events: {mean:.0f} bytes per episode, the largest {largest}")
    ratios = sorted(b.all_processes / a.all_processes for a, b in zip(one, two, strict=True))
    own = sorted(b.run_process / a.run_process for a, b in zip(one, two, strict=True))
    return {
        "event_bytes": float(largest),
        "workers_cpu_ratio": ratios[len(ratios) // 2],
        "workers_run_cpu_ratio": own[len(own) // 2],
    }
