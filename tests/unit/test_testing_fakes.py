"""The fakes of our tests fail where the real ones would, and remember what they were asked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import agentrl.testing
from agentrl.core.clock import LoopClock
from agentrl.core.errors import JournalError, NonFiniteError, RunDirectoryError, StorageError, TrainerError
from agentrl.core.ports import Trainer
from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrainBatch, TrajectoryCredit, Unit
from agentrl.journal.entries import JournalEntry, RewardEntry, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd, JournalStore
from agentrl.journal.run_log import RunLog
from agentrl.testing.virtual_time import simulate
from tests.support.builders import make_completion, make_episode_header, make_spec, make_trajectory
from tests.support.recording_trainer import RecordingTrainer
from tests.support.sim_disk import SimDisk
from tests.support.sim_journal import SimJournal


def batch(step_id: int, *, policy: str = "policy", episode_id: str = "e0") -> TrainBatch:
    credit = TrajectoryCredit(seat="agent", index=0, reward=1.0, advantage=0.5, baseline=0.5)
    location = EpisodeDataLocation("turns-worker-0.db", 1)
    unit = Unit(episode_id=episode_id, attempt=0, policy=policy, location=location, credits=(credit,))
    return TrainBatch(step_id=step_id, policy=policy, units=(unit,), normalizer=64.0)


def test_the_fakes_implement_the_ports() -> None:
    journal = MemoryJournal()
    store: JournalStore = journal
    log: RunLog = journal
    trainer: Trainer = RecordingTrainer(["policy"])
    assert store is log
    assert trainer is not None


def test_every_exported_name_exists() -> None:
    for name in agentrl.testing.__all__:
        assert getattr(agentrl.testing, name).__name__ == name
    with pytest.raises(AttributeError, match="mock"):
        _ = agentrl.testing.mock


def test_what_is_not_flushed_is_lost_in_a_crash() -> None:
    async def main() -> None:
        journal = MemoryJournal()
        log = journal.turn_log("w0")
        body = encode_body(RewardEntry("agent", 0, 1.0, None))
        log.append(JournalEntry("e0", 0, "r#0", b"", body))
        await log.flush()
        log.append(JournalEntry("e0", 0, "r#1", b"", body))
        journal.admit(make_spec("e0"))
        await journal.flush()
        journal.admit(make_spec("e1"))

        survivor = journal.after_crash()
        assert [found.call_id for found in survivor.turn_log("w0").read("e0", 0)] == ["r#0"]
        assert survivor.next_number("e") == 1
        assert len(journal.records) == 2

    simulate(main, seed=0)


def test_a_commit_waits_for_its_entries_and_refuses_what_was_never_appended() -> None:
    async def main() -> None:
        journal = MemoryJournal()
        log = journal.turn_log("worker-0")
        log.append(JournalEntry("e0", 0, "r#0", b"", encode_body(RewardEntry("agent", 0, 1.0, None))))
        too_many = make_episode_header(make_spec("e0"), location=EpisodeDataLocation(log.name, 2))
        with pytest.raises(JournalError, match=r"turns-worker-0\.db"):
            await journal.commit(EpisodeEnd(make_spec("e0"), too_many))
        header = make_episode_header(make_spec("e0"), location=EpisodeDataLocation(log.name, 1))
        await journal.commit(EpisodeEnd(make_spec("e0"), header))
        assert len(log.read("e0", 0)) == 1
        with pytest.raises(JournalError, match="twice"):
            await journal.commit(EpisodeEnd(make_spec("e0"), header))

    simulate(main, seed=0)


def test_commits_and_flushes_fail_where_the_test_says() -> None:
    async def main() -> None:
        journal = MemoryJournal(failing_commits={2}, failing_flushes={1})
        await journal.commit(EpisodeEnd(make_spec("e0"), make_episode_header(make_spec("e0"))))
        with pytest.raises(StorageError, match="commit 2, episode e1"):
            await journal.commit(EpisodeEnd(make_spec("e1"), make_episode_header(make_spec("e1"))))
        with pytest.raises(StorageError, match="flush 1"):
            await journal.turn_log("w0").flush()
        await journal.turn_log("w0").flush()
        await journal.close()
        with pytest.raises(JournalError, match="closed"):
            journal.admit(make_spec("e2"))
        assert len(journal.records) == 1

    simulate(main, seed=0)


def test_partials_reach_the_simulated_disk_by_themselves_and_live_through_a_crash() -> None:
    async def main() -> None:
        journal = SimJournal(SimDisk(), flush_seconds=0.2)
        log = journal.turn_log("0")
        first, second = (JournalEntry("e0", 0, f"r#{number}", b"", b"tokens") for number in range(2))
        log.append_partial(first)
        assert journal.after_crash().turn_log("0").read_partials("e0", 0) == []
        await asyncio.sleep(0.25)
        log.append_partial(second)
        survivor = journal.after_crash().turn_log("0")
        assert survivor.read_partials("e0", 0) == [first]
        log.remove_partials("e0", 0, "r#0")
        assert journal.after_crash().turn_log("0").read_partials("e0", 0) == [first]
        await asyncio.sleep(0.25)
        assert journal.after_crash().turn_log("0").read_partials("e0", 0) == [second]

    simulate(main, seed=0)


def test_steps_are_applied_once_and_take_virtual_time() -> None:
    async def main() -> None:
        trainer = RecordingTrainer(["policy"], clock=LoopClock(), step_seconds=5.0, publish_seconds=1.0)
        await trainer.start()
        await trainer.forward_backward(batch(1))
        report = await trainer.optim_step("policy", 1)
        await trainer.forward_backward(batch(1))
        assert await trainer.optim_step("policy", 1) is report
        assert report.started_from == PolicyVersion("policy", 0, 0)
        assert [b.step_id for b in trainer.batches] == [1]
        ref = await trainer.publish("policy", PolicyVersion("policy", 0, 1))
        assert [*trainer.published.values()][-1] is ref
        assert asyncio.get_running_loop().time() == 6.0

    simulate(main, seed=0)


def test_an_injected_failure_happens_once_and_leaves_the_step_to_be_repeated() -> None:
    async def main() -> None:
        trainer = RecordingTrainer(["policy"], failures={("policy", 1): NonFiniteError("planted")})
        await trainer.start()
        await trainer.forward_backward(batch(1))
        with pytest.raises(NonFiniteError, match="planted"):
            await trainer.optim_step("policy", 1)
        with pytest.raises(TrainerError, match="0 batches"):
            await trainer.optim_step("policy", 1)
        await trainer.forward_backward(batch(1))
        assert (await trainer.optim_step("policy", 1)).step_id == 1

    simulate(main, seed=0)


def test_the_trainer_refuses_what_a_loop_must_never_ask() -> None:
    async def main() -> None:
        trainer = RecordingTrainer(["policy"])
        await trainer.start()
        await trainer.publish("policy", PolicyVersion("policy", 0, 0))
        for ask, reason in (
            (trainer.forward_backward(batch(2)), "for step 2 after 0"),
            (trainer.forward_backward(batch(1, policy="other")), "no policy 'other'"),
            (trainer.optim_step("policy", 1), "with 0 batches"),
            (trainer.publish("policy", PolicyVersion("policy", 0, 1)), "cannot publish"),
            (trainer.publish("policy", PolicyVersion("policy", 0, 0)), "never reused"),
        ):
            with pytest.raises(TrainerError, match=reason):
                await ask

    simulate(main, seed=0)


def test_a_saved_trainer_goes_on_in_another(tmp_path: Path) -> None:
    async def main() -> None:
        trainer = RecordingTrainer(["policy"])
        await trainer.start()
        await trainer.forward_backward(batch(1))
        await trainer.optim_step("policy", 1)
        await trainer.publish("policy", PolicyVersion("policy", 0, 1))
        await trainer.save(str(tmp_path / "checkpoint"))
        with pytest.raises(RunDirectoryError, match="empty"):
            await trainer.save(str(tmp_path / "checkpoint"))

        resumed = RecordingTrainer(["policy"])
        await resumed.start(str(tmp_path / "checkpoint"))
        await resumed.forward_backward(batch(2))
        assert (await resumed.optim_step("policy", 2)).started_from == PolicyVersion("policy", 0, 1)

    simulate(main, seed=0)


def test_builders_make_valid_records() -> None:
    assert make_completion([1, 2, 3]).spans[0].stop == 3
    assert make_completion([]).spans == ()
    row = make_trajectory(turns=3, context_tokens=2, sampled_tokens=4).rows[0]
    assert int(row.loss_mask.sum()) == sum(span.stop - span.start for span in row.spans) == 12
    assert set(row.turn_index[row.loss_mask].tolist()) == {0, 1, 2}
    assert make_episode_header(drop_reason="env_error").committed is False
    assert make_episode_header(make_spec(seats={"a": "p", "b": "q"}), reward=0.25).reward == 0.5
