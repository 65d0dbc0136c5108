"""Tasks of Inspect (inspect-ai 0.3.285), of `tests/support/translated/inspect_tasks.py`, whose package plays them.

Each row runs with a stand-in for the package, and those with `needs` with the package.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from agentrl_formats.runners import Inspect
from tests.support.preloaded_python import preloaded
from tests.translations.rows import Row, seen
from tests.unit.episodes import play

SUPPORT = Path(__file__).parents[1] / "support"
PYTHON = "inspect/bin/python"
IMPORTED = ("inspect_ai.scorer", "inspect_ai.model._providers.openai", "openai.resources.chat", "uvicorn", "acp")


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    """List the tasks, and play the chosen one; the grader's rewards show what reached it."""
    path = [str(SUPPORT / "translated")]
    if input["package"]:
        python = preloaded(Path(os.environ["AGENTRL_FORMATS"]) / PYTHON, *IMPORTED)
    else:
        path, python = [*path, str(SUPPORT / "inspect_standin")], sys.executable
    options = {"taskset": f"inspect_tasks:{input['task']}", "config": input.get("config", {})}
    tasks = list(Inspect.tasks("train", python=python, path=path, held_out=0.0, **options))  # type: ignore[call-overload]
    if "listed" in input:
        return len({task.id for task in tasks}), None
    [task] = [task for task in tasks if task.id == input["id"]] if "id" in input else tasks[:1]
    if "said" in input:  # the same task in two processes, each of which loads the data anew
        first, second = (seen(play(Inspect, ["0"], data=dict(task.data), episode_timeout_s=400.0)) for _ in range(2))
        return first == second, None
    played = play(Inspect, input.get("replies", ["0"]), data=dict(task.data), episode_timeout_s=400.0)
    return seen(played), dict(played.header.trajectories[0].named_rewards)


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose the rewards of all scorers but the first."""
    read = Inspect.reward

    def first(self: Inspect, *arguments: Any) -> Any:
        return dict(list(read(self, *arguments).items())[:1])

    with mock.patch.object(Inspect, "reward", first):
        yield


SAY = [["user", "Say 0"]]


QUICK = ("three epochs, wrong", "shuffled anew", "ids by position after a shuffle", "equal ids", "no scorer")
QUICK += ("odd names of scorers", "a list", "epochs with pass_at_2")
"""Rows that run without the package in `make test`."""


def row(name: str, task: str, sees: Any = SAY, grader: Any = None, refused: str = "", **input: Any) -> list[Row]:
    standin = Row(
        name=name,
        input={"task": task, "package": False, **input},
        sees=None if refused else sees,
        grader=grader,
        refused=refused,
    )
    standin = replace(standin, exhaustive=name not in QUICK)
    package = replace(standin, name=f"{name}, by the package", input={**standin.input, "package": True}, needs=PYTHON)
    return [standin, package]


def stated(name: str, value: Any, reward: float | None = None, refused: str = "") -> list[Row]:
    grader = None if refused else {"stated": reward}
    return row(name, "states", grader=grader, refused=refused, config={"value": value})


ROWS = [
    *row("right", "one", grader={"match": 1.0}),
    *row("wrong", "one", grader={"match": 0.0}, replies=["9"]),
    *row("three epochs", "epochs", grader={"match": 1.0}),
    *row("three epochs, wrong", "epochs", grader={"match": 0.0}, replies=["9"]),
    *row("epochs with pass_at_2", "epochs", grader={"match": 1.0}, config={"number": 2, "reducer": "pass_at_2"}),
    *row("epochs as a number", "epochs_as_number", grader={"match": 1.0}),
    *row("shuffled anew", "shuffled", True, said=True),
    *row("shuffled with a seed", "shuffled", True, said=True, config={"seed": 7}),
    *row("all of a shuffled set", "shuffled", 50, listed=True),
    *row("ids by position after a shuffle", "shuffled_after_ids", refused="differs from the one that was listed"),
    *row("drawn anew", "drawn", refused="differs from the one that was listed"),
    *row("equal samples", "equal", 3, listed=True),
    *row("equal ids", "twins", refused="two tasks have the id 'a'"),
    *(
        each
        for id in ("a*", "ab", "a?", "one:b", "1", "01")
        for each in row(f"id {id}", "patterns", [["user", f"Say {id}"]], {"match": 1.0}, id=id, replies=["1"])
    ),
    *row("no scorer", "unscored", refused="the Inspect task unscored has no scorer"),
    *row("no score", "states", refused="no scorer gave a score", config={"value": "none"}),
    *stated("unscored", "unscored", refused="the scorer stated left the sample unscored: invalid_response_format"),
    *row("odd names of scorers", "two_scorers", grader={"_5_shot": 1.0, "precision": 0.5}),
    *row(
        "names of other letters", "two_scorers", grader={"_": 1.0, "a_b": 0.5}, config={"first": "得", "second": "a-b"}
    ),
    *row(
        "names that become equal",
        "two_scorers",
        refused="the names of rewards are equal in letters and digits",
        config={"first": "a b", "second": "a-b"},
    ),
    *row("messages", "messages", [["system", "Be brief."], *SAY], {"match": 1.0}),
    *row("messages without ids", "messages_without_ids", [["system", "Be brief."], *SAY], {"match": 1.0}),
    *stated("a number", 0.25, 0.25),
    *stated("correct", "C", 1.0),
    *stated("partial", "P", 0.5),
    *stated("no answer", "N", 0.0),
    *stated("a number as text", "0.5", 0.5),
    *stated("no", "no", 0.0),
    *row("named parts", "states", grader={"stated_a": 1.0, "stated_b": 0.5}, config={"value": {"a": "C", "b": 0.5}}),
    *stated("a list", [1.0, 0.0], refused="the score stated is [1.0, 0.0], which is no number"),
    *stated("a list of zeros", [0.0], refused="the score stated is [0.0], which is no number"),
    *(
        replace(each, refused="validation errors for Score") if each.needs else each  # Inspect's own refusal
        for each in stated("a list as a part", {"a": [1.0]}, refused="which is no number")
    ),
    *stated("a word", "excellent", refused="the score stated is 'excellent', which is no number"),
]
