from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from agentrl.environments.propose_and_solve.env import INVALID, ProposeAndSolve, Solve, Sum, drawn_sum, read
from agentrl.testing import play


@pytest.mark.parametrize(
    ("text", "answer"), [("2 + 3", "5"), ("12 - 3 + 40 - 99", "-50"), ("1 + 1 + 1 + 1 + 1 + 1 + 1 + 1", "8")]
)
def test_a_sum_is_read_and_its_answer_known(text: str, answer: str) -> None:
    proposal = read(text)
    assert proposal is not None
    assert proposal.task() == {"question": f"{text} =", "answer": answer}


@pytest.mark.parametrize(
    "text", ["", "2", "2 +3", "02 + 3", "2 * 3", "2 + 100", "2 + 3 =", "2 + 3\n", "-2 + 3", " + ".join("1" * 9)]
)
def test_what_is_no_sum_is_refused(text: str) -> None:
    assert read(text) is None


def test_the_order_of_terms_makes_no_new_proposal() -> None:
    assert Sum("2 + 3 - 4").key == Sum("3 - 4 + 2").key
    assert len({Sum(text).key for text in ("2 + 3", "2 - 3", "2 + 2 + 3", "2 + 3 + 3", "2 + 4")}) == 5


def test_drawn_sums_are_ones_a_proposer_may_write() -> None:
    draw = Random(0)
    for terms in range(2, 9):
        drawn = drawn_sum(draw, terms)
        assert read(drawn.text) == drawn
        assert len(drawn.terms) == terms
        first, *operations = drawn.text.split()
        signed_terms = [
            int(first),
            *(int(f"{sign}{term}") for sign, term in zip(operations[::2], operations[1::2], strict=True)),
        ]
        assert list(drawn.terms) == signed_terms


def test_the_solver_is_examined_on_as_many_sums_of_each_length() -> None:
    tasks = Solve.tasks("held_out")
    terms = Counter(len(Sum(tasks[number].data["question"][:-2]).terms) for number in range(400))
    assert terms == {2: 80, 3: 80, 4: 80, 5: 80, 6: 80}
    assert [tasks[0], tasks[399]] == [Solve.tasks("held_out", seed=7)[0], Solve.tasks("held_out", seed=7)[399]]
    assert len(ProposeAndSolve.tasks("train")) == 1


@pytest.mark.parametrize("seed", range(3))
def test_no_training_sum_is_held_out_in_any_order(seed: int) -> None:
    held_out, training = (
        {Sum(task.data["question"].removesuffix(" =")).key for task in Solve.tasks(split, seed=seed)}
        for split in ("held_out", "train")
    )
    assert len(training) > 300
    assert not held_out & training


def test_what_the_solver_is_examined_on_is_refused_in_any_order() -> None:
    [task] = ProposeAndSolve.tasks("train")
    question = next(
        text for task in Solve.tasks("held_out") if "-" not in (text := task.data["question"].removesuffix(" ="))
    )
    for proposal in (question, " + ".join(reversed(question.split(" + ")))):
        assert play(ProposeAndSolve, task, [proposal]).reward == INVALID
    outcome = play(ProposeAndSolve, task, ["1 + 1 + 1 + 1 + 1 + 1 + 1", *["7"] * 4, *["8"] * 4])
    assert outcome.reward == pytest.approx(8 / 7)
