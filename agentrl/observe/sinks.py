"""Sinks: destinations of metrics besides the run directory.

trackio, wandb and tensorboard are imported only if a configuration names them; they receive finite values only. A
metric of policy P is logged under its own name if P is the only policy that learns, else as `P/name`, because these
tools keep one series per name. `format_prometheus_metrics` formats the newest values.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from agentrl.core.errors import ConfigError
from agentrl.core.machine import install_command
from agentrl.core.masking import mask_secrets
from agentrl.observe.metrics import find_registered_metric
from agentrl.observe.run_screen import terminal_safe_line

SinkName = Literal["trackio", "wandb", "tensorboard"]


class Sink(Protocol):
    """Destination of metrics besides the run directory."""

    def record(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Record the values of one step; must not block for long."""
        ...

    def forget_after(self, steps: Mapping[str, int]) -> None:
        """Mark the values of later steps as void: the run takes these steps again. `steps` has the newest step that
        stays, by policy."""
        ...

    def close(self) -> None:
        """Write buffered values and release resources. Idempotent."""
        ...


def open_sinks(names: Sequence[SinkName], directory: Path, config: Mapping[str, Any]) -> list[Sink]:
    """Open the sinks of a configuration.

    Args:
        names: names of the sinks.
        directory: directory of the run, for local files of a sink.
        config: resolved configuration, logged with the run; its secrets are masked.

    Raises:
        ConfigError: a sink's package is not installed; the message contains the command that installs it.
    """
    shown = mask_secrets(config)
    return [_MAKERS[name](directory, shown) for name in names]


def check_sinks_installed(names: Sequence[SinkName]) -> None:
    """Check that the packages of sinks are installed, without importing them.

    Raises:
        ConfigError: one is not; the message contains the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"sinks: {name!r} needs a package that is not installed; install it with `{install_command(name)}`, or "
                "remove it from `sinks`"
            )


class _PolicyPrefix:
    """Base of sinks, which prefixes metric names if several policies learn."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        policies = config.get("policies", {})
        self._several = sum(policy.get("kind", "trained") == "trained" for policy in policies.values()) > 1

    def forget_after(self, steps: Mapping[str, int]) -> None:
        """Do nothing: later values replace those of the same step where the service shows them."""

    def named(self, policy: str, values: Mapping[str, float]) -> dict[str, float]:
        prefix = f"{policy}/" if self._several else ""
        return {f"{prefix}{name}": value for name, value in values.items() if math.isfinite(value)}


class TensorboardSink(_PolicyPrefix):
    """Sink that writes event files to `RUN/tensorboard`; view them with `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        writer = _import("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._event = _import("tensorboard.compat.proto.event_pb2", "tensorboard").Event
        self._session_log = _import("tensorboard.compat.proto.event_pb2", "tensorboard").SessionLog
        self._summary = _import("tensorboard.compat.proto.summary_pb2", "tensorboard").Summary
        self._writer = writer.EventFileWriter(str(directory / "tensorboard"))

    def record(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Write one event with a scalar per name."""
        scalars = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in self.named(policy, values).items()
        ]
        event = self._event(step=step, summary=self._summary(value=scalars))
        self._writer.add_event(event)

    def forget_after(self, steps: Mapping[str, int]) -> None:
        """Write the event at which TensorBoard discards values of later steps, whichever policy they are of."""
        start = self._session_log(status=self._session_log.START)
        self._writer.add_event(self._event(step=max(steps.values(), default=0) + 1, session_log=start))

    def close(self) -> None:
        """Write buffered events. Idempotent."""
        self._writer.close()


class _LoggingSink(_PolicyPrefix):
    """Sink for wandb, and for trackio, which has the same calls: `init`, `log`, `finish`."""

    def __init__(self, module: Any, options: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        super().__init__(config)
        with contextlib.redirect_stdout(sys.stderr):  # standard output is reserved for results
            name = str(config.get("name", "run"))
            try:
                self._run = module.init(project="agentrl", name=name, config=dict(config), **options)
            except Exception as error:  # third-party code; usually the user is not logged in, or there is no network
                raise ConfigError(
                    f"sinks: {module.__name__} cannot start ({type(error).__name__}: {error}); fix the cause, or "
                    "remove it from `sinks`"
                ) from error

    def close(self) -> None:
        """End the run at the service. Idempotent."""
        if self._run is not None:
            with contextlib.redirect_stdout(sys.stderr):
                self._run.finish()
            self._run = None


class WandbSink(_LoggingSink):
    """Sink for Weights & Biases; `WANDB_MODE=offline` keeps all data in `RUN/wandb`."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(_import("wandb", "wandb"), {"dir": str(directory)}, config)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def record(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Log the values in one call. The step is also a metric, because wandb drops steps lower than the last one, as
        after a resume."""
        self._run.log({"step": step, **self.named(policy, values)})


class TrackioSink(_LoggingSink):
    """Sink for trackio, which keeps a local database; view it with `trackio show`."""

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        super().__init__(_import("trackio", "trackio"), {"resume": "allow"}, config)

    def record(self, policy: str, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(self.named(policy, values), step=step)


def format_prometheus_metrics(name: str, latest: Mapping[str, Mapping[str, float]]) -> str:
    """Return the newest value of each metric in Prometheus' text exposition format, version 0.0.4.

    Args:
        name: name of the run, used as the label `run`.
        latest: values by policy and metric name.
    """
    metrics: dict[str, dict[str, float]] = {}
    help_texts: dict[str, str] = {}
    for policy, values in latest.items():
        for metric, value in values.items():
            key = "agentrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", metric)
            metric_info = find_registered_metric(metric)
            help_texts.setdefault(key, f"{metric_info.meaning} ({metric_info.unit})" if metric_info else metric)
            labels = f'run="{_label(name)}",policy="{_label(policy)}"'
            # Prometheus rejects a file in which a series occurs twice.
            metrics.setdefault(key, {}).setdefault(labels, value)
    lines = []
    for key, samples in sorted(metrics.items()):
        lines += [f"# HELP {key} {_escape(help_texts[key])}", f"# TYPE {key} gauge"]
        lines += [f"{key}{{{labels}}} {value!r}" for labels, value in samples.items()]
    return "".join(f"{line}\n" for line in lines)


def _label(text: str) -> str:
    return _escape(text).replace('"', '\\"')


def _escape(text: str) -> str:
    """Escape text to one line that is safe to show on a terminal."""
    return terminal_safe_line(text).replace("\\", "\\\\")


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"sinks: {package!r} needs a package that is not installed ({error}); install it with "
            f"`{install_command(package)}`, or remove it from `sinks`"
        ) from error


_MAKERS: dict[SinkName, Callable[[Path, Mapping[str, Any]], Sink]] = {
    "trackio": TrackioSink,
    "wandb": WandbSink,
    "tensorboard": TensorboardSink,
}
