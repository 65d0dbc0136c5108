"""How far ahead a policy that only children feed can be: as far as its `max_staleness`, whatever their parents do."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError
from agentrl.core.records import PolicyVersion, SeatBinding, Task
from agentrl.journal.entries import SpawnEntry
from agentrl.journal.port import Admission, EpisodeEnd
from agentrl.rollout.calls.journal import ReplayOrder
from agentrl.rollout.episode_context import MAX_UNDECLARED
from agentrl.testing.execution import POLICY, Failure, execute_episode, random_policy
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.replay.executions import Stage
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for

pytestmark = pytest.mark.sim


class Solve(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user("solve"))
        await ctx.sleep(ctx.rng.random())
        ctx.agent("solver").reward(float(turn.text.strip(".") < "5"))


class Propose(agentrl.Environment):
    """Thinks for long, is refused one time in four, and has four solvers else."""

    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 4}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposer = ctx.agent("proposer")
        await ctx.sleep(40.0 * ctx.rng.random())
        await proposer.act(agentrl.user("propose"))
        if not proposer.gate(ctx.rng.random() < 0.75, penalty=-1.0):
            return
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=4))
        proposer.reward(agentrl.learnability(solved))


def solving(staleness: int, **proposer: Any) -> dict[str, Any]:
    """Many proposers at once, and a solver that steps on two proposals."""
    steps = {"solver": 5, "proposer": proposer.pop("steps", 5)}
    policies = {"proposer": proposer, "solver": {"step_size": 16, "max_staleness": staleness}}
    return {
        "policies": policies,
        "credit": {"group_size": 2},
        "steps": steps,
        "max_in_flight": 100,
    }


@pytest.mark.parametrize("proposer", [{"kind": "frozen"}, {"step_size": 50, "max_staleness": 4, "steps": 1}])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_slow_proposer_does_not_let_its_solver_lag(
    simulated_loop: SeededSimulation, staleness: int, proposer: dict[str, Any]
) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(**solving(staleness, **proposer)), environment=Propose)
        await run.run()
        assert Counter(batch.policy for batch in run.trainer.batches)["solver"] == 5
        assert run.mean_lag("solver") <= staleness

    simulated_loop.run(main)


class Fails(Guess):
    """Every second attempt."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.rng.random() < 0.5:
            raise OSError("the game is not there")
        await super().run(ctx)


def test_a_step_that_is_short_of_units_leaves_no_credit(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(max_staleness=0, steps=6), environment=Fails)
        await run.run()
        assert min(values["step/units"] for _, _, values in run.seen.steps) < 8
        assert [values["staleness/max"] for _, _, values in run.seen.steps] == [0.0] * 6

    simulated_loop.run(main)


