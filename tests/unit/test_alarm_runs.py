"""Each alarm has a run that raises it, and sound runs that raise none."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

import pytest

from agentrl.observe.alarms import MEANINGS, find_alarms
from agentrl.observe.bottleneck import FailingCalls
from agentrl.observe.run_state import RunDisplaySettings, RunSnapshot, RunState
from tests.unit.test_observe_alarms import CUT, HEALTHY, PLAN, PROPOSING, a_run
from tests.unit.test_observe_coevolution import games, two, won

NOISE = 0.03
"""Deviation of a step's mean reward over 64 episodes."""


def curve(
    rewards: Sequence[float],
    held_out: Mapping[int, float],
    *,
    policies: Sequence[str] = ("solver",),
    held_out_episodes: float = 64.0,
    **changing: Callable[[int], float],
) -> RunState:
    """A run with a training reward at each step, held-out rewards of 0 or 1 after some steps, and changing metrics
    (`__` for `/`)."""
    state = RunState(plan=RunDisplaySettings(steps=len(rewards), max_staleness=dict.fromkeys(policies, 1)))
    draw = random.Random(0)
    for step in range(len(rewards) + 1):
        for policy in policies:
            if step:
                metrics = {name.replace("__", "/"): value(step) for name, value in changing.items()}
                reward = rewards[step - 1] + draw.gauss(0.0, NOISE)
                state.record(policy, step, {**HEALTHY, "entropy": 0.5, "reward/mean": reward, **metrics})
            if step in held_out:
                mean = held_out[step]
                deviation = math.sqrt(max(mean * (1.0 - mean), 0.0))
                evaluation = {
                    "reward": mean,
                    "reward_deviation": deviation,
                    "episodes": held_out_episodes,
                    "tasks": 64.0,
                }
                state.record(policy, step, {f"evaluation/{name}": value for name, value in evaluation.items()})
    return state


def line(first: float, last: float, steps: int) -> list[float]:
    return [first + (last - first) * step / (steps - 1) for step in range(steps)]


def snapshot(**changes: object) -> RunSnapshot:
    return RunSnapshot(phase="training", **changes)  # type: ignore[arg-type]


def frozen_lake() -> RunState:
    """The training reward pays walking to and fro better than a hole, and the held-out reward counts the goal alone."""
    return curve(
        line(-0.25, -0.11, 32),
        {0: 0.016, 13: 0.0, 26: 0.0, 32: 0.0},
        episodes__out_of_turns=lambda step: 0.2 + 0.4 * step / 32,
        entropy=lambda step: 1.4 - 0.01 * step,
    )


def equal_groups() -> RunState:
    """Three of ten steps have no gradient."""
    state = RunState(plan=PLAN)
    for step in range(1, 11):
        equal = {"advantage/zero_share": 1.0, "zero_gradient": 1.0} if step in (3, 9, 10) else {"zero_gradient": 0.0}
        state.record("solver", step, {**HEALTHY, "reward/mean": 0.9 if step % 2 else 0.8, **equal})
    return state


FAILING = {"tool price": FailingCalls(4.0, 4.0, 4.0, "KeyError: 1", "tool/error")}
RAISED_BY: dict[str, RunState] = {
    "always_fails": a_run(1, status=snapshot(failing=FAILING)),
    "dropped_by_time": a_run(5, status=snapshot(trained=200, dropped={"episode_timeout": 4})),
    "dropped": a_run(5, status=snapshot(trained=20, dropped={"no_reward": 20})),
    "out_of_time": a_run(1, episodes__timed_out=0.6),
    "context_full": a_run(1, episodes__context_full=0.6),
    "out_of_turns": a_run(5, before=5, episodes__out_of_turns=0.57),
    "collapse": a_run(5, before=10, advantage__zero_share=1.0, reward__mean=0.0, entropy=0.001),
    "untrained_greedy": a_run(1, untrained__greedy=0.9),
    "untrained_penalty": a_run(1, untrained__penalty=0.9),
    "untrained_filter": a_run(1, untrained__filter=0.9),
    "untrained_grammar": a_run(1, untrained__grammar=0.9),
    "empty_output": a_run(1, turns__empty=2.0),
    "hidden_tools": a_run(1, tools_hidden=1.0, tools_offered=1.0, tool__bad_arguments=None),
    "foreign_calls": a_run(1, **{"foreign_calls__json": 1.0}),
    "cut_off": curve([], {}),
    "illegal_output": a_run(5, before=10, format__broken_turns=0.9),
    "unused_tools": a_run(5, before=10, tools_offered=1.0, tool__bad_arguments=0.005),
    "tool_errors": a_run(5, before=10, tool__ok=0.66, tool__error=0.34),
    "max_lag": a_run(5, before=10, staleness__exceeded=1.0),
    "no_signal": a_run(1, step__units=64.0, advantage__zero_share=1.0, reward__mean=0.0),
    "alone": a_run(5, before=10, advantage__zero_share=1.0, advantage__alone_share=0.6),
    "nothing_to_learn": a_run(5, before=10, advantage__zero_share=0.95, reward__mean=1.0),
    "equal_groups": equal_groups(),
    "held_out_behind": frozen_lake(),
    "staleness": a_run(5, before=10, staleness__mean=1.5),
    "engine_mismatch": a_run(5, before=10, k3=0.02, lag_k3__0=0.2),
    "off_policy": a_run(5, before=10, k3=0.2),
    "lost_routing": a_run(5, before=10, lost_routing=3.0),
    "masked": a_run(5, before=10, staleness__masked=0.3),
    "gate_closed": a_run(5, before=10, **{**PROPOSING, "gate__acceptance": 0.3}),
    "proposals_alike": a_run(5, before=10, **{**PROPOSING, "proposals__structure_entropy": 0.1}),
    "proposals_repeat": a_run(5, before=10, **{**PROPOSING, "proposals__repeated": 0.6}),
    "off_frontier": a_run(5, before=10, **{**PROPOSING, "pass_rate__frontier": 0.1, "pass_rate__1": 0.7}),
    "one_seat_wins": won(0.99, 20.0),
    "loses_to_past": games([0.6] * 20 + [0.25] * 5),
    "starved": two(["proposer", "solver"] * 10 + ["proposer"] * 30),
}
RAISED_BY["cut_off"].record("solver", 0, CUT)

