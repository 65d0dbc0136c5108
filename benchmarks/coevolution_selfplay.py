"""Self-play: what a policy that learned TicTacToe from nobody but itself gets against its first version, and against
random moves."""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import agentrl
from benchmarks.report import completed

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "06_self_play.py"))
"""The same configuration, for longer."""
STEPS = 120
GAMES = 512
OPPONENTS = {
    "selfplay_vs_first": {"kind": "frozen"},
    "selfplay_vs_random": {"kind": "bot", "id": "agentrl.environments.tictactoe:random_player"},
}


def figures(quick: bool) -> dict[str, float | None]:
    """Shares of 512 games that the last version wins, draws by half, half of them on either side; null where quick."""
    with TemporaryDirectory() as directory:
        run = trained(Path(directory), steps=2 if quick else STEPS)
        if quick:
            return dict.fromkeys(OPPONENTS)
        return {name: EXAMPLE["score"](opponent, run.policies["player"], GAMES) for name, opponent in OPPONENTS.items()}


def trained(directory: Path, *, steps: int) -> agentrl.Run:
    """The run, with how long it took."""
    config = EXAMPLE["CONFIG"].model_dump()
    settings: dict[str, Any] = {"directory": str(directory), "steps": steps}
    started = time.perf_counter()
    run = completed(agentrl.train(agentrl.RunConfig(**{**config, **settings}), quiet=True))
    print(f"  {steps} steps in {time.perf_counter() - started:.0f} s", flush=True)
    return run
