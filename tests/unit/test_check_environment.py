"""The checker passes what is sound and names what is not."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Literal

import pytest

import agentrl
from agentrl.core.clock import SystemClock
from agentrl.core.errors import CheckFailedError
from agentrl.environment.environment import Split, TaskSource
from agentrl.testing import check, play
from agentrl.testing.check import Subject, check_environment, replay_from_every_entry
from agentrl.testing.report import CheckResult, EnvironmentReport

HASHING = """
import agentrl

class Hashing(agentrl.Environment):
    seats = ("speaker",)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id="t", data={"words": [f"word-{number}" for number in range(20)]})]

    def order(self, words):
        return list(words)

    async def run(self, ctx):
        speaker = ctx.agent("speaker")
        await speaker.act(agentrl.user(" ".join(self.order(set(ctx.task.data["words"])))))
        speaker.reward(1.0)

class Sorting(Hashing):
    def order(self, words):
        return sorted(words)
"""

RESUMED = """
import asyncio, sys
from pathlib import Path
import msgspec
from agentrl.environment.registry import resolve
from agentrl.journal.entries import JournalEntry
from agentrl.testing.execution import Failure, execute_episode, random_policy, spec_of

name, kept = sys.argv[1], Path(sys.argv[2])
found = resolve(name)
recorded = msgspec.msgpack.decode(kept.read_bytes(), type=list[JournalEntry]) if kept.exists() else []
task = found.tasks("train")[0]
outcome = asyncio.run(execute_episode(found, spec_of(found, task, 0, 0), random_policy(found), recorded))
if isinstance(outcome, Failure):
    sys.exit(outcome.text)
kept.write_bytes(msgspec.msgpack.encode(outcome.entries[:2]))
"""


class Adder(agentrl.ToolEnvironment):
    """Adds."""

    def __init__(self) -> None:
        self.total = 0

    @agentrl.tool
    def add(self, number: int, sign: Literal["+", "-"] = "+") -> int:
        """Add to a running total."""
        self.total += number if sign == "+" else -number
        return self.total

    @agentrl.tool
    async def wait(self) -> str:
        """Wait a moment."""
        await asyncio.sleep(0)
        return "waited"

    @agentrl.tool
    def divide(self, number: int) -> float:
        """Divide one by a number."""
        return 1 / (number % 3)

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(self.total % 7)

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [agentrl.Task(id=f"t{n}", data={"question": f"add {n}"}) for n in range(5)]


class Trees(Adder):
    """Child episodes, branches, effects, resources, time and chance."""

    fetched: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        children = ctx.spawn(Adder, {"question": "add"}, n=3)

        async def think(index: int) -> float:
            await ctx.sleep(0.0)
            return ctx.rng.random() + index

        *results, thought = await ctx.gather(*children, think(1))
        fetched = await ctx.effect("fetch", lambda: Trees.fetched.append("x") or len(Trees.fetched))
        dice = ctx.resource(lambda: random.Random(3), level="replay")
        rolled = await dice.call("randint", 1, 6)
        said = f"{[r.reward for r in results]} {thought:.3f} {fetched} {rolled} {ctx.uuid()} {ctx.now():.0f}"
        await agent.act(agentrl.user(said))
        agent.reward(thought)


class Stock(Adder):
    """Its tool keeps state on the class, which is not reset for a resumed episode."""

    sold: ClassVar[list[int]] = []

    @agentrl.tool
    def add(self, number: int, sign: Literal["+", "-"] = "+") -> int:
        """Sell."""
        self.sold.append(number)
        return len(self.sold)


class Dice(Adder):
    """Its tool reaches chance and time as the message about `Stock` says."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx = ctx
        await super().run(ctx)

    @agentrl.tool
    def add(self, number: int, sign: Literal["+", "-"] = "+") -> str:
        """Roll a die."""
        return f"{self.ctx.rng.random()} at {self.ctx.now()}"


class Clockwork(Adder):
    """Looks at the real clock."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for _ in range(3):
            await agent.act(agentrl.user(f"it is {time.perf_counter()}"))
        agent.reward(1.0)


class Forgetful(Adder):
    """Gives no reward."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act(agentrl.user("hello"))


