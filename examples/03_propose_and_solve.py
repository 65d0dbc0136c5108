"""Co-evolution: a proposer writes sums, and a solver with a calculator tries each of them eight times.

python 03_propose_and_solve.py        (under two minutes on two CPU cores; needs no other file)

The proposer's reward is largest for sums solved by half of the attempts, and 0 if all or none succeed, so it must keep
up with the solver. Both are adapters on one base model, each with its own optimizer and learning rate. The solver takes
one step per two of the proposer, and stops when the proposer has a third of its steps left.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import agentrl
from agentrl.environments.propose_and_solve import Solve

STEPS = 48
CONFIG = agentrl.RunConfig(
    name="propose_and_solve",
    steps={"proposer": STEPS, "solver": STEPS // 3},
    environment={"id": "agentrl.environments.propose_and_solve:ProposeAndSolve"},
    model={"path": "agentrl.environments:propose_and_solve/model"},
    policies={
        "proposer": {"lora": {"rank": 8, "alpha": 16.0}, "learning_rate": 3e-3, "step_size": 20},
        "solver": {"lora": {"rank": 8, "alpha": 16.0}, "learning_rate": 5e-4, "step_size": 320},
    },
    credit={"group_size": 10},
    sampling={"max_tokens": 32, "max_turns": 9},
    engine={"slots": 128, "max_context": 256},
    trainer={
        "entropy_bonus": 0.04,
        "loss": {"normalizer": 32},
        "micro_batch_tokens": 8192,
    },
    evaluation={"tasks": 0},
    checkpoint={"every": 0},  # only one at the end; leave this out so that a killed run can be resumed
    best={"metric": "pass_rate/frontier", "window": 8},
)
SHOWN = {
    "0.2 ≤ p ≤ 0.8": "pass_rate/frontier",
    "all solve": "pass_rate/1",
    "none solves": "pass_rate/0",
    "kinds of sums": "proposals/structure_entropy",
}


def examined(policies: Mapping[str, Path] | None = None) -> float:
    """Return the solver's accuracy on 400 held-out sums of 2 to 6 terms, which the proposer may not write."""
    config = CONFIG.model_copy(update={"evaluation": CONFIG.evaluation.model_copy(update={"tasks": 400})})
    return agentrl.evaluate(config, policies, environment=Solve)["evaluation/reward"]


class Frontier:
    """An observer that prints pass rates of the proposals every four steps of the proposer."""

    def __init__(self) -> None:
        self._since: list[Mapping[str, float]] = []

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Print a line of the table every four steps."""
        if policy != "proposer":
            return
        self._since.append(metrics)
        if step % 4 == 0:
            values = [[metrics[name] for metrics in self._since if name in metrics] for name in SHOWN.values()]
            print(f"{step:>4}" + "".join(f"{sum(v) / max(len(v), 1):>15.2f}" for v in values), flush=True)
            self._since.clear()

    def on_evaluation(self, versions: Mapping[str, object], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Do nothing: this run has no evaluations while training."""


def main() -> None:
    """Evaluate the solver, train both policies, evaluate the solver again."""
    print("loading the solver, and examining it …", flush=True)
    before = examined()
    print("step" + "".join(f"{name:>15}" for name in SHOWN))
    run = agentrl.train(CONFIG, observers=[Frontier()], quiet=True, resume="--resume" in sys.argv)
    if run.interrupted:
        raise SystemExit("stopped before its last step; --resume continues the run")
    after = examined({"solver": run.policies["solver"]})
    print(f"\nsolver accuracy on sums of 2 to 6 terms: {before:.3f} before, {after:.3f} after")
    print(f"best share at the frontier: {run.summary['best']['value']:.2f}, kept in {run.path / 'best'}")


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
