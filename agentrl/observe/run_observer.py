"""The observer of a run: keeps its metrics, passes them to the terminal and the sinks, and raises alarms.

Owns `metrics.jsonl`, `alarms.jsonl` and `status.json` of the run directory. Looks at the loop once a second, in the
thread of the event loop. An external sink that fails is removed with a message that names it, and never ends the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.core.clock import Clock, SystemClock
from agentrl.core.text import escape_line, plural
from agentrl.observe.alarms import find_alarms, read_raised_alarms, write_alarm
from agentrl.observe.metrics import is_failure, reward_metrics
from agentrl.observe.progress import (
    Display,
    PhaseTimer,
    format_task_count,
    make_progress_display,
    spinner,
    task_counts,
)
from agentrl.observe.run_screen import plot_curve
from agentrl.observe.run_state import (
    MetricsFile,
    RunDisplaySettings,
    RunSnapshot,
    RunState,
    read_metrics,
    write_run_snapshot,
)
from agentrl.observe.sinks import Sink

if TYPE_CHECKING:
    from types import TracebackType

    from agentrl.core.ports import Observer
    from agentrl.core.records import PolicyVersion
    from agentrl.observe.run_directory import RunDirectory

INTERVAL_S = 1.0


class RunObserver:
    """Observes one run; a context manager that restores the terminal.

    Args:
        directory: the run's directory; existing metrics in it belong to previous attempts.
        plan: plan of the run.
        others: observers of the caller, which receive the same calls.
        quiet: write nothing to the terminal.
        stream: stream of the terminal; None: the error stream.
        clock: clock of the run; None: the system clock.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        plan: RunDisplaySettings,
        observers: Sequence[Observer] = (),
        quiet: bool = False,
        stream: TextIO | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.steps: list[dict[str, float]] = []
        """Metrics of every optimizer step of this process, in order; `state` covers the whole run."""
        self.state = RunState(plan=plan, path=str(directory.user_path), status=RunSnapshot(phase="starting"))
        read_metrics(directory.metrics, self.state)
        self.state.raised = read_raised_alarms(directory.path)
        self._directory = directory
        self._stream = EnduringStream(stream or sys.stderr)
        self._quiet = quiet
        self._observers = tuple(observers)
        self._clock = clock or SystemClock()
        self._start_s = self._clock.monotonic()
        self._display: Display | None = None
        self._metrics_file = MetricsFile(directory.metrics)
        self._sinks: list[Sink] = []
        self._phases = PhaseTimer(self._clock, self.say)
        """The phases of the start."""
        self._probe: Callable[[], RunSnapshot] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._alarm_keys: set[tuple[str, str, str]] = set()

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._display is not None:
            self._display.close()
        self._metrics_file.close()
        for sink in list(self._sinks):
            self._safely(sink, sink.close)
        self._stream.close()

    def watch(self, probe: Callable[[], RunSnapshot] | None = None) -> None:
        """Start looking at the run every second, in the running event loop.

        Args:
            probe: returns the status of the training loop; None before the loop exists.
        """
        self._phases.end()
        self._probe = probe
        if self._timer is not None:
            self._timer.cancel()
        self._look()

    def add_sinks(self, sinks: Sequence[Sink]) -> None:
        """Send the metrics to sinks too, besides `metrics.jsonl`."""
        self._sinks += sinks

    def forget_after(self, steps: Mapping[str, int]) -> None:
        """Forget the metrics of later steps than the checkpoint's, which the run takes again, so that each step is
        recorded once.

        Args:
            steps: newest step that stays, by policy.
        """
        for policy, step in steps.items():
            self.state.forget_after(policy, step)
        self._metrics_file.forget_after(steps)
        for sink in list(self._sinks):
            self._safely(sink, lambda sink=sink: sink.forget_after(steps))  # type: ignore[misc]

    def phase(self, text: str) -> None:
        """Show the current phase, and the seconds that the one before took."""
        self._phases.end()
        if self._probe is None:
            self._phases.begin(text)
            self._set_status(RunSnapshot(phase=text))
        if not self._quiet:
            self._display_of_run().phase(text)

    def say(self, text: str) -> None:
        """Show a permanent line."""
        if not self._quiet:
            self._display_of_run().line(text)

    def warn(self, text: str) -> None:
        """Show a problem and its remedy; may be called from any thread."""
        if not self._quiet:
            self._display_of_run().line(f"WARNING {text}")

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Record and show an optimizer step."""
        self.steps.append({"step": float(step), **metrics})
        self._record(policy, step, metrics)
        for observer in self._observers:
            observer.on_step(policy, step, metrics)
        if not self._quiet:
            self._display_of_run().step(policy, step, metrics)
        if any(metrics.get(name) for name in metrics if is_failure(name)):
            self._update_status()  # the alarms of this step name the errors
        self._raise_alarms()

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Record and show the result of an evaluation."""
        for policy, version in versions.items():
            self._record(policy, version.step, metrics[policy])
        for observer in self._observers:
            observer.on_evaluation(versions, metrics)
        if not self._quiet:
            self._display_of_run().evaluation(versions, metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Show the learning curve and the results of the run."""
        if self._timer is not None:
            self._timer.cancel()
        self._update_status()
        self.state.standing = "finished"  # no call follows, so a single failure counts
        self._raise_alarms()
        if self._quiet:
            return
        if self._display is not None:
            self._display.close()
        policies = [policy for policy in self.state.policies.values() if len(policy.steps) > 1]
        for policy in policies:
            suffix = f" of {escape_line(policy.name)}" if len(policies) > 1 else ""
            for name in reward_metrics(policy.last):
                steps, rewards = policy.series(name)
                seat = "" if name == "reward/mean" else f" as {escape_line(name.partition('/')[2])}"
                title = f"training reward{suffix}{seat} by optimizer step"
                self._stream.write("\n" + plot_curve(rewards, steps=steps, title=title) + "\n")
        self._stream.write(self._held_out(summary["held_out_tasks"]))
        self._stream.write(_choice_text(summary))
        num_steps, last_step = (
            self.state.plan.steps,
            max((policy.step for policy in self.state.policies.values()), default=0),
        )
        goes_on = last_step < num_steps and not summary.get("ended_early")
        message = (
            f"no step was taken: --resume continues from step {last_step} of {num_steps}\n"
            if goes_on
            else f"nothing is left to do: the run has taken all {num_steps} steps; --steps=N adds more\n"
        )
        self._stream.write(
            f"{self._steps_taken()} in {summary['run_seconds'] or 0.0:.1f} s; in the {summary['rl_seconds']:.1f} s of "
            f"training, engine busy {summary['engine_busy_share']:.0%}, trainer {summary['trainer_busy_share']:.0%}\n"
            if self.steps or not num_steps
            else message
        )
        self._stream.write(f"run directory: {escape_line(str(self._directory.user_path))}\n")
        self._stream.flush()

    def closing(self, text: str) -> AbstractContextManager[object]:
        """Show a text during a wait after the display is closed."""
        if self._display is not None:
            self._display.close()
        return nullcontext() if self._quiet else spinner(text, self._stream)

    # --- looking ----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._look)
        if self._probe is not None:
            self._set_status(self._probe())
        elif self.state.status is not None:
            self._set_status(self.state.status)
        self._raise_alarms()
        if not self._quiet:
            self._display_of_run().show()

    def _steps_taken(self) -> str:
        """Return the number of steps of the whole run, of each policy if there are several."""
        counts = {policy.name: len(policy.steps) for policy in self.state.policies.values()}
        if len(set(counts.values())) < 2:
            steps = plural(max(counts.values(), default=0), "step")
            return steps if len(counts) < 2 else f"{steps} of each of {plural(len(counts), 'policy', 'policies')}"
        return ", ".join(f"{plural(count, 'step')} of {escape_line(name)}" for name, count in counts.items())

    def _held_out(self, tasks: int) -> str:
        """Return lines with the first and last held-out rewards on the same tasks; the first may be of a previous
        attempt of the run."""
        lines, several = [], len(self.state.policies) > 1
        for policy in self.state.policies.values():
            suffix = f" of {escape_line(policy.name)}" if several else ""
            match policy.held_out():
                case [(first, before), *_, (last, after)]:
                    began = first == min(policy.evaluations)
                    when = "before" if began else f"at step {first}"
                    oldest, newest = ("; ".join(task_counts(tasks, policy.evaluations[at])) for at in (first, last))
                    if oldest == newest:
                        count = format_task_count(tasks, policy.evaluations[last])
                        text = f" on {count}: {before:.3f} {when}, {after:.3f} after"
                    else:
                        text = f": {before:.3f} {when} ({oldest}), {after:.3f} after ({newest})"
                    others = "" if began else "; the evaluations before were on other tasks"
                    lines.append(f"held-out reward{suffix}{text}{others}\n")
                case [(last, after)] if len(policy.evaluations) > 1:
                    lines.append(
                        f"held-out reward{suffix} on {format_task_count(tasks, policy.evaluations[last])}: "
                        f"{after:.3f} after; the evaluations before were on other tasks\n"
                    )
        return "\n" + "".join(lines) if lines else ""

    def _update_status(self) -> None:
        if self._probe is not None:
            self._set_status(self._probe())

    def _set_status(self, status: RunSnapshot) -> None:
        now = self._clock.monotonic() - self._start_s
        self.state.status = replace(status, wall=self._clock.wall(), seconds=now)
        write_run_snapshot(self._directory.path, self.state.status)

    def _raise_alarms(self) -> None:
        for alarm in find_alarms(self.state):
            key = (alarm.name, alarm.policy, alarm.subject)
            if key not in self._alarm_keys:
                self._alarm_keys.add(key)
                step = max((policy.step for policy in self.state.policies.values()), default=0)
                self.state.raised[alarm.name] = step
                write_alarm(self._directory.path, alarm, step)
                if not self._quiet:
                    self._display_of_run().line(f"ALARM {alarm.line}")

    def _record(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        self.state.record(policy, step, metrics)
        self._metrics_file.record(policy, step, metrics)
        for sink in list(self._sinks):
            self._safely(sink, lambda sink=sink: sink.record(policy, step, metrics))  # type: ignore[misc]

    def _safely(self, sink: Sink, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a sink is foreign code, and the run must not end for its sake
            self._sinks.remove(sink)
            message = f"{type(sink).__name__} failed and gets no more metrics: {type(error).__name__}: {error}"
            if not self._quiet:
                self._display_of_run().line(message[:500])

    def _display_of_run(self) -> Display:
        if self._display is None:
            self._display = make_progress_display(self.state, self._stream)
        return self._display


def _choice_text(summary: Mapping[str, Any]) -> str:
    """Return a line with the best versions and whether the metric ended the run; empty if there is no such metric."""
    lines = []
    if best := summary.get("best"):
        versions = ", ".join(map(escape_line, best["versions"].values()))
        lines.append(f"best {escape_line(best['metric'])}: {best['value']:.3f} with {versions}\n")
    if summary.get("ended_early"):
        lines.append(f"ended early: {escape_line(summary['ended_early'])}\n")
    return "".join(lines)


class EnduringStream(io.TextIOBase, TextIO):
    """Writes to another stream until that fails, so that `agentrl train … 2>&1 | head -1` does not end the training.

    It has a descriptor of its own: where an environment closes descriptor 2, the next file that anything opens gets
    that number, and the lines would be written into that file.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream: TextIO | None = stream
        self._file: TextIO | None = None
        # A wrapper, or a replaced `write`, shows the lines in a notebook or a log.
        if type(stream) is not io.TextIOWrapper or "write" in vars(stream):
            return
        with contextlib.suppress(OSError, ValueError):  # it is closed
            stream.flush()
            number = fcntl.fcntl(stream.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
            self._stream = self._file = open(  # noqa: SIM115 - closed by `close`
                number, "w", buffering=1, encoding=stream.encoding, errors=stream.errors
            )

    def write(self, text: str, /) -> int:
        """Write the text if possible; always returns its full length."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush the stream; on an error, stop writing."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def close(self) -> None:
        """Close the own descriptor. Idempotent."""
        self.flush()
        self._stream = None
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return self._stream is not None and not self._stream.closed and self._stream.isatty()
