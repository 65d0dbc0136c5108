"""Sinks, the Prometheus text and the newest value of each metric."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

from agentrl.core.errors import ConfigError
from agentrl.core.machine import install_command
from agentrl.inspection.render import metrics_page
from agentrl.inspection.statistics import latest_metrics
from agentrl.observe.run_state import RunDisplaySettings, RunState
from agentrl.observe.sinks import format_prometheus_metrics, open_sinks


def test_prometheus_text_has_one_help_per_name_and_escaped_labels() -> None:
    text = format_prometheus_metrics('a"b\\c', {"p": {"reward/mean": 0.5, "step": 3.0}, "q": {"reward/mean": 1.0}})
    assert text == (
        "# HELP agentrl_reward_mean mean reward of the step's episodes (reward)\n"
        "# TYPE agentrl_reward_mean gauge\n"
        'agentrl_reward_mean{run="a\\"b\\\\c",policy="p"} 0.5\n'
        'agentrl_reward_mean{run="a\\"b\\\\c",policy="q"} 1.0\n'
        "# HELP agentrl_step optimizer steps the policy has taken (steps)\n# TYPE agentrl_step gauge\n"
        'agentrl_step{run="a\\"b\\\\c",policy="p"} 3.0\n'
    )


def test_the_newest_value_of_each_metric_counts() -> None:
    state = RunState(plan=RunDisplaySettings(max_staleness={"p": 0}))
    state.record("p", 1, {"k3": 0.1, "loss": 1.0})
    state.record("p", 2, {"loss": 2.0})
    state.record("p", 2, {"evaluation/reward": 0.5})
    assert latest_metrics(state) == {"p": {"evaluation/reward": 0.5, "k3": 0.1, "loss": 2.0, "step": 2.0}}
    stream = io.StringIO()
    Console(file=stream, width=80).print(metrics_page(state))
    assert "k3 0.1 1 nats" in " ".join(stream.getvalue().split()), "the step of a value that is not of the newest"


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


def test_tensorboard_shows_a_step_that_is_taken_again_once(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first, values in ((1, [1.0, 2.0, 3.0]), (3, [30.0, 40.0])):
        (sink,) = open_sinks(["tensorboard"], tmp_path, {"policies": {"p": {}}})
        if first > 1:
            sink.forget_after({"p": first - 1})
        for step, value in enumerate(values, first):
            sink.record("p", step, {"reward/mean": value})
        sink.close()
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("reward/mean")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


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
