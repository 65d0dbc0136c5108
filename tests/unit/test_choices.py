"""`act(choices=…)`: what an engine is asked for, who is not held to it, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import agentrl
from agentrl.engines.scripted import ScriptedEngine
from tests.unit.episodes import play

if TYPE_CHECKING:
    import pytest


class Vote(agentrl.Environment):
    """Yes or no, or another word."""

    seats = ("voter",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Ask twice."""
        voter = ctx.agent("voter")
        await voter.act(agentrl.user("Well?"), choices=("yes", "no"))
        turn = await voter.act(agentrl.user("Why?"))
        voter.reward(float(len(turn.text)))


class Demonstrated(agentrl.Environment):
    """A demonstration is not sampled."""

    seats = ("voter",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Say yes."""
        voter = ctx.agent("voter")
        turn = await voter.act(agentrl.user("Well?"), choices=("yes", "no"), reply="yes")
        voter.reward(float(turn.text == "yes"))


def test_one_turn_is_held_to_its_choices_and_the_next_is_not() -> None:
    played = play(Vote, ["no", "because"])
    first, second = played.sampling
    assert (first.choices, second.choices, second.grammar) == (((*b"yes",), (*b"no",)), (), "")
    elements = json.loads(first.grammar)["format"]["elements"]
    assert [(each["type"], each["value"]) for each in elements] == [("const_string", "yes"), ("const_string", "no")]
    assert played.header.reward == 7


def test_a_demonstration_is_given_whole() -> None:
    played = play(Demonstrated, ["y"])
    assert played.sampling[0].choices == ()
    assert played.header.reward == 1


def test_an_engine_that_samples_any_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hold(monkeypatch, choices=False)
    played = play(Vote, ["no", "because"])
    assert played.header.stop_reason is None
    assert "voter.0: act(choices=['yes', 'no']): the engine 'scripted' cannot be held to choices" in played.said


def test_a_choice_longer_than_a_turn_is_refused() -> None:
    played = play(Vote, ["no", "because"], max_tokens=2)
    assert played.header.stop_reason is None
    assert "one has 3 tokens, so raise sampling.max_tokens" in played.said
    assert play(Vote, ["no", "because"], max_tokens=3).header.stop_reason is not None


def hold(monkeypatch: pytest.MonkeyPatch, **capabilities: bool) -> None:
    """Give scripted engines other capabilities."""
    make = ScriptedEngine.__init__

    def changed(self: ScriptedEngine, *arguments: object, **options: object) -> None:
        make(self, *arguments, **options)  # type: ignore[arg-type]
        self.capabilities = dataclasses.replace(self.capabilities, **capabilities)

    monkeypatch.setattr(ScriptedEngine, "__init__", changed)