class Drifting(Adder):
    """Its tasks change."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [agentrl.Task(id="t", data={"question": str(random.random())})]


class Untyped(agentrl.ToolEnvironment):
    """A tool without types."""

    @agentrl.tool
    def go(self, where) -> str:  # type: ignore[no-untyped-def]
        """Go."""
        return str(where)

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0


class NotAsync(Adder):
    """`run` is a plain function."""

    def run(self, ctx: agentrl.EpisodeContext) -> None:  # type: ignore[override]
        ctx.agent("agent").reward(1.0)


class TasksOfAnInstance(Adder):
    """`tasks` without @classmethod."""

    def tasks(self, split: Split, *, seed: int = 0) -> TaskSource:  # type: ignore[override]
        return []


class NotAsyncAgent(agentrl.HarnessEnvironment):
    """An external agent that is not asynchronous."""

    seats = ("main",)

    def play(self, task, endpoint):
        return None

    def reward(self, task, episode):
        return 0.0


class WithLevel(Adder):
    """Wants an argument."""

    def __init__(self, level: int) -> None:
        self.level = level


class WithoutQuestion(Adder):
    """Its tasks say `prompt`, as TRL's do."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [agentrl.Task(id="t", data={"prompt": "1 + 1"})]


class PlainText(Adder):
    """Says text where a message belongs."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("agent").act("hello")  # type: ignore[arg-type]


class NotAwaited(Adder):
    """Forgets to await."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = ctx.agent("agent").act(agentrl.user("hello"))
        ctx.agent("agent").reward(float(turn.text == "x"))  # type: ignore[attr-defined]


class Rows(Adder):
    """Its tasks are dictionaries."""

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [{"question": "1 + 1"}]  # type: ignore[list-item]


class Misspelt(Adder):
    """A key that is not there."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == task.data["anwser"])


class Sleeper(Adder):
    """Blocks the loop in every turn, each time for less than what a watch on a run would name."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for _ in range(3):
            await ctx.agent("agent").act(agentrl.user("hello"))
            time.sleep(0.4)  # noqa: ASYNC251 - what is to be found
        ctx.agent("agent").reward(1.0)


class Cart:
    """A state that can be told and taken."""

    def __init__(self) -> None:
        self.items: list[str] = []

    def put(self, item: str) -> int:
        self.items.append(item)
        return len(self.items)

    def get_state(self) -> list[str]:
        return self.items

    def set_state(self, state: list[str]) -> None:
        self.items = list(state)


class Rooms(Adder):
    """A tool that fails in one room."""

    @agentrl.tool
    def look(self, room: str) -> str:
        """Look into a room."""
        return {"a": "empty", "b": "full"}[room]


class Unfinished(Adder):
    """A tool that fails always."""

    @agentrl.tool
    def look(self) -> str:
        """Look around."""
        return str(self.surroundings)  # type: ignore[attr-defined]


class Strict(Adder):
    """A tool that refuses every argument that is not a sum."""

    @agentrl.tool
    def compute(self, sum_of_two: str) -> str:
        """Add two numbers."""
        first, second = re.fullmatch(r"(\d+)\+(\d+)", sum_of_two).groups()  # type: ignore[union-attr]
        return str(int(first) + int(second))


class Careful(Adder):
    """Answers what it refuses."""

    @agentrl.tool
    def compute(self, sum_of_two: str) -> str:
        """Add two numbers."""
        match = re.fullmatch(r"(\d+)\+(\d+)", sum_of_two)
        return "give a sum such as 1+2" if match is None else str(sum(map(int, match.groups())))


class Offline(Adder):
    """A tool whose service is never there."""

    @agentrl.tool
    def look(self, room: str, floor: int) -> str:
        """Look into a room."""
        raise ConnectionError("no route to host")


class Silent(Adder):
    """A tool that never answers."""

    @agentrl.tool(timeout_s=0.05)
    async def look(self, room: str) -> str:
        """Look into a room."""
        await asyncio.sleep(3600)
        return room


class Library(Adder):
    """A tool that raises over what it does not have, as any does for random arguments."""

    @agentrl.tool
    def read(self, path: str) -> str:
        """Read a file."""
        return Path("/nowhere", path).read_text()


class Evaluator(Adder):
    """A tool that parses its argument."""

    @agentrl.tool
    def compute(self, expression: Literal["1 +", "2 *"]) -> str:
        """Compute."""
        return ast.dump(ast.parse(expression))


