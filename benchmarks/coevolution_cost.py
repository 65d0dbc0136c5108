"""What more policies cost, and what they must not touch; a part of `benchmarks.coevolution`.

`two_adapters_cost`, `eight_policies_cost`: CPU seconds of a run (engine, trainer, journal in one process, its start
left out) whose seat is held by two or eight adapters, group by group, over one in which one adapter holds it: the same
episodes, turns and step sizes, and a step of each adapter where there was one; medians of ratios of interleaved
triples. Staleness is the default, so that the engine is as full in all of them: at staleness 0 a policy whose step came
first plays alone until the next one has stepped, in passes of few rows. Tasks have prompts of their own: one that all
groups began with would be computed once for each policy.
`frozen_changed_bytes`: bytes of a frozen adapter's files, and of what the engine answers for it, that a run changed.

`python -m benchmarks.coevolution_cost [--quick]`
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import agentrl
from agentrl.app.engines import make_engine
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.core.ports import Engine
from agentrl.core.records import PolicyVersion
from benchmarks.report import Report

UNITS, QUICK_UNITS = 1024, 128
"""Of a round of steps, all policies together. A quick run shows what a step costs that has hardly anything to do."""
MODEL = "agentrl.environments:calculator/model"
PROBE = np.arange(5, 29, dtype=np.int32)


class Sums(agentrl.Environment):
    """One seat, two turns, paid for digits."""

    seats = ("player",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        player = ctx.agent("player")
        turns = [await player.act(agentrl.user(f"{ctx.task.id} + {number} =")) for number in (34, 56)]
        player.reward(sum(map(str.isdigit, "".join(turn.text for turn in turns))) / 32)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{number}", data={}) for number in range(64)]


def config_of(
    policies: int, directory: Path, *, steps: int, units: int = QUICK_UNITS, **more: Any
) -> agentrl.RunConfig:
    """A run whose groups are shared out among so many adapters."""
    adapter = {"lora": {"rank": 8}, "step_size": units // policies, "learning_rate": 1e-4}
    names = [f"p{number}" for number in range(policies)]
    values: dict[str, Any] = {
        "name": f"{policies}",
        "directory": str(directory),
        "steps": steps,
        "environment": {"id": "sums"},
        "model": {"path": MODEL},
        "policies": dict.fromkeys(names, adapter),
        "seats": {"player": names},
        "credit": {"group_size": 16},
        "max_in_flight": 128,
        "engine": {"slots": 64, "max_context": 128},
        "sampling": {"max_tokens": 16},
        "trainer": {"loss": {"normalizer": 32}},
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 0},
    }
    return agentrl.RunConfig.model_validate(values | more)


class Stopwatch:
    """CPU seconds from the first episode to the end of the last step: all that is sampled is trained in between."""

    def __init__(self, steps: int) -> None:
        self._left = steps
        self.begun = self.ended = 0.0

    def begin(self) -> None:
        """An episode begins."""
        self.begun = self.begun or time.process_time()

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Count it."""
        self._left -= 1
        if not self._left:
            self.ended = time.process_time()

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """There are none."""


def cpu_seconds(policies: int, *, steps: int, units: int) -> float:
    """Of a run, but for its start."""
    watch = Stopwatch(policies * steps)

    class Timed(Sums):
        """Starts the watch."""

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            watch.begin()
            await super().run(ctx)

    with tempfile.TemporaryDirectory() as scratch:
        config = config_of(policies, Path(scratch), steps=steps, units=units)
        agentrl.train(config, environment=Timed, quiet=True, observers=[watch])
    return watch.ended - watch.begun


def frozen_changed_bytes(*, steps: int) -> int:
    """What a run changes of a frozen adapter that plays in it: its files, and the engine's answers bit for bit."""
    answers: list[bytes] = []

    class Asked:
        """Asks the engine for the frozen policy's log-probabilities when it starts and before it is closed."""

        def __init__(self, engine: Engine) -> None:
            self._engine = engine

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        async def close(self) -> None:
            answers.append((await self._engine.score("frozen", PROBE)).tobytes())
            await self._engine.close()

        async def serve(self, current: Any, pinned: Any = ()) -> None:
            await self._engine.serve(current, pinned)
            if not answers and any(weights.version.policy == "frozen" for weights in current):
                answers.append((await self._engine.score("frozen", PROBE)).tobytes())

    async def engine(*arguments: Any) -> Any:
        return Asked(await make_engine(*arguments))

    with tempfile.TemporaryDirectory() as scratch:
        first = agentrl.train(config_of(1, Path(scratch), steps=1), environment=Sums, quiet=True)
        directory = first.policies["p0"].resolve()
        before = {file.name: file.read_bytes() for file in directory.iterdir()}
        config = config_of(2, Path(scratch), steps=steps, name="second")
        frozen = {**config.model_dump()["policies"], "frozen": {"kind": "frozen", "path": str(directory)}}
        seats = {"player": [*config.policies, "frozen"]}
        config = agentrl.RunConfig.model_validate(config.model_dump() | {"policies": frozen, "seats": seats})
        asyncio.run(run_training(config, Sums, quiet=True, factories=RunFactories(engine=engine)))
        after = {file.name: file.read_bytes() for file in directory.iterdir()}
    pairs = [(before[name], after.get(name, b"")) for name in before] + [(answers[0], answers[-1])]
    return sum(
        sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other)) for one, other in pairs
    )


def figures(quick: bool) -> dict[str, float | None]:
    """The part's figures."""
    steps, repeats, units = (2, 1, QUICK_UNITS) if quick else (4, 7, UNITS)
    seconds: dict[int, list[float]] = {1: [], 2: [], 8: []}
    cpu_seconds(1, steps=1, units=16)  # what comes first pays for what is loaded once
    for repeat in range(repeats):
        for policies in (1, 2, 8) if repeat % 2 == 0 else (8, 2, 1):
            seconds[policies].append(cpu_seconds(policies, steps=steps, units=units))
    for policies, found in seconds.items():
        print(f"{policies} adapters: {' '.join(f'{value:.2f}' for value in found)} CPU s for {steps} rounds of steps")
    ratios = {n: [many / one for many, one in zip(seconds[n], seconds[1], strict=True)] for n in (2, 8)}
    for policies, found in ratios.items():
        print(f"{policies} over 1: {min(found):.3f} … {max(found):.3f}")
    return {
        "two_adapters_cost": statistics.median(ratios[2]),
        "eight_policies_cost": statistics.median(ratios[8]),
        "frozen_changed_bytes": float(frozen_changed_bytes(steps=2 if quick else 6)),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    report = Report(
        "coevolution_cost", quick=quick, repeats=1 if quick else 7, compared_with="one adapter in all seats"
    )
    report.figures |= figures(quick)
    report.print()


if __name__ == "__main__":
    main()
