"""What a person sees while a run trains: a bar per policy on a terminal, a line per step elsewhere.

Writes to the error stream, so that the output stream stays free for results. Owns no state of the run.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from agentrl.core.records import PolicyVersion

_BAR = 24
"""Characters of a bar, where the terminal is wide enough for one."""


class Progress:
    """An observer of a training run."""

    def __init__(self, policies: Sequence[str], steps: int, *, stream: TextIO | None = None) -> None:
        """Begin.

        Args:
            policies: the policies that step.
            steps: optimizer steps each will take.
            stream: where to write; the error stream where None. A bar is drawn if it is a terminal.
        """
        self._stream = stream or sys.stderr
        self._steps = steps
        self._several = len(policies) > 1
        self._bars: RichProgress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._room = 0
        if self._stream.isatty():
            self._bars = _bars(self._stream)
            others = max(map(len, policies), default=0) + 2 * len(str(steps)) + 10 + (_BAR if _wide(self._bars) else 0)
            self._room = self._bars.console.width - others
            self._tasks = {policy: self._bars.add_task(policy, total=steps, figures="waiting") for policy in policies}
            self._bars.start()

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken."""
        if self._bars is not None:
            self._bars.update(self._tasks[policy], completed=step, figures=figures(metrics, room=self._room))
        else:
            name = f"{policy} " if self._several else ""
            self.line(f"{name}step {step}/{self._steps}  {figures(metrics)}")

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, float]) -> None:
        """An evaluation ended."""
        what = ", ".join(str(version) for version in versions.values())
        reward, episodes = metrics.get("evaluation/reward", 0.0), metrics.get("evaluation/episodes", 0.0)
        self.line(f"held-out reward {reward:.3f} over {episodes:.0f} tasks ({what})")

    def close(self) -> None:
        """Leave the terminal as it was. Idempotent."""
        if self._bars is not None:
            self._bars.stop()

    def line(self, text: str) -> None:
        """Say something above the bars."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


def figures(metrics: Mapping[str, float], *, room: int = 1000) -> str:
    """The figures of a step on one line of at most `room` characters; what was not measured is left out."""
    parts = []
    if "reward/mean" in metrics:
        parts.append(f"reward {metrics['reward/mean']:.3f}")
    if "staleness/mean" in metrics:
        parts.append(f"staleness {metrics['staleness/mean']:.1f}")
    if "engine/busy_share" in metrics:
        parts.append(f"engine {metrics['engine/busy_share']:.0%}")
    if "trainer/busy_share" in metrics:
        parts.append(f"trainer {metrics['trainer/busy_share']:.0%}")
    if "tokens/sampled_per_s" in metrics:
        parts.append(f"{metrics['tokens/sampled_per_s']:,.0f} tokens/s")
    while len(parts) > 1 and len("  ".join(parts)) > room:
        parts.pop()
    return "  ".join(parts)


def _bars(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    bars = RichProgress(
        TextColumn("{task.description}", markup=False),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=Console(file=stream),
    )
    if _wide(bars):
        bars.columns = (bars.columns[0], BarColumn(bar_width=_BAR), *bars.columns[1:])
    return bars


def _wide(bars: RichProgress) -> bool:
    return bars.console.width >= 110