class Hidden(Adder):
    """A tool that does not know most words, and has a bug for the others."""

    @agentrl.tool
    def look(self, room: Literal["a", "b", "c"]) -> str:
        """Look into a room."""
        return {"b": None, "c": None}[room].name  # type: ignore[attr-defined,no-any-return]


class TwiceBroken(Unfinished):
    """A tool that fails always, at one of two lines."""

    calls = 0

    @agentrl.tool
    def look(self) -> str:
        """Look around."""
        self.calls += 1
        if self.calls % 2:
            return str(self.surroundings)  # type: ignore[attr-defined]
        return str(self.other)  # type: ignore[attr-defined]


class Shopping(Adder):
    """Acts that must happen once, and a tool in ten that reaches a resource."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx, self.cart = ctx, ctx.resource(Cart, level="snapshot")
        await ctx.effect("open", lambda: 1, guarantee="once")
        await super().run(ctx)

    @agentrl.tool
    async def put(self, item: str) -> int:
        """Put something into the cart."""
        return int(await self.cart.call("put", item))

    @agentrl.tool
    async def pay(self, cents: int) -> str:
        """Pay."""
        return await self.ctx.effect("pay", lambda: "paid", guarantee="once")

    @agentrl.tool(external=True, guarantee="once")
    def ship(self) -> str:
        """Ship it."""
        return "shipped"


class Judged(agentrl.Environment):
    """A judge looks at what a solver says. `rewarded` names the tasks in which each seat gets a reward."""

    seats = ("solver", "judge")
    rewarded: ClassVar[dict[str, str]] = {}
    endless: ClassVar[str] = ""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("?"))
            if ctx.task.id in self.rewarded.get(seat, ""):
                ctx.agent(seat).reward(1.0)
        while ctx.task.id in self.endless:
            await ctx.agent("judge").act(agentrl.user("?"))

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return [agentrl.Task(id=number, data={}) for number in "0123"]


@pytest.mark.parametrize(
    ("rewarded", "faulty"),
    [
        ({"solver": "0123"}, []),
        ({"solver": "0123", "judge": "0123"}, []),
        ({"solver": "0123", "judge": "02"}, ["judge"]),
        ({"solver": "13"}, ["solver"]),
        ({}, ["solver", "judge"]),
    ],
)
def test_a_seat_without_a_reward_is_a_judge_if_another_seat_is_rewarded(
    rewarded: dict[str, str], faulty: list[str]
) -> None:
    report = check_environment(type("Judging", (Judged,), {"rewarded": rewarded, "__module__": __name__}))
    assert [seat for seat in Judged.seats if any(f"seat {seat!r} acted" in text for text in report.findings)] == faulty
    assert len(report.findings) == len(faulty)
    if not faulty:
        assert ("Never rewarded: judge" in report.text) == ("judge" not in rewarded)


def test_the_reward_of_a_cut_episode_makes_no_judge_a_seat_that_is_rewarded() -> None:
    report = check_environment(type("Judging", (Judged,), {"rewarded": {"solver": "0123"}, "endless": "02"}))
    assert report.passed, report.text
    assert "Never rewarded: judge" in report.text


class Talkative(Adder):
    """Needs more turns, and longer calls, than the check allows."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.gather(*ctx.spawn(Rambling, {"question": "?"}, n=2))
        await super().run(ctx)

    @agentrl.tool
    def recite(self, text: Literal["blah" * 2000]) -> str:  # type: ignore[valid-type]
        """Recite."""
        return text


