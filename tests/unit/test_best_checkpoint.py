"""The running mean that chooses versions and ends a run."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.app.recovery import ResumeCheckpoint
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.config.sections import BestConfig
from agentrl.core.records import Lines, PolicyVersion
from agentrl.environments.tiny_model.warm_up import TRAIN
from agentrl.orchestrator.versions import BestCheckpointTracker, PolicyBoard, decode_best_running_mean


def hear(best: BestCheckpointTracker, values: list[float], *, first: int = 1) -> None:
    for step, value in enumerate(values, start=first):
        versions = {"solver": PolicyVersion("solver", 0, step), "other": PolicyVersion("other", 1, 2 * step)}
        best.record_metrics("solver", {"reward/mean": value}, versions)


def board(step: int, lineage: int = 0) -> PolicyBoard:
    parents = {("solver", each): PolicyVersion("solver", each - 1, 2 * each) for each in range(1, lineage + 1)}
    return PolicyBoard({"solver": PolicyVersion("solver", lineage, step)}, ["solver"], Lines(parents))


def tracker(**changes: Any) -> BestCheckpointTracker:
    return BestCheckpointTracker(**{"metric": "reward/mean", "policy": "solver", "window": 2, **changes})


def test_the_versions_of_the_largest_mean_are_kept_together() -> None:
    best = tracker()
    hear(best, [0.9])
    assert best.summary() is None, "one measurement is no mean of two"
    hear(best, [0.1, 0.7, 0.5, 0.6, 0.0], first=2)
    versions = {"solver": "solver@0.3", "other": "other@1.6"}
    steps = {"solver": 3, "other": 6}
    assert best.summary() == {"metric": "reward/mean", "value": 0.6, "steps": steps, "versions": versions}
    assert best.why_stop() is None, "nobody asked for an end"


@pytest.mark.parametrize(
    "change", [{"metric": "reward/solver"}, {"policy": "other"}, {"window": 3}, {"smallest": True}]
)
def test_a_run_resumed_with_another_measure_begins_to_measure_anew(change: dict[str, Any]) -> None:
    before = tracker()
    hear(before, [0.9, 0.8])
    assert tracker(measured=before.measured, stop_at=0.5).measured == before.measured, "bounds may change"
    anew = tracker(measured=before.measured, **change).measured
    assert not anew.newest
    assert not anew.versions


def test_a_run_whose_best_versions_are_gone_begins_to_measure_anew(tmp_path: Path) -> None:
    before = tracker()
    hear(before, [0.9, 0.8])
    manifest: Any = SimpleNamespace(measured=before.measured)
    resumed = ResumeCheckpoint(manifest=manifest, rejected=()).running_best(tmp_path)
    after_resume = tracker(measured=resumed)
    assert not after_resume.measured.newest
    assert not after_resume.measured.versions


def test_small_values_may_be_the_good_ones() -> None:
    best = tracker(smallest=True, stop_at=2.0)
    hear(best, [5.0, 3.0])
    summary = best.summary()
    assert summary is not None
    assert (summary["value"], summary["steps"]) == (4.0, {"solver": 2, "other": 4})
    hear(best, [7.5], first=3)
    assert best.why_stop() is None
    hear(best, [0.0, 4.0], first=4)
    assert best.why_stop() == "reward/mean reached 2"


@pytest.mark.parametrize(
    ("policy", "metrics"),
    [
        ("other", {"reward/mean": 9.0}),
        ("solver", {"reward/solver": 9.0}),
        ("solver", {"reward/mean": math.nan}),
        ("solver", {"reward/mean": math.inf}),
    ],
)
def test_what_is_not_the_metric_of_the_policy_is_not_heard(policy: str, metrics: dict[str, float]) -> None:
    best = tracker(window=1)
    best.record_metrics(policy, metrics, {"solver": PolicyVersion("solver", 0, 1)})
    assert best.measured.newest == ()
    assert not best.measured.versions


def test_nothing_is_chosen_where_nothing_is_asked_for() -> None:
    best = BestCheckpointTracker()
    best.record_metrics("solver", {"reward/mean": 1.0}, {"solver": PolicyVersion("solver", 0, 1)})
    assert (best.summary(), best.why_stop(), best.needed(board(1))) == (None, None, set())


@given(
    st.lists(st.floats(-1e6, 1e6), max_size=12),
    st.integers(0, 12),
    st.integers(1, 4),
    st.booleans(),
)
def test_a_choice_that_is_read_back_goes_on_as_if_it_had_never_stopped(
    values: list[float], cut: int, window: int, smallest: bool
) -> None:
    whole = tracker(window=window, smallest=smallest, stop_at=0.5)
    hear(whole, values)
    first = tracker(window=window, smallest=smallest, stop_at=0.5)
    hear(first, values[:cut])
    found = decode_best_running_mean(json.loads(json.dumps(first.measured.as_data())))
    second = tracker(window=window, smallest=smallest, stop_at=0.5, measured=found)
    assert second.why_stop() == first.why_stop()
    hear(second, values[cut:], first=cut + 1)
    assert second.measured == whole.measured
    assert second.why_stop() == whole.why_stop()


@pytest.mark.parametrize(
    "data",
    [
        {"newest": [float("nan")], "best": None, "versions": {}},
        {"newest": [], "best": None, "versions": {"solver": [0, 1]}},
        {"newest": [], "best": 1.0, "versions": {"solver": [0]}},
        {"newest": 3, "best": None, "versions": {}},
    ],
)
def test_what_is_no_measurement_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_best_running_mean({"what": "", **data})


@pytest.mark.parametrize(
    ("values", "window", "step"),
    [
        ([0.5, 0.0, 0.0], 1, 1),
        ([0.6, 0.1, 0.0], 2, 1),
        ([0.1, 0.9, 0.2, 0.0], 3, 2),
        ([0.5, 0.5, 0.1], 2, 2),
        ([0.2, 0.1, 0.8], 3, 3),
    ],
)
def test_the_best_version_has_the_largest_measurement_of_the_best_window(
    values: list[float], window: int, step: int
) -> None:
    best = tracker(window=window)
    for number in range(1, len(values) + 1):
        hear(best, [values[number - 1]], first=number)
        kept = best.needed(board(number))
    assert best.measured.versions["solver"].step == step
    assert best.measured.versions["solver"] in kept


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.integers(1, 4))
def test_no_version_is_chosen_that_was_not_kept(values: list[float], window: int) -> None:
    best = tracker(window=window)
    kept = {PolicyVersion("solver", 0, 1), PolicyVersion("other", 1, 2)}
    for number, value in enumerate(values, start=1):
        hear(best, [value], first=number)
        assert kept >= set(best.measured.versions.values())
        following = {PolicyVersion("solver", 0, number + 1), PolicyVersion("other", 1, 2 * number + 2)}
        kept = (kept & best.needed(board(number))) | following


def test_a_step_measures_the_version_with_which_most_of_its_units_began() -> None:
    best = tracker(lags={"solver": 2})
    units = [[PolicyVersion("solver", 0, step), PolicyVersion("other", 0, 9)] for step in (3, 4, 4, 5, 5)]
    assert best.sampled_by(board(5), units) == {"solver": PolicyVersion("solver", 0, 5)}, "of several the newest"
    assert best.sampled_by(board(5), units[:3]) == {"solver": PolicyVersion("solver", 0, 4)}
    assert best.sampled_by(board(9), units) == {"solver": PolicyVersion("solver", 0, 7)}, "the oldest one on disk"
    assert best.sampled_by(board(5), []) == {"solver": PolicyVersion("solver", 0, 5)}
    for pair in ([4, 5], [5, 4]):
        two_agents = [[PolicyVersion("solver", 0, step) for step in pair]]
        assert best.sampled_by(board(5), two_agents) == {"solver": PolicyVersion("solver", 0, 4)}, "the older of both"
    # lineage 1 began at step 2: step 3 of lineage 0 is undone, and counts as the step both came from
    assert best.sampled_by(board(3, lineage=1), units[:1]) == {"solver": PolicyVersion("solver", 1, 2)}
    assert best.sampled_by(board(3, lineage=1), [[PolicyVersion("solver", 0, 1)]]) == {
        "solver": PolicyVersion("solver", 0, 1)
    }
    assert {version.step for version in best.needed(board(5))} == {3, 4, 5}


@pytest.mark.parametrize(
    ("current", "parents", "version", "staleness"),
    [
        ((1, 0), {}, (0, 5), 5),  # the resume began with the initial weights
        ((2, 3), {}, (0, 5), 5),
        ((2, 3), {}, (0, 0), 3),
        ((3, 4), {3: (2, 2)}, (0, 5), 5),
        ((1, 3), {1: (0, 2)}, (0, 5), 3),
        ((1, 9), {1: (0, 2)}, (0, 5), 7),
        ((1, 3), {1: (0, 2)}, (0, 1), 2),
    ],
)
def test_weights_that_a_resume_undid_are_as_far_as_the_version_both_came_from(
    current: tuple[int, int], parents: dict[int, tuple[int, int]], version: tuple[int, int], staleness: int
) -> None:
    solver = partial(PolicyVersion, "solver")
    tree = {("solver", lineage): solver(*parent) for lineage, parent in parents.items()}
    assert PolicyBoard({"solver": solver(*current)}, ["solver"], Lines(tree)).staleness(solver(*version)) == staleness


def test_a_checkpoint_that_lacks_the_measured_versions_fills_its_window_again() -> None:
    best = tracker()
    hear(best, [0.9, 0.8])
    data = json.loads(json.dumps(best.measured.as_data()))
    del data["measured_versions"]
    decoded = decode_best_running_mean(data)
    assert decoded.newest == ()
    assert (decoded.best, decoded.versions) == (best.measured.best, best.measured.versions)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"best": {"stop_at": 0.5}}, r"stop_at.*metric"),
        ({"best": {"metric": "-judge/reward/mean"}}, r"best\.metric.*'judge'"),
        ({"best": {"metric": "-evaluation/turns"}, "evaluation": {"tasks": 0}}, r"evaluation\.tasks"),
        (
            {"best": {"metric": "reward/mean", "stop_at": 0.1}, "deterministic": True},
            r"best\.stop_at",
        ),
    ],
)
def test_a_choice_that_nothing_can_be_measured_for_is_refused(changes: dict[str, Any], refused: str) -> None:
    policies = {"policy": {"max_staleness": 0}, "judge": {"kind": "frozen"}}
    values = {"environment": {"id": "x"}, "model": {"path": "x"}, "policies": policies}
    with pytest.raises(ValueError, match=refused):
        RunConfig.model_validate(values | changes)


@pytest.mark.parametrize(
    ("metric", "policy", "name"),
    [
        ("reward/mean", "proposer", "reward/mean"),
        ("-evaluation/turns", "proposer", "evaluation/turns"),
        ("-solver/evaluation/turns", "solver", "evaluation/turns"),
        ("solver", "proposer", "solver"),
    ],
)
def test_a_metric_may_name_its_policy(metric: str, policy: str, name: str) -> None:
    assert BestConfig(metric=metric).measured(["proposer", "solver"]) == (policy, name)


def test_a_run_from_a_warmed_up_model_keeps_its_best_version(tmp_path: Path) -> None:
    sizes = {"max_tokens": 32, "turn": 9, "max_turns": 6, "turns": 4, "max_context": 192, "context": 90}
    text = TRAIN.format(command="agentrl train train.toml", name='"shop"', reference='"calculator"', **sizes)
    (tmp_path / "train.toml").write_text(text)
    best = load(tmp_path / "train.toml").best
    assert best.metric == "reward/mean"
    assert best.stop_at is None