SOUND: dict[str, RunState] = {
    "the calculator, solved in 30 steps": curve(
        line(0.5, 0.97, 30), {0: 0.5, 30: 0.97}, entropy=lambda step: max(0.5 * 0.85**step, 0.02)
    ),
    "a reward far from its largest, still rising": curve(
        line(0.1, 0.4, 40), {0: 0.1, 20: 0.25, 40: 0.4}, entropy=lambda step: 0.5 * 0.96**step
    ),
    "the frozen lake with a price on walking": curve(
        line(-0.3, 0.1, 26),
        {0: 0.016, 13: 0.25, 26: 0.266},
        episodes__out_of_turns=lambda step: 0.45,
        entropy=lambda step: 1.4 - 0.02 * step,
    ),
    "a game of one-token moves between equals": curve(
        [0.0] * 60, {0: 0.0, 30: 0.0, 60: 0.0}, tokens_per_turn=lambda step: 1.0, entropy=lambda step: 0.3
    ),
    "two policies that learn": curve(
        line(-0.2, 0.2, 25),
        {0: 0.05, 25: 0.17},
        policies=("speaker", "listener"),
        entropy=lambda step: 0.5 * 0.95**step,
    ),
    "few held-out tasks, which say little": curve(line(0.3, 0.5, 30), {0: 0.5, 30: 0.375}, held_out_episodes=8.0),
    "nothing learned, nothing lost": curve([0.3] * 40, {0: 0.3, 20: 0.32, 40: 0.28}),
    "a peaked policy from the start": curve(line(0.6, 0.7, 30), {0: 0.6, 30: 0.68}, entropy=lambda step: 0.05 / step),
    "tools that the model calls though the template hides them": a_run(
        5, tools_hidden=1.0, tools_offered=1.0, tool__ok=1.0
    ),
    "moves of a first step that run out": a_run(4, episodes__out_of_turns=0.9),
}


@pytest.mark.parametrize("name", MEANINGS)
def test_each_alarm_has_a_run_that_raises_it(name: str) -> None:
    raised = {alarm.name: alarm for alarm in find_alarms(RAISED_BY[name])}
    assert raised[name].advice
    assert raised.keys() <= {name, *(["out_of_turns"] if name == "held_out_behind" else [])}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_raises_none(name: str) -> None:
    assert find_alarms(SOUND[name]) == []


def test_the_lake_s_alarms_name_its_two_signs() -> None:
    turns, held_out = find_alarms(frozen_lake())
    assert (turns.name, held_out.name) == ("out_of_turns", "held_out_behind")
    assert "take some reward from them" in turns.advice
    assert "the held-out reward went from 0.016 to 0.000" in held_out.text


@pytest.mark.parametrize("name", ["cut_off", "illegal_output", "no_signal", "unused_tools"])
def test_hidden_tools_explain_what_follows_from_them(name: str) -> None:
    """Eight times the tokens change nothing while the model sees no tools."""
    changes: dict[str, float | None] = {
        "tools_hidden": 1.0,
        "tool__bad_arguments": None,
        "advantage__zero_share": 1.0,
        "reward__mean": 0.0,
        "format__broken_turns": 0.9,
        "turns__length": 2.7,
        "tools_offered": 1.0,
    }
    if name == "cut_off":
        state = curve([], {})
        state.record("solver", 0, {**CUT, "evaluation/tools_hidden": 1.0, "evaluation/reward_deviation": 0.0})
    else:
        state = a_run(5, **changes)
    alarms = find_alarms(state)
    assert [alarm.name for alarm in alarms] == ["hidden_tools"]
    assert "model.tools_in = 'system'" in alarms[0].advice


def test_an_advice_on_junk_names_a_lower_temperature() -> None:
    before = curve([], {})
    before.record("solver", 0, {**CUT, "evaluation/cut/max_tokens": 16.0})
    broken = (a_run(5, format__broken_turns=0.9, **{f"turns__{kind}": 2.7}) for kind in ("length", "illegal"))
    for state in (before, *broken):
        assert "a lower sampling.temperature" in find_alarms(state)[0].advice
