"""Places in the engine's memory while episodes do what they may: their places are given back whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

import agentrl
from agentrl.core.records import PolicyVersion, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import POLICY, plain_rollout_settings, wire_dispatcher
from agentrl.testing.virtual_time import simulate

pytestmark = pytest.mark.sim
ROOM = 300
"""Tokens: for two contexts of those below, and not for three."""


def ran(environment: type[agentrl.Environment], groups: int) -> list[EpisodeEnd]:
    """How the episodes ended, and that nothing is taken or waited for any more."""

    async def main() -> list[EpisodeEnd]:
        engine = ScriptedEngine(
            lambda *_: [ord("a")] * 9 + [STOP_TOKEN],
            versions={POLICY: PolicyVersion(POLICY, 0, 0)},
            seconds_per_token=1.0,
        )
        engine.capabilities = replace(engine.capabilities, kv_tokens=ROOM, prefill_rate=100.0)
        journal, failures = MemoryJournal(), list[BaseException]()
        dispatcher, _ = wire_dispatcher(environment, engine, journal, plain_rollout_settings(), failures)
        for number in range(groups):
            dispatcher.admit_group(Task(id=f"t{number}", data={}))
        async with asyncio.timeout(10_000):
            await dispatcher.worker.drain()
        assert not failures
        assert (engine.kv_budget.reserved, engine.kv_budget.waiting) == (0, 0)
        return list(journal.of_kind(EpisodeEnd))

    return simulate(main, seed=0)


class Rescued(agentrl.Environment):
    """A branch fails while another one samples, or waits for room; the episode goes on with a third agent."""

    seats = ("first", "second")
    fails_after_s = 0.5

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        first, second = ctx.agent("first"), ctx.agent("second")

        async def fails() -> None:
            await ctx.sleep(self.fails_after_s)
            raise ValueError("a branch fails")

        with suppress(ValueError):
            await ctx.gather(first.act(agentrl.user("x" * 100)), fails())
        await second.act(agentrl.user("y" * 200))
        second.reward(1.0)


@pytest.mark.parametrize("fails_after_s", [0.0, 0.5, 9.0, 11.0, 19.5])
def test_a_call_that_is_cancelled_leaves_its_place(fails_after_s: float) -> None:
    environment = type("Rescued", (Rescued,), {"fails_after_s": fails_after_s, "__module__": __name__})
    ends = ran(environment, groups=5)
    assert [(end.header.committed, end.header.reward) for end in ends] == [(True, 1.0)] * 5
