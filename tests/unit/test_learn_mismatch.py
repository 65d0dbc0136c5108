"""The mismatch monitor: figures by lag, apart for rows that the trained weights sampled themselves."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from agentrl.core.records import Lines, PolicyVersion, VersionSpan
from agentrl.credit.samples import token_lags, trained_positions
from agentrl.learn.step_columns import (
    TokenColumns,
    mismatch_metrics,
    seat_mismatch_metrics,
)
from tests.learn_cases import make_samples, read_step_file

NOW = PolicyVersion("policy", 1, 7)


def test_figures_are_those_of_the_formula_by_lag() -> None:
    behavior = np.array([-1.0, -2.0, -3.0, -0.5, -1.5, -1.0, -2.0], np.float32)
    trainer = np.array([-1.1, -2.0, -2.5, np.nan, -1.0, -1.0, -2.5], np.float32)
    lag = np.array([0, 0, 1, 0, 4, 9, -1], np.int32)
    fresh = np.array([True, False, False, True, False, False, False])
    found = mismatch_metrics(trainer, behavior, lag=lag, fresh=fresh)

    def k3(*differences: float) -> float:
        return sum(math.exp(d) - 1 - d for d in differences) / len(differences)

    assert found == pytest.approx(
        {
            "mismatch/k3": k3(-0.1), "mismatch/difference": 0.1, "mismatch/max_difference": 0.1, "mismatch/tokens": 1,
            "lag_k3/0": k3(-0.1, 0), "lag_difference/0": 0.05, "lag_max_difference/0": 0.1, "lag_tokens/0": 2,
            "lag_k3/1": k3(0.5), "lag_difference/1": 0.5, "lag_max_difference/1": 0.5, "lag_tokens/1": 1,
            "lag_k3/4+": k3(0.5, 0), "lag_difference/4+": 0.25, "lag_max_difference/4+": 0.5, "lag_tokens/4+": 2,
        },
        rel=1e-5,
    )  # fmt: skip


def test_seats_are_told_apart_where_there_are_several() -> None:
    behavior = np.array([-1.0, -2.0, -3.0, -1.0], np.float32)
    trainer = np.array([-1.5, -2.0, np.nan, -1.0], np.float32)
    found = seat_mismatch_metrics(trainer, behavior, np.array(["x", "x", "o", "o"], dtype=object))
    assert found == pytest.approx({"seat_k3/x": (math.exp(-0.5) - 1 + 0.5) / 2, "seat_k3/o": 0.0})
    assert seat_mismatch_metrics(trainer, behavior, np.array(["x"] * 4, dtype=object)) == {}


def test_a_token_s_lag_counts_steps_from_the_fork_of_its_lineage() -> None:
    (sample,) = make_samples(0, 1)
    spans = (
        VersionSpan(2, 4, PolicyVersion("policy", 0, 7)),
        VersionSpan(4, 5, PolicyVersion("policy", 0, 3)),
        VersionSpan(6, 8, PolicyVersion("policy", 1, 5)),
        VersionSpan(8, 9, NOW),
    )
    lines = Lines({("policy", 1): PolicyVersion("policy", 0, 4)})
    lags = token_lags(sample.with_column("spans", spans), NOW, lines)
    assert lags[:10].tolist() == [-1, -1, 3, 3, 4, -1, 2, 2, 0, -1]


def test_rows_of_all_ranks_are_measured_and_one_stale_token_makes_its_row_stale(tmp_path: Path) -> None:
    samples = [
        sample.with_column("spans", (VersionSpan(0, 11, NOW._replace(step=step)), VersionSpan(11, 13, NOW)))
        for sample, step in zip(make_samples(0, 4), (7, 6, 7, 7), strict=True)
    ]
    samples[3] = samples[3].with_column("spans", ())
    parts = []
    for share in (samples[:2], samples[2:]):
        columns = TokenColumns.of(share, NOW, group_size=1)
        logprobs = columns.tokens.logprobs
        columns.record(np.arange(len(columns)), logprobs + np.float32(0.25), np.abs(logprobs))
        parts.append(TokenColumns.decode(columns.encode()))
    merged = TokenColumns.merge(parts)
    counts = [len(positions) for positions in trained_positions(samples)]
    found = merged.mismatch()
    assert found["mismatch/tokens"] == counts[0] + counts[2]
    assert found["mismatch/max_difference"] == pytest.approx(0.25)
    assert found["lag_tokens/1"] == int((trained_positions(samples)[1] < 11).sum())
    (tmp_path / "step.safetensors").write_bytes(merged.encode_file())
    _, written = read_step_file(tmp_path / "step.safetensors")
    assert written["lag"].tolist()[-counts[3] :] == [-1] * counts[3]
    expected = np.concatenate(
        [sample.logprobs[at] for sample, at in zip(samples, trained_positions(samples), strict=True)]
    )
    assert np.array_equal(written["behavior_logprobs"], expected)
    assert np.array_equal(written["entropy"], np.abs(expected))