class Rambling(Adder):
    """Does not end by itself."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        while True:
            await ctx.agent("agent").act(agentrl.user("and?"))


@pytest.mark.parametrize("check", [check_environment, replay_from_every_entry])
def test_a_choice_of_no_tasks_does_not_pass(check: Callable[..., EnvironmentReport]) -> None:
    report = check("calculator", tasks=[], episodes=1)
    assert not report.passed
    assert "tasks is empty, so nothing was checked" in report.text


def test_a_check_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_color(subject: Subject, result: CheckResult) -> None:
        result.figures["color"] = "red"
        result.shown = "It is red."
        result.remarks.append("Not blue.")
        if subject.environment is Adder:
            result.warn("it is red", "Paint it")
            result.fault("it is too red", "Repaint it")

    color = check.Check("color", check_color)
    later = check.Check("later", lambda subject, result: None, lambda subject: subject.passed)
    monkeypatch.setattr(check, "CHECKS", (color, later))
    passed, failed = check_environment(Judged), check_environment(Adder)
    assert (passed.passed, passed.text) == (True, "Judged: passed\n  It is red.\n  Not blue.")
    assert [result.name for result in passed.checks] == ["color", "later"]
    assert (failed.passed, failed.figures) == (False, {"color": "red"})
    assert (failed.findings, failed.warnings) == (["it is too red. Repaint it"], ["it is red. Paint it"])
    assert failed.text.splitlines() == [
        "Adder: 1 finding",
        "- it is too red. Repaint it",
        "WARNING it is red. Paint it",
    ]
    assert [result.name for result in failed.checks] == ["color"]


def test_what_the_check_cuts_is_said() -> None:
    report = check_environment(Talkative)
    assert report.passed, report.text
    cuts = report.figures["cuts"]
    assert {limit.split()[-1] for limit in cuts} == {"turns", "tokens"}
    assert re.search(r" The check cut off .*\b\d+ episodes? at its limit of 8 turns\b.*\.", report.text)
    assert all(
        re.search(rf"\b{number} (episode|turn)s? at its limit of {limit}", report.text)
        for limit, number in cuts.items()
    )
    assert " at its limit of 3 turns" in check_environment(Talkative, sampling={"max_turns": 3}).text
    assert "cut" not in check_environment(Judged, tasks=[agentrl.Task(id="0", data={})]).text.lower()


def test_a_game_with_given_replies_is_not_cut() -> None:
    class Long(Adder):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            turns = [await ctx.agent("agent").act(agentrl.user("and?")) for _ in range(20)]
            ctx.agent("agent").reward(float(sum(len(turn.text) for turn in turns)))

    replies = ["x" * 5_000] * 20
    played = play(Long, agentrl.Task(id="t", data={"question": "?"}), replies)
    assert played.stop_reason == "completed"
    assert played.reward == 100_000
    with pytest.raises(CheckFailedError, match="reply 20"):
        play(Long, agentrl.Task(id="t", data={"question": "?"}), replies[:19])
    with pytest.raises(CheckFailedError, match="reply 9"):
        play(Long, agentrl.Task(id="t", data={"question": "?"}), replies[:8])


def test_what_happens_once_is_no_difference_and_every_tool_is_tried() -> None:
    report = check_environment(Shopping)
    assert report.passed, report.text
    assert "continued exactly where it was, with resources restored from their snapshots" in report.text
    assert report.figures["called"] == sorted(Shopping.tool_table())
    assert sum(len(result.figures) for result in report.checks) == len(report.figures), "a name belongs to one check"
    assert "Never called" not in report.text


def test_tools_that_were_never_called_are_named() -> None:
    report = check_environment(Shopping, episodes=1, seed=1)
    assert report.passed, report.text
    assert report.figures["uncalled"]
    assert f"Never called, and not tried: {', '.join(report.figures['uncalled'])}" in report.text


def test_a_training_task_that_is_also_held_out_is_noted() -> None:
    class Overlapping(Adder):
        @classmethod
        def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
            first = 0 if split == "train" else 3
            return [agentrl.Task(id=f"{split}-{n}", data={"question": f"add {n}"}) for n in range(first, first + 4)]

    report = check_environment(Overlapping)
    assert report.passed, report.text
    assert report.figures["also_held_out"] == ["train-3"]
    (warning,) = [
        text for text in report.warnings if text.startswith("1 training task is also held out, such as 'train-3'.")
    ]
    assert warning.endswith("list other tasks, or ignore this if there are no others.")


def test_all_tasks_of_both_splits_are_compared() -> None:
    class Overlapping(Adder):
        @classmethod
        def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
            numbers = range(300) if split == "train" else range(200, 2_000)
            return [
                agentrl.Task(id=f"{n}", data={"question": f"add {n}" + f" ({split})" * (n >= 290)}) for n in numbers
            ]

    report = check_environment(Overlapping)
    assert report.passed, report.text
    assert report.figures["also_held_out"] == [f"{n}" for n in range(200, 290)]
    assert report.figures["shared_ids"] == [f"{n}" for n in range(290, 300)]
    first, second = [text for text in report.warnings if "held-out" in text or "held out" in text]
    assert first.startswith("90 training tasks are also held out, such as '200'.")
    assert second == "10 ids of training tasks, such as '290', name a held-out task with other data."


class EverySeed(Adder):
    """Both splits have the same endless tasks, and reading one takes `read_s` of the check's clock."""

    read_s: ClassVar[float] = 0.0

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
        return EndlessTasks()


