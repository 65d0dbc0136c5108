"""A proposer writes sums, a solver with a calculator tries each of them eight times: both learn, on one base model.

python 03_propose_and_solve.py        (about a minute on two CPU cores; the file needs no other)

The proposer is paid for what there is to learn from a sum: most where half of the attempts succeed, nothing where all
or none do. So it has to keep up with the solver. Two adapters, each with its own optimizer, clock and learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import agentrl
from environments.propose_and_solve import Solve

STEPS = 24
CONFIG = agentrl.RunConfig(
    name="propose_and_solve",
    steps=STEPS,
    environment={"id": "environments.propose_and_solve:ProposeAndSolve"},
    model={"path": "environments.propose_and_solve:model"},
    policies={
        "proposer": {"lora": {"rank": 8, "alpha": 16.0}, "learning_rate": 2e-3, "step_size": 20},
        "solver": {"lora": {"rank": 8, "alpha": 16.0}, "learning_rate": 5e-4, "step_size": 160},
    },
    credit={"group_size": 10},
    sampling={"max_tokens": 32, "max_turns": 9},
    engine={"slots": 128, "max_context": 256},
    trainer={"kind": "in_process", "entropy_bonus": 0.07, "tokens_per_unit": 32},  # no Ray: four seconds less
    evaluation={"tasks": 0},
    checkpoint={"every": 0},
)


def examined(policies: dict[str, Path] | None = None) -> float:
    """Share of 400 sums of 2 to 6 terms, which no proposer wrote, that the solver gets right."""
    config = CONFIG.model_copy(update={"evaluation": CONFIG.evaluation.model_copy(update={"tasks": 400})})
    return agentrl.evaluate(config, policies, environment=Solve)["evaluation/reward"]


class Frontier:
    """An observer: what became of the proposals, every few steps of the proposer."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """A line of the table."""
        if policy == "proposer" and step % 4 == 1:
            names = ("pass_rate/frontier", "pass_rate/1", "proposals/structure_entropy", "gate/acceptance")
            print(f"{step:>4}" + "".join(f"{metrics.get(name, float('nan')):>15.2f}" for name in names), flush=True)

    def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """There is none while both learn."""


def main() -> None:
    """Examine the solver, let both learn, examine it again."""
    before = examined()
    print(f"step{'0.2 ≤ p ≤ 0.8':>15}{'all solve':>15}{'kinds of sums':>15}{'valid and new':>15}")
    run = agentrl.train(CONFIG, observers=[Frontier()], quiet=True)
    after = examined({"solver": run.policies["solver"]})
    print(f"\nsums of 2 to 6 terms that the solver gets right: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
