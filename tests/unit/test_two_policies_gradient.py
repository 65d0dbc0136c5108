"""Splitting, packing, resuming and distributing leave every policy's gradient as it is, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gradient_cases import worst_error
from tests.learn_cases import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("seed", [0, 1])
def test_no_way_of_computing_a_step_changes_a_policy_s_gradient(model: Path, tmp_path: Path, seed: int) -> None:
    errors = worst_error(model, tmp_path, seed)
    assert errors["resumed"].of_sum == 0.0
    assert len(errors) == 5
    assert max(error.of_terms for error in errors.values()) <= 1e-6, errors
