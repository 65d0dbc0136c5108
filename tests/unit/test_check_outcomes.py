"""`agentrl env check` judges what happened: a planted fault is named, and an environment without a fault has none."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pydantic import AfterValidator, Field

import agentrl
import agentrl_mcp
from agentrl.environment import gym
from agentrl.testing.check import check_environment
from agentrl_formats.bfcl import Bfcl
from agentrl_formats.gem import Gem
from tests.support.checks import keep_checks

INSTALL = "the extra games is not installed"


def never(value: Any) -> Any:
    raise ValueError("never valid")


class Desk(agentrl.ToolEnvironment):
    """Answers a question."""

    rows: ClassVar[dict[str, list[agentrl.Task]]] = {
        split: [agentrl.Task(id=f"{split}-{n}", data={"question": f"{split} {n}?"}) for n in range(3)]
        for split in ("train", "held_out")
    }

    @agentrl.tool
    def look(self, word: str, most: int = 3) -> str:
        """Look a word up."""
        return word * most

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(bool(episode.answer))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return cls.rows[split]


class RefusingTool(Desk):
    @agentrl.tool
    def buy(self, item: Annotated[str, AfterValidator(never)]) -> str:
        """Buy an item."""
        return item


class RefusingAsyncTool(Desk):
    @agentrl.tool
    async def buy(self, items: list[Annotated[int, AfterValidator(never)]]) -> str:
        """Buy items."""
        return str(items)


class IdleRun(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        pass

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return Desk.rows[split]


class ForgottenSuper(Desk):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.looks = 0


class Spawning(IdleRun):
    """Only its children act."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.gather(*ctx.spawn(Desk, ctx.task, n=2))


class UnmarkedTool(agentrl.ToolEnvironment):
    def price(self, fruit: str) -> int:
        """The price of a fruit."""
        return len(fruit)

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(self.is_right(episode.answer))

    def is_right(self, answer: str) -> bool:
        return bool(answer)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return Desk.rows[split]


class Untooled(UnmarkedTool):
    price = None  # type: ignore[assignment]


class Demonstrated(Desk):
    """Every third task lacks the answer that the reward reads after a success."""

    lacking: ClassVar[tuple[int, ...]] = (2,)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        data: list[dict[str, Any]] = [{"question": f"{split} {n}?", "number": n} for n in range(6)]
        answers = [{} if n % 3 in cls.lacking else {"answer": f"{split}{n}" * 2} for n in range(6)]
        return [agentrl.Task(id=f"{split}-{n}", data=data[n] | answers[n]) for n in range(6)]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        has_succeeded = episode.answer.startswith("found: ")
        return float(has_succeeded and episode.answer == f"found: {task.data['answer']}")

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Any) -> Any:
        word = f"{task.id.replace('-', '')}"
        seen = yield {"name": "look", "arguments": {"word": word, "most": 2}}
        yield f"found: {seen}"


class WronglyDemonstrated(Demonstrated):
    lacking = ()

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Any) -> Any:
        return [
            {"name": "look", "arguments": {"word": "x"}},
            "found: it" if task.data["number"] else "found: train0train0",
        ]


class BrokenTool(Demonstrated):
    """Random words find nothing, and every word of the index hits a bug."""

    lacking = ()

    @agentrl.tool
    def look(self, word: str, most: int = 3) -> str:
        """Look a word up."""
        entry = {f"train{n}": [f"train{n}"] for n in range(6)}[word]
        return entry["name"] * most  # type: ignore[call-overload,no-any-return]

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Any) -> Any:
        yield {"name": "look", "arguments": {"word": task.id.replace("-", ""), "most": 2}}
        yield f"found: {task.data['answer']}"


class SometimesBrokenTool(BrokenTool):
    """Only some entries hit the bug."""

    @agentrl.tool
    def look(self, word: str, most: int = 3) -> str:
        """Look a word up."""
        return (None if word == "train4" else word) * most  # type: ignore[operator]


