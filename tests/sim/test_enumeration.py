"""The expected gradient of training equals that of plain episodes, by enumeration through the whole loop."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.credit.group import Piece
from tests.enumeration import Case, Play, Program, plain, relative_error, trained

pytestmark = pytest.mark.sim

EXACT = 1e-6
"""Largest relative error that the float32 of advantages explains, with room."""
NONE: dict[str, Any] = {"group_size": 1, "credit": {"advantage": "none"}}
"""One tree per group, without a baseline: its outcomes are enumerated, and not their pairs."""


# --- programs ---------------------------------------------------------------------------------------------------------


async def act(play: Play, _: str) -> bool:
    await play.act()
    return True


async def branch(play: Play, count: str) -> bool:
    await play.branch(int(count))
    return True


async def fail(play: Play, probability: str) -> bool:
    return not await play.fails(float(probability))


async def pay_turn(play: Play, _: str) -> bool:
    play.reward(play.value, len(play.history) - 1)
    return True


async def pay(play: Play, _: str) -> bool:
    play.reward(play.value)
    return True


async def score(play: Play, _: str) -> bool:
    await play.score()
    return True


async def wait(play: Play, _: str) -> bool:
    await play.wait(1 + sum(0.37 * 1.7**at for at, bit in enumerate(play.history) if bit == "1"))
    return True


STEPS = {"a": act, "b": branch, "f": fail, "t": pay_turn, "r": pay, "s": score, "w": wait}


def program(steps: str) -> Program:
    """Make a program of one agent from its steps, separated by spaces.

    `a` acts, `b2` starts two branches, `f.3` ends without a reward with probability 0.3, `t` pays the last turn, `r`
    the episode, `s` asks for the last turn's score, `w` takes a time that follows the decisions. A step behind `?` is
    taken if the last decision was 1.
    """

    async def run(play: Play) -> None:
        for step in steps.split():
            if step[0] != "?" or play.history[-1] == "1":
                name, argument = step.lstrip("?")[0], step.lstrip("?")[1:]
                if not await STEPS[name](play, argument):
                    return

    return run


def two_agents() -> Program:
    """Two agents of a seat take turns for the same reward."""

    async def run(play: Play) -> None:
        await play.act()
        await play.act(("agent", 1))
        await play.act()
        play.reward(play.value)
        play.reward(play.value, agent=("agent", 1))

    return run


def late_agents(branches: int = 0, seconds: float = 0.0) -> Program:
    """A second agent acts in some continuations only; the duration follows the decisions."""

    async def run(play: Play) -> None:
        await play.act()
        if branches:
            await play.branch(branches)
        bit = await play.act()
        if seconds:
            await play.wait(1 + seconds * (2 * bit + int(play.history[0])))
        if bit:
            await play.act(("agent", 1))
            play.reward(play.value, agent=("agent", 1))
        play.reward(play.value)

    return run


WHOLE = {"per": "episode"}
TO_GO = {"turn_credit": "to_go"}
LATE = {"release": "late"}

FAST: dict[str, Case] = {
    "plain": Case(program=program("a a r")),
    "three members": Case(program=program("a r"), group_size=3),
    "branch": Case(program=program("a b1 a r"), branches=1),
}

CASES: dict[str, Case] = {
    "turn rewards": Case(program=program("a t a t r")),
    "turn rewards to go": Case(program=program("a t a t r"), credit=TO_GO),
    "turn rewards to go where a decision ends the episode": Case(program=program("a t ?a ?t r"), credit=TO_GO),
    "group_mean has a known factor": Case(program=program("a a r"), credit={"advantage": "group_mean"}, factor=0.5),
    "role_mean": Case(program=program("a a r"), credit={"advantage": "role_mean"}, together=1),
    "none": Case(program=program("a a r"), **NONE),
    "failed members have a known factor": Case(
        program=program("a f.35 a r"), group_size=3, factor=0.65 * (1 - 0.35**2), credit={}
    ),
    "two agents of a seat": Case(program=two_agents()),
    "branch(2)": Case(program=program("a b2 a r"), branches=2),
    "two turns behind a branch": Case(program=program("a b1 a a r"), branches=1, **NONE),
    "branch by state": Case(program=program("a ?b2 a r"), branches=2),
    "two calls at one place": Case(program=program("a b1 b1 a r"), branches=2),
    "two branch points": Case(program=program("a b1 a b1 a r"), branches=2, **NONE),
    "branch with rewards to go": Case(program=program("a t b1 a t r"), branches=1, credit=TO_GO),
    "an agent in some branches only": Case(program=late_agents(1), branches=1, **NONE),
    "scorer of turns": Case(program=program("a a r"), scorer={"per": "turn"}),
    "scorer of episodes": Case(program=program("a a r"), scorer=WHOLE),
    "scorer of differences to go": Case(
        program=program("a a r"), scorer={"per": "turn", "credit": "difference"}, credit=TO_GO
    ),
    "scorer on request": Case(program=program("a s a r"), scorer={"per": "request"}),
    "scorer of turns with branches": Case(program=program("a b1 a r"), branches=1, scorer={"per": "turn"}),
    "scorer of episodes with branches": Case(program=program("a b1 a r"), branches=1, scorer=WHOLE),
    "late release": Case(program=program("a w a w r"), group_size=3, credit=LATE),
    "late release of two agents": Case(program=late_agents(seconds=0.4), credit=LATE),
}


@pytest.mark.parametrize("name", FAST)
def test_training_has_the_gradient_of_plain_episodes(name: str) -> None:
    assert relative_error(trained(FAST[name]), plain(FAST[name])) < EXACT


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_training_has_the_gradient_of_plain_episodes_in_every_case(name: str) -> None:
    assert relative_error(trained(CASES[name]), plain(CASES[name])) < EXACT


def test_a_wrong_weight_of_branches_gives_another_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: branches that count like whole episodes."""
    case = FAST["branch"]
    monkeypatch.setattr(Piece, "advantage", property(lambda piece: piece.value - piece.baseline))
    assert relative_error(trained(case), plain(case)) > 0.1
