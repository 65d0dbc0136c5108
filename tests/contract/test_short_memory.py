"""Worker processes whose engine has too little memory for their conversations: they wait, and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import agentrl
from agentrl.core.records import Message, SeatBinding
from agentrl.journal.entries import TurnEntry
from tests.contract.scripted_program import SCRIPTED_END
from tests.contract.worker_cases import Workplace, workplace
from tests.contract.worker_environments import TwoTurns, user

NOTHING, SHORT = 0, 40
"""Tokens of context, where the shortest context of these episodes has more than 20."""
EPISODES = [f"e{number}" for number in range(6)]


def dealer(conversation: Sequence[Message], random: Random) -> str:
    return "a card"


class WithBot(agentrl.Environment):
    """A bot is asked between two turns of a policy."""

    seats = ("solver", "dealer")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver, dealt = ctx.agent("solver"), ctx.agent("dealer")
        await solver.act(user("one"))
        await dealt.act(user("a card, please"))
        await solver.act(user("two"))
        solver.reward(1.0)


Turns = dict[str, list[TurnEntry]]


def turns_of(at: Workplace) -> Turns:
    """Of each episode, as the journal has them."""
    found = {}
    for name in EPISODES:
        bodies = [entry.decode() for entry in at.journal.recorded(name, 0)[0]]
        found[name] = [body for body in bodies if isinstance(body, TurnEntry)]
    return found


def said(turns: Turns) -> dict[str, list[tuple[bytes, bytes, bytes, str]]]:
    return {
        name: [
            (turn.context_ids, turn.tokens.token_ids, turn.tokens.columns["logprobs"], turn.finish_reason)
            for turn in each
        ]
        for name, each in turns.items()
    }


def waited(turns: Turns) -> set[str]:
    """The seats whose turns waited for room."""
    return {turn.seat for each in turns.values() for turn in each for pause in turn.pauses if pause.why == "no_room"}


def played(
    directory: Path, kv_tokens: int | None, environment: type[agentrl.Environment] = TwoTurns, *, kill: bool = False
) -> Turns:
    """All episodes, by two workers, to their ends; `kill`: one of these, when all episodes are between their turns."""
    directory.mkdir()
    policies = {"policy": {}, "bot": {"kind": "bot", "id": f"{__name__}:dealer"}}
    held = {seat: SeatBinding("bot" if seat == "dealer" else "policy") for seat in environment.seats}

    async def main() -> Turns:
        async with workplace(directory, 2, environment, kv_tokens=kv_tokens, policies=policies) as at:
            at.submit(*(replace(at.spec(name), seats=held) for name in EPISODES))
            if kill:
                await at.until(lambda: len(at.reached()) == len(EPISODES))
                os.kill(at.reached()["e0"], signal.SIGKILL)
                await at.until(lambda: bool(at.told))
            at.open()
            await at.drained()
            assert {at.ends[name].stop_reason for name in EPISODES} == {SCRIPTED_END}
            assert set(at.times.values()) == {1}
            return turns_of(at)

    return asyncio.run(main())


@pytest.mark.parametrize("kv_tokens", [NOTHING, SHORT])
def test_contexts_larger_than_the_memory_pass_one_by_one(tmp_path: Path, kv_tokens: int) -> None:
    ample, short = played(tmp_path / "ample", None), played(tmp_path / "short", kv_tokens)
    assert not waited(ample)
    assert waited(short) == {"solver"}
    assert said(short) == said(ample)


def test_what_a_killed_worker_had_waiting_says_elsewhere_what_it_would_have_said(tmp_path: Path) -> None:
    killed = played(tmp_path / "killed", SHORT, kill=True)
    assert waited(killed) == {"solver"}
    assert said(killed) == said(played(tmp_path / "ample", None))


def test_who_samples_outside_of_the_engine_waits_for_no_room_in_it(tmp_path: Path) -> None:
    turns = played(tmp_path / "short", SHORT, WithBot)
    assert waited(turns) == {"solver"}
    assert {turn.seat for each in turns.values() for turn in each} == {"solver", "dealer"}
