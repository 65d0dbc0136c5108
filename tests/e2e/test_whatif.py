"""`agentrl run whatif` on a trained run, with the real model."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import ToolEntry
from tests.support import warm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS = [
    "--name=shop",
    "--steps=2",
    "--evaluation.tasks=24",
    "--policies.solver.step_size=16",
    "--policies.solver.lora.rank=4",
]
SAME = """\
from agentrl.environments.calculator import Calculator as Recorded


class Calculator(Recorded):
    pass
"""
OFF_BY_ONE = """\
from typing import Literal

import agentrl
from agentrl.environments.calculator import Calculator as Recorded


class OffByOne(Recorded):
    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        \"\"\"One operation on two integers.\"\"\"
        return super().calculate(a, op, b) + (1 if op == "-" else 0)
"""


def answer(directory: Path, *options: str) -> Any:
    told = warm.command(directory, "run", "whatif", "shop", *options, "--json")
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def subtracting(run: Path, episodes: set[str]) -> set[str]:
    """The episodes whose calculator subtracted."""
    with contextlib.closing(RunReader(run)) as reader:
        calls = {
            name: [body for _, body in reader.episode(name).entries if isinstance(body, ToolEntry)] for name in episodes
        }
    return {
        name
        for name, of_episode in calls.items()
        if any(call.outcome == "ok" and call.arguments["op"] == "-" for call in of_episode)
    }


def test_a_changed_tool_is_judged_on_the_recorded_evaluation(repository: Path, tmp_path: Path) -> None:
    example = str(repository / "examples/01_tool_use.toml")
    trained = warm.command(tmp_path, "train", example, *SETTINGS)
    assert trained.returncode == 0, trained.stderr
    (tmp_path / "same.py").write_text(SAME, encoding="utf-8")
    (tmp_path / "new.py").write_text(OFF_BY_ONE, encoding="utf-8")

    same = answer(tmp_path, "--environment=same.py:Calculator")
    assert {episode["outcome"] for episode in same["episodes"]} == {"identical"}
    assert (len(same["episodes"]), same["sampled"]) == (24, 0)

    changed = answer(tmp_path, "--environment.id=new.py:OffByOne")
    by_outcome: dict[str, set[str]] = {}
    for episode in changed["episodes"]:
        by_outcome.setdefault(episode["outcome"], set()).add(episode["episode"])
    assert by_outcome.keys() == {"identical", "resampled"}
    assert by_outcome["resampled"] == subtracting(
        tmp_path / "runs" / "shop", {*by_outcome["identical"], *by_outcome["resampled"]}
    )
    assert 0 < changed["sampled"] < sum(episode["tokens"] for episode in changed["episodes"])

    page = warm.command(tmp_path, "run", "whatif", "shop", "--environment=new.py:OffByOne", "--where=turns > 1")
    assert page.returncode == 0, page.stderr
    assert "sampled from the first difference on" in page.stdout
    unnamed = warm.command(tmp_path, "run", "whatif", "shop")
    assert unnamed.returncode == 2
    assert "--environment path/to/new.py:Class" in unnamed.stderr
    ledger = warm.command(tmp_path, "run", "ledger", "shop")
    assert ledger.returncode == 0, "the run itself is as it was"
