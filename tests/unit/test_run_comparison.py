"""`agentrl run compare`: settings, curves and paired held-out rewards of several runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.core.intervals import difference_interval
from agentrl.core.records import PolicyVersion
from agentrl.inspection.reader import RunReader
from agentrl.inspection.run_comparison import RunsComparison, axis_places, compare_runs
from agentrl.inspection.statistics import run_state
from agentrl.journal.port import MetricRow, VersionPublication
from agentrl.journal.run_log import RunStart, SettingChange
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import weights
from tests.support.compared_runs import play, write_compared_run

pytestmark = pytest.mark.damages_journal  # the runs have curves and held-out episodes, and nothing else

TASKS = [f"t{number}" for number in range(80)]
CONFIG = {"name": "a", "seed": 0, "steps": 4, "policies": {"solver": {"learning_rate": 1e-5}}}


def compared(*runs: Path, axis: str = "step") -> RunsComparison:
    with contextlib.ExitStack() as stack:
        return compare_runs([stack.enter_context(contextlib.closing(RunReader(run))) for run in runs], axis=axis)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """The tasks differ in difficulty by up to 0.8; the second run is better by 0.2 on each."""
    hard = {task: at / 100 for at, task in enumerate(TASKS)}
    faster = {**CONFIG, "name": "b", "policies": {"solver": {"learning_rate": 1e-4}}}
    return (
        write_compared_run(tmp_path / "a", hard, config=CONFIG, curve=[0.1, 0.2, 0.3, 0.4]),
        write_compared_run(
            tmp_path / "b", {t: r + 0.2 for t, r in hard.items()}, config=faster, curve=[0.2, 0.4], tokens=200.0
        ),
    )


def test_the_difference_is_paired_by_task_so_difficulty_cancels(pair: tuple[Path, Path]) -> None:
    (line,) = compared(*pair).paired
    assert line.difference == pytest.approx(0.2)
    assert 0.1 < line.low < 0.2 < line.high < 0.28, "though the rewards of each run are spread over 0.8"
    assert line.verdict == "better"
    assert (line.tasks, line.better, line.worse, line.steps) == (80, 80, 0, [2, 4])


def test_evaluations_of_different_steps_are_named(pair: tuple[Path, Path]) -> None:
    assert compared(*pair).notes == ["solver: b was evaluated after step 2, a after step 4, so they differ in training"]
    assert compared(pair[0], pair[0]).notes == []


def test_an_evaluation_that_a_resume_undid_is_not_compared(pair: tuple[Path, Path]) -> None:
    async def resume() -> None:
        journal = SqliteJournal(pair[0] / "journal")
        journal.record(VersionPublication(weights("solver", 1, 3), PolicyVersion("solver", 0, 2)))
        for number, task in enumerate(TASKS, 1000):
            await play(journal, number, task, 0.5, PolicyVersion("solver", 1, 3))
        journal.record(MetricRow("solver", 3, {"evaluation/reward": 0.5}))
        await journal.close()

    asyncio.run(resume())
    (line,) = compared(*pair).paired
    assert line.steps == [2, 3], "not after step 4, which was taken before"
    assert line.difference == pytest.approx(sum(at / 100 + 0.2 for at in range(80)) / 80 - 0.5)


def test_an_evaluation_counts_whole_once_it_has_a_result(pair: tuple[Path, Path]) -> None:
    """A resumed run plays what is missing of an evaluation, in a lineage of its own."""
    better = {task: at / 100 + 0.4 for at, task in enumerate(TASKS)}

    async def play_some(version: PolicyVersion, parent: PolicyVersion, tasks: Iterable[str], *, ends: bool) -> None:
        journal = SqliteJournal(pair[0] / "journal")
        journal.record(VersionPublication(weights(*version), parent))
        for task in tasks:
            await play(journal, TASKS.index(task) + 2000, task, better[task], version)
        if ends:
            journal.record(MetricRow("solver", version.step, {"evaluation/reward": 0.5}))
        await journal.close()

    def line() -> tuple[int, list[int], float]:
        (found,) = compared(*pair).paired
        return found.tasks, found.steps, round(found.difference, 9)

    before, cut, resumed = PolicyVersion("solver", 0, 4), PolicyVersion("solver", 0, 5), PolicyVersion("solver", 1, 5)
    asyncio.run(play_some(cut, before, TASKS[:50], ends=False))
    assert line() == (80, [2, 4], 0.2), "the evaluation after step 5 has no result yet"
    asyncio.run(play_some(resumed, cut, TASKS[50:], ends=True))
    assert line() == (80, [2, 5], -0.2)


@pytest.mark.parametrize("reward", [math.inf, -math.inf, 1e308])
def test_rewards_that_no_run_records_are_named(
    reward: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_compared_run(tmp_path / name, dict.fromkeys(TASKS[:2], reward), config=CONFIG) for name in "ab"]
    assert main(["run", "compare", *map(str, runs)]) == 2
    assert f"has the reward {reward}, which cannot be compared" in capsys.readouterr().err


def test_metrics_beyond_all_measure_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_compared_run(tmp_path / name, {}, config=CONFIG, curve=[1e308, 1e308]) for name in "ab"]
    assert main(["run", "compare", *map(str, runs)]) == 0
    assert "reward/mean" in capsys.readouterr().out


def test_only_settings_that_differ_are_named(pair: tuple[Path, Path]) -> None:
    assert [(line.name, line.values) for line in compared(*pair).settings] == [
        ("policies.solver.learning_rate", [1e-5, 1e-4])
    ]


def test_settings_changed_on_resume_are_shown(pair: tuple[Path, Path]) -> None:
    journal = SqliteJournal(pair[0] / "journal")
    journal.record_start(RunStart(lineage=1, began_at=0.0, changed=(SettingChange(("steps",), 4, 8),)))
    asyncio.run(journal.close())
    assert ("steps", [8, 4]) in [(line.name, line.values) for line in compared(*pair).settings]
    with contextlib.closing(RunReader(pair[0])) as reader:
        assert run_state(reader).plan.steps == 8


def record_code(run: Path, code: dict[str, str]) -> None:
    journal = SqliteJournal(run / "journal")
    journal.record_start(RunStart(lineage=1, began_at=0.0, code=code))
    asyncio.run(journal.close())


def test_files_of_code_that_differ_are_named(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record_code(pair[0], {"/a/env.py": "11", "/a/shop_agent.py": "22", "/a/only_here.py": "33"})
    record_code(pair[1], {"/b/env.py": "11", "/b/shop_agent.py": "44"})
    code = [line for line in compared(*pair).settings if "code" in line.name]
    assert [(line.name, line.values) for line in code] == [("code of shop_agent.py", ["22", "44"])]
    assert main(["run", "compare", *map(str, pair)]) == 0
    assert re.search(r"code of shop_agent.py +22 +44", capsys.readouterr().out)
    seeds = [
        write_compared_run(tmp_path / f"seed{seed}", {}, config={**CONFIG, "seed": seed}, curve=[0.1])
        for seed in (1, 2, 3)
    ]
    for run, digest in zip(seeds, ("22", "22", "44"), strict=True):
        record_code(run, {"/a/shop_agent.py": digest})
    groups = [group.runs for group in compared(*seeds).groups]
    assert groups == [["seed1", "seed2"], ["seed3"]], "runs of different code are no seeds of one another"


def test_an_evaluation_is_compared_by_the_settings_that_affect_it(tmp_path: Path) -> None:
    sampling = {"temperature": 1.0, "top_k": 0}
    solver = {"kind": "trained", "learning_rate": 1e-5, "reference": "", "sampling": {}}
    config = {"steps": 4, "sampling": sampling, "trainer": {"ranks": 1}, "policies": {"solver": solver}}
    frozen = {"kind": "frozen", "path": "a/best", "sampling": sampling}
    evaluated = {"steps": 40, "sampling": sampling, "trainer": {"ranks": 2}, "policies": {"solver": frozen}}
    faster = {**config, "policies": {"solver": {**solver, "learning_rate": 1e-4}}}
    found = compared(
        write_compared_run(tmp_path / "a", {"t": 1.0}, config=config, curve=[0.1]),
        write_compared_run(tmp_path / "b", {"t": 1.0}, config=faster, curve=[0.1]),
        write_compared_run(tmp_path / "c", {"t": 0.5}, config=evaluated, evaluated="a/best"),
    )
    assert [(line.name, line.values) for line in found.settings] == [
        ("policies.solver.learning_rate", [1e-5, 1e-4, None]),
        ("policies.solver.path", [None, None, "a/best"]),
    ]
    held_out = next(line for line in found.metrics if line.metric == "evaluation/reward")
    assert held_out.values == [1.0, 1.0, 0.5]


def test_clocks_have_their_newest_value_and_others_a_mean(pair: tuple[Path, Path]) -> None:
    values = {line.metric: line.values for line in compared(*pair).metrics}
    assert values["run/seconds"] == [8.0, 4.0]
    assert values["reward/mean"] == pytest.approx([0.25, 0.3])


def test_the_seconds_of_all_processes_of_a_run_are_compared(pair: tuple[Path, Path]) -> None:
    """Also those of steps that a resume took again."""

    async def resume() -> None:
        store = SqliteJournal(pair[0] / "journal")
        for step, seconds, lineage in ((5, 30.0, 7.0), (6, 40.0, 7.0), (6, 50.0, 8.0)):
            store.record(MetricRow("solver", step, {"run/seconds": seconds, "run/lineage": lineage}))
            await store.flush()
        await store.close()

    asyncio.run(resume())
    values = {line.metric: line.values for line in compared(*pair).metrics}
    assert values["run/seconds"] == [8.0 + 40.0 + 50.0, 4.0]


@pytest.mark.parametrize("slow", [1.0, 50.0])
def test_the_seconds_of_a_resumed_run_are_added_however_long_its_first_step_takes(slow: float) -> None:
    seconds = [(1, 10.0), (2, 20.0), (3, slow), (4, slow + 10.0)]
    lineages = [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]
    assert list(axis_places("seconds", seconds, lineages).values()) == [0.0, 10.0, 20.0, 20.0 + slow, 30.0 + slow]


@pytest.mark.parametrize(
    ("axis", "places"),
    [
        ("step", {"a": [1, 2, 3, 4], "b": [1, 2]}),
        ("tokens", {"a": [100, 200, 300, 400], "b": [200, 400]}),
        ("seconds", {"a": [2, 4, 6, 8], "b": [2, 4]}),
    ],
)
def test_curves_are_aligned_by_steps_tokens_or_seconds(
    pair: tuple[Path, Path], axis: str, places: dict[str, list[int]]
) -> None:
    curves = [curve for curve in compared(*pair, axis=axis).curves if curve.metric == "reward/mean"]
    assert {curve.group: [point.x for point in curve.points] for curve in curves} == places


def test_seeds_are_one_curve_with_a_band(tmp_path: Path) -> None:
    runs = []
    for seed, best in enumerate((0.4, 0.5, 0.6)):
        rewards = dict.fromkeys(TASKS, best)
        config = {**CONFIG, "seed": seed}
        runs.append(write_compared_run(tmp_path / f"s{seed}", rewards, config=config, curve=[0.1, best]))
    other = {**CONFIG, "steps": 9}
    runs.append(write_compared_run(tmp_path / "other", dict.fromkeys(TASKS, 0.9), config=other, curve=[0.1, 0.9]))
    found = compared(*runs)
    assert [group.runs for group in found.groups] == [["s0", "s1", "s2"], ["other"]]
    first = next(curve for curve in found.curves if curve.metric == "reward/mean")
    assert [(p.x, pytest.approx(p.y), pytest.approx(p.error)) for p in first.points] == [(1, 0.1, 0.0), (2, 0.5, 0.1)]
    (line,) = found.paired
    assert line.difference == pytest.approx(0.4)
    of_seeds = 4.303 * 0.1 / 3**0.5
    of_tasks = difference_interval([(0.9, 0.5)] * len(TASKS))
    assert line.high - of_tasks.high == pytest.approx(of_seeds), "the seeds differ, although all tasks are equal"
    assert of_tasks.low - line.low == pytest.approx(of_seeds)


def test_other_tasks_are_not_compared_and_the_reader_is_told(tmp_path: Path) -> None:
    runs = [
        write_compared_run(tmp_path / "a", {"one": 1.0}, curve=[0.1]),
        write_compared_run(tmp_path / "b", {"two": 1.0}, curve=[0.1]),
    ]
    found = compared(*runs)
    assert found.paired == []
    assert found.notes == ["solver: b and a were not evaluated on the same held-out tasks"]


def test_an_unknown_metric_or_axis_is_refused(pair: tuple[Path, Path]) -> None:
    readers = [RunReader(run) for run in pair]
    with pytest.raises(InputError, match="'rewrd'"):
        compare_runs(readers, metrics=["rewrd"])
    with pytest.raises(InputError, match="step, tokens, seconds"):
        compare_runs(readers, axis="hours")
    for reader in readers:
        reader.close()


def test_a_single_run_is_refused(pair: tuple[Path, Path]) -> None:
    with pytest.raises(InputError, match="a second run"):
        compared(pair[0])


def test_a_long_curve_is_printed_at_even_distances(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("a", 45), ("b", 40)):
        write_compared_run(tmp_path / name, {}, config={"steps": steps}, curve=[0.5] * steps)
    assert main(["run", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    _, curve = capsys.readouterr().out.split("── reward/mean, 1 in 3 points ──")
    assert [line.split()[0] for line in curve.splitlines()[2:]] == [str(step) for step in range(3, 46, 3)]


def test_a_row_has_only_what_was_measured_at_its_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps in (("a", 4), ("b", 3)):
        config = {"steps": steps}
        write_compared_run(tmp_path / name, {"t": 0.1 * steps}, config=config, curve=[0.5] * steps)
    assert main(["run", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--metric=evaluation/reward"]) == 0
    _, curve = capsys.readouterr().out.split("── evaluation/reward ──")
    assert [line.split() for line in curve.splitlines()[2:]] == [
        ["3", "0.3", "±", "0.050"],
        ["4", "0.4", "±", "0.050"],
    ]


def test_the_command_prints_pages_and_json(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    names = [str(run) for run in pair]
    assert main(["run", "compare", *names]) == 0
    printed = capsys.readouterr().out
    assert "policies.solver.learning_rate" in printed
    assert re.search(r"\+0\.200 \[\+0\.1\d\d, \+0\.2\d\d\]  better ", printed)
    assert main(["run", "compare", *names, "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)["paired"]
    assert line["verdict"] == "better"
    assert main(["run", "compare", *names, "--by=tokens", "--metric=reward/mean", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["axis"] == "tokens"
    assert {curve["metric"] for curve in found["curves"]} == {"reward/mean"}
