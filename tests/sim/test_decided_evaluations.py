"""Evaluations that end when it is decided whether a version is better than the best one so far."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import agentrl
from agentrl.core import ids
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.journal.port import Admission, EpisodeEnd
from agentrl.journal.run_log import RunLog, RunStart, SettingChange
from agentrl.observe.metrics import VERDICT
from agentrl.orchestrator.evaluation import HeldOutSplit, TaskOrder, looks
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.support.crash_scenario import CrashScenario, Machine

pytestmark = pytest.mark.sim
NUM_TASKS = 96


class Answer(agentrl.Environment):
    """One turn, which is right or wrong. Training episodes are slow, so that no evaluation is skipped."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Well?"))
        await ctx.sleep(ctx.rng.random() + 60.0 * (not ctx.task.id.startswith("held-out")))
        ctx.agent("guesser").reward(ctx.task.data.get("prize", 1.0) if turn.text.startswith("y") else 0.0)


def held_out(**data: Any) -> list[Task]:
    return [Task(id=f"held-out-{number}", data=data) for number in range(NUM_TASKS)]


def with_skills(*percents: int) -> Callable[[GenerateRequest, str, PolicyVersion], list[int]]:
    """A script that is right in so many percent of its requests, by the step of its weights; the last one stays."""

    def answer(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        percent = percents[min(version.step, len(percents) - 1)]
        return [*(b"y" if ids.stable_hash64("skill", version.step, request.seed) % 100 < percent else b"n"), STOP_TOKEN]

    return answer


def decided_run(
    *percents: int, held: Sequence[Task] = (), tasks: int | dict[str, int] = NUM_TASKS, **evaluation: Any
) -> SmallRun:
    """A run of four steps that is evaluated after each."""
    values = {"tasks": tasks, "every": 1, "stop": "decided", **evaluation}
    config = config_for(
        evaluation=values, steps=4, step_size=4, max_staleness=0, checkpoint={"every": 1, "versions": 1}
    )
    return SmallRun(config=config, environment=Answer, script=with_skills(*percents), held_out=list(held or held_out()))


def verdicts(run: SmallRun) -> list[float | None]:
    return [each["guesser"].get(VERDICT) for each in run.seen.evaluations]


def commits_by_place(run: SmallRun) -> Counter[tuple[int, int]]:
    """Numbers of committed held-out episodes, keyed by the step of their version and their seed."""
    specs = {each.spec.episode_id: each.spec for each in run.journal.records if isinstance(each, Admission)}
    return Counter(
        (each.header.trajectories[0].oldest_step, specs[each.header.episode_id].seed)
        for each in run.journal.records
        if isinstance(each, EpisodeEnd) and each.header.purpose == "evaluate" and each.header.committed
    )


def test_an_evaluation_ends_when_it_is_decided_and_a_better_version_plays_all_tasks(
    simulated_loop: SeededSimulation,
) -> None:
    async def main() -> None:
        run = decided_run(5, 95, 50, 50, 97)
        await run.run()
        first, better, worse, again, last = [each["guesser"] for each in run.seen.evaluations]
        assert VERDICT not in first
        assert first["evaluation/played"] == NUM_TASKS, "later versions are compared with it"
        assert verdicts(run)[1:] == [1.0, -1.0, -1.0, 0.0]
        assert (better["evaluation/played"], better["evaluation/difference_tasks"]) == (NUM_TASKS, 16)
        assert max(worse["evaluation/played"], again["evaluation/played"]) < NUM_TASKS
        assert better["evaluation/difference_low"] > 0 > worse["evaluation/difference_high"]
        assert better["evaluation/best_step"] == 0
        assert worse["evaluation/best_step"] == again["evaluation/best_step"] == last["evaluation/best_step"] == 1
        assert last["evaluation/played"] == last["evaluation/difference_tasks"] == NUM_TASKS
        best = run.orchestrator.best
        assert best.measured.versions["guesser"].step == 1
        assert best.measured.spent == pytest.approx(0.04), "four of five shares of the run's error"
        played = commits_by_place(run)
        assert set(played.values()) == {1}, "nothing is played twice"
        assert sum(step == 1 for step, _ in played) == NUM_TASKS, "later ones are compared with it"
        assert not run.orchestrator.versions.pinned()

    simulated_loop.run(main)


def test_a_margin_ends_the_evaluations_of_equal_versions(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        with_margin, without = decided_run(90, 90, margin=0.5), decided_run(90, 90)
        await with_margin.run()
        await without.run()
        assert verdicts(with_margin)[1:] == [-1.0] * 4
        assert verdicts(without)[1:] == [0.0] * 4
        for run in (with_margin, without):
            assert run.orchestrator.best.measured.versions["guesser"].step == 0
        shown = [each["guesser"]["evaluation/played"] for each in with_margin.seen.evaluations[1:]]
        assert max(shown) < NUM_TASKS
        assert all(each["guesser"]["evaluation/played"] == NUM_TASKS for each in without.seen.evaluations)

    simulated_loop.run(main)


def test_all_evaluations_of_all_seeds_play_one_mixed_order(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        starts = []
        for seed in (0, 1):
            run = decided_run(5, 95, 5)
            run.config = run.config.model_copy(update={"seed": seed})
            starts.append(await first_tasks(run))
        assert starts[0] == starts[1]

    async def first_tasks(run: SmallRun) -> list[str]:
        await run.run()
        names = [task.id for task in run.held_out]
        admitted = [
            each.spec.task.id
            for each in run.journal.records
            if isinstance(each, Admission) and each.spec.purpose == "evaluate"
        ]
        first, second = admitted[:NUM_TASKS], admitted[NUM_TASKS : NUM_TASKS + 16]
        assert sorted(first) == sorted(names)
        assert first != names
        assert second == first[:16]
        return first

    simulated_loop.run(main, seeds=1)


def test_other_tasks_do_not_change_the_order_of_the_common_ones() -> None:
    hard = [Task(id=f"hard-{number}", data={"hard": number}) for number in range(NUM_TASKS)]
    one = TaskOrder([HeldOutSplit("held_out", held_out())], 1, is_mixed=True)
    both = TaskOrder([HeldOutSplit("hard", hard), HeldOutSplit("held_out", held_out()[::-1])], 1, is_mixed=True)
    names = [[order.task(number).id for number in range(len(order))] for order in (one, both)]
    assert names[0] == [name for name in names[1] if name.startswith("held-out")]
    assert 30 < sum(name.startswith("hard") for name in names[1][:NUM_TASKS]) < 66, "the splits are mixed"


@pytest.mark.parametrize("bounds", [None, [0.0, 2.0]])
def test_a_reward_outside_its_bounds_is_named_and_all_tasks_are_played(
    simulated_loop: SeededSimulation, bounds: list[float] | None
) -> None:
    async def main() -> None:
        run, told = decided_run(5, 95, held=held_out(prize=2.5), bounds=bounds), list[str]()

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.evaluator.tell = told.append

        run.during = listen
        await run.run()
        (line,) = told
        assert "held-out task 'held-out-" in line
        assert "got 2.5, outside " + ("evaluation.bounds = [0, 2]" if bounds else "[0, 1]") in line
        assert "all 96 tasks" in line
        assert {each["guesser"]["evaluation/played"] for each in run.seen.evaluations} == {NUM_TASKS}
        assert set(verdicts(run)) == {None}
        assert run.orchestrator.best.measured.versions["guesser"].step > 0, "chosen by the mean"

    simulated_loop.run(main, seeds=1)


def test_declared_bounds_decide_other_rewards(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = decided_run(5, 95, held=held_out(prize=-1.0), bounds=[-1.0, 0.0])
        await run.run()
        worse = run.seen.evaluations[1]["guesser"]
        assert worse[VERDICT] == -1.0
        assert worse["evaluation/played"] == 16
        assert -1.0 <= worse["evaluation/difference_low"] <= worse["evaluation/difference_high"] < 0.0

    simulated_loop.run(main, seeds=1)


def test_a_version_plays_no_held_out_task_after_its_evaluation(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = decided_run(5, 95, 95)
        await run.run()
        steps = [
            each.header.trajectories[0].oldest_step
            for each in run.journal.records
            if isinstance(each, EpisodeEnd) and each.header.purpose == "evaluate"
        ]
        assert steps == sorted(steps), "the engine need not serve the best version again"
        undecided = run.seen.evaluations[2]["guesser"]
        assert undecided[VERDICT] == 0.0
        assert undecided["evaluation/difference_tasks"] == NUM_TASKS

    simulated_loop.run(main, seeds=1)


class Parent(Answer):
    """Two children answer too."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        if ctx.task.id.startswith("held-out"):
            await ctx.gather(*ctx.spawn(Answer, dict(ctx.task.data), n=2))


def test_several_splits_attempts_and_children_are_paired_task_by_task(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        names = {"held_out": 40, "hard": 24}
        splits = [
            HeldOutSplit(name, [Task(id=f"held-out-{name}-{number}", data={}) for number in range(count)])
            for name, count in names.items()
        ]
        run = decided_run(5, 95, 95, attempts=2, tasks=names)
        run.environment, run.splits = Parent, splits
        await run.run()
        first, better, *_ = [each["guesser"] for each in run.seen.evaluations]
        assert (first["evaluation/played"], first["evaluation/episodes"]) == (64, 128)
        assert better[VERDICT] == 1.0
        assert (better["evaluation/played"], better["evaluation/episodes"]) == (64, 128)
        assert better["evaluation/difference_tasks"] == 16
        rewards: dict[tuple[int, str], list[float]] = {}
        specs = {each.spec.episode_id: each.spec for each in run.journal.records if isinstance(each, Admission)}
        for each in run.journal.records:
            if isinstance(each, EpisodeEnd) and each.header.purpose == "evaluate":
                task = specs[ids.root_episode_id(each.header.episode_id)].task.id
                trajectory = each.header.trajectories[0]
                rewards.setdefault((trajectory.oldest_step, task), []).append(trajectory.reward or 0.0)
        assert {len(values) for values in rewards.values()} == {6}, "two attempts, with two children each"
        means = {key: statistics.fmean(values) for key, values in rewards.items()}
        roots = [spec for spec in specs.values() if spec.purpose == "evaluate" and spec.parent_id is None]
        paired = {spec.task.id for spec in roots[128:160]}
        assert len(paired) == 16
        differences = [means[1, task] - means[0, task] for task in paired]
        assert better["evaluation/difference"] == pytest.approx(statistics.fmean(differences))
        of_better = [mean for (at, _), mean in means.items() if at == 1]
        assert len(of_better) == 64
        assert better["evaluation/reward"] == pytest.approx(statistics.fmean(of_better))
        for name in names:
            own = [mean for (at, task), mean in means.items() if at == 0 and f"-{name}-" in task]
            assert first[f"evaluation/split_reward/{name}"] == pytest.approx(statistics.fmean(own))

    simulated_loop.run(main, seeds=2)


class TwoAnswers(agentrl.Environment):
    """Two policies answer; the second one's rewards are outside the bounds, and no question is about them."""

    seats = ("left", "right")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            turn = await ctx.agent(seat).act(agentrl.user("Well?"))
            ctx.agent(seat).reward(float(turn.text.startswith("y")) * (1.0 if seat == "left" else -3.0))
        await ctx.sleep(60.0 * (not ctx.task.id.startswith("held-out")))


@pytest.mark.parametrize("metric", ["", "left/evaluation/reward"])
def test_the_question_is_about_one_of_several_policies(simulated_loop: SeededSimulation, metric: str) -> None:
    async def main() -> None:
        run = decided_run(5, 95, 95)
        policies = {name: {"step_size": 4, "max_staleness": 0} for name in ("left", "right")}
        run.config = config_for(
            policies=policies, evaluation=dict(run.config.evaluation), steps=3, best={"metric": metric}
        )
        run.environment = TwoAnswers
        await run.run()
        better = run.seen.evaluations[1]
        assert better["left"][VERDICT] == 1.0
        assert VERDICT not in better["right"]
        assert better["left"]["evaluation/played"] == better["right"]["evaluation/played"] == NUM_TASKS
        assert better["left"]["evaluation/difference_tasks"] == 16
        assert better["right"]["evaluation/reward"] < -2.0
        assert {version.step for version in run.orchestrator.best.measured.versions.values()} == {1}
        assert not run.orchestrator.versions.pinned()

    simulated_loop.run(main, seeds=1)


class WithoutHeldOut(Answer):
    """Held-out episodes fail."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if ctx.task.id.startswith("held-out"):
            raise RuntimeError("no data")
        await super().run(ctx)


def test_an_evaluation_without_a_result_is_not_repeated_in_the_same_process(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run, told = decided_run(5, every=0), list[str]()
        run.environment = WithoutHeldOut

        def listen(orchestrator: Orchestrator) -> None:
            orchestrator.evaluator.tell = told.append

        run.during = listen
        await run.run()
        results = [line for line in told if "has no result" in line]
        assert len(results) == 2, "before the first step, and after the last"

    simulated_loop.run(main, seeds=1)


def test_looks_grow_up_to_all_tasks() -> None:
    assert list(looks(10)) == [10]
    assert list(looks(512))[:4] == [16, 24, 36, 54]
    assert list(looks(512))[-1] == 512


class Evaluated(CrashScenario):
    """Keeps the newest life's loop."""

    orchestrator: Orchestrator

    def rewired(self, orchestrator: Orchestrator, machine: Machine) -> None:
        self.orchestrator = orchestrator


def what_was_decided(log: RunLog) -> dict[int, Mapping[str, float]]:
    """The newest answer of each step's evaluation."""
    names = (VERDICT, "evaluation/played", "evaluation/difference", "evaluation/reward", "evaluation/turns")
    answers: dict[int, dict[str, float]] = {}
    for step, name, value in log.rows("SELECT step, name, value FROM metrics ORDER BY id"):
        if name in names:
            answers.setdefault(step, {})[name] = value
    return answers


def test_a_kill_during_evaluations_plays_and_counts_nothing_twice() -> None:
    changes: dict[str, Any] = {
        "steps": 3,
        "deterministic": True,
        "policies": {"guesser": {"step_size": 4, "max_staleness": 0}},
        "checkpoint": {"every": 1, "versions": 1},
        "evaluation": {"tasks": NUM_TASKS, "every": 1, "stop": "decided", "margin": 0.1},
    }
    scenario = Evaluated(Answer, changes=changes, script=with_skills(30, 70, 60, 65), held_out=held_out())
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    expected = what_was_decided(undisturbed.journal)
    best = scenario.orchestrator.best.measured
    assert len(expected) == 4
    cut = 0
    for operation in range(30, undisturbed.disk.operations, 83):
        machine = scenario.new_machine()
        machine.disk.before = lambda number, _, disk=machine.disk, at=operation: number == at and disk.crash()
        scenario.run(machine, seed=operation)
        machine = machine.after_crash("kill")
        left = len(list(machine.journal.members(purpose="evaluate")))
        assert scenario.run(machine, seed=operation + 1) is None
        assert what_was_decided(machine.journal) == expected, f"operation {operation}"
        now = scenario.orchestrator.best.measured
        assert (now.best, now.spent) == (best.best, best.spent)
        committed = Counter(
            (header.trajectories[0].oldest_step, spec.seed)
            for spec, header in machine.journal.members(purpose="evaluate")
        )
        assert set(committed.values()) == {1}, f"operation {operation}"
        cut += left % 16 > 0
    assert cut > 3, "few kills fell into an evaluation"


def decided_scenario(**evaluation: Any) -> Evaluated:
    """A run of three steps that is evaluated after each."""
    changes: dict[str, Any] = {
        "steps": 3,
        "policies": {"guesser": {"step_size": 4, "max_staleness": 0}},
        "checkpoint": {"every": 1, "versions": 1},
        "evaluation": {"tasks": NUM_TASKS, "every": 1, "stop": "decided", **evaluation},
    }
    return Evaluated(Answer, changes=changes, script=with_skills(5, 50, 95), held_out=held_out())


def verdict_rows(log: RunLog) -> list[tuple[int, float]]:
    return [
        (step, value)
        for step, name, value in log.rows("SELECT step, name, value FROM metrics ORDER BY id")
        if name == "evaluation/verdict_error"
    ]


def test_verdicts_that_no_checkpoint_has_stay_in_the_budget() -> None:
    scenario = decided_scenario()
    scenario.config = scenario.config.model_copy(
        update={"checkpoint": scenario.config.checkpoint.model_copy(update={"every": 0})}
    )
    machine = scenario.new_machine()
    disk, journal = machine.disk, machine.journal
    disk.before = lambda *_: len(verdict_rows(journal)) == 2 and disk.crash()
    scenario.run(machine, seed=0)
    machine = machine.after_crash("kill")
    lost = verdict_rows(machine.journal)
    assert len(lost) == 2
    assert scenario.recovery(machine).manifest is None, "no checkpoint has them"
    assert scenario.run(machine, seed=1) is None
    rows = verdict_rows(machine.journal)
    assert len(rows) > len(lost)
    assert sum(error for _, error in rows) <= 0.05, "the verdicts of both processes share the budget"
    assert scenario.orchestrator.best.measured.spent == pytest.approx(sum(error for _, error in rows))


@pytest.mark.parametrize(
    ("differences", "is_again"),
    [
        ({"code_changed": ("env.py",), "reward_code_changed": ("env.py",)}, True),
        ({"changed": (SettingChange(("environment", "options"), {}, {"hard": True}),)}, True),
        ({"changed": (SettingChange(("policies", "guesser", "sampling", "temperature"), 1.0, 0.5),)}, True),
        ({"code_changed": ("losses.py:my_loss",)}, False),
        ({"changed": (SettingChange(("credit", "reward_weights"), {}, {"reward": 2.0}),)}, True),
        ({"changed": (SettingChange(("episode_timeout_s",), 600.0, 60.0),)}, True),
        ({"changed": (SettingChange(("steps",), 2, 3),)}, False),
        ({}, False),
    ],
)
def test_rewards_of_other_code_or_options_are_not_paired(differences: dict[str, Any], is_again: bool) -> None:
    scenario = decided_scenario()
    machine = scenario.new_machine()
    disk, journal = machine.disk, machine.journal
    disk.before = lambda *_: len(verdict_rows(journal)) == 2 and disk.crash()
    scenario.run(machine, seed=0)
    machine = machine.after_crash("kill")
    start = RunStart(lineage=1, began_at=0.0, **differences)
    machine.journal.starts = lambda: [start]  # type: ignore[method-assign]
    assert scenario.run(machine, seed=1) is None
    (last,) = (values for step, values in what_was_decided(machine.journal).items() if step == 3)
    if is_again:
        assert VERDICT not in last, "the first version of the new rewards is what later ones are compared with"
        assert last["evaluation/played"] == NUM_TASKS
        assert scenario.orchestrator.best.measured.versions["guesser"].step == 3
    else:
        assert VERDICT in last


class Noting(Answer):
    """Notes right replies only, so that the mean of the metric is that of the reward."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Well?"))
        await ctx.sleep(ctx.rng.random() + 60.0 * (not ctx.task.id.startswith("held-out")))
        is_right = turn.text.startswith("y")
        ctx.agent("guesser").reward(float(is_right))
        if is_right:
            ctx.metric("right", 1.0)


def test_a_metric_that_a_later_look_sets_first_is_0_in_the_earlier_ones(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = decided_run(0, 0, 0, 3, 3)
        run.environment = Noting
        await run.run()
        metrics = [each["guesser"] for each in run.seen.evaluations]
        assert ["evaluation/metric/right" in each for each in metrics] == [False] * 3 + [True] * 2
        for each in metrics:
            assert each.get("evaluation/metric/right", 0.0) == pytest.approx(each["evaluation/reward"])

    simulated_loop.run(main, seeds=1)


class Fragile(Noting):
    """Of the held-out episodes, a fifth fail, the same with all versions, and a tenth have
    children for which they do not wait."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        fate = ctx.rng.random() if ctx.task.id.startswith("held-out") else 0.5
        if fate > 0.8:
            raise RuntimeError("broken")
        await super().run(ctx)
        if fate < 0.15:
            ctx.spawn(Slow, dict(ctx.task.data), n=1)


class Slow(Noting):
    """Ends long after its parent."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.sleep(3.0)
        await super().run(ctx)


@pytest.mark.parametrize("stop", ["decided", "tasks"])
def test_a_resumed_evaluation_counts_what_the_killed_one_counted(stop: str) -> None:
    changes: dict[str, Any] = {
        "steps": 2,
        "deterministic": True,
        "policies": {"guesser": {"step_size": 4, "max_staleness": 0}},
        "checkpoint": {"every": 1, "versions": 1},
        "evaluation": {"tasks": 32, "every": 1, "stop": stop, "attempts": 2},
        "best": {"metric": "evaluation/reward", "window": 1},
    }
    scenario = Evaluated(Fragile, changes=changes, script=with_skills(50, 60, 70), held_out=held_out()[:32])
    undisturbed = scenario.new_machine()
    assert scenario.run(undisturbed, seed=0) is None
    expected = all_held_out_metrics(undisturbed.journal)
    assert expected[0]["evaluation/dropped"] > 0
    for step, values in expected.items():
        assert values["evaluation/metric/right"] == pytest.approx(values["evaluation/reward"]), f"step {step}"
    for operation in range(30, undisturbed.disk.operations, 47):
        machine = scenario.new_machine()
        machine.disk.before = lambda number, _, disk=machine.disk, at=operation: number == at and disk.crash()
        scenario.run(machine, seed=operation)
        machine = machine.after_crash("kill")
        assert scenario.run(machine, seed=operation + 1) is None
        assert all_held_out_metrics(machine.journal) == expected, f"operation {operation}"


def all_held_out_metrics(log: RunLog) -> dict[int, dict[str, float]]:
    """The newest metrics of each step's evaluation, without how long it took."""
    metrics: dict[int, dict[str, float]] = {}
    for step, name, value in log.rows("SELECT step, name, value FROM metrics ORDER BY id"):
        if name.startswith("evaluation/") and name not in ("evaluation/seconds", "evaluation/engine_busy_share"):
            metrics.setdefault(step, {})[name] = value
    return metrics
