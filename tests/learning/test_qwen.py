"""examples/16_qwen.toml: its environment, and a step of an instruction-tuned model that writes calls as bare JSON.

The model is made by `make qwen`; without it the test that needs it is skipped by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.environment.registry import resolve
from agentrl.testing import play

MODEL = "models/Qwen2.5-Coder-0.5B-Instruct"
TASK = agentrl.Task(
    id="one", data={"question": "Of 401 letters, 90 were delivered. How many were not?", "answer": "311"}
)


@pytest.mark.parametrize(
    ("replies", "reward"),
    [
        ([("-", 90), "The answer is 311."], 1.0),
        ([("-", 90), "311"], 1.0),
        ([("-", 90), "They are many."], 0.5),
        ([("+", 90), "The answer is 491."], 0.0),
        ([("+", 90), "The answer is 311."], 0.0),
        (["The answer is 311."], 0.0),
    ],
)
def test_the_call_and_the_statement_earn_a_half_each(
    replies: list[tuple[str, int] | str], reward: float, repository: Path
) -> None:
    calls = [
        reply
        if isinstance(reply, str)
        else {"name": "calculate", "arguments": {"a": 401, "op": reply[0], "b": reply[1]}}
        for reply in replies
    ]
    assert play(str(repository / "examples/16_qwen.py:OneOperation"), TASK, calls).reward == reward


def test_the_prompt_shows_calls_in_the_form_that_the_run_reads(repository: Path) -> None:
    config = load(repository / "examples/16_qwen.toml")
    environment = resolve(str(config.environment.id))
    from agentrl.core.reply_formats import REPLY_FORMATS

    shown = [message.content for message in environment().prompt(TASK) if message.role == "assistant"]  # type: ignore[attr-defined]
    read = [REPLY_FORMATS[config.model.reply_format].parse(text)[1] for text in shown]
    results = [call.arguments for calls in read for call in calls]
    assert results == [{"a": 24, "op": "*", "b": 31}, {"a": 530, "op": "-", "b": 87}]
    assert (24 * 31, 530 - 87) == (744, 443)
    assert [text for text, calls in zip(shown, read, strict=True) if not calls] == [
        "The answer is 744.",
        "The answer is 443.",
    ]


@pytest.mark.learning
@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_qwen_takes_a_step(repository: Path, tmp_path: Path) -> None:
    if not (repository / MODEL).is_dir():
        pytest.skip(f"{MODEL} is not there: make qwen")
    overrides = [f"--directory={tmp_path}", "--steps=1", "--evaluation.tasks=8"]
    run = agentrl.train(load(repository / "examples/16_qwen.toml", overrides), quiet=True)
    assert 0.0 < run.summary["reward_start"] < 1.0
    assert run.metrics[0].get("advantage/zero_share") != 1.0, "some group has a signal"
