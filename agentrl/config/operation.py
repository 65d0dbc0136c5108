"""Sections about the operation of a run: its machines, its evaluations, and what it keeps on disk."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from agentrl.config.section import Free, MaybeSteps, NonNegative, NumberUnit, Positive, Section


class ClusterConfig(Section):
    """The Ray cluster that trainer ranks, engines and workers are placed on (docs/cluster.md)."""

    address: Free[str] = ""
    """`auto`: the Ray that runs on this machine; or HOST:PORT of its head. The run directory stays on this machine.
    Empty: everything is on this machine, and listens on loopback only."""


class EvaluationConfig(Section):
    """Evaluation of pinned versions on held-out tasks, during training."""

    tasks: Free[Annotated[NonNegative, NumberUnit("tasks")]] = 256
    """Held-out tasks. If there are more, the run's `seed` draws these; 0: no evaluation."""
    attempts: Free[Annotated[int, Field(gt=0, le=1024), NumberUnit("episodes")]] = 1
    """Episodes of each held-out task. With several, pass@k is measured for k = 1, 2, 4, … up to this number."""
    every: Free[MaybeSteps] = 0
    """Steps between evaluations; 0: only before the first step and after the last."""


class BestConfig(Section):
    """The run's best versions by the running mean of a metric, and early stopping."""

    metric: Free[str] = ""
    """A metric of steps or evaluations, whose largest running mean is best; with `-` before it, the smallest. Empty:
    none."""
    policy: Free[str] = ""
    """The policy whose steps are measured; empty: the first policy that learns."""
    window: Free[Annotated[Positive, NumberUnit("measurements")]] = 5
    """Number of newest measurements in the mean."""
    stop_at: Free[float | None] = None
    """End the run once the mean is at least this good; null: never."""
    stop_fall: Free[Annotated[float, Field(ge=0)] | None] = None
    """End the run once the mean falls behind the best so far by more than this; null: never."""

    @property
    def name(self) -> str:
        """The metric's name."""
        return self.metric.removeprefix("-")


class CheckpointConfig(Section):
    """When the run writes a checkpoint that it can resume from."""

    every: Free[MaybeSteps] = 10
    """Steps between checkpoints; 0: only at the end, where one is always written."""
    versions: Free[Annotated[NonNegative, NumberUnit("versions")]] = 4
    """Published versions of each policy that stay on disk; 0: all."""


class JournalConfig(Section):
    """How much of its journal a run keeps on disk."""

    keep: Free[Literal["all"] | Annotated[int, Field(ge=0)]] = "all"
    """`all`, or a number N of optimizer steps: each checkpoint then removes the tokens of training episodes and the
    columns of steps that are older than the last N steps of their policy, unless a fork or a checkpoint that the run
    can resume from needs them. All records stay (admissions, rewards, credits, steps), and so do evaluations."""
    budget_mib: Free[Annotated[NonNegative, NumberUnit("MiB")]] = 0
    """Disk budget of `journal/` and `steps/`. The run predicts when it will be reached; if `keep` cannot make room, it
    writes a checkpoint and ends with exit code 74. 0: no limit."""
