"""`ctx.branch` in whole runs: trees are sampled by one version, trained whole and once, and survive a crash."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

import agentrl
from agentrl.app.recovery import read_resume_state
from agentrl.core import ids
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion
from agentrl.journal.entries import BranchEntry, NondeterministicValueEntry, TurnEntry
from agentrl.journal.port import EpisodeEnd, StepRow
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, SmallRun, config_for

pytestmark = pytest.mark.sim


class Tally:
    """A resource that is replayed."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


class Retry(agentrl.Environment):
    """Six turns; two branches after the third."""

    seats = ("guesser",)
    branches = 2

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        tally = ctx.resource(Tally, level="replay")
        total = 0
        for number in range(6):
            turn = await agent.act(agentrl.user(f"turn {number}"))
            total = await tally.call("add", len(turn.text))
            if number == 2 and ctx.branches_left() == 2:
                agent.reward(float(await ctx.branch(2)), name="branch")
            await ctx.sleep(ctx.rng.random() * 0.3)
        agent.reward(float(total % 7))


def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [*b"." * (2 + request.seed % 38), STOP_TOKEN]


def retry_run(environment: type[agentrl.Environment] = Retry, **changes: Any) -> SmallRun:
    parts = {
        name: changes.pop(name) for name in ("journal", "resume_state", "resumed_at", "lineage") if name in changes
    }
    settings = {
        "steps": 4,
        "policies": {"guesser": {"step_size": 12, "max_staleness": 2, "lora": {"rank": 1}}},
        "sampling": {"max_tokens": 64, "max_turns": 32},
        **changes,
    }
    return SmallRun(
        environment=environment,
        script=script,
        config=config_for(**settings),
        engine_options={"seconds_per_token": 0.02},
        trainer_options={"step_seconds": 0.1, "publish_seconds": 0.05},
        **parts,
    )


def ends(run: SmallRun) -> dict[str, tuple[EpisodeSpec, EpisodeHeader]]:
    return {end.header.episode_id: (end.spec, end.header) for end in run.journal.of_kind(EpisodeEnd)}


def bodies(run: SmallRun, header: EpisodeHeader) -> list[Any]:
    return [entry.decode() for entry in run.journal.turn_log("0").read(header.episode_id, header.attempt)]


def versions_of(turns: Iterable[TurnEntry]) -> set[tuple[int, int]]:
    return {(span.lineage, span.step) for turn in turns for span in turn.spans}


def check_trees(run: SmallRun) -> int:
    """Check the trees of a run; returns the number of trees that were trained."""
    ended = ends(run)
    steps = {unit.episode_id: batch.step_id for batch in run.trainer.batches for unit in batch.units}
    trained = Counter(unit.episode_id for batch in run.trainer.batches for unit in batch.units)
    assert not trained or max(trained.values()) == 1
    for name, (spec, header) in ended.items():
        if not header.committed:
            continue
        entries = bodies(run, header)
        turns = [body for body in entries if isinstance(body, TurnEntry)]
        calls = [body for body in entries if isinstance(body, BranchEntry)]
        if spec.branched_from is not None:
            main_spec, main = ended[spec.branched_from]
            assert not calls
            assert dict(header.trajectories[0].named_rewards)["branch"] == int(name[-1])
            assert [turn.turn for turn in turns] == [3, 4, 5]
            assert (spec.group_id, spec.group_size) == (main_spec.group_id, main_spec.group_size)
            assert (header.turns, len(header.trajectories)) == (3, 1)
            if main.committed and spec.fork is not None and main.attempt == spec.fork.attempt:
                main_turns = [body for body in bodies(run, main) if isinstance(body, TurnEntry)]
                after = versions_of([*main_turns[3:], *turns])
                assert after == versions_of(main_turns[2:3]) or len(versions_of(main_turns[2:3])) > 1
        else:
            assert len(turns) == 6
            assert [len(call.children) for call in calls] == [2]
    trees: dict[str, set[int]] = {}
    for name, step in steps.items():
        trees.setdefault(ids.main_episode_id(name), set()).add(step)
    assert all(len(of_tree) == 1 for of_tree in trees.values()), "no tree is cut"
    return len(trees)


def test_trees_are_trained_whole_under_one_version(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = retry_run()
        await run.run()
        units = Counter("~" in unit.episode_id for batch in run.trainer.batches for unit in batch.units)
        assert units[True] == 2 * units[False]
        assert run.mean_lag("guesser") <= 2
        leases = run.orchestrator.dispatcher.leases
        assert leases is not None
        assert not leases.leased
        return check_trees(run)

    assert min(simulated_loop.run(main)) >= 4 * 4


def test_trees_survive_a_crash(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(1.5, 0.6)

    async def main() -> int:
        first = retry_run()
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        state = read_resume_state(journal, {"guesser": version}, group_size=4)
        second = retry_run(journal=journal, resume_state=state, resumed_at={"guesser": version})
        await second.run()
        check_trees(second)
        return sum(spec.branched_from is not None for spec in state.unfinished)

    assert sum(simulated_loop.run(main)) > 5, "trees were in flight"


def test_evaluations_do_not_branch(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = retry_run(steps=1, evaluation={"tasks": 2})
        run.held_out = TASKS[:2]
        await run.run()
        evaluated = [entry.decode() for entry in run.journal.turn_log("0").read("v0", 0)]
        assert NondeterministicValueEntry("branches_left", 0) in evaluated
        assert not any(isinstance(body, BranchEntry) for body in evaluated)

    simulated_loop.run(main)
