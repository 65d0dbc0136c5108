"""Metric names, the JSONL sink, progress on a pipe and on a terminal, the plot."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.core.errors import RunDirectoryError, StorageError
from agentrl.core.records import PolicyVersion, ProcessStatus
from agentrl.inspection.overview import run_overview
from agentrl.inspection.reader import RunReader
from agentrl.inspection.statistics import run_state
from agentrl.journal.run_process import (
    RunProcessRecord,
    State,
    find_writing_process,
    read_failure,
    read_process_state,
    record_process_state,
    recording_process_state,
)
from agentrl.journal.store import SqliteJournal
from agentrl.observe.metrics import METRICS, find_registered_metric
from agentrl.observe.progress import LineDisplay, format_evaluation_metrics, format_step_metrics
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.run_observer import EnduringStream, RunObserver, _choice_text
from agentrl.observe.run_screen import format_duration, plot_curve, render_run_screen, sparkline
from agentrl.observe.run_state import (
    MetricsFile,
    RunDisplaySettings,
    RunSnapshot,
    RunState,
    display_settings_from_config,
    read_metrics,
    read_run_snapshot,
    write_run_snapshot,
)
from docs.generators.metrics import render_metrics_page
from tests.journal_cases import write_run

STEP = {
    "reward/mean": 0.5,
    "staleness/mean": 0.25,
    "engine/busy_share": 0.9,
    "trainer/busy_share": 0.4,
    "tokens/sampled_per_s": 1234.5,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_are_unique_and_have_unit_and_meaning() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(metric.unit and metric.meaning for metric in METRICS)
    words = {
        "reward/mean": "reward/mean",
        "reward/solver": "reward/<seat>",
        "evaluation/reward/x": "evaluation/reward/<seat>",
        "drift/special": "drift/<cause>",
        "gate/acceptance": "gate/acceptance",
        "gate/passed": "gate/<answer>",
        "rows/rewritten": "rows/<cause>",
        "my_metric": None,
    }
    for name, known in words.items():
        metric = find_registered_metric(name)
        assert (None if metric is None else metric.name) == known


def test_the_sink_writes_a_line_per_step_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        sink = MetricsFile(path)
        sink.record("policy", step, {"loss": float("nan"), "reward/mean": 0.5})
        sink.close()
        sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"policy": "policy", "step": step, "loss": None, "reward/mean": 0.5} for step in (1, 2)]
    with pytest.raises(StorageError, match=r"metrics.*--resume"):
        MetricsFile(tmp_path / "nowhere" / "metrics.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_line_that_the_disk_refuses_says_how_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.observe.run_state.open_jsonl_to_append", lambda path: io.FileIO("/dev/full", "a"))
    with (
        contextlib.closing(MetricsFile(tmp_path / "metrics.jsonl")) as file,
        pytest.raises(StorageError, match=r"No space left.*free space, then start again with --resume"),
    ):
        file.record("policy", 1, {"loss": 1.0})


PLAN = RunDisplaySettings(name="demo", environment="guess", steps=40, max_staleness={"policy": 1})


def test_a_pipe_gets_a_plain_line_per_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    directory = RunDirectory.create(tmp_path / "run", "{}")
    with RunObserver(directory, plan=PLAN, stream=stream) as observer:
        observer.phase("starting")
        observer.on_step("policy", 3, STEP)
        observer.on_evaluation(
            {"policy": PolicyVersion("policy", 0, 3)},
            {"policy": {"evaluation/reward": 0.75, "evaluation/episodes": 512}},
        )
    assert stream.getvalue() == (
        "starting …\n"
        "step 3/40  reward 0.500  staleness 0.2  engine 90%  trainer 40%  1,234 tokens/s\n"
        "held-out reward 0.750 over 512 tasks (policy@0.3)\n"
    )
    assert observer.steps == [{"step": 3.0, **STEP}]
    assert len(directory.metrics.read_text().splitlines()) == 2
    status = read_run_snapshot(directory.path)
    assert status is not None


def test_each_policy_gets_a_line_of_its_own_with_its_seats() -> None:
    of = {"evaluation/reward": 0.0, "evaluation/reward/o": -0.25, "evaluation/reward/x": 0.25, "evaluation/episodes": 8}
    told = format_evaluation_metrics(PolicyVersion("player", 0, 3), of)
    assert told == "held-out reward 0.000 over 8 tasks (player@0.3, o -0.250, x 0.250)"
    partly = {**of, "evaluation/tasks": 10.0, "evaluation/dropped": 2.0}
    told = format_evaluation_metrics(PolicyVersion("player", 0, 3), partly)
    assert told.startswith("held-out reward 0.000 over 8 of 10 tasks (2 dropped) (player@0.3, ")
    cut = format_evaluation_metrics(PolicyVersion("player", 0, 3), {**partly, "evaluation/truncated": 8.0})
    assert "8 of 10 tasks (2 dropped, 8 episodes truncated) (player@0.3, " in cut
    few = format_evaluation_metrics(
        PolicyVersion("player", 0, 3), {**of, "evaluation/episodes": 80, "evaluation/failed": 7.0}
    )
    assert "failed" not in few
    missing = format_evaluation_metrics(PolicyVersion("other", 0, 1), {"evaluation/episodes": 8})
    assert missing == "held-out tasks were played without other@0.1"


def test_a_terminal_gets_one_screen_that_says_who_waits_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    directory = RunDirectory.create(tmp_path / "run", "{}")
    status = RunSnapshot(phase="training", waits=("3 of 8 units",), in_flight=5)

    async def watched() -> None:
        with RunObserver(directory, plan=PLAN, stream=stream) as observer:
            observer.watch()
            observer.phase("loading the engine")
            for step in (1, 2, 3):
                observer.on_step("policy", step, STEP)
            observer.watch(lambda: status)

    asyncio.run(watched())
    shown = stream.getvalue()
    assert "loading the engine …" in shown
    assert "step 3/40" in shown
    assert "3 of 8 units" in shown
    assert "5 in flight" in shown
    written = read_run_snapshot(directory.path)
    assert written is not None
    assert written.in_flight == 5


def test_a_sink_that_fails_is_dropped_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    class Failing:
        calls = 0

        def record(self, policy: str, step: int, values: object) -> None:
            self.calls += 1
            raise OSError("no network")

        def forget_after(self, steps: object) -> None:
            self.calls += 1

        def close(self) -> None:
            self.calls += 1

    sink, stream = Failing(), io.StringIO()
    with RunObserver(RunDirectory.create(tmp_path / "run", "{}"), plan=PLAN, stream=stream) as observer:
        observer.add_sinks([sink])
        observer.on_step("policy", 1, STEP)
        observer.on_step("policy", 2, STEP)
    assert sink.calls == 1
    assert "OSError: no network" in stream.getvalue()


def test_a_resumed_run_shows_its_earlier_steps_and_repeats_replace_what_was_lost(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "{}")
    for steps, reward in (((1, 2, 3), 0.1), ((2,), 0.9)):
        with RunObserver(directory, plan=PLAN, quiet=True) as observer:
            for step in steps:
                observer.on_step("policy", step, {"reward/mean": reward})
    assert observer.state.policies["policy"].series("reward/mean") == ([1, 2], [0.1, 0.9])


def test_evaluations_that_a_rollback_undid_are_shown_no_more() -> None:
    state = RunState(plan=RunDisplaySettings())
    for life in ((1, 2, 3, 4), (3, 4)):
        for step in life:
            state.record("policy", step, STEP)
            if step % 2 == 0:
                state.record("policy", step, {"evaluation/reward": float(len(life))})
        assert state.policies["policy"].series("evaluation/reward")[0] == [2, 4]
        state.record("policy", 3, STEP)
        assert state.policies["policy"].series("evaluation/reward") == ([2], [4.0])


def test_the_end_shows_the_whole_run_also_after_a_resume_and_a_curve_for_each_policy(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "{}")
    summary = {
        "steps": 2,
        "run_seconds": 2.5,
        "rl_seconds": 1.0,
        "engine_busy_share": 0.5,
        "trainer_busy_share": 0.5,
        "held_out_tasks": 9,
    }
    plan = RunDisplaySettings(name="demo", steps=4, max_staleness={"a": 1, "b": 1})
    stream = io.StringIO()
    for steps, held_out, shown in (((1, 2), (0, 0.25), io.StringIO()), ((3, 4), (2, 0.75), stream)):
        with RunObserver(directory, plan=plan, stream=shown) as observer:
            step, reward = held_out
            observer.on_evaluation({"a": PolicyVersion("a", 0, step)}, {"a": {"evaluation/reward": reward}})
            for number in steps:
                for policy in ("a", "b"):
                    observer.on_step(policy, number, {"reward/mean": number / 4})
            observer.finish(summary)
    end = stream.getvalue()
    assert "training reward of a by optimizer step  0.25" in end
    assert "training reward of b by optimizer step  0.25" in end
    assert re.search(r"^ +1 +step +4$", end, re.MULTILINE)
    assert "4 steps of each of 2 policies in 2.5 s; in the 1.0 s of training, engine busy 50%" in end
    assert "held-out reward of a on 9 tasks: 0.250 before, 0.750 after" in end
    assert "held-out reward of b" not in end, "it was not measured twice"
    with RunObserver(directory, plan=plan, stream=stream) as observer:
        observer.finish({**summary, "steps": 0})
    assert "4 steps" in stream.getvalue()
    for tasks, told in (
        (5, "held-out reward of a on 5 tasks: 0.500 after; the evaluations before were on other tasks"),
        (5, "held-out reward of a on 5 tasks: 0.500 at step 4, 0.625 after"),
    ):
        with RunObserver(directory, plan=plan, stream=stream) as observer:
            step = 4 if "other tasks" in told else 5
            metrics = {"evaluation/reward": step / 8, "evaluation/tasks": float(tasks)}
            observer.on_evaluation({"a": PolicyVersion("a", 0, step)}, {"a": metrics})
            observer.finish({**summary, "held_out_tasks": tasks})
        assert told in stream.getvalue()
    for step, dropped, told in (
        (6, 2, "held-out reward of a: 0.500 at step 4 (5 tasks), 0.500 after (3 of 5 tasks; 2 dropped)"),
        (4, 2, "held-out reward of a on 3 of 5 tasks (2 dropped): 0.500 at step 4, 0.500 after"),
    ):
        with RunObserver(directory, plan=plan, stream=stream) as observer:
            counts = {"tasks": 5.0, "episodes": 5.0 - dropped, "dropped": float(dropped)}
            metrics = {"evaluation/reward": 0.5, **{f"evaluation/{name}": count for name, count in counts.items()}}
            observer.on_evaluation({"a": PolicyVersion("a", 0, step)}, {"a": metrics})
            observer.finish({**summary, "held_out_tasks": 5})
        assert told in stream.getvalue()
    longer = RunDisplaySettings(name="demo", steps=6, max_staleness={"a": 1, "b": 1})
    with RunObserver(directory, plan=longer, stream=stream) as observer:
        observer.finish({**summary, "steps": 0})
    assert "step 4 of 6" in stream.getvalue()


def test_what_is_waited_for_after_the_end_is_shown_on_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with RunObserver(RunDirectory.create(tmp_path / "run", "{}"), plan=PLAN, stream=stream) as observer:
        observer.phase("training")
        with observer.closing("stopping the trainer"):
            pass
    assert "stopping the trainer" in stream.getvalue()


def test_damaged_metrics_status_and_configurations_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    lines = [
        '{"policy": "p", "step": 1, "loss": 0.5, "x": null, "y": "no", "z": true}',
        "[]",
        "{",
        "\x00",
        '{"step": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"policy": "p", "step": 1e400, "loss": 1}']))
    state = RunState(
        plan=display_settings_from_config({"policies": {"p": {"max_staleness": "many"}}, "steps": [], "model": None})
    )
    read_metrics(tmp_path / "metrics.jsonl", state)
    assert state.policies["p"].steps == {1: {"loss": 0.5}}
    (tmp_path / "status.json").write_text("{")
    assert read_run_snapshot(tmp_path) is None
    write_run_snapshot(tmp_path, RunSnapshot(phase="training", dropped={"x": 1}))
    assert read_run_snapshot(tmp_path) == RunSnapshot(phase="training", dropped={"x": 1})


def test_the_view_shows_what_each_node_does(tmp_path: Path) -> None:
    engine = ProcessStatus(name="engine 0", node="10.0.0.2", gpus=("0", "1"), doing="serves")
    worker = ProcessStatus(name="worker 1", node="10.0.0.2", doing="plays 7 episodes")
    write_run_snapshot(tmp_path, RunSnapshot(phase="training", processes=(engine, worker), bottleneck="engines"))
    state = RunState(plan=RunDisplaySettings(), status=read_run_snapshot(tmp_path))
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state))
    assert "10.0.0.2    engine 0 on GPU 0, 1 serves · worker 1 plays 7 episodes" in stream.getvalue()
    assert "bottleneck  engines" in stream.getvalue()


def test_nothing_of_a_run_reaches_the_terminal_as_it_is() -> None:
    hostile = "\x1b[31mred\u202e\n"
    plan = RunDisplaySettings(name=hostile, environment=hostile, max_staleness={hostile: 1})
    process = ProcessStatus(name=hostile, node=hostile, gpus=(hostile,), doing=hostile)
    status = RunSnapshot(
        phase=hostile, waits=(hostile,), dropped={hostile: 1}, processes=(process,), bottleneck=hostile
    )
    state = RunState(plan=plan, status=status, problem=hostile)
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state, age_s=99.0))
    assert not {"\x1b", "\u202e"} & set(stream.getvalue())


def test_the_view_of_several_policies_fits_the_width() -> None:
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"proposer": 1, "solver": 2}))
    for step in range(1, 6):
        for policy in ("proposer", "solver"):
            state.record(policy, step, {**STEP, "step/seconds": 2.0, "entropy": 0.5})
    stream = io.StringIO()
    Console(file=stream, width=80).print(render_run_screen(state, width=80))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("step 5/9" in line and "about 0:08 left" in line for line in lines) == 2


@pytest.mark.parametrize(
    ("standing", "phase", "is_left"),
    [("running", "training", True), ("running", "paused", False), ("running", "draining", False)]
    + [(standing, "training", False) for standing in ("finished", "stopped", "failed", "killed")],
)
def test_only_a_run_that_works_toward_its_last_step_has_time_left(standing: str, phase: str, is_left: bool) -> None:
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"p": 1}), standing=standing)
    state.status = RunSnapshot(phase=phase)
    state.record("p", 2, {**STEP, "step/seconds": 2.0})
    screen, lines = io.StringIO(), io.StringIO()
    Console(file=screen, width=100).print(render_run_screen(state, width=100))
    LineDisplay(state, lines).step("p", 2, STEP)
    assert ["0:14 left" in shown.getvalue() for shown in (screen, lines)] == [is_left, is_left]
    assert ("the same command with --resume" in screen.getvalue()) == (standing == "killed")


def test_the_screen_of_a_failed_run_has_the_reason_and_the_place_of_the_rest(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))

    def shown() -> str:
        stream = io.StringIO()
        with contextlib.closing(RunReader(tmp_path)) as reader:
            Console(file=stream, width=300).print(render_run_screen(run_state(reader), width=100))
            assert run_overview(reader).failure in stream.getvalue()
        return " ".join(stream.getvalue().split())

    with pytest.raises(StorageError), recording_process_state(tmp_path):
        raise StorageError("disk /data is full. Make room there; then resume the run.\nmore")
    assert f"failed 0:00 disk /data is full (all of it: {tmp_path / 'error.txt'})" in re.sub(
        r"\d:\d\d", "0:00", shown()
    )
    assert (tmp_path / "error.txt").read_text() == "disk /data is full. Make room there; then resume the run.\nmore\n"
    with pytest.raises(ZeroDivisionError), recording_process_state(tmp_path):
        _ = 1 / 0
    assert "ZeroDivisionError: division by zero (all of it" in shown()
    assert "_ = 1 / 0" in (tmp_path / "error.txt").read_text()
    copy = tmp_path.with_name("copy")
    shutil.copytree(tmp_path, copy)
    with contextlib.closing(RunReader(copy)) as reader:
        assert run_state(reader).failure == f"ZeroDivisionError: division by zero (all of it: {copy / 'error.txt'})"
    with contextlib.suppress(KeyboardInterrupt), recording_process_state(tmp_path):
        raise KeyboardInterrupt
    assert "all of it" not in shown(), "a run that was stopped did not fail"


def test_a_failure_is_recorded_though_its_text_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "error.txt").mkdir()
    with pytest.raises(StorageError), recording_process_state(tmp_path):
        raise StorageError("disk full")
    assert read_process_state(tmp_path) == "failed"
    assert not read_failure(tmp_path)


def test_the_error_of_an_earlier_process_is_not_shown(tmp_path: Path) -> None:
    with pytest.raises(StorageError), recording_process_state(tmp_path):
        raise StorageError("of the first process")
    with recording_process_state(tmp_path):
        record_process_state(tmp_path, "failed")
    assert not read_failure(tmp_path)


def test_rewards_of_seats_and_own_metrics_are_shown_before_other_figures() -> None:
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"trader": 1}))
    for step in (1, 2):
        seats = {"reward/buyer": 0.25 * step, "reward/seller": -0.25 * step}
        state.record("trader", step, {"reward/mean": 0.0, **seats, "agreed": 0.75, "entropy": 0.5})
    held_out = {"evaluation/reward": 0.0, "evaluation/reward/buyer": 0.4, "evaluation/reward/seller": -0.4}
    state.record("trader", 2, held_out)
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state, width=100))
    page = stream.getvalue()
    assert "reward of training of buyer by step  0.250 → 0.500" in page
    assert "reward of training of seller by step  -0.250 → -0.500" in page
    assert "reward of training by step" not in page, "no sum over seats"
    labels = "held-out \\w+|(?:buyer|seller) reward|agreed|entropy"
    rows = [row for line in page.splitlines()[-5:] if (row := re.findall(labels, line))]
    assert [label for column in zip(*rows, strict=True) for label in column] == [
        *("held-out buyer", "held-out seller", "buyer reward", "seller reward", "agreed", "entropy")
    ]


def test_lines_and_the_end_show_the_reward_of_each_seat_and_no_sum(tmp_path: Path) -> None:
    seats = [{"reward/mean": 0.0, "reward/buyer": 0.25 * step, "reward/seller": -0.25 * step} for step in (1, 2)]
    assert format_step_metrics(seats[1]) == "buyer reward 0.500  seller reward -0.500"
    plan, stream = RunDisplaySettings(steps=2, max_staleness={"trader": 1}), io.StringIO()
    summary = {"run_seconds": 1.0, "rl_seconds": 1.0, "engine_busy_share": 0.5, "trainer_busy_share": 0.5}
    with RunObserver(RunDirectory.create(tmp_path / "run", "{}"), plan=plan, stream=stream) as observer:
        for step, metrics in enumerate(seats, 1):
            observer.on_step("trader", step, metrics)
        observer.finish({**summary, "held_out_tasks": 0})
    assert "training reward as buyer by optimizer step  0.250 → 0.500" in stream.getvalue()
    assert "training reward as seller by optimizer step  -0.250 → -0.500" in stream.getvalue()
    assert "training reward by optimizer step" not in stream.getvalue()


def screen_of(state: RunState) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state, width=100))
    return stream.getvalue()


def test_a_step_without_a_gradient_says_so_in_its_line_and_on_the_screen() -> None:
    healthy = {"reward/mean": 0.5, "zero_gradient": 0.0, "advantage/zero_share": 0.5, "advantage/alone_share": 0.0}
    equal = {**healthy, "zero_gradient": 1.0, "advantage/zero_share": 1.0, "trainer/busy_share": 0.0}
    assert format_step_metrics(equal) == "reward 0.500  trainer 0%  no gradient: all groups were equal"
    assert format_step_metrics({**equal, "advantage/alone_share": 1.0}).endswith("  no gradient")
    assert "gradient" not in format_step_metrics({**equal, "zero_gradient": 0.0})
    state = RunState(plan=RunDisplaySettings(steps=20, max_staleness={"policy": 0}))
    for step in range(1, 11):
        state.record("policy", step, equal if step in (3, 9, 10) else healthy)
    assert "no gradient: all groups were equal at 3 steps of 10: 3, 9, 10" in screen_of(state)
    for step in range(11, 20):
        state.record("policy", step, equal)
    assert "at 12 steps of 19: 4 earlier, 12, 13, 14, 15, 16, 17, 18, 19" in screen_of(state)
    fresh = RunState(plan=RunDisplaySettings(steps=20, max_staleness={"policy": 0}))
    fresh.record("policy", 1, healthy)
    assert "gradient" not in screen_of(fresh)


def test_a_slow_rate_is_not_shown_as_none() -> None:
    slow = {"tokens/sampled_per_s": 0.034}
    assert format_step_metrics(slow) == "0.034 tokens/s"
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"policy": 1}))
    state.record("policy", 1, slow)
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state, width=100))
    assert re.search(r"tokens/s +0\.034 ", stream.getvalue())


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        ("running", "too early to tell after 0 steps"),
        ("stopped", "too few steps to tell, as the run ended after 0 steps"),
    ],
)
def test_without_alarms_the_screen_says_whether_they_may_still_come(standing: str, words: str) -> None:
    state = RunState(plan=RunDisplaySettings(steps=9), standing=standing)
    screen = io.StringIO()
    Console(file=screen, width=100).print(render_run_screen(state))
    assert f"no alarms: {words}" in screen.getvalue()


def test_the_reward_of_the_first_step_is_shown_before_there_is_a_curve() -> None:
    state = RunState(plan=RunDisplaySettings(steps=9, max_staleness={"policy": 1}))
    state.record("policy", 1, STEP)
    stream = io.StringIO()
    Console(file=stream, width=100).print(render_run_screen(state, width=100))
    assert "reward 0.500 at step 1" in stream.getvalue()


def test_a_pipe_gets_a_line_about_an_evaluation_now_and_then() -> None:
    stream = io.StringIO()
    state = RunState(plan=PLAN)
    display = LineDisplay(state, stream)
    phases = [(0.0, "training", None), (1.0, "evaluating after training", (0, 512))]
    phases += [(30.0, "evaluating after training", (300, 512)), (31.0, "evaluating after training", (310, 512))]
    for seconds, phase, progress in [*phases, (32.0, "training", (1, 512))]:
        state.status = RunSnapshot(phase=phase, progress=progress, seconds=seconds)
        display.show()
    assert stream.getvalue().splitlines() == [
        "evaluating after training: 0 of 512 episodes",
        "evaluating after training: 310 of 512 episodes, about 0:20 left",
    ]


def test_a_pipe_gets_rarer_lines_while_nothing_changes() -> None:
    state, shown = RunState(plan=PLAN), list[int]()
    stream = io.StringIO()
    display = LineDisplay(state, stream)
    for second in range(300):
        before = len(stream.getvalue())
        num_ended = 3 if second < 220 else 3 + second // 40
        state.status = RunSnapshot(phase="evaluating after training", progress=(num_ended, 32), seconds=float(second))
        display.show()
        if len(stream.getvalue()) > before:
            shown.append(second)
    assert shown == [0, 30, 90, 150, 210, 240, 270]


def test_a_later_step_and_any_other_long_phase_say_what_they_do() -> None:
    state, stream = RunState(plan=PLAN), io.StringIO()
    display = LineDisplay(state, stream)
    waits = ("the trainer works on step 3",)
    for second in range(101):
        state.status = RunSnapshot(phase="training", waits=waits, seconds=float(second))
        if second % 8 == 0 and second < 40:
            state.record("policy", second // 8, {"reward/mean": 0.5})  # short steps need no such line
        if second >= 60:
            state.status = RunSnapshot(phase="loading trainer and engine", seconds=float(second))
        display.show()
    assert stream.getvalue().splitlines() == [
        "training for 10 s: the trainer works on step 3",
        "loading trainer and engine for 10 s",
        "loading trainer and engine for 40 s",
    ]


def test_the_time_left_leaves_out_episodes_that_ended_before_the_display_began() -> None:
    stream = io.StringIO()
    state = RunState(plan=PLAN)
    display = LineDisplay(state, stream)
    for seconds, num_ended in [(500.0, 40), (600.0, 60)]:
        state.status = RunSnapshot(phase="evaluating after training", progress=(num_ended, 160), seconds=seconds)
        display.show()
    assert stream.getvalue().splitlines() == [
        "evaluating after training: 40 of 160 episodes",
        "evaluating after training: 60 of 160 episodes, about 8:20 left",
    ]


def test_the_view_agrees_with_the_metrics_and_the_journal(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))
    record_process_state(tmp_path, "running")
    pace = "about 9 s to sample a step; so far 3 of 4 episodes"
    write_run_snapshot(tmp_path, RunSnapshot(phase="training", pace=pace, wall=time.time()))
    with contextlib.closing(RunReader(tmp_path)) as reader:

        def status() -> RunSnapshot:
            found = run_state(reader).status
            assert found is not None
            return found

        assert status().pace == pace
        with contextlib.closing(MetricsFile(tmp_path / "metrics.jsonl")) as metrics:
            metrics.record("policy", 1, STEP)
        assert status().pace == "", "the step was taken after the status was written"
        waits = ("admission waits for max_in_flight: 7 episodes are running",)
        write_run_snapshot(tmp_path, RunSnapshot(phase="training", waits=waits, in_flight=7, wall=time.time()))
        assert status().in_flight == 7, "the number of the same moment, although the journal has another by now"
        record_process_state(tmp_path, "stopped")
        assert status().in_flight == reader.count("status = in_flight") == 1


def test_sparklines_and_durations() -> None:
    assert sparkline([1.0, 1.0, math.nan]) == "▄▄"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), width=7)) == 7
    assert [format_duration(seconds) for seconds in (0, 59.6, 3600)] == ["0:00", "1:00", "1:00:00"]


def test_the_page_of_metrics_is_up_to_date() -> None:
    written = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text(encoding="utf-8")
    assert written == render_metrics_page(), "run `make docs-config`"
    assert not re.findall(r"\{[A-Z].*?\}", written), "a name stands where its value belongs"


def test_what_was_not_measured_is_left_out() -> None:
    assert format_step_metrics({"reward/mean": 1.0}) == "reward 1.000"
    assert format_step_metrics({}) == ""


def test_a_rising_curve_starts_low_and_ends_high() -> None:
    lines = plot_curve([0.1 * value for value in range(11)], title="reward", width=20, height=5).splitlines()
    assert lines[0].strip() == "reward  0.00 → 1.00"
    plotted = [line.split("┤")[-1].split("│")[-1] for line in lines[1:6]]
    assert [len(line) - len(line.lstrip()) for line in plotted] == sorted(
        (len(line) - len(line.lstrip()) for line in plotted), reverse=True
    )
    assert lines[1].startswith("1.00 ┤")
    assert lines[5].startswith("0.00 ┤")
    assert lines[-1].split() == ["1", "step", "11"]


def ticks_of(values: list[float]) -> list[str]:
    lines = plot_curve(values, width=20, height=10).splitlines()
    return [line.split("┤")[0].strip() for line in lines if "┤" in line]


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.0, 0.0], ["1.00", "0.50", "0.00"]),
        ([0.3, 0.3], ["0.600", "0.300", "0.000"]),
        ([0.356, 0.506, 0.61], ["0.750", "0.500", "0.250"]),
        ([1e-6, 3e-6], ["3.00e-06", "2.00e-06", "1.00e-06"]),
        ([-0.0852, 0.563], ["1.00", "0.00", "-1.00"]),
        ([-1.33e-15, 0.0], ["1.00", "0.50", "0.00"]),
        ([120.0, 455.0], ["500", "250", "0"]),
    ],
)
def test_the_ticks_of_a_plot_are_round_and_differ(values: list[float], ticks: list[str]) -> None:
    assert ticks_of(values) == ticks


@given(
    st.lists(st.floats(-1e12, 1e12) | st.just(math.nan) | st.just(math.inf), max_size=200),
    st.integers(1, 80),
    st.integers(1, 20),
)
def test_any_values_fit_the_frame(values: list[float], width: int, height: int) -> None:
    lines = plot_curve(values, width=width, height=height).splitlines()
    if any(math.isfinite(value) for value in values):
        assert len(lines) == max(height, 2) + 3
        margin = lines[-2].index("└")
        assert all(len(line) <= margin + 1 + max(width, 10) for line in lines[1:-2])
    else:
        assert lines == ["nothing to plot yet"]


def test_only_a_regular_file_of_metrics_is_read_and_of_a_long_one_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "directory").mkdir()
    state = RunState(plan=PLAN)
    for name in ("device", "fifo", "directory", "missing"):
        read_metrics(tmp_path / name, state)
    assert not any(policy.steps for policy in state.policies.values())
    lines = [f'{{"policy": "policy", "step": {step}, "loss": 0.5}}' for step in range(1, 10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr("agentrl.observe.run_state.MAX_METRICS_BYTES", 100)
    read_metrics(tmp_path / "metrics.jsonl", state)
    assert list(state.policies["policy"].steps) == [8, 9]


@pytest.mark.parametrize(
    ("state", "error", "outcome"),
    [
        ("finished", None, "finished"),
        ("stopped", None, "stopped"),
        ("running", None, "killed"),
        (None, RuntimeError("full"), "failed"),
        (None, KeyboardInterrupt(), "stopped"),
    ],
)
def test_how_a_process_left_a_run_stays_behind(
    tmp_path: Path, state: State | None, error: BaseException | None, outcome: str
) -> None:
    directory = RunDirectory.create(tmp_path / "run", "{}")
    journal = SqliteJournal(directory.journal)
    reader = RunReader(directory.path)
    assert reader.standing() == "running", "its lock is held"
    with contextlib.suppress(RuntimeError, KeyboardInterrupt), recording_process_state(directory.path):
        if error is not None:
            raise error
        if state is not None:
            record_process_state(directory.path, state)
    write_run_snapshot(directory.path, RunSnapshot(phase="training", waits=("a task",), wall=1.0))
    assert reader.standing() == "running"
    asyncio.run(journal.close())
    assert reader.standing() == outcome
    found = run_state(reader)
    assert (found.standing, found.status) == (outcome, RunSnapshot(phase="training", wall=1.0))
    write_run_snapshot(directory.path, RunSnapshot(phase="training", wall=time.time()))
    assert reader.standing() == ("running" if outcome == "killed" else outcome), "the process in its lock lives"
    lock = directory.path / "journal" / "run.lock"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    lock.write_text(f"{ended.pid}\n")
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    assert reader.standing() == outcome, "it has ended, and its parent has not waited for it yet"
    ended.wait()
    assert reader.standing() == outcome, "there is no such process"
    record = RunProcessRecord.read(directory.path)
    record.machine = "another"
    record.write(directory.path)
    assert reader.standing() == ("running" if outcome == "killed" else outcome), "its lock may be another container's"
    reader.close()


def test_a_lock_file_that_is_deleted_admits_no_second_writer(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path)
    (tmp_path / "run.lock").unlink()
    assert find_writing_process(tmp_path) == os.getpid()
    for _ in range(2):  # the refused one leaves a lock file that names nobody
        with pytest.raises(RunDirectoryError, match=f"process {os.getpid()} "):
            SqliteJournal(tmp_path)
    asyncio.run(journal.close())
    assert find_writing_process(tmp_path) is None
    asyncio.run(SqliteJournal(tmp_path).close())


def test_the_lock_of_another_file_with_the_same_inode_number_is_not_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inodes are numbered by device."""
    (tmp_path / "run.lock").write_text("41\n")
    found = tmp_path.stat()
    here = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    read = Path.read_text

    def writer(*locks: str) -> int | None:
        listed = "".join(f"{n}: FLOCK  ADVISORY  WRITE {lock} 0 EOF\n" for n, lock in enumerate(locks))
        monkeypatch.setattr(
            Path, "read_text", lambda path, *a, **b: listed if str(path) == "/proc/locks" else read(path, *a, **b)
        )
        return find_writing_process(tmp_path)

    assert writer(f"42 {here}:{found.st_ino}") == 42
    assert writer(f"42 ff:fe:{found.st_ino}") is None
    assert writer(f"42 ff:fe:{found.st_ino}", f"41 ff:fd:{found.st_ino}") == 41, "an overlay's device is another"
    assert writer(f"41 {here}:{found.st_ino + 1}") is None


