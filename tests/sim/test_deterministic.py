"""Deterministic runs: what every step trains on is the same after kills at any moment, down to the order."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import EngineError
from agentrl.core.ids import random_stream
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.journal.port import StepRow
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for
from tests.sim.test_several_policies import Propose, Solve
from tests.support.crash_oracle import finished
from tests.support.crash_scenario import CrashScenario, Machine
from tests.support.sim_disk import SimulatedCrashError

pytestmark = pytest.mark.sim
STEPS = 7

Trained = dict[tuple[str, int], list[tuple[str, float, float]]]
"""By policy and step: units in order, with their rewards and advantages."""


def guess(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """What is said depends on the step of the weights that say it."""
    draw = random_stream(request.seed, version.step)
    return [*b"......"[: draw.randrange(6)], ord(str(draw.randrange(10))), STOP_TOKEN]


def trained_by(run: SmallRun) -> Trained:
    found: Trained = {}
    for batch in run.trainer.batches:
        units = found.setdefault((batch.policy, batch.step_id), [])
        for unit in batch.units:
            units += [(unit.episode_id, credit.reward, credit.advantage) for credit in unit.credits]
    return found


def config(max_staleness: int) -> Any:
    policy = {"step_size": 8, "max_staleness": max_staleness, "lora": {"rank": 2}}
    return config_for(steps=STEPS, deterministic=True, policies={"guesser": policy})


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_kills_change_nothing_that_is_trained(simulated_loop: SeededSimulation, max_staleness: int) -> None:
    async def undisturbed() -> Trained:
        run = SmallRun(config=config(max_staleness), script=guess)
        await run.run()
        return trained_by(run)

    expected = simulate(undisturbed, seed=0)
    assert len(expected) == STEPS
    moments = itertools.count(1.1, 0.37)

    async def killed() -> int:
        run = SmallRun(config=config(max_staleness), script=guess)
        seen: Trained = {}
        lives = 0
        moment = next(moments)
        while True:
            lives += 1
            await run.stop_after(moment if lives < 4 else 1e6)
            seen.update(trained_by(run))
            if not run.orchestrator.outcome.interrupted:
                break
            journal = run.journal.after_crash()
            board = run.orchestrator.board
            lineage = board.current("guesser").lineage
            on_disk = [row.version for row in journal.on_disk() if isinstance(row, StepRow)]
            newest = max((version.step for version in on_disk if board.survives(version)), default=0)
            at = {"guesser": board.at("guesser", max(0, newest - lives % 3))}  # the manifest is some steps old
            run = SmallRun(
                config=run.config,
                script=guess,
                journal=journal,
                resumed_at=at,
                lineage=lineage + 1,
            )
        assert seen == expected
        return lives

    assert max(simulated_loop.run(killed)) > 1


def test_two_policies_and_child_episodes_repeat_under_any_schedule(simulated_loop: SeededSimulation) -> None:
    sizes = {"proposer": 2, "solver": 16}
    policies = {name: {"step_size": size, "max_staleness": 1, "lora": {"rank": 2}} for name, size in sizes.items()}

    async def main() -> Trained:
        run = SmallRun(
            config=config_for(steps=4, deterministic=True, policies=policies), environment=Propose, script=guess
        )
        await run.run()
        return trained_by(run)

    outcomes = simulated_loop.run(main)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert {policy for policy, _ in outcomes[0]} == set(sizes)


class ProposeRarely(Propose):
    """Most of what is proposed is refused, so that whole waves give the solver nothing."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposer = ctx.agent("proposer")
        await proposer.act(agentrl.user("propose"))
        if proposer.gate(ctx.rng.random() < 0.3, penalty=-1.0):
            solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=4))
            proposer.reward(agentrl.learnability(solved))


def test_a_wave_that_gives_a_policy_nothing_is_a_step_of_nothing(simulated_loop: SeededSimulation) -> None:
    sizes = {"proposer": 2, "solver": 8}
    policies = {name: {"step_size": size, "max_staleness": 1, "lora": {"rank": 2}} for name, size in sizes.items()}
    changes = {"deterministic": True, "policies": policies, "credit": {"group_size": 2}, "steps": 6}

    async def main() -> Trained:
        run = SmallRun(config=config_for(**changes), environment=ProposeRarely, script=guess)
        await run.run()
        return trained_by(run)

    outcomes = simulated_loop.run(main)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    steps = [len(units) for (policy, _), units in sorted(outcomes[0].items()) if policy == "solver"]
    assert len(steps) == 6
    assert 0 in steps
    assert max(steps) > 0


class DiesAfterSteps(CrashScenario):
    """Each process dies when its engine is given the version of a step; an engine refuses versions without files."""

    dies_at = 7
    lives = 3

    async def serves(self, machine: Machine, weights: WeightsRef) -> None:
        if not machine.disk.files(Path(weights.path)):
            raise EngineError(f"the files of {weights.version} are missing")
        if machine.life < self.lives and weights.version.step == self.dies_at:
            machine.disk.crash()


@pytest.mark.parametrize("every", [4, 0])
def test_every_resume_finds_the_adapters_that_its_batches_are_pinned_to(every: int) -> None:
    scenario = DiesAfterSteps(
        Guess,
        tasks=TASKS,
        script=guess,
        changes={
            "steps": 9,
            "deterministic": True,
            "policies": {"guesser": {"step_size": 4, "lora": {"rank": 2}}},
            "checkpoint": {"every": 4, "versions": 2},
        },
    )
    machine = scenario.new_machine()
    for life in range(scenario.lives + 1):
        ended = scenario.run(machine, seed=life)
        if ended is None:
            break
        assert isinstance(ended, SimulatedCrashError), f"life {life}: {ended!r}"
        machine = machine.after_crash("kill")
        scenario.config = scenario.config.model_copy(
            update={"checkpoint": scenario.config.checkpoint.model_copy(update={"every": every})}
        )
    assert life == scenario.lives
    assert finished(machine, steps=9, trainable=scenario.trainable).violations == ()
