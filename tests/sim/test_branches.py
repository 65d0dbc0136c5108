"""`ctx.branch` in whole runs: trees are sampled by one version, trained whole and once, and survive a crash."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import Any

import pytest

import agentrl
import agentrl_mcp
from agentrl.core import ids
from agentrl.core.errors import (
    VERSION_GONE,
    CheckFailedError,
    EngineError,
)
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, WeightsRef
from agentrl.engines.router import EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import (
    BranchEntry,
    NondeterministicValueEntry,
    TurnEntry,
)
from agentrl.journal.port import EpisodeEnd, StepRow, UnitDropped
from agentrl.orchestrator.host import DispatchingHost
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, SmallRun, config_for
from tests.support import user_functions

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
    names = ("journal", "resumed_at", "lineage", "tasks")
    parts = {name: changes.pop(name) for name in names if name in changes}
    play = changes.pop("script", script)
    settings = {
        "steps": 4,
        "policies": {"guesser": {"step_size": 12, "max_staleness": 2, "lora": {"rank": 1}}},
        "sampling": {"max_tokens": 64, "max_turns": 32},
        **changes,
    }
    return SmallRun(
        environment=environment,
        script=play,
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
    return {span.version[1:] for turn in turns for span in turn.tokens.spans}


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
            assert (header.turns, len(header.trajectories)) == (6, 1)
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
        second = retry_run(journal=journal, resumed_at={"guesser": version})
        await second.run()
        check_trees(second)
        return sum(spec.branched_from is not None for spec in second.past.unfinished)

    assert sum(simulated_loop.run(main)) > 5, "trees were in flight"


def test_a_run_with_an_estimator_over_trees_trains_with_its_credit(simulated_loop: SeededSimulation) -> None:
    formula = f"{FilePath(user_functions.__file__).resolve()}:pieces_by_formula"

    async def main() -> None:
        credits = []
        for advantage in ("leave_one_out", formula):
            run = retry_run(steps=2, credit={"group_size": 4, "turn_credit": "to_go", "advantage": advantage})
            await run.run()
            credits.append({unit.episode_id: unit.credits for batch in run.trainer.batches for unit in batch.units})
        assert any(credit.advantage for own in credits[0].values() for credit in own)
        assert any("~" in name for name in credits[0])
        assert credits[0] == credits[1]

    simulated_loop.run(main, seeds=1)


PROBED_TURNS, PROBES = 3, 2


def test_evaluations_do_not_branch(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = retry_run(steps=1, evaluation={"tasks": 2})
        run.held_out = TASKS[:2]
        await run.run()
        evaluated = [entry.decode() for entry in run.journal.turn_log("0").read("v0", 0)]
        assert NondeterministicValueEntry("branches_left", 0) in evaluated
        assert not any(isinstance(body, BranchEntry) for body in evaluated)

    simulated_loop.run(main)


class Restarted(Retry):
    """Main episodes whose first attempt fails after they branched."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        await agent.act(agentrl.user("first"))
        number = await ctx.branch(2)
        turn = await agent.act(agentrl.user("second"))
        if not number and len(turn.text) % 3 == 0:
            raise RuntimeError("the episode fails")
        agent.reward(float(len(turn.text) % 7))


def test_a_restarted_main_episode_loses_its_branches(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = retry_run(Restarted, steps=2)
        await run.run()
        ended = ends(run)
        attempts = {name: header.attempt for name, (_, header) in ended.items() if header.committed}
        trained = {unit.episode_id for batch in run.trainer.batches for unit in batch.units}
        lost = {drop.episode_id for drop in run.journal.of_kind(UnitDropped) if drop.reason == "tree_lost"}
        for name, (spec, header) in ended.items():
            if spec.fork is not None and header.committed and name in trained | lost:
                assert (attempts.get(spec.fork.episode_id) == spec.fork.attempt) == (name in trained)
        return len(lost)

    assert min(simulated_loop.run(main, seeds=3)) > 0


class Pinned(Retry):
    """Branches with a resource that cannot be copied."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        tally = ctx.resource(Tally, level="pinned")
        await agent.act(agentrl.user("first"))
        await tally.call("add", 1)
        await ctx.branch(1)


class Served(Retry):
    """Tools whose server remembers earlier calls."""

    mcp_servers = (agentrl_mcp.MCPServer(command=["server"], stateful=True),)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.branch(1)


class TooMany(Retry):
    """More branches than declared."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.branch(1)
        await ctx.branch(2)


class TooEarly(Retry):
    """Branches before any turn."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.branch(1)


class Gathered(Retry):
    """Branches inside a coroutine of `gather`."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.gather(ctx.branch(1))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Pinned, "cannot copy resource r.1, which is pinned to its process"),
        (Served, "cannot copy server, which is pinned to its process.*Stateful MCP servers"),
        (TooMany, "declares branches = 2, but ctx.branch asked for 2 after 1 before"),
        (TooEarly, "before any turn; raise credit.group_size"),
        (Gathered, "inside ctx.gather"),
    ],
)
def test_branches_that_cannot_be_exact_are_refused_by_name(
    simulated_loop: SeededSimulation, environment: type[agentrl.Environment], message: str
) -> None:
    async def main() -> None:
        run = retry_run(environment, steps=1)
        with pytest.raises(CheckFailedError, match=message):
            await run.run()

    simulated_loop.run(main, seeds=1)


