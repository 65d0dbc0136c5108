"""Deterministic runs, killed for real, end with the undisturbed runs' weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import coevolution_kills, durability_deterministic
from benchmarks.killed_runs import digests

pytestmark = pytest.mark.e2e


def test_weights_after_real_kills_are_bit_identical(tmp_path: Path) -> None:
    job = durability_deterministic.job(tmp_path)
    undisturbed = digests(job.train("undisturbed", steps=3, kills=0))
    killed = digests(job.train("killed", steps=3, kills=2))
    assert set(undisturbed) == {"solver"}
    assert killed == undisturbed


def test_weights_of_two_policies_after_real_kills_are_bit_identical(tmp_path: Path) -> None:
    job = replace(coevolution_kills.job(tmp_path), most_entries=(1, 60))  # few: two steps write not many more
    undisturbed = digests(job.train("undisturbed", steps=2, kills=0))
    killed = digests(job.train("killed", steps=2, kills=2))
    assert set(undisturbed) == {"proposer", "solver"}
    assert killed == undisturbed
