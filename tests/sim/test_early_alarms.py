"""Failures that a first try often has: after one step the right alarm comes first, with the command that shows it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import EffectError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion, Task
from agentrl.observe.alarms import MEANINGS, Alarm, find_alarms
from agentrl.observe.run_state import RunDisplaySettings, RunState
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for

pytestmark = pytest.mark.sim

FUNCTIONS = Path(__file__).parents[1] / "support" / "score_functions.py"
Script = Callable[[GenerateRequest, str, PolicyVersion], list[int]]


class Shop(agentrl.ToolEnvironment):
    """Look up a price and tell it; the reward differs by chance, so that a healthy policy learns from it."""

    seats = ("guesser",)

    @agentrl.tool
    def price(self, item: int) -> str:
        """The price of an item."""
        return str(item)

    def prompt(self, task: agentrl.Task) -> str:
        return "What is the price?"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(len(episode.turns[-1].text) % 2)


class AlwaysZero(Shop):
    """Nothing earns anything."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 0.0


class OfTheTask(Shop):
    """The reward depends on the task alone."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(int(task.data["digit"]) % 2)


class NotANumber(Shop):
    """A division that went wrong."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float("nan") if len(episode.turns[-1].text) % 4 else 1.0


class BrokenReward(Shop):
    """A key that most tasks lack."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(len(episode.turns[-1].text) % 2) if int(task.data["digit"]) > 4 else float(task.data["answer"])


class BrokenTool(Shop):
    """A tool with a defect."""

    @agentrl.tool
    def price(self, item: int) -> str:
        """The price of an item."""
        raise KeyError(item)


class LongResults(Shop):
    """A tool that says too much."""

    @agentrl.tool
    def price(self, item: int) -> str:
        """The price of an item, with its history."""
        return "1 " * 400


class LongPrompt(Shop):
    """Some prompts exceed the context."""

    def prompt(self, task: agentrl.Task) -> str:
        return "What is the price?" + " please" * (800 if int(task.data["digit"]) < 6 else 1)


class Unseen(agentrl.Environment):
    """The program reads what the policy says in its own way."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        for _ in range(2):
            turn = await guesser.act(agentrl.user("Answer A or B."))
            if turn.text not in ("A", "B"):
                ctx.metric("turns/illegal", 1.0)
        guesser.reward(ctx.rng.random())


class Hangs(agentrl.Environment):
    """A request of the environment's own never returns for some tasks."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        if int(ctx.task.data["digit"]) < 6:
            await ctx.sleep(1e6)
        await guesser.act(agentrl.user("Guess."))
        guesser.reward(ctx.rng.random())


class Waits(agentrl.Environment):
    """Waits without a limit after its turn, for most tasks."""

    seats = ("guesser",)
    truncated_reward = 0.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        await guesser.act(agentrl.user("Guess."))
        if int(ctx.task.data["digit"]) < 8:
            await ctx.sleep(1e6)
        guesser.reward(ctx.rng.random())


class NoReward(Shop):
    """Forgets the reward where the episode is short."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        await guesser.act(agentrl.user("Guess."))
        if ctx.rng.random() > 0.6:
            guesser.reward(ctx.rng.random())


class Alone(agentrl.Environment):
    """Every child is the only one of its kind."""

    seats = ("guesser",)
    fan_out = {"OneTurn": 1}  # noqa: RUF012

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.gather(*ctx.spawn(OneTurn, dict(ctx.task.data), n=1))


class OneTurn(agentrl.Environment):
    """One turn."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Guess."))
        ctx.agent("guesser").reward(ctx.rng.random())


class Graded(OneTurn):
    """A grader that always raises, which the program forgives; its name differs from episode to episode."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("guesser").act(agentrl.user("Guess."))
        try:
            await ctx.effect(f"grade {ctx.rng.randrange(1000)}", lambda: int("x" + turn.text), guarantee="read")
        except EffectError:
            ctx.agent("guesser").reward(ctx.rng.random())


class Refuses:
    """A game that plays nothing."""

    def move(self, text: str) -> float:
        raise ValueError(text)