def test_a_version_that_is_gone_costs_the_episode(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = retry_run(steps=2)

        def during(orchestrator: Orchestrator) -> None:
            versions, pin = orchestrator.versions, orchestrator.versions.pin

            async def lose_some(holder: str, weights: WeightsRef) -> None:
                if holder.startswith("tree of e") and int(holder.split()[-1][1:].partition(".")[0]) % 5 == 0:
                    raise EngineError("its files were deleted")
                await pin(holder, weights)

            versions.pin = lose_some  # type: ignore[method-assign]

        run.during = during
        await run.run()
        reasons = Counter(header.drop_reason for _, header in ends(run).values())
        check_trees(run)
        return reasons[VERSION_GONE]

    assert min(simulated_loop.run(main, seeds=2)) > 0


class Hesitant(Retry):
    """Waits before it branches, so that the version of its newest turn is often no longer the current one."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        for number in range(6):
            await agent.act(agentrl.user(f"turn {number}"))
            if number == 2 and ctx.branches_left() == 2:
                await ctx.sleep(ctx.rng.random() * 2)
                agent.reward(float(await ctx.branch(2)), name="branch")
            await ctx.sleep(ctx.rng.random() * 0.3)
        agent.reward(float(ctx.rng.random()))


def has_lost_files(version: PolicyVersion) -> bool:
    return (version.lineage + version.step) % 3 == 1


class LosesFiles(ScriptedEngine):
    """Loads versions slowly; the files of some are gone as soon as they are not current."""

    loads, refusals = 0, 0

    async def load(self, weights: WeightsRef) -> None:
        self.loads += 1
        await asyncio.sleep(random.Random(self.loads).random() * 0.5)
        if has_lost_files(weights.version) and not self._request.is_current(weights):
            LosesFiles.refusals += 1
            raise EngineError(f"weights {weights.version} refused: its files are gone")


def router_over_slow_replicas(*arguments: Any, **options: Any) -> EngineRouter:
    return EngineRouter([LosesFiles(*arguments, **options) for _ in range(2)])


@pytest.mark.parametrize(
    "engine_class", [pytest.param(LosesFiles, marks=pytest.mark.exhaustive), router_over_slow_replicas]
)
def test_no_branch_is_dropped_for_a_version_whose_files_exist(
    simulated_loop: SeededSimulation, engine_class: Callable[..., Engine]
) -> None:
    moments = itertools.count(1.4, 0.37)

    def run(**parts: Any) -> SmallRun:
        evaluated = {"evaluation": {"tasks": 2, "every": 1}}
        run = retry_run(Hesitant, steps=4, **evaluated, **parts)
        run.engine_class, run.held_out = engine_class, TASKS[:2]
        return run

    async def main() -> int:
        runs = [run()]
        for lineage in (1, 2):
            journal = await runs[-1].cut_after(next(moments) % 5)
            steps = [row.version for row in journal.of_kind(StepRow)]
            version = max(steps, default=PolicyVersion("guesser", 0, 0))
            parts = {"journal": journal, "resumed_at": {"guesser": version}}
            runs.append(run(**parts, lineage=lineage))
        await runs[-1].run()
        ended = runs[-1].journal.of_kind(EpisodeEnd)
        for end in ended:
            if end.header.drop_reason == VERSION_GONE:
                (name,) = set(re.findall(r"guesser@(\d+)\.(\d+), which", end.detail))
                assert has_lost_files(PolicyVersion("guesser", *map(int, name))), end.detail
                assert end.header.purpose == "train"
        return sum(end.spec.fork is not None for end in ended)

    branches = sum(simulated_loop.run(main, seeds=10))
    assert branches > 100
    assert LosesFiles.refusals > 20


def test_a_late_call_of_a_superseded_attempt_leases_nothing(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = retry_run(steps=1)
        await run.run()
        dispatcher = run.orchestrator.dispatcher
        branch = next(spec for spec, _ in ends(run).values() if spec.branched_from is not None)
        assert branch.fork is not None
        main_spec, _ = ends(run)[branch.fork.episode_id]
        host = DispatchingHost(dispatcher)
        await host.branch(main_spec, branch.fork, 2, {"guesser": PolicyVersion("guesser", 0, 0)})
        assert dispatcher.leases is not None
        assert not dispatcher.leases.leased

    simulated_loop.run(main, seeds=1)


def test_a_branching_program_runs_again_from_every_entry(always_replay: Callable[..., None]) -> None:
    always_replay(Retry, tasks=TASKS[:1], episodes=1)


def test_a_deterministic_run_trains_the_same_trees_after_a_kill(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(2.5, 0.6)

    def trained(*runs: SmallRun) -> list[Any]:
        batches = {batch.step_id: batch for run in runs for batch in run.trainer.batches}
        return [[(unit.episode_id, unit.credits) for unit in batches[step].units] for step in sorted(batches)]

    def new_run(**resumed: Any) -> SmallRun:
        return retry_run(steps=3, deterministic=True, **resumed)

    async def main() -> list[Any]:
        first = new_run()
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        second = new_run(journal=journal, resumed_at={"guesser": version})
        await second.run()
        return trained(first, second)

    first, *others = simulated_loop.run(main)
    assert len(first) == 3
    assert all(other == first for other in others)
