"""Self-play: one policy plays both sides of TextArena's TicTacToe, against itself and its past versions.

python 06_self_play.py        (two minutes on two CPU cores; needs the extra `games` and no other file)

The policy starts with random legal moves and is never shown a good move. In half of the games it plays both sides and
learns from both. In the others its first version, or a past version drawn per group, holds one seat. The eight games of
a group start from one position, a few random moves into the game, and their results are compared seat by seat.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import agentrl
from agentrl.observe.run_screen import plot_curve

STEPS, EVERY = 60, 15
"""Optimizer steps in all, and between two versions that join the pool of past versions."""
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
"""The policies in the seats `first` and `second`, group by group."""
PLAYER = {"learning_rate": 2e-3, "step_size": 128}
OPPONENTS: dict[str, dict[str, Any]] = {
    "the version it started from": {"kind": "frozen"},
    "random moves": {"kind": "bot", "id": "agentrl.environments.tictactoe:random_player"},
}
SETTINGS: dict[str, Any] = {
    "environment": {"id": "agentrl.environments.tictactoe:TicTacToe"},
    "model": {"path": "agentrl.environments:tictactoe/model"},
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
        "entropy_bonus": 0.01,
        "loss": {"normalizer": 4},
        "micro_batch_tokens": 8192,
        "optimizer": {"final_learning_rate_share": 0.2},
    },
    evaluation={"tasks": 0},
    checkpoint={
        "every": 0,
        "versions": 0,
    },  # only one checkpoint, at the end; all versions are kept as opponents
)


def score(opponent: dict[str, Any], weights: Path, games: int) -> float:
    """Return the player's score from the empty board, counting draws as half; it plays half of the games on each
    side."""
    config = agentrl.RunConfig(
        **SETTINGS,
        policies={"player": PLAYER, "opponent": opponent},
        seats={"first": ["player", "opponent"], "second": ["opponent", "player"]},
        evaluation={"tasks": games},
    )
    return agentrl.evaluate(config, {"player": weights})["evaluation/reward/player"]


def main() -> None:
    """Train the player, then play its versions against the first one and against random moves."""
    run = agentrl.train(CONFIG, resume="--resume" in sys.argv)
    if run.interrupted:
        raise SystemExit("stopped before its last step; --resume continues the run")
    subprocess.run([sys.executable, "-m", "agentrl.cli", "run", "winrates", run.path], check=True)
    steps = range(0, STEPS + 1, EVERY)
    for name, opponent in OPPONENTS.items():
        scores = [score(opponent, run.path / "versions" / "player" / f"0.{step}", games=256) for step in steps]
        print(plot_curve(scores, steps=steps, title=f"games won against {name}, draws by half", height=6))


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
