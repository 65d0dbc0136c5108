"""Losses off policy with branches: exact, or refused before the run."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest

import agentrl
from agentrl.config.algorithms import NORMALIZERS
from agentrl.core.errors import ConfigError
from tests.branch_losses import BOTH_MOVED, SECOND_MOVED, Combination, combinations
from tests.loss_cases import ALL_LOSSES, DECLARATIONS, loss_named
from tests.markdown_pages import ROOT
from tests.support import user_functions


@pytest.mark.parametrize("combination", combinations(), ids=str)
def test_branches_change_no_gradient_or_the_loss_is_refused(combination: Combination) -> None:
    """And no loss is refused without need."""
    refusal, change = combination.refusal(), combination.change()
    if refusal:
        assert f"Branching.branches = 1 cannot be combined with trainer.loss.name = {combination.name!r}" in refusal
        assert change > 1e-3
    else:
        assert change <= 1e-6


def test_weights_over_the_conversation_are_exact_without_branches_and_have_the_wrong_sign_with_them() -> None:
    """The reason for the refusal: a branch lacks the ratio of the conversation before it."""
    exact = loss_named("importance_sampling", level="agent", high=1e9)
    for decisions in (SECOND_MOVED, BOTH_MOVED):
        assert np.abs(decisions.expected_gradient(exact, 0) - decisions.true_gradient()).max() < 1e-7
    first = [float(SECOND_MOVED.expected_gradient(exact, branches)[0]) for branches in (0, 1, 3)]
    assert first == pytest.approx([0.0375, -0.00625, -0.028125], abs=1e-7)


def test_the_page_has_the_groupings_of_the_code() -> None:
    page = (ROOT / "docs/reference/algorithms.md").read_text(encoding="utf-8")
    table = page.partition("### What a loss groups by")[2].partition("###")[0]
    rows = {row.split("`")[1]: row.split(" | ") for row in table.splitlines() if row.startswith("| `")}
    found = {(name, grouping) for grouping, row in rows.items() for name in re.findall(r"`(\w+)`", row[1])}
    assert found >= {(name, declaration.groups) for name, declaration in DECLARATIONS.items()}
    assert found <= {(each.name, each.loss.grouping) for each in combinations()}
    for case in combinations():
        _, losses, exchanged, branches = rows[case.loss.grouping]
        assert f"`{case.name}`" in losses
        assert (exchanged == "nothing") == (case.loss.grouping not in ("group", "step"))
        assert branches.startswith("refused") == bool(case.refusal()) or f"except `{case.name}`" in branches
    assert {f'normalizer = "{name}"' in rows["agent"][1] for name, by in NORMALIZERS.items() if by == "agent"} == {True}


@pytest.mark.parametrize("name", [name for name, declaration in DECLARATIONS.items() if declaration.groups_option])
def test_the_table_has_the_default_of_the_option(name: str) -> None:
    option = inspect.signature(ALL_LOSSES[name]).parameters[DECLARATIONS[name].groups_option]
    assert option.default == DECLARATIONS[name].groups
    with pytest.raises(ConfigError, match=r"trainer\.loss\.level = 'word': expected one of token, turn"):
        loss_named(name, level="word")


def test_a_loss_of_the_user_is_refused_until_it_declares_its_grouping() -> None:
    """Undeclared, it may depend on any token of the step."""
    undeclared = Combination(f"{user_functions.__file__}:sapo", {})
    declared = Combination(f"{user_functions.__file__}:sapo_per_token", {})
    by_option = [Combination(f"{user_functions.__file__}:by_level", {"level": level}) for level in ("turn", "agent")]
    assert declared.refusal() == by_option[0].refusal() == ""
    assert undeclared.refusal()
    assert by_option[1].refusal()


def test_the_default_of_an_option_is_the_declared_grouping() -> None:
    with pytest.raises(ConfigError, match="needs an option level with the default 'agent'"):

        @agentrl.loss(groups="agent", groups_option="level")
        def other(batch: agentrl.LossBatch, *, level: str = "turn") -> Any:
            return batch.logprobs
