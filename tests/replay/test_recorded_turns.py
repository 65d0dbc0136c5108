"""A recorded turn is compared by all that its tokens depend on, and they are taken from the journal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest

import agentrl
from agentrl.core.errors import ReplayMismatchError
from agentrl.core.records import FinishReason, Message, ToolSpec
from agentrl.journal.entries import TurnEntry
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.testing import execution
from tests.replay.executions import Stage


class Changing(PlainChatFormat):
    """Counts what it tokenises; can become another format."""

    tokenised: ClassVar[int] = 0
    prefix: ClassVar[list[int]] = []

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        Changing.tokenised += 1
        return [*self.prefix, *super().start(messages, tools)]

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: FinishReason,
        turn: Sequence[int] = (),
        context: Sequence[int] = (),
        earlier: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        Changing.tokenised += 1
        return super().extend(messages, after=after, turn=turn, context=context, earlier=earlier, tools=tools)


class Talk(agentrl.Environment):
    """A few turns; what it says can be changed."""

    described: ClassVar[str] = "adds"
    answer: ClassVar[Message] = Message(role="tool", content="3", tool_call_id="call-0", name="add")
    max_tokens: ClassVar[int | None] = None

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent", tools=[ToolSpec(name="add", description=self.described, parameters={})])
        await agent.act(agentrl.system("be brief"), agentrl.user("1 + 2?"))
        await agent.act(self.answer, max_tokens=self.max_tokens)
        agent.restart(agentrl.user("again"))
        await agent.act()
        agent.reward(1.0)


@pytest.fixture(autouse=True)
def _unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "PlainChatFormat", Changing)
    monkeypatch.setattr(Changing, "tokenised", 0)
    for name in ("described", "answer", "max_tokens"):
        monkeypatch.setattr(Talk, name, getattr(Talk, name))


def test_nothing_that_is_recorded_is_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Stage(environment=Talk).play()
    assert Changing.tokenised == 3
    for cut in range(2, len(whole.entries)):
        Changing.tokenised = 0
        resumed = Stage(environment=Talk).play(whole.entries[:cut])
        assert resumed.error is None
        assert resumed.transcript == whole.transcript
        assert Changing.tokenised == max(4 - cut, 0)


def test_the_context_goes_on_with_the_tokens_that_were_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Stage(environment=Talk).play()
    monkeypatch.setattr(Changing, "prefix", [65])  # other code, the same format by its fingerprint
    resumed = Stage(environment=Talk).play(whole.entries[:2])
    first, second, third = (body for body in resumed.bodies.values() if isinstance(body, TurnEntry))
    assert first == whole.bodies["r#0"]
    assert second.parent_context == (len(first.context_ids) + len(first.tokens.token_ids)) // 4
    assert second.context_ids == whole.bodies["r#1"].context_ids  # type: ignore[union-attr]
    assert third.context_ids[:4] == b"A\0\0\0"


@pytest.mark.parametrize(
    ("where", "name", "value", "call", "words"),
    [
        (Changing, "fingerprint", b"another", "r#0", "asked 'be brief / 1 + 2?'"),
        (Talk, "described", "subtracts", "r#0", "asked 'be brief / 1 + 2?'"),
        (Talk, "answer", Message(role="tool", content="4", tool_call_id="call-0", name="add"), "r#1", "asked '4'"),
        (Talk, "answer", Message(role="user", content="3"), "r#1", "asked '3'"),
        (Talk, "max_tokens", 5, "r#1", "asked '3'"),
    ],
)
def test_what_tokens_depend_on_is_compared(
    monkeypatch: pytest.MonkeyPatch, where: type, name: str, value: object, call: str, words: str
) -> None:
    whole = Stage(environment=Talk).play()
    monkeypatch.setattr(where, name, value)
    again = Stage(environment=Talk).play(whole.entries)
    assert isinstance(again.error, ReplayMismatchError)
    assert f"call {call}: the journal holds a turn of agent asked " in str(again.error)
    assert f"the code now asks a turn of agent {words}" in str(again.error)
    assert again.engine_calls == 0


class UntilFull(agentrl.Environment):
    """Talks until its context is full, and counts the turns."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, turns = ctx.agent("agent"), 0
        try:
            while True:
                await agent.act(agentrl.user("x" * 20_000))
                turns += 1
        except agentrl.LimitReachedError:
            agent.reward(float(turns))


def test_a_context_that_was_full_is_full_again() -> None:
    whole = Stage(environment=UntilFull).play()
    assert whole.header is not None
    for cut in range(1, len(whole.entries) + 1):
        resumed = Stage(environment=UntilFull).play(whole.entries[:cut])
        assert resumed.error is None
        assert resumed.transcript == whole.transcript
        assert resumed.header is not None
        assert resumed.header.reward == whole.header.reward == 3.0
