"""Groups that are trained in parts, in whole runs: the late are paid, by a baseline that no crash changes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from agentrl.core.ids import episode_sort_key
from agentrl.core.records import FrozenGroupBaselines, PolicyVersion, Unit
from agentrl.credit.release import baseline_members, shrunk_advantage
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd, StepRow
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import Ask, SmallRun, config_for

pytestmark = pytest.mark.sim


def late_run(release: str = "late", **changes: object) -> SmallRun:
    return SmallRun(config=config_for(credit={"group_size": 4, "release": release}, **changes))


def units_of(journal: MemoryJournal) -> list[Unit]:
    return [unit for row in journal.of_kind(StepRow) for unit in row.batch.units]


def check_credits(journal: MemoryJournal) -> None:
    """Every unit that was trained is credited as its group's record says, and against others alone."""
    ends = {record.spec.episode_id: record for record in journal.of_kind(EpisodeEnd)}
    frozen = journal.baselines()
    for unit in units_of(journal):
        baselines = frozen[ends[unit.episode_id].spec.group_id]
        others = baseline_members(baselines.finishers, unit.episode_id)
        assert unit.episode_id not in others
        rewards = [ends[other].header.reward or 0.0 for other in others]
        [credit] = unit.credits
        mean = baselines.earlier[0].mean if baselines.earlier else None
        assert (credit.advantage, credit.baseline) == pytest.approx(shrunk_advantage(credit.reward, rewards, mean))


def test_a_group_is_trained_in_parts_and_each_part_once(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = late_run(steps=6)
        await run.run()
        check_credits(run.journal)
        trained = Counter(unit.episode_id for unit in units_of(run.journal))
        assert max(trained.values()) == 1
        steps = {unit.episode_id: row.version.step for row in run.journal.of_kind(StepRow) for unit in row.batch.units}
        groups: dict[str, set[int]] = {}
        for record in run.journal.of_kind(EpisodeEnd):
            if record.spec.episode_id in steps:
                groups.setdefault(record.spec.group_id, set()).add(steps[record.spec.episode_id])
        return sum(len(taken) > 1 for taken in groups.values())

    assert sum(simulated_loop.run(main)) > 0, "no group was ever trained in two steps"


@pytest.mark.parametrize("release", ["late", "episode"])
def test_the_variance_of_its_advantages_over_those_of_whole_groups_is_measured(
    simulated_loop: SeededSimulation, release: str
) -> None:
    async def main() -> None:
        run = late_run(release, steps=6)
        await run.run()
        given = whole = 0.0
        frozen = run.journal.baselines()
        groups: dict[str, dict[str, float]] = {}
        for record in run.journal.of_kind(EpisodeEnd):
            if record.header.reward is not None:
                groups.setdefault(record.spec.group_id, {})[record.spec.episode_id] = record.header.reward
        for group_id, rewards in groups.items():
            if len(rewards) < 4:
                continue
            baselines = frozen[group_id]
            mean = baselines.earlier[0].mean if baselines.earlier else None
            for member, reward in rewards.items():
                others = [rewards[other] for other in baseline_members(baselines.finishers, member)]
                given += shrunk_advantage(reward, others, mean).value ** 2
                whole += ((4 * reward - sum(rewards.values())) / 3) ** 2
        counts = run.orchestrator.buffer.counts
        assert counts.each("squares of advantages", "guesser") == pytest.approx(
            {"given": given, "leave one out": whole}
        )
        ratios = [
            values["advantage/variance_ratio"]
            for _, _, values in run.seen.steps
            if "advantage/variance_ratio" in values
        ]
        assert ratios
        assert ratios[-1] > 0, "of the first groups, nobody has a past with `episode`"

    simulated_loop.run(main)


def test_each_by_itself_is_compared_with_earlier_groups(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = late_run("episode", steps=6)
        await run.run()
        check_credits(run.journal)
        assert {len(record.finishers) for record in run.journal.of_kind(FrozenGroupBaselines)} == {1}
        later = [record for record in run.journal.of_kind(FrozenGroupBaselines) if record.earlier]
        assert later, "no group had an earlier one"

    simulated_loop.run(main)


def test_a_crash_changes_no_baseline(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(2.0, 0.17)

    async def main() -> int:
        first = late_run(steps=8)
        journal = await first.cut_after(next(moments))
        before = dict(journal.baselines())
        version = PolicyVersion("guesser", 0, max(len(journal.of_kind(StepRow)) - 1, 0))
        second = SmallRun(config=first.config, journal=journal, resumed_at={"guesser": version})
        await second.run()
        after = second.journal.baselines()
        assert {name: after[name] for name in before} == before
        check_credits(second.journal)
        return len(before.keys() & second.past.open_groups)

    assert sum(simulated_loop.run(main)) > 0, "no group was open at the crash"


def test_two_runs_of_a_process_share_no_past(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        runs = [late_run(steps=4), late_run(steps=4)]
        for run in runs:
            await run.run()
        assert not any(run.journal.of_kind(FrozenGroupBaselines)[0].earlier for run in runs)

    simulated_loop.run(main)


def test_children_are_compared_with_earlier_children_of_their_parents_task(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = late_run(steps=10, step_size=12)
        run.environment, run.tasks = Ask, run.tasks[:2]
        await run.run()
        ends = {record.spec.group_id: record for record in run.journal.of_kind(EpisodeEnd)}
        rewards: dict[str, list[float]] = {}
        for record in run.journal.of_kind(EpisodeEnd):
            if record.spec.parent_id is not None:
                rewards.setdefault(record.spec.task.id, []).append(record.header.reward or 0.0)
        means = {
            ends[baselines.group_id].spec.episode_id: baselines.earlier
            for baselines in run.journal.of_kind(FrozenGroupBaselines)
            if ends[baselines.group_id].spec.parent_id is not None
        }
        newest = sorted(means, key=episode_sort_key)[-6:]
        assert all(len(means[name]) == 1 for name in newest)
        assert all(min(map(min, rewards.values())) <= means[name][0].mean <= 1.0 for name in newest)

    simulated_loop.run(main)
