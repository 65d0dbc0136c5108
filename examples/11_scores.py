"""A scorer per turn: the model is paid for each right step of a sum, not only for the right answer.

python 11_scores.py        (under two minutes on two CPU cores; needs no other file)

`next_step` scores a turn while the next one is sampled. Its score is a reward of that turn, named `next_step`, and
weighs 0.3 of the environment's reward (`credit.reward_weights`). With `turn_credit = "to_go"` it counts for that turn
and those before it.
"""

from __future__ import annotations

import re
import sys

import agentrl

CONFIG = agentrl.RunConfig(
    name="scores",
    steps=30,
    environment={"id": "calculator"},
    model={"path": "agentrl.environments:calculator/model"},
    policies={"solver": {"learning_rate": 3e-4, "step_size": 64}},
    credit={"group_size": 8, "turn_credit": "to_go", "reward_weights": {"reward": 1.0, "next_step": 0.3}},
    sampling={"max_tokens": 32, "max_turns": 6},
    engine={"slots": 96, "max_context": 192},
    trainer={"loss": {"normalizer": 64}, "micro_batch_tokens": 8192},
    evaluation={"tasks": 256},
    checkpoint={"every": 0},  # only one at the end; leave this out so that a killed run can be resumed
)


@agentrl.scorer
def next_step(scored: agentrl.Scored) -> float | None:
    """1 if the call computes the next partial sum, 0 if it computes something else; None (no score) for an answer."""
    if not scored.turn.tool_calls:
        return None
    total, *terms = (int(sign + number) for sign, number in re.findall(r"([-+]?) ?(\d+)", scored.task.data["question"]))
    partial_sums = [total := total + term for term in terms]
    call = scored.turn.tool_calls[0].arguments
    try:
        result = call["a"] + call["b"] if call["op"] == "+" else call["a"] - call["b"]
    except (KeyError, TypeError):
        return 0.0
    return float(partial_sums[scored.number : scored.number + 1] == [result])


def main() -> None:
    """Train, and print how the answers and the steps improved."""
    run = agentrl.train(CONFIG, scorers=[next_step], resume="--resume" in sys.argv)
    if run.interrupted:
        raise SystemExit("stopped before its last step; --resume continues the run")
    first, last = run.metrics[:4], run.metrics[-4:]
    for name in ("named_reward/reward", "named_reward/next_step"):
        before, after = (sum(step[name] for step in steps) / len(steps) for steps in (first, last))
        print(f"{name}: {before:.2f} in the first four steps, {after:.2f} in the last four")
    print(f"agentrl episode why {run.path} e0 shows which part of a reward came from whom")


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
