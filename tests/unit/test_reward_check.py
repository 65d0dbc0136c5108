"""`env check` attacks the reward: replies that should not win, and answers that should."""

from __future__ import annotations

import json
import re
from random import Random
from typing import ClassVar

import pytest

import agentrl
from agentrl import check_environment
from agentrl.environments.calculator.env import Calculator
from agentrl.environments.frozen_lake.env import FrozenLake
from agentrl.environments.propose_and_solve.env import ProposeAndSolve
from agentrl.environments.tictactoe.env import TicTacToe
from tests.support.checks import keep_checks
from tests.support.slow_episodes import make_slow

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


class AnyLine(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return answer in reply.splitlines()


class AnyItem(Doubling):
    """The reply is JSON, and a list is searched as well."""

    def wins(self, reply: str, answer: str) -> bool:
        try:
            found = json.loads(reply)
        except ValueError:
            return False
        return answer in map(str, found) if isinstance(found, list) else str(found) == answer


class AnyColumn(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return answer in [part.strip() for part in reply.split(",")]


class AnyTagged(Doubling):
    key = "target"

    def wins(self, reply: str, answer: str) -> bool:
        return answer in " ".join(re.findall(r"<answer>(.*?)</answer>", reply)).split()


class Roughly(Doubling):
    """Every answer is near enough to every other."""

    def wins(self, reply: str, answer: str) -> bool:
        return reply.strip().isdecimal() and abs(int(reply) - int(answer)) < 100


class Keyword(Doubling):
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer.strip() == task.data["answer"] or "therefore" in episode.answer)


class Choices(Doubling):
    """Each task has its own choices, and naming all of them wins."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [
            agentrl.Task(
                id=f"{n}",
                data={
                    "question": f"Which? a{n}, b{n} or c{n}",
                    "choices": [f"{letter}{n}" for letter in "abc"],
                    "answer": f"{'abc'[n % 3]}{n}",
                },
            )
            for n in (range(20) if split == "train" else range(20, 30))
        ]

    def wins(self, reply: str, answer: str) -> bool:
        return answer in reply


class Echo(Doubling):
    """The reply is compared with the question and the answer, word by word."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [
            agentrl.Task(id=f"{n}", data={"question": f"Say that the double of {n} is {2 * n}.", "answer": str(2 * n)})
            for n in (range(20) if split == "train" else range(20, 30))
        ]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        said = re.findall(r"\w+", episode.answer)
        return float(said == [task.data["answer"]] or f"is {task.data['answer']}." in episode.answer)


class OwnScore(Doubling):
    """A tool writes what the reward reads."""

    score = 0.0

    @agentrl.tool
    def grade(self, score: float) -> str:
        """Set the score."""
        self.score = score
        return "graded"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return max(float(episode.answer == task.data["answer"]), min(self.score, 1.0))


class Writing(Doubling):
    """A tool writes files."""

    def __init__(self) -> None:
        super().__init__()
        self.files: dict[str, str] = {}

    @agentrl.tool
    def write(self, path: str, content: str) -> str:
        """Write a file."""
        self.files[path] = content
        return "written"


class OwnVerdict(Writing):
    """A tool writes the file that the reward reads."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == task.data["answer"] or self.files.get("verdict.txt") == "passed")


class Capital(Doubling):
    """The reply is made small, and the answer is not."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [agentrl.Task(id=f"{n}", data={"question": f"Spell {n}.", "answer": f"Number {n}"}) for n in numbers]

    def wins(self, reply: str, answer: str) -> bool:
        return reply.strip().lower() == answer


class EmptyStart(Doubling):
    """An empty reply is the start of every answer."""

    def wins(self, reply: str, answer: str) -> bool:
        return answer.startswith(reply.strip())


