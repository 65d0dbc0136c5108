"""Metric names, the JSONL sink, progress on a pipe and on a terminal, the plot."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import StorageError
from agentrl.core.records import PolicyVersion
from agentrl.observe.metrics import METRICS, JsonlSink, Sink, describe
from agentrl.observe.plot import curve
from agentrl.observe.progress import Progress, figures
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.run_observer import RunObserver

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
    found = [describe(name) for name in ("reward/mean", "reward/solver", "drift/special", "my_metric")]
    assert [None if metric is None else metric.name for metric in found] == [
        "reward/mean",
        "reward/<seat>",
        "drift/<cause>",
        None,
    ]


def test_the_sink_writes_a_line_per_step_and_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        sink: Sink = JsonlSink(path)
        sink.record("policy", step, {"loss": float("nan"), "reward/mean": 0.5})
        sink.close()
        sink.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"policy": "policy", "step": step, "loss": None, "reward/mean": 0.5} for step in (1, 2)]
    with pytest.raises(StorageError, match="metrics cannot be written"):
        JsonlSink(tmp_path / "nowhere" / "metrics.jsonl")


def test_a_pipe_gets_a_plain_line_per_step(tmp_path: Path) -> None:
    stream = io.StringIO()
    directory = RunDirectory.create(tmp_path / "run", "{}")
    with RunObserver(directory, policies=["policy"], steps=40, stream=stream) as observer:
        observer.phase("starting")
        observer.on_step("policy", 3, STEP)
        observer.on_evaluation(
            {"policy": PolicyVersion("policy", 0, 3)}, {"evaluation/reward": 0.75, "evaluation/episodes": 512}
        )
    assert stream.getvalue() == (
        "starting …\n"
        "step 3/40  reward 0.500  staleness 0.2  engine 90%  trainer 40%  1,234 tokens/s\n"
        "held-out reward 0.750 over 512 tasks (policy@0.3)\n"
    )
    assert observer.steps == [{"step": 3.0, **STEP}]
    assert len(directory.metrics.read_text().splitlines()) == 2


def test_a_terminal_gets_a_bar_for_each_policy() -> None:
    stream = Terminal()
    progress = Progress(["proposer", "solver"], 40, stream=stream)
    progress.on_step("solver", 3, STEP)
    progress.on_evaluation({}, {})
    progress.close()
    progress.close()
    shown = stream.getvalue()
    assert "proposer" in shown
    assert "3/40" in shown
    assert "reward 0.500" in shown


def test_what_was_not_measured_is_left_out() -> None:
    assert figures({"reward/mean": 1.0}) == "reward 1.000"
    assert figures({}) == ""


def test_a_rising_curve_starts_low_and_ends_high() -> None:
    lines = curve([0.1 * value for value in range(11)], title="reward", width=20, height=5).splitlines()
    assert lines[0].strip() == "reward  0.00 → 1.00"
    plotted = [line.split("┤")[-1].split("│")[-1] for line in lines[1:6]]
    assert [len(line) - len(line.lstrip()) for line in plotted] == sorted(
        (len(line) - len(line.lstrip()) for line in plotted), reverse=True
    )
    assert lines[1].startswith("1.00 ┤")
    assert lines[5].startswith("0.00 ┤")
    assert lines[-1].split() == ["1", "step", "11"]


@given(
    st.lists(st.floats(-1e12, 1e12) | st.just(math.nan) | st.just(math.inf), max_size=200),
    st.integers(1, 80),
    st.integers(1, 20),
)
def test_any_values_fit_the_frame(values: list[float], width: int, height: int) -> None:
    lines = curve(values, width=width, height=height).splitlines()
    if any(math.isfinite(value) for value in values):
        assert len(lines) == max(height, 2) + 3
        margin = lines[-2].index("└")
        assert all(len(line) <= margin + 1 + max(width, 10) for line in lines[1:-2])
    else:
        assert lines == ["nothing to plot yet"]
