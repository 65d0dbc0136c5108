"""Bots: functions that hold a seat, beside a policy that learns."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

import agentrl
from agentrl.app.engines import external_policies
from agentrl.config.load import load
from agentrl.config.policies import BotPolicy
from agentrl.core.errors import CheckFailedError, EnvironmentDefinitionError, JournalError
from agentrl.core.records import Message
from agentrl.engines.router import EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import TurnEntry
from tests.sim.small_run import SmallRun, config_for
from tests.support.dispatched import members

ASKED: list[tuple[str, ...]] = []


def dealer(conversation: Sequence[Message], random: Random) -> str:
    """Draws a card, and remembers that it was asked."""
    ASKED.append(tuple(message.content for message in conversation))
    return f"{random.randrange(1000)} \u2028 é"


async def slow_dealer(conversation: Sequence[Message], random: Random) -> str:
    await asyncio.sleep(1.0)
    return "1"


def broken(conversation: Sequence[Message], random: Random) -> str:
    raise KeyError(conversation[-1].content)


def wordless(conversation: Sequence[Message], random: Random) -> Any:
    return 7


class Cards(agentrl.Environment):
    """The dealer is a bot."""

    seats = ("guesser", "dealer")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("Guess."))
        first = await ctx.agent("dealer").act(agentrl.user("A card."))
        again = await ctx.agent("dealer").act(agentrl.user("Another.\u2028Please."))
        ctx.agent("guesser").reward(float(first.text != again.text))


def played(bot: str, then: Callable[[SmallRun], Awaitable[None]] | None = None, **changes: Any) -> SmallRun:
    """A run of one step with the dealer played by a bot of this module."""
    ASKED.clear()

    async def main() -> SmallRun:
        dealt = {"kind": "bot", "id": f"{__name__}:{bot}"}
        config = config_for(policies={"guesser": {"step_size": 4, **changes}, "dealer": dealt}, steps=1)

        def engine(*arguments: Any, **keywords: Any) -> EngineRouter:
            return EngineRouter(
                [ScriptedEngine(*arguments, **keywords)], external=external_policies(config.engine_plan.external, print)
            )

        run = SmallRun(config=config, environment=Cards, trainer_options={}, engine_options={})
        run.engine_class = engine  # type: ignore[assignment]
        await run.run()
        if then is not None:
            await then(run)
        return run

    return asyncio.run(main())


def turns_of(run: SmallRun) -> list[TurnEntry]:
    log = run.journal.turn_log("0")
    units = run.trainer.batches[0].units
    bodies = [entry.decode() for unit in units for entry in log.read(unit.episode_id, unit.attempt)]
    return [body for body in bodies if isinstance(body, TurnEntry) and body.policy == "dealer"]


def test_a_bot_is_told_its_seats_conversation_and_what_it_says_is_recorded() -> None:
    async def replay(run: SmallRun) -> None:
        before = len(ASKED)
        unit = run.trainer.batches[0].units[0]
        spec = next(spec for spec, _ in members(run.journal, {"g0"}) if spec.episode_id == unit.episode_id)
        entries = run.journal.turn_log("0").read(spec.episode_id, 0)
        with pytest.raises(JournalError, match="twice"):  # it came to its end again
            await run.orchestrator.dispatcher.worker._runner.run(spec, Cards, entries)  # type: ignore[attr-defined]
        assert len(ASKED) == before, "a replay asked the bot again"

    run = played("dealer", replay)
    assert {policy for policy, _, _ in run.seen.steps} == {"guesser"}
    assert ("A card.",) in ASKED
    longer = next(asked for asked in ASKED if len(asked) == 3)
    assert (longer[0], longer[2]) == ("A card.", "Another.\u2028Please.")
    assert longer[1].endswith(" \u2028 é")
    said = [turn.text for turn in turns_of(run)]
    assert len(set(said)) > 4
    assert said == [turn.text for turn in turns_of(played("dealer"))], "its random numbers are those of the call"


def test_a_bot_may_wait() -> None:
    assert len(turns_of(played("slow_dealer"))) == 8


@pytest.mark.parametrize(
    ("bot", "told"),
    [("broken", "KeyError"), ("wordless", "7")],
)
def test_a_bot_that_fails_ends_the_episode_by_name(bot: str, told: str) -> None:
    with pytest.raises(CheckFailedError, match=rf"episode and seat e\d+\.0:dealer\.0, policy 'dealer': .*{told}"):
        played(bot)


@pytest.mark.parametrize(
    ("reference", "told"),
    [
        ("no_module_of_mine:play", r"policies\.dealer\.id: .*no_module_of_mine"),
        (f"{__name__}:missing", "'missing'"),
        (f"{__name__}:ASKED", "'ASKED'"),
        ("dealer", "module:function"),
    ],
)
def test_a_bot_that_is_not_there_is_named(reference: str, told: str) -> None:
    config = config_for(policies={"guesser": {}, "dealer": {"kind": "bot", "id": reference}})
    with pytest.raises(EnvironmentDefinitionError, match=told):
        external_policies(config.engine_plan.external, print)


def test_a_bots_file_is_looked_for_beside_the_toml_file(tmp_path: Path) -> None:
    (tmp_path / "bots.py").write_text("def play(conversation, random):\n    return 'pass'\n")
    (tmp_path / "env.py").write_text("")
    file = tmp_path / "train.toml"
    file.write_text(
        "[environment]\nid = 'env.py:Cards'\n[model]\npath = 'm'\n[policies.guesser]\n"
        "[policies.dealer]\nkind = 'bot'\nid = 'bots.py:play'\n"
    )
    config = load(file)
    dealer_of = config.policies["dealer"]
    assert isinstance(dealer_of, BotPolicy)
    assert dealer_of.id == f"{(tmp_path / 'bots.py').resolve()}:play"
    assert set(external_policies(config.engine_plan.external, print)) == {"dealer"}
