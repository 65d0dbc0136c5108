"""Alarms: each is raised by what it names, by nothing less, and a run that goes well raises none."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.observe import alarms
from agentrl.observe.alarms import MEANINGS, RULES, MetricRule, Rule, cut_off_alarm, find_alarms, raise_reply_limit
from agentrl.observe.bottleneck import FailingCalls
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.run_observer import RunObserver
from agentrl.observe.run_screen import render_run_screen
from agentrl.observe.run_state import (
    RunDisplaySettings,
    RunSnapshot,
    RunState,
    display_settings_from_config,
)

PLAN = RunDisplaySettings(steps=40, max_staleness={"solver": 1})
HEALTHY = {
    "advantage/zero_share": 0.5,
    "staleness/mean": 1.0,
    "staleness/max": 2.0,
    "k3": 0.01,
    "lag_k3/0": 0.001,
    "lag_max_difference/0": 0.2,
    "lag_tokens/0": 50.0,
    "entropy": 0.05,
    "episodes/turns": 3.0,
    "format/episodes": 64.0,
    "format/broken_turns": 0.05,
    "format/broken_share": 0.1,
    "format/reward_broken": 0.1,
    "format/reward_kept": 0.7,
    "tool/bad_arguments": 0.15,
}


def a_run(steps: int, *, status: RunSnapshot | None = None, before: int = 0, **changed: object) -> RunState:
    """`before` healthy steps, then some with changed metrics (`_` for `/`)."""
    state = RunState(plan=PLAN, status=status)
    changes = {name.replace("__", "/"): value for name, value in changed.items()}
    for step in range(1, before + steps + 1):
        values: Mapping[str, float] = {"reward/mean": 0.5 + 0.01 * step, **HEALTHY}
        if step > before:
            values = {name: value for name, value in {**values, **changes}.items() if value is not None}  # type: ignore[dict-item]
        state.record("solver", step, values)
    return state


def names(state: RunState) -> list[str]:
    return [alarm.name for alarm in find_alarms(state)]


GRUMPY = MetricRule(
    "grumpy",
    "in each step, the mood is below 0.2",
    metric="mood",
    per="episodes/turns",
    below=0.2,
    min_steps=3,
    text="the mood of {steps} is {mean:.2f}",
    advice="smile",
)


@pytest.mark.parametrize(
    ("steps", "mood", "raised"),
    [(3, 0.3, ["grumpy"]), (2, 0.3, []), (9, 0.61, []), (9, 0.59, ["grumpy"]), (9, None, ["grumpy"])],
)
def test_a_metric_with_a_bound_is_one_row(
    monkeypatch: pytest.MonkeyPatch, steps: int, mood: float | None, raised: list[str]
) -> None:
    monkeypatch.setattr(alarms, "RULES", (*RULES, GRUMPY))
    assert names(a_run(steps, mood=mood)) == raised
    for alarm in find_alarms(a_run(steps, mood=mood)):
        assert (alarm.policy, alarm.advice) == ("solver", "smile")
        assert f"{min(steps, 5)} steps" in alarm.text


def test_one_step_within_the_bound_is_enough_and_an_explained_alarm_is_not_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mixed = a_run(9, mood=0.3)
    mixed.policies["solver"].steps[7] = {**mixed.policies["solver"].steps[7], "mood": 3.0}
    sad = Rule({"sad": "after grumpy"}, lambda state, policy: iter([alarms.Alarm("sad", policy.name, "", "")]))
    monkeypatch.setattr(alarms, "RULES", (GRUMPY, sad._replace(explained_by=("grumpy",))))
    assert names(mixed) == ["sad"]
    assert names(a_run(9, mood=0.3)) == ["grumpy"]


def test_a_mismatch_needs_tokens_and_they_may_lie_apart() -> None:
    assert names(a_run(40, lag_k3__0=0.02, lag_tokens__0=9.0)) == []
    assert names(a_run(15, before=10, lag_k3__0=0.02, lag_tokens__0=15.0)) == ["engine_mismatch"]
    assert names(a_run(2, before=10, lag_k3__0=0.007, lag_tokens__0=900.0)) == ["engine_mismatch"]
    assert names(a_run(15, before=10, lag_k3__0=None, lag_tokens__0=None)) == []
    for odd, expected in (({9, 14}, []), ({9, 14, 18}, ["engine_mismatch"])):
        state = RunState(plan=PLAN)
        for step in range(1, 21):
            healthy = {name: value for name, value in HEALTHY.items() if not name.startswith("lag")}
            measured = {"lag_k3/0": 1.0, "lag_tokens/0": 900.0} if step in odd else {}
            state.record("solver", step, {**healthy, **measured})
        assert names(state) == expected


def test_replies_of_the_environment_raise_no_mismatch() -> None:
    """Their recorded probability is 1, so k3 is that of an imitated text, however right the engine is."""
    unlikely = {"k3": 0.9, "lag_k3__0": 0.9, "lag_tokens__0": 900.0}
    assert names(a_run(5, before=20, **unlikely)) == ["engine_mismatch"]
    assert names(a_run(5, before=20, **unlikely, turns__demonstrated=2.0)) == []


BEFORE_FALL = {
    **{"step/units": 16.0, "reward/mean": 0.9375, "advantage/zero_share": 0.5, "advantage/alone_share": 0.0},
    **{"episodes/turns": 2.0, "format/episodes": 16.0, "format/broken_turns": 0.0625, "turns/length": 0.0625},
    **{"entropy": 0.129, "learning_rate": 0.03},
}
AFTER_FALL = {
    **{"step/units": 16.0, "reward/mean": 0.0, "advantage/zero_share": 1.0, "advantage/alone_share": 0.0},
    **{"episodes/turns": 1.0, "format/episodes": 16.0, "format/broken_turns": 1.0, "turns/length": 1.0},
}
"""Steps of examples/16_qwen.toml with a learning rate of 0.03: the first, and the next ones, which had no gradient."""


def fall(
    *steps: Mapping[str, float], group_size: int = 8, before_training: Mapping[str, float] | None = None
) -> RunState:
    state = RunState(plan=RunDisplaySettings(steps=4, max_staleness={"solver": 0}, group_size=group_size))
    state.record("solver", 0, before_training or {"evaluation/reward": 0.75, "evaluation/reward_deviation": 0.433})
    for number, values in enumerate(steps, 1):
        state.record("solver", number, values)
    return state


def test_a_destroyed_model_is_named_after_its_first_step_with_the_learning_rate() -> None:
    assert find_alarms(fall(BEFORE_FALL)) == []
    for steps in (1, 3, 5, 20):
        (alarm,) = find_alarms(fall(BEFORE_FALL, *[AFTER_FALL] * steps))
        assert (alarm.name, alarm.policy) == ("collapse", "solver")
        assert "fell from 0.938 to 0.000 after step 1" in alarm.text
        assert "100% of the turns break the format, 6% before" in alarm.text
        assert "lower policies.solver.learning_rate (it was 0.03)" in alarm.advice
        assert "max_tokens" not in alarm.line


def test_a_fall_with_an_intact_format_must_be_improbable() -> None:
    intact = {**AFTER_FALL, "format/broken_turns": 0.0625, "turns/length": 0.0}
    assert names(fall(BEFORE_FALL, intact, intact)) == [], "two groups before and four hard tasks"
    assert names(fall(BEFORE_FALL, intact, intact, intact)) == ["collapse"]
    assert names(fall(*[BEFORE_FALL] * 5, intact)) == []
    assert names(fall(*[BEFORE_FALL] * 5, intact, intact)) == ["collapse"]
    assert names(fall(*[BEFORE_FALL] * 5, intact, intact, group_size=0)) == [], "the number of groups is unknown"
    assert names(fall(*[BEFORE_FALL] * 5, *[intact] * 5, group_size=0)) == ["collapse"]
    solved = {**BEFORE_FALL, "reward/mean": 1.0}
    assert names(fall(solved, {**intact, "reward/mean": 0.5})) == [], "one step is no certainty"
    hard = {**BEFORE_FALL, "reward/mean": 0.1}
    assert names(fall(hard, hard, intact, intact, intact)) == [], "most groups of such tasks get no reward"
    assert names(fall(hard, hard, *[AFTER_FALL] * 2)) == ["collapse"]


def test_rewards_above_1_make_the_lowest_one_likelier() -> None:
    intact = {**AFTER_FALL, "format/broken_turns": 0.0625, "turns/length": 0.0}
    mostly = {**BEFORE_FALL, "reward/mean": 0.9}
    rare = {"evaluation/reward": 0.9, "evaluation/reward_deviation": 2.86}  # 10 in 9% of the episodes
    assert names(fall(*[mostly] * 5, intact, intact)) == ["collapse"]
    assert names(fall(*[mostly] * 5, intact, intact, before_training=rare)) == []


def test_a_fall_with_an_advantage_or_a_recovery_is_no_collapse() -> None:
    some = {**AFTER_FALL, "advantage/zero_share": 0.5, "format/broken_turns": 0.0625, "turns/length": 0.0}
    assert names(fall(BEFORE_FALL, some, some)) == []
    assert "collapse" not in names(fall(BEFORE_FALL, AFTER_FALL, AFTER_FALL, BEFORE_FALL))
    assert "collapse" not in names(fall(BEFORE_FALL, {**AFTER_FALL, "advantage/alone_share": 1.0}))


def test_several_steps_of_equal_groups_between_others_point_to_dynamic_sampling() -> None:
    """Steps 3, 9 and 10 of a run of examples/16_qwen.toml had no gradient."""
    equal = {"advantage/zero_share": 1.0, "advantage/alone_share": 0.0, "zero_gradient": 1.0}

    def run(*without: int, steps: int = 10, **changed: float) -> list[str]:
        state = RunState(plan=PLAN)
        for step in range(1, steps + 1):
            values = {**HEALTHY, "reward/mean": 0.9 if step % 2 else 0.8, "zero_gradient": 0.0}
            changes = {name.replace("__", "/"): value for name, value in changed.items()}
            state.record("solver", step, {**values, **equal, **changes} if step in without else values)
        return [alarm.line for alarm in find_alarms(state)]

    (line,) = run(3, 9, 10)
    assert line.startswith("equal_groups: solver: 3 of the last 10 steps had no gradient")
    assert "steps 3, 9, 10" in line
    assert "credit.dynamic_sampling = true" in line
    assert run(9, 10) == []
    assert run(1, 2, 3, steps=12) == [], "two of them are long ago"
    assert run(3, 9, 10, zero_gradient=0.0) == [], "an entropy bonus or a reference gave a gradient"
    assert run(3, 9, 10, advantage__alone_share=1.0) == []
    assert run(3, 9, 10, reward__mean=1.0) == [], "the tasks are solved"
    assert run(*range(1, 11))[0].startswith("equal_groups: solver: 10 of the last 10 steps")
    constant = run(*range(1, 11), reward__mean=0.5)
    assert [line.partition(":")[0] for line in constant] == ["no_signal"], "which says more"


def test_an_effect_that_fails_since_explains_a_fall() -> None:
    state = fall(BEFORE_FALL, AFTER_FALL, AFTER_FALL)
    state.status = RunSnapshot(
        phase="training", failing={"effect 'judge'": FailingCalls(9, 9, 9, "RuntimeError: 503", "effect/error")}
    )
    assert "collapse" not in names(state)
    assert names(state)[0] == "always_fails"


def test_a_run_that_goes_well_raises_none() -> None:
    status = RunSnapshot(
        phase="training", trained=500, dropped={"environment_error": 12, "run_ended": 900, "frozen": 99}
    )
    assert find_alarms(a_run(40, status=status)) == []
    assert find_alarms(RunState(plan=PLAN)) == []


def test_tools_that_demonstrations_do_not_call_raise_no_alarm() -> None:
    offered = {"tools_offered": 1.0, "tool__bad_arguments": 0.0}
    assert names(a_run(5, **offered)) == ["unused_tools"]
    assert names(a_run(5, **offered, turns__demonstrated=2.0)) == []
    assert names(a_run(5, **offered, tool__outside=0.5)) == [], "external agents run their own tools"


def test_tool_errors_are_seen_past_steps_without_an_ended_episode() -> None:
    state = a_run(0, before=10)
    for step in range(11, 21):
        ended = {"episodes/turns": 3.0, "tool/ok": 1.0, "tool/error": 1.0} if step % 2 else {"episodes/turns": None}
        values = {"reward/mean": 0.5 + 0.01 * step, **HEALTHY, **ended}
        state.record("solver", step, {name: value for name, value in values.items() if value is not None})
    assert names(state) == ["tool_errors"]


@pytest.mark.parametrize(
    ("expected", "changes", "words"),
    [
        ("no_signal", {"advantage__zero_share": 1.0, "reward__mean": 0.0}, "each group are equal (mean 0.000)"),
        ("alone", {"advantage__zero_share": 1.0, "advantage__alone_share": 1.0}, "last 1 step have no other episode"),
        ("illegal_output", {"format__broken_turns": 0.85, "turns__length": 2.6}, "turns/length 87%"),
        (
            "illegal_output",
            {"format__broken_turns": 0.85, "tool__unknown_tool": 1.5, "advantage__zero_share": 1.0},
            "tool/unknown_tool 50%",
        ),
    ],
)
def test_one_step_is_enough_for_what_nothing_can_be_learned_from(
    expected: str, changes: dict[str, float], words: str
) -> None:
    first, *_ = find_alarms(a_run(1, step__units=64.0, **changes))
    assert first.name == expected
    assert words in first.text
    assert "agentrl" in first.advice or expected == "alone"


def test_drops_come_before_what_they_cause_and_a_step_without_advantages_is_told() -> None:
    status = RunSnapshot(phase="training", trained=36, dropped={"environment_error": 8})
    nothing = {"advantage__zero_share": 1.0, "reward__mean": 0.0}
    assert names(a_run(1, status=status, step__units=36.0, **nothing)) == ["dropped", "no_signal"]
    assert names(a_run(1, step__units=4.0, **nothing)) == ["no_signal"]
    assert names(a_run(1, before=1, step__units=64.0, **nothing)) == [], "a step that taught something came before"


def test_rewards_that_depend_on_the_task_alone_are_not_taken_for_success() -> None:
    state = a_run(0, before=10)
    for step, reward in enumerate((0.65, 0.5, 0.6, 0.7, 0.8), 11):
        state.record("solver", step, {**HEALTHY, "advantage/zero_share": 0.95, "reward/mean": reward})
    (alarm,) = find_alarms(state)
    assert alarm.name == "nothing_to_learn"
    assert "stopped exploring" in alarm.advice
    (alarm,) = find_alarms(a_run(5, before=10, advantage__zero_share=0.95, reward__mean=1.0))
    assert "stop here" in alarm.advice


def rewards_of(*rewards: float) -> RunState:
    """A run in which no episode has an advantage, with these mean rewards."""
    state = RunState(plan=PLAN)
    for step, reward in enumerate(rewards, 1):
        state.record("solver", step, {**HEALTHY, "advantage/zero_share": 0.95, "reward/mean": reward})
    return state


@pytest.mark.parametrize(
    ("rewards", "expected", "words"),
    [
        ((0.0, 0.0, 0.016, 0.0, 0.0, 0.003, 0.0, 0.0, 0.0, 0.016), "no_signal", "check `reward` first"),
        ((0.0, 0.06, 0.0, 0.0, 0.0, 0.0, 0.016, 0.0, 0.0), "no_signal", "check `reward` first"),
        ((-1.0, -1.0, -0.99, -1.0, -0.995), "no_signal", "check `reward` first"),
        ((0.5,) * 6, "no_signal", "check `reward` first"),
        ((1.0,) * 6, "no_signal", "if it is right, harder tasks"),
        ((0.99, 1.0, 1.0, 0.998, 1.0, 1.0), "nothing_to_learn", "harder tasks"),
        ((0.2, 0.6, 1.0, 1.0, 0.99, 1.0, 1.0), "nothing_to_learn", "harder tasks"),
    ],
)
def test_a_reward_at_its_floor_gives_no_signal_and_one_at_1_means_solved(
    rewards: tuple[float, ...], expected: str, words: str
) -> None:
    (alarm,) = find_alarms(rewards_of(*rewards))
    assert alarm.name == expected
    assert words in alarm.advice
    assert "stopped exploring" not in alarm.advice
    assert ("the tasks are solved" in alarm.text) == (expected == "nothing_to_learn")


PROPOSING = {
    "gate__acceptance": 0.9,
    "proposals__made": 16.0,
    "proposals__repeated": 0.1,
    "proposals__structure_entropy": 0.9,
    "pass_rate__groups": 14.0,
    "pass_rate__frontier": 0.5,
    "pass_rate__0": 0.2,
    "pass_rate__1": 0.2,
}


@pytest.mark.parametrize(
    ("name", "changes", "advice"),
    [
        ("gate_closed", {"gate__acceptance": 0.3}, "valid proposals"),
        ("proposals_alike", {"proposals__structure_entropy": 0.1}, "entropy_bonus = 0.04"),
        ("proposals_repeat", {"proposals__repeated": 0.6}, "refuse them at the gate"),
        ("off_frontier", {"pass_rate__frontier": 0.1, "pass_rate__1": 0.7}, "learns more slowly than the proposer"),
        ("off_frontier", {"pass_rate__frontier": 0.1, "pass_rate__0": 0.7}, "a base model that solves some"),
    ],
)
def test_a_collapse_of_what_is_proposed_is_the_run_s(name: str, changes: dict[str, float], advice: str) -> None:
    (alarm,) = find_alarms(a_run(5, before=10, **{**PROPOSING, **changes}))
    assert (alarm.name, alarm.policy) == (name, "")
    assert name in MEANINGS
    assert advice in alarm.advice


@pytest.mark.parametrize(
    ("cause", "advice"),
    [("greedy", "a temperature above 0"), ("penalty", "presence_penalty"), ("filter", "[sampling]")],
)
def test_turns_that_are_not_trained_are_said_after_one_step(cause: str, advice: str) -> None:
    (alarm,) = find_alarms(a_run(1, **{f"untrained__{cause}": 0.9}))
    assert (alarm.name, alarm.policy) == (f"untrained_{cause}", "solver")
    assert alarm.text.startswith("30% of the newest step's turns are not trained: the agent asked for them ")
    assert advice in alarm.advice
    assert "gateway.sampling = 'run'" in alarm.advice
    assert not find_alarms(a_run(1, **{f"untrained__{cause}": 0.02}))


def test_masked_tokens_are_said_from_a_quarter_on() -> None:
    (alarm,) = find_alarms(a_run(5, before=10, staleness__masked=0.3))
    assert (alarm.name, alarm.policy) == ("masked", "solver")
    assert names(a_run(5, before=10, staleness__masked=0.2)) == []


def test_children_that_nobody_proposed_may_all_succeed() -> None:
    assert names(a_run(10, **PROPOSING)) == []
    assert names(a_run(10, pass_rate__groups=14.0, pass_rate__frontier=0.0, pass_rate__0=0.0, pass_rate__1=1.0)) == []
    few = {**PROPOSING, "pass_rate__groups": 2.0, "pass_rate__frontier": 0.0, "pass_rate__1": 1.0}
    assert names(a_run(10, **few)) == [], "ten proposals say nothing"


def test_one_odd_step_raises_nothing() -> None:
    odd = {"format__broken_turns": 0.9, "advantage__zero_share": 1.0, "staleness__mean": 1.6, "k3": 0.1}
    assert names(a_run(1, before=10, **odd)) == []


@pytest.mark.parametrize(("release", "raised"), [("group", ["staleness"]), ("late", []), ("episode", [])])
def test_late_members_may_be_half_a_step_staler(release: str, raised: list[str]) -> None:
    config = {"steps": 40, "policies": {"solver": {"max_staleness": 1}}, "credit": {"release": release}}
    state = a_run(6, staleness__mean=1.5)
    state.plan = display_settings_from_config(config)
    assert names(state) == raised


def test_episodes_from_before_a_resume_raise_no_staleness_alarm() -> None:
    """A step that is taken again trains on tokens that a rollback made older."""
    state = a_run(5, before=10, staleness__mean=3.0)
    assert names(state) == ["staleness"]
    state.record("solver", 12, {**HEALTHY, "staleness/mean": 3.0, "staleness/before_resume": 64.0})
    for step in range(13, 18):
        assert names(state) == []
        state.record("solver", step, {**HEALTHY, "staleness/mean": 3.0})
    assert names(state) == ["staleness"]


def test_rewards_that_never_differ_are_no_signal() -> None:
    assert names(a_run(5, advantage__zero_share=1.0, reward__mean=0.0)) == ["no_signal"]


def evaluated_first(deviation: float, episodes: float = 64.0) -> RunState:
    state = RunState(plan=PLAN)
    measured = {"reward": 0.0, "episodes": episodes, "reward_deviation": deviation}
    state.record("solver", 0, {f"evaluation/{name}": value for name, value in measured.items()})
    return state


def test_rewards_that_never_differ_are_told_of_before_a_step_is_wasted() -> None:
    state = evaluated_first(0.0)
    assert names(state) == ["no_signal"]
    state.record("solver", 1, HEALTHY | {"advantage/zero_share": 1.0})
    assert names(state) == ["no_signal"]
    state.record("solver", 2, HEALTHY)
    assert names(state) == []
    assert names(evaluated_first(0.1)) == []
    assert names(evaluated_first(0.0, episodes=8.0)) == []


def test_illegal_output_that_is_being_unlearned_is_no_collapse() -> None:
    state = RunState(plan=PLAN)
    for step, share in enumerate((0.9, 0.8, 0.7, 0.5, 0.4), start=1):
        state.record("solver", step, {**HEALTHY, "reward/mean": 0.1 * step, "format/broken_turns": share})
    assert names(state) == []


def test_a_few_tool_errors_or_fewer_at_each_step_raise_nothing() -> None:
    assert names(a_run(5, tool__ok=0.95, tool__error=0.05)) == []
    assert names(a_run(4, tool__ok=0.5, tool__error=1.0)) == []
    assert names(a_run(5, tool__error=1.0)) == ["tool_errors"]
    state = RunState(plan=PLAN)
    for step, errors in enumerate((0.9, 0.8, 0.7, 0.5, 0.4), start=1):
        tools = {"tool/ok": 1.0 - errors, "tool/error": errors}
        state.record("solver", step, {**HEALTHY, "reward/mean": 0.1 * step, **tools})
    assert names(state) == []


@pytest.mark.parametrize("reason", ["environment_error", "episode_timeout", "something_new"])
def test_a_reason_that_takes_everything_is_named(reason: str) -> None:
    (alarm,) = find_alarms(RunState(plan=PLAN, status=RunSnapshot(phase="training", trained=20, dropped={reason: 20})))
    assert (alarm.name, alarm.policy) == ("dropped", "")
    assert f"because of {reason}" in alarm.text


def test_what_was_not_measured_raises_nothing() -> None:
    state = RunState(plan=RunDisplaySettings())
    for step in range(1, 30):
        state.record("solver", step, {})
    assert find_alarms(state) == []


def test_an_alarm_is_shown_once_and_kept_in_a_file(tmp_path: Path) -> None:
    directory, stream = RunDirectory.create(tmp_path / "run", "{}"), io.StringIO()
    with RunObserver(directory, plan=PLAN, stream=stream) as observer:
        for step in range(1, 9):
            observer.on_step("solver", step, {**HEALTHY, "reward/mean": 0.5, "k3": 1.0})
    assert stream.getvalue().count("ALARM off_policy: solver: k3 = 1.000") == 1
    (line,) = map(json.loads, (directory.path / "alarms.jsonl").read_text().splitlines())
    assert (line["step"], line["name"]) == (5, "off_policy")


def test_a_tool_that_never_worked_stays_the_first_alarm_until_a_call_succeeds() -> None:
    """Later steps break the calls, and their rewards are all equal."""
    nothing = {"advantage/zero_share": 1.0, "reward/mean": 0.0, "step/units": 64.0}
    failing = {"tool price": FailingCalls(64.0, 64.0, 64.0, "KeyError: 1 at shop.py:8 in price", "tool/error")}
    status = RunSnapshot(phase="training", failing=failing, raised="tool price: KeyError: 1 at shop.py:8 in price")
    state = RunState(plan=PLAN, status=status)
    for step in range(1, 6):
        state.record("solver", step, {**HEALTHY, **nothing, "tool/error": 1.0})
        assert names(state) == ["always_fails"], "and neither tool_errors nor no_signal, which follow from it"
    state.record("solver", 6, {**HEALTHY, **nothing, "tool/error": 4.0, "episodes/context_full": 0.9})
    assert names(state)[0] == "always_fails", "repeated calls fill the context"
    state.status = RunSnapshot(phase="training", raised=status.raised)
    assert "tool_errors" in names(state)


def test_two_broken_tools_are_both_told(tmp_path: Path) -> None:
    directory, stream = RunDirectory.create(tmp_path / "demo", "{}"), io.StringIO()
    failing = {f"tool {name}": FailingCalls(4.0, 4.0, 4.0, "KeyError: 1", "tool/error") for name in ("buy", "sell")}
    with RunObserver(directory, plan=PLAN, stream=stream) as observer:
        observer.state.status = RunSnapshot(phase="training", failing=failing)
        observer.on_step("solver", 1, HEALTHY)
        observer.on_step("solver", 2, HEALTHY)
    for name in ("buy", "sell"):
        assert stream.getvalue().count(f"ALARM always_fails: tool {name} failed in all of its 4 calls") == 1


def test_the_screen_names_alarms_that_no_longer_hold(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path / "run", "{}")

    def screen(state: RunState) -> str:
        console = Console(file=io.StringIO(), width=100)
        console.print(render_run_screen(state))
        return console.file.getvalue()  # type: ignore[attr-defined]

    with RunObserver(directory, plan=PLAN, quiet=True) as observer:
        for step in range(1, 31):
            healthy = {"reward/mean": 0.5 + 0.01 * step, **HEALTHY}
            observer.on_step("solver", step, {**healthy, "k3": 0.3} if 10 <= step < 16 else healthy)
            if step == 15:
                assert "ALARM off_policy" in screen(observer.state)
        assert "no alarms now; 1 earlier: off_policy at step" in screen(observer.state)
    with RunObserver(directory, plan=PLAN, quiet=True) as observer:
        assert "no alarms now; 1 earlier: off_policy at step" in screen(observer.state), "after a resume, too"
    assert "earlier" not in screen(a_run(10))


def test_advice_names_a_run_elsewhere_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path, argument in {"runs/a b": "'a b'", "elsewhere/a": "elsewhere/a", f"{tmp_path}/runs/a": "a"}.items():
        state = RunState(plan=PLAN, path=path, status=RunSnapshot(phase="training", examples={"completed": "e3"}))
        state.record("solver", 1, {**HEALTHY, "advantage/zero_share": 1.0, "reward/mean": 0.0, "step/units": 64.0})
        (alarm,) = find_alarms(state)
        assert f"`agentrl episode show {argument} e3`" in alarm.advice


def test_advice_names_the_run_and_an_example_and_is_given_once() -> None:
    plan = RunDisplaySettings(name="ra", steps=40, max_staleness={"solver": 1, "checker": 1})
    status = RunSnapshot(phase="training", examples={"tool/error": "e3", "completed": "e9"})
    state = RunState(plan=plan, status=status)
    for policy in ("solver", "checker"):
        nothing = {"advantage/zero_share": 1.0, "reward/mean": 0.0, "step/units": 64.0}
        for step in range(1, 6):
            state.record(policy, step, {**HEALTHY, **nothing, "tool/error": 1.0})
    advice = {(alarm.name, alarm.policy): alarm.advice for alarm in find_alarms(state)}
    assert "`agentrl episode list ra --where 'metric.tool/error > 0'`" in advice["tool_errors", "solver"]
    assert "`agentrl episode why ra e3`" in advice["tool_errors", "solver"]
    assert "`agentrl episode show ra e9`" in advice["no_signal", "solver"].partition(";")[0], "the reward comes first"
    assert advice["tool_errors", "checker"] == "the same as for solver"
    for examples, newest in (({"max_turns": "e4"}, "ra e4"), ({}, "ra")):
        state.status = RunSnapshot(phase="training", examples=examples)
        advice = {(alarm.name, alarm.policy): alarm.advice for alarm in find_alarms(state)}
        assert not any("EPISODE" in text for text in advice.values())
        assert f"`agentrl episode show {newest}`" in advice["no_signal", "solver"]
        assert f"`agentrl episode why {newest}`" in advice["tool_errors", "solver"]


CUT = {"evaluation/episodes": 16.0, "evaluation/reward": 0.0, "evaluation/cut/max_turns": 14.0}


@pytest.mark.parametrize(
    ("values", "alarming"),
    [
        ({}, True),
        ({"evaluation/cut/max_turns": 7.0}, False),
        ({"evaluation/reward": 0.1}, False),
        ({"evaluation/reward": -200.0}, False),  # -1 per turn, up to a limit by design
        ({"evaluation/reward_deviation": 1.0}, False),
        ({"evaluation/reward/solver": 1.0}, False),
        ({"evaluation/reward_error": 0.1, "evaluation/named_reward/form": 0.0}, True),
    ],
)
def test_an_evaluation_without_reward_whose_episodes_were_cut_off_names_the_limit(
    values: dict[str, float], alarming: bool
) -> None:
    state = RunState(plan=RunDisplaySettings())
    state.record("solver", 0, {**CUT, **values})
    assert [alarm.name == "cut_off" for alarm in find_alarms(state)] == [True] * alarming
    own = {"policies.solver.sampling.max_turns": 4, "sampling.max_tokens": 64, "engine.max_context": 512}
    plan = RunDisplaySettings(limits={"sampling.max_turns": 3, **own})
    alarm = cut_off_alarm({**CUT, "evaluation/cut/max_tokens": 1.0}, "solver", plan)
    assert alarm is not None
    limits = "14 at policies.solver.sampling.max_turns = 4, 1 at sampling.max_tokens = 64"
    assert f"limits cut off 15 of 16 episodes: {limits}" in alarm.text
    assert "raise policies.solver.sampling.max_turns, or say" in alarm.advice
    assert "raise sampling.max_tokens to 128, or ask" in alarm.advice


@pytest.mark.parametrize(
    ("cut", "limits", "told"),
    [
        (38, {"sampling.max_tokens": 64}, "raise sampling.max_tokens to 512"),
        (64, {"sampling.max_tokens": 64}, "raise sampling.max_tokens to 512"),
        (1, {"sampling.max_tokens": 64}, "raise sampling.max_tokens to 128"),
        (38, {"sampling.max_tokens": 64, "engine.max_context": 512}, "raise sampling.max_tokens to 256"),
        (
            38,
            {"sampling.max_tokens": 64, "engine.max_context": 128},
            "raise sampling.max_tokens and engine.max_context",
        ),
        (38, {"policies.solver.sampling.max_tokens": 8}, "raise policies.solver.sampling.max_tokens to 64"),
        (38, {}, "raise sampling.max_tokens,"),
    ],
)
def test_replies_that_are_cut_name_the_limit_and_one_to_set(cut: int, limits: dict[str, int], told: str) -> None:
    state = RunState(plan=RunDisplaySettings(limits=limits))
    values = {"format/broken_turns": cut / 64, "turns/length": cut / 16, "episodes/turns": 4.0, "format/episodes": 16.0}
    if cut < 32:
        assert told in raise_reply_limit(state.plan, "solver", cut, 64)
        return
    state.record("solver", 1, values)
    (alarm,) = [alarm for alarm in find_alarms(state) if alarm.name == "illegal_output"]
    assert told in alarm.advice
    setting, value = next(iter(limits.items()), ("sampling.max_tokens", 0))
    assert f"{cut} of 64 replies were cut at {setting}{f' = {value}' if value else ''}" in alarm.text


@pytest.mark.parametrize(("limit", "cut"), [(64, -1.0), (64, float("nan")), (-64, 3.0), (64, 1e300)])
def test_no_number_of_a_received_run_breaks_an_advice(limit: int, cut: float) -> None:
    plan = RunDisplaySettings(limits={"sampling.max_tokens": limit})
    assert raise_reply_limit(plan, "solver", cut, 4).startswith("raise sampling.max_tokens")
