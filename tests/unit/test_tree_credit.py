"""Credit along trees of branches; `tests/sim/test_enumeration.py` has the expected gradients."""

from __future__ import annotations

import random
from pathlib import Path as FilePath

import pytest

from agentrl.core.errors import InputError
from agentrl.core.records import AgentTurns, ForkPoint
from agentrl.credit.estimators import AdvantageEstimator, make_advantage_estimator
from agentrl.credit.group import Group, Piece
from agentrl.credit.group_baselines import leave_one_out
from agentrl.credit.to_go import advantages_to_go
from agentrl.credit.trees import AgentKey, tree_credits, tree_pieces
from agentrl.testing.function_check import check_advantage
from tests.markdown_pages import ROOT, python_of
from tests.support import user_functions


def test_without_branches_it_is_leave_one_out_to_the_bit() -> None:
    draw = random.Random(3)
    for _ in range(200):
        rewards = [draw.gauss(0, 1) for _ in range(draw.randint(1, 9))]
        agents: list[AgentKey] = [(f"e{n // 2}", "s", n % 2) for n in range(len(rewards))]
        expected = leave_one_out(rewards, [agent[0] for agent in agents])
        found = tree_credits(leave_one_out, rewards, agents, {})
        assert [(credit.value, credit.baseline, credit.by_turn) for credit in found] == [(*a, ()) for a in expected]
        turn_rewards = [[(0, draw.gauss(0, 1)), (2, draw.gauss(0, 1))] for _ in rewards]
        by_turn = advantages_to_go(leave_one_out, rewards, turn_rewards, [agent[0] for agent in agents])
        found = tree_credits(leave_one_out, rewards, agents, {}, turn_rewards)
        assert [credit.by_turn for credit in found] == by_turn


def test_rewards_to_go_along_a_tree() -> None:
    point = ForkPoint(
        journal=".", partition="", episode_id="e0", attempt=0, call_id="r#1", branch=1, turns=(AgentTurns("s", 0, 1),)
    )
    agents: list[AgentKey] = [("e0", "s", 0), ("e0~0.r#1.b1", "s", 0), ("e1", "s", 0)]
    turn_rewards = [[(0, 1.0), (1, 2.0)], [(0, 1.0)], []]
    main, branch, other = tree_credits(leave_one_out, [3.0, 1.0, 0.0], agents, {"e0~0.r#1.b1": point}, turn_rewards)
    assert main.by_turn[:2] == (2.0, 1.0)  # (3 + 1)/2 - 0; (2 - 0)/2
    assert branch.by_turn[1] == -1.0
    assert other.by_turn == (-2.0, -1.0, 0.0)  # minus V of the tree to go: 2, 1, 0


# --- a user's estimator over trees ------------------------------------------------------------------------------------


def branches_of(*calls: tuple[str, str, int, int]) -> dict[str, ForkPoint]:
    """Branches by their ids, from (main episode, call, number of branches, turns before the call)."""
    return {
        f"{main}~0.{call}.b{branch}": ForkPoint(
            journal=".", partition="", episode_id=main, attempt=0, call_id=call, branch=branch,
            turns=(AgentTurns("s", 0, turns),),
        )
        for main, call, count, turns in calls
        for branch in range(1, count + 1)
    }  # fmt: skip


def group_of(rewards: list[float], agents: list[AgentKey], branches: dict[str, ForkPoint]) -> Group:
    pieces = tree_pieces(leave_one_out, rewards, agents, branches)
    return Group(rewards=tuple(rewards), episodes=tuple(a[0] for a in agents), pieces=tuple(map(tuple, pieces)))


def estimator(name: str) -> AdvantageEstimator:
    return make_advantage_estimator(f"{FilePath(user_functions.__file__).resolve()}:{name}", {})


def of_the_page(name: str, directory: FilePath) -> str:
    """Reference of a function of the page, in a file of its own."""
    (text,) = [text for text in python_of(ROOT / "docs/how-to/branches.md") if f"def {name}(" in text]
    (directory / "mine.py").write_text(text, encoding="utf-8")
    return f"{directory / 'mine.py'}:{name}"


TWO_CALLS = branches_of(("e0", "r#1", 1, 1), ("e0", "r#4", 2, 3))
AGENTS: list[AgentKey] = [(name, "s", 0) for name in ("e0", *TWO_CALLS, "e1")]


