"""A proposer and a solver that learn together, as in `examples/03_propose_and_solve.py`.

    python -m benchmarks.coevolution [--quick]

`frontier_share_start`, `_best`, `_end`: of 256 proposals drawn, the share of distinct ones with 0.2 <= p <= 0.8, where
p is the pass rate of 32 fresh attempts by the solver of the same moment: before training, at the versions that the
running share chose, and at the end of the run.
`distinct_share`: of those proposals, the distinct ones.
`solver_gain`: how much more of 400 sums, which no proposer may write, the solver gets right in the end.
`solver_gain_frozen_proposer`: the same where the proposer stays the base model; same seed, sums, and number of steps.
Each is the worst of three seeds; the gain beside is that of the same seed.
"""

from __future__ import annotations

import runpy
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import agentrl
from agentrl.environment.context import EpisodeContext
from agentrl.environments.propose_and_solve.env import PROMPT, ProposeAndSolve, Solve, read
from benchmarks.parts import run
from benchmarks.report import completed

EXAMPLE = Path(__file__).parents[1] / "examples" / "03_propose_and_solve.py"
FIGURES = (
    *("frontier_share_start", "frontier_share_best", "frontier_share_end", "distinct_share"),
    *("solver_gain", "solver_gain_frozen_proposer"),
)
SEEDS = (0, 1, 2)
DRAWS, ATTEMPTS = 256, 32
QUICK_DRAWS, QUICK_ATTEMPTS, QUICK_STEPS = 64, 8, {"proposer": 3, "solver": 1}
PATIENCE_S = 7200.0
"""An examination starts all its episodes at once; on a busy machine the last of them wait long for their turns."""
FRONTIER = (0.2, 0.8)
FIRST_TERMS = 2
"""Of most of the base model's proposals."""


class Drawn(ProposeAndSolve):
    """A proposal is made and attempted, and nobody is paid."""

    attempts: ClassVar[int] = ATTEMPTS
    seen: ClassVar[list[tuple[str, float]]] = []
    """Each valid proposal with its pass rate."""

    async def run(self, ctx: EpisodeContext) -> None:
        """Propose, and have it attempted."""
        proposer = ctx.agent("proposer")
        proposed = read((await proposer.act(agentrl.user(PROMPT))).text)
        proposer.reward(0.0)
        if proposed is not None:
            solved = await ctx.gather(*ctx.spawn(Solve, proposed.task(), n=self.attempts))
            self.seen.append((proposed.key, sum(child.reward or 0.0 for child in solved) / len(solved)))


class Shares(NamedTuple):
    """What a draw of proposals says."""

    frontier: float
    distinct: float

    def __str__(self) -> str:
        return f"frontier {self.frontier:.3f}, distinct {self.distinct:.3f}"


def drawn(config: agentrl.RunConfig, policies: Mapping[str, Path] | None, *, draws: int, attempts: int) -> Shares:
    """Draw proposals from given weights, the base model's where there are none, and have the solver attempt them."""
    Drawn.attempts, Drawn.seen = attempts, []
    tasks = [agentrl.Task(id="propose", data={})] * draws
    agentrl.evaluate(config, policies, tasks, environment=Drawn)
    low, high = FRONTIER
    pass_rates = dict(reversed(Drawn.seen))
    return Shares(sum(low <= p <= high for p in pass_rates.values()) / draws, len(pass_rates) / draws)


class Accuracy(NamedTuple):
    """Shares of the sums outside that a solver gets right."""

    within: float
    """Of those with as many terms as the first proposals have."""
    beyond: float
    """Of the longer ones."""
    all: float

    def __str__(self) -> str:
        return f"{self.all:.3f} ({self.within:.3f} of the short sums, {self.beyond:.3f} of the longer ones)"


