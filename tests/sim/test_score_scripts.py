"""Scripts that users of scores and branches write, run as they stand but for the engine, which follows a script.

The others are in docs/reference/trees.md (`tests/unit/test_tree_credit.py`, `test_branches.py`: TreeRL, VinePPO) and in
`tests/e2e/test_reward_model_run.py` (a reward model).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import GroupScores, PolicyVersion
from agentrl.journal.entries import BranchEntry, EffectEntry, NondeterministicValueEntry, ScoreEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for, guess
from tests.sim.test_branches import bodies, ends
from tests.sim.test_judges import told

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


# --- a judge from TOML, relative over a group -------------------------------------------------------------------------

JUDGE = """
[environment]
id = "calculator"

[model]
path = "agentrl.environments:calculator/model"

[policies.guesser]
step_size = 8

[policies.critic]
kind = "remote"
url = "https://api.example.com/v1"
model = "large"
api_key_env = "CRITIC_KEY"

[scorers.helpful]
judge = "critic"
per = "group"
rubric = "helpful.md"
scale = [0, 10]
votes = 3
unscorable = 0.0
limit = { requests = 20000 }
on_failure = "drop"

[credit]
advantage = "group_mean"
group_size = 4
"""


def test_a_judge_compares_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITIC_KEY", "secret")
    (tmp_path / "helpful.md").write_text("Rate how helpful each conversation is.", encoding="utf-8")
    (tmp_path / "run.toml").write_text(JUDGE, encoding="utf-8")
    loaded = load(tmp_path / "run.toml")
    assert loaded.scorers["helpful"].rubric == "Rate how helpful each conversation is."
    assert loaded.scorers["helpful"].limit.requests == 20_000

    def ranking(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        if policy != "critic":
            return guess(request, policy, version)
        shown = re.split(r"Conversation \d+:", told(request))[1:]
        last = [re.findall(r'"content": "\.*(\d)"', each)[-1] for each in shown]
        return [*" ".join(last).encode(), STOP_TOKEN]

    values = loaded.model_dump()
    values["policies"]["critic"] = {"kind": "frozen"}
    scorers = {"helpful": values["scorers"]["helpful"]}
    config = config_for(
        steps=2,
        policies={"guesser": {"step_size": 8, "max_staleness": 1}, "critic": {"kind": "frozen"}},
        scorers=scorers,
        credit={"group_size": 4, "advantage": "group_mean"},
    )
    run = played(config, script=ranking)
    groups = [record for record in run.journal.records if isinstance(record, GroupScores)]
    assert groups
    for record in groups:
        assert (len(record.scores), record.requests, record.spread) == (4, 3, 0.0)
        for member in record.scores:
            _, header = ends(run)[member.episode_id]
            turns = [body for body in bodies(run, header) if isinstance(body, TurnEntry)]
            assert member.value == float(turns[-1].text.removesuffix("<|stop|>").strip("."))


# --- the weights that the run began with as judge ---------------------------------------------------------------------


def test_the_first_weights_judge_an_episode() -> None:
    def judging(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        if policy != "start":
            return guess(request, policy, version)
        last = re.findall(r'"content": "\.*(\d)"', told(request))[-1]
        return [*(b"Yes." if last in "02468" else b"No."), STOP_TOKEN]

    section = {
        "judge": "start",
        "per": "episode",
        "rubric": "Is the answer right? Answer yes or no.",
        "answer": {"yes": 1.0, "no": 0.0},
        "unscorable": 0.0,
    }
    config = config_for(
        steps=2,
        policies={"guesser": {"step_size": 8, "max_staleness": 1}, "start": {"kind": "frozen"}},
        scorers={"own": section},
    )
    run = played(config, script=judging)
    values = Counter[float]()
    for _, header in ends(run).values():
        if header.committed:
            of_episode = bodies(run, header)
            last = [body.text for body in of_episode if isinstance(body, TurnEntry)][-1]
            (score,) = (body for body in of_episode if isinstance(body, ScoreEntry))
            assert score.value == float(last.removesuffix("<|stop|>")[-1] in "02468")
            values[score.value] += 1
    assert min(values[0.0], values[1.0]) > 2


# --- stop or branch on a partial score --------------------------------------------------------------------------------

PROVE = '''
import agentrl

@agentrl.scorer
async def prm(scored: agentrl.Scored) -> float:
    """The share of different letters."""
    return len(set(scored.turn.text)) / 10

class Prove(agentrl.Environment):
    seats = ("prover",)
    branches, roulette = 6, True                           # at most, per root episode; admission reserves them

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
            if value < 0.1 and not await ctx.roulette(0.25):
                return                                     # survivors weigh 4: unbiased
            if value < 0.4 and ctx.branches_left() >= 3:
                await ctx.branch(3)                        # 0 here, 1, 2, 3 in the others
        prover.reward(float(done))
'''


def test_a_program_stops_and_branches_on_a_partial_score(tmp_path: Path) -> None:
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
        noted = [body for body in of_episode if isinstance(body, NondeterministicValueEntry)]
        stops = [body.value for body in noted if body.kind == "roulette"]
        seen["stopped"] += stops[-1:] == [False]
        if stops[-1:] == [False]:
            assert header.reward == 0.0
    assert min(seen["branches"], seen["checks"], seen["stopped"]) > 4
    assert any("~" in unit.episode_id for batch in run.trainer.batches for unit in batch.units)
