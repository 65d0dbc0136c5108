"""Kuhn poker: the game, the exploitability of a strategy, what a run's journal says of it, and the model that ships."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import pytest

import agentrl
from agentrl.environments.kuhn_poker.env import (
    CHIPS,
    DEALS,
    ILLEGAL_REWARD,
    MOVES,
    QUESTIONS,
    KuhnPoker,
    chips_of_first,
    exploitability,
    read_strategy,
)
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.unit.episodes import play

MODEL = Path(__file__).parent / "model"


@pytest.mark.parametrize(
    ("deal", "moves", "chips"),
    [("KJ", "pp", 1), ("JK", "pp", -1), ("QK", "pbb", -2), ("KQ", "pbb", 2), ("KJ", "pbp", -1), ("JK", "bp", 1)],
)
def test_a_hand_is_played_to_its_end_for_chips(deal: str, moves: str, chips: int) -> None:
    header = play(KuhnPoker, list(moves), data={"deal": deal}).header
    assert [agent.reward for agent in header.trajectories] == [chips, -chips]
    assert header.stop_reason == "completed"


def test_what_is_no_move_costs_more_than_any_loss() -> None:
    header = play(KuhnPoker, ["p", "x"], data={"deal": "KJ"}).header
    assert [agent.reward for agent in header.trajectories] == [0.0, ILLEGAL_REWARD]


def test_every_deal_is_drawn_and_held_out() -> None:
    drawn = KuhnPoker.tasks("train", seed=3)
    assert {drawn[index].data["deal"] for index in range(100)} == set(DEALS)
    assert [task.data["deal"] for task in KuhnPoker.tasks("held_out")] == list(DEALS)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 3])
def test_kuhns_equilibria_cannot_be_exploited(alpha: float) -> None:
    bets = {"J": alpha, "Q": 0, "K": 3 * alpha, "Jpb": 0, "Qpb": alpha + 1 / 3, "Kpb": 1}
    bets |= {"Jp": 1 / 3, "Qp": 0, "Kp": 1, "Jb": 0, "Qb": 1 / 3, "Kb": 1}
    assert exploitability(bets) == pytest.approx(0, abs=1e-15)


def test_exploitability_is_what_pure_replies_win() -> None:
    """Compared with an enumeration that plays out whole hands; 11/24, 1/3 and 1 are also OpenSpiel's values."""
    for bets, known in [(0.5, 11 / 24), (1.0, 1 / 3), (0.0, 1.0)]:
        assert exploitability(dict.fromkeys(QUESTIONS, bets)) == pytest.approx(known)
    random = Random(0)
    bets = {question: random.random() for question in QUESTIONS}
    best = [-math.inf, -math.inf]
    for seat, questions in enumerate((QUESTIONS[:6], QUESTIONS[6:])):
        for number in range(64):
            plan = bets | {question: float(number >> place & 1) for place, question in enumerate(questions)}
            won = 0.0
            for deal in DEALS:
                for moves in CHIPS:
                    chance = 1 / len(DEALS)
                    for place, move in enumerate(moves):
                        bet = plan[deal[place % 2] + moves[:place]]
                        chance *= bet if move == "b" else 1 - bet
                    won += chance * chips_of_first(deal, moves) * (1 - 2 * seat)
            best[seat] = max(best[seat], won)
    assert exploitability(bets) == pytest.approx(sum(best) / 2)


def test_a_runs_journal_says_how_each_version_plays(tmp_path: Path) -> None:
    config = agentrl.RunConfig(
        environment={"id": "agentrl.environments.kuhn_poker:KuhnPoker"},
        model={"path": str(MODEL)},
        steps=2,
        policies={seat: {"learning_rate": 1e-3, "step_size": 64, "max_staleness": 0} for seat in KuhnPoker.seats},
        sampling={"max_tokens": 1, "max_turns": 4},
        engine={"slots": 64, "max_context": 24},
        credit={"group_size": 1, "advantage": "role_mean"},
        evaluation={"tasks": 0},
        directory=str(tmp_path),
    )
    path = agentrl.train(config, environment=KuhnPoker).path
    with agentrl.open_run(path) as run:
        strategies = [read_strategy(run, step) for step in range(2)]
    assert set(strategies[0]) == set(QUESTIONS)
    assert all(0.4 < bet < 0.6 for bet in strategies[0].values()), "the model starts undecided"
    assert strategies[1] != strategies[0]
    assert 0.4 < exploitability(strategies[0]) < 0.5


def test_a_move_is_one_token_that_ends_the_turn() -> None:
    chat = TemplateChatFormat.load(MODEL)
    for move in MOVES:
        (token,) = chat.encode(move)
        assert token in chat.stop_token_ids
    assert len(chat.start([agentrl.user("Qpb")], [])) == 5
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 300_000
