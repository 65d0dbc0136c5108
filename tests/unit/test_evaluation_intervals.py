"""Intervals of an evaluation: over tasks, for the reward and for pass@k, and for the difference of two versions."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from agentrl.app.evaluation import EvaluatedEpisode, Evaluation
from agentrl.core.errors import CheckFailedError, InputError
from agentrl.core.ids import random_stream
from agentrl.core.intervals import confidence_half_width
from agentrl.core.records import EpisodeHeader
from agentrl.observe.metrics import with_unset_metrics
from agentrl.orchestrator.evaluation import evaluation_metrics
from tests.support.builders import make_episode_header, make_spec


def headers(rewards: Sequence[Sequence[float | None]]) -> list[EpisodeHeader]:
    """A root episode for each attempt at each task; None: dropped."""
    return [
        make_episode_header(
            make_spec(f"v{number}", purpose="evaluate"),
            reward=reward,
            drop_reason="environment_error" if reward is None else None,
        )
        for number, reward in enumerate(itertools.chain.from_iterable(rewards))
    ]


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    rewards: list[list[float]] = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.0, 0.5, 0.0, 2.0]]
    found = evaluation_metrics(headers(rewards), None, 4)
    for k in (1, 2, 4):
        by_task = [
            statistics.mean(float(any(r >= 1 for r in chosen)) for chosen in itertools.combinations(own, k))
            for own in rewards
        ]
        assert found[f"evaluation/pass_at/{k}"] == pytest.approx(statistics.mean(by_task))
        assert found[f"evaluation/pass_at_error/{k}"] == pytest.approx(confidence_half_width(by_task))
    assert "evaluation/pass_at/8" not in found


def test_the_interval_is_over_tasks_and_leaves_out_what_was_dropped() -> None:
    found = evaluation_metrics(headers([[1.0, 1.0], [0.0, None], [None, None], [1.0, 0.0]]), None, 2)
    assert found["evaluation/reward"] == pytest.approx(0.5), "of the tasks, as its interval"
    assert found["evaluation/reward_error"] == pytest.approx(1.96 * statistics.stdev([1.0, 0.0, 0.5]) / math.sqrt(3))
    assert found["evaluation/pass_at/2"] == pytest.approx(1.0)
    assert evaluation_metrics(headers([[1.0], [0.0]]), None, 1)["evaluation/pass_at/1"] == 0.5


def test_episodes_that_a_limit_ended_and_failed_programs_are_counted() -> None:
    ended = headers([[1.0], [0.0], [0.0], [None]])
    metrics = evaluation_metrics(ended, None)
    assert metrics["evaluation/truncated"] == 0.0
    assert "evaluation/failed" not in metrics, "no program was seen to fail"
    cut = [ended[0], replace(ended[1], stop_reason="max_tokens"), *ended[2:]]
    failed = {"v0": {"program/ok": 1.0}, "v2": {"program/failed": 1.0}, "v3": {"program/failed": 1.0}}
    for policy in (None, "policy"):
        metrics = evaluation_metrics(cut, policy, 1, (), failed)
        assert metrics["evaluation/truncated"] == metrics["evaluation/cut/max_tokens"] == 1.0
        assert metrics["evaluation/failed"] == 1.0, "dropped episodes are counted as such"


def test_an_evaluation_whose_episodes_were_all_dropped_says_why() -> None:
    with pytest.raises(CheckFailedError, match=r"no episode of 2 .* v0 because of environment_error$"):
        evaluation_metrics(headers([[None], [None]]), "policy", 1)


def test_an_interval_covers_the_mean_as_often_as_it_says() -> None:
    draw, covered = random_stream("intervals"), 0
    for _ in range(400):
        values = [float(draw.random() < 0.4) for _ in range(60)]
        covered += abs(statistics.mean(values) - 0.4) <= confidence_half_width(values)
    assert 0.9 < covered / 400 < 0.99


def evaluation(rewards: dict[str, float]) -> Evaluation:
    same: Any = {
        "parent_id": None,
        "task": {},
        "stop_reason": "done",
        "detail": "",
        "turns": 1,
        "tokens": 1,
        "metrics": {},
    }
    episodes = [
        EvaluatedEpisode(id=f"v{number}", task_id=task, reward=reward, rewards={}, conversations={}, **same)
        for number, (task, reward) in enumerate(rewards.items())
    ]
    return Evaluation({}, episodes)


def test_a_paired_difference_leaves_out_how_hard_the_tasks_are() -> None:
    hard = {f"t{number}": number / 40 for number in range(20)}
    better = {task: reward + 0.5 + 0.001 * (number % 3) for number, (task, reward) in enumerate(hard.items())}
    one, other = evaluation(better), evaluation(hard)
    found = one.compared_with(other)
    assert found["difference/reward"] == pytest.approx(0.501, abs=0.0005)
    assert 0.1 < found["difference/reward_low"] < 0.501 < found["difference/reward_high"]
    assert (one.verdict(found), other.verdict(other.compared_with(one))) == ("better", "worse")
    assert (found["difference/better"], found["difference/worse"], found["difference/tasks"]) == (20.0, 0.0, 20.0)
    with pytest.raises(InputError, match="different tasks"):
        evaluation(better).compared_with(evaluation({"other": 1.0}))


def test_tasks_of_different_splits_with_equal_ids_are_paired_with_themselves() -> None:
    def of_splits(held_out: float, hard: float) -> Evaluation:
        episodes = [
            replace(episode, task={"split": number % 2}, reward=(held_out, hard)[number % 2])
            for number, episode in enumerate(evaluation({f"t{number}": 0.0 for number in range(40)}).episodes)
        ]
        return Evaluation({}, [replace(each, task_id=f"t{number // 2}") for number, each in enumerate(episodes)])

    found = of_splits(0.9, 0.1).compared_with(of_splits(0.1, 0.9))
    assert (found["difference/better"], found["difference/worse"], found["difference/tasks"]) == (20.0, 20.0, 40.0)


def test_an_attempt_is_solved_if_each_rewarded_agent_has_1() -> None:
    def seats_earn(number: int, *rewards: float | None) -> EpisodeHeader:
        header = make_episode_header(make_spec(f"v{number}", purpose="evaluate"))
        (one,) = header.trajectories
        seats = (replace(one, seat=f"s{n}", reward=reward) for n, reward in enumerate(rewards))
        return replace(header, trajectories=tuple(seats))

    found = evaluation_metrics(
        [seats_earn(0, 0.5, 0.5), seats_earn(1, 1.0, 1.0), seats_earn(2, 1.0, None), seats_earn(3, 2.0, 0.0)], None
    )
    assert found["evaluation/pass_at/1"] == 0.5


def test_an_environments_metric_is_averaged_over_the_episodes_that_set_it() -> None:
    recorded = {"v0": {"kind_4": 1.0}, "v1": {"kind_4": 0.0, "turns/length": 1.0}, "v2": {}}
    found = evaluation_metrics(headers([[1.0], [0.0], [0.0]]), None, 1, (), recorded)
    assert found["evaluation/metric/kind_4"] == 0.5
    assert found["evaluation/metric_error/kind_4"] == pytest.approx(confidence_half_width([1.0, 0.0]))
    assert "evaluation/metric/turns/length" not in found, "agentrl's own counts have metrics of their own"


def test_a_metric_that_an_episode_does_not_set_counts_as_0_in_its_environment() -> None:
    environments = {"e0": "Deal", "e1": "Deal", "e2": "Chess"}
    known: dict[str, dict[str, None]] = {}
    first = with_unset_metrics(
        {"e0": {"no_deal": 1.0, "turns/length": 2.0}, "e1": {}, "e2": {"won": 1.0}}, environments, known
    )
    assert first == {"e0": {"no_deal": 1.0, "turns/length": 2.0}, "e1": {"no_deal": 0.0}, "e2": {"won": 1.0}}
    assert with_unset_metrics({"e1": {}}, environments, known) == {"e1": {"no_deal": 0.0}}, "also where none set it"
