"""What watches a run: keeps its metrics, and passes them on to the terminal and to the sinks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.observe.metrics import JsonlSink, Sink
from agentrl.observe.plot import curve
from agentrl.observe.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from agentrl.core.ports import Observer
    from agentrl.core.records import PolicyVersion
    from agentrl.observe.run_directory import RunDirectory


class RunObserver:
    """Observes one run; a context manager that leaves the terminal as it was.

    Args:
        directory: where `metrics.jsonl` goes.
        policies: the policies that step.
        steps: how many steps each takes.
        others: observers of the caller's, told the same.
        quiet: say nothing on the terminal.
        stream: where to say it; the error stream where None.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        policies: Sequence[str],
        steps: int,
        others: Sequence[Observer] = (),
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.steps: list[dict[str, float]] = []
        """Metrics of every optimizer step, in order."""
        self._directory = directory
        self._policies = policies
        self._total = steps
        self._stream = None if quiet else (stream or sys.stderr)
        self._others = tuple(others)
        self._progress: Progress | None = None
        self._sinks: list[Sink] = [JsonlSink(directory.metrics)]

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.close()
        for sink in self._sinks:
            sink.close()

    def phase(self, text: str) -> None:
        """Say what is being waited for."""
        if self._progress is not None:
            self._progress.line(text)
        elif self._stream is not None:
            self._stream.write(f"{text} …\n")
            self._stream.flush()

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken."""
        self.steps.append({"step": float(step), **metrics})
        for sink in self._sinks:
            sink.record(policy, step, metrics)
        for other in self._others:
            other.on_step(policy, step, metrics)
        if self._stream is not None:
            self._shown().on_step(policy, step, metrics)

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""
        for sink in self._sinks:
            for policy, version in versions.items():
                sink.record(policy, version.step, metrics)
        for other in self._others:
            other.on_evaluation(versions, metrics)
        if self._stream is not None:
            self._shown().on_evaluation(versions, metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the learning curve and what came of it."""
        if self._stream is None:
            return
        if self._progress is not None:
            self._progress.close()
        rewards = summary["rewards"]
        if len(rewards) > 1:
            self._stream.write("\n" + curve(rewards, title="training reward by optimizer step") + "\n")
        start, end = summary["reward_start"], summary["reward_end"]
        if start is not None and end is not None:
            tasks = summary["held_out_tasks"]
            self._stream.write(f"\nheld-out reward on {tasks} tasks: {start:.3f} before, {end:.3f} after\n")
        self._stream.write(
            f"{summary['steps']} steps in {summary['rl_seconds']:.1f} s; "
            f"engine busy {summary['engine_busy_share']:.0%}, trainer {summary['trainer_busy_share']:.0%} of the time\n"
            f"run directory: {self._directory.path}\n"
        )
        self._stream.flush()

    def _shown(self) -> Progress:
        if self._progress is None:
            self._progress = Progress(self._policies, self._total, stream=self._stream)
        return self._progress