class Game(OneTurn):
    """A resource that always raises."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        game = ctx.resource(Refuses, level="replay")
        turn = await ctx.agent("guesser").act(agentrl.user("Move."))
        with contextlib.suppress(EffectError):
            await game.call("move", turn.text)
        ctx.agent("guesser").reward(ctx.rng.random())


def call(name: str, arguments: str) -> list[int]:
    return [*f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'.encode(), STOP_TOKEN]


def says(text: str) -> list[int]:
    return [*text.encode(), STOP_TOKEN]


def healthy(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return call("price", '{"item": 1}') if request.seed % 3 == 0 else says("It is 1." + "." * (request.seed % 5))


def always(reply: list[int]) -> Script:
    return lambda request, policy, version: reply if request.seed % 10 else says("It is 1.")


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A run with one failure."""

    alarm: str
    words: str
    """Part of the alarm's text or advice that names the cause."""
    command: str
    environment: type[agentrl.Environment] = Shop
    script: Script = healthy
    changes: Mapping[str, Any] = field(default_factory=dict)


FAILURES = {
    "every reward is 0": Planted(
        alarm="no_signal", words="mean 0.000", command="agentrl episode show", environment=AlwaysZero
    ),
    "the reward depends on the task alone": Planted(
        alarm="no_signal", words="within each group are equal", command="agentrl episode show", environment=OfTheTask
    ),
    "most turns call tools that do not exist": Planted(
        alarm="illegal_output",
        words="a complete call in the prompt",
        command="'metric.tool/unknown_tool > 0'",
        script=always(call("search", "{}")),
    ),
    "most turns call the tool wrongly": Planted(
        alarm="illegal_output",
        words="a complete call in the prompt",
        command="'metric.tool/bad_arguments > 0'",
        script=always(call("price", '{"thing": 1}')),
    ),
    "no turn calls a tool": Planted(
        alarm="unused_tools",
        words="called 0 times",
        command="agentrl episode tokens",
        script=always(says("seven")),
    ),
    "most turns call a tool where none is offered": Planted(
        alarm="illegal_output",
        words="offers no tool",
        command="'metric.tool/not_offered > 0'",
        environment=OneTurn,
        script=always(call("price", "{}")),
    ),
    "most turns are cut": Planted(
        alarm="illegal_output",
        words="raise sampling.max_tokens",
        command="'metric.turns/length > 0'",
        script=always(says("So, let me think about this: " + " ".join(map(str, range(200))))),
    ),
    "most turns repeat themselves": Planted(
        alarm="illegal_output",
        words="repeat themselves",
        command="'metric.turns/length > 0'",
        script=always(says("Well" + " and so on" * 90)),
    ),
    "most turns have another form than the program reads": Planted(
        alarm="illegal_output",
        words="an example of the format",
        command="'metric.turns/illegal > 0'",
        environment=Unseen,
    ),
    "most turns are empty": Planted(
        alarm="empty_output",
        words="chat template",
        command="'metric.turns/empty > 0'",
        script=always([STOP_TOKEN]),
    ),
    "the context is full": Planted(
        alarm="context_full",
        words="raise engine.max_context",
        command="'stop_reason = context_length'",
        environment=LongResults,
        script=always(call("price", '{"item": 1}')),
    ),
    "most episodes wait until the time limit": Planted(
        alarm="out_of_time",
        words="names the line at which one waited",
        command="'stop_reason = time_limit'",
        environment=Waits,
        changes={"episode_timeout_s": 30.0},
    ),
    "a tool always raises": Planted(
        alarm="always_fails",
        words="fix the tool",
        command="'metric.tool/error > 0'",
        environment=BrokenTool,
        script=always(call("price", '{"item": 1}')),
    ),
    "the reward is not a number": Planted(
        alarm="dropped", words="bad_reward", command="'drop_reason = bad_reward'", environment=NotANumber
    ),
    "the reward function raises": Planted(
        alarm="dropped",
        words="environment_error",
        command="'drop_reason = environment_error'",
        environment=BrokenReward,
    ),
    "prompts exceed the context": Planted(
        alarm="dropped",
        words="raise engine.max_context",
        command="'drop_reason = prompt_too_long'",
        environment=LongPrompt,
    ),
    "the environment hangs": Planted(
        alarm="dropped",
        words="where `run()` hangs",
        command="'drop_reason = episode_timeout'",
        environment=Hangs,
        changes={"episode_timeout_s": 30.0},
    ),
    "paths without a reward": Planted(
        alarm="dropped", words="no_reward", command="'drop_reason = no_reward'", environment=NoReward
    ),
    "the judge fails": Planted(
        alarm="dropped",
        words="names the scorer",
        command="'drop_reason = scorer_failed'",
        changes={"scorers": {"judge": {"function": f"{FUNCTIONS}:mostly_down", "per": "episode"}}},
    ),
    "an effect always raises": Planted(
        alarm="always_fails",
        words="effect 'grade …' failed in all of its 16 calls, most often with ValueError",
        command="'metric.effect/error > 0'",
        environment=Graded,
        script=always(says("1")),
    ),
    "a resource always raises": Planted(
        alarm="always_fails",
        words="Refuses.move failed in all of its 16 calls, most often with ValueError: It is 1",
        command="'metric.resource/error > 0'",
        environment=Game,
        script=always(says("It is 1")),
    ),
    "nothing to compare with": Planted(
        alarm="alone", words="n = 2 or more", command="agentrl episode show", environment=Alone
    ),
}


