from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import pytest

from agentrl.core.records import Message, PolicyVersion, Task, Turn, VersionSpan
from agentrl.core.tokens import Completion
from agentrl.environment.tools import ToolEpisode
from agentrl.environments.calculator import Calculator
from agentrl.environments.calculator.demonstrations import demonstrate

if TYPE_CHECKING:
    from collections.abc import Sequence

from random import Random


def episode(*texts: str) -> ToolEpisode:
    spans = (VersionSpan(0, 1, PolicyVersion("policy", 0, 0)),)
    completion = Completion(
        token_ids=np.zeros(1, np.int32), logprobs=np.zeros(1, np.float32), finish_reason="stop", spans=spans
    )
    turns = [Turn(text=t, message=Message(role="assistant", content=t), completion=completion) for t in texts]
    return ToolEpisode(turns=turns, messages=[turn.message for turn in turns], truncated=False)


def value_of(question: str) -> int:
    match = re.search(r": (\d+(?: [+-] \d+)+) =$", question)
    assert match is not None
    terms = re.findall(r"([+-]?) ?(\d+)", match[1])
    return sum(int(number) * (-1 if sign == "-" else 1) for sign, number in terms)


@pytest.mark.parametrize(
    ("answer", "reward"), [("5", 1.0), (" 5\n", 1.0), ("-5", 0.0), ("5.0", 0.0), ("", 0.0), ("55", 0.0)]
)
def test_reward_is_exact_match(answer: str, reward: float) -> None:
    task = Task(id="t", data={"question": "2 + 3 =", "answer": "5"})
    assert Calculator().reward(task, episode(answer)) == reward


def test_an_episode_without_answer_has_no_reward() -> None:
    assert Calculator().reward(Task(id="t", data={"answer": ""}), episode("7")) == 0.0
    assert Calculator().reward(Task(id="t", data={"answer": "5"}), episode()) == 0.0


def test_the_calculator_does_one_operation() -> None:
    calculator = Calculator()
    assert [calculator.calculate(2, "+", -3), calculator.calculate(2, "-", 3), calculator.calculate(4, "*", 3)] == [
        -1,
        -1,
        12,
    ]


def test_held_out_questions_are_distinct_and_the_same_for_every_seed() -> None:
    tasks = Calculator.tasks("held_out", seed=1)
    questions = [tasks[index].data["question"] for index in range(len(tasks))]
    assert len(questions) == len(set(questions)) == 512
    assert tasks[0] == Calculator.tasks("held_out", seed=2)[0]
    assert len({tasks[index].id for index in range(len(tasks))}) == 512


def test_training_questions_are_never_held_out() -> None:
    held_out = Calculator.tasks("held_out")
    hidden = {held_out[index].data["question"] for index in range(len(held_out))}
    training = Calculator.tasks("train", seed=0)
    questions = [training[index].data["question"] for index in range(3000)]
    assert hidden.isdisjoint(questions)
    assert len(set(questions)) > 2000
    with pytest.raises(IndexError):
        training[-1]


def test_training_tasks_depend_on_seed_and_index_alone() -> None:
    assert Calculator.tasks("train", seed=3)[70] == Calculator.tasks("train", seed=3)[70]
    assert Calculator.tasks("train", seed=3)[70] != Calculator.tasks("train", seed=4)[70]


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_answers_are_right(split: str) -> None:
    tasks = Calculator.tasks(split)  # type: ignore[arg-type]
    for index in range(200):
        data = tasks[index].data
        assert int(data["answer"]) == value_of(data["question"])


def right_share(questions: Sequence[tuple[str, str]]) -> float:
    return sum(
        demonstrate(question, Random(n)).replies[-1] == answer for n, (question, answer) in enumerate(questions)
    ) / len(questions)


def test_well_under_sixty_percent_of_the_demonstrations_succeed() -> None:
    tasks = Calculator.tasks("train")
    share = right_share([(tasks[n].data["question"], tasks[n].data["answer"]) for n in range(2000)])
    assert 0.3 < share < 0.55
