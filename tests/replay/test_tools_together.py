"""Asynchronous tools of one message run together, and a resume finds them as they were."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.engines.scripted import Script
from agentrl.journal.entries import NondeterministicValueEntry, ToolEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from tests.replay.executions import Stage, resumed_everywhere, told


def written(*calls: str) -> str:
    """Calls, each a name and an argument `n` or none."""
    parts = (call.partition(" ") for call in calls)
    texts = (f'{{"name":"{name}","arguments":{{"n":{n}}}}}' if n else f'{{"name":"{name}"}}' for name, _, n in parts)
    return "".join(f"<tool_call>{text}</tool_call>" for text in texts)


def saying(*replies: str) -> Script:
    """A policy that says these replies in turn."""

    def script(request: Any, policy: str, version: Any) -> list[int]:
        calls = replies[0].count("<tool_call>")
        return [*replies[told(request).count(b"<tool_call>") // calls].encode(), STOP_TOKEN]

    return script


class Bench(agentrl.ToolEnvironment):
    """Tools that take turns in virtual time."""

    log: ClassVar[list[str]] = []
    """What happened in any execution, also outside `self`."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        self.ctx = ctx
        self.order: list[str] = []
        self.log.clear()
        await super().run(ctx)

    async def _wait(self, name: str, seconds: float) -> str:
        """Note begin and end on `self`, so that the answers depend on how the tools interleave."""
        self.order.append(f"{name} begins")
        self.log.append(f"{name} begins")
        before = ", ".join(self.order)
        await self.ctx.sleep(seconds)
        self.order.append(f"{name} ends")
        self.log.append(f"{name} ends")
        return f"{before}; {', '.join(self.order)}"

    @agentrl.tool
    async def slow(self) -> str:
        """Take long."""
        return await self._wait("slow", 9.0)

    @agentrl.tool
    async def quick(self, n: int = 0) -> str:
        """Take a moment."""
        return await self._wait(f"quick {n}", 1.0 + n)

    @agentrl.tool
    def plain(self) -> str:
        """Answer at once."""
        self.order.append("plain")
        self.log.append("plain")
        return ", ".join(self.order)

    @agentrl.tool(external=True)
    async def fetch(self, n: int) -> str:
        """Ask someone else."""
        self.log.append(f"fetch {n} begins")
        await asyncio.sleep(5.0 - n)
        self.log.append(f"fetch {n} ends")
        return f"page {n}"

    def prompt(self, task: agentrl.Task) -> str:
        return "Go."

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(len(self.order))


TOGETHER = written("slow", "quick", "quick 2")
MIXED = written("fetch 1", "plain", "quick", "nothing", "fetch 3")


def answers(execution: Any) -> list[str]:
    """The tool messages of the second turn, in the order in which the policy sees them."""
    turns = [body for body in execution.bodies.values() if isinstance(body, TurnEntry)]
    return [message["content"] for message in turns[1].messages if message["role"] == "tool"]


def test_asynchronous_tools_of_a_message_overlap_and_answer_in_its_order() -> None:
    played = Stage(environment=Bench, script=saying(TOGETHER, "done")).play()
    begun = "slow begins, quick 0 begins, quick 2 begins"
    assert Bench.log == [*begun.split(", "), "quick 0 ends", "quick 2 ends", "slow ends"]
    assert [answer.partition(";")[0] for answer in answers(played)] == ["slow begins", begun[:27], begun]
    assert played.header is not None
    assert played.header.reward == 6.0


def test_others_run_first_and_one_after_another() -> None:
    played = Stage(environment=Bench, script=saying(MIXED, "done")).play()
    assert Bench.log[0] == "plain"
    assert set(Bench.log[1:4]) == {"fetch 1 begins", "quick 0 begins", "fetch 3 begins"}
    assert Bench.log[4:] == ["quick 0 ends", "fetch 3 ends", "fetch 1 ends"]
    first, plain, quick, nothing, last = answers(played)
    assert (first, plain, last) == ("page 1", "plain", "page 3")
    assert quick == "plain, quick 0 begins; plain, quick 0 begins, quick 0 ends"
    assert nothing.startswith("error: no tool 'nothing'")


def test_a_single_asynchronous_tool_needs_no_branches() -> None:
    played = Stage(environment=Bench, script=saying(written("slow", "plain"), "done")).play()
    assert Bench.log == ["slow begins", "slow ends", "plain"]
    assert not any(
        isinstance(body, NondeterministicValueEntry) and body.kind == "gather" for body in played.bodies.values()
    )


@pytest.mark.parametrize("calls", [TOGETHER, MIXED])
@pytest.mark.parametrize("seed", range(3))
def test_every_prefix_of_the_journal_is_resumed_to_the_same_episode(calls: str, seed: int) -> None:
    """The tools write on `self` when they begin and when they end, so another interleaving would be a mismatch."""
    stage = Stage(environment=Bench, script=saying(calls, calls, "done"))
    whole, *resumed = resumed_everywhere(stage, seed=seed)
    assert whole.error is None
    assert sum(isinstance(body, ToolEntry) for body in whole.bodies.values()) == 2 * calls.count("<tool_call>")
    assert len(resumed) > len(whole.entries) / 2
    for execution in resumed:
        assert execution.error is None, execution.error
        assert execution.header is not None
        assert execution.header.reward == whole.header.reward  # type: ignore[union-attr]
        assert answers(execution) == answers(whole)
        assert execution.transcript == whole.transcript


def test_a_stop_in_the_middle_is_resumed() -> None:
    whole = Stage(environment=Bench, script=saying(TOGETHER, "done")).play(seed=0)
    for tenths in range(5, 150, 7):
        stopped = Stage(environment=Bench, script=saying(TOGETHER, "done"), stop_after=tenths / 10).play(seed=0)
        resumed = Stage(environment=Bench, script=saying(TOGETHER, "done")).play(stopped.entries, seed=1)
        assert resumed.error is None, resumed.error
        assert answers(resumed) == answers(whole)
        assert resumed.transcript == whole.transcript
