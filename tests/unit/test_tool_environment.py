"""Tools: the policy's mistakes become observations, the author's become errors that say where."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import time
from pathlib import Path
from typing import Any, Literal

import pytest

import agentrl
from agentrl.core.errors import EnvironmentDefinitionError, describe_raise_location
from agentrl.core.records import ToolSpec
from agentrl.environment.registry import resolve
from agentrl.environment.tools import bind_tools
from agentrl.journal.entries import ToolEntry, TurnEntry
from agentrl.observe.metrics import broken_turns
from tests.unit.episodes import Played, play


class Desk(agentrl.ToolEnvironment):
    """A desk with tools of every kind."""

    def __init__(self) -> None:
        self.used: list[str] = []

    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-"], b: int = 1) -> int:
        """Add or subtract.

        Only the first paragraph is told to the policy.
        """
        return a + b if op == "+" else a - b

    @agentrl.tool
    async def look_up(self, words: list[str]) -> dict[str, int]:
        """Count letters."""
        await asyncio.sleep(0)
        return {word: len(word) for word in words}

    @agentrl.tool
    def fail(self) -> str:
        """Always raises."""
        raise KeyError("nothing here")

    @agentrl.tool
    def recurse(self) -> int:
        """Never ends."""
        return self.recurse() + 1

    @agentrl.tool
    def run_out(self) -> str:
        """Asks for more memory than there is."""
        return str(bytearray(1 << 60))

    @agentrl.tool(timeout_s=0.01)
    async def hang(self) -> str:
        """Never returns."""
        await asyncio.get_running_loop().create_future()
        return "never"

    @agentrl.tool(external=True)
    def outside(self) -> str:
        """Acts outside, in a thread."""
        self.used.append("outside")
        return "done outside"

    @agentrl.tool
    def unserializable(self) -> object:
        """Returns what no policy can read."""
        return object()

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0 if episode.answer == "42" else 0.0


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def observed(played: Played) -> list[tuple[str, str]]:
    return [(entry.outcome, entry.observation) for entry in played.entries if isinstance(entry, ToolEntry)]


def test_tools_of_every_kind_answer() -> None:
    replies = [call("calculate", a=40, op="+", b=2), call("look_up", words=["ab", "c"]), call("outside"), "42"]
    played = play(Desk, replies)
    assert observed(played) == [("ok", "42"), ("ok", '{"ab":2,"c":1}'), ("ok", "done outside")]
    assert played.header.reward == 1.0
    assert played.header.turns == 4
    assert played.header.stop_reason == "completed"


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (call("calculate", a="forty", op="+", b=2), "a: Input should be a valid integer"),
        (call("calculate", a=1, op="*", b=2), "op: Input should be '+' or '-'"),
        (call("calculate", a=1), "op: Field required"),
        (call("calculate", a=1, op="+", c=2), "c: Extra inputs are not permitted"),
        (call("calculator", a=1, op="+"), "no tool 'calculator'; tools: calculate, fail"),
        ('<tool_call>{"name": "calculate", "arguments": [1, 2]}</tool_call>', "not a JSON object"),
        (call("calculate"), "error: a, op: Field required"),
        ("<tool_call>{oops</tool_call>", "error: the call cannot be read"),
        ("<tool_call>gu</tool_call>", "error: the call cannot be read; write a complete call, with its arguments as"),
        (call("fail"), "KeyError: 'nothing here'"),
        (call("recurse"), "RecursionError: maximum recursion depth exceeded"),
        (call("run_out"), "MemoryError"),
        (call("hang"), "timed out after 0.01 s"),
    ],
)
def test_the_policys_mistakes_are_observations(reply: str, words: str) -> None:
    played = play(Desk, [reply, "42"])
    [(_, observation)] = observed(played)
    assert words in observation
    assert played.header.reward == 1.0


def test_the_journal_says_where_a_tool_raised_and_the_policy_does_not_see_it() -> None:
    played = play(Desk, [call("fail"), call("calculate", a=1, op="+"), "42"])
    failed, succeeded = (entry for entry in played.entries if isinstance(entry, ToolEntry))
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ in fail", failed.location)
    assert __file__ not in failed.observation
    assert __file__ not in played.told
    assert succeeded.location == ""


def test_an_error_of_a_library_is_located_in_the_code_that_called_it() -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads("{")
    assert re.fullmatch(rf" at {re.escape(__file__)}:\d+ in test_\w+", describe_raise_location(raised.value))


def test_an_error_of_an_installed_environment_is_located_in_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "installed_games"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from installed_games.play import Game\n")
    (package / "play.py").write_text("import json\nclass Game:\n    def run(self):\n        json.loads('{')\n")
    monkeypatch.syspath_prepend(str(package.parent))
    game = importlib.import_module("installed_games").Game
    with pytest.raises(json.JSONDecodeError) as raised:
        game().run()
    assert describe_raise_location(raised.value, game) == f" at {package}/play.py:4 in run"
    assert str(package) not in describe_raise_location(raised.value, Desk)


def test_several_calls_in_one_turn_are_answered_in_order() -> None:
    played = play(Desk, [call("calculate", a=1, op="+") + call("calculate", a=5, op="-"), "42"])
    assert observed(played) == [("ok", "2"), ("ok", "4")]


def test_a_result_that_is_no_json_drops_the_episode_and_says_where() -> None:
    played = play(Desk, [call("unserializable")])
    assert played.header.drop_reason == "environment_error"
    assert "Desk.unserializable returned object" in played.said


def test_turns_run_out() -> None:
    played = play(Desk, [call("calculate", a=1, op="+")] * 3, max_turns=3)
    assert played.header.stop_reason == "max_turns"
    assert played.header.reward == 0.0, "reward() still judges what there is"


def test_context_runs_out() -> None:
    replies = [call("calculate", a=1, op="+")] * 5
    free = [entry for entry in play(Desk, [*replies, "42"]).entries if isinstance(entry, TurnEntry)]
    third = free[2].parent_context + len(free[2].context_ids) // 4

    played = play(Desk, replies, max_context=third)
    assert played.header.turns == 2
    assert played.header.stop_reason == "context_length"
    assert played.header.committed


class Blocking(Desk):
    @agentrl.tool(external=True, timeout_s=0.05)
    def outside(self) -> str:
        """Blocks a thread."""
        time.sleep(0.3)
        return "late"


def test_a_blocking_external_tool_times_out() -> None:
    told = "error: timed out after 0.05 s (its @tool(timeout_s=…))"
    assert observed(play(Blocking, [call("outside"), "42"])) == [("timeout", told)]


class Delegating(Desk):
    @agentrl.tool(external=True)
    def outside(self) -> Any:
        """Returns what has to be awaited."""
        return self.later()

    async def later(self) -> str:
        return "done later"

    @agentrl.tool(external=True, timeout_s=30.0)
    def first(self) -> str:
        """Finds none."""
        return next(text for text in list[str]())


def test_an_external_tool_may_return_an_awaitable_or_raise_what_no_future_holds() -> None:
    said = observed(play(Delegating, [call("outside"), call("first"), "42"]))
    assert said == [("ok", "done later"), ("error", "error: RuntimeError: StopIteration")]


class Waiting(Desk):
    @agentrl.tool
    async def wait(self) -> str:
        """Wait longer than tools may."""
        await asyncio.Event().wait()
        return "never"

    @agentrl.tool(timeout_s=20.0)
    async def ask(self) -> str:
        """Raises what a socket raises, long before any limit of the tool."""
        raise TimeoutError("the other side is slow")


def test_a_timeout_names_the_setting_that_bounds_it_and_a_tools_own_is_none() -> None:
    said = observed(play(Waiting, [call("wait"), call("ask"), "42"], tool_timeout_s=0.05))
    assert said == [
        ("timeout", "error: timed out after 0.05 s (its @tool(timeout_s=…))"),
        ("error", "error: TimeoutError: the other side is slow"),
    ]


@pytest.mark.parametrize(("timeout_s", "told"), [(5.0, "external=True"), (0.0, "number")])
def test_a_limit_that_could_not_hold_is_refused(timeout_s: float, told: str) -> None:
    with pytest.raises(EnvironmentDefinitionError, match=f"plain.*timeout_s.*{told}"):

        class Plain(Desk):
            @agentrl.tool(timeout_s=timeout_s)
            def plain(self) -> str:
                """Runs in the event loop."""
                return "done"


class Oracle(Desk):
    """A tool that reads its task."""

    @agentrl.tool
    def reveal(self) -> str:
        """Tell the id of the task."""
        return self.task.id


def test_a_tool_reads_the_task_of_its_episode() -> None:
    assert observed(play(Oracle, [call("reveal"), "42"])) == [("ok", "t")]

    class Hiding(Desk):
        @agentrl.tool
        def task(self) -> str:
            """Hides it."""
            return ""

    with pytest.raises(EnvironmentDefinitionError, match="another name"):
        Hiding.tool_table()


class Shelf(Desk):
    """Tools over a resource and an effect, which raise."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx, self.shelf = ctx, ctx.resource(list, level="replay")
        await super().run(ctx)

    @agentrl.tool
    async def take(self, number: int) -> str:
        """Take something."""
        return str(await self.shelf.call("pop", number))

    @agentrl.tool
    async def order(self, item: str) -> str:
        """Order something."""
        return str(await self.ctx.effect("order", lambda: {}[item]))


