"""Mixtures: rates of the groups, selection by member, evaluation by split, and a crash."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

import agentrl
from agentrl.app.plan import resolve
from agentrl.app.run_parts import check_split_of_best, environment_of, held_out_task_splits, task_source
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, EnvironmentDefinitionError, InputError
from agentrl.core.records import Task
from agentrl.environment.mixture import (
    MemberTasks,
    MixedTasks,
    Mixture,
    mixture,
    root_environment_of_task,
    root_environments,
    with_evaluated_environments,
)
from agentrl.orchestrator.evaluation import HeldOutSplit
from agentrl.orchestrator.tasks import Curriculum, GroupResult
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Ask, Guess, SmallRun, config_for
from tests.sim.test_selection import tasks_of
from tests.support.dispatched import dispatched

pytestmark = pytest.mark.sim


class Easy(Guess):
    """Always right, in one turn; has a split of its own."""

    splits = ("train", "held_out", "hard")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Say anything."))
        ctx.agent("guesser").reward(0.0 if ctx.task.data.get("hard") else 1.0)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0, count: int = 4) -> agentrl.TaskSource:
        return [Task(id=f"{split}-{number}", data={"hard": split == "hard"}) for number in range(count)]


class Digits(Guess):
    """Guess, with tasks of its own."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return list(TASKS)


BOTH = mixture({Digits: 3.0, Easy: 1.0})


def mixed(**rates: float) -> MixedTasks:
    members = {"Digits": Digits, "Easy": Easy}
    return MixedTasks([MemberTasks(name, members[name].tasks("train")) for name in rates], rates)


def config(**environment: Any) -> RunConfig:
    chosen = {"id": {f"{__name__}:Digits": 3, f"{__name__}:Easy": 1}, **environment}
    return config_for(environment=chosen, evaluation={"tasks": {"held_out": 3}})


def test_members_get_their_shares_of_the_groups_and_their_own_permutations() -> None:
    curriculum = Curriculum(mixed(Digits=3.0, Easy=1.0), seed=0)
    drawn = [curriculum.task(number).id for number in range(400)]
    shares = Counter(name.partition(":")[0] for name in drawn)
    assert shares["Easy"] / 400 == pytest.approx(0.25, abs=0.06)
    digits = [name for name in drawn if name.startswith("Digits:")]
    assert [len(set(digits[at : at + 10])) for at in range(0, 100, 10)] == [10] * 10, "each pass has every task once"
    again = Curriculum(mixed(Digits=3.0, Easy=1.0), seed=0)
    assert again.task(399).id == drawn[399], "a task is a function of the group's number"


def test_selection_works_member_by_member() -> None:
    curriculum = Curriculum(mixed(Digits=1.0, Easy=1.0), seed=0, selection={"replay": 1.0, "retire_after": 1})
    easy = [Task(id=f"Easy:train-{number}", data={}) for number in range(4)]
    for number, task in enumerate(easy[:3]):
        curriculum.record_group(GroupResult(number, task, (1.0, 1.0)))
    curriculum.record_group(GroupResult(3, Task(id="Digits:digit-7", data={}), (1.0, 0.0)))
    drawn = Counter(curriculum.task(number).id for number in range(4, 200))
    assert {name for name in drawn if name.startswith("Digits")} == {"Digits:digit-7"}, "it alone is in the band"
    assert {name for name in drawn if name.startswith("Easy")} == {"Easy:train-3"}, "the others are retired"


def test_a_member_may_select_its_tasks_itself() -> None:
    class First(list[Task]):
        told: list[str]

        def select(self, group: int, rng: random.Random) -> Task:
            return self[0]

        def record_result(self, task: Task, rewards: Sequence[float]) -> None:
            self.told = [task.id]

    source = First(TASKS)
    curriculum = Curriculum(MixedTasks([MemberTasks.of("Digits", source)], {"Digits": 1.0}), seed=0)
    curriculum.record_group(GroupResult(0, Task(id="Digits:digit-3", data={}), (1.0,)))
    assert {curriculum.task(number).id for number in range(20)} == {"Digits:digit-0"}
    assert source.told == ["digit-3"]


