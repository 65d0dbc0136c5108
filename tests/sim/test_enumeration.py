"""The expected gradient of training equals that of plain episodes, by enumeration through the whole loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import pytest
import torch

import agentrl
from agentrl.app.plan import check_trees
from agentrl.config.algorithms import ADVANTAGES, LOSSES
from agentrl.core.errors import ConfigError, EnvironmentDefinitionError
from agentrl.core.ports import ScoreCredit, ScoreOf
from tests.enumeration import Case, Play, Program, config_of, is_refused, plain, relative_error, trained, uniform
from tests.loss_cases import batch_of, evaluated, loss_named
from tests.markdown_pages import ROOT, python_of

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


async def probe(play: Play, count: str) -> bool:
    await play.branch(int(count), probe=True)
    return True


async def roulette(play: Play, survival: str) -> bool:
    return await play.roulette(float(survival))


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


STEPS = {"a": act, "b": branch, "p": probe, "q": roulette, "f": fail, "t": pay_turn, "r": pay, "s": score, "w": wait}


def program(steps: str) -> Program:
    """Make a program of one agent from its steps, separated by spaces.

    `a` acts, `b2` starts two branches, `p1` a probe, `q.3` continues with probability 0.3, `f.3` ends without a reward
    with probability 0.3, `t` pays the last turn, `r` the episode, `s` asks for the last turn's score, `w` takes a time
    that follows the decisions. A step behind `?` is taken if the last decision was 1.
    """

    async def run(play: Play) -> None:
        for step in steps.split():
            if step[0] != "?" or play.history[-1] == "1":
                name, argument = step.lstrip("?")[0], step.lstrip("?")[1:]
                if not await STEPS[name](play, argument):
                    return

    return run


def resampling(at: int, weight: float = 1.0, *, survival: float = 1.0) -> Program:
    """Two or three turns, of which one is sampled again where the reward is low."""

    async def run(play: Play) -> None:
        await play.act()
        if survival < 1 and not await play.roulette(survival):
            return
        await play.act()
        play.reward(play.value)
        if play.value < 0.6:
            await play.resample(2, at=at, weight=weight)

    return run


def two_agents(survival: float = 1.0) -> Program:
    """Two agents of a seat take turns for the same reward."""

    async def run(play: Play) -> None:
        await play.act()
        await play.act(("agent", 1))
        if survival < 1 and not await play.roulette(survival):
            return
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


async def goes_on(play: Play) -> None:
    """Pays a cost on every path: after False too, which is refused."""
    await play.act()
    survives = await play.roulette(0.2)
    play.reward(-play.value)
    if survives:
        await play.act()
        play.reward(play.value)


WHOLE = {"per": "episode"}
TO_GO = {"turn_credit": "to_go"}
LATE = {"release": "late"}
STOPS = program("a q.3 a r")

FAST: dict[str, Case] = {
    "plain": Case(program=program("a a r")),
    "three members": Case(program=program("a r"), group_size=3),
    "branch": Case(program=program("a b1 a r"), branches=1),
    "roulette": Case(program=STOPS, roulette=True),
    "roulette with a scorer of episodes": Case(program=STOPS, roulette=True, scorer=WHOLE),
    "probes with VinePPO": Case(program=program("p1 a a r"), probes=1, group_size=1, credit={"advantage": "vine_ppo"}),
}

CASES: dict[str, Case] = {
    "turn rewards": Case(program=program("a t a t r")),
    "turn rewards to go": Case(program=program("a t a t r"), credit=TO_GO),
    "group_mean has a known factor": Case(program=program("a a r"), credit={"advantage": "group_mean"}, factor=0.5),
    "role_mean": Case(program=program("a a r"), credit={"advantage": "role_mean"}, together=1),
    "none": Case(program=program("a a r"), **NONE),
    "gae with a trace decay of 1": Case(
        program=program("a t a t r"), group_size=1, credit={"advantage": "gae", **TO_GO}
    ),
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
    "a turn sampled again": Case(program=resampling(1), branches=2),
    "the last turn sampled again at a weight": Case(program=resampling(-1, 0.3), branches=2),
    "the first turn sampled again": Case(program=resampling(0), branches=2, **NONE),
    "probes between turns with VinePPO": Case(
        program=program("p1 a p1 a r"), probes=2, group_size=1, credit={"advantage": "vine_ppo"}
    ),
    "probes with the tree rule": Case(program=program("a p1 b1 a r"), branches=1, probes=1),
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
    "roulette by state": Case(program=program("a ?q.25 a r"), roulette=True),
    "roulette that never stops": Case(program=program("a q1 a r"), roulette=True),
    "roulette twice to go": Case(program=program("a t q.5 a t q.7 a t r"), roulette=True, credit=TO_GO),
    "roulette in three members": Case(program=STOPS, roulette=True, group_size=3),
    "roulette before a branch": Case(program=program("a q.4 b1 a r"), roulette=True, branches=1),
    "roulette behind a branch": Case(program=program("a b1 q.4 a r"), roulette=True, branches=1),
    "roulette on both sides of a branch": Case(program=program("a q.5 b1 q.5 a r"), roulette=True, branches=1, **NONE),
    "roulette before a turn sampled again": Case(program=resampling(-1, survival=0.5), roulette=True, branches=2),
    "roulette with two agents": Case(program=two_agents(0.4), roulette=True),
    "roulette with probes and VinePPO": Case(
        program=program("p1 a q.5 a r"), roulette=True, probes=1, group_size=1, credit={"advantage": "vine_ppo"}
    ),
    "roulette with a scorer of turns": Case(program=STOPS, roulette=True, scorer={"per": "turn"}),
    "roulette with differences to go": Case(
        program=program("a q.5 a q.5 a r"), roulette=True, scorer={"per": "turn", "credit": "difference"}, credit=TO_GO
    ),
    "roulette with a scorer on request": Case(
        program=program("a s q.4 a s r"), roulette=True, scorer={"per": "request"}
    ),
    "roulette with a linear scorer of groups": Case(
        program=STOPS, roulette=True, scorer={"per": "group", "function": "each_alone"}
    ),
    "roulette with a scorer of episodes and branches": Case(
        program=program("a b1 q.4 a r"), roulette=True, branches=1, scorer=WHOLE, **NONE
    ),
    "roulette with failed members": Case(
        program=program("a q.5 a f.35 r"), roulette=True, group_size=1, credit={"advantage": "none"}, factor=0.65
    ),
    "roulette with group_mean": Case(program=STOPS, roulette=True, credit={"advantage": "group_mean"}, factor=0.5),
    "roulette with role_mean": Case(program=STOPS, roulette=True, credit={"advantage": "role_mean"}, together=1),
    "roulette with gae": Case(program=STOPS, roulette=True, group_size=1, credit={"advantage": "gae"}),
    "roulette with late release": Case(program=program("a w q.5 a w r"), roulette=True, group_size=3, credit=LATE),
}


def write_vine_ppo(directory: Path) -> str:
    """Write the estimator of docs/reference/trees.md to a file; returns its reference."""
    (text,) = [text for text in python_of(ROOT / "docs/reference/trees.md") if "def vine_ppo(" in text]
    (directory / "mine.py").write_text(text, encoding="utf-8")
    return f"{directory / 'mine.py'}:vine_ppo"


def error_of(case: Case, directory: Path) -> float:
    """Return the relative error of the expected gradient; the page's estimator is written to the directory."""
    if case.credit.get("advantage") == "vine_ppo":
        case = replace(case, credit={**case.credit, "advantage": write_vine_ppo(directory)})
    return relative_error(trained(case), plain(case))