def test_what_a_resource_or_an_effect_of_a_tool_raises_is_the_policys_to_handle() -> None:
    played = play(Shelf, [call("take", number=1), call("order", item="pen"), "42"])
    assert observed(played) == [
        ("error", "error: IndexError: pop from empty list"),
        ("error", "error: KeyError: 'pen'"),
    ]
    assert played.header.reward == 1.0


def test_sampled_tokens_are_journaled_as_they_came() -> None:
    played = play(Desk, [call("calculate", a=1, op="+"), "42"])
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    assert [turn.finish_reason for turn in turns] == ["stop", "stop"]
    assert turns[1].parent_context == (len(turns[0].context_ids) + len(turns[0].tokens.token_ids)) // 4


def test_specs_tell_the_schema_and_the_first_paragraph() -> None:
    spec = bind_tools(Desk)["calculate"].spec
    assert spec.description == "Add or subtract."
    assert spec.parameters["required"] == ["a", "op"]
    assert spec.parameters["properties"]["op"] == {"enum": ["+", "-"], "type": "string"}


class Variadic(Desk):
    @agentrl.tool
    def many(self, *numbers: int) -> int:
        """Sum."""
        return sum(numbers)


def test_a_tool_without_a_schema_is_refused_by_name() -> None:
    with pytest.raises(EnvironmentDefinitionError, match="numbers"):
        bind_tools(Variadic)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "1", [1.0], 1j])
