"""A sandbox that fails: tried again from the last entry, then the episode is dropped by name; never a reward."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core import clock
from agentrl.core.records import EpisodeSpec, PolicyVersion, SeatBinding
from agentrl.engines.scripted import Script, ScriptedEngine
from agentrl.journal.entries import EffectEntry, EntryBody, SpawnEntry, ToolEntry, TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.testing.execution import PARTITION, plain_rollout_settings, wire_dispatcher
from agentrl.testing.virtual_time import simulate
from tests.replay.executions import digits
from tests.replay.sandboxes import (
    ONCE,
    WAYS,
    Asks,
    Outside,
    Sandbox,
    Scores,
    Swallows,
    Uses,
    UsesAnEffect,
    UsesOutside,
    calls_the_tool_once,
)
from tests.support.builders import make_past, no_lost_group

FOR_EVER = 10_000


class Outcome:
    """What came of an episode that a worker played."""

    def __init__(
        self,
        environment: type[agentrl.Environment],
        *,
        script: Script = digits,
        timeout_s: float = 60.0,
        in_real_time: bool = False,
        **data: Any,
    ) -> None:
        self.journal = MemoryJournal()
        spec = EpisodeSpec(
            episode_id="e0",
            environment=f"{environment.__module__}:{environment.__qualname__}",
            task=agentrl.Task(id="t", data=data),
            seed=7,
            seats={seat: SeatBinding("policy") for seat in environment.seats},
            group_id="g0",
        )

        async def main() -> None:
            engine = ScriptedEngine(script, versions={"policy": PolicyVersion("policy", 0, 0)})
            settings = plain_rollout_settings(episode_timeout_s=timeout_s)
            dispatcher, _ = wire_dispatcher(environment, engine, self.journal, settings, failures, policy="policy")
            self.journal.admit(spec)
            dispatcher.resume(make_past(unfinished=[spec]), no_lost_group)
            await dispatcher.worker.drain()

        failures: list[BaseException] = []
        asyncio.run(main()) if in_real_time else simulate(main, seed=0)
        assert not failures, failures
        (end,) = [end for end in self.journal.of_kind(EpisodeEnd) if end.spec.parent_id is None]
        self.header, self.detail = end.header, end.detail

    @property
    def children(self) -> list[str]:
        return sorted({each for body in self.bodies if isinstance(body, SpawnEntry) for each in body.children})

    @property
    def bodies(self) -> list[EntryBody]:
        entries = self.journal.turn_log(PARTITION).read("e0", self.header.attempt)
        return [entry.decode() for entry in entries]


RETRIED = [(way, environment) for way in WAYS for environment in (Asks, Swallows)]
RETRIED.remove(("program", Swallows))  # what a program raises and catches itself is its own


@pytest.mark.parametrize(("way", "environment"), RETRIED)
def test_a_failure_of_the_infrastructure_is_tried_again_and_leaves_no_trace(
    way: str, environment: type[agentrl.Environment]
) -> None:
    Sandbox.broken(0)
    sound = Outcome(Asks, way=way)
    Sandbox.broken(3)
    played = Outcome(environment, way=way)
    assert (played.header.reward, played.header.stop_reason, played.header.drop_reason) == (4.0, "completed", None)
    assert Sandbox.asked == 4
    assert played.header.attempt == (3 if way == "pinned" else 0)
    assert len(played.bodies) == len(sound.bodies)
    if way != "pinned":
        assert turns(played) == turns(sound)


def turns(outcome: Outcome) -> list[tuple[str, bytes]]:
    return [(str(body.messages), body.tokens.token_ids) for body in outcome.bodies if isinstance(body, TurnEntry)]


@pytest.mark.parametrize(
    ("way", "environment"), [*RETRIED, *((way, environment) for way in ONCE for environment in (Asks, Swallows))]
)
def test_infrastructure_that_never_answers_drops_the_episode_by_name(
    way: str, environment: type[agentrl.Environment]
) -> None:
    Sandbox.broken(FOR_EVER)
    dropped = Outcome(environment, way=way)
    assert dropped.header.drop_reason == ("unknown_outcome_error" if way in ONCE else "infrastructure")
    assert dropped.header.trajectories == ()
    assert ("the sandbox does not answer" in dropped.detail) is (way not in ONCE)
    assert Sandbox.asked == 1 if way in ONCE else 5 < Sandbox.asked < 50


class AsksOften(Asks):
    """Calls twelve tools, each of which fails twice."""

    failed: ClassVar[list[int]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver = ctx.agent("solver")
        await solver.act(agentrl.user("?"))

        def fail_twice(number: int) -> str:
            if self.failed.count(number) < 2:
                self.failed.append(number)
                raise agentrl.InfrastructureError(f"sandbox {number} does not answer")
            return "4"

        for number in range(12):
            await ctx.call_tool("ask", number, partial(fail_twice, number), external=False, timeout_s=None)
        solver.reward(1.0)


def test_an_episode_that_makes_progress_is_not_given_up() -> None:
    AsksOften.failed.clear()
    assert Outcome(AsksOften).header.reward == 1.0
    assert len(AsksOften.failed) == 24


@pytest.mark.parametrize("way", ["effect", "external tool"])
def test_waits_for_infrastructure_do_not_use_the_time_of_the_episode(way: str) -> None:
    Sandbox.broken(5)
    played = Outcome(Asks, way=way, timeout_s=10.0)  # the waits sum to 31 s
    assert (played.header.reward, played.header.stop_reason) == (4.0, "completed")


class AsksInBranches(Asks):
    """Asks its sandbox while another branch acts."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        async def talk() -> None:
            for number in range(4):
                await ctx.agent("solver", 1).act(agentrl.user(str(number)))

        value, _ = await ctx.gather(WAYS[ctx.task.data["way"]](ctx), talk())
        ctx.agent("solver", 1).reward(float(value[0]))


