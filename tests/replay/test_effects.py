"""Effects and resources on re-execution: what is repeated, what is remembered, what ends the episode by name."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.errors import EffectError
from agentrl.journal.entries import EffectEntry, EffectIntentEntry, ResourceCallEntry, ToolEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.replay.executions import Execution, Stage, digits_among_draws, resumed_everywhere, told


class Paying(agentrl.Environment):
    """Pays once, reads, and survives an effect that fails."""

    performed: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        paid = await ctx.effect("pay", self.pay, guarantee="once")
        await agent.act(agentrl.user(f"paid {paid}"))
        try:
            await ctx.effect("fail", self.fail)
        except EffectError as error:
            # A re-execution must see the same error, also its chain.
            chain = error.__cause__, error.__context__
            await agent.act(agentrl.user(f"{error.error_type}: {error} {chain}"))
        agent.reward(1.0)

    def pay(self) -> dict[str, tuple[int, ...]]:
        self.performed.append("pay")
        return {"cents": (1, 2)}

    def fail(self) -> None:
        self.performed.append("fail")
        raise LookupError("no such thing")


def test_effects_come_back_as_they_were_and_are_not_repeated() -> None:
    whole = Stage(environment=Paying).play()
    Paying.performed.clear()
    again = Stage(environment=Paying).play(whole.entries)
    assert again.error is None
    assert again.transcript == whole.transcript
    assert Paying.performed == []
    assert again.engine_calls == 0
    effects = [body for body in whole.bodies.values() if isinstance(body, EffectEntry)]
    assert [effect.error for effect in effects] == [None, "LookupError: no such thing"]
    assert "r#0!" in whole.bodies
    assert isinstance(whole.bodies["r#0!"], EffectIntentEntry)


def test_a_once_effect_without_a_result_ends_the_episode_by_name() -> None:
    whole = Stage(environment=Paying).play()
    intent = next(i for i, entry in enumerate(whole.entries) if entry.call_id == "r#0!")
    Paying.performed.clear()
    again = Stage(environment=Paying).play(whole.entries[: intent + 1])
    assert again.error is not None
    assert again.error.reason == "unknown_outcome_error"
    assert "reconcile" in str(again.error)
    assert Paying.performed == []


class Reconciling(agentrl.Environment):
    """Knows how to ask whether it paid."""

    ledger: ClassVar[list[int]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        paid = await ctx.effect("pay", self.pay, guarantee="once", reconcile=self.asked)
        ctx.agent("agent").reward(float(paid))

    def pay(self) -> int:
        self.ledger.append(5)
        return 5

    async def asked(self) -> tuple[bool, int | None]:
        return (True, self.ledger[-1]) if self.ledger else (False, None)


@pytest.mark.parametrize("happened", [True, False])
def test_reconcile_says_what_happened(happened: bool) -> None:
    whole = Stage(environment=Reconciling).play()
    Reconciling.ledger[:] = [3] if happened else []
    again = Stage(environment=Reconciling).play(whole.entries[:2])
    body = again.bodies["r#0"]
    assert isinstance(body, EffectEntry)
    assert body.value == (3 if happened else 5)
    assert Reconciling.ledger == [3 if happened else 5]


class Sending(agentrl.ToolEnvironment):
    """An external tool that must not be called twice."""

    sent: ClassVar[list[str]] = []

    @agentrl.tool(external=True, guarantee="once")
    async def send(self, text: str) -> str:
        """Send a text."""
        self.sent.append(text)
        return "sent"

    def prompt(self, task: agentrl.Task) -> str:
        return "?"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return 1.0


def test_a_once_tool_leaves_its_intent() -> None:
    call = b'<tool_call>{"name": "send", "arguments": {"text": "hi"}}</tool_call>'

    def script(request: Any, policy: str, version: Any) -> list[int]:
        return [*(b"ok" if b"tool\nsent" in told(request) else call), STOP_TOKEN]

    stage = Stage(environment=Sending, script=script)
    whole = stage.play()
    assert [type(body).__name__ for body in whole.bodies.values()][:4] == [
        "BeginEntry",
        "TurnEntry",
        "EffectIntentEntry",
        "ToolEntry",
    ]
    assert stage.play(whole.entries[:4]).transcript == whole.transcript
    again = stage.play(whole.entries[:3])
    assert again.error is not None
    assert again.error.reason == "unknown_outcome_error"
    assert Sending.sent == ["hi"]


class Nesting(agentrl.Environment):
    """Uses the context inside an effect."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        async def nested() -> str:
            return (await ctx.agent("agent").act(agentrl.user("inside"))).text

        await ctx.effect("nested", nested)


def test_an_effect_that_uses_the_context_is_refused() -> None:
    execution = Stage(environment=Nesting).play()
    assert execution.error is not None
    assert execution.error.reason == "unstructured_concurrency"
    assert "inside the effect 'nested'" in str(execution.error)


