"""A run that masks tokens beyond `max_lag` trains slow episodes in part, and its steps are rebuilt as they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import agentrl
from agentrl.app.replays import recompute_step_loss, replay_step
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_list, step_view
from tests.journal_oracle import judge

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.timeout(300)]


class SlowMiddle(agentrl.Environment):
    """Two turns, between which one episode in eight waits for several steps."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver = ctx.agent("solver")
        await solver.act(agentrl.user("2 + 3?"))
        if ctx.rng.random() < 0.125:
            await ctx.sleep(3.0)
        turn = await solver.act(agentrl.user("again?"))
        solver.reward(len(turn.text) / 10)


def test_old_tokens_are_left_out_and_each_step_is_rebuilt_with_the_same_input(tmp_path: Path) -> None:
    run = agentrl.train(
        agentrl.RunConfig(
            name="run",
            directory=str(tmp_path),
            steps=12,
            environment={"id": f"{__file__}:SlowMiddle"},
            model={"path": "agentrl.environments:calculator/model"},
            policies={
                "solver": {
                    "lora": {"rank": 4},
                    "step_size": 16,
                    "max_staleness": 1,
                    "max_lag": 1,
                }
            },
            credit={"group_size": 4, "release": "late"},
            trainer={"loss": {"normalizer": 16}},
            sampling={"max_tokens": 8, "max_turns": 2},
            engine={"slots": 32, "max_context": 128},
            evaluation={"tasks": 0},
            checkpoint={"every": 6, "versions": 0},
            max_in_flight=64,
        ),
        tasks=[agentrl.Task(id=f"t{number}", data={}) for number in range(8)],
        quiet=True,
    ).path
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    masked = [step.get("staleness/masked", 0.0) for step in steps]
    assert 0 < max(masked) < 0.5
    reader = RunReader(run)
    try:
        lines = step_list(reader)
        assert [replay_step(reader, line).text for line in lines] == [""] * 12
        fed = [row for line in lines for row in step_view(reader, line.step).fed]
        assert sum(row.tokens or 0 for row in fed) == sum(line.tokens for line in lines)
        assert max(-1 if row.largest_lag is None else row.largest_lag for row in fed) <= 1
        last = next(line for line in reversed(lines) if masked[line.step - 1])
        again = recompute_step_loss(reader, last)
        assert again.same, again
    finally:
        reader.close()
    assert judge(run) == []
