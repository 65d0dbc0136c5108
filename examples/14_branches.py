"""Branches: an episode that computed its first step tries the rest three more times.

python 14_branches.py        (about two minutes on two CPU cores; needs no other file)

`ctx.branch(3)` starts three further episodes of the group. They recall the turns before the call, and go their own ways
from there. The shared turns are sampled and trained once, and each continuation counts a quarter, so the gradient is
that of episodes without branches, with less noise.
"""

from __future__ import annotations

import sys

import agentrl
from agentrl.environments.calculator.env import Calculator

CONFIG = agentrl.RunConfig(
    name="branches",
    steps=30,
    environment={"id": "calculator"},
    model={"path": "agentrl.environments:calculator/model"},
    policies={"solver": {"learning_rate": 2e-3, "step_size": 64, "lora": {"rank": 8}}},
    credit={"group_size": 4},
    sampling={"max_tokens": 32, "max_turns": 6},
    engine={"slots": 96, "max_context": 192},
    trainer={"loss": {"normalizer": 64}, "micro_batch_tokens": 8192},
    evaluation={"tasks": 256},
    checkpoint={"every": 0},  # only one at the end; leave this out so that a killed run can be resumed
)


class Branching(Calculator):
    """The calculator, with three branches after the first result."""

    branches = 3

    async def between_turns(self, ctx: agentrl.EpisodeContext) -> None:
        """Branch once; in the branches, and in evaluations, none are left."""
        if ctx.branches_left() == self.branches:
            await ctx.branch(self.branches)


def main() -> None:
    """Train, and print how much of the work was shared."""
    run = agentrl.train(CONFIG, environment=Branching, resume="--resume" in sys.argv)
    if run.interrupted:
        raise SystemExit("stopped before its last step; --resume continues the run")
    first, last = run.metrics[:4], run.metrics[-4:]
    before, after = (sum(step["reward/mean"] for step in steps) / len(steps) for steps in (first, last))
    print(f"reward: {before:.2f} in the first four steps, {after:.2f} in the last four")
    print(f"agentrl episode show {run.path} 'e0~0.r#3.b1' shows where a branch went its own way")


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
