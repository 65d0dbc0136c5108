"""From a unit and its episode to training samples."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from agentrl.core.errors import JournalError
from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrajectoryCredit, Unit, VersionSpan
from agentrl.core.tokens import COLUMNS, ExpertRouting, KeptSets, TrainingSample
from agentrl.credit.samples import row_digest, unit_samples, without_stale_tokens
from tests.support.builders import make_trajectory


def make_unit(*credits: TrajectoryCredit, policy: str = "policy") -> Unit:
    return Unit(episode_id="e1", attempt=0, policy=policy, location=EpisodeDataLocation("worker-0", 3), credits=credits)


def test_each_sampled_token_has_its_trajectory_s_advantage() -> None:
    first = make_trajectory(seat="a", sampled_tokens=3)
    second = replace(make_trajectory(seat="b", sampled_tokens=2), index=1)
    stranger = make_trajectory(seat="c", policy="other")
    unit = make_unit(TrajectoryCredit("b", 1, 1.0, -0.25, 0.5), TrajectoryCredit("a", 0, 1.0, 0.5, 0.5))
    found = unit_samples(unit, [stranger, second, first])
    assert [(item.episode_id, item.row_index) for item in found] == [("e1", 0), ("e1", 1)]
    for item, trajectory, advantage in zip(found, (first, second), (0.5, -0.25), strict=True):
        row = trajectory.rows[0]
        assert item.token_ids is row.token_ids
        assert item.advantages.dtype == np.float32
        np.testing.assert_array_equal(item.advantages, np.where(row.loss_mask, np.float32(advantage), 0))


def test_each_sampled_token_has_its_turn_s_advantage() -> None:
    trajectory = make_trajectory(turns=3, context_tokens=2, sampled_tokens=2)
    credit = TrajectoryCredit("agent", 0, 1.0, 0.5, 0.5, turn_advantages=(0.5, -2.0))
    (found,) = unit_samples(make_unit(credit), [trajectory])
    assert found.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0, -2, -2, 0, 0, -2, -2], (
        "the last one holds for later turns"
    )


def test_rows_of_a_rewritten_context_are_samples_of_their_own() -> None:
    trajectory = make_trajectory()
    (row,) = trajectory.rows
    unsampled = row.with_column("loss_mask", np.zeros_like(row.loss_mask))
    found = unit_samples(
        make_unit(TrajectoryCredit("agent", 0, 1.0, 1.0, 0.0)), [replace(trajectory, rows=(row, unsampled, row))]
    )
    assert [item.row_index for item in found] == [0, 2]


def test_a_token_whose_mask_was_not_recorded_is_not_trained() -> None:
    trajectory = make_trajectory(turns=1, context_tokens=2, sampled_tokens=3)
    counts = np.array([0, 0, 0, -1, 2], np.int32)
    row = trajectory.rows[0].with_column("kept", KeptSets(counts=counts, ids=np.array([5, 6], np.int32)))
    (found,) = unit_samples(make_unit(TrajectoryCredit("agent", 0, 1.0, 2.0, 0.0)), [replace(trajectory, rows=(row,))])
    assert found.loss_mask.tolist() == [False, False, True, False, True]
    assert found.advantages.tolist() == [0.0, 0.0, 2.0, 0.0, 2.0]


def test_a_row_routed_twice_is_a_sample_per_routing_that_share_no_token() -> None:
    trajectory = make_trajectory(turns=2, context_tokens=2, sampled_tokens=3)
    (row,) = trajectory.rows
    first, second = np.zeros((3, 1, 2), np.uint8), np.ones((9, 1, 2), np.uint8)
    unit = make_unit(TrajectoryCredit("agent", 0, 1.0, 2.0, 0.0))
    once, twice = ExpertRouting.of_stretches([(0, second)]), ExpertRouting.of_stretches([(0, first), (0, second)])
    (whole,) = unit_samples(unit, [replace(trajectory, rows=(row.with_column("experts", once),))])
    assert whole.experts is not None
    assert np.array_equal(whole.experts.rows, second)
    assert whole.loss_mask is row.loss_mask
    parts = unit_samples(unit, [replace(trajectory, rows=(row.with_column("experts", twice),))])
    assert [item.row_index for item in parts] == [0, 0]
    assert [np.flatnonzero(item.loss_mask).tolist() for item in parts] == [[2, 3], [4, 7, 8, 9]]
    assert [np.flatnonzero(item.advantages).tolist() for item in parts] == [[2, 3], [4, 7, 8, 9]]
    for item, experts in zip(parts, (first, second), strict=True):
        assert item.experts is not None
        assert np.array_equal(item.experts.rows, experts)
    assert {item.spans for item in parts} == {row.spans}


def test_a_credit_without_its_trajectory_is_a_damaged_journal() -> None:
    with pytest.raises(JournalError, match=r"agent\[3\]"):
        unit_samples(make_unit(TrajectoryCredit("agent", 3, 1.0, 1.0, 0.0)), [make_trajectory()])


NOT_INPUTS = {"episode_id", "row_index", "seat", "agent", "lost_routing"}
"""Fields of a sample that say where it comes from."""


@pytest.mark.parametrize("name", [name for name in TrainingSample.__struct_fields__ if name not in NOT_INPUTS])
def test_a_row_with_another_value_of_an_input_has_another_digest(name: str) -> None:
    def sample(change: int) -> TrainingSample:
        version = PolicyVersion("policy", 0, change)
        return TrainingSample(
            **{column.name: np.array([0, change]).astype(column.dtype) for column in COLUMNS},  # type: ignore[arg-type]
            token_ids=np.array([1, 2 + change], np.int32),
            spans=(VersionSpan(1, 2, version),),
            kept=KeptSets(np.array([0, 1], np.int32), np.array([2 + change], np.int32)),
            experts=ExpertRouting(np.full((1, 1, 1), change, np.int16)),
        )

    one, other = sample(0), sample(1)
    assert row_digest(one) == row_digest(sample(0))
    assert row_digest(msgspec.structs.replace(one, **{name: getattr(other, name)})) != row_digest(one)


def test_only_tokens_beyond_the_bound_are_left_out() -> None:
    trajectory = make_trajectory(turns=3, context_tokens=2, sampled_tokens=2)
    spans = tuple(VersionSpan(at, at + 2, PolicyVersion("policy", 0, step)) for at, step in ((2, 1), (6, 3), (10, 5)))
    old = VersionSpan(2, 12, PolicyVersion("policy", 0, 0))
    units = [
        unit_samples(
            make_unit(TrajectoryCredit("agent", 0, 1.0, 0.5, 0.5)),
            [replace(trajectory, rows=(trajectory.rows[0].with_column("spans", spans),))],
        )[0]
        for spans in (spans, (old,))
    ]
    now = PolicyVersion("policy", 0, 6)
    assert without_stale_tokens(units, now, None) == (units, 0)
    (found,), count = without_stale_tokens(units, now, 3)
    assert count == 2 + 6
    assert np.flatnonzero(found.loss_mask).tolist() == [6, 7, 10, 11]
    assert np.flatnonzero(found.advantages).tolist() == [6, 7, 10, 11]
    assert found.token_ids is units[0].token_ids, "they stay context"
    (found,), count = without_stale_tokens(units[:1], now, 5)
    assert (count, found.loss_mask.tolist()) == (0, units[0].loss_mask.tolist())


def test_a_row_of_one_temperature_has_the_digest_of_versions_with_one_per_row() -> None:
    row = TrainingSample(
        token_ids=np.array([1, 2, 3], np.int32),
        logprobs=np.zeros(3, np.float32),
        loss_mask=np.array([False, True, True]),
        advantages=np.zeros(3, np.float32),
    )

    def with_temperatures(*temperatures: float) -> TrainingSample:
        return row.with_column("temperatures", np.array(temperatures))

    def digest_of(temperature: float, table: TrainingSample) -> bytes:
        content = msgspec.msgpack.encode((temperature, table.encode()))
        return hashlib.blake2b(content, digest_size=16).digest()

    assert row_digest(row) == row_digest(with_temperatures(1, 1, 1)) == digest_of(1.0, row)
    assert row_digest(with_temperatures(1, 0.7, 0.7)) == digest_of(0.7, row)
    mixed = with_temperatures(1, 0.7, 1.3)
    assert row_digest(mixed) == digest_of(0.0, mixed)