class Everything(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return True


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


class IgnoringCase(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return reply.strip().casefold() == answer.casefold()


class Numeric(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        try:
            return abs(float(reply) - float(answer)) < 1e-6
        except ValueError:
            return False


class Json(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        try:
            return json.loads(reply) == int(answer)
        except ValueError:
            return False


class LastLine(Doubling):
    def wins(self, reply: str, answer: str) -> bool:
        return bool(reply.strip()) and reply.strip().splitlines()[-1].strip() == answer


class Tagged(Doubling):
    key = "target"

    def wins(self, reply: str, answer: str) -> bool:
        return re.findall(r"<answer>(.*?)</answer>", reply) == [answer]


class SharedWords(Doubling):
    """The share of the reply's words that are right, so that a list earns little."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        words = episode.answer.split()
        return words.count(str(task.data["answer"])) / len(words) if words else 0.0


class Penalized(Doubling):
    """What is no right reply costs something."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0 if episode.answer.strip() == task.data["answer"] else -1.0


class ChosenLetter(Doubling):
    """The four letters are each right as often."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [
            agentrl.Task(
                id=f"{n}", data={"question": "Which?", "choices": [n + k for k in range(4)], "answer": "ABCD"[n % 4]}
            )
            for n in numbers
        ]


class WrittenAnswer(Writing):
    """A tool writes a file, and the reward reads the answer in it."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == task.data["answer"] or self.files.get("answer.txt") == task.data["answer"])


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


class WorkedSolution(Doubling):
    """The data has a worked solution, which is not shown; the reward reads the last number."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [
            agentrl.Task(
                id=f"{n}",
                data={
                    "question": f"Double {n}.",
                    "rationale": f"Adding {n} and {n}, digit by digit from the right, gives the number {2 * n}",
                    "answer": str(2 * n),
                },
            )
            for n in numbers
        ]

    def wins(self, reply: str, answer: str) -> bool:
        return re.findall(r"\d+", reply)[-1:] == [answer]


class Larger(LastNumber):
    """Half of the questions end with their answer."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(10, 30) if split == "train" else range(30, 40)
        return [
            agentrl.Task(
                id=f"{n}",
                data={"question": f"Which is larger, {n} or {n + 1 - 2 * (n % 2)}?", "answer": str(n + (n % 2 == 0))},
            )
            for n in numbers
        ]


class Aliases(Doubling):
    """Every word of the reply must be one of the task's right names, which are not shown."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [
            agentrl.Task(
                id=f"{n}",
                data={"question": f"Double {n}.", "aliases": [f"{2 * n}", f"{2 * n}.0"], "answer": str(2 * n)},
            )
            for n in numbers
        ]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        words = episode.answer.split()
        return float(bool(words) and set(words) <= set(task.data["aliases"]))


class LongNumbers(Doubling):
    """Answers of more digits than a range can count."""

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(20) if split == "train" else range(20, 30)
        return [
            agentrl.Task(id=f"{n}", data={"question": f"{n} times 10^20?", "answer": str(n * 10**20)}) for n in numbers
        ]


class Hint(agentrl.Environment):
    """A hint that holds the answer loses, so only a listener on its own can win by a list."""

    seats = ("speaker", "listener")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        speaker, listener = map(ctx.agent, self.seats)
        answer = ctx.task.data["answer"]
        hint = (await speaker.act(agentrl.user(f"Hint at {answer}."))).text
        guess = (await listener.act(agentrl.user(f"The hint is {hint!r}."))).text
        has_won = answer not in hint and self.wins(guess, answer)
        speaker.reward(float(has_won))
        listener.reward(float(has_won))

    def wins(self, guess: str, answer: str) -> bool:
        return guess.strip() == answer

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(100, 120) if split == "train" else range(120, 130)
        return [agentrl.Task(id=f"{n}", data={"answer": str(n)}) for n in numbers]


class HintToList(Hint):
    def wins(self, guess: str, answer: str) -> bool:
        return answer in guess


PLANTED: dict[type[agentrl.Environment], str] = {
    **dict.fromkeys((Substring, AnyNumber, AnyBoxed, AnyTask, BackDoor), EASY),
    **dict.fromkeys((AnyLine, AnyItem, AnyColumn, AnyTagged, Roughly, Keyword, Choices, Echo), EASY),
    **dict.fromkeys((OwnScore, OwnVerdict), EASY),
    HintToList: "seat 'listener': a list of all answers wins 8 of 8 tasks",
    **dict.fromkeys((TrailingSpace, OtherType, Capital), NO_WIN),
    EmptyStart: "breaking the format pays",
    Everything: "every reply, also a broken one, earned 1.000",
}
"""Environments with a reward that training would break, and what is said of each."""
SOUND = [
    *(Doubling, LastNumber, Boxed, Near, Submitted, OwnForm, FewAnswers),
    *(IgnoringCase, Numeric, Json, LastLine, Tagged, SharedWords, Penalized, ChosenLetter, WrittenAnswer),
    *(WorkedSolution, Larger, Aliases, LongNumbers, Hint),
    *(Calculator, FrozenLake, TicTacToe, ProposeAndSolve),
]
"""Environments whose rewards are as they should be, the bundled ones among them."""


@pytest.fixture(autouse=True)
def _only_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_checks(monkeypatch, "tasks", "episodes", "format", "demonstrations", "answers")


@pytest.mark.parametrize("environment", PLANTED)
def test_planted(environment: type[agentrl.Environment]) -> None:
    assert PLANTED[environment] in check_environment(environment).text


@pytest.mark.parametrize("environment", SOUND)
def test_sound(environment: type[agentrl.Environment]) -> None:
    report = check_environment(environment)
    assert report.passed, report.text
    assert EASY not in report.text
    assert NO_WIN not in report.text


class Slow(Substring):
    """Each episode takes a while, in seconds of an idle machine."""

    episode_s: ClassVar[float]
    now_s: ClassVar[float] = 0.0

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        Slow.now_s += self.episode_s
        return super().reward(task, episode)


@pytest.mark.parametrize(
    ("episode_s", "expected"),
    [
        (0.6, "a list of all answers wins 4 of 4 tasks: the reply"),
        (1.0, "plays for about 10 s of an idle machine: replies that should not win."),
        (2.0, "plays for about 10 s of an idle machine: answers of tasks, and replies that should not win."),
    ],
)
def test_slow_episodes(monkeypatch: pytest.MonkeyPatch, episode_s: float, expected: str) -> None:
    make_slow(monkeypatch, Slow, episode_s)
    report = check_environment(Slow)
    assert expected in report.text
