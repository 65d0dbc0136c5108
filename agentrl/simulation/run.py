"""A run in virtual time: production's loop around an emulated engine and a trainer that only takes its time.

`simulate_run` ends it after so many steps and says what was busy, how far behind tokens were, and whether long and
short episodes were trained alike. What it measures leaves the first steps out, in which the pipeline fills.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

from agentrl.app.assemble import Parts, assemble
from agentrl.config.run import RunConfig
from agentrl.core.clock import LoopClock
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, WeightsRef
from agentrl.rollout.plain_format import PlainFormat
from agentrl.simulation.engine import EmulatedEngine, EmulatedSession, Rate
from agentrl.simulation.journal import BriefJournal
from agentrl.simulation.workload import Propose, Tasks, Workload, length_of
from agentrl.testing.recording_trainer import RecordingTrainer
from agentrl.testing.sim import SimLoop, SimulationError

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest
    from agentrl.journal.port import StepRow
    from agentrl.orchestrator.loop import Orchestrator

PROPOSALS = 4
"""Of a task: episodes of a root group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated."""

    workload: Workload
    slots: int
    rate: Rate
    step_seconds: float
    """Of the trainer."""
    step_size: int = 256
    max_staleness: int = 1
    release: str = "group"
    kv_tokens: int | None = None
    steps: int = 40
    skipped: int = 12
    """First steps that are not measured."""
    is_closed: bool = False
    """Nothing is admitted beyond the steps, and all is trained: what is measured is how long that takes."""
    seed: int = 0
    alter: Callable[[Orchestrator], None] = lambda orchestrator: None
    """Puts other parts in production's place, to compare with."""

    def config(self) -> RunConfig:
        """As production reads it."""
        return RunConfig.model_validate(
            {
                "steps": self.steps if self.is_closed else 1 << 20,
                "seed": self.seed,
                "environment": {"id": "simulated", "tool_timeout_s": 1e12},
                "model": {"path": "simulated"},
                "policies": {
                    "solver": {"step_size": self.step_size, "max_staleness": self.max_staleness},
                    "proposer": {"kind": "frozen"},
                },
                "credit": {"group_size": PROPOSALS, "release": self.release},
                "sampling": {"max_tokens": 1 << 19},
                "checkpoint": {"every": 0, "versions": 0},
                "evaluation": {"tasks": 0},
                "max_in_flight": 1 << 20,
                "episode_timeout_s": 1e12,
            }
        )


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came out."""

    steps_per_bound: float
    """Steps per second over what a rate-bound engine or trainer without any waiting could do."""
    engine_busy: float
    """Share of all slots' time in which they sampled."""
    trainer_busy: float
    token_lag: float
    """Mean staleness of the trained tokens."""
    older: float
    """Share of the trained tokens that were older than `max_staleness`."""
    lag_p99: float
    """Of the trained units: steps taken between admission and training."""
    lag_max: float
    length_ratio: float
    """Mean length of what was trained over that of all that was begun at the same time."""
    waste: float
    """Share of the sampled tokens whose units were dropped."""
    episodes: int
    makespan_over_bound: float | None = None
    """Of a closed run: its time over the least that any schedule needs."""
    step_times: Sequence[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of this simulation, real ones."""


def simulate_run(scenario: Scenario, *, max_steps: int = 1 << 40) -> Measured:
    """Run a scenario to its last step."""
    loop = SimLoop(scenario.seed, max_steps=max_steps)
    began = time.process_time()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        measured = runner.run(_Simulation(scenario).run())
    loop.raise_failure()
    measured.cpu_seconds = time.process_time() - began
    return measured


class _Observed(BriefJournal):
    """Keeps what the measurements need of what the loop records, and stops it after the last step."""

    def __init__(self, steps: int, *, is_open: bool) -> None:
        super().__init__()
        self._steps = steps
        self.is_open = is_open
        self.step = 0
        self.step_times: list[float] = []
        self.admitted: dict[str, int] = {}
        """Of solvers: the step at their admission."""
        self.lengths: dict[str, int] = {}
        """Of committed episodes, in tokens."""
        self.sampled: list[float] = []
        """Seconds of all slots together in which they sampled, at each step."""
        self.engine: EmulatedEngine | None = None
        self.lags: list[list[int]] = []
        """Of each step: of its units, steps between admission and training."""
        self.batches: list[list[str]] = []
        self.dropped_tokens = 0
        self.orchestrator: Orchestrator | None = None

    def admit(self, *specs: EpisodeSpec) -> None:
        """Note the step."""
        for spec in specs:
            self.admitted[spec.episode_id] = self.step

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Note the length.

        Raises:
            SimulationError: an episode was dropped: nothing here can fail.
        """
        if not header.committed:
            raise SimulationError(f"episode {spec.episode_id} was dropped ({header.drop_reason}): {detail}")
        await super().commit_episode(spec, header, digest, metrics, detail)
        self.lengths[spec.episode_id] = header.tokens

    def record_drop(self, episode_id: str, attempt: int, policy: str, reason: str) -> None:
        """Note what was sampled for nothing."""
        self.dropped_tokens += self.lengths[episode_id]

    def record_step(self, row: StepRow) -> None:
        """Note when it was, and what it was fed."""
        units = [unit.episode_id for unit in row.batch.units]
        self.lags.append([self.step - self.admitted[name] for name in units])
        self.batches.append(units)
        self.step = row.version.step
        self.step_times.append(asyncio.get_running_loop().time())
        if self.engine is not None:
            self.engine.busy_seconds()
            self.sampled.append(self.engine.slot_seconds)
        if self.step == self._steps and self.is_open and self.orchestrator is not None:
            self.orchestrator.stop()


class _Engine(EmulatedEngine):
    """Notes which versions sampled an episode."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.spans: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        """By episode, then by step: tokens."""
        self.asked: dict[str, int] = defaultdict(int)
        """By episode, begun or waiting for a slot: tokens it is to sample."""

    def submit(self, session: EmulatedSession, request: GenerateRequest) -> Any:
        """As it is, with a note."""
        call = super().submit(session, request)
        self.asked[episode_of(request)] += call.length
        return call

    def finish(self, call: Any) -> Any:
        """As it is, with a note."""
        completion = super().finish(call)
        by_step = self.spans[episode_of(call.request)]
        for span in completion.spans:
            by_step[span.version.step] += span.stop - span.start
        return completion


def episode_of(request: GenerateRequest) -> str:
    """Whose call it is: calls are named by episode, attempt and call id."""
    return request.request_id.rsplit(".", 2)[0]


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario

    async def run(self) -> Measured:
        scenario, clock = self._scenario, LoopClock()
        config = scenario.config()
        journal = _Observed(scenario.steps, is_open=not scenario.is_closed)
        versions = {name: PolicyVersion(name, 0, 0) for name in config.policies}
        engine = _Engine(
            length_of, versions=versions, slots=scenario.slots, rate=scenario.rate, kv_tokens=scenario.kv_tokens
        )
        trainer = RecordingTrainer(list(config.trained), clock=clock, step_seconds=scenario.step_seconds)
        weights: dict[str, WeightsRef] = {name: await trainer.publish(name, versions[name]) for name in config.trained}
        parts = Parts(
            engine=engine,
            trainer=trainer,
            chat_format=PlainFormat(),
            store=journal,
            observer=_Nobody(),
            clock=clock,
            tasks=Tasks(scenario.workload, seed=scenario.seed),
            weights=weights,
            versions=versions,
        )
        journal.engine = engine
        journal.orchestrator = orchestrator = assemble(config, Propose, parts)
        scenario.alter(orchestrator)
        await orchestrator.run()
        return self._measured(journal, engine)

    def _least_seconds(self, engine: _Engine) -> float:
        """No schedule is faster: all work through all slots and one step, all steps, or the longest of parent and child
        and one step.
        """
        scenario = self._scenario
        longest: dict[str, int] = defaultdict(int)
        for name, tokens in engine.asked.items():
            parent = name.partition("~")[0]
            if name != parent:
                longest[parent] = max(longest[parent], tokens)
        path = max(engine.asked[parent] + tokens for parent, tokens in longest.items())
        work = sum(engine.asked.values()) / (scenario.slots * scenario.rate(scenario.slots))
        return max(
            work + scenario.step_seconds,
            scenario.steps * scenario.step_seconds,
            path / scenario.rate(1) + scenario.step_seconds,
        )

    def _measured(self, journal: _Observed, engine: _Engine) -> Measured:
        scenario, first = self._scenario, self._scenario.skipped
        seconds = journal.step_times[-1] - journal.step_times[first - 1]
        trained = [name for batch in journal.batches[first:] for name in batch]
        lags: list[tuple[int, int]] = []
        for number, batch in enumerate(journal.batches[first:], start=first):
            lags += [(number - step, count) for name in batch for step, count in engine.spans[name].items()]
        tokens = sum(count for _, count in lags)
        units = [lag for step in journal.lags[first:] for lag in step]
        asked = [tokens for name, tokens in engine.asked.items() if "~" in name]
        work = sum(engine.asked.values()) / len(asked)
        bound = min(
            scenario.slots * scenario.rate(scenario.slots) / (work * scenario.step_size), 1 / scenario.step_seconds
        )
        return Measured(
            steps_per_bound=(scenario.steps - first) / seconds / bound,
            engine_busy=(journal.sampled[-1] - journal.sampled[first - 1]) / (scenario.slots * seconds),
            trainer_busy=scenario.step_seconds * (scenario.steps - first) / seconds,
            token_lag=sum(lag * count for lag, count in lags) / tokens,
            older=sum(count for lag, count in lags if lag > scenario.max_staleness) / tokens,
            lag_p99=quantiles(units, n=100)[-1],
            lag_max=max(units),
            length_ratio=fmean(journal.lengths[name] for name in trained) / fmean(asked),
            waste=journal.dropped_tokens / max(engine.sampled, 1.0),
            episodes=len(engine.asked),
            makespan_over_bound=journal.step_times[-1] / self._least_seconds(engine) if scenario.is_closed else None,
            step_times=journal.step_times,
        )


class _Nobody:
    """An observer that looks away."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing."""
