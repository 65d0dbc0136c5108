"""One policy plays both sides of TicTacToe, against itself and against what it was: two minutes on two CPU cores.

python 06_self_play.py        (needs the extra `games`; the file needs no other)

The game is TextArena's. The policy starts out knowing the rules and playing by chance, and is never shown a good move.
Half of the games are self-play, in which it learns from either side; in the others what it started from holds a seat,
or one of its past versions, drawn for each group of games. The eight games of a group start from one position, a few
random moves into the game, and their results are compared seat by seat.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import agentrl
from agentrl.observe.plot import curve

STEPS, EVERY = 60, 15
"""In all, and between two versions that join the past ones."""
LINE_UPS = (
    ("player", "player"),
    ("player", "past"),
    ("player", "player"),
    ("past", "player"),
    ("player", "player"),
    ("player", "start"),
    ("player", "player"),
    ("start", "player"),
)
"""Who holds the seats `first` and `second`, group by group."""
PLAYER = {"learning_rate": 2e-3, "step_size": 128}
OPPONENTS: dict[str, dict[str, Any]] = {
    "the version it started from": {"kind": "frozen"},
    "random moves": {"kind": "bot", "id": "environments.tictactoe:random_player"},
}
SETTINGS: dict[str, Any] = {
    "environment": {"id": "environments.tictactoe:TicTacToe"},
    "model": {"path": "environments.tictactoe:model"},
    "sampling": {"max_tokens": 1, "max_turns": 12},
    "engine": {"slots": 256, "max_context": 24},
}
CONFIG = agentrl.RunConfig(
    **SETTINGS,
    name="self_play",
    steps=STEPS,
    policies={
        "player": PLAYER,
        "past": {"kind": "past", "of": "player", "every": EVERY, "size": 3},
        "start": {"kind": "frozen"},
    },
    seats={"first": [first for first, _ in LINE_UPS], "second": [second for _, second in LINE_UPS]},
    trainer={
        "kind": "in_process",
        "entropy_bonus": 0.01,
        "tokens_per_unit": 4,
        "optimizer": {"final_learning_rate_share": 0.2},
    },
    evaluation={"tasks": 0},
    checkpoint={
        "every": 0,
        "versions": 0,
    },  # one at the end only: a demonstration; all versions stay, to be played against
)


def score(opponent: dict[str, Any], weights: Path, games: int) -> float:
    """Share of games against an opponent that the player wins from the empty board, a draw by half; half of them on
    either side."""
    config = agentrl.RunConfig(
        **SETTINGS,
        policies={"player": PLAYER, "opponent": opponent},
        seats={"first": ["player", "opponent"], "second": ["opponent", "player"]},
        evaluation={"tasks": games},
    )
    return agentrl.evaluate(config, {"player": weights})["evaluation/reward/player"]


def main() -> None:
    """Let the player learn; then match its versions with the first of them, and with chance."""
    run = agentrl.train(CONFIG)
    subprocess.run([sys.executable, "-m", "agentrl.cli", "run", "winrates", run.path], check=True)
    steps = range(0, STEPS + 1, EVERY)
    for name, opponent in OPPONENTS.items():
        scores = [score(opponent, run.path / "versions" / "player" / f"0.{step}", games=256) for step in steps]
        print(curve(scores, steps=steps, title=f"games won against {name}, draws by half", height=6))


if __name__ == "__main__":
    main()