def test_a_mixture_trains_evaluates_by_split_and_resumes_with_the_same_tasks(simulated_loop: SeededSimulation) -> None:
    splits = [
        HeldOutSplit("Digits@held_out", [Task(id=f"Digits:{task.id}", data=task.data) for task in TASKS[:3]]),
        HeldOutSplit("Easy@hard", [Task(id="Easy:hard-0", data={"hard": True})]),
        HeldOutSplit("Easy@held_out", [Task(id="Easy:held_out-0", data={}), Task(id="Easy:held_out-1", data={})]),
    ]
    changed = config_for(evaluation={"tasks": 9}, steps=6)

    def small(**more: Any) -> SmallRun:
        return SmallRun(config=changed, environment=BOTH, tasks=mixed(Digits=3.0, Easy=1.0), splits=splits, **more)

    async def main() -> None:
        run = small()
        await run.run()
        tasks = tasks_of(run.journal)
        played = {spec.episode_id: spec.environment for spec, _ in dispatched(run.journal)}
        assert all(played[name].endswith(f":{task.partition(':')[0]}") for name, task in tasks.items())
        assert {name.partition(":")[0] for name in tasks.values()} == {"Digits", "Easy"}
        steps = [values for _, _, values in run.seen.steps]
        assert all(values["mixture/share/Easy"] + values["mixture/share/Digits"] == 1.0 for values in steps)
        assert {values.get("mixture/reward/Easy", 1.0) for values in steps} == {1.0}
        assert any(0.0 < values.get("mixture/reward/Digits", 0.0) < 1.0 for values in steps)
        first = run.seen.evaluations[0]["guesser"]
        assert first["evaluation/split_reward/Easy@held_out"] == 1.0
        assert first["evaluation/split_reward/Easy@hard"] == 0.0
        assert first["evaluation/tasks"] == 6.0
        of_digits = first["evaluation/split_reward/Digits@held_out"]
        assert first["evaluation/reward"] == pytest.approx((3 * of_digits + 2.0) / 6)
        assert "evaluation/split_pass_at/Easy@hard/1" in first

        killed = small()
        await killed.stop_after(4.0)
        journal, board = killed.journal.after_crash(), killed.orchestrator.board
        at = {"guesser": board.at("guesser", 0)}
        resumed = small(journal=journal, resumed_at=at, lineage=2)
        await resumed.run()
        later = tasks_of(resumed.journal)
        assert {name: later[name] for name in tasks.keys() & later.keys()} == {
            name: tasks[name] for name in tasks.keys() & later.keys()
        }

    simulated_loop.run(main)


def test_a_resumed_run_may_evaluate_another_environment_too(simulated_loop: SeededSimulation) -> None:
    """Its own tasks keep their ids, so the results of earlier groups still count."""
    selection = {"replay": 0.5, "retire_after": 1}
    changed = config_for(evaluation={"tasks": 3}, steps=6, environment={"id": "unused", "selection": selection})
    both = with_evaluated_environments(Digits, [Easy])
    splits = [
        HeldOutSplit("held_out", TASKS[:3]),
        HeldOutSplit("Easy@held_out", [Task(id="Easy:held_out-0", data={})]),
    ]

    async def main() -> None:
        killed = SmallRun(config=changed, environment=Digits, tasks=TASKS)
        await killed.stop_after(4.0)
        journal, board = killed.journal.after_crash(), killed.orchestrator.board
        at = {"guesser": board.at("guesser", 0)}
        resumed = SmallRun(
            config=changed, environment=both, tasks=TASKS, splits=splits, journal=journal, resumed_at=at, lineage=2
        )
        await resumed.run()
        assert {task.partition(":")[0] for task in tasks_of(resumed.journal).values()} <= {task.id for task in TASKS}
        assert resumed.seen.evaluations[-1]["guesser"]["evaluation/split_reward/Easy@held_out"] == 1.0

    simulated_loop.run(main)


def test_a_policy_of_an_environment_that_is_not_trained_is_refused() -> None:
    class Judged(Easy):
        seats = ("judge",)

    chosen = config_for(
        policies={"guesser": {"step_size": 8, "lora": {"rank": 2}}, "judge": {"step_size": 8, "lora": {"rank": 2}}},
        seats={"guesser": "guesser", "Judged.judge": "judge"},
    )
    with pytest.raises(ConfigError, match=r"policies.judge holds a seat only in .* bind it to a seat of Digits"):
        resolve(chosen, with_evaluated_environments(Digits, [Judged]))


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("evaluation/split_reward/held_out", None),
        ("evaluation/split_pass_at/Easy@held_out/2", None),
        ("evaluation/reward", None),
        ("evaluation/split_reward", "no evaluation measures it"),
        ("-evaluation/split_reward/held_out", None),
        ("-evaluation/split_reward/hrad", "the evaluated splits are held_out, Easy@held_out"),
        ("guesser/evaluation/split_reward/hrad", "the evaluated splits are held_out, Easy@held_out"),
        ("evaluation/split_reward/Digits@held_out", "the evaluated splits are held_out, Easy@held_out"),
    ],
)
def test_a_best_metric_of_a_split_that_is_not_evaluated_is_refused(metric: str, problem: str | None) -> None:
    splits = [HeldOutSplit("held_out", TASKS), HeldOutSplit("Easy@held_out", TASKS)]
    with contextlib.nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        check_split_of_best(metric, splits)