class EndlessTasks:
    now: ClassVar[float] = 0.0

    def __len__(self) -> int:
        return 2**31

    def __getitem__(self, index: int, /) -> agentrl.Task:
        assert index < 60_000, "read without end"
        EndlessTasks.now += EverySeed.read_s
        return agentrl.Task(id=f"{index}", data={"question": f"add {index}"})


@pytest.mark.parametrize(("read_s", "compared"), [(0.0, 50_000), (1.0, 11)])
def test_of_endless_splits_the_same_number_of_tasks_is_compared(
    monkeypatch: pytest.MonkeyPatch, read_s: float, compared: int
) -> None:
    class TaskClock(SystemClock):
        monotonic = staticmethod(lambda: EndlessTasks.now)

    monkeypatch.setattr(EverySeed, "read_s", read_s)
    monkeypatch.setattr(check, "LoadClock", TaskClock)
    report = check_environment(EverySeed)
    assert report.passed, report.text
    assert report.figures["also_held_out"] == [f"{n}" for n in range(compared)]
    assert report.figures["uncompared_tasks"] == 2 * (2**31 - compared)
    assert (
        f"{report.figures['uncompared_tasks']:,} tasks were not compared, so more training tasks may also be held out"
        in report.text
    )


def test_a_late_task_that_cannot_be_read_is_a_finding() -> None:
    class Late(Adder):
        @classmethod
        def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
            return [agentrl.Task(id=f"{split}-{n}", data={"question": f"{split} {n}"}) for n in range(100)] + [None]  # type: ignore[list-item]

    (finding,) = check_environment(Late).findings
    assert "tasks('held_out', seed=0)[100] raised AttributeError" in finding


def test_held_out_tasks_that_cannot_be_listed_are_a_finding() -> None:
    class Training(Adder):
        @classmethod
        def tasks(cls, split: Split, *, seed: int = 0) -> TaskSource:
            return {"train": super().tasks("train")}[split]

    (finding,) = check_environment(Training).findings
    assert finding.startswith("tasks('held_out', seed=0) raised KeyError: 'held_out' at ")


def test_a_tool_that_sometimes_raises_is_a_warning() -> None:
    report = check_environment(Rooms)
    assert report.passed, report.text
    place = rf"{re.escape(__file__)}:\d+ in look"
    assert re.search(
        rf"WARNING tool look raised KeyError: 'some text' at {place}, in \d+ of \d+ calls?\. Fix it, or ignore this",
        report.text,
    )
    assert sum(report.figures["tool_errors"].values()) < sum(report.figures["tool_calls"].values())


def test_the_error_of_a_broken_program_is_shown_before_that_of_a_refused_call() -> None:
    report = check_environment(Hidden, episodes=8)
    (warning,) = [text for text in report.warnings if text.startswith("tool look ")]
    assert warning.startswith(
        "tool look raised AttributeError: 'NoneType' object has no attribute 'name' and raised KeyError: 'a' at "
    )


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (Strict, rf"raised AttributeError: 'NoneType' object .* at {re.escape(__file__)}:\d+ in compute"),
        (Offline, rf"raised ConnectionError: no route to host at {re.escape(__file__)}:\d+ in look"),
        (Silent, r"timed out after 0\.05 s"),
    ],
)
def test_a_tool_that_fails_alike_in_every_call_fails_the_check(
    environment: type[agentrl.Environment], words: str
) -> None:
    report = check_environment(environment)
    (finding,) = report.findings
    assert re.search(rf"tool \w+ {words}.*, in (\d+) of \1 calls", finding), finding
    assert "return the reason as text" in finding


@pytest.mark.parametrize("environment", [Careful, Library, Evaluator])
def test_a_tool_that_refuses_its_arguments_does_not(environment: type[agentrl.Environment]) -> None:
    report = check_environment(environment)
    assert report.passed, report.text
    assert bool(re.search("WARNING tool (compute|read)", report.text)) == (environment is not Careful)


def test_a_tool_that_fails_at_two_lines_fails_the_check() -> None:
    assert not check_environment(TwiceBroken).passed


