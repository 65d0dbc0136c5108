"""The signalling game: its rounds, what a run's journal says of the code, and the model that ships."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

import agentrl
from agentrl.environments.signalling.env import STATES, WORDS, Signalling, mutual_information, read_code
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.unit.episodes import play

MODEL = Path(__file__).parent / "model"


@pytest.mark.parametrize(("word", "named", "reward"), [("c", "3", 1), ("c", "4", 0), ("c", "c", 0)])
def test_both_win_if_the_listener_names_the_state(word: str, named: str, reward: float) -> None:
    played = play(Signalling, [word, named], data={"state": "3"})
    assert [agent.reward for agent in played.header.trajectories] == [reward] * 2


def test_a_reply_that_is_no_word_is_not_passed_on() -> None:
    for reply in ("", "ab", "3"):
        played = play(Signalling, [reply, "3"], data={"state": "3"})
        assert len(played.seen) == 1
        assert played.header.trajectories[0].reward == 0


def test_every_state_is_drawn_and_held_out() -> None:
    drawn = Signalling.tasks("train", seed=3)
    assert {drawn[index].data["state"] for index in range(100)} == set(STATES)
    held_out = Counter(task.data["state"] for task in Signalling.tasks("held_out"))
    assert held_out == dict.fromkeys(STATES, 16)


def code(words: str) -> dict[tuple[str, str], float]:
    """The code that says each state's word, or one of its two words half of the time."""
    shares = {state: Counter(said) for state, said in zip(STATES, words.split(), strict=True)}
    return {(state, word): shares[state][word] / shares[state].total() for state in STATES for word in WORDS}


@pytest.mark.parametrize(
    ("words", "bits"),
    [
        ("a b c d e f g h", 3),
        ("ai bj ck dl em fn go hp", 3),
        ("a a a a a a a a", 0),
        ("a a b b c c d d", 2),
        ("ab ab ab ab ab ab ab ab", 0),
        ("a a c d e f g h", 3 - 2 / 8),
    ],
)
def test_mutual_information_is_what_a_word_says_of_the_state(words: str, bits: float) -> None:
    assert mutual_information(code(words)) == pytest.approx(bits)


def test_a_runs_journal_holds_the_code(tmp_path: Path) -> None:
    config = agentrl.RunConfig(
        environment={"id": "agentrl.environments.signalling:Signalling"},
        model={"path": str(MODEL)},
        steps=1,
        policies={seat: {"learning_rate": 1e-3, "step_size": 256, "max_staleness": 0} for seat in Signalling.seats},
        sampling={"max_tokens": 1, "max_turns": 1},
        engine={"slots": 64, "max_context": 24},
        credit={"group_size": 1, "advantage": "role_mean"},
        evaluation={"tasks": 0},
        directory=str(tmp_path),
    )
    with agentrl.open_run(agentrl.train(config, environment=Signalling).path) as run:
        read = read_code(run, 0)
    assert set(read) == {(state, word) for state in STATES for word in WORDS}
    assert all(math.fsum(read[state, word] for word in WORDS) == pytest.approx(1, abs=0.01) for state in STATES)
    assert mutual_information(read) < 0.05, "no word means anything yet"


def test_a_word_and_a_state_are_one_token_that_ends_the_turn() -> None:
    chat = TemplateChatFormat.load(MODEL)
    for text in (*STATES, *WORDS):
        (token,) = chat.encode(text)
        assert token in chat.stop_token_ids
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 300_000
