"""The report and the metrics' text formats: self-contained, escaped, and true to the run."""

from __future__ import annotations

import asyncio
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import ConfigError, InputError
from agentrl.core.installation import install_command
from agentrl.inspection.reader import RunReader
from agentrl.inspection.report import write_report
from agentrl.inspection.statistics import latest_metrics, run_state
from agentrl.observe.alarm_lines import Alarm
from agentrl.observe.report import page
from agentrl.observe.run_state import RunPlan, RunState
from agentrl.observe.sinks import open_sinks, prometheus
from agentrl.observe.status import Status
from agentrl.observe.svg import Line, plot
from tests.journal_cases import write_run

HOSTILE = "<script>alert(1)</script>\"'&\u202e\x1b[31m"


class Elements(HTMLParser):
    """Names and attributes of everything on a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def test_nothing_of_a_run_becomes_markup_and_nothing_is_fetched() -> None:
    plan = RunPlan(name=HOSTILE, environment=HOSTILE, model=HOSTILE, steps=3, max_staleness={HOSTILE: 1})
    state = RunState(plan=plan, path=HOSTILE, status=Status(phase=HOSTILE, dropped={HOSTILE: 3}))
    for step in (1, 2, 3):
        state.record(HOSTILE, step, {"reward/mean": 0.1 * step, HOSTILE: 1.0})
    state.record(HOSTILE, 3, {"evaluation/reward": 0.5})
    alarm = Alarm(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    text = page(state, config={HOSTILE: HOSTILE}, raised=[(1, alarm)], summary={"rl_seconds": "no"})
    elements = Elements(text)
    assert not {"script", "img", "link", "iframe", "object"} & elements.names
    assert not {"src", "href", "onload", "onclick", "style"} & elements.attributes
    assert not re.search(r"https?://", text)
    assert "&lt;script&gt;" in text
    assert not {"\u202e", "\x1b"} & set(text)
    assert "default-src &#x27;none&#x27;" in text or "default-src 'none'" in text


def test_the_report_of_a_run_shows_its_numbers(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "demo"))
    path = write_report(tmp_path / "demo")
    text = path.read_text(encoding="utf-8")
    assert path.name == "report.html"
    assert "<h1>demo</h1>" in text
    reader = RunReader(tmp_path / "demo")
    state = run_state(reader)
    counts, statuses = reader.counts(), {line.status for line in reader.episodes("purpose = train", limit=1000)}
    for status in statuses:
        assert counts[status] == reader.count(f"purpose = train and status = {status}")
    assert sum(reader.drop_reasons().values()) == counts.get("dropped", 0)
    reader.close()
    assert state.status is not None
    assert f"<td class=n>{state.status.trained}</td>" in text
    with pytest.raises(InputError, match="no run here"):
        write_report(tmp_path)


@given(
    st.lists(st.floats(-1e9, 1e9) | st.just(math.nan) | st.just(math.inf), max_size=60),
    st.sampled_from([None, 0.0]),
)
def test_any_values_give_a_well_formed_plot_inside_its_frame(values: list[float], low: float | None) -> None:
    drawn = plot([Line("x", range(1, len(values) + 1), values)], title="<&>", low=low)
    if not any(map(math.isfinite, values)):
        assert drawn == ""
        return
    root = ElementTree.fromstring(drawn)
    points = [point for line in root.iter("polyline") for point in line.attrib["points"].split()]
    points += [f"{circle.attrib['cx']},{circle.attrib['cy']}" for circle in root.iter("circle")]
    for point in points:
        x, y = map(float, point.split(","))
        assert 0 <= x <= 420
        assert 0 <= y <= 190


def test_a_long_series_is_drawn_with_few_points() -> None:
    drawn = plot([Line("x", range(10_000), [float(n) for n in range(10_000)])], title="x")
    assert drawn.count(",") <= 400


def test_prometheus_text_has_one_help_per_name_and_escaped_labels() -> None:
    text = prometheus('a"b\\c', {"p": {"reward/mean": 0.5, "step": 3.0}, "q": {"reward/mean": 1.0}})
    assert text == (
        "# HELP agentrl_reward_mean mean reward of the units the step consumed (reward)\n"
        "# TYPE agentrl_reward_mean gauge\n"
        'agentrl_reward_mean{run="a\\"b\\\\c",policy="p"} 0.5\n'
        'agentrl_reward_mean{run="a\\"b\\\\c",policy="q"} 1.0\n'
        "# HELP agentrl_step optimizer steps the policy has taken (steps)\n# TYPE agentrl_step gauge\n"
        'agentrl_step{run="a\\"b\\\\c",policy="p"} 3.0\n'
    )


def test_the_newest_value_of_each_metric_counts() -> None:
    state = RunState(plan=RunPlan(max_staleness={"p": 0}))
    state.record("p", 1, {"k3": 0.1, "loss": 1.0})
    state.record("p", 2, {"loss": 2.0})
    state.record("p", 2, {"evaluation/reward": 0.5})
    assert latest_metrics(state) == {"p": {"evaluation/reward": 0.5, "k3": 0.1, "loss": 2.0, "step": 2.0}}


def test_a_sink_without_its_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("trackio"))):
        open_sinks(["trackio"], tmp_path, {"policies": {}})


class LoggingModule(ModuleType):
    """wandb's and trackio's interface as it was recorded with wandb 0.31 and trackio 0.43: `init`, `log`, `finish`."""

    def __init__(self) -> None:
        super().__init__("logging_module")
        self.calls: list[tuple[object, ...]] = []

    def init(self, *, project: str, name: str, config: dict[str, object], **options: object) -> LoggingModule:
        self.calls.append(("init", project, name, options))
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.calls.append(("define_metric", name, step_metric))

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.calls.append(("log", values, step))

    def finish(self) -> None:
        self.calls.append(("finish",))


def test_wandb_and_trackio_get_finite_values_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb, trackio = LoggingModule(), LoggingModule()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    for sink in open_sinks(["wandb", "trackio"], tmp_path, {"name": "demo", "policies": {"p": {}}}):
        sink.record("p", 3, {"reward/mean": 0.5, "loss": math.nan})
        sink.close()
        sink.close()
    assert trackio.calls == [
        ("init", "agentrl", "demo", {"resume": "allow"}),
        ("log", {"reward/mean": 0.5}, 3),
        ("finish",),
    ]
    assert wandb.calls[0] == ("init", "agentrl", "demo", {"dir": str(tmp_path)})
    assert wandb.calls[-2:] == [("log", {"step": 3, "reward/mean": 0.5}, None), ("finish",)]


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = open_sinks(["tensorboard"], tmp_path, {"policies": {"p": {}, "q": {}}})
    for step in (1, 2):
        sink.record("p", step, {"reward/mean": step / 2, "loss": math.nan})
    sink.close()
    sink.close()
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["p/reward/mean"]
    assert [(event.step, event.value) for event in events.Scalars("p/reward/mean")] == [(1, 0.5), (2, 1.0)]


def test_a_summary_that_is_a_device_is_left_out_of_the_report(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "demo"))
    (tmp_path / "demo" / "summary.json").symlink_to("/dev/zero")
    assert "<html" in write_report(tmp_path / "demo").read_text()
