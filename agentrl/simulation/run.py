"""A run in virtual time: production's loop around emulated engines and a trainer that only takes its time.

`simulate_run` ends it after so many steps and says what was busy, how far behind tokens were, how long episodes took,
and whether long and short ones were trained alike. What it measures leaves the first steps out, in which the pipeline
fills.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.app.assemble import Parts, assemble
from agentrl.core.clock import LoopClock
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.fleet import ReplicatedEngine
from agentrl.rollout.worker import AsyncioWorker
from agentrl.simulation.account import Account, CountingEngine, ObservedJournal
from agentrl.simulation.measured import Measured, measure
from agentrl.simulation.program import LengthFormat, Tasks, length_of, programs
from agentrl.simulation.recording_trainer import RecordingTrainer
from agentrl.simulation.virtual_time import SimLoop

if TYPE_CHECKING:
    from agentrl.core.ports import Engine
    from agentrl.core.training_records import TrainBatch
    from agentrl.orchestrator.loop import Orchestrator
    from agentrl.rollout.kv_budget import KVBudget
    from agentrl.simulation.plan import Plan

LOOKS = 24
"""How often during a step the simulation looks at what holds admission back, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is simulated, and for how long."""

    plan: Plan
    steps: int = 40
    """Of the first policy that learns."""
    skipped: int = 12
    """First steps that are not measured."""
    is_closed: bool = False
    """Nothing is admitted beyond the steps, and all is trained: what is measured is how long that takes."""
    alter: Callable[[Orchestrator], None] = lambda orchestrator: None
    """Puts other parts in production's place, to compare with."""


def simulate_run(scenario: Scenario) -> Measured:
    """Run a scenario to its last step.

    Raises:
        ConfigError: what production refuses.
    """
    loop = SimLoop(scenario.plan.seed, max_steps=1 << 40, trace=0)
    began = time.process_time()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, _no_collections():
        account = runner.run(_run(scenario))
    loop.raise_failure()
    return measure(scenario.plan, account, scenario.skipped, time.process_time() - began)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Within, cyclic garbage is left: 6 KiB an episode, and to look for it takes a fifth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


async def _run(scenario: Scenario) -> Account:
    plan, clock = scenario.plan, LoopClock()
    config = plan.config(scenario.steps if scenario.is_closed else 1 << 20)
    account = Account(plan, plan.grain)
    journal = ObservedJournal(account, None if scenario.is_closed else scenario.steps)
    versions = {name: PolicyVersion(name, 0, 0) for name in config.policies}
    trainer = RecordingTrainer(
        list(config.trained),
        clock=clock,
        step_seconds=step_seconds(plan, account),
        publish_seconds=plan.trainer.publish_seconds,
    )
    weights: dict[str, WeightsRef] = {name: await trainer.publish(name, versions[name]) for name in config.trained}
    parts = Parts(
        engine=_engine(plan, account, versions),
        trainer=trainer,
        chat_format=LengthFormat(),
        store=journal,
        observer=_Nobody(),
        clock=clock,
        tasks=Tasks(plan.seed),
        weights=weights,
        versions=versions,
    )
    journal.orchestrator = orchestrator = assemble(config, programs(plan), parts)
    worker = orchestrator.dispatcher.worker
    assert isinstance(worker, AsyncioWorker)
    for engine in account.engines:
        engine.is_waited_for = lambda: worker.kv_budget.waiting > 0
    scenario.alter(orchestrator)
    looks = asyncio.get_running_loop().create_task(_look(plan, account, orchestrator, worker.kv_budget))
    await orchestrator.run()
    looks.cancel()
    return account


def _engine(plan: Plan, account: Account, versions: Mapping[str, PolicyVersion]) -> Engine:
    grain, rates = account.grain, plan.rates
    for _ in range(plan.engine.replicas):
        account.engines.append(
            CountingEngine(
                account,
                length_of,
                versions=versions,
                slots=plan.engine.slots,
                rate=lambda count: rates(count) / grain,
                kv_tokens=None if plan.kv_tokens is None else plan.kv_tokens // grain,
                prefill_rate=plan.prefill_rate / grain,
            )
        )
    return account.engines[0] if len(account.engines) == 1 else ReplicatedEngine(account.engines)


def step_seconds(plan: Plan, account: Account) -> Callable[[TrainBatch], float]:
    """How long a step takes."""
    rate = plan.train_rate()

    def seconds(batch: TrainBatch) -> float:
        of_unit = plan.unit_seconds(batch.policy)
        if of_unit is not None:
            return len(batch.units) * of_unit
        return sum(account.contexts[unit.episode_id] for unit in batch.units) * account.grain / rate

    return seconds


async def _look(plan: Plan, account: Account, orchestrator: Orchestrator, kv_budget: KVBudget) -> None:
    """Note now and then what holds admission back, and how full the engine has been so far."""
    every = plan.least_step_seconds() / LOOKS
    while True:
        account.look(orchestrator.scheduler.why_not(orchestrator.demand()), no_room=kv_budget.waiting > 0)
        await asyncio.sleep(every)


class _Nobody:
    """An observer that looks away."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Nothing."""

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing."""