def test_a_reward_that_is_no_finite_number_drops_the_episode(value: object) -> None:
    class Judge(Desk):
        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return value  # type: ignore[return-value]

    played = play(Judge, ["42"])
    assert played.header.drop_reason == "bad_reward"
    assert "reward" in played.said


@pytest.mark.parametrize("value", [True, 1, 0.5])
def test_numbers_are_rewards(value: float) -> None:
    class Judge(Desk):
        def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
            return value

    assert play(Judge, ["42"]).header.reward == float(value)


class Hostile(Desk):
    @agentrl.tool
    def fail(self) -> str:
        """Raises what a file name can bring."""
        raise ValueError("bad file \udc80")

    @agentrl.tool
    def huge(self) -> str:
        """Says more than any context holds."""
        return "x" * 3_000_000

    @agentrl.tool
    def surrogate(self) -> str:
        """Returns half a character."""
        return "\ud800abc"


@pytest.mark.parametrize("name", ["fail", "surrogate"])
def test_half_characters_are_observations(name: str) -> None:
    [(_, observation)] = observed(play(Hostile, [call(name), "42"]))
    assert "?" in observation


def test_an_observation_longer_than_any_context_ends_the_episode_as_truncated() -> None:
    played = play(Hostile, [call("huge")])
    assert played.header.stop_reason == "context_length"


def test_a_number_no_journal_can_hold_does_not_void_the_episode() -> None:
    played = play(
        Desk, ['<tool_call>{"name": "calculate", "arguments": {"a": 1' + "0" * 30 + ', "op": "+"}}</tool_call>', "42"]
    )
    assert played.header.committed
    assert played.header.reward == 1.0


class Surrogate(agentrl.Environment):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        raise OSError("bad file \udc80")


