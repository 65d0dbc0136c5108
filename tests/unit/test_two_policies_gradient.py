"""Splitting, packing, resuming and distributing leave every policy's gradient as it is, and so does another policy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gradient_cases import update_beside, worst_error
from tests.learn_cases import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_no_way_of_computing_a_step_changes_a_policy_s_gradient(model: Path, tmp_path: Path, seed: int) -> None:
    errors = worst_error(model, tmp_path, seed)
    assert errors["resumed"].of_sum == 0.0
    assert len(errors) == 5
    assert max(error.of_terms for error in errors.values()) <= 1e-6, errors


def test_a_policy_s_update_is_the_same_bit_for_bit_with_another_there(model: Path, tmp_path: Path) -> None:
    alone = update_beside(model, tmp_path / "alone", 0, beside=False)
    assert update_beside(model, tmp_path / "beside", 0, beside=True) == alone
    assert update_beside(model, tmp_path / "other", 1, beside=False) != alone, "the data do not matter"
