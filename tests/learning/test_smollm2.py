"""examples/07_smollm2.toml: its environment, and a step of a pretrained model.

The model is made by `make smollm2`; without it the tests that need it are skipped by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.environment.registry import resolve
from agentrl.testing import play

MODEL = "models/SmolLM2-135M-Instruct"


def test_the_calculator_answers_a_call_and_the_answer_is_rewarded(repository: Path) -> None:
    problems = resolve(str(repository / "examples/07_smollm2.py:WordProblems"))
    task = agentrl.Task(id="one", data={"question": "What is 101 times 11?", "answer": "1111"})
    assert play(problems, task, ["calculate(101 * 11)", "1111"]).reward == 1.0
    assert play(problems, task, ["calculate(101 + 11)", "112"]).reward == 0.0
    assert play(problems, task, ["calculate(101 * eleven)"]).reward == 0.0, "no call, so an answer, and a wrong one"
    assert play(problems, task, ["1111"]).reward == 1.0


def test_no_problem_is_in_both_splits(repository: Path) -> None:
    problems = resolve(str(repository / "examples/07_smollm2.py:WordProblems"))
    trained, held_out = ({task.data["question"] for task in problems.tasks(split)} for split in ("train", "held_out"))
    assert len(trained) > 2000
    assert not trained & held_out


@pytest.mark.learning
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_takes_a_step(repository: Path, tmp_path: Path) -> None:
    if not (repository / MODEL).is_dir():
        pytest.skip(f"{MODEL} is not there: make smollm2")
    overrides = [f"--directory={tmp_path}", "--steps=2", "--evaluation.tasks=32"]
    run = agentrl.train(load(repository / "examples/07_smollm2.toml", overrides), quiet=True)
    assert 0.0 < run.summary["reward_start"] < 0.6