class RefusingDemonstratedTool(BrokenTool):
    """A tool that refuses some calls, as demonstrated."""

    @agentrl.tool
    def look(self, word: str, most: int = 3) -> str:
        """Look a word up."""
        if word == "train4":
            raise ValueError("not in the index")
        return word * most


class MisspelledCall(BrokenTool):
    """A demonstration whose call no tool accepts."""

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Any) -> Any:
        yield {"name": "look", "arguments": {"words": "train0"}}
        yield f"found: {task.data['answer']}"


class PartlyDemonstrated(Demonstrated):
    """One demonstration earns less than the others."""

    lacking = ()

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return super().reward(task, episode) * (0.25 if task.data["number"] == 5 else 1.0)


class BrokenDemonstration(Demonstrated):
    lacking = ()

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Any) -> Any:
        seen = yield {"name": "look", "arguments": {"word": "x"}}
        yield str(int(seen))


class TwoDemonstrators(agentrl.Environment):
    """Each seat is demonstrated; one starts a new context, and children are not."""

    seats = ("asker", "teller")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        asker, teller = ctx.agent("asker"), ctx.agent("teller")
        await ctx.gather(*ctx.spawn(Desk, {"question": "?"}, n=1))
        await asker.act(agentrl.user("Ask."))
        asker.restart(agentrl.user("Ask again."))
        question = await asker.act()
        answer = await teller.act(agentrl.system("Be brief."), agentrl.user(question.text))
        asker.reward(0.0)
        teller.reward(float(answer.text == "Be brief.\nafter Ask again."))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return Desk.rows[split]

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Any, *, seat: str, first_message: str) -> Any:
        if seat == "teller":
            return [first_message]
        return cls.asked(first_message)

    @staticmethod
    def asked(first_message: str) -> Any:
        assert first_message == "Ask."
        again = yield "what?"
        yield f"after {again}"


class NonePrompt(Desk):
    def prompt(self, task: agentrl.Task) -> str:
        return f"{task.data.get('problem')}"


class MessagesPrompt(Desk):
    def prompt(self, task: agentrl.Task) -> str:
        return str([{"role": "user", "content": task.data["question"]}])


class InnerMessagesPrompt(Desk):
    def prompt(self, task: agentrl.Task) -> str:
        return f"Continue: {[{'role': 'user', 'content': task.data['question']}]}"


class ObjectPrompt(Desk):
    def prompt(self, task: agentrl.Task) -> str:
        return f"Use {NonePrompt()} for {task.data['question']}"


class ChoicesPrompt(Desk):
    def prompt(self, task: agentrl.Task) -> list[agentrl.Message]:
        return [agentrl.system(f"{['red', 'blue']}"), agentrl.user(task.data["question"])]


class Repeated(Desk):
    rows: ClassVar[dict[str, list[agentrl.Task]]] = Desk.rows | {
        "train": [agentrl.Task(id=str(n % 2), data={"question": str(n)}) for n in range(3)]
    }


class RepeatedHeldOut(Desk):
    rows: ClassVar[dict[str, list[agentrl.Task]]] = Desk.rows | {
        "held_out": [agentrl.Task(id="h", data={"question": str(n)}) for n in range(3)]
    }


class RepeatedRows(Desk):
    rows: ClassVar[dict[str, list[agentrl.Task]]] = Desk.rows | {"train": 2 * Desk.rows["train"]}


class InBothSplits(Desk):
    rows: ClassVar[dict[str, list[agentrl.Task]]] = Desk.rows | {"held_out": Desk.rows["train"][:1]}


class IdInBothSplits(Desk):
    rows: ClassVar[dict[str, list[agentrl.Task]]] = Desk.rows | {
        "held_out": [agentrl.Task(id="train-0", data={"question": "Another?"})]
    }


class Tuples(Desk):
    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
        return [agentrl.Task(id="t", data={"question": "q", "answers": [(1, 2)]})]


