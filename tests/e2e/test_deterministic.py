"""A deterministic run, killed for real, ends with the undisturbed run's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.durability_deterministic import digest, train


@pytest.mark.e2e
def test_weights_after_real_kills_are_bit_identical(tmp_path: Path) -> None:
    undisturbed = train(tmp_path, "undisturbed", steps=3, kills=0)
    killed = train(tmp_path, "killed", steps=3, kills=2)
    assert digest(killed) == digest(undisturbed)
