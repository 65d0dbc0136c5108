"""A recorded run, and environments that differ from its own, for tests and figures of `agentrl run whatif`."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import agentrl
from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.app.whatif import newest_evaluation, whatif
from agentrl.config.run import RunConfig
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.inspection.reader import RunReader
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.recording_trainer import RecordingTrainer

if TYPE_CHECKING:
    from agentrl.config.plans import EnginePlan, TrainerPlan
    from agentrl.core.clock import Clock
    from agentrl.core.ports import Engine, Trainer
    from agentrl.inspection.comparisons import WhatIfResult

HINT = "it is a large one"
ASKS, KNOWS = 0.1, 0.9
"""Probability that the policy asks a tool, and that it answers with a large digit after a hint; otherwise that is ½."""
EFFECT = ASKS * (KNOWS - 0.5)
"""What the hint adds to the mean reward."""


def numbered(split: str, count: int) -> list[Task]:
    """The tasks of a split."""
    return [Task(id=f"{split}-{number}", data={"number": number}) for number in range(count)]


class Shop(agentrl.ToolEnvironment):
    """Guess whether the price is a large digit. A tool that one episode in ten calls says nothing about it."""

    answer: ClassVar[str] = "nobody knows"
    worth: ClassVar[float] = 1.0

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[Task]:
        return numbered(split, 64)

    def prompt(self, task: Task) -> str:
        return f"Price {task.data['number']}?"

    @agentrl.tool
    def ask(self) -> str:
        """Ask for a hint."""
        return self.answer

    def reward(self, task: Task, episode: agentrl.ToolEpisode) -> float:
        return self.worth * float("5" <= episode.answer <= "9")


class Hinting(Shop):
    """The tool's text has changed."""

    answer = HINT


class Dear(Shop):
    """The reward has changed."""

    worth = 3.0


class Polite(Shop):
    """The prompt has changed."""

    def prompt(self, task: Task) -> str:
        return f"Please: {super().prompt(task)}"


class Failing(Shop):
    """The reward fails where the tool was called."""

    def reward(self, task: Task, episode: agentrl.ToolEpisode) -> float:
        if any(message.role == "tool" for message in episode.messages):
            raise ValueError("no reward after a hint")
        return super().reward(task, episode)


class OneQuestion(agentrl.Environment):
    """Asks once, and gives no reward to what is no digit."""

    questions: ClassVar[int] = 1

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[Task]:
        return numbered(split, 64)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        buyer, price = ctx.agent("agent"), ""
        for _ in range(self.questions):
            price = (await buyer.act(agentrl.user("Price?"))).text
            if price.isdigit():
                buyer.reward(float(price >= "5"))
                return


class TwoQuestions(OneQuestion):
    """Asks again."""

    questions = 2


class Duel(agentrl.Environment):
    """Two buyers, one after the other; the second one's question may change."""

    seats = ("first", "second")
    question: ClassVar[str] = "Price?"

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[Task]:
        return numbered(split, 64)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        first = await ctx.agent("first").act(agentrl.user("Price?"))
        ctx.agent("first").reward(float(first.text >= "5"))
        second = await ctx.agent("second").act(agentrl.user(self.question))
        ctx.agent("second").reward(float(second.text >= "5"))


class PoliteDuel(Duel):
    """The second question has changed."""

    question = "Price, please?"


class Reserved(Duel):
    """The second buyer is not asked any more."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        first = await ctx.agent("first").act(agentrl.user("Price?"))
        ctx.agent("first").reward(float(first.text >= "5"))
        ctx.agent("second").reward(0.0)


class Idle(agentrl.Environment):
    """Some tasks ask nobody anything; the price is looked up outside."""

    price: ClassVar[str] = "seven"

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> list[Task]:
        return numbered(split, 64)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        price = await ctx.effect("look up", self.look_up)
        if ctx.task.data["number"] % 4:
            turn = await ctx.agent("agent").act(agentrl.user(f"Is it {price}?"))
            ctx.agent("agent").reward(float(turn.text >= "5"))

    def look_up(self) -> str:
        return self.price


class OtherPrice(Idle):
    """The effect has changed, which the record hides."""

    price = "eight"


def reply(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """Ask the tool now and then, or answer with a digit, depending on the request's seed."""
    draw = random.Random(request.seed)
    context = bytes(token for token in request.token_ids.tolist() if token < 256).decode()
    if "tool\n" not in context and draw.random() < ASKS:
        text = '<tool_call>{"name": "ask", "arguments": {}}</tool_call>'
    else:
        is_large = draw.random() < (KNOWS if HINT in context else 0.5)
        text = str(draw.randrange(5, 10) if is_large else draw.randrange(5))
    return [*text.encode(), STOP_TOKEN]


def factories() -> RunFactories:
    """Make the script's engine, and a trainer that learns nothing."""

    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], tell: object, log: Path) -> Engine:
        return ScriptedEngine(reply, versions=versions)

    def trainer(plan: TrainerPlan, directory: Path) -> Trainer:
        return RecordingTrainer(
            list(plan.policies), clock=clock(), step_seconds=0.0, publish_seconds=0.0, versions=directory / "versions"
        )

    return RunFactories(engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat())


def clock() -> Clock:
    """The clock of a run."""
    return RunFactories().clock


def record(directory: Path, *, tasks: int, seed: int = 0, environment: type[agentrl.Environment] = Shop) -> Path:
    """Write a run of one step with an evaluation; returns its directory."""
    values: dict[str, Any] = {
        "name": f"{environment.__name__}-{seed}",
        "directory": str(directory),
        "seed": seed,
        "steps": 1,
        "environment": {"id": name_of(environment)},
        "model": {"path": "a script"},
        "policies": {"buyer": {"step_size": 4, "max_staleness": 0}},
        "seats": dict.fromkeys(environment.seats, "buyer"),
        "credit": {"group_size": 4},
        "checkpoint": {"versions": 0},
        "evaluation": {"tasks": tasks},
        "engine": {"max_context": 4096},
    }
    config = RunConfig.model_validate(values)
    held_out = numbered("held-out", tasks)
    run = asyncio.run(run_training(config, environment, held_out=held_out, quiet=True, factories=factories()))
    return Path(run.path)


def judged(run: Path, environment: type[agentrl.Environment]) -> WhatIfResult:
    """What a changed class makes of the newest evaluation."""
    with contextlib.closing(RunReader(run)) as reader:
        episodes = newest_evaluation(reader)
    return whatif(run, episodes, environment=environment, factories=factories())


def rewards(run: Path) -> list[float]:
    """The rewards of the newest evaluation."""
    with contextlib.closing(RunReader(run)) as reader:
        lines = reader.lines([(name, attempt or 0) for name, attempt in newest_evaluation(reader)])
    return [line.reward or 0.0 for line in lines]
