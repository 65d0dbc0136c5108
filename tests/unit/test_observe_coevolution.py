"""Alarms and the live view of runs in which policies learn from each other."""

from __future__ import annotations

import random
from dataclasses import replace

from rich.console import Console

from agentrl.core.records import EpisodeHeader, TrajectoryHeader
from agentrl.observe.alarms import MEANINGS, find_alarms
from agentrl.observe.run_screen import MAX_PLOTS, render_run_screen
from agentrl.observe.run_state import RunDisplaySettings, RunState, display_settings_from_config
from tests.support.builders import make_episode_header

CONFIG = {
    "steps": 400,
    "policies": {
        "player": {"max_staleness": 1},
        "past": {"kind": "past", "of": "player"},
    },
}


def games(rates: list[float], *, each: int = 32, seed: int = 0, **more: float) -> RunState:
    """A player against its past, that wins each game with the step's rate."""
    draw, state = random.Random(seed), RunState(plan=display_settings_from_config(CONFIG))
    for step, rate in enumerate(rates, start=1):
        won = sum(draw.random() < rate for _ in range(each)) / each
        state.record("player", step, {"reward/mean": won, "win_rate/past": won, "games/past": float(each), **more})
    return state


def test_who_loses_to_its_past_is_named() -> None:
    (alarm,) = find_alarms(games([0.6] * 20 + [0.25] * 5))
    assert (alarm.name, alarm.policy) == ("loses_to_past", "player")
    assert "agentrl run winrates" in alarm.advice
    assert alarm.name in MEANINGS


def test_who_has_the_weaker_side_or_stronger_opponents_does_not_lose_to_its_past() -> None:
    assert [seed for seed in range(40) if find_alarms(games([0.3] * 40, seed=seed))] == []
    assert [seed for seed in range(40) if find_alarms(games([0.9] * 10 + [0.55] * 30, seed=seed))] == []
    assert find_alarms(games([0.6] * 20 + [0.0], each=32)) == [], "one odd step"
    assert find_alarms(games([0.6] * 20 + [0.2] * 5, each=2)) == [], "ten games"


def won(share: float, decided: float) -> RunState:
    return games([0.5] * 10, **{"won/x": share, "won/o": 1.0 - share, "episodes/decided": decided})


def test_a_seat_that_wins_whoever_plays_it_is_named() -> None:
    (alarm,) = find_alarms(won(0.99, 20.0))
    assert (alarm.name, alarm.policy) == ("one_seat_wins", "")
    assert "seat x wins 99%" in alarm.text
    assert "role_mean" in alarm.advice
    assert alarm.name in MEANINGS
    assert find_alarms(won(0.85, 20.0)) == [], "who moves first may well win more often"
    assert find_alarms(won(0.99, 2.0)) == [], "ten games"


def header(**rewards: float | None) -> EpisodeHeader:
    trajectories = tuple(TrajectoryHeader(seat, 0, "player", reward, 1, 0, 0) for seat, reward in rewards.items())
    return replace(make_episode_header(), trajectories=trajectories)


def test_only_what_one_side_lost_was_won() -> None:
    assert header(x=1.0, o=-1.0).winner == "x"
    assert header(x=-1.0, o=1.0).winner == "o"
    assert header(x=0.0, o=0.0).winner is None, "a draw"
    assert header(planner=0.2, worker=1.0).winner is None, "nobody lost"
    assert header(x=0.0, o=-1.0).winner is None, "an illegal move decides nothing between the sides"
    assert header(x=None, o=None).winner is None
    assert header().winner is None


def two(steps: list[str], **plan: object) -> RunState:
    """Steps of two policies, in order."""
    names = {"proposer": 1, "solver": 1}
    state = RunState(plan=RunDisplaySettings(steps=400, max_staleness=names, **plan))  # type: ignore[arg-type]
    taken = dict.fromkeys(names, 0)
    for policy in steps:
        taken[policy] += 1
        state.record(policy, taken[policy], {"reward/mean": 0.5})
    return state


def test_a_policy_that_gets_no_units_any_more_is_named() -> None:
    (alarm,) = find_alarms(two(["proposer", "solver"] * 10 + ["proposer"] * 30))
    assert (alarm.name, alarm.policy) == ("starved", "solver")
    assert "30 steps" in alarm.text
    assert "agentrl run ledger" in alarm.advice
    assert alarm.name in MEANINGS
    (alarm,) = find_alarms(two(["proposer"] * 100))
    assert "since its step 0" in alarm.text


def test_a_policy_that_steps_rarely_is_not_starved() -> None:
    assert find_alarms(two((["proposer"] * 8 + ["solver"]) * 5 + ["proposer"] * 30)) == []
    assert find_alarms(two(["proposer"] * 60)) == []
    phased = frozenset({"proposer", "solver"})
    assert find_alarms(two(["proposer", "solver"] * 10 + ["proposer"] * 30, phased=phased)) == []
    assert find_alarms(two(["proposer", "solver"] * 10 + ["proposer"] * 30, own_steps={"solver": 10})) == []


def test_a_seat_that_moves_too_fast_is_named_though_the_mean_is_healthy() -> None:
    (alarm,) = find_alarms(games([0.5] * 10, **{"k3": 0.01, "seat_k3/x": 0.002, "seat_k3/o": 0.09}))
    assert alarm.name == "off_policy"
    assert "in seat o 0.090" in alarm.text


def shown(state: RunState) -> str:
    console = Console(width=100, record=True, file=None)
    with console.capture() as capture:
        console.print(render_run_screen(state, width=100))
    return capture.get()


def test_the_live_view_has_what_there_is_of_seats_and_opponents() -> None:
    seats = {"reward/x": 0.25, "reward/o": -0.25, "seat_k3/x": 0.002, "seat_k3/o": 0.003, "won/x": 0.8, "won/o": 0.2}
    text = shown(games([0.5] * 3, **seats))
    for label in ("x reward", "o reward", "x k3", "o k3", "x wins", "o wins", "wins against past"):
        assert label in text, text
    many = {f"reward/{number}": 0.0 for number in range(100)}
    assert shown(games([0.5] * 3, **many)).count(" reward ") <= 8 + MAX_PLOTS