@pytest.mark.parametrize("way", ["effect", "tool", "external tool", "replay", "snapshot"])
def test_other_branches_keep_their_turns(way: str) -> None:
    Sandbox.broken(2)
    played = Outcome(AsksInBranches, way=way)
    assert (played.header.reward, played.header.attempt, played.header.turns) == (4.0, 0, 4)


class Sound(Asks):
    """Asks nobody."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("solver").act(agentrl.user("?"))
        ctx.agent("solver").reward(1.0)


class Parent(Asks):
    """Asks its sandbox while its children play, and after they have ended."""

    fan_out: ClassVar[dict[str, int]] = {"Sound": 2}

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver = ctx.agent("solver")
        await solver.act(agentrl.user("?"))
        children = ctx.spawn(Sound, {"q": 1}, n=2)
        await WAYS["tool"](ctx)
        ended = await ctx.gather(*children)
        await WAYS["replay"](ctx)
        solver.reward(float(sum(child.reward or 0.0 for child in ended)))


def test_children_of_an_episode_that_is_tried_again_are_not_started_twice() -> None:
    Sandbox.broken(2)
    played = Outcome(Parent)
    assert (played.header.reward, played.header.attempt) == (2.0, 0)
    assert sorted(end.spec.episode_id for end in played.journal.of_kind(EpisodeEnd)) == ["e0", *played.children]
    assert len(played.children) == 2


@pytest.mark.parametrize("environment", [Uses, UsesOutside, UsesAnEffect, Scores])
def test_no_policy_sees_that_the_sandbox_of_its_tool_fails(environment: type[agentrl.Environment]) -> None:
    Sandbox.broken(3)
    played = Outcome(environment, script=calls_the_tool_once, question="?")
    assert (played.header.reward, played.header.turns) == (1.0, 2)
    assert {body.outcome for body in played.bodies if isinstance(body, ToolEntry)} == {"ok"}
    assert not [body.error for body in played.bodies if isinstance(body, EffectEntry) and body.error]
    Sandbox.broken(FOR_EVER)
    dropped = Outcome(environment, script=calls_the_tool_once, question="?")
    assert dropped.header.drop_reason == "infrastructure"
    assert "the sandbox does not answer" in dropped.detail


def test_an_agent_from_outside_begins_again_with_the_replies_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FIRST_WAIT_S", 1e-3)
    Outside.attempts = 0
    Sandbox.broken(2)
    played = Outcome(Outside, in_real_time=True)
    assert (played.header.reward, played.header.turns, played.header.attempt) == (4.0, 2, 2)
    assert Outside.attempts == 3
    assert (
        played.header.tokens
        == sum(len(body.tokens.token_ids) for body in played.bodies if isinstance(body, TurnEntry)) / 4
    )


def test_an_agent_from_outside_without_a_sandbox_is_dropped_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FIRST_WAIT_S", 1e-3)
    Sandbox.broken(FOR_EVER)
    dropped = Outcome(Outside, in_real_time=True)
    assert (dropped.header.drop_reason, dropped.header.trajectories) == ("infrastructure", ())
    assert Sandbox.asked < 10
