"""The tasks of a run: splits that share some, and tasks that change between two starts of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.app.run_parts import RunFactories, held_out_task_splits, task_source
from agentrl.app.run_tasks import RunTasks
from agentrl.app.training import Run, run_training
from agentrl.cli.main import main
from agentrl.core.errors import ConfigError, EngineLostError
from agentrl.core.records import Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.mixture import mixture
from agentrl.environment.task_contents import (
    ContentsChange,
    RecordedContents,
    SplitOverlap,
    TaskRecord,
    read_contents,
)
from agentrl.inspection.overview import metric_series
from agentrl.inspection.reader import RunReader
from agentrl.inspection.run_comparison import compare_runs
from agentrl.orchestrator.evaluation import HeldOutSplit, held_out_digest
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.testing.check import check_environment
from tests.sim.small_run import config_for, guess
from tests.support.recording_trainer import RecordingTrainer

Rows = Sequence[tuple[str, object]]


def tasks(rows: Rows) -> list[Task]:
    return [Task(id=name, data={} if value is None else {"value": value}) for name, value in rows]


def contents(rows: Rows) -> RecordedContents:
    return RecordedContents.of(read_contents(tasks(rows), seconds=60.0))


ROWS = [(f"t{n}", n) for n in range(16)]


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (ROWS, ""),
        (
            [(name, 9 if name in ("t1", "t2", "t3", "t4") else value) for name, value in ROWS],
            "4 of 16 held-out tasks changed",
        ),
        (ROWS[:2], "14 of 16 held-out tasks removed"),
        ([*ROWS, ("new", 0)], "1 added to 16 held-out tasks"),
        ([("new", 0), *ROWS[2:]], "2 of 16 held-out tasks removed, 1 added"),
        ([(f"t{n}", n + 1) for n in range(17)], "16 of 16 held-out tasks changed, 1 added"),
        (ROWS[::-1], "order of the held-out tasks changed"),
        ([(name, None) for name, _ in ROWS], "16 of 16 held-out tasks changed"),
    ],
)
def test_changes_are_counted(now: Rows, told: str) -> None:
    assert ContentsChange.between(contents(ROWS), contents(now)).describe("held-out") == told


class Counted(Sequence[Task]):
    """Tasks that are made when they are read."""

    def __init__(self, size: int, changed: Callable[[int], bool] = lambda index: False) -> None:
        self.size, self.changed, self.reads = size, changed, 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return Task(id=str(index), data={"n": -index if self.changed(index) else index})


def test_of_large_sources_the_first_tasks_are_compared() -> None:
    source = Counted(60_000, lambda index: index in (7, 55_000))
    before, now = (RecordedContents.of(read_contents(each, seconds=600.0)) for each in (Counted(60_000), source))
    assert source.reads == 50_000
    assert ContentsChange.between(before, now).describe("training") == "1 of the first 50,000 training tasks changed"
    longer = RecordedContents.of(read_contents(Counted(61_000), seconds=600.0))
    assert ContentsChange.between(before, longer).describe("training") == "61,000 training tasks instead of 60,000"


def test_of_endless_sources_few_tasks_are_read() -> None:
    source = Counted(1 << 32)
    assert read_contents(source, seconds=600.0).num_read == source.reads == 1_000


def test_slow_sources_are_compared_as_far_as_both_were_read() -> None:
    ticks = iter(range(100))
    slow = read_contents(Counted(50, lambda index: index in (3, 40)), seconds=10.0, clock=lambda: next(ticks))
    whole = read_contents(Counted(50), seconds=600.0)
    change = ContentsChange.between(RecordedContents.of(whole), RecordedContents.of(slow))
    assert change.describe("training") == f"1 of the first {slow.num_read} training tasks changed"


def test_a_source_that_raises_says_where() -> None:
    class Broken(Counted):
        def __getitem__(self, index: Any) -> Any:
            if index == 2:
                raise ValueError("no row 2")
            return super().__getitem__(index)

    read = read_contents(Broken(5), seconds=60.0)
    assert read.num_read == 2
    assert read.problem.startswith("[2] raised ValueError: no row 2")
    assert RunTasks({"train": read}).warnings() == [f"tasks of train{read.problem}"]


def test_a_damaged_record_leaves_changes_unknown(tmp_path: Path) -> None:
    assert TaskRecord.read(tmp_path).contents == {}
    record = TaskRecord({"train": contents(ROWS)})
    record.write(tmp_path)
    assert TaskRecord.read(tmp_path).contents == record.contents
    now = RunTasks({"train": read_contents(tasks(ROWS), seconds=60.0)})
    assert now.changes_since(tmp_path) == []
    for damaged in ('{"train": [1, "not base64"]}', "", "[" * 100_000, '{"train": '):
        (tmp_path / "tasks.json").write_text(damaged)
        assert ["tasks.json" in clause for clause in now.changes_since(tmp_path)] == [True]


def test_evaluations_on_the_same_tasks_have_one_digest() -> None:
    def digest(rows: Rows, name: str = "held_out") -> int:
        return held_out_digest([HeldOutSplit(name, tasks(rows))])

    assert digest(ROWS) == digest(ROWS[::-1])
    assert len({digest(ROWS), digest(ROWS[1:]), digest([("t0", 5), *ROWS[1:]]), digest(ROWS, "test")}) == 4
    assert float(digest(ROWS)) == digest(ROWS)


# --- splits -----------------------------------------------------------------------------------------------------------


class Rowed(agentrl.Environment):
    """Guesses once; tasks and rewards are rows that a test replaces."""

    seats = ("guesser",)
    rows: ClassVar[dict[str, Rows]] = {}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Guess."))
        ctx.agent("guesser").reward(float(ctx.task.data["value"]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[Task]:
        return tasks(cls.rows[split])


class Other(Rowed):
    rows: ClassVar[dict[str, Rows]] = {"train": [("t0", 0)], "held_out": [("t0", 0)]}


def read_splits(environment: type[agentrl.Environment]) -> RunTasks:
    config = config_for(evaluation={"tasks": 4})
    splits, _ = held_out_task_splits(config.evaluation, config.environment, 0, environment)
    return RunTasks.read(task_source(config.environment, 0, environment, "train"), splits)


def test_splits_that_share_tasks_are_told_as_the_check_tells_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rowed, "rows", {"train": ROWS, "held_out": ROWS})
    (told,) = read_splits(Rowed).warnings()
    assert told in check_environment(Rowed).text
    assert told.startswith("16 ")


def test_all_held_out_tasks_are_compared_and_not_only_the_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    held_out = [(f"h{n}", n + 100) for n in range(99)]
    for place in range(99):
        shared = [*held_out[:place], ("h", 3), *held_out[place + 1 :]]
        monkeypatch.setattr(Rowed, "rows", {"train": ROWS, "held_out": shared})
        assert len(read_splits(Rowed).warnings()) == 1


def test_the_members_of_a_mixture_are_compared_each_with_its_own_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rowed, "rows", {"train": ROWS, "held_out": [("h", "other")]})
    run_tasks = read_splits(mixture({Rowed: 1.0, Other: 1.0}))
    (told,) = run_tasks.warnings()
    assert told.startswith("Other: 1 training task is also held out")
    assert run_tasks.contents.keys() == {"Rowed@train", "Other@train", "Rowed@held_out", "Other@held_out"}
    old, current = Task(id="Rowed:t1", data={"value": "old"}), Task(id="Rowed:t1", data={"value": 1})
    gone = Task(id="Rowed:gone", data={})
    assert [run_tasks.is_current(task) for task in (old, current, gone)] == [False, True, True]


def test_a_training_split_that_is_evaluated_on_purpose_is_no_leak() -> None:
    assert SplitOverlap.of(read_contents(tasks(ROWS), seconds=60.0), {}).warnings == []


# --- two starts -------------------------------------------------------------------------------------------------------


def play(directory: Path, rows: Mapping[str, Rows], steps: int, **changes: Any) -> Run:
    """One process of a run; rewards are the rows' values."""

    async def engine(plan: object, versions: Any, tell: object, log: object) -> ScriptedEngine:
        return ScriptedEngine(guess, versions=versions)

    Rowed.rows = dict(rows)
    factories = RunFactories(
        engine=engine,
        trainer=lambda plan, run: RecordingTrainer(["guesser"], versions=run / "versions"),
        chat_format=lambda model: PlainChatFormat(),
    )
    config = config_for(
        steps=steps,
        name="run",
        directory=str(directory),
        checkpoint={"every": 1},
        evaluation={"tasks": 8, "every": 1},
        best={"metric": "evaluation/reward", "window": 1},
        **changes,
    )
    resume = (directory / "run").exists()
    return asyncio.run(run_training(config, Rowed, factories=factories, resume=resume))


