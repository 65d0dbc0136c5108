"""Learnability against brute force, and the memory of proposals against a list."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ChildResult, learnability
from agentrl.core.errors import EpisodeError, RewardError
from agentrl.core.records import Proposal, ProposalNovelty
from agentrl.orchestrator.tasks import NEWEST, ProposalNoveltyTracker


def attempts(*rewards: float | None) -> list[ChildResult]:
    return [
        ChildResult(
            episode_id=f"e0~0.r#1.{at}",
            drop_reason=None if reward is not None else "environment_error",
            rewards={} if reward is None else {"solver": reward},
        )
        for at, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("p", [0.0, 0.125, 0.5, 0.9, 1.0])
def test_learnability_is_unbiased_over_all_outcomes(count: int, p: float) -> None:
    expected = math.fsum(
        math.prod(p if reward else 1 - p for reward in rewards) * learnability(attempts(*rewards))
        for rewards in itertools.product((0.0, 1.0), repeat=count)
    )
    assert expected == pytest.approx(4 * p * (1 - p))


def test_learnability_is_unbiased_for_rewards_in_between() -> None:
    law = {0.0: 0.2, 0.25: 0.3, 1.0: 0.5}
    mean = sum(reward * chance for reward, chance in law.items())
    expected = math.fsum(
        math.prod(law[reward] for reward in rewards) * learnability(attempts(*rewards))
        for rewards in itertools.product(law, repeat=4)
    )
    assert expected == pytest.approx(4 * mean * (1 - mean))


def test_a_dropped_attempt_is_in_no_numerator_and_no_denominator() -> None:
    assert learnability(attempts(1.0, None, 0.0, None)) == learnability(attempts(1.0, 0.0)) == 2.0


def test_what_can_say_nothing_is_refused() -> None:
    for too_few in ((), (1.0,), (None, 1.0)):
        with pytest.raises(EpisodeError) as error:
            learnability(attempts(*too_few))
        assert error.value.reason == "too_few_children"
    with pytest.raises(RewardError, match=r"got 1\.5"):
        learnability(attempts(0.0, 1.5))


def proposal(number: int, key: str, structure: str = "", *, episode: str | None = None) -> Proposal:
    return Proposal(number, episode or f"e{number}", 0, "r#1", "Propose", key, structure)


def told(memory: ProposalNoveltyTracker, made: Proposal) -> ProposalNovelty:
    found = memory.recall(made)
    if not memory.knows(made):
        memory.remember(made)
    return found


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy")), max_size=40), st.integers(1, 12))
def test_the_newest_are_remembered(made: list[tuple[str, str]], size: int) -> None:
    memory = ProposalNoveltyTracker(size, group_size=1)
    for at, (key, structure) in enumerate(made):
        seen = made[max(at - size, 0) : at]
        share = sum(other == structure for _, other in seen[-NEWEST:]) / len(seen) if seen else 0.0
        assert told(memory, proposal(at, key, structure)) == (sum(other == key for other, _ in seen), share)


def test_a_proposal_told_again_counts_once_and_not_for_itself() -> None:
    memory = ProposalNoveltyTracker(10, group_size=1)
    told(memory, proposal(0, "a"))
    assert told(memory, proposal(1, "a", episode="e0")) == (0, 0.0)
    assert told(memory, proposal(1, "a")) == (1, 1.0)
    memory.forget("e1")
    tried_again = Proposal(2, "e1", 1, "r#1", "Propose", "a", "")
    assert told(memory, tried_again) == (1, 1.0), "what an episode proposed before it began again is forgotten"
    assert told(memory, Proposal(3, "e1", 1, "r#2", "Propose", "a", "")).times == 2, "what it repeats is not"
    other = Proposal(4, "e9", 0, "r#1", "Elsewhere", "a", "")
    assert told(memory, other) == (0, 0.0), "each environment has proposals of its own"


def test_those_an_episode_is_compared_with_are_not_heard() -> None:
    memory = ProposalNoveltyTracker(10, group_size=4)
    told(memory, proposal(0, "a", episode="e3"))
    told(memory, proposal(1, "a", episode="e4"))
    told(memory, proposal(2, "a", episode="e5~0.r#1.0"))
    assert told(memory, proposal(3, "a", episode="e7")) == (1, 1.0), "e3 alone, of the group before"
    assert told(memory, proposal(4, "a", episode="e8")).times == 4
    assert memory.recall(proposal(5, "a", episode="v4")).times == 5, "an evaluation is in no group of training"


def test_what_will_not_be_trained_stands_in_nobodys_way() -> None:
    memory = ProposalNoveltyTracker(2, group_size=1)
    told(memory, proposal(0, "a"))
    told(memory, proposal(1, "b"))
    memory.forget("e1")
    assert told(memory, proposal(2, "b")).times == 0
    assert told(memory, proposal(3, "a")).times == 1


def test_structure_entropy_is_that_of_the_newest() -> None:
    memory = ProposalNoveltyTracker(1000, group_size=1)
    told(memory, proposal(5000, "nothing"))
    told(memory, proposal(5001, "nothing"))
    assert memory.structure_entropy() is None, "nothing is known of their structures"
    memory = ProposalNoveltyTracker(1000, group_size=1)
    for at in range(NEWEST):
        told(memory, proposal(at, str(at), "old"))
    assert memory.structure_entropy() == 0.0
    for at in range(NEWEST):
        told(memory, proposal(NEWEST + at, str(at), str(at % 4)))
    assert memory.structure_entropy() == pytest.approx(math.log(4))


@given(st.permutations(range(24)), st.integers(0, 2), st.integers(2, 9))
def test_in_waves_an_answer_depends_on_no_order(order: list[int], lag: int, size: int) -> None:
    """Four episodes a wave; those of a wave begin when the waves more than `lag` before it have ended."""

    def seen(episode: str) -> tuple[int, int]:
        wave = int(episode[1:]) // 4
        return wave, wave - lag

    answers: dict[int, ProposalNovelty] = {}
    memory = ProposalNoveltyTracker(size, group_size=1, visible_range=seen)
    waiting = sorted(order, key=lambda number: (number // 4 // (lag + 1), order.index(number)))
    for arrived, number in enumerate(waiting):
        answers[number] = told(memory, proposal(arrived, str(number % 3), episode=f"e{number}"))
    for number, answer in answers.items():
        visible = [other for other in range(24) if other // 4 < number // 4 - lag][-size:]
        assert answer.times == sum(other % 3 == number % 3 for other in visible)