class Refused(Propose):
    """Nothing that is proposed passes."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("propose"))
        ctx.agent("proposer").gate(False, penalty=-1.0)


@pytest.mark.parametrize("proposer", [{"kind": "frozen"}, {"step_size": 64, "steps": 3}])
def test_a_solver_that_nobody_starts_ends_the_run_by_name(proposer: dict[str, Any]) -> None:
    async def main() -> SmallRun:
        run = SmallRun(config=config_for(**solving(1, **proposer)), environment=Refused)
        with pytest.raises(CheckFailedError, match=r"(?s)gave solver nothing to train on.*gate"):
            await run.run()
        return run

    run = simulate(main, seed=0)
    assert 256 <= run.orchestrator.buffer.ledger.admitted < 256 + 3 * 64 + 100


class ProposeToOne(Propose):
    """One attempt at each proposal: it has nothing to be compared with."""

    fan_out: ClassVar[dict[str, int]] = {"Solve": 1}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("propose"))
        (solved,) = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}))
        ctx.agent("proposer").reward(solved.reward or 0.0)


@pytest.mark.parametrize("advantage", ["leave_one_out", "group_std", "role_mean", "none"])
def test_units_that_are_compared_with_nothing_are_counted(advantage: str) -> None:
    async def main() -> SmallRun:
        policies = {"proposer": {"step_size": 8}, "solver": {"step_size": 8}}
        credit = {"group_size": 4, "advantage": advantage}
        run = SmallRun(config=config_for(policies=policies, credit=credit), environment=ProposeToOne)
        await run.run()
        return run

    run = simulate(main, seed=0)
    shares = {(name, values["advantage/alone_share"]) for name, _, values in run.seen.steps}
    assert shares == {("proposer", 0.0), ("solver", float(advantage in ("leave_one_out", "group_std")))}


def test_a_proposal_s_reward_says_which_solvers_it_was_measured_against(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        changes = solving(1, step_size=4)
        run = SmallRun(config=config_for(**changes), environment=Propose)
        await run.run()
        ended = [record.header for record in run.journal.of_kind(EpisodeEnd) if record.header.committed]
        oldest: dict[str, PolicyVersion] = {}
        for header in ended:
            for own in header.trajectories if header.parent_id is not None else ():
                version = PolicyVersion(own.policy, own.lineage, own.oldest_step)
                oldest[str(header.parent_id)] = min(oldest.get(str(header.parent_id), version), version)
        proposals = [header for header in ended if header.parent_id is None]
        assert {header.measured_against for header in proposals} >= {()}, "some were refused"
        assert any(version.step > 0 for header in proposals for version in header.measured_against)
        for header in proposals:
            found = oldest.get(header.episode_id)
            assert header.measured_against == (() if found is None else (found,))

    simulated_loop.run(main)


class Table(agentrl.Environment):
    """Sixteen seats; every one says a digit, and the largest wins."""

    seats = tuple(f"seat{number:02d}" for number in range(16))

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turns = await ctx.gather(*(ctx.agent(seat).act(agentrl.user("Say a digit.")) for seat in self.seats))
        said = [turn.text.strip(".") for turn in turns]
        for seat, digit in zip(self.seats, said, strict=True):
            ctx.agent(seat).reward(float(digit == max(said)))


class ProposeToMany(agentrl.Environment):
    """One proposal, sixty-four attempts at it."""

    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 64}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("propose"))
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=64))
        ctx.agent("proposer").reward(agentrl.learnability(solved))


@pytest.mark.parametrize(
    ("environment", "sizes"),
    [(Table, dict.fromkeys(Table.seats, 4)), (ProposeToMany, {"proposer": 2, "solver": 128})],
)
@pytest.mark.parametrize("staleness", [0, 2])
def test_many_seats_and_many_children_need_no_care(
    environment: type[agentrl.Environment], sizes: dict[str, int], staleness: int
) -> None:
    async def main() -> None:
        policies = {name: {"step_size": size, "max_staleness": staleness} for name, size in sizes.items()}
        changes = {"policies": policies, "credit": {"group_size": 2}, "steps": 3}
        run = SmallRun(config=config_for(**changes), environment=environment)
        await run.run()
        assert Counter(batch.policy for batch in run.trainer.batches) == dict.fromkeys(sizes, 3)
        assert all(len(batch.units) == sizes[batch.policy] for batch in run.trainer.batches)
        assert max(run.mean_lag(name) for name in sizes) <= staleness

    simulate(main, seed=0)


class Greedy(agentrl.Environment):
    """Declares four solvers, has three, and asks for more by as many as its task says."""

    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 4}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposer = ctx.agent("proposer")
        await proposer.act(agentrl.user("propose"))
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": 1}, n=3))
        more = int(ctx.task.data["digit"])
        if more:
            try:
                solved += await ctx.gather(*ctx.spawn(Solve, {"problem": 2}, n=more))
            except Exception:  # noqa: BLE001 - a refusal cannot be caught
                await proposer.act(agentrl.user("then without them"))
        proposer.reward(agentrl.learnability(solved))


GREEDY: dict[str, Any] = {
    "policies": {"both": {"step_size": 16, "max_staleness": 1}},
    "credit": {"group_size": 2},
    "steps": 6,
}


@pytest.mark.parametrize("fan_out", [{"Solve": 4}, {}])
def test_children_beyond_the_declared_are_refused_where_they_are_asked_for(fan_out: dict[str, int]) -> None:
    bound = fan_out.get("Solve", MAX_UNDECLARED)
    asked = {"digit-1": bound - 3, "digit-2": bound - 2, "digit-5": 10_000}
    tasks = [Task(id=task.id, data={"digit": str(asked.get(task.id, 0))}) for task in TASKS]
    environment = type("Greedy", (Greedy,), {"fan_out": fan_out, "__module__": __name__})  # which its name finds

    async def main() -> SmallRun:
        run = SmallRun(config=config_for(**GREEDY), environment=environment, tasks=tasks)
        await run.run()
        return run

    run = simulate(main, seed=0)
    ends = [end for end in run.journal.of_kind(EpisodeEnd) if end.header.parent_id is None]
    dropped = {end.spec.task.id: end.detail for end in ends if end.header.drop_reason == "fan_out"}
    assert dropped.keys() == {"digit-2", "digit-5"}
    said = "Greedy declares 4 of Solve" if fan_out else "Greedy declares none (so at most 256) of Solve"
    assert f"{said} in fan_out, but ctx.spawn asked for 10000 after 3 before" in dropped["digit-5"]
    admitted = [admission.spec.parent_id for admission in run.journal.of_kind(Admission)]
    assert max(Counter(parent for parent in admitted if parent is not None).values()) == bound
    assert all(end.header.attempt == 0 for end in ends), "another attempt would ask for as many"


def test_children_that_were_started_stay_where_less_is_declared_now() -> None:
    class Lowered(Greedy):
        fan_out: ClassVar[dict[str, int]] = {"Solve": 1}

    whole = Stage(environment=Greedy, data={"digit": "0"}).play()
    spawned = 1 + next(n for n, entry in enumerate(whole.entries) if isinstance(entry.decode(), SpawnEntry))
    for cut in range(1, len(whole.entries) + 1):
        again = Stage(environment=Lowered, data={"digit": "0"}).play(whole.entries[:cut])
        assert (again.error is None) == (cut >= spawned)
        assert again.error is None or (again.error.reason, again.header) == ("fan_out", None)


def test_the_checker_says_that_children_are_more_than_declared() -> None:
    tasks = [Task(id="greedy", data={"digit": "10"})]
    report = agentrl.check_environment(Greedy, tasks=tasks)
    assert "asked for 10 after 3 before" in report.text
    assert "a child episode was dropped: Greedy declares 4" in agentrl.check_environment(Parent, tasks=tasks).text


class Parent(agentrl.Environment):
    """Has one greedy child."""

    seats = ("proposer",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("propose"))
        (child,) = await ctx.gather(*ctx.spawn(Greedy, dict(ctx.task.data)))
        ctx.agent("proposer").reward(0.0 if child.reward is None else child.reward)


def test_what_a_gather_does_does_not_grow_with_the_square_of_its_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else thousands of children, which start in one turn of the event loop, hold up Ctrl-C with everybody else."""
    looks = Counter[str]()
    release = ReplayOrder._release

    def counted(order: ReplayOrder) -> None:
        looks["all"] += 1
        release(order)

    monkeypatch.setattr(ReplayOrder, "_release", counted)
    spec = Stage(environment=Many).spec
    seats = {"proposer": SeatBinding(POLICY)}
    executed = asyncio.run(execute_episode(Many, dataclasses.replace(spec, seats=seats), random_policy(Many)))
    assert not isinstance(executed, Failure)
    assert 0 < looks["all"] < 50


class Many(agentrl.Environment):
    """Five hundred sleepers."""

    seats = ("proposer",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("sleep"))
        await ctx.gather(*(ctx.sleep(0.0) for _ in range(500)))
        ctx.agent("proposer").reward(1.0)
