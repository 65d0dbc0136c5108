"""Several named rewards: weighted by the configuration, journaled, compared apart by GDPO, shown apart."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from agentrl_algorithms.advantages import gdpo

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.cli.main import main
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.core.errors import ConfigError, RewardError
from agentrl.core.ports import Engine, Trainer
from agentrl.core.records import PolicyVersion
from agentrl.credit.group import Group
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.rewards import check_reward_name
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.journal_oracle import judge
from tests.sim.small_run import TASKS, config_for, guess
from tests.support.recording_trainer import RecordingTrainer
from tests.unit.test_supervisor import NoWaiting

WEIGHTS = {"right": 1.0, "short": 0.25}


class Guesses(agentrl.Environment):
    """Guess a digit, in few characters."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        turn = await guesser.act(agentrl.user("Guess a digit."))
        guesser.reward(-0.5 * len(turn.text), turn=0, name="short")
        guesser.reward({"right": float(turn.text[-1:] == ctx.task.data["digit"]), "short": 1.0})


def train(directory: Path, **credit: Any) -> None:
    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> Engine:
        return ScriptedEngine(guess, versions=versions)

    def trainer(plan: TrainerPlan, *rest: Any) -> Trainer:
        return RecordingTrainer(list(plan.policies), versions=rest[0] / "versions")

    config = config_for(name="run", directory=str(directory), credit={"group_size": 4, **credit})
    factories = RunFactories(
        engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat(), clock=NoWaiting()
    )
    asyncio.run(run_training(config, Guesses, tasks=TASKS, quiet=True, factories=factories))


def test_named_rewards_are_weighted_journaled_and_shown_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(tmp_path, reward_weights=WEIGHTS, advantage="gdpo")
    assert judge(run, ended=True) == []
    rows = sqlite3.connect(run / "journal" / "control.db").execute(
        "SELECT t.reward, t.named_rewards, s.advantage, e.group_id, s.step, t.episode FROM trajectories t"
        " JOIN step_units s USING (episode, attempt) JOIN episodes e USING (episode, attempt)"
    )
    steps: dict[int, list[tuple[float, dict[str, float], float, str]]] = {}
    for reward, named, advantage, group, step, _ in rows.fetchall():
        given = dict(json.loads(named))
        assert reward == pytest.approx(given["right"] + 0.25 * given["short"])
        steps.setdefault(step, []).append((reward, given, advantage, group))
    assert len(steps) == 4
    for members in steps.values():
        scores = [0.0] * len(members)
        for name, weight in WEIGHTS.items():
            for at, (_, given, _, group) in enumerate(members):
                own = [other[name] for _, other, _, whose in members if whose == group]
                scores[at] += weight * (given[name] - statistics.mean(own)) / (statistics.stdev(own) + 1e-4)
        for score, (_, _, advantage, _) in zip(scores, members, strict=True):
            expected = (score - statistics.mean(scores)) / (statistics.stdev(scores) + 1e-4)
            assert advantage == pytest.approx(expected, abs=1e-9)

    def told(*command: str) -> str:
        assert main(list(command)) == 0
        return capsys.readouterr().out

    shown = told("episode", "show", str(run), "e0")
    assert all(part in shown for part in ("0.25 × 1 (short)", "(short, turn 0)", "(right)"))
    assert "before weights: right" in told("run", "stats", str(run))
    assert "named_reward/short" in told("run", "curve", str(run), "--metric", "named_reward/short")
    assert "(right)" in told("episode", "why", str(run), "e0")
    told("run", "export", str(run), "--to", "jsonl", "--out", str(tmp_path / "out.jsonl"))
    agents = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])["agents"]
    assert {part["name"]: part["weight"] for part in agents[0]["reward_parts"]} == WEIGHTS


def test_a_name_without_a_weight_ends_the_episode_by_name(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"'short' .*credit\.reward_weights"):
        train(tmp_path, reward_weights={"right": 1.0})


@pytest.mark.parametrize("name", ["", "two words", "x" * 65, 3, "naïve"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(RewardError, match="name"):
        check_reward_name(name, "here")


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ({"right": 1.0, "short": -1.0}, "right = 1, short = -1"),
        ({"right": 0.0}, "sum to 0"),
        ({"right": 1e308, "short": 1e308}, "finite"),
        ({"right": 1.0, "short": -2.0}, "sum to -1"),
        ({"right": float("nan")}, "finite"),
        ({"two words": 1.0}, "'two words'"),
    ],
)
def test_weights_that_cancel_are_refused_by_name(weights: dict[str, float], reason: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=reason):
        config_for(credit={"reward_weights": weights})


def test_gdpo_tells_apart_what_the_sum_does_not() -> None:
    group = Group(
        rewards=(1.0, 1.0, 0.0, 2.0),
        episodes=("a", "b", "c", "d"),
        named_rewards=(
            (("format", 1.0), ("right", 0.0)),
            (("format", 0.0), ("right", 1.0)),
            (("format", 0.0), ("right", 0.0)),
            (("format", 1.0), ("right", 1.0)),
        ),
        weights={"format": 1.0, "right": 3.0},
        groups=("g",) * 4,
    )
    first, second, *_ = gdpo(group)
    assert first < 0 < second


def test_a_reward_without_a_name_is_compared_before_its_weight() -> None:
    named = ((("format", 1.0), ("reward", 1.0)), (("reward", 1.0),))
    group = Group(rewards=(3.0, 2.0), episodes=("a", "b"), named_rewards=named, weights={"reward": 2.0, "format": 1.0})
    assert group.by_name() == {"format": (1.0, 0.0), "reward": (1.0, 1.0)}