def test_progress_is_never_written_into_the_file_that_got_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    terminal, checkpoint = tmp_path / "terminal", tmp_path / "checkpoint"
    with terminal.open("w") as stream:
        shown = EnduringStream(stream)
        number = stream.fileno()
        os.close(number)
        assert os.open(checkpoint, os.O_WRONLY | os.O_CREAT) == number  # closed with the stream
        shown.write("step 1\n")
        shown.close()
    assert terminal.read_text() == "step 1\n"
    assert not checkpoint.read_text()


def test_progress_goes_to_the_wrapper_of_a_stream_and_not_past_it(tmp_path: Path) -> None:
    class Tee:
        def __init__(self, stream: object) -> None:
            self.stream, self.seen = stream, ""

        def write(self, text: str) -> int:
            self.seen += text
            return len(text)

        def __getattr__(self, name: str) -> object:
            return getattr(self.stream, name)

    with (tmp_path / "terminal").open("w") as stream:
        tee = Tee(stream)
        shown = EnduringStream(tee)  # type: ignore[arg-type]
        shown.write("step 1\n")
        shown.close()
        assert tee.seen == "step 1\n"
        seen: list[str] = []
        stream.write = lambda text: seen.append(text) or len(text)  # type: ignore[method-assign,func-returns-value]
        EnduringStream(stream).write("step 2\n")
        assert seen == ["step 2\n"]


def test_the_best_versions_are_named_as_everywhere() -> None:
    best = {"metric": "reward/mean", "value": 0.9, "steps": {"solver": 10}, "versions": {"solver": "solver@1.10"}}
    assert _choice_text({"best": best}) == "best reward/mean: 0.900 with solver@1.10\n"