def alarms_after(script: Script, environment: type[agentrl.Environment], steps: int = 1, **changes: Any) -> list[Alarm]:
    async def main() -> list[Alarm]:
        settings = {"steps": steps, "step_size": 16, "max_staleness": 0, "credit": {"group_size": 8}}
        settings |= {"sampling": {"max_tokens": 128, "max_turns": 6}}
        run = SmallRun(
            config=config_for(**{**settings, **changes}),
            environment=environment,
            script=script,
            engine_options={"seconds_per_token": 0.05, "max_context": 2048},
            tasks=[Task(id=f"digit-{digit}", data={"digit": str(digit)}) for digit in range(10)],
        )
        ends: list[Orchestrator] = []
        run.during = ends.append
        await run.run()
        state = RunState(plan=RunDisplaySettings(steps=steps, max_staleness={"guesser": 0}), status=ends[0].status())
        for policy, step, metrics in run.seen.steps:
            state.record(policy, step, metrics)
        assert len(run.seen.steps) == steps
        return find_alarms(state)

    return simulate(main, seed=0)


HEALTHY = [(environment, steps) for environment in (Shop, OneTurn) for steps in (1, 2, 3, 6)]
"""Runs without a failure."""


def found(planted: Planted) -> str:
    """Return the first alarm as a line if it is not the right one; empty: it is."""
    first = next(iter(alarms_after(planted.script, planted.environment, **planted.changes)), None)
    if first is None:
        return "no alarm"
    is_right = first.name == planted.alarm and planted.words in first.line and planted.command in first.advice
    return "" if is_right and first.name in MEANINGS else first.line


def test_a_broken_tool_is_named_with_what_it_raised_and_an_example() -> None:
    broken = FAILURES["a tool always raises"]
    first = alarms_after(broken.script, broken.environment)[0]
    assert re.match(r"tool price failed in all of its \d+ calls, most often with KeyError: 1 at ", first.text), (
        first.text
    )
    assert re.search(r"test_early_alarms.py:\d+ in price$", first.text), first.text
    assert re.search(r"`agentrl episode why run e\d+`", first.advice), first.advice


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named_after_one_step_with_its_likeliest_cause_first(name: str) -> None:
    assert found(FAILURES[name]) == ""


@pytest.mark.parametrize(("environment", "steps"), HEALTHY)
def test_a_healthy_run_raises_no_alarm_at_any_step(environment: type[agentrl.Environment], steps: int) -> None:
    assert alarms_after(healthy, environment, steps) == []


class Wanders(agentrl.Environment):
    """Never ends by itself, and pays for that."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        draw = ctx.rng.random()
        while draw < 0.8 or not guesser.turns:
            await guesser.act(agentrl.user("Go."))
        guesser.reward(ctx.rng.random())


def test_turns_that_run_out_are_named_once_they_do_so_for_long() -> None:
    alarms = alarms_after(healthy, Wanders, steps=5)
    assert [alarm.name for alarm in alarms] == ["out_of_turns"]
    assert alarms_after(healthy, Wanders, steps=4) == []


def test_a_game_of_moves_of_one_token_breaks_no_format() -> None:
    """A limit of one token cuts every reply, and each is a whole move."""
    sampling = {"max_tokens": 1, "max_turns": 6}
    script: Script = lambda request, policy, version: [ord("pb"[request.seed % 2])]  # noqa: E731
    for steps in (1, 6):
        assert alarms_after(script, OneTurn, steps=steps, sampling=sampling) == []


def test_tools_that_the_template_hides_are_named_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainChatFormat, "shows_tools", False)
    (alarm,) = alarms_after(always(says("So, let me think: " + " ".join(map(str, range(200))))), Shop)
    assert alarm.name == "hidden_tools"
    assert alarms_after(healthy, Shop) == [], "the model calls them all the same"
