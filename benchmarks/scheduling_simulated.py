"""Steps per second of whole simulated runs, over what engine or trainer could do at most: ours, and the field's rule.

Jobs are those of the survey: four proposals a task, eight child episodes each, P90 five times the median, siblings'
log-lengths correlated by one half, the longest 40 medians. Time is counted in medians: one slot samples one a second.
The bound is the engine's with all slots busy, the trainer taking 0.8 of that. All policies get the same jobs.

The field's rule (`fifo`) is production's loop too, with one change: a task's episodes are trained when all of its
proposals and all of their children have ended.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from agentrl.core import ids
from agentrl.core.records import EpisodeHeader, EpisodeSpec
from agentrl.core.training_records import TrajectoryCredit
from agentrl.orchestrator.groups import Credits, Group, Release
from agentrl.orchestrator.loop import Orchestrator
from agentrl.simulation.run import PROPOSALS, Measured, Scenario, simulate_run
from agentrl.simulation.workload import Tail, Workload

MEDIAN = 32
"""Tokens."""
LOGNORMAL = Tail(median=MEDIAN, p90=5 * MEDIAN, longest=40 * MEDIAN)
PARETO = dataclasses.replace(LOGNORMAL, kind="pareto")
MEAN = 2.16
"""Of a job, in medians."""
JOBS = 256 + 32
"""Of a step: children and proposals."""


class WholeTasks:
    """A baseline: what a task's root episodes and all their children bring is released together.

    Args:
        inner: decides the credits, group by group.
    """

    def __init__(self, inner: Release) -> None:
        self._inner = inner
        self.compares = inner.compares
        self._held: dict[int, list[tuple[Sequence[EpisodeHeader], Credits]]] = defaultdict(list)
        self._ended: Counter[int] = Counter()

    def admitted(self, spec: EpisodeSpec, group: Group) -> None:
        """As it is."""
        self._inner.admitted(spec, group)

    def ended(self, spec: EpisodeSpec, group: Group) -> tuple[Sequence[EpisodeHeader], Credits]:
        """Nobody, or everybody of the task: parents end after their children."""
        task = ids.root_number(spec.episode_id) // PROPOSALS
        self._held[task].append(self._inner.ended(spec, group))
        self._ended[task] += spec.parent_id is None
        if self._ended[task] < PROPOSALS:
            return (), {}
        members: list[EpisodeHeader] = []
        credits: dict[tuple[str, str, int], TrajectoryCredit] = {}
        for released, of_them in self._held.pop(task):
            members += released
            credits |= of_them
        return members, credits


def by_whole_tasks(orchestrator: Orchestrator) -> None:
    """Make a run release whole tasks."""
    orchestrator.buffer.release = WholeTasks(orchestrator.buffer.release)


def scenario(release: str, *, staleness: int, slots: int, tail: Tail = LOGNORMAL, seed: int = 0) -> Scenario:
    """One run; `fifo` is the field's rule."""
    made = Scenario(
        workload=Workload(tail=tail),
        slots=slots,
        rate=lambda count: float(MEDIAN),
        step_seconds=0.8 * JOBS * MEAN / slots,
        max_staleness=staleness,
        release="group" if release == "fifo" else release,
        seed=seed,
    )
    return dataclasses.replace(made, alter=by_whole_tasks) if release == "fifo" else made


def run(name: str, made: Scenario) -> Measured:
    """Simulate, and print a line."""
    measured = simulate_run(made)
    print(
        f"  {name}: {measured.steps_per_bound:.3f} of the bound, slots busy {measured.engine_busy:.2f}, trainer "
        f"{measured.trainer_busy:.2f}, token lag {measured.token_lag:.2f}, older than S {measured.older:.2f}, p99 "
        f"{measured.lag_p99:.0f}, longest {measured.lag_max:.0f}, length {measured.length_ratio:.3f}, "
        f"{measured.cpu_seconds:.0f} s CPU",
        flush=True,
    )
    return measured


def figures(quick: bool) -> dict[str, float | None]:
    """Means over the seeds; lag, lengths and waste at S = 2 with 64 slots."""
    if quick:
        made = dataclasses.replace(scenario("late", staleness=1, slots=64), steps=16, skipped=6)
        return {"s1_c64": run("late S=1 C=64", made).steps_per_bound}
    found: dict[str, list[Measured]] = defaultdict(list)
    for staleness, slots in ((1, 64), (2, 64), (2, 256)):
        for release, seeds in (("late", 4), ("fifo", 4), ("group", 1)):
            for seed in range(seeds):
                name = f"{release} S={staleness} C={slots}"
                made = scenario(release, staleness=staleness, slots=slots, seed=seed)
                found[name].append(run(f"{name} seed {seed}", made))
        run(
            f"late, Pareto S={staleness} C={slots}",
            scenario("late", staleness=staleness, slots=slots, tail=PARETO),
        )
    ours = found["late S=2 C=64"]
    throughput = fmean(measured.steps_per_bound for measured in ours)
    lags = []
    for staleness in (2, 3, 4):
        fifo = run(f"fifo S={staleness} C=64", scenario("fifo", staleness=staleness, slots=64))
        if fifo.steps_per_bound >= throughput - 0.01:
            lags.append(fifo.token_lag)
    return {
        "s1_c64": fmean(measured.steps_per_bound for measured in found["late S=1 C=64"]),
        "s2_c64": throughput,
        "s2_c256": fmean(measured.steps_per_bound for measured in found["late S=2 C=256"]),
        "lag_over_fifo": fmean(measured.token_lag for measured in ours) / min(lags) if lags else None,
        "length_ratio": fmean(measured.length_ratio for measured in ours),
        "waste": fmean(measured.waste for measured in ours),
        "lag_p99": fmean(measured.lag_p99 for measured in ours),
    }