@pytest.mark.parametrize("name", FAST)
def test_training_has_the_gradient_of_plain_episodes(name: str, tmp_path: Path) -> None:
    assert error_of(FAST[name], tmp_path) < EXACT


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_training_has_the_gradient_of_plain_episodes_in_every_case(name: str, tmp_path: Path) -> None:
    assert error_of(CASES[name], tmp_path) < EXACT


# --- negative controls ------------------------------------------------------------------------------------------------

PLANTED = {
    "a scorer of episodes": Case(program=program("a q.1 a"), roulette=True, scorer=WHOLE, goes_on=True),
    "a reward after False": Case(program=goes_on, roulette=True, goes_on=True),
}
"""Cases in which an episode is not over after `ctx.roulette` returned False."""


@pytest.mark.parametrize("name", PLANTED)
def test_without_the_stop_the_gradient_is_another(name: str, tmp_path: Path) -> None:
    assert error_of(PLANTED[name], tmp_path) > 0.1


def test_a_reward_after_false_is_refused_in_the_loop() -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"reward\(\) in .* ctx.roulette returned False before"):
        trained(replace(PLANTED["a reward after False"], goes_on=False))


def second_seat(*, after: bool) -> Program:
    """A second seat acts on both sides of a roulette, or only after it."""

    async def run(play: Play) -> None:
        await play.act()
        if not after:
            await play.act(("other", 0))
        if not await play.roulette(0.4):
            return
        await play.act(("other", 0))
        play.reward(play.value)
        play.reward(play.value, agent=("other", 0))

    return run


TWO_SEATS: dict[str, Any] = {"roulette": True, "seats": ("agent", "other")}


def test_a_seat_that_acts_before_roulette_keeps_its_gradient(tmp_path: Path) -> None:
    assert error_of(Case(program=second_seat(after=False), **TWO_SEATS), tmp_path) < EXACT


