"""How many episodes one run holds in flight, and what each costs the run's own process. A part of `benchmarks.cluster`.

The episodes of `benchmarks.overhead` (four turns, a tool call in each), played by eight worker processes. Their engine,
in a process of its own, answers calls in random order, and none while fewer wait than are to be in flight: so many
episodes are always in the middle of a turn, whatever the machine's load, and as one ends the next begins. Measured are
the CPU seconds of the run's own process, with all its threads, per episode that was admitted, committed and trained,
once as many were trained as are in flight. Memory is what all processes but the engine's grew by.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.engines.process import ChildProgram
from agentrl.engines.scripted import ScriptedEngine
from benchmarks.overhead import Silent, resident_kb, run_config
from benchmarks.scheduling_workers import tool_call, wired

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest, NewTokensCallback
    from agentrl.core.records import PolicyVersion

WORKERS = 8
SIZES = (1_000, 10_000, 100_000)
"""Episodes in flight."""
FLOWING = 256
"""Episodes at most that are in no engine call."""
STEP = 64
WINDOW = 10
"""Steps between two readings."""
READINGS = 30
STEPS = 1_000_000
"""More than any run takes."""


class HoldingEngine(ScriptedEngine):
    """Keeps `held` calls in flight: each further one has one of them answered, drawn at random."""

    def __init__(self, held: int, versions: Mapping[str, PolicyVersion]) -> None:
        call = tool_call()
        super().__init__(lambda *_: call, versions=versions, hold=True)
        self._most = held
        self._answerable: list[Any] = []
        self._drawn = random.Random(0)

    def start(
        self,
        request: GenerateRequest,
        policy: str,
        version: PolicyVersion,
        *,
        pinned: bool,
        on_delta: NewTokensCallback | None,
    ) -> Any:
        waiting = self._answerable
        call: Any = super().start(request, policy, version, pinned=pinned, on_delta=on_delta)
        waiting.append(call)
        while len(waiting) > self._most:
            drawn = self._drawn.randrange(len(waiting))
            waiting[drawn], waiting[-1] = waiting[-1], waiting[drawn]
            answered = waiting.pop()
            answered.said = len(answered.tokens)
            if not answered.future.done():
                answered.future.set_result(None)
        return call


class Reading(NamedTuple):
    """Counters of the run at one moment."""

    cpu_s: float
    """CPU seconds of the run's process."""
    in_flight: float
    trained: float


class FromSteadyState(Silent):
    """Reads the run's clock every `WINDOW` steps, once as many episodes were trained as are in flight."""

    def __init__(self, episodes: int) -> None:
        self._first = episodes // STEP + 1
        self._last = self._first + READINGS * WINDOW
        self.stop: Callable[[], None] = lambda: None
        """Called at the last step, before which admission must not end."""
        self.readings: list[Reading] = []
        self.memory_kb = 0.0
        """Resident kilobytes of the run's process and its workers, at the last step."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Read."""
        if step % (self._last // 10) == 0:
            print(f"  step {step:,} of {self._last:,}", flush=True)
        if step >= self._first and (step - self._first) % WINDOW == 0:
            self.readings.append(
                Reading(time.process_time(), metrics["episodes/in_flight"], metrics["episodes/trained"])
            )
        if step == self._last:
            self.memory_kb = resident_kb() + sum(map(resident_kb, worker_processes()))
            self.stop()


def worker_processes() -> list[int]:
    """Process ids of this process's episode workers."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in children if b"agentrl.app.worker_server" in Path(f"/proc/{pid}/cmdline").read_bytes()]


class Cost(NamedTuple):
    """Cost of an episode in a run with a given number in flight."""

    cpu_ms: float
    """CPU milliseconds of the run's process per episode."""
    memory_kb: float


async def hold(directory: Path, episodes: int) -> Cost:
    """Play with so many episodes in flight."""
    observer = FromSteadyState(episodes)
    config = run_config(STEPS, in_flight=episodes, staleness=4 * episodes // STEP)
    program = ChildProgram("benchmarks.cluster_scale:HoldingEngine", {"held": episodes - FLOWING})
    async with wired(directory, config.model_copy(update={"workers": WORKERS}), program, observer) as orchestrator:
        observer.stop = orchestrator.stop
        await orchestrator.run()
    assert all(reading.in_flight >= episodes - FLOWING for reading in observer.readings), observer.readings
    windows = [cpu_ms(*pair) for pair in zip(observer.readings, observer.readings[1:], strict=False)]
    print(f"{episodes:,} in flight: CPU µs per episode {[round(1000 * window) for window in windows]}", flush=True)
    # Of all windows together: steps come in bursts, so that a window trains other episodes than those it plays.
    return Cost(cpu_ms(observer.readings[0], observer.readings[-1]), observer.memory_kb)


def cpu_ms(first: Reading, last: Reading) -> float:
    """CPU milliseconds of the run's process per episode between two readings."""
    return 1000 * (last.cpu_s - first.cpu_s) / (last.trained - first.trained)


def figures(quick: bool) -> dict[str, float | None]:
    """CPU of the run's process per episode by episodes in flight, its growth, and memory."""
    found: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as scratch:
        costs = {
            episodes: asyncio.run(hold(Path(scratch) / str(episodes), episodes))
            for episodes in (SIZES[:1] if quick else SIZES)
        }
    first, last = costs[SIZES[0]], costs.get(SIZES[-1])
    for episodes, cost in costs.items():
        found[f"orchestrator_cpu_ms_per_episode_{episodes // 1000}k"] = cost.cpu_ms
    if last is not None:
        found["orchestrator_cpu_growth"] = last.cpu_ms / first.cpu_ms
        found["kb_per_episode_100k"] = (last.memory_kb - first.memory_kb) / (SIZES[-1] - SIZES[0])
    return found
