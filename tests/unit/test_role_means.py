"""Role-conditioned baselines: what a reward is compared with where no group is comparable."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrajectoryCredit, Unit
from agentrl.credit.baselines import RoleMeans
from agentrl.orchestrator.buffer import Ledger
from agentrl.orchestrator.checkpoints import CheckpointWriter, find_newest_checkpoint
from agentrl.testing.recording_trainer import RecordingTrainer


def make_unit(*credits: TrajectoryCredit, policy: str = "p", episode_id: str = "e1") -> Unit:
    return Unit(episode_id=episode_id, attempt=0, policy=policy, location=EpisodeDataLocation("w", 3), credits=credits)


def credited(means: RoleMeans, *rewards: float, policy: str = "p", seat: str = "x", first: int = 0) -> list[float]:
    units = [
        ("game", make_unit(TrajectoryCredit(seat, 0, reward, 0.0, 0.0), policy=policy, episode_id=f"e{first + at}"))
        for at, reward in enumerate(rewards)
    ]
    return [unit.credits[0].advantage for unit in means.credited(policy, units)]


def test_a_role_is_compared_with_what_it_used_to_get() -> None:
    means = RoleMeans(decay=0.5)
    assert credited(means, 1.0, 0.0, 1.0) == pytest.approx([0.0, -1.0, 1.0 - 0.5 / 1.5])
    assert credited(means, 1.0) == [0.0], "a step that was not taken leaves no trace"
    means.commit_step("p")
    assert credited(means, 1.0) == [0.0]
    assert credited(means, 0.0, seat="o") == [0.0], "a seat of its own"
    assert credited(means, 0.0, policy="q") == [0.0], "a policy of its own"


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=8), st.integers(1, 7))
def test_role_means_do_not_depend_on_how_units_are_cut_into_steps(values: list[float], cut: int) -> None:
    whole, parts = RoleMeans(decay=0.9), RoleMeans(decay=0.9)
    expected = credited(whole, *values)
    whole.commit_step("p")
    first = credited(parts, *values[:cut])
    parts.commit_step("p")
    with tempfile.TemporaryDirectory() as checkpoints:
        writer = CheckpointWriter(Path(checkpoints))
        asyncio.run(writer.write(RecordingTrainer(["p"]), {"p": PolicyVersion("p", 0, 1)}, Ledger(), parts))
        manifest, _ = find_newest_checkpoint(Path(checkpoints))
    assert manifest is not None
    restored = RoleMeans(manifest.role_means, decay=0.9)
    assert first + credited(restored, *values[cut:], first=cut) == expected
    restored.commit_step("p")
    assert restored.means == whole.means


def test_the_order_in_which_episodes_end_changes_no_role_mean() -> None:
    forward, backward = RoleMeans(decay=0.9), RoleMeans(decay=0.9)
    units = [
        ("game", make_unit(TrajectoryCredit("x", 0, reward, 0.0, 0.0), episode_id=f"e{at}"))
        for at, reward in enumerate((0.3, -1.0, 0.7, 0.1))
    ]
    expected = {unit.episode_id: unit for unit in forward.credited("p", units)}
    found = backward.credited("p", units[::-1])
    assert [unit.episode_id for unit in found] == ["e3", "e2", "e1", "e0"]
    assert all(expected[unit.episode_id] == unit for unit in found)
