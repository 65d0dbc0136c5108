"""Code that does something else when it is run again: what the error says, and what becomes of the episode."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import ClassVar

import msgspec
import pytest

import agentrl
from agentrl.core.errors import EpisodeError, ReplayMismatchError
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.environment import OnCodeChange
from agentrl.journal.entries import BeginEntry, JournalEntry, NondeterministicValueEntry, ResourceCallEntry, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import Admission, EpisodeEnd
from agentrl.rollout.worker import MAX_ATTEMPTS
from agentrl.testing.execution import PARTITION, plain_rollout_settings, wire_dispatcher
from tests.replay.executions import Stage, digits
from tests.support.builders import make_past, no_lost_group


class Edited(agentrl.Environment):
    """Does what the class attribute says, as if it had been edited between two lives."""

    version: ClassVar[str] = "first"

    @classmethod
    def source(cls) -> str:
        return cls.version

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, version = ctx.agent("agent"), self.version
        if version == "patched" and ctx.patched("greeting"):
            await agent.act(agentrl.system("be kind"))
        await agent.act(agentrl.user("hello\x1b[2J" if version == "asks" else "hello"))
        if version == "tool":
            await ctx.call_tool("t", {"n": 1}, lambda: "x", external=False, timeout_s=None)
        elif version != "short":
            await agent.act(agentrl.user("again"))
        for number in range(2):
            if version == "patched" and ctx.patched("greeting"):
                await agent.act(agentrl.user(f"patched {number}"))
        agent.reward(2.0 if version == "reward" else 1.0)


@pytest.fixture(autouse=True)
def _unedited() -> None:
    Edited.version = "first"


def recorded() -> list[JournalEntry]:
    Edited.version = "first"
    return Stage(environment=Edited).play().entries


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("asks", ["call r#0", "a turn of agent asked 'hello'", r"now asks a turn of agent asked 'hello\x1b[2J'"]),
        ("tool", ["call r#1", "asked 'again'", "now asks t({'n': 1})"]),
        ("short", ["call r#1", "asked 'again'", "now asks a reward of 1.0"]),
        ("reward", ["call r#2", "a reward of 1.0", "now asks a reward of 2.0"]),
    ],
)
def test_a_mismatch_names_call_and_both_values_and_the_code(version: str, words: list[str]) -> None:
    entries = recorded()
    Edited.version = version
    again = Stage(environment=Edited).play(entries)
    assert isinstance(again.error, ReplayMismatchError)
    for word in [*words, "The environment's file has changed since"]:
        assert word in str(again.error).replace('"', "'"), str(again.error)
    assert again.error.begin_again
    assert again.engine_calls == 0


def test_without_a_change_of_code_it_is_nondeterminism() -> None:
    entries = recorded()
    begin = entries[0].decode()
    assert isinstance(begin, BeginEntry)
    tampered = [JournalEntry("e0", 0, "r#0", b"elsewher", entries[1].body)]
    error = Stage(environment=Edited).play([entries[0], *tampered]).error
    assert isinstance(error, ReplayMismatchError)
    assert not error.begin_again
    assert error.reason == "nondeterminism"
    assert "The environment's file is the same" in str(error)
    assert "ctx.rng" in str(error)


def test_an_episode_of_a_version_that_compared_less_starts_over() -> None:
    entries = recorded()
    begin = entries[0].decode()
    assert isinstance(begin, BeginEntry)
    older = msgspec.structs.replace(begin, request_version=0)
    again = Stage(environment=Edited).play([msgspec.structs.replace(entries[0], body=encode_body(older)), *entries[1:]])
    assert isinstance(again.error, EpisodeError)
    assert (again.error.reason, again.error.begin_again) == ("code_changed", True)
    assert "another version of agentrl" in str(again.error)


def test_calls_the_code_no_longer_makes_are_named() -> None:
    Edited.version = "short"
    whole = Stage(environment=Edited).play()
    more = [*whole.entries, JournalEntry("e0", 0, "r#2", b"", encode_body(NondeterministicValueEntry("patch", "x")))]
    error = Stage(environment=Edited).play(more).error
    assert error is not None
    assert "call r#2: the journal holds patch = 'x', the code now makes no such call" in str(error)


@pytest.mark.parametrize("cut", [1, 2, 3, 4])
def test_a_patch_runs_only_where_nothing_is_replayed(cut: int) -> None:
    entries = recorded()[:cut]
    Edited.version = "patched"
    again = Stage(environment=Edited).play(entries)
    assert again.error is None
    asked = [body.messages[-1]["content"] for body in again.bodies.values() if hasattr(body, "messages")]
    whole = ["be kind", "hello", "again", "patched 0", "patched 1"]
    assert asked == (whole if cut == 1 else ["hello", "again"])
    assert ("r@greeting" in again.bodies) is (cut == 1)
    once_more = Stage(environment=Edited).play(again.entries)
    assert once_more.error is None
    assert once_more.transcript == again.transcript


class Pinned(agentrl.Environment):
    """Lives by a resource that dies with its process."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        value = await ctx.resource(lambda: [1]).call("pop")
        await ctx.agent("agent").act(agentrl.user(str(value)))
        ctx.agent("agent").reward(1.0)