def accuracy(config: agentrl.RunConfig, solver: Path | None) -> Accuracy:
    """Examine a solver on the sums that no proposer may write."""
    outside = Solve.tasks("held_out")
    tasks = [outside[number] for number in range(len(outside))]
    short = [task for task in tasks if task.data["question"].count(" ") == 2 * FIRST_TERMS - 1]
    longer = [task for task in tasks if task not in short]
    policies = None if solver is None else {"solver": solver}
    within, beyond = (
        agentrl.evaluate(config, policies, part, environment=Solve)["evaluation/reward"] for part in (short, longer)
    )
    return Accuracy(within, beyond, (len(short) * within + len(longer) * beyond) / len(tasks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of the runs of a seed."""

    best: Shares
    end: Shares
    gain: float
    gain_frozen: float


def config_of(directory: str, seed: int, *, frozen: bool = False, **changes: Any) -> agentrl.RunConfig:
    """The example's configuration; `frozen`: the proposer stays as it is, and nothing can be chosen by its steps."""
    config = runpy.run_path(str(EXAMPLE))["CONFIG"].model_dump()
    if frozen:
        config["policies"]["proposer"] = {"kind": "frozen"}
        config["best"] = {}
    config["episode_timeout_s"] = PATIENCE_S
    name = f"{'frozen' if frozen else 'both'}-{seed}"
    return agentrl.RunConfig.model_validate(config | {"directory": directory, "seed": seed, "name": name} | changes)


def trained(config: agentrl.RunConfig) -> agentrl.Run:
    """Train, and tell how it goes."""
    started = time.monotonic()

    class Progress:
        def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
            if step % 8 == 0:
                share, reward = metrics.get("pass_rate/frontier", float("nan")), metrics["reward/mean"]
                print(f"    {policy}@{step}: reward {reward:.2f}, frontier {share:.2f}", flush=True)

        def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None:
            """There is none."""

    run = completed(agentrl.train(config, quiet=True, observers=[Progress()]))
    ended = run.summary["ended_early"] or "all steps taken"
    print(f"  {config.name}: {time.monotonic() - started:.0f} s, {ended}; best {run.summary['best']}", flush=True)
    return run


def of_seed(directory: str, seed: int, before: Accuracy) -> Result:
    """Train both, and the solver alone, and measure what came of them."""
    config = config_of(directory, seed)
    run = trained(config)
    end = drawn(config, run.policies, draws=DRAWS, attempts=ATTEMPTS)
    is_last = all(path.resolve() == run.policies[name].resolve() for name, path in run.best.items())
    best = end if is_last else drawn(config, run.best, draws=DRAWS, attempts=ATTEMPTS)
    after = accuracy(config, run.policies["solver"])
    print(f"  seed {seed}, best: {best}\n  seed {seed}, end: {end}\n  solver: {after}", flush=True)
    alone = config_of(directory, seed, frozen=True)
    after_alone = accuracy(alone, trained(alone).policies["solver"])
    print(f"  solver beside a frozen proposer: {after_alone}", flush=True)
    return Result(best=best, end=end, gain=after.all - before.all, gain_frozen=after_alone.all - before.all)


def worst(results: Sequence[Result]) -> dict[str, float | None]:
    """The figures of the worst seeds."""
    least = min(results, key=lambda result: result.gain)
    return {
        "frontier_share_best": min(result.best.frontier for result in results),
        "frontier_share_end": min(result.end.frontier for result in results),
        "distinct_share": min(shares.distinct for result in results for shares in (result.best, result.end)),
        "solver_gain": least.gain,
        "solver_gain_frozen_proposer": least.gain_frozen,
    }


def figures(quick: bool) -> dict[str, float | None]:
    """The part's figures; a quick run looks at fewer proposals and takes a few steps only."""
    with tempfile.TemporaryDirectory() as directory:
        if quick:
            start = drawn(config_of(directory, 0), None, draws=QUICK_DRAWS, attempts=QUICK_ATTEMPTS)
            run = trained(config_of(directory, 0, steps=QUICK_STEPS))
            end = drawn(config_of(directory, 0), run.policies, draws=QUICK_DRAWS, attempts=QUICK_ATTEMPTS)
            print(f"  start: {start}\n  after a few steps: {end}", flush=True)
            return {"frontier_share_start": start.frontier, "distinct_share": end.distinct}
        config = config_of(directory, 0)
        start, before = drawn(config, None, draws=DRAWS, attempts=ATTEMPTS), accuracy(config, None)
        print(f"  start: {start}\n  solver: {before}", flush=True)
        results = [of_seed(directory, seed, before) for seed in SEEDS]
        return {"frontier_share_start": start.frontier, **worst(results)}


if __name__ == "__main__":
    run("coevolution", FIGURES, figures, description=__doc__)
