"""Frozen lakes: maps, what the player reads, rewards, and the model that ships."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import pytest

import agentrl
from agentrl.core.ids import random_stream
from agentrl.core.records import Task
from agentrl.environment.gym import GymEpisode, SeededGame
from agentrl.environments.frozen_lake.env import MOVES, FrozenLake
from agentrl.rollout.chat.chat_format import TemplateChatFormat

MAP = ["SFFF", "FHFH", "FFFH", "HFFG"]
MODEL = Path(__file__).parent / "model"


def game_on(rows: list[str], *, shaped: bool = True) -> tuple[FrozenLake, SeededGame]:
    environment = FrozenLake()
    return environment, SeededGame(environment, Task(id="t", data={"map": rows, "seed": 0, "shaped": shaped}))


def reward_of(moves: str, *, shaped: bool = True) -> float:
    environment, game = game_on(MAP, shaped=shaped)
    game.reset()
    steps = [game.step(move) for move in moves]
    rewards = tuple(step["reward"] for step in steps if step["legal"])
    episode = GymEpisode(rewards=rewards, terminated=steps[-1]["terminated"], illegal=not steps[-1]["legal"])
    return environment.reward(Task(id="t", data={"shaped": shaped}), episode)


def test_the_map_is_shown_once_then_the_position_and_its_neighbors() -> None:
    _, game = game_on(MAP)
    assert game.reset() == "SFFF\nFHFH\nFFFH\nHFFG\n00#FF#"
    assert game.step("R")["observation"] == "01SHF#"
    assert game.step("R")["observation"] == "02FFF#"
    assert game.step("D")["observation"] == "12HFHF"


@pytest.mark.parametrize("text", ["", "l", "LL", "X", " R", "0"])
def test_anything_but_one_letter_of_a_move_is_illegal(text: str) -> None:
    _, game = game_on(MAP)
    first = game.reset()
    step = game.step(text)
    assert (step["legal"], step["observation"]) == (False, FrozenLake.illegal_text + first)


@pytest.mark.parametrize(
    ("moves", "shaped", "held_out"),
    [("DDRDRR", 1.0, 1.0), ("RD", -0.25, 0.0), ("RR", 0.5 * 2 / 6 - 0.25, 0.0), ("U", -0.25, 0.0), ("Rx", -0.5, 0.0)],
)
def test_rewards(moves: str, shaped: float, held_out: float) -> None:
    assert reward_of(moves) == pytest.approx(shaped)
    assert reward_of(moves, shaped=False) == held_out


def test_walking_to_and_fro_pays_no_more_than_a_hole() -> None:
    assert reward_of("RL" * 8) == reward_of("RD") == -0.25
    assert reward_of("DDRD") > reward_of("RL" * 8), "coming closer pays"


def test_breaking_the_format_scores_below_every_legal_end() -> None:
    draw = random_stream("worst")
    worst = min(reward_of("".join(draw.choice(MOVES) for _ in range(length))) for length in range(1, 17))
    assert FrozenLake.illegal_reward < worst


def test_no_held_out_map_is_trained_on() -> None:
    held_out, training = FrozenLake.tasks("held_out", seed=1), FrozenLake.tasks("train", seed=0)
    hidden = {tuple(held_out[index].data["map"]) for index in range(len(held_out))}
    maps = [tuple(training[index].data["map"]) for index in range(2000)]
    assert (len(held_out), len(hidden)) == (512, 314)
    assert hidden.isdisjoint(maps)
    assert len(set(maps)) > 500
    assert held_out[0] == FrozenLake.tasks("held_out", seed=2)[0]
    assert training[70] == FrozenLake.tasks("train", seed=0)[70]
    assert training[70] != FrozenLake.tasks("train", seed=3)[70]
    with pytest.raises(IndexError):
        training[-1]


def test_what_is_read_agrees_with_the_game() -> None:
    tasks, draw = FrozenLake.tasks("train"), random_stream("agreement")
    for index in range(40):
        rows = tasks[index].data["map"]
        table: Any = gymnasium.make("FrozenLake-v1", desc=rows, is_slippery=False).unwrapped
        _, game = game_on(rows)
        state, observation = 0, game.reset()[-6:]
        for _ in range(8):
            for action, cell in enumerate(observation[2:]):
                next_state = table.P[state][action][0][1]
                assert cell == ("#" if next_state == state else rows[next_state // 4][next_state % 4])
            action = draw.randrange(4)
            step, state = game.step(MOVES[action]), table.P[state][action][0][1]
            if step["terminated"]:
                break
            observation = step["observation"]
            assert observation[:2] == f"{state // 4}{state % 4}"


def test_a_move_is_one_token_that_ends_the_turn_and_an_observation_eight() -> None:
    chat = TemplateChatFormat.load(MODEL)
    for move in MOVES:
        assert len(chat.encode(move)) == 1
        assert chat.encode(move)[0] in chat.stop_token_ids
    assert len(chat.extend([agentrl.user("01SHF#")], after="stop")) == 8
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 3_000_000