async def resumed(environment: type[agentrl.Environment], entries: list[JournalEntry], attempt: int = 0) -> EpisodeEnd:
    journal, failures = MemoryJournal(), list[BaseException]()
    log = journal.turn_log(PARTITION)
    for entry in entries:
        log.append(JournalEntry(entry.episode_id, attempt, entry.call_id, entry.request_hash, entry.body))
    await log.flush()
    engine = ScriptedEngine(digits, versions={"policy": PolicyVersion("policy", 0, 0)})
    dispatcher, _ = wire_dispatcher(environment, engine, journal, plain_rollout_settings(), failures)
    spec = dataclasses.replace(Stage(environment=environment).spec, attempt=attempt)
    journal.admit(spec)
    dispatcher.resume(make_past(unfinished=[spec]), no_lost_group)
    await dispatcher.worker.drain()
    assert not failures, failures
    [end] = journal.of_kind(EpisodeEnd)
    assert [admission.spec.attempt for admission in journal.of_kind(Admission)] == [
        *range(attempt, end.spec.attempt + 1)
    ]
    return end


@pytest.mark.parametrize(
    ("version", "policy", "attempt", "reason"),
    [
        ("first", "drop", 0, None),
        ("asks", "try", 1, None),
        ("asks", "restart", 1, None),
        ("asks", "drop", 0, "code_changed"),
        ("first\n", "try", 0, None),
        ("first\n", "restart", 1, None),
    ],
)
def test_on_code_change(
    version: str, policy: OnCodeChange, attempt: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = recorded()[:2]
    monkeypatch.setattr(Edited, "on_code_change", policy)
    Edited.version = version
    header = asyncio.run(resumed(Edited, entries)).header
    assert header.drop_reason == reason
    assert header.attempt == attempt


def test_a_lost_resource_begins_the_episode_again_but_not_for_ever() -> None:
    entries = Stage(environment=Pinned).play().entries
    assert any(isinstance(entry.decode(), ResourceCallEntry) for entry in entries)
    first = asyncio.run(resumed(Pinned, entries))
    assert (first.header.drop_reason, first.header.attempt) == (None, 1)
    last = asyncio.run(resumed(Pinned, entries, attempt=MAX_ATTEMPTS - 1))
    assert last.header.drop_reason == "resource_lost"
    assert "died with its process" in last.detail


class Two(agentrl.Environment):
    """Two effects and two turns; what is asked does not depend on what came before."""

    seats = ("agent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for number in range(2):
            await ctx.effect("count", lambda number=number: number)
            await agent.act(agentrl.user("hello"))
        agent.reward(1.0)


def test_entries_without_their_beginning_are_no_episode() -> None:
    whole = Stage(environment=Two).play().entries
    again = Stage(environment=Two).play(whole[1:])
    assert isinstance(again.error, ReplayMismatchError)
    assert "call begin: the journal holds entries of this attempt and not its beginning" in str(again.error)
    assert again.entries == whole[1:]


@pytest.mark.parametrize("missing", range(1, 4))
def test_a_hole_in_the_journal_is_named_and_nothing_is_filled_in(missing: int) -> None:
    whole = Stage(environment=Two).play().entries
    left = [entry for number, entry in enumerate(whole) if number != missing]
    again = Stage(environment=Two).play(left)
    assert isinstance(again.error, ReplayMismatchError)
    later = whole[missing + 1].call_id
    assert f"call {whole[missing].call_id}: the journal holds call {later} of the same strand" in str(again.error)
    assert "entries are missing" in str(again.error)
    assert again.entries == left


class TimedOut(agentrl.Environment):
    """A tool that performs an effect, and then hangs."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        async def note() -> str:
            await ctx.effect("note", lambda: 1)
            await asyncio.Event().wait()
            return "never"

        agent = ctx.agent("agent")
        await agent.act(agentrl.user("hello"))
        await ctx.call_tool("note", {}, note, external=False, timeout_s=0.05)
        await agent.act(agentrl.user("again"))
        agent.reward(1.0)


class TimedOutAfterItCounted(agentrl.Environment):
    """A tool that counts its calls, and then hangs in the first one."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        uses = 0

        async def count() -> str:
            nonlocal uses
            uses += 1
            if uses == 1:
                await asyncio.Event().wait()
            return f"use {uses}"

        agent = ctx.agent("agent")
        for _ in range(2):
            await agent.act(agentrl.user("hello"))
            await ctx.call_tool("count", {}, count, external=False, timeout_s=0.05)
        agent.reward(float(uses))


def test_a_tool_that_timed_out_leaves_the_same_state_on_self() -> None:
    whole = Stage(environment=TimedOutAfterItCounted).play()
    assert whole.error is None
    for cut in range(1, len(whole.entries) + 1):
        again = Stage(environment=TimedOutAfterItCounted).play(whole.entries[:cut])
        assert again.error is None, again.error
        assert again.transcript == whole.transcript


def test_a_tool_that_timed_out_after_calls_of_its_own_makes_them_again() -> None:
    whole = Stage(environment=TimedOut).play()
    assert whole.error is None
    for cut in range(1, len(whole.entries) + 1):
        again = Stage(environment=TimedOut).play(whole.entries[:cut])
        assert again.error is None, cut
        assert again.bodies.keys() == whole.bodies.keys()
