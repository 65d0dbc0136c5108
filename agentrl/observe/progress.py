"""Progress of a run for people: one live screen on a terminal, otherwise a line per step.

Writes to the error stream, so that the output stream stays free for results. Keeps no state of the run. `show` draws
the screen in the event loop: there is no thread, and nothing is drawn between two calls.
"""

from __future__ import annotations

import math
import re
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from agentrl.core.clock import SystemClock
from agentrl.core.text import format_rate, plural
from agentrl.observe.metrics import no_gradient_text, reward_metrics
from agentrl.observe.run_screen import format_duration, render_run_screen, terminal_safe_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from agentrl.core.clock import Clock
    from agentrl.core.records import PolicyVersion
    from agentrl.observe.run_state import RunState


SEAT_REWARD = "evaluation/reward/"
BAR_WIDTH = 24
"""Width of a bar of `ProgressLine`, in characters."""
PACE_INTERVAL_S = 30.0
"""Seconds between two lines of `LineDisplay` about a step, a phase or an evaluation that the run waits for; more while
nothing changes."""
MAX_REMINDER_S = 60.0
"""Longest time between two lines about a wait in which nothing changes, in seconds."""
LINE_INTERVAL_S = 10.0
"""Seconds between two lines of `ProgressLine` without a terminal; the first line is written at once, and lines become
rarer while nothing changes. Also the seconds after which `LineDisplay` says what a step or a phase does."""
_SECONDS = re.compile(r"\d+ s\Z")
"""Elapsed time at the end of a part, which is no news."""


def _indented(text: str) -> str:
    """Return text safe for a terminal, its lines after the first indented: a foreign error is no line of ours."""
    return "\n    ".join(map(terminal_safe_line, text.split("\n")))


class Display(Protocol):
    """Display of a run's progress."""

    def line(self, text: str) -> None:
        """Show a permanent line."""
        ...

    def phase(self, text: str) -> None:
        """Show the current phase."""
        ...

    def step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Show an optimizer step."""
        ...

    def evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Show the result of an evaluation."""
        ...

    def show(self) -> None:
        """Draw all changes."""
        ...

    def close(self) -> None:
        """Restore the terminal. Idempotent."""
        ...


class LineDisplay:
    """Display that writes one line per step, phase and evaluation, for pipes, files and CI."""

    def __init__(self, state: RunState, stream: TextIO) -> None:
        self._state = state
        self._stream = stream
        self._reminders = _Reminders(PACE_INTERVAL_S)
        self._phase = ("", 0), 0.0, 0
        """The phase and the number of steps; the seconds of the run and the number of ended episodes when they were
        first seen."""

    def line(self, text: str) -> None:
        """Write a line."""
        self._stream.write(_indented(text) + "\n")
        self._stream.flush()

    def phase(self, text: str) -> None:
        """Write the phase as a line."""
        self.line(f"{text} …")

    def step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a step."""
        name, steps = f"{policy} " if len(self._state.policies) > 1 else "", self._state.plan.steps_of(policy)
        seconds_left = self._state.seconds_left(policy)
        eta = "" if seconds_left is None else f"  about {format_duration(seconds_left)} left"
        self.line(f"{name}step {step}/{steps}  {format_step_metrics(metrics)}{eta}")

    def evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Write the results of an evaluation."""
        for policy, version in versions.items():
            self.line(format_evaluation_metrics(version, metrics[policy]))

    def show(self) -> None:
        """Write the progress of an evaluation, of a step or of a phase now and then; all changes are written at
        once."""
        status = self._state.status
        if status is None:
            return
        steps = 0 if status.is_evaluating else sum(policy.step for policy in self._state.policies.values())
        if (status.phase, steps) != self._phase[0]:
            num_ended = status.progress[0] if status.progress else 0
            self._phase = (status.phase, steps), status.seconds, num_ended
            self._reminders.reset()
        _, began_s, num_before = self._phase
        if status.progress is not None and status.is_evaluating:
            num_ended, total = status.progress
            state = f"{num_ended}"
            text = f"{status.phase}: {num_ended:,} of {plural(total, 'episode')}"
            num_new = num_ended - num_before
            if num_new > 0:
                left_s = (status.seconds - began_s) * (total - num_ended) / num_new
                text = f"{text}, about {format_duration(left_s)} left"
        elif status.pace:
            state = status.pace.rpartition("; ")[2]  # without the estimate, which time alone changes
            text = f"first step: {status.pace}" + (f"  ({status.bottleneck})" if status.bottleneck else "")
        elif (seconds := status.seconds - began_s) >= LINE_INTERVAL_S:
            state = ": ".join(filter(None, (status.phase, "; ".join(status.waits) or status.bottleneck)))
            text = state.replace(status.phase, f"{status.phase} for {seconds:.0f} s", 1)
        else:
            return
        if self._reminders.is_due(state, status.seconds):
            self.line(text)

    def close(self) -> None:
        """Do nothing: there is nothing to clean up."""


