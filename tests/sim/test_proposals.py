"""A proposer and its solvers: what is paid, what is remembered, and that both outlive a crash."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app import assemble
from agentrl.core.ids import random_stream, root_episode_number
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Proposal
from agentrl.journal.entries import EffectEntry
from agentrl.journal.port import StepRow
from agentrl.observe.metrics import PASS_RATES
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.worker import AsyncioWorker
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for
from tests.support.crash_scenario import CrashScenario, Machine

pytestmark = pytest.mark.sim


class Solve(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("solver").act(agentrl.user(ctx.task.data["problem"]))
        await ctx.sleep(ctx.rng.random() * 3)
        if ctx.rng.random() < 0.1:
            raise RuntimeError("a machine broke")
        ctx.agent("solver").reward(float(turn.text > ctx.task.data["problem"]))


class ProposeAndSolve(agentrl.Environment):
    """A digit is proposed; to solve it is to say a larger one."""

    seats = ("proposer",)
    fan_out: ClassVar[dict[str, int]] = {"Solve": 4}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        proposer = ctx.agent("proposer")
        problem = (await proposer.act(agentrl.user("Propose a digit."))).text
        if not proposer.gate(problem.isdecimal(), penalty=-1.0):
            return
        known = await ctx.remember(problem, structure="even" if int(problem) % 2 == 0 else "odd")
        ctx.metric("known", known.times)
        if not proposer.gate(known.times < 2, penalty=-0.5):
            return
        await ctx.sleep(ctx.rng.random())
        solved = await ctx.gather(*ctx.spawn(Solve, {"problem": problem}, n=4))
        proposer.reward(agentrl.learnability(solved) - 0.1 * known.share)


def speak(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """A digit, drawn by the request and the weights alone; one proposal in ten is none."""
    draw = random_stream(request.seed, version.step)
    if policy == "proposer" and draw.random() < 0.1:
        return [*b"none", STOP_TOKEN]
    return [ord(str(draw.randrange(10))), STOP_TOKEN]


def config(**changes: Any) -> dict[str, Any]:
    sizes = {"proposer": 4, "solver": 16}
    return {
        "policies": {name: {"step_size": size, "lora": {"rank": 2}} for name, size in sizes.items()},
        "credit": {"group_size": 4},
        "steps": 2,
        "max_in_flight": 64,
        **changes,
    }


def remembered(journal: Any) -> dict[tuple[str, int, str], list[Any]]:
    """What each call was told, as its episode recorded it."""
    told = {}
    for log in journal.turn_logs.values():
        for entry in log.entries[: log.on_disk]:
            body = entry.decode()
            if isinstance(body, EffectEntry):
                told[entry.episode_id, entry.attempt, entry.call_id] = body.value
    return told


def group(proposal: Proposal) -> int:
    """The root group, of four."""
    return root_episode_number(proposal.episode_id) // 4


def check_metrics(steps: list[dict[str, float]], repeated: list[bool]) -> None:
    """What the proposer's steps say of all that was proposed before the last of them."""
    counts = [
        (values["proposals/made"], values["proposals/repeated"]) for values in steps if "proposals/made" in values
    ]
    told = int(sum(made for made, _ in counts))
    assert told
    assert sum(made * share for made, share in counts) == pytest.approx(sum(repeated[:told]))
    for values in steps:
        if "pass_rate/groups" in values:
            assert sum(values[f"pass_rate/{name}"] for name in PASS_RATES) == pytest.approx(1.0)
    assert all(0.0 < values["gate/acceptance"] <= 1.0 for values in steps)
    assert not any(name.startswith("gate/") and name != "gate/acceptance" for values in steps for name in values)


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts are counted per process: with a second one, a kill between the two would give a third."""
    monkeypatch.setitem(AsyncioWorker.__init__.__kwdefaults__, "data_attempts", 1)


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assemble, "MEMORY_SIZE", 9)


@pytest.mark.usefixtures("small_memory")
def test_gate_credit_and_memory_of_a_proposer_and_its_solvers(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config_for(**config()), environment=ProposeAndSolve, script=speak)
        await run.run()
        children: Counter[str] = Counter()
        solved: dict[str, list[float]] = {}
        proposed = {}
        for record in run.journal.records:
            header = getattr(record, "header", None)
            if header is None:
                continue
            if header.parent_id is None:
                proposed[header.episode_id] = header
            else:
                children[header.parent_id] += 1
                solved.setdefault(header.parent_id, []).extend([] if header.reward is None else [header.reward])
        refused = [
            episode for episode, header in proposed.items() if header.committed and header.reward in (-1.0, -0.5)
        ]
        assert refused
        assert not children.keys() & set(refused), "something was spent on what the gate had refused"
        told, paid = remembered(run.journal), 0
        for (episode, *_), (_, share) in told.items():
            rewards = solved.get(episode, [])
            if episode in proposed and proposed[episode].committed and children[episode] and len(rewards) > 1:
                k, p = len(rewards), sum(rewards) / len(rewards)
                assert proposed[episode].reward == pytest.approx(4 * p * (1 - p) * k / (k - 1) - 0.1 * share)
                paid += 1
        assert paid > 5
        for batch in run.trainer.batches:  # a solver is compared with its siblings, and with nobody else
            if batch.policy == "solver":
                for unit in batch.units:
                    siblings = solved[unit.episode_id.partition("~")[0]]
                    (credit,) = unit.credits
                    others = (sum(siblings) - credit.reward) / max(len(siblings) - 1, 1)
                    expected = credit.reward - others if len(siblings) > 1 else 0.0
                    assert credit.advantage == pytest.approx(expected)

        made = [record for record in run.journal.records if isinstance(record, Proposal)]
        assert [proposal.number for proposal in made] == list(range(len(made)))
        repeated = []
        for at, proposal in enumerate(made):
            before = [other for other in made[max(at - 9, 0) : at] if group(other) != group(proposal)]
            same = sum(other.structure == proposal.structure for other in before)
            times = sum(other.key == proposal.key for other in before)
            repeated.append(times > 0)
            if proposal.made_by in told:
                assert told[proposal.made_by] == [times, pytest.approx(same / len(before) if before else 0.0)]
        assert len(made) > 9, "the oldest went"
        check_metrics([values for policy, _, values in run.seen.steps if policy == "proposer"], repeated)
        lost.append(any(len(rewards) < children[episode] for episode, rewards in solved.items()))

    lost: list[bool] = []
    simulated_loop.run(main)
    assert any(lost), "no solver was lost"


def trained(machine: Machine) -> dict[tuple[str, int], str]:
    rows = [record for record in machine.journal.on_disk() if isinstance(record, StepRow)]
    return {(row.version.policy, row.version.step): row.report.input_digest for row in rows}


@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_crash_forgets_nothing_and_changes_no_answer(deterministic: bool) -> None:
    changes = config(steps=4, deterministic=deterministic, checkpoint={"every": 2, "versions": 2})
    scenario = CrashScenario(ProposeAndSolve, script=speak, changes=changes)
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    told, expected = remembered(undisturbed.journal), trained(undisturbed)
    assert any(times for times, _ in told.values())
    for operation in range(15, undisturbed.disk.operations, undisturbed.disk.operations // 9):
        machine = scenario.new_machine()
        machine.disk.before = lambda number, _, disk=machine.disk, at=operation: number == at and disk.crash()
        scenario.run(machine, seed=operation)
        machine = machine.after_crash("kill")
        before = remembered(machine.journal)
        assert scenario.run(machine, seed=operation + 1) is None
        after = remembered(machine.journal)
        assert before.items() <= after.items(), "an episode was told something else"
        made = [each for each in machine.journal.history() if isinstance(each, Proposal)]
        assert len({proposal.made_by for proposal in made}) == len(made)
        assert {proposal.made_by for proposal in made} >= after.keys()
        if deterministic:
            assert trained(machine) == expected
            assert {call: told[call] for call in after.keys() & told.keys()} == {
                call: after[call] for call in after.keys() & told.keys()
            }


def test_nothing_else_than_training_is_remembered(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        tasks = [agentrl.Task(id=f"t{number}", data={}) for number in range(4)]
        run = SmallRun(
            config=config_for(**config(evaluation={"tasks": 4})),
            environment=ProposeAndSolve,
            script=speak,
            held_out=tasks,
        )
        await run.run()
        told = remembered(run.journal)
        assert any(episode.startswith("v") for episode, *_ in told), "an evaluation hears what is remembered"
        made = [record for record in run.journal.records if isinstance(record, Proposal)]
        assert all(proposal.episode_id.startswith("e") for proposal in made)

    simulated_loop.run(main)


class Repeat(agentrl.Environment):
    """Proposes the same each time; every third breaks down after it."""

    seats = ("proposer",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("proposer").act(agentrl.user("Propose."))
        known = await ctx.remember("the same")
        if ctx.task.data["number"] % 3 == 2:
            raise RuntimeError("a machine broke")
        ctx.agent("proposer").reward(known.times)


def test_what_a_dropped_episode_proposed_is_forgotten(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        tasks = [agentrl.Task(id=f"t{number}", data={"number": number}) for number in range(9)]
        credit = {"group_size": 1, "advantage": "none"}
        changes = {"credit": credit, "max_in_flight": 1, "step_size": 6, "steps": 2}
        run = SmallRun(config=config_for(**changes), environment=Repeat, tasks=tasks)
        await run.run()
        heard = [credit.reward for batch in run.trainer.batches for unit in batch.units for credit in unit.credits]
        assert heard == list(range(12)), "one after another, each heard of those before it that were trained"
        assert len(run.orchestrator.dispatcher.memory._proposals) == 12

    simulated_loop.run(main)


class Crowd(agentrl.Environment):
    """Sixteen agents side by side, the odd ones of another policy; then sixty-four solvers."""

    seats = ("even", "odd")
    fan_out: ClassVar[dict[str, int]] = {"Solve": 64}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agents = [ctx.agent(("even", "odd")[number % 2], number // 2) for number in range(16)]
        turns = await ctx.gather(*(agent.act(agentrl.user("Say a digit.")) for agent in agents))
        for agent, turn in zip(agents, turns, strict=True):
            agent.reward(float(turn.text == turns[0].text))
        await ctx.gather(*ctx.spawn(Solve, {"problem": "5"}, n=64))


def test_sixteen_agents_and_sixty_four_solvers_need_no_care() -> None:
    async def main() -> None:
        sizes = {"even": 4, "odd": 6, "solver": 128}
        policies = {name: {"step_size": size} for name, size in sizes.items()}
        changes = {"policies": policies, "credit": {"group_size": 2}, "steps": 2}
        run = SmallRun(config=config_for(**changes, max_in_flight=300), environment=Crowd, script=speak)
        await run.run()
        taken: Counter[tuple[str, str]] = Counter()
        for batch in run.trainer.batches:
            for unit in batch.units:
                taken[batch.policy, unit.episode_id] += 1
                assert len(unit.credits) == (1 if batch.policy == "solver" else 8), "a unit was cut"
        assert set(taken.values()) == {1}
        assert Counter(batch.policy for batch in run.trainer.batches) == dict.fromkeys(sizes, 2)

    simulate(main, seed=0)


class Steps(agentrl.Environment):
    """Three digits, each rewarded as it comes."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        for number in range(3):
            text = (await guesser.act(agentrl.user("Say a digit."))).text
            guesser.reward(float(text > "4"), turn=number)


def test_a_turn_is_credited_with_what_came_after_it() -> None:
    async def main() -> None:
        credit = {"group_size": 4, "turn_credit": "to_go"}
        run = SmallRun(config=config_for(steps=2, credit=credit), environment=Steps, script=speak)
        await run.run()
        paid = {}
        for record in run.journal.records:
            header = getattr(record, "header", None)
            if header is not None and header.committed:
                paid[header.episode_id] = (header.group_id, dict(header.trajectories[0].turn_rewards))
        for batch in run.trainer.batches:
            for unit in batch.units:
                (found,) = unit.credits
                group, own = paid[unit.episode_id]
                others = [turns for name, (of, turns) in paid.items() if of == group and name != unit.episode_id]
                for turn in range(3):
                    to_go = [sum(r for at, r in turns.items() if at >= turn) for turns in (own, *others)]
                    assert found.turn_advantages[turn] == pytest.approx(to_go[0] - sum(to_go[1:]) / 3)
                assert found.advantage == found.turn_advantages[0]

    simulate(main, seed=0)
