"""When a run that gives a policy nothing to train on is ended."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from agentrl.core.records import EpisodeHeader, dropped_header
from agentrl.orchestrator.scheduler import FAILED_GROUPS, FAILED_IN_A_ROW, NO_UNIT_IN_A_ROW, StarvationGuard
from tests.support.builders import make_episode_header, make_spec


def failed_children(parents: int, each: int) -> Iterator[EpisodeHeader]:
    for parent in range(parents):
        for child in range(each):
            spec = make_spec(f"e{parent}~{child}", parent_id=f"e{parent}")
            yield dropped_header(spec, "environment_error")


def ends(
    headers: Iterable[EpisodeHeader],
    *,
    learning: tuple[str, ...] = ("proposer", "solver"),
    running: Collection[int] = (),
    group_size: int = 4,
) -> list[str]:
    guard = StarvationGuard(group_size)
    reasons = (guard.record_end(header, {"solver"}, learning, lambda policy: running) for header in headers)
    return [reason for reason in reasons if reason is not None]


def test_one_bad_proposal_ends_no_run_however_many_attempts_it_has() -> None:
    assert not ends(failed_children(1, 64))
    assert not ends(failed_children(FAILED_GROUPS - 1, 64))


def test_bad_proposals_one_after_another_do() -> None:
    assert ends(failed_children(FAILED_GROUPS, 64))[0].startswith(f"{64 * (FAILED_GROUPS - 1) + 1} episodes in a row")
    assert ends(failed_children(FAILED_IN_A_ROW, 1))[0].startswith(f"{FAILED_IN_A_ROW} episodes in a row gave solver")


def test_what_became_of_the_last_episode_is_said_in_a_sentence() -> None:
    dropped = (dropped_header(make_spec(f"e{n}"), "environment_error") for n in range(FAILED_IN_A_ROW))
    assert ends(dropped)[0].endswith(f"the last one, e{FAILED_IN_A_ROW - 1}, because of environment_error")
    silent = (replace(dropped_header(make_spec(f"e{n}"), "frozen"), drop_reason=None) for n in range(FAILED_IN_A_ROW))
    assert ends(silent)[0].endswith(f"the last one, e{FAILED_IN_A_ROW - 1}, because its seat never acted")


def test_a_policy_with_a_seat_that_is_never_rewarded_gets_no_unit() -> None:
    solver = {"agent": "solver"}
    (rewarded,) = make_episode_header(make_spec(seats=solver)).trajectories
    both = (rewarded, replace(rewarded, seat="judge", reward=None))
    headers = [replace(make_episode_header(make_spec(f"e{n}")), trajectories=both) for n in range(FAILED_IN_A_ROW)]
    assert "its seat 'judge' was given no reward. Call agent.reward(…)" in ends(headers)[0]
    assert not ends([*headers[1:], make_episode_header(make_spec(seats=solver))])


def failures(numbers: Iterable[int]) -> list[EpisodeHeader]:
    return [dropped_header(make_spec(f"e{number}"), "environment_error") for number in numbers]


def test_failures_count_only_once_no_earlier_episode_plays() -> None:
    broken = [number for number in range(400) if number % 5 == 0]
    assert not ends(failures(broken), running=[number for number in range(400) if number % 5])
    assert ends(failures(broken))
    assert not ends(failures(range(1, FAILED_IN_A_ROW + 1)), running=[0])
    assert ends(failures(range(FAILED_IN_A_ROW)), running=[FAILED_IN_A_ROW])
    waiting = failures(range(1, NO_UNIT_IN_A_ROW + 1))
    assert not ends(waiting, learning=("proposer",), running=[0])
    assert ends(waiting, learning=("proposer",))[0].startswith(f"the last {NO_UNIT_IN_A_ROW} root episodes")


def test_an_episode_that_hangs_does_not_hide_that_all_others_fail() -> None:
    assert len(ends(failures(range(1, 2 * FAILED_IN_A_ROW + 1)), running=[0])) == 1


def test_three_broken_tasks_in_a_row_end_no_run() -> None:
    assert not ends(failures(range(3 * 16)), group_size=16)
    assert ends(failures(range(4 * 16)), group_size=16)


def test_a_policy_that_does_not_learn_now_needs_nothing() -> None:
    assert not ends(failed_children(FAILED_GROUPS, 64), learning=("proposer",))