def test_a_seat_that_acts_only_after_roulette_is_refused() -> None:
    with pytest.raises(EnvironmentDefinitionError, match=r"seat 'other' .*ctx\.roulette"):
        trained(Case(program=second_seat(after=True), **TWO_SEATS))


# --- what cannot be combined with roulette ----------------------------------------------------------------------------

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "pass_at_k": [{"k": 1}],
    "gae": [{}, {"trace_decay": 0.5}, {"discount": 0.9}],
    "gigpo": [{}, {"divide_by_std": True}],
}
"""Options of estimators that are tried, besides none."""
ESTIMATORS = [{"name": name, **options} for name in ADVANTAGES for options in OPTIONS.get(name, [{}])]
SCORER_KINDS = [
    {"per": per, "credit": credit, **function}
    for per in get_args(ScoreOf)
    for credit in get_args(ScoreCredit)
    if credit != "difference" or per in ("turn", "request")
    for function in ([{"function": "each_alone"}, {"function": "ranked"}] if per == "group" else [{}])
]
"""Scorers, of groups also with a function that compares the members and one that does not."""


def combined(survival: float, **settings: Any) -> Case:
    """Two turns for a reward of 0 or 1, with a roulette between them."""
    asks = settings.get("scorer", {}).get("per") == "request"

    async def bits(play: Play) -> None:
        await play.act()
        if not await play.roulette(survival):
            return
        await play.act()
        if asks:
            await play.score()
        play.reward(float(play.value > 0.5))

    together: dict[str, Any] = (
        {"together": 1} if "credit" in settings else {}
    )  # some estimators compare the step or its history
    return Case(program=bits, roulette=True, is_checked=False, **together, **settings)


def is_biased(**settings: Any) -> bool:
    """Whether roulette changes the expected gradient of training with these settings, by enumeration."""
    return relative_error(trained(combined(0.4, **settings)), trained(combined(1.0, **settings))) > EXACT


COMBINATIONS: list[dict[str, Any]] = [
    *({"credit": {"advantage": advantage}} for advantage in ESTIMATORS),
    *({"scorer": scorer} for scorer in SCORER_KINDS),
]


def is_refused_rightly(settings: dict[str, Any]) -> bool:
    """Whether settings are refused with roulette exactly if it is biased with them."""
    return is_biased(**settings) == is_refused(combined(0.4, **settings))


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", COMBINATIONS, ids=str)
def test_exactly_what_roulette_would_bias_is_refused(settings: dict[str, Any]) -> None:
    assert is_refused_rightly(settings)


@pytest.mark.parametrize(
    ("settings", "biased"), [({"advantage": "leave_one_out"}, False), ({"advantage": "group_std"}, True)]
)
def test_an_estimator_is_refused_if_it_is_not_linear(settings: dict[str, str], *, biased: bool) -> None:
    assert is_biased(credit=settings) == is_refused(combined(0.4, credit=settings)) == biased


COVARIANCES = {"clip_cov": {"share": 0.3, "low": 0.0}, "kl_cov": {"share": 0.3}}
"""Options with which some of ten tokens are among those of largest covariance."""


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_refused_with_roulette_if_it_is_not_linear_on_policy(name: str) -> None:
    agent = [0, 0, 0, 1, 2, 2, 3, 3, 3, 3]
    logprobs = [-0.1 - uniform("logprob", at) for at in range(len(agent))]
    ids = {"agent": agent, "episode": agent, "row": agent, "turn": agent, "group": [0] * 4 + [1] * 6}

    advantages = [1.0, 0.5, -0.25, 0.75, 0.5, -3.0, 0.25, 2.0, -0.5, 1.5]  # those of a conversation's turns differ
    reference, divergence = [value / 2 for value in logprobs], [0.5] * len(agent)
    by_logprob = evaluated(
        loss_named(name, **COVARIANCES.get(name, {})),
        batch_of(logprobs, logprobs, advantages, ids=ids, reference=reference, divergence=divergence),
    ).by_logprob
    factors = by_logprob / torch.tensor(advantages, dtype=torch.float64)
    is_linear = torch.allclose(factors, factors[0]) and bool(by_logprob.any())
    assert LOSSES[name].linear == is_linear
    assert is_refused(combined(0.4, trainer={"loss": {"name": name, "normalizer": 64}})) != is_linear


class Stopping(agentrl.Environment):
    """A child that may be stopped."""

    roulette = True

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        raise NotImplementedError


class Parent(Stopping):
    """Starts children that may be stopped."""

    roulette = False
    fan_out: ClassVar[dict[str, int]] = {"Stopping": 2}


def test_children_with_roulette_are_refused() -> None:
    config = config_of(FAST["plain"])
    with pytest.raises(ConfigError, match="Parent spawns episodes with roulette"):
        check_trees(Parent, config, config.trained)
