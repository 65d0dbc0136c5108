"""When a run that gives a policy nothing to train on is ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from agentrl.core.records import EpisodeHeader, dropped_header
from agentrl.orchestrator.scheduler import FAILED_GROUPS, FAILED_IN_A_ROW, StarvationGuard
from tests.support.builders import make_spec


def failed_children(parents: int, each: int) -> Iterator[EpisodeHeader]:
    for parent in range(parents):
        for child in range(each):
            spec = make_spec(f"e{parent}~{child}", parent_id=f"e{parent}")
            yield dropped_header(spec, "environment_error")


def ends(headers: Iterator[EpisodeHeader], *, learning: tuple[str, ...] = ("proposer", "solver")) -> list[str]:
    guard = StarvationGuard(group_size=4)
    return [why for each in headers if (why := guard.record_end(each, {"solver"}, learning)) is not None]


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


def test_a_policy_that_does_not_learn_now_needs_nothing() -> None:
    assert not ends(failed_children(FAILED_GROUPS, 64), learning=("proposer",))
