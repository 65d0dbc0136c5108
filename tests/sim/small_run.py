"""A whole run in virtual time: scripted engine, recording trainer, journal in memory, a guessing game."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import agentrl
from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.app.plan import resolve
from agentrl.app.policies import pinned_policy_step_lags
from agentrl.app.recovery import (
    serve_opponents_and_pins,
    serve_versions_of_trees,
    start_opponent_pools,
)
from agentrl.config.policies import OpponentPoolPolicy
from agentrl.config.run import RunConfig
from agentrl.core.clock import LoopClock
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import EpisodeSpec, PolicyVersion, Task
from agentrl.credit.estimators import REWARD_ESTIMATORS, make_advantage_estimator
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import VersionPublication
from agentrl.orchestrator import loop
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.orchestrator.loop import Orchestrator, RunOutcome
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.support.crash_scenario import with_staleness
from tests.support.recording_trainer import RecordingTrainer


class Guess(agentrl.Environment):
    """Guess a digit in up to three turns; thinking takes time."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        message = agentrl.user("Guess a digit.")
        for _ in range(3):
            turn = await guesser.act(message)
            await ctx.sleep(ctx.rng.random())
            if turn.text.strip(".") == ctx.task.data["digit"]:
                guesser.reward(1.0)
                return
            message = agentrl.user("no")
        guesser.reward(0.0)


class Ask(Guess):
    """Two children guess for their parent, which takes its time before it asks for them."""

    fan_out: ClassVar[dict[str, int]] = {"Guess": 2}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        for _ in range(2):
            await guesser.act(agentrl.user("Think."))
        children = await ctx.gather(*ctx.spawn(Guess, dict(ctx.task.data), n=2))
        await guesser.act(agentrl.user("And?"))
        guesser.reward(sum(child.reward or 0.0 for child in children))


TASKS = [Task(id=f"digit-{digit}", data={"digit": str(digit)}) for digit in range(10)]


