"""Tasksets of verifiers 0.4, of `tests/support/translated`, which the package plays."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl_formats.runners import Verifiers
from tests.support.preloaded_python import preloaded
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

PATH = Path(__file__).parents[1] / "support" / "translated"
PYTHON = "verifiers/bin/python"
IMPORTED = ("verifiers.v1", "verifiers.v1.envs.single_agent", "verifiers.v1.clients", "verifiers.v1.utils.loaders")


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    python = preloaded(Path(os.environ["AGENTRL_FORMATS"]) / PYTHON, *IMPORTED)
    options = {"taskset": input["taskset"], "config": input.get("config", {}), "path": [str(PATH)]}
    task = Verifiers.tasks("train", python=python, held_out=0.0, **options)[0]  # type: ignore[index]
    played = play(Verifiers, input.get("replies", ["0"]), data=dict(task.data), episode_timeout_s=400.0)
    return seen(played), dict(played.header.trajectories[0].named_rewards)


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the rewards."""
    with mock.patch.object(Verifiers, "reward", return_value={"other": 0.0}):
        yield


def row(name: str, taskset: str, sees: Any = None, grader: Any = None, refused: str = "", **input: Any) -> Row:
    return Row(name=name, input={"taskset": taskset, **input}, sees=sees, grader=grader, refused=refused, needs=PYTHON)


SAY = ["user", "Say 0"]
SYSTEM = {"taskset": {"manner": "Be brief."}}
CALL = '<tool_call>{"name": "notes_toolset_secret", "arguments": {"number": 5}}</tool_call>'
ROWS = [
    row("right", "plain", [SAY], {"right": 0.5}),
    row("wrong", "plain", [SAY], {"right": 0.0}, replies=["1"]),
    row("a system prompt", "plain", [["system", "Be brief."], SAY], {"right": 0.5}, config=SYSTEM),
    row("drawn anew", "plain", refused="differs from the one that was listed", config={"taskset": {"shuffled": True}}),
    row(
        "a tool server",
        "noted",
        [["user", "What is the word?"], ["tool", "amber5"]],
        {"told": 1.0},
        replies=[CALL, "amber5"],
    ),
    row("a harness of its own", "own-harness", [["user", "Say 0, loudly"]], {"right": 0.5}),
    row("an environment of its own", "own-env", refused="an environment of its own (TwoAgentsEnv) is not supported"),
    row("an environment by id", "plain", refused="an environment of its own (BestOfN", config={"id": "best-of-n"}),
]
