"""TicTacToe: what each seat reads, rewards, openings, the bot, and the model that ships."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError
from agentrl.core.records import Task
from agentrl.environment.games import GameEpisode, GamePosition
from agentrl.environments.tictactoe.build_model import MOVES
from agentrl.environments.tictactoe.env import FREE_MARKS, LINES, TicTacToe, is_won, random_player
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from tests.unit.episodes import play

pytest.importorskip("textarena", reason="the extra games is not installed")
MODEL = Path(__file__).parent / "model"


def lines(board: str) -> str:
    return "".join(board[cell] for line in LINES for cell in line)


def positions(moves: list[str], opening: tuple[int, ...] = ()) -> list[GamePosition]:
    """What comes of the start and of each move."""
    game = TicTacToe().game(Task(id="t", data={"seed": 0, "opening": list(opening)}))
    return [game.reset(), *(game.step(move) for move in moves)]


def rewards(cells: list[int]) -> list[float]:
    """Of a game on TextArena's own cells."""
    environment = TicTacToe()
    game = environment.game(Task(id="t", data={"seed": 0, "opening": []}))
    end = game.reset()
    for cell in cells:
        move = next(move for move in MOVES if environment.action(move, environment.env) == f"[{cell}]")
        end = game.step(move)
    return rewards_at(end)


def rewards_at(end: GamePosition) -> list[float]:
    assert end["player"] is None
    episode = GameEpisode(rewards=tuple(end["rewards"]), illegal=tuple(end["illegal"]), terminated=True)
    return list(TicTacToe().rewards(Task(id="t", data={}), episode))


def test_each_seat_reads_the_board_from_its_own_side() -> None:
    observations = [position["observation"] for position in positions(["[4]", "[0]", "[7]"])]
    assert observations == [lines(board) for board in ("012345678", "0123e5678", "0123E567i", "0123e56hI")]
    assert [position["player"] for position in positions(["[4]", "[0]", "[7]"])] == [0, 1, 0, 1]


def test_boards_that_are_alike_when_turned_or_mirrored_are_shown_as_one_and_moves_taken_back() -> None:
    task = Task(id="t", data={"seed": 0, "opening": []})
    boards = set()
    for cell in FREE_MARKS:
        environment = TicTacToe()
        game = environment.game(task)
        game.reset()
        after = game.step(f"[{cell}]")
        boards.add(after["observation"])
        free = next(name for name in after["observation"] if name in FREE_MARKS)
        game.step(f"I take [ {free} ].")
        board = [mark for row in environment.env.state.game_state["board"] for mark in row]
        assert (board.count("X"), board[int(cell)]) == (1, "O")
    assert len(boards) == 3


def test_a_game_begins_after_its_opening() -> None:
    start = positions([], opening=(4, 0, 1))[0]
    assert (start["player"], start["observation"]) == (1, lines("0123e56hI"))


def test_a_game_that_is_over_before_it_begins_is_refused() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="over before the first turn"):
        play(TicTacToe, ["[0]"], data={"seed": 0, "opening": [0, 1, 3, 2, 6]})


def test_rewards_are_shares_of_a_win() -> None:
    assert rewards([0, 1, 3, 2, 6]) == [1.0, 0.0]
    assert rewards([1, 0, 2, 3, 4, 6]) == [0.0, 1.0]
    assert rewards([0, 1, 2, 4, 3, 5, 7, 6, 8]) == [0.5, 0.5]


@pytest.mark.parametrize("move", ["4", "[9]", "[-1]", "", "[4", "[4]"])
def test_one_illegal_move_is_forgiven_and_the_next_costs_more_than_a_loss(move: str) -> None:
    after = positions(["[4]", move])[-1]
    assert (after["player"], after["legal"], after["observation"]) == (1, False, lines("0123e5678"))
    assert rewards_at(positions(["[4]", move, move])[-1]) == [1.0, TicTacToe.illegal_reward]


def test_training_games_start_within_a_game_and_held_out_ones_at_its_start() -> None:
    tasks = TicTacToe.tasks("train", seed=3)
    openings = [tasks[index].data["opening"] for index in range(200)]
    assert {len(opening) for opening in openings} == set(range(8))
    for opening in openings:
        assert positions([], opening=tuple(opening))[0]["player"] == len(opening) % 2
    assert len({tuple(opening) for opening in openings}) > 140
    held_out = TicTacToe.tasks("held_out", held_out=5)
    assert [task.data["opening"] for task in (held_out[index] for index in range(len(held_out)))] == [[]] * 5


def test_the_bot_plays_any_free_cell() -> None:
    moves = {random_player([agentrl.user(lines("Ab2D4f6h8"))], Random(seed)) for seed in range(100)}
    assert moves == {"[2]", "[4]", "[6]", "[8]"}


def test_a_row_is_three_of_ones_own() -> None:
    assert is_won([8, 1, 0, 4])
    assert not is_won([0, 1, 5, 6])


def test_a_move_is_one_token_that_ends_the_turn_and_a_line_another() -> None:
    chat = TemplateChatFormat.load(MODEL)
    for move in MOVES:
        assert len(chat.encode(move)) == 1
        assert chat.encode(move)[0] in chat.stop_token_ids
        assert chat.decode(chat.encode(move)) == move
    first, second = (chat.start([agentrl.user(lines(board))], []) for board in (FREE_MARKS, "0123E567i"))
    assert len(first) == len(second) == len(LINES) + 2
    assert not {*first, *second} & {chat.encode(move)[0] for move in MOVES}
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 3_000_000