class Counter(gymnasium.Env[Any, Any]):
    """Pays each action, and ends after five."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.action_space = space
        self.observation_space = spaces.Discrete(9)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.left = 5
        return self.left, {}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.left, np.array([1.0]), self.left == 0, False, {}


class Counting(agentrl.GymEnvironment):
    """Names a number."""

    instructions: ClassVar[str] = "Answer with a number from 0 to 2."
    space: ClassVar[spaces.Space[Any]] = spaces.Discrete(3)

    def make(self, task: agentrl.Task) -> Any:
        return Counter(self.space)

    def render(self, observation: Any, info: Any, env: Any) -> str:
        return f"{observation} turns left"

    def parse(self, text: str, env: Any) -> Any:
        return int(text) if text.strip() in ("0", "1", "2") else None


class TextAction(Counting):
    def parse(self, text: str, env: Any) -> Any:
        return text


class LargeAction(Counting):
    def parse(self, text: str, env: Any) -> Any:
        return None if (number := super().parse(text, env)) is None else number + 10


class ShapeAction(Counting):
    space: ClassVar[spaces.Space[Any]] = spaces.Box(0.0, 2.0, (3,))

    def parse(self, text: str, env: Any) -> Any:
        return None if (number := super().parse(text, env)) is None else np.array([number, number])


class NoAction(Counting):
    def parse(self, text: str, env: Any) -> Any:
        return {"Zero": 0}.get(text.lower())


class DictObservation(Counting):
    def render(self, observation: Any, info: Any, env: Any) -> str:
        return str({"left": np.array([observation])})


class NoneObservation(Counting):
    def render(self, observation: Any, info: Any, env: Any) -> str:
        return str(info.get("text"))


def classic(game: str, seats: tuple[str, ...] = ("first", "second"), **methods: Any) -> type:
    pettingzoo = pytest.importorskip("pettingzoo", reason=INSTALL)
    body = {"__doc__": game, "__module__": __name__, "seats": seats, "illegal_reward": -1000.0}
    body["make"] = lambda self, task: pettingzoo.make("aec", f"classic/{game}")
    return type("Classic", (agentrl.PettingZooEnvironment,), body | methods)


def letters(self: Any, action: int, env: Any) -> str:
    return "abcdefghi"[action]


def numbers(self: Any, text: str, env: Any) -> Any:
    return int(text) if text.strip().isdecimal() else None


PLANTED: dict[str, tuple[Callable[[], type], str]] = {
    "refusing tool": (lambda: RefusingTool, "tool buy was never reached"),
    "refusing async tool": (lambda: RefusingAsyncTool, "tool buy was never reached"),
    "run without a turn": (lambda: IdleRun, "Look at IdleRun.run: call `await ctx.agent(seat).act(…)` in it"),
    "run without the inherited one": (
        lambda: ForgottenSuper,
        "no seat acted in any of 3 episodes, so there is nothing to train on. Look at ForgottenSuper.run: call "
        "`await super().run(ctx)` in it",
    ),
    "tool without its decorator": (
        lambda: UnmarkedTool,
        "WARNING UnmarkedTool defines no tool; is @agentrl.tool missing above `price`?",
    ),
    "error behind success": (
        lambda: Demonstrated,
        "task 'train-2', as demonstrated: run() raised KeyError: 'answer' at ",
    ),
    "demonstration of another answer": (
        lambda: WronglyDemonstrated,
        "WARNING 5 of 6 demonstrations earned nothing above 0, such as that of task 'train-1'.",
    ),
    "tool that raises for what demonstrations look up": (
        lambda: BrokenTool,
        f"- tool look raised TypeError: list indices must be integers or slices, not str at {__file__}:"
        f"{inspect.getsourcelines(BrokenTool.look)[1] + 4} in look, in 6 of 6 calls of demonstrations.",
    ),
    "tool that raises in one demonstration": (
        lambda: SometimesBrokenTool,
        "- tool look raised TypeError: unsupported operand type(s) for *: 'NoneType' and 'int' at ",
    ),
    "tool that refuses one demonstration": (
        lambda: RefusingDemonstratedTool,
        "WARNING tool look raised ValueError: not in the index at ",
    ),
    "demonstration of a wrong call": (
        lambda: MisspelledCall,
        "- tool look refused its arguments: word: Field required, in 6 of 6 calls of demonstrations. Fix the tool, or",
    ),
    "demonstration that raises": (lambda: BrokenDemonstration, "demonstrate() of task 'train-0' raised ValueError"),
    "None as prompt": (lambda: NonePrompt, "user message that the policy reads is Python's text of None"),
    "messages as prompt": (lambda: MessagesPrompt, "Python's text of a list"),
    "messages inside a prompt": (lambda: InnerMessagesPrompt, "Python's text of a list"),
    "object inside a prompt": (lambda: ObjectPrompt, "Python's text of an object"),
    "list as system message": (
        lambda: ChoicesPrompt,
        "system message that the policy reads is Python's text of a list",
    ),
    "dict as observation": (lambda: DictObservation, "Python's text of a dict"),
    "None as observation": (lambda: NoneObservation, "Python's text of None"),
    "id of two tasks": (lambda: Repeated, "tasks('train', seed=0)[2] has the id '0' of an earlier task"),
    "id of two held-out tasks": (lambda: RepeatedHeldOut, "tasks('held_out', seed=0)[1] has the id 'h'"),
    "repeated rows": (lambda: RepeatedRows, "3 tasks of train, such as 'train-0', repeat an earlier one"),
    "task in both splits": (lambda: InBothSplits, "1 training task is also held out"),
    "id in both splits": (lambda: IdInBothSplits, "names a held-out task with other data"),
    "tuple in data": (lambda: Tuples, "Task 't': data['answers'][0] is (1, 2)"),
    "text as action": (lambda: TextAction, "actions was legal: parse returned, for example, '"),
    "number outside the space": (lambda: LargeAction, "of type int, which the action space, or the"),
    "array of another shape": (lambda: ShapeAction, "of type ndarray, which the action space"),
    "text that is never an action": (lambda: NoAction, "the game was not played"),
    "names that parse does not know": (
        lambda: classic("tictactoe-v3", action_name=letters, parse=numbers),
        "Let parse accept what action_name returns",
    ),
    "text as action of a board game": (
        lambda: classic("connect_four-v3", parse=lambda self, text, env: text),
        "of type str, which the action space",
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_planted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = ("names", "tasks", "splits", "episodes", "turns", "rewards", "tools", "refused_calls", "texts", "actions")
    keep_checks(monkeypatch, *looks, "demonstrations")
    make, words = PLANTED[fault]
    report = check_environment(make())
    assert words in report.text, report.text
    only_told = (
        "tool that refuses one demonstration",
        "demonstration of another answer",
        "tool without its decorator",
        "repeated rows",
        "task in both splits",
        "id in both splits",
        "text that is never an action",
    )
    assert report.passed == (fault in only_told)


def test_a_failed_demonstration_is_told_from_a_failed_environment() -> None:
    (finding,) = check_environment(BrokenDemonstration).findings
    assert finding.startswith("demonstrate() of task 'train-0' raised ")
    (finding,) = check_environment(Demonstrated).findings
    assert finding.startswith("task 'train-2', as demonstrated: run() raised ")


def test_the_rewards_of_demonstrations_are_shown() -> None:
    report = check_environment(PartlyDemonstrated)
    assert report.passed, report.text
    assert "  6 demonstrations: mean reward 0.88; the lowest is 0.25, of task 'train-5'.\n" in report.text
    assert report.figures["demonstration_rewards"] == [1.0] * 5 + [0.25]


# --- no false alarms --------------------------------------------------------------------------------------------------


def gym_game(name: str, game: gym.TextGame, **options: Any) -> Callable[[], type]:
    return lambda: agentrl.gym_environment("Game", lambda task: gymnasium.make(name, **options), **game)


def control(name: str, low: float, parse: Callable[[str, Any], Any]) -> Callable[[], type]:
    """A game of classic control, whose observation is shown as numbers."""
    return lambda: agentrl.gym_environment(
        "Game",
        lambda task: gymnasium.make(name),
        render=lambda observation, info, env: str(observation.tolist()),
        parse=parse,
        illegal_reward=low,
    )


def digit(text: str, env: Any) -> Any:
    return int(text) if text.strip() in ("0", "1", "2") else None


def force(text: str, env: Any) -> Any:
    try:
        return [float(text)]
    except ValueError:
        return None


def grid() -> type:
    pytest.importorskip("minigrid", reason="the extra games is not installed")
    return agentrl.gym_environment(
        "Grid",
        lambda task: gymnasium.make("MiniGrid-Empty-5x5-v0"),
        render=lambda observation, info, env: f"{observation['mission']} {observation['image'].tolist()}",
        parse=digit,
        illegal_reward=-1.0,
    )


def arena(game: str) -> Callable[[], type]:
    def make() -> type:
        textarena = pytest.importorskip("textarena", reason=INSTALL)
        seats = ("only",) if game in ("Mastermind-v0", "TowerOfHanoi-v0", "2048-v0") else ("first", "second")
        body = {"seats": seats, "__module__": __name__, "make": lambda self, task: textarena.make(game)}
        return type("Arena", (agentrl.TextArenaEnvironment,), body)

    return make


def puzzles() -> type:
    reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra calculator is not installed")

    class Puzzles(Desk):
        @classmethod
        def tasks(cls, split: str, *, seed: int = 0) -> list[agentrl.Task]:
            drawn = reasoning_gym.create_dataset("leg_counting", size=4, seed=seed + 7 * (split == "train"))
            return [agentrl.Task(id=f"{split}-{n}", data={"question": row["question"]}) for n, row in enumerate(drawn)]

    return Puzzles


class IssueText(Desk):
    """Its tasks quote what looks like a mistake."""

    rows: ClassVar[dict[str, list[agentrl.Task]]] = Desk.rows | {
        "train": [
            agentrl.Task(id="1", data={"question": "Fix: <pool.Worker object at 0x7f12ab34cd56> has no run()"}),
            agentrl.Task(id="2", data={"question": "Sort [3, 1, 2]"}),
            agentrl.Task(id="3", data={"question": "Why does [{'role': 'user'}] fail?"}),
            agentrl.Task(id="4", data={"question": '["a", {"b": null}]'}),
            agentrl.Task(id="5", data={"question": "[GAME] None of it [x]"}),
        ]
    }


class PatternedTool(Desk):
    @agentrl.tool
    def find(self, code: Annotated[str, Field(pattern=r"^7[0-9]{3}-[a-f]{2}$")]) -> str:
        """Find what has a code."""
        return code


class NamedById(Desk):
    """Only the ids tell its tasks apart."""

    rows: ClassVar[dict[str, list[agentrl.Task]]] = {
        split: [agentrl.Task(id=f"{split}-{n}", data={"question": "Play."}) for n in range(3)]
        for split in ("train", "held_out")
    }


FORMATS = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent"))


def packages(name: str) -> Path:
    """Return where packages are installed; see `benchmarks/sandboxes_formats.py`."""
    if not (FORMATS / name).exists():
        pytest.skip(f"needs {FORMATS / name}; see benchmarks/sandboxes_formats.py")
    return FORMATS / name


def imported(name: str) -> None:
    """Make a package importable."""
    if str(packages(name)) not in sys.path:
        sys.path.append(str(packages(name)))


def gem_game(id: str) -> Callable[[], type]:
    def make() -> type:
        imported("gem")

        def tasks(cls: type, split: Any, *, seed: int = 0) -> Any:
            return Gem.tasks(split, seed=seed, ids=[id])

        return type("GemGame", (Gem,), {"__module__": __name__, "tasks": classmethod(tasks)})

    return make


def bfcl() -> type:
    imported("bfcl")
    return Bfcl


def server(module: str) -> Callable[[], type]:
    def make() -> type:
        python = packages("servers") / "bin/python"
        repository = tempfile.mkdtemp()
        subprocess.run(["git", "init", "-q", repository], check=True)
        arguments = ["--repository", repository] if module == "mcp_server_git" else []
        served = agentrl_mcp.MCPServer(command=[str(python), "-m", module, *arguments])
        return type("Served", (Desk,), {"__module__": __name__, "mcp_servers": (served,)})

    return make


SOUND: dict[str, Callable[[], Any]] = {
    "desk": lambda: Desk,
    "no tools": lambda: Untooled,
    "two demonstrated seats": lambda: TwoDemonstrators,
    "turns of children alone": lambda: Spawning,
    "ids alone": lambda: NamedById,
    "tool with a pattern": lambda: PatternedTool,
    "issues": lambda: IssueText,
    "counter": lambda: Counting,
    "agentrl calculator": lambda: "calculator",
    "agentrl frozen lake": lambda: "frozen_lake",
    "agentrl tictactoe": lambda: "tictactoe",
    "agentrl propose and solve": lambda: "propose_and_solve",
    "gymnasium FrozenLake": gym_game("FrozenLake-v1", gym.FROZEN_LAKE),
    "gymnasium CliffWalking": gym_game("CliffWalking-v1", gym.CLIFF_WALKING),
    "gymnasium Taxi": gym_game("Taxi-v4", gym.TAXI),
    "gymnasium Blackjack": gym_game("Blackjack-v1", gym.BLACKJACK),
    "gymnasium CartPole": control("CartPole-v1", -1.0, digit),
    "gymnasium Acrobot": control("Acrobot-v1", -600.0, digit),
    "gymnasium MountainCar": control("MountainCar-v0", -300.0, digit),
    "gymnasium MountainCarContinuous": control("MountainCarContinuous-v0", -200.0, force),
    "gymnasium Pendulum": control("Pendulum-v1", -2000.0, force),
    "minigrid": grid,
    "pettingzoo tictactoe": lambda: classic("tictactoe-v3"),
    "pettingzoo connect four": lambda: classic("connect_four-v3"),
    "pettingzoo rps": lambda: classic("rps-v2"),
    "pettingzoo leduc (rlcard)": lambda: classic("leduc_holdem-v4"),
    "pettingzoo hold'em (rlcard)": lambda: classic("texas_holdem-v4"),
    "pettingzoo no-limit hold'em (rlcard)": lambda: classic("texas_holdem_no_limit-v6"),
    **{
        f"textarena {game}": arena(game)
        for game in ("KuhnPoker-v0", "TicTacToe-v0", "PigDice-v0", "Mastermind-v0", "TowerOfHanoi-v0", "Nim-v0")
    },
    "reasoning_gym": puzzles,
    **{
        f"gem {id}": gem_game(id)
        for id in ("game:Mastermind-v0-easy", "game:TowerofHanoi-v0-easy", "game:Sudoku-v0-easy", "rg:chain_sum")
    },
    "bfcl": bfcl,
    "mcp-server-time": server("mcp_server_time"),
    "mcp-server-git": server("mcp_server_git"),
}
OVERLAPPING = ("agentrl tictactoe", "agentrl propose and solve")
"""Environments whose splits do share tasks: few openings, and one task."""
QUICK = (
    *(
        "desk",
        "no tools",
        "two demonstrated seats",
        "turns of children alone",
        "ids alone",
        "tool with a pattern",
        "issues",
        "counter",
    ),
    *("gymnasium FrozenLake", "gymnasium MountainCarContinuous", "pettingzoo rps"),
)


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the games themselves
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in SOUND]
)
def test_no_false_alarm(name: str) -> None:
    report = check_environment(SOUND[name]())
    assert report.passed, report.text
    false = [
        "was never reached",
        "defines no tool",
        "earned nothing",
        *(["also held out"] if name not in OVERLAPPING else []),
    ]
    assert not [text for text in report.warnings if any(words in text for words in false)]
