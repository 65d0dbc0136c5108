"""Scripts that users of scores and branches write, run as they stand but for the engine, which follows a script.

The others are in docs/how-to/branches.md (`tests/unit/test_tree_credit.py`, `test_branches.py`: TreeRL, VinePPO).
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.journal.entries import BranchEntry, EffectEntry, ScoreEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_branches import bodies, ends

pytestmark = pytest.mark.sim


def played(config: agentrl.RunConfig, **parts: Any) -> SmallRun:
    run = SmallRun(config=config, **parts)

    async def main() -> None:
        await run.run()

    simulate(main, seed=0)
    return run


def module_of(path: Path, source: str) -> dict[str, Any]:
    path.write_text(source, encoding="utf-8")
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(source, str(path), "exec"), scope)
    return scope


# --- a rule per turn --------------------------------------------------------------------------------------------------

RULE = '''
import agentrl

@agentrl.scorer
def short(scored: agentrl.Scored) -> float | None:
    """Fewer words; None says nothing, which is not a zero."""
    return None if scored.turn.tool_calls else 1.0 - len(scored.turn.text.split()) / 100
'''


def test_a_rule_scores_every_turn(tmp_path: Path) -> None:
    module_of(tmp_path / "mine.py", RULE)
    config = config_for(
        steps=2,
        scorers={"short": {"function": f"{tmp_path}/mine.py:short"}},
        credit={"group_size": 4, "reward_weights": {"reward": 1.0, "short": 0.1}},
    )
    run = played(config)
    for _, header in ends(run).values():
        if header.committed:
            scores = [body for body in bodies(run, header) if isinstance(body, ScoreEntry)]
            assert [(score.value, score.weight) for score in scores] == [(0.99, 0.1)] * header.turns
            assert header.reward == pytest.approx(
                dict(header.trajectories[0].named_rewards)["reward"] + 0.099 * header.turns
            )


# --- branch on a partial score ----------------------------------------------------------------------------------------

PROVE = '''
import agentrl

@agentrl.scorer
async def prm(scored: agentrl.Scored) -> float:
    """The share of different letters."""
    return len(set(scored.turn.text)) / 10

class Prove(agentrl.Environment):
    seats = ("prover",)
    branches = 6                                           # at most, per root episode; admission reserves them

    async def run(self, ctx):
        prover = ctx.agent("prover")
        done = False
        for step in range(12):
            turn = await prover.act(agentrl.user(ctx.task.data["goal"] if not step else "go on"))
            verdict = ctx.score("prm", prover)             # starts now; the next line does not wait
            done = await ctx.effect("check", lambda: "x" in turn.text, guarantee="read")
            if done:
                break
            value = await verdict                          # journaled
            if value < 0.4 and ctx.branches_left() >= 3:
                await ctx.branch(3)                        # 0 here, 1, 2, 3 in the others
        prover.reward(float(done))
'''


def test_a_program_branches_on_a_partial_score(tmp_path: Path) -> None:
    scope = module_of(tmp_path / "mine.py", PROVE)

    def letters(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = random.Random(request.seed)
        return [*(draw.choice(b"abcdefx") for _ in range(draw.randint(0, 4))), STOP_TOKEN]

    config = config_for(
        steps=2,
        policies={"prover": {"step_size": 28, "max_staleness": 1, "lora": {"rank": 1}}},
        scorers={"prm": {"function": f"{tmp_path}/mine.py:prm", "per": "request", "credit": "note"}},
        sampling={"max_tokens": 16, "max_turns": 16},
    )
    tasks = [agentrl.Task(id="t", data={"goal": "Say x."})]
    run = played(config, environment=scope["Prove"], script=letters, tasks=tasks)
    seen = Counter[str]()
    for spec, header in ends(run).values():
        of_episode = bodies(run, header) if header.committed else []
        started = sum(len(body.children) for body in of_episode if isinstance(body, BranchEntry))
        assert started <= (0 if spec.branched_from is not None else 6)
        seen["branches"] += started
        seen["checks"] += sum(isinstance(body, EffectEntry) for body in of_episode)
    assert min(seen["branches"], seen["checks"]) > 4
    assert any("~" in unit.episode_id for batch in run.trainer.batches for unit in batch.units)