def test_the_pieces_of_a_tree() -> None:
    main, early, late, later, other = group_of([1.0, 0.0, 0.5, 0.0, 0.25], AGENTS, TWO_CALLS).pieces
    # Behind the second call V = (1 + .5 + 0)/3 = .5, so the first piece has (.5 + 0)/2 = .25, as the other tree.
    assert main == (
        Piece(first=0, value=0.25, parent_value=0.25, baseline=0.25, weight=1.0, leaves=4),
        Piece(first=1, value=0.5, parent_value=0.25, baseline=0.0, weight=1 / 2, leaves=3),
        Piece(first=3, value=1.0, parent_value=0.5, baseline=0.25, weight=1 / 6, leaves=1),
    )
    assert early == (Piece(first=0, value=0.0, parent_value=0.25, baseline=0.5, weight=1 / 2, leaves=1),)
    assert [(p.value, p.parent_value, p.baseline) for p in (*late, *later)] == [(0.5, 0.5, 0.5), (0.0, 0.5, 0.75)]
    assert other == (Piece(first=0, value=0.25, parent_value=0.25, baseline=0.25, weight=1.0, leaves=1),)


def test_the_page_s_tree_rl_is_the_paper_s(tmp_path: FilePath) -> None:
    reference = of_the_page("tree_rl", tmp_path)
    assert check_advantage(reference).findings == []
    branches = branches_of(("e0", "r#1", 2, 1))
    agents: list[AgentKey] = [(name, "s", 0) for name in ("e0", *branches, "e1")]
    group = group_of([1.0, 1.0, 0.0, 0.0], agents, branches)
    main, right, wrong, other = make_advantage_estimator(reference, {}).of_trees(group)
    # V_root = 2/4; the tree's V = 2/3, and the mean of both trees, the value of their parent, is 1/3.
    assert main == pytest.approx([((2 / 3 - 1 / 2) + (2 / 3 - 1 / 3)) / 3**0.5, (1 - 1 / 2) + (1 - 2 / 3)])
    assert right == pytest.approx([1 / 2 + 1 / 3])
    assert wrong == pytest.approx([-1 / 2 - 2 / 3])
    assert other == pytest.approx([-1 / 2 - 1 / 3])


def test_an_estimator_over_trees_can_be_the_built_in_one_to_the_bit() -> None:
    draw = random.Random(5)
    formula = estimator("pieces_by_formula")
    for number in range(100):
        branches = branches_of(*((f"e{m}", call, draw.randint(1, 3), turns) for m in range(draw.randint(1, 3))
                                 for call, turns in (("r#1", 1), ("r#6", 3))[: draw.randint(0, 2)]))  # fmt: skip
        names = sorted({"e0", "e1", "e2", *branches})
        agents: list[AgentKey] = [(name, "s", index) for name in names for index in range(1 + number % 2)]
        rewards = [draw.choice([0.0, 1.0, draw.gauss(0, 1)]) for _ in agents]
        paid = [[(0, draw.gauss(0, 1)), (2, draw.gauss(0, 1))] for _ in agents]

        def rule(rewards: object, pieces: object, agents: list[AgentKey] = agents) -> list[list[float]]:
            group = Group(rewards=tuple(rewards), episodes=tuple(a[0] for a in agents), pieces=tuple(pieces))  # type: ignore[arg-type, var-annotated]
            return formula.of_trees(group)

        for turn_rewards in ((), paid):
            built_in = tree_credits(leave_one_out, rewards, agents, branches, turn_rewards)
            assert tree_credits(leave_one_out, rewards, agents, branches, turn_rewards, rule) == built_in


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "one_number_per_agent",
            r"returned 1\.0 for the 3 pieces of e0; .* a list per agent, with one number per piece",
        ),
        ("only_first_pieces", r"returned \[.*\] for the 3 pieces of e0"),
        ("infinite_pieces", r"returned inf for the piece of e0 from turn 1, with value 0\.5"),
        ("too_few_trees", "returned 1 advantages for a group of 5 rewards"),
    ],
)
def test_a_result_of_the_wrong_shape_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(InputError, match=f"the advantage {name} {message}"):
        estimator(name).of_trees(group_of([1.0, 0.0, 0.5, 0.0, 0.25], AGENTS, TWO_CALLS))
    (finding,) = check_advantage(f"{FilePath(user_functions.__file__).resolve()}:{name}").findings
    assert f"the advantage {name} returned" in finding