TRAIN = [(f"train{n}", n % 2) for n in range(16)]
ZEROS, ONES = ([(f"h{n}", value) for n in range(8)] for value in (0, 1))


def test_exchanged_held_out_tasks_break_the_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tmp_path, {"train": TRAIN, "held_out": ONES}, 2)
    first = capsys.readouterr().err
    assert "tasks changed" not in first
    exchanged = [*ONES[:4], *ZEROS[4:]]
    run = play(tmp_path, {"train": TRAIN, "held_out": exchanged}, 4)
    told = capsys.readouterr().err
    assert "4 of 8 held-out tasks changed" in told
    assert " 1.000 before" not in told
    assert run.summary["best"]["value"] == 0.5, "the best mean over the other tasks does not count"
    reader = RunReader(tmp_path / "run")
    assert [start.tasks_changed for start in reader.log.starts()] == [(), ("4 of 8 held-out tasks changed",)]
    assert "4 of 8 held-out tasks changed" in [point.mark for point in reader.curve()][2]
    assert reader.evaluation_breaks() == {"guesser": {2}}, "the version that the resume began with is measured again"
    series = metric_series(reader, ["evaluation/reward", "reward/mean"])
    points = [point[:2] for point in series["evaluation/reward"].policies["guesser"]]
    assert points == [(0, 1.0), (1, 1.0), (2, None), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert None not in [value for _, value, _ in series["reward/mean"].policies["guesser"]]
    comparison = compare_runs([reader, reader])
    (curve, _) = (each for each in comparison.curves if each.metric == "evaluation/reward")
    assert [(point.x, point.y) for point in curve.points] == [(2.0, 0.5), (3.0, 0.5), (4.0, 0.5)]
    assert sum("held-out tasks changed" in note for note in comparison.notes) == 2
    reader.close()
    assert main(["run", "curve", str(tmp_path / "run"), "--metric", "evaluation/reward"]) == 0
    shown = capsys.readouterr().out
    assert "0.5" in shown
    assert "1.00 →" not in shown
    assert "step 2: the held-out tasks changed" in shown
    assert main(["run", "curve", str(tmp_path / "run"), "--metric", "evaluation/reward", "--json"]) == 0
    assert [each["step"] for each in json.loads(capsys.readouterr().out) if "tasks_changed" in each] == [2]
    assert main(["run", "view", str(tmp_path / "run"), "--once"]) == 0
    assert "1.000 at step 0" not in capsys.readouterr().out


def test_a_change_is_recorded_by_the_start_that_succeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is lost during the start leads to another one in the same process."""
    play(tmp_path, {"train": TRAIN, "held_out": ONES}, 2)
    failures = [EngineLostError("lost during the start")]

    class LostOnce(ScriptedEngine):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            if failures:
                raise failures.pop()
            super().__init__(*arguments, **named)

    monkeypatch.setattr(f"{__name__}.ScriptedEngine", LostOnce)
    play(tmp_path, {"train": TRAIN, "held_out": ZEROS}, 3)
    assert "lost during the start" in capsys.readouterr().err
    with closing(RunReader(tmp_path / "run")) as reader:
        assert [start.tasks_changed for start in reader.log.starts()][1:] == [("8 of 8 held-out tasks changed",)]


def test_an_unchanged_source_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tmp_path, {"train": TRAIN, "held_out": ZEROS}, 2)
    play(tmp_path, {"train": TRAIN, "held_out": ZEROS[::-1]}, 4)
    told = capsys.readouterr().err
    assert "order of the held-out tasks changed" in told
    play(tmp_path, {"train": TRAIN, "held_out": ZEROS[::-1]}, 5)
    assert "tasks changed" not in capsys.readouterr().err
    reader = RunReader(tmp_path / "run")
    assert reader.evaluation_breaks() == {"guesser": set()}, "the same tasks in another order are comparable"
    reader.close()


def test_given_tasks_replace_their_own_split_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"train": [("t0", 0)], "held_out": [("h0", 1)], "hard": [("d0", 2)]}
    monkeypatch.setattr(Rowed, "rows", rows)
    monkeypatch.setattr(Rowed, "splits", ("train", "held_out", "hard"), raising=False)
    config = config_for(evaluation={"tasks": dict.fromkeys(rows, 4)})
    given = {"train": tasks([("own", 3)]), "held_out": tasks([("mine", 4)])}
    splits, available = held_out_task_splits(config.evaluation, config.environment, 0, Rowed, given)
    contents = {split.name: [task.data["value"] for task in split.tasks] for split in splits}
    assert (contents, available) == ({"train": [3], "held_out": [4], "hard": [2]}, 3)
    config = config_for(evaluation={"tasks": {"hard": 4}})
    with pytest.raises(ConfigError, match=r"train\(held_out=…\): evaluation\.tasks has no split held_out"):
        held_out_task_splits(config.evaluation, config.environment, 0, Rowed, given)