def guess(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """A digit that depends on the request alone, after some thought."""
    return [*b"......"[: request.seed % 7], ord(str(request.seed % 10)), STOP_TOKEN]


def config_for(**changes: Any) -> RunConfig:
    """A small configuration; `max_staleness`, by default 1, `step_size` and `steps` as keywords, sections as
    mappings."""
    policy = {"step_size": changes.pop("step_size", 8), "max_staleness": changes.pop("max_staleness", 1)}
    values: dict[str, Any] = {
        "steps": 4,
        "environment": {"id": "unused"},
        "model": {"path": "unused"},
        "policies": {"guesser": policy},
        "credit": {"group_size": 4},
        "trainer": {"loss": {"normalizer": 64}},
        "checkpoint": {"every": 0, "versions": 0},
        "evaluation": {"tasks": 0},
        "max_in_flight": 64,
        "stop_seconds": 3600.0,  # a slow stop must not end the process of the tests
    }
    return RunConfig.model_validate(with_staleness({**values, **changes}))


@dataclass
class Seen:
    """Observer that keeps what it is told."""

    steps: list[tuple[str, int, dict[str, float]]] = field(default_factory=list)
    evaluations: list[dict[str, dict[str, float]]] = field(default_factory=list)
    evaluated: list[int] = field(default_factory=list)
    """Largest step of the versions of each evaluation."""
    evaluated_steps: list[dict[str, int]] = field(default_factory=list)
    """Step of each policy's version in each evaluation."""

    def scores(self) -> list[dict[str, dict[str, float]]]:
        """Evaluations without how long they took, which depends on what goes on beside them."""
        timed = {"evaluation/seconds", "evaluation/engine_busy_share"}
        return [
            {policy: {name: values[name] for name in values.keys() - timed} for policy, values in each.items()}
            for each in self.evaluations
        ]

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self.steps.append((policy, step, dict(metrics)))

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        self.evaluations.append({policy: dict(values) for policy, values in metrics.items()})
        self.evaluated.append(max(version.step for version in versions.values()))
        self.evaluated_steps.append({policy: version.step for policy, version in versions.items()})


@dataclass(kw_only=True)
class SmallRun:
    """A run about to happen; its parts can be looked at afterwards."""

    config: RunConfig = field(default_factory=config_for)
    environment: type[agentrl.Environment] = Guess
    script: Callable[[GenerateRequest, str, PolicyVersion], list[int]] = guess
    engine_class: Callable[..., Engine] = ScriptedEngine
    engine_options: dict[str, Any] = field(default_factory=lambda: {"seconds_per_token": 0.05})
    trainer_class: Callable[..., RecordingTrainer] = RecordingTrainer
    trainer_options: dict[str, Any] = field(default_factory=lambda: {"step_seconds": 0.7, "publish_seconds": 0.1})
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    tasks: agentrl.TaskSource = field(default_factory=lambda: list(TASKS))
    held_out: list[Task] = field(default_factory=list)
    splits: list[HeldOutSplit] = field(default_factory=list)
    """In place of `held_out`, where there are several."""
    during: Callable[[Orchestrator], None] | None = None
    resumed_at: dict[str, PolicyVersion] = field(default_factory=dict)
    """The manifest's versions, where the run goes on from a checkpoint."""
    drawn_from: dict[str, tuple[PolicyVersion, ...]] = field(default_factory=dict)
    """The manifest's pools of opponents."""
    refusal: Callable[[EpisodeSpec], str] = lambda spec: ""
    """Why an episode whose task only the journal names cannot be played."""
    compares_in_step: bool = False
    """Whether steps take whole groups."""
    lineage: int = 1
    """Of a run that goes on."""
    seen: Seen = field(default_factory=Seen)
    past: PastRun = field(init=False)
    trainer: RecordingTrainer = field(init=False)
    orchestrator: Orchestrator = field(init=False)

    async def stop_after(self, seconds: float) -> None:
        """Run for so long, then die: nothing drains, nothing is flushed."""
        self.during = lambda orchestrator: asyncio.get_running_loop().call_later(seconds, orchestrator.stop)
        drain, loop.DRAIN_S = loop.DRAIN_S, 0.0
        try:
            await self.run()
        finally:
            loop.DRAIN_S = drain

    async def cut_after(self, seconds: float) -> MemoryJournal:
        """Run for so long; what a crash then leaves of the journal, the entries of turns included."""
        await self.stop_after(seconds)
        await self.journal.turn_log("0").flush()
        return self.journal.after_crash()

    async def run(self) -> RunOutcome:
        """Assemble and run to the end."""
        plan = resolve(self.config, self.environment)
        self.past = PastRun(self.journal, self.resumed_at, group_size=self.config.credit.group_size)
        policies = list(self.config.policies)
        engine = self.engine_class(
            self.script, versions={name: PolicyVersion(name, 0, 0) for name in policies}, **self.engine_options
        )
        trainable = list(self.config.trained)
        steps = {name: version.step for name, version in self.resumed_at.items()}
        self.trainer = self.trainer_class(trainable, clock=LoopClock(), steps=steps, **self.trainer_options)
        versions = {
            name: self.resumed_at[name]._replace(lineage=self.lineage)
            if name in self.resumed_at
            else PolicyVersion(name, 0, 0)
            for name in trainable
        }
        weights = {name: await self.trainer.publish(name, version) for name, version in versions.items()}
        served = ServedVersions(
            engine, batches=pinned_policy_step_lags(self.config.trained, deterministic=self.config.deterministic)
        )
        await serve_versions_of_trees(
            plan.trained, served, self.journal, self.past, deterministic=self.config.deterministic
        )
        older = await serve_opponents_and_pins(plan, served, self.journal, self.resumed_at, self.drawn_from)
        for name, published in weights.items():
            self.journal.record(VersionPublication(published, self.resumed_at.get(name)))
            await served.make_current(published)
        await self.journal.flush()
        pools = self.config.of_kind(OpponentPoolPolicy)
        opponents = await start_opponent_pools(pools, served, older, self.journal.lines())
        parts = RunParts(
            served=served,
            trainer=self.trainer,
            chat_format=PlainChatFormat(),
            store=self.journal,
            observer=self.seen,
            clock=LoopClock(),
            tasks=self.tasks,
            held_out=self.splits or [HeldOutSplit("held_out", self.held_out)],
            opponents=opponents,
            versions=versions,
            past=self.past,
            refusal=self.refusal,
            compares_in_step=self.compares_in_step,
            estimator=make_advantage_estimator(advantage.name, advantage.options)
            if (advantage := self.config.credit.advantage).name not in REWARD_ESTIMATORS
            else None,
        )
        self.orchestrator = assemble_orchestrator(plan, parts)
        if self.during is not None:
            self.during(self.orchestrator)
        outcome = await self.orchestrator.run()
        self.orchestrator.buffer.ledger.check()
        return outcome

    def mean_lag(self, policy: str) -> float:
        """Over all units of the policy."""
        steps = [values for name, _, values in self.seen.steps if name == policy]
        units = sum(values["step/units"] for values in steps)
        return sum(values["staleness/mean"] * values["step/units"] for values in steps) / units