def test_a_tool_that_no_arguments_can_make_work_fails_the_check() -> None:
    report = check_environment(Unfinished)
    (finding,) = report.findings
    number = report.figures["tool_calls"]["look"]
    assert re.search(rf"tool look raised AttributeError: .* in look, in {number} of {number} call", finding)
    assert report.text.count("tool look raised") == 1


def test_state_on_the_class_and_the_way_from_a_tool_to_its_context_are_named() -> None:
    (finding,) = check_environment(Stock).findings
    assert "state on self, not on the class" in finding
    assert "write self.ctx = ctx in run()" in finding


@pytest.mark.parametrize("environment", [pytest.param(Adder, marks=pytest.mark.exhaustive), Trees, Dice])
def test_sound_environments_resume_from_every_entry(environment: type[agentrl.Environment]) -> None:
    report = check_environment(environment)
    assert report.passed, report.text
    assert report.figures["episodes"] >= 4
    assert report.figures["resumptions"] > 12
    assert "continued exactly where it was.\n" in report.text


def test_effects_are_not_repeated() -> None:
    Trees.fetched.clear()
    report = check_environment(Trees, tasks=[agentrl.Task(id="t", data={"question": "add"})], episodes=1)
    assert report.passed, report.text
    assert report.figures["resumptions"] > 10
    why = "one episode, two for comparison with episodes played at once, seven of nonsense and chance, four wrong calls"
    assert Trees.fetched == ["x"] * 14, why


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (Clockwork, "ctx.rng"),
        (Forgetful, "seat 'agent' acted but was given no reward"),
        (Drifting, "Draw it from the seed and index"),
        (Untyped, "parameter 'where' has no type; annotate it"),
        (int, "not an agentrl.Environment"),
        ("no_such_environment", "no environment is called 'no_such_environment'; known: "),
        (NotAsync, "NotAsync.run must be `async def run(self, ctx)`"),
        (TasksOfAnInstance, "write @classmethod above"),
        (NotAsyncAgent, "NotAsyncAgent.play must be `async def play(self, task, endpoint)`"),
        (WithLevel, "__init__ wants level, but is called without arguments"),
        (WithoutQuestion, "task 't' has no 'question' in its data (it has 'prompt'): give it one, or override prompt"),
        (PlainText, "such as agentrl.user('…'), not str"),
        (NotAwaited, "was never awaited: an `await` is missing"),
        (Rows, "not agentrl.Task. Write agentrl.Task(id="),
        (Misspelt, f"KeyError: 'anwser' at {__file__}:"),
        (Sleeper, "time.sleep(0.4)"),
    ],
)
def test_what_is_wrong_is_said(environment: type | str, words: str) -> None:
    report = check_environment(environment)
    assert not report.passed
    assert words in report.text


@pytest.mark.exhaustive
def test_code_that_goes_by_the_order_of_a_set_is_found_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "hashing.py").write_text(HASHING)
    for name, found in (("Hashing", 1), ("Sorting", 0)):
        report = check_environment(f"{tmp_path / 'hashing.py'}:{name}", hash_order=True)
        assert len(report.findings) == found
        if found:
            assert "hash()" in report.findings[0]
            assert "call r#0" in report.findings[0]


SEATS_OF_A_SET = """
import agentrl
from agentrl import Task, user

class Both(agentrl.Environment):
    seats = ("alice", "bob")

    async def run(self, ctx):
        for seat in {"alice", "bob"}:
            await ctx.agent(seat).act(user("Say a number."))
        for seat in self.seats:
            ctx.agent(seat).reward(1.0)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [Task(id="t", data={})]
"""
CHECKED = """
import sys
from agentrl.testing.check import check_environment

first, = {"alice", "bob"} - {[*{"alice", "bob"}][1]}
print(first, check_environment(sys.argv[1], hash_order=True).text)
"""