class LiveScreenDisplay:
    """Display at the bottom of a terminal, redrawn in place; permanent lines appear above it."""

    def __init__(self, state: RunState, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._state = state
        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
        self._live.start()

    def line(self, text: str) -> None:
        """Write a line above the screen."""
        self._console.print(_indented(text), markup=False, highlight=False, emoji=False)

    def phase(self, text: str) -> None:
        """Write the phase above the screen, and redraw."""
        self.line(f"{text} …")
        self.show()

    def step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Leave the step to the next `show`, because steps may come faster than anyone can read."""

    def evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Write the results above the screen."""
        for policy, version in versions.items():
            self.line(format_evaluation_metrics(version, metrics[policy]))

    def show(self) -> None:
        """Redraw the screen."""
        self._live.update(render_run_screen(self._state, width=self._console.width), refresh=True)

    def close(self) -> None:
        """Remove the screen. Idempotent."""
        self._live.stop()


def make_progress_display(state: RunState, stream: TextIO) -> Display:
    """Return a `LiveScreenDisplay` for a terminal, else `LineDisplay`."""
    return LiveScreenDisplay(state, stream) if stream.isatty() else LineDisplay(state, stream)


def format_evaluation_metrics(version: PolicyVersion, metrics: Mapping[str, float]) -> str:
    """Return the result of an evaluation for one policy as one line."""
    seats = [
        f"{name.removeprefix(SEAT_REWARD)} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith(SEAT_REWARD)
    ]
    players = ", ".join((str(version), *seats))
    if "evaluation/reward" not in metrics:
        return f"held-out tasks were played without {players}"
    tasks = metrics.get("evaluation/tasks", metrics.get("evaluation/episodes", 0.0))
    return f"held-out reward {metrics['evaluation/reward']:.3f} over {format_task_count(tasks, metrics)} ({players})"


def format_task_count(tasks: float, metrics: Mapping[str, float]) -> str:
    """Return the number of tasks of an evaluation, with its dropped, truncated and failed episodes.

    Example:
        >>> format_task_count(32, {"evaluation/episodes": 20, "evaluation/dropped": 12})
        '20 of 32 tasks (12 dropped)'
        >>> format_task_count(32, {"evaluation/episodes": 32, "evaluation/truncated": 30, "evaluation/failed": 8})
        '32 tasks (30 episodes truncated, 8 episodes failed)'
        >>> format_task_count(32, {"evaluation/episodes": 60, "evaluation/dropped": 4})
        '32 tasks (4 episodes dropped)'
    """
    count, *others = task_counts(tasks, metrics)
    return f"{count} ({', '.join(others)})" if others else count


def task_counts(tasks: float, metrics: Mapping[str, float]) -> list[str]:
    """Return the number of tasks of an evaluation, then of its dropped episodes, if there are any, and of truncated and
    failed ones, if there are many.

    Example:
        >>> task_counts(32, {"evaluation/episodes": 20, "evaluation/dropped": 12})
        ['20 of 32 tasks', '12 dropped']
        >>> task_counts(32, {"evaluation/episodes": 16, "evaluation/played": 16})
        ['16 of 32 tasks']
    """
    if (played := metrics.get("evaluation/played", tasks)) < tasks:
        _, *others = task_counts(played, metrics)
        return [f"{played:,.0f} of {plural(tasks, 'task')}", *others]
    episodes, dropped = metrics.get("evaluation/episodes", tasks), metrics.get("evaluation/dropped", 0.0)
    others = [
        f"{plural(count, 'episode')} {word}"
        for word in ("truncated", "failed")
        if (count := metrics.get(f"evaluation/{word}", 0.0)) >= max(0.1 * episodes, 1.0)  # a few are normal
    ]
    if not dropped:
        return [plural(tasks, "task"), *others]
    if episodes + dropped == tasks:  # one episode for each task
        return [f"{episodes:,.0f} of {plural(tasks, 'task')}", f"{dropped:,.0f} dropped", *others]
    return [plural(tasks, "task"), f"{plural(dropped, 'episode')} dropped", *others]


def format_step_metrics(metrics: Mapping[str, float]) -> str:
    """Return the metrics of a step as one line; values that were not measured are left out."""
    parts = []
    for name in reward_metrics(metrics):
        if name in metrics:
            whose = "" if name == "reward/mean" else f"{name.partition('/')[2]} "
            parts.append(f"{whose}reward {metrics[name]:.3f}")
    if "staleness/mean" in metrics:
        parts.append(f"staleness {metrics['staleness/mean']:.1f}")
    if "engine/busy_share" in metrics:
        parts.append(f"engine {metrics['engine/busy_share']:.0%}")
    if "trainer/busy_share" in metrics:
        parts.append(f"trainer {metrics['trainer/busy_share']:.0%}")
    if "tokens/sampled_per_s" in metrics:
        parts.append(f"{format_rate(metrics['tokens/sampled_per_s'])} tokens/s")
    parts.append(no_gradient_text(metrics))
    return "  ".join(filter(None, parts))


class PhaseTimer:
    """Measures the phases of a start or a check.

    Args:
        say: shows a permanent line.
    """

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._say = say
        self._began = 0.0
        self.current: str | None = None
        """The phase that runs; None: none does."""

    def begin(self, text: str) -> None:
        """Begin a phase, and end the one before."""
        self.end()
        self.current, self._began = text, self._clock.monotonic()

    def end(self) -> None:
        """End the phase, if one runs, and say how long it took."""
        if self.current is not None:
            text, self.current = self.current, None
            self._say(f"{text}: {self._clock.monotonic() - self._began:.1f} s")


class _Reminders:
    """Decides when a line about a wait is shown again: after an interval, which doubles while nothing changes, up to
    `MAX_REMINDER_S`."""

    def __init__(self, interval_s: float) -> None:
        self._first_s = interval_s
        self.reset()

    def reset(self) -> None:
        """Show the next line at once."""
        self._shown_at, self._interval_s, self._shown = -math.inf, self._first_s, ""

    def is_due(self, state: str, now: float) -> bool:
        """Whether to show a line now; `state` differs if there is news."""
        if state != self._shown:
            self._interval_s = self._first_s
        if now - self._shown_at < self._interval_s:
            return False
        if state == self._shown:
            self._interval_s = min(2 * self._interval_s, MAX_REMINDER_S)
        self._shown_at, self._shown = now, state
        return True


class ProgressLine:
    """Shows the current part of a long task, as one rewritten line on a terminal, otherwise as few lines.

    Args:
        title: the task, at the beginning of each line.
        stream: the stream to write to.
    """

    def __init__(self, title: str, stream: TextIO, clock: Clock | None = None) -> None:
        self._title = title
        self._stream = stream
        self._clock = clock or SystemClock()
        self._reminders = _Reminders(LINE_INTERVAL_S)
        self._phases = PhaseTimer(self._clock, self._say)

    def phase(self, phase: str, part: str = "") -> None:
        """Show a part of a phase. Each phase leaves a line with its seconds."""
        if phase != self._phases.current:
            self._phases.begin(phase)
            self._reminders.reset()
            self(phase)
        if part:
            self(f"{phase}: {part}")

    def __call__(self, part: str, share: float | None = None) -> None:
        """Show the part that begins, with a bar if the share that is done is known."""
        on_terminal = self._stream.isatty()
        is_due = self._reminders.is_due(_SECONDS.sub("", part), self._clock.monotonic())
        if not (is_due or on_terminal):
            return
        line = terminal_safe_line(f"{self._title}: {part}")
        if on_terminal:
            if share is not None:
                done = round(BAR_WIDTH * share)
                line = f"{line} {'█' * done}{'░' * (BAR_WIDTH - done)} {share:.0%}"
            line = f"\r\x1b[2K{line[: max(shutil.get_terminal_size().columns - 1, 20)]}"
        self._write(line if on_terminal else f"{line} …\n")

    def close(self) -> None:
        """End the phase, and remove the line from a terminal."""
        self._phases.end()
        self._clear()

    def _say(self, text: str) -> None:
        self._clear()
        self._write(terminal_safe_line(f"{self._title}: {text}") + "\n")

    def _clear(self) -> None:
        if self._stream.isatty():
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the stream was closed
            self._stream.write(text)
            self._stream.flush()


@contextmanager
def spinner(text: str, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Show a spinner and a text on a terminal during a wait; otherwise show nothing.

    Yields:
        A function that replaces the text, for example by the progress.
    """
    if not stream.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(file=stream).status(Text(terminal_safe_line(text))) as status:
        yield lambda text: status.update(Text(terminal_safe_line(text)))