def test_half_a_character_in_an_error_drops_one_episode() -> None:
    assert play(Surrogate, []).header.drop_reason == "environment_error"


class Rows(agentrl.ToolEnvironment):
    """Asks the task's question."""

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def test_a_question_may_be_messages() -> None:
    question = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    played = play(Rows, ["2"], data={"question": question})
    [turn] = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    assert [(message["role"], message["content"]) for message in turn.messages] == [
        ("system", "Be brief."),
        ("user", "1 + 1?"),
    ]


@pytest.mark.parametrize("question", [None, True, {"text": "1 + 1?"}, ["1 + 1?"], [{"role": "user", "content": [{}]}]])
def test_a_question_that_is_no_text_is_refused(question: object) -> None:
    with pytest.raises(EnvironmentDefinitionError, match="task 't': question: messages"):
        play(Rows, ["2"], data={"question": question})


class NoTools(agentrl.Environment):
    """Reads an answer and judges its form; offers no tool."""

    offered: tuple[ToolSpec, ...] = ()

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent", tools=self.offered)
        for _ in range(3):
            turn = await agent.act(agentrl.user("A or B?"))
            if turn.text not in ("A", "B"):
                ctx.metric("turns/illegal", 1.0)
        agent.reward(0.0)


def test_a_call_where_no_tool_is_offered_breaks_the_format_once() -> None:
    calls = ['<tool_call>{"name": "add", "arguments": {}}</tool_call>', '<tool_call>{"name": </tool_call>', "A"]
    found = play(NoTools, calls)
    assert (found.metrics["tool/not_offered"], found.metrics["turns/illegal"]) == (2.0, 2.0)
    assert broken_turns(found.metrics) == 2.0
    assert broken_turns({"tool/not_offered": 2.0, "turns/length": 1.0}) == 3.0
    assert "tool/not_offered" not in play(NoTools, ["A", 'a <tool> {"name": "add"}', "{}"]).metrics
    offering = type("Offering", (NoTools,), {"offered": (bind_tools(Desk)["calculate"].spec,)})
    assert "tool/not_offered" not in play(offering, calls).metrics


class Marked(agentrl.Environment):
    """A tool that nothing offers."""

    @agentrl.tool
    def calculate(self, a: int) -> int:
        """Add nothing."""
        return a

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = await self.converse(ctx)
        agent.reward(0.0)

    async def converse(self, ctx: agentrl.EpisodeContext) -> agentrl.Agent:
        agent = ctx.agent("agent")
        await agent.act(agentrl.user("Add."))
        return agent


class OwnRun(Desk):
    """A `run` of its own, without the inherited tools."""

    run = Marked.run
    converse = Marked.converse


def test_a_class_may_leave_inherited_tools_out() -> None:
    resolve(OwnRun)


def test_tools_that_no_seat_is_offered_are_refused() -> None:
    words = "calculate: tools that are offered to no seat: subclass ToolEnvironment, or pass tools= to ctx.agent"
    with pytest.raises(EnvironmentDefinitionError, match=words):
        resolve(Marked)
    assert words in agentrl.check_environment(Marked).text


def offer(ctx: agentrl.EpisodeContext, seat: str) -> agentrl.Agent:
    return ctx.agent(seat, tools=[bind_tools(Marked)["calculate"].spec])


class OffersByFunction(Marked):
    """A function of the module offers the tools."""

    async def converse(self, ctx: agentrl.EpisodeContext) -> agentrl.Agent:
        return offer(ctx, "agent")


class OffersByMapping(Marked):
    """The tools are an argument by name."""

    async def converse(self, ctx: agentrl.EpisodeContext) -> agentrl.Agent:
        given = {"tools": [bind_tools(Marked)["calculate"].spec]}
        return ctx.agent("agent", **given)


class OffersByBase(OffersByFunction):
    """The base class offers the tools."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)


class AfterTools(Desk):
    """Another seat acts after the conversation with tools."""

    seats = ("agent", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        ctx.agent("judge").reward(0.0)


@pytest.mark.parametrize("environment", [OffersByFunction, OffersByMapping, OffersByBase, AfterTools])
def test_a_class_may_offer_its_tools_itself(environment: type[agentrl.Environment]) -> None:
    assert resolve(environment) is environment
