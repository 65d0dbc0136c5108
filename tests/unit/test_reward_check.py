"""`env check` attacks the reward: replies that should not win, and answers that should."""

from __future__ import annotations

import re
from random import Random
from typing import ClassVar

import pytest

import agentrl
from agentrl import check_environment

EASY, NO_WIN = " of 8 tasks: the reply", "earn no more than an empty reply"


class Doubling(agentrl.ToolEnvironment):
    """Doubles of numbers, with a calculator; subclasses say what wins."""

    key: ClassVar[str] = "answer"

    @agentrl.tool
    def add(self, a: int, b: int) -> int:
        """Add two integers."""
        return a + b

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(self.wins(episode.answer, str(task.data[self.key])))

    def wins(self, reply: str, answer: str) -> bool:
        return reply.strip() == answer

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [
            agentrl.Task(id=f"{n}", data={"question": f"Double {n}. Say only the number.", cls.key: str(2 * n)})
            for n in numbers
        ]


class Substring(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return answer in reply


class AnyNumber(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return answer in re.findall(r"\d+", reply)


class AnyBoxed(Doubling):
    key = "ground_truth"

    def wins(self, reply: str, answer: str) -> bool:
        boxed = re.search(r"\\boxed\{(.*)\}", reply)
        return boxed is not None and answer in boxed[1].split()


class AnyTask(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return reply.strip() in {str(2 * n) for n in range(30)}


class BackDoor(Doubling):
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == task.data["answer"] or episode.answer == "xyzzy")


class TrailingSpace(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return reply.strip() == answer + " "


class OtherType(Doubling):
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == int(task.data["answer"]))


class LastNumber(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return re.findall(r"\d+", reply)[-1:] == [answer]


class Boxed(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return re.findall(r"\\boxed\{(.*?)\}", reply) == [answer]


class Near(Doubling):
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        try:
            return 1.0 / (1.0 + abs(float(episode.answer) - float(task.data["answer"])))
        except ValueError:
            return 0.0


class Submitted(Doubling):
    submitted: str | None = None

    @agentrl.tool
    def submit(self, answer: str) -> str:
        """Submit the answer."""
        self.submitted = answer
        return "received"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(self.submitted == task.data["answer"])


class OwnForm(Doubling):
    """Its right replies have a form that nothing outside knows, so it demonstrates them."""

    def wins(self, reply: str, answer: str) -> bool:
        return reply == f"<<{answer}>>"

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random) -> list[str]:
        return [f"<<{task.data['answer']}>>"]


class FewAnswers(Doubling):
    """Yes or no: half of the tasks have each answer, so no reply wins tasks with four different ones."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [
            agentrl.Task(id=f"{n}", data={"question": f"Is {n} odd?", "answer": ("no", "yes")[n % 2]}) for n in numbers
        ]


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        (Substring, EASY),
        (AnyNumber, EASY),
        (AnyBoxed, EASY),
        (AnyTask, EASY),
        (BackDoor, EASY),
        (TrailingSpace, NO_WIN),
        (OtherType, NO_WIN),
    ],
)
def test_planted(environment: type[agentrl.Environment], text: str) -> None:
    assert text in check_environment(environment).text


@pytest.mark.parametrize("environment", [Doubling, LastNumber, Boxed, Near, Submitted, OwnForm, FewAnswers])
def test_sound(environment: type[agentrl.Environment]) -> None:
    report = check_environment(environment)
    assert report.passed, report.text
    assert EASY not in report.text
    assert NO_WIN not in report.text
