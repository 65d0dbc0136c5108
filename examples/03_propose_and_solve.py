"""A proposer writes sums, a solver with a calculator tries each of them eight times: both learn, on one base model.

python 03_propose_and_solve.py        (under two minutes on two CPU cores; the file needs no other)

The proposer is paid for what there is to learn from a sum: most where half of the attempts succeed, nothing where all
or none do. So it has to keep up with the solver. Two adapters, each with its own optimizer, clock and learning rate:
the solver takes a step where the proposer takes two, and its last one when the proposer has a third of its steps left.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import agentrl
from environments.propose_and_solve import Solve

STEPS = 48
CONFIG = agentrl.RunConfig(
    name="propose_and_solve",
    steps=STEPS,
    environment={"id": "environments.propose_and_solve:ProposeAndSolve"},
    model={"path": "environments.propose_and_solve:model"},
    policies={
        "proposer": {"lora": {"rank": 8, "alpha": 16.0}, "learning_rate": 3e-3, "step_size": 20},
        "solver": {"lora": {"rank": 8, "alpha": 16.0}, "learning_rate": 5e-4, "step_size": 320, "steps": STEPS // 3},
    },
    credit={"group_size": 10},
    sampling={"max_tokens": 32, "max_turns": 9},
    engine={"slots": 128, "max_context": 256},
    trainer={
        "kind": "in_process",  # no Ray: four seconds less
        "entropy_bonus": 0.04,
        "tokens_per_unit": 32,
    },
    evaluation={"tasks": 0},
    checkpoint={"every": 0},  # one at the end only: a demonstration; leave it out and a killed run can be resumed
    best={"metric": "pass_rate/frontier", "window": 8},
)
SHOWN = {
    "0.2 ≤ p ≤ 0.8": "pass_rate/frontier",
    "all solve": "pass_rate/1",
    "none solves": "pass_rate/0",
    "kinds of sums": "proposals/structure_entropy",
}


def examined(policies: Mapping[str, Path] | None = None) -> float:
    """Share of 400 sums of 2 to 6 terms, which no proposer may write, that the solver gets right."""
    config = CONFIG.model_copy(update={"evaluation": CONFIG.evaluation.model_copy(update={"tasks": 400})})
    return agentrl.evaluate(config, policies, environment=Solve)["evaluation/reward"]


class Frontier:
    """An observer: what became of the proposals, every few steps of the proposer."""

    def __init__(self) -> None:
        self._since: list[Mapping[str, float]] = []

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """A line of the table now and then."""
        if policy != "proposer":
            return
        self._since.append(metrics)
        if step % 4 == 0:
            values = [[each[name] for each in self._since if name in each] for name in SHOWN.values()]
            print(f"{step:>4}" + "".join(f"{sum(v) / max(len(v), 1):>15.2f}" for v in values), flush=True)
            self._since.clear()

    def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """There is none while both learn."""


def main() -> None:
    """Examine the solver, let both learn, examine it again."""
    before = examined()
    print("step" + "".join(f"{name:>15}" for name in SHOWN))
    run = agentrl.train(CONFIG, observers=[Frontier()], quiet=True)
    after = examined({"solver": run.policies["solver"]})
    print(f"\nsums of 2 to 6 terms that the solver gets right: {before:.3f} before, {after:.3f} after")
    print(f"best share at the frontier: {run.summary['best']['value']:.2f}, kept in {run.path / 'best'}")


if __name__ == "__main__":
    main()