class Counter:
    """A stateful object; it draws from the global generators, and can be asked for what it is."""

    def __init__(self) -> None:
        self.log: list[float] = [random.random()]
        self.applied = 0

    def add(self, value: int) -> list[float]:
        self.applied += 1
        if value < 0:
            raise ValueError(f"negative: {value}")
        self.log.append(value + random.random() + float(np.random.random()))
        return self.log[-1:]

    async def later(self, value: int) -> tuple[float, ...]:

        self.applied += 1
        first = random.random()
        await asyncio.sleep(1.0)
        self.log.append(value + first + random.random())
        return (self.log[-1],)

    def array(self) -> Any:
        return np.zeros(3)

    def strange(self) -> object:
        return object()

    def get_state(self) -> dict[str, Any]:
        return {"log": list(self.log)}

    def set_state(self, state: dict[str, Any]) -> None:
        self.log = list(state["log"])


class Counting(agentrl.Environment):
    """Uses a counter at a level the task names."""

    made: ClassVar[list[Counter]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        def make() -> Counter:
            self.made.append(Counter())
            return self.made[-1]

        counter = ctx.resource(make, level=ctx.task.data["level"])
        agent = ctx.agent("agent")
        total = 0.0
        for value in (1, 2, -3, 4):
            try:
                total += sum(await counter.call("add", value))
            except EffectError as error:
                await agent.act(agentrl.user(f"{error} {(error.__cause__, error.__context__)}"))
            total += sum(await counter.call("later", value))
            await agent.act(agentrl.user(f"{total:.12f}"))
        agent.reward(total)


def played(level: str) -> tuple[list[Execution], list[Counter]]:
    Counting.made.clear()
    return resumed_everywhere(Stage(environment=Counting, data={"level": level}, script=digits_among_draws)), list(
        Counting.made
    )


@pytest.mark.parametrize("level", ["replay", "snapshot"])
def test_a_resource_comes_back_from_every_prefix(level: str) -> None:
    random.seed(1)
    (whole, *resumed), counters = played(level)
    for again in resumed:
        random.seed(2)
        assert again.error is None
        assert again.transcript == whole.transcript
    last = max(i for i, entry in enumerate(whole.entries) if isinstance(entry.decode(), ResourceCallEntry))
    assert all(counter.log == counters[0].log for counter in counters[: last + 1])
    assert counters[0].applied == 8
    assert (counters[-1].applied == 8) is (level == "replay")


def test_the_states_of_a_snapshot_are_recorded_once_each() -> None:
    (whole, *_), _ = played("snapshot")
    calls = [body for body in whole.bodies.values() if isinstance(body, ResourceCallEntry)]
    assert [call.state is None for call in calls] == [False, False, False, False, True, False, False, False]
    assert [call.arguments for call in calls][:2] == [[1], [1]]


def test_a_pinned_resource_is_lost_with_its_process() -> None:
    (whole, *resumed), _ = played("pinned")
    first = next(i for i, entry in enumerate(whole.entries) if isinstance(entry.decode(), ResourceCallEntry))
    assert all(again.error is None for again in resumed[:first])
    for again in resumed[first:]:
        assert again.error is not None
        assert again.error.reason == "resource_lost"
        assert again.error.begin_again


class Strange(Counting):
    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        counter = ctx.resource(Counter, level="replay")
        assert await counter.call("array") == [0.0, 0.0, 0.0], "as after a replay"
        await counter.call("strange")


def test_what_cannot_be_journaled_is_said() -> None:
    execution = Stage(environment=Strange).play()
    assert execution.error is not None
    assert "strange returned object, which cannot be journaled" in str(execution.error)


class Hidden(agentrl.Environment):
    """A resource without get_state that says it is a snapshot."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.resource(list, level="snapshot")


class Undefined(agentrl.Environment):
    """A resource that computes NaN, the same each time."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        score = await ctx.resource(lambda: {"score": math.nan}, level="replay").call("copy")
        assert math.isnan(score["score"])


def test_nan_is_the_same_result_when_it_is_computed_again() -> None:
    stage = Stage(environment=Undefined)
    whole = stage.play()
    again = stage.play(whole.entries)
    assert whole.error is None
    assert again.error is None


def test_a_snapshot_needs_its_methods() -> None:
    with pytest.raises(agentrl.AgentRLError, match="list is a snapshot resource and needs get_state"):
        Stage(environment=Hidden).play()


def test_a_tool_entry_names_the_arguments() -> None:
    huge = 1 << 80
    from agentrl.rollout.calls.journal_data import to_journal_data

    assert to_journal_data({"n": huge}) == str({"n": huge})
    assert (
        ToolEntry("t", to_journal_data({"n": huge}), "", "ok", False, 0.0).arguments
        == "{'n': 1208925819614629174706176}"
    )