def test_a_configuration_names_members_options_and_splits() -> None:
    chosen = config(options={"Easy": {"count": 9}})
    environment = environment_of(chosen)
    assert issubclass(environment, Mixture)
    assert [root.__name__ for root in root_environments(environment)] == ["Digits", "Easy"]
    source = task_source(chosen.environment, chosen.seed, environment, "train")
    assert len(source) == 10 + 9
    splits, available = held_out_task_splits(chosen.evaluation, chosen.environment, chosen.seed, environment)
    assert [(split.name, len(split.tasks)) for split in splits] == [("Digits@held_out", 3), ("Easy@held_out", 3)]
    assert available == 10 + 9
    assert resolve(chosen, environment).demands[0].units == {"guesser": 4}


def test_a_split_that_is_named_twice_is_refused() -> None:
    """Its tasks would count twice."""
    tasks = {"held_out": 2, f"{__name__}:Easy@held_out": 2}
    chosen = config_for(environment={"id": f"{__name__}:Easy"}, evaluation={"tasks": tasks})
    with pytest.raises(ConfigError, match="the split held_out twice"):
        held_out_task_splits(chosen.evaluation, chosen.environment, chosen.seed, environment_of(chosen))


def test_splits_and_environments_beside_the_trained_one() -> None:
    tasks = {"held_out": 2, "hard": 1, f"{__name__}:Digits@held_out": 5}
    chosen = config_for(environment={"id": f"{__name__}:Easy", "options": {"count": 7}}, evaluation={"tasks": tasks})
    environment = environment_of(chosen)
    assert len(task_source(chosen.environment, chosen.seed, environment, "train")) == 7, (
        "options are those of what is trained"
    )
    splits, _ = held_out_task_splits(chosen.evaluation, chosen.environment, chosen.seed, environment)
    assert {split.name: len(split.tasks) for split in splits} == {
        "held_out": 2,
        "hard": 1,
        "Digits@held_out": 5,
    }, "what alone is trained keeps its names"
    assert [split.tasks[0].id.rpartition("-")[0] for split in splits] == [
        *("held_out:held_out", "hard:hard", "Digits:held_out:digit")
    ]
    played = [root_environment_of_task(environment, split.tasks[0].id) for split in splits]
    assert played == [Easy, Easy, Digits]
    assert root_environment_of_task(environment, "train-3") is Easy
    with pytest.raises(KeyError):
        root_environment_of_task(BOTH, "train-3")
    alone = config_for(environment={"id": f"{__name__}:Easy"}, evaluation={"tasks": {"held_out": 2, "hard": 2}})
    assert environment_of(alone) is Easy
    assert [split.name for split in held_out_task_splits(alone.evaluation, alone.environment, alone.seed, Easy)[0]] == [
        "held_out",
        "hard",
    ]


def test_the_tasks_to_evaluate_on_are_drawn_from_the_whole_list_by_the_seed() -> None:
    ordered = [Task(id=f"{number}", data={}) for number in range(1000)]

    def drawn(seed: int) -> list[int]:
        [split], available = held_out_task_splits(
            config_for(seed=seed, evaluation={"tasks": 64}).evaluation,
            config_for(seed=seed, evaluation={"tasks": 64}).environment,
            config_for(seed=seed, evaluation={"tasks": 64}).seed,
            Digits,
            {"held_out": ordered},
        )
        assert available == len(ordered)
        return [int(task.id) for task in split.tasks]

    assert drawn(1) == drawn(1) != drawn(2)
    assert all(0.3 < sum(numbers) / 64 / len(ordered) < 0.7 for numbers in map(drawn, range(5))), "the first 64 are not"


def test_what_a_mixture_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="rates are all 0"):
        mixture({Digits: 0.0})
    with pytest.raises(EnvironmentDefinitionError, match=r"two environments .* Easy"):
        mixture({Easy: 1.0, type("Easy", (Guess,), {}): 1.0})
    with pytest.raises(ConfigError, match=r"environment.options.count.*for each class name \(Digits, Easy\)"):
        task_source(config(options={"count": 3}).environment, config(options={"count": 3}).seed, BOTH, "train")
    with pytest.raises(ConfigError, match="Digits has no split 'hard'; it has train, held_out"):
        held_out_task_splits(
            config_for(environment={"id": "unused"}, evaluation={"tasks": {"hard": 3}}).evaluation,
            config_for(environment={"id": "unused"}, evaluation={"tasks": {"hard": 3}}).environment,
            config_for(environment={"id": "unused"}, evaluation={"tasks": {"hard": 3}}).seed,
            Digits,
        )
    with pytest.raises(ConfigError, match=r"number of units .* Ask"):
        resolve(config(), mixture({Ask: 1.0, Digits: 1.0}))
    with pytest.raises(InputError, match="tasks= and held_out="):
        task_source(config().environment, config().seed, BOTH, "train", TASKS)
    with pytest.raises(ValueError, match="name of a split is expected"):
        config_for(evaluation={"tasks": {"Easy@": 3}})