def test_seats_in_the_order_of_a_set_are_found_whatever_order_the_checking_process_has(tmp_path: Path) -> None:
    (tmp_path / "both.py").write_text(SEATS_OF_A_SET)
    first = set()
    for seed in "16":
        told = subprocess.run(
            [sys.executable, "-c", CHECKED, f"{tmp_path / 'both.py'}:Both"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        first.add(told.split()[0])
        assert "hash()" in told
        assert "a turn of bob" in told
    assert first == {"alice", "bob"}


WRITES_HALF = """
import os, pathlib
if os.environ.get("PYTHONHASHSEED", "0") not in ("0", "random"):
    for request in pathlib.Path(__file__).parent.glob("agentrl-check-*/request"):
        request.with_name("answer").write_bytes(bytes([0xdc]))
        pathlib.Path(__file__).with_name("ended").touch()
    os._exit(83)  # as a process that has answered
"""


def test_another_process_that_ends_while_it_answers_is_no_error_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "HASH_SEEDS", check.HASH_SEEDS[:1])  # each is a process
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "half.py").write_text(WRITES_HALF + HASHING)
    report = check_environment(f"{tmp_path / 'half.py'}:Sorting", hash_order=True)
    assert report.passed
    assert "Not compared: 1 of 1 process with other string hashes did not answer." in report.text
    assert (tmp_path / "ended").exists()


def test_an_episode_that_went_by_the_order_of_a_set_does_not_go_on_in_silence(tmp_path: Path) -> None:
    (tmp_path / "hashing.py").write_text(HASHING)
    for name, told in (("Hashing", "the journal holds"), ("Sorting", "")):
        for seed in "12":
            finished = subprocess.run(
                [sys.executable, "-c", RESUMED, f"{tmp_path / 'hashing.py'}:{name}", str(tmp_path / name)],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=False,
            )
        assert (finished.returncode == 1) == bool(told), finished.stderr
        assert told in finished.stderr


class Slow(agentrl.ToolEnvironment):
    """Each call takes longer than the time of the check allows for killing at every entry."""

    calls = 0

    @agentrl.tool
    async def look(self, item: int) -> int:
        """Look at an item."""
        Slow.calls += 1
        await asyncio.sleep(0.01)
        return item

    def prompt(self, task: agentrl.Task) -> str:
        return "Look."

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}{n}", data={"n": f"{split}{n}"}) for n in range(20)]


def test_slow_episodes_are_killed_at_fewer_entries_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = agentrl.check_environment(Slow)
    assert quick.passed
    assert (quick.figures["untried_kills"], quick.figures["unplayed_tasks"]) == (0, 0)
    calls, Slow.calls = Slow.calls, 0
    monkeypatch.setattr(check, "PLAYING_S", 0.0)
    monkeypatch.setattr(check, "FORMAT_S", 0.0)
    report = agentrl.check_environment(Slow)
    assert report.passed, report.text
    assert (report.figures["resumptions"], report.figures["unplayed_tasks"]) == (1, 3)
    assert report.figures["untried_kills"] > 1
    assert Slow.calls < calls / 4
    assert f"{report.figures['untried_kills']} kills and 3 tasks" in report.text
    assert "external=True" in report.text


def test_code_that_blocks_the_loop_is_named_while_it_blocks() -> None:
    heard = threading.Event()

    class Blocks(Adder):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            assert heard.wait(60), "the check names the line while the loop is blocked"
            await super().run(ctx)

    def on_progress(phase: str, part: str) -> None:
        if "test_check_environment.py:" in part and "blocks the event loop" in part:
            heard.set()

    check_environment(Blocks, on_progress=on_progress)
    assert heard.is_set()


class Synchronous(agentrl.HarnessEnvironment):
    """Waits for its own model's reply in the thread that would sample it."""

    seats = ("solver",)
    tries = 0

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        for _ in range(3):
            with contextlib.suppress(Exception):  # as clients do that retry
                return self.ask(task, endpoint)
        raise RuntimeError("no reply")

    def ask(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        type(self).tries += 1
        request = urllib.request.Request(
            f"{endpoint.url}/chat/completions",
            json.dumps({"model": "solver", "messages": [{"role": "user", "content": "1 + 2?"}]}).encode(),
            {"Authorization": f"Bearer {endpoint.key}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=600) as answer:  # the mistake
            return str(answer.read().decode())

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        return 0.0

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}{n}", data={}) for n in range(2)]


def test_a_program_that_waits_for_its_own_model_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "INTERRUPTED_S", 1.0)
    handler = signal.getsignal(signal.SIGUSR2)
    Synchronous.tries = 0
    (finding,) = check_environment(Synchronous).findings
    assert "the event loop has been blocked for 1." in finding
    assert "test_check_environment.py:" in finding
    assert Synchronous.tries == 1, "the client does not retry after the interruption"
    assert signal.getsignal(signal.SIGUSR2) is handler
