"""What a run gives up of its journal, what it keeps, and what a reader is told; also where a kill falls in between."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sqlite3
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import PrunedDataError, StorageError
from agentrl.core.records import ForkPoint, PolicyVersion
from agentrl.inspection.reader import RunReader
from agentrl.inspection.steps import step_view
from agentrl.journal import pruning
from agentrl.journal.entries import RewardEntry, encode_body, entry_checksum
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import PruneRule, PruneTotals, VersionPublication
from agentrl.journal.reader import TurnLogReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.run_process import RunLock
from agentrl.journal.store import NonDecreasingClock, SqliteJournal
from agentrl.orchestrator.versions import NOT_MEASURED
from tests.journal_cases import spec, step_of, weights, write, write_episode, write_run


def rule(keep: int, *sealed: int) -> PruneRule:
    """With checkpoints at these steps, newest first."""
    return PruneRule(keep=keep, sealed=[{"policy": PolicyVersion("policy", 0, step)} for step in sealed])


def prune(run: Path, wanted: PruneRule) -> PruneTotals:
    async def main() -> PruneTotals:
        journal = SqliteJournal(run / "journal")
        done = await journal.prune(wanted)
        await journal.close()
        return done

    return asyncio.run(main())


def there(run: Path) -> dict[str, int]:
    """Entries by episode, in all partitions."""
    found: dict[str, int] = {}
    for path in sorted((run / "journal").glob("turns-*.db")):
        connection = sqlite3.connect(path)
        for episode, count in connection.execute("SELECT episode, count(*) FROM entries GROUP BY episode"):
            found[episode] = found.get(episode, 0) + count
        connection.close()
    return found


def counted(run: Path) -> object:
    reader = RunReader(run)
    try:
        return reader.ledger()
    finally:
        reader.close()


def test_what_no_checkpoint_makes_ready_again_goes_and_all_else_stays(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))
    before, ledger = there(tmp_path), counted(tmp_path)
    done = prune(tmp_path, rule(0, 2, 1))
    assert done.episodes == 3  # trained by step 1, and the one that was dropped before it
    assert {name for name in before if name not in there(tmp_path)} == {"e0", "e1", "e5"}
    assert {name: there(tmp_path)[name] for name in ("e2", "e3", "e4", "e99")} == {
        name: before[name] for name in ("e2", "e3", "e4", "e99")
    }
    assert counted(tmp_path) == ledger
    assert prune(tmp_path, rule(0, 2, 1)).episodes == 0


@pytest.mark.parametrize("wanted", [rule(0), rule(2, 2, 1), rule(1, 1), rule(0, 0)], ids=str)
def test_nothing_goes_without_a_checkpoint_or_of_steps_that_are_kept(tmp_path: Path, wanted: PruneRule) -> None:
    asyncio.run(write_run(tmp_path))
    before = there(tmp_path)
    assert prune(tmp_path, wanted).episodes == 0
    assert there(tmp_path) == before


def test_a_reader_says_when_and_by_which_rule_and_not_that_it_is_damaged(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))
    prune(tmp_path, rule(0, 2, 1))
    reader = RunReader(tmp_path)
    for episode in ("e0", "e5"):
        (problem,) = reader.episode(episode).problems
        assert "were pruned on 2" in problem, problem
        assert "journal.keep = 0" in problem
    assert not reader.episode("e2").problems
    reader.close()
    with pytest.raises(PrunedDataError, match="pruned"):
        TurnLogReader(tmp_path / "journal").read("turns-w0.db", "e0", 0, entries=4)


def test_the_columns_of_a_pruned_step_are_said_to_be_pruned(tmp_path: Path) -> None:
    async def main() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        journal.record(VersionPublication(weights("policy", 0, 0), None))
        await write(journal, [spec(0), spec(1)])
        row = step_of("policy", 0, 1, [spec(0), spec(1)])
        row = replace(row, report=replace(row.report, columns="steps/policy/0.1.safetensors"))
        journal.record(VersionPublication(weights("policy", 0, 1), PolicyVersion("policy", 0, 0)))
        journal.record(row)
        await journal.flush()
        path = tmp_path / row.report.columns  # type: ignore[operator]
        path.parent.mkdir(parents=True)
        path.write_bytes(b"columns")
        assert (await journal.prune(rule(0, 1))).files == 1
        await journal.close()

    asyncio.run(main())
    reader = RunReader(tmp_path)
    (problem,) = step_view(reader, 1).problems
    reader.close()
    assert "pruned" in problem


def test_what_a_fork_refers_to_stays(tmp_path: Path) -> None:
    async def main() -> None:
        forks = SqliteJournal(tmp_path / "forks" / "journal", info={"forks": True})
        point = ForkPoint(journal="../../journal", partition="turns-w0.db", episode_id="e0", attempt=0, call_id="r#1")
        forks.admit(replace(spec(0, purpose="fork"), episode_id="f0", fork=point))
        await forks.close()

    asyncio.run(write_run(tmp_path))
    asyncio.run(main())
    prune(tmp_path, rule(0, 2, 2))
    assert set(there(tmp_path)) == {"e0", "e4", "e99"}


def test_the_main_episode_of_a_branch_that_a_fork_refers_to_stays(tmp_path: Path) -> None:
    """A branch holds its own turns alone."""
    point = ForkPoint(journal="../../journal", partition="turns-w0.db", episode_id="e1", attempt=0, call_id="r#1")
    branch = replace(spec(1), fork=replace(point, journal=".", episode_id="e0", branch=1))

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        journal.record(VersionPublication(weights("policy", 0, 0), None))
        await write(journal, [spec(0), branch, spec(2)])
        journal.record(VersionPublication(weights("policy", 0, 1), PolicyVersion("policy", 0, 0)))
        journal.record(step_of("policy", 0, 1, [spec(0), branch, spec(2)]))
        await journal.close()
        forks = SqliteJournal(tmp_path / "forks" / "journal", info={"forks": True})
        forks.admit(replace(spec(0, purpose="fork"), episode_id="f0", fork=point))
        await forks.close()

    asyncio.run(main())
    prune(tmp_path, rule(0, 1))
    assert set(there(tmp_path)) == {"e0", "e1"}


def test_units_of_a_line_that_a_rollback_undid_stay_until_they_are_trained_again(tmp_path: Path) -> None:
    """Step 2 of lineage 0 was undone: the run went on from step 1 in lineage 1, where another step 2 took e4."""

    async def main() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        journal.record(VersionPublication(weights("policy", 1, 1), PolicyVersion("policy", 0, 1)))
        journal.record(VersionPublication(weights("policy", 1, 2), PolicyVersion("policy", 1, 1)))
        journal.record(step_of("policy", 1, 2, [replace(spec(4), group_id="g2")]))
        await journal.flush()
        sealed = [{"policy": PolicyVersion("policy", 1, 2)}]
        await journal.prune(PruneRule(keep=0, sealed=sealed))
        await journal.close()

    asyncio.run(write_run(tmp_path))
    asyncio.run(main())
    assert set(there(tmp_path)) == {"e2", "e3", "e99"}
    assert counted(tmp_path).holds  # type: ignore[attr-defined]


MANY = range(8, 104)


async def long_run(run: Path) -> None:
    """Two of three episodes were trained, in steps of eight; each has tens of kB of entries."""
    journal = SqliteJournal(run / "journal")
    journal.record(VersionPublication(weights("policy", 0, 0), None))
    for number in MANY:
        await write_episode(journal, number, os.urandom(3000).hex())
    for step in range(1, 9):
        journal.record(VersionPublication(weights("policy", 0, step), PolicyVersion("policy", 0, step - 1)))
        numbers = range(8 * step, 8 * step + 8)
        journal.record(step_of("policy", 0, step, [spec(number) for number in numbers], rewards=True))
    await journal.close()


def prune_until_killed(run: Path, transactions: int) -> None:
    """Prune, and kill this process before the transaction after so many."""
    asked = itertools.count(1)

    def stopped() -> bool:
        if next(asked) > transactions:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    async def main() -> None:
        pruning.DELETE_BYTES, pruning.VACUUM_PAGES = 150_000, 64
        journal = SqliteJournal(run / "journal")
        sealed = [{"policy": PolicyVersion("policy", 0, step)} for step in (8, 6)]
        await journal.prune(PruneRule(keep=0, sealed=sealed), should_stop=stopped)
        await journal.close()

    asyncio.run(main())


def test_a_pruning_that_is_killed_loses_nothing_and_the_next_one_ends_it(tmp_path: Path) -> None:
    asyncio.run(long_run(tmp_path))
    settled, before = {f"e{number}" for number in range(8, 56)}, there(tmp_path)
    kills = 0
    for transactions in range(0, 60, 4):
        child = get_context("fork").Process(target=prune_until_killed, args=(tmp_path, transactions))
        child.start()
        child.join()
        found = there(tmp_path)
        assert all(found.get(name) == count for name, count in before.items() if name not in settled)
        assert {found.get(name, 0) for name in settled} <= {0, 4}
        reader = RunReader(tmp_path)
        for name in settled - found.keys():
            assert "were pruned on" in reader.episode(name).problems[0]
        assert reader.ledger().holds
        reader.close()
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        kills += 1
    assert kills > 2
    assert not settled & there(tmp_path).keys()


def test_the_file_system_gets_the_space_back(tmp_path: Path) -> None:
    asyncio.run(long_run(tmp_path))
    path = tmp_path / "journal" / "turns-w0.db"
    before = path.stat().st_size
    done = prune(tmp_path, rule(0, 8))
    assert done.episodes == 64
    assert done.bytes > 64 * 20_000
    assert path.stat().st_size < before * 0.4
    log = SqliteRunLog(tmp_path / "journal")
    log.verify()
    log.close()


def test_the_command_says_what_would_go_gives_it_up_and_refuses_where_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(write_run(tmp_path))
    assert main(["run", "prune", str(tmp_path)]) == 2
    assert "--keep=20" in capsys.readouterr().err
    assert main(["run", "prune", str(tmp_path), "--keep=0"]) == 2
    assert "no checkpoint" in capsys.readouterr().err
    checkpoint = tmp_path / "checkpoints" / "step_000001-0"
    checkpoint.mkdir(parents=True)
    manifest = {"format": 1, "versions": {"policy": [0, 1]}, "files": {}, "ledger": {}}
    (checkpoint / "manifest.json").write_text(
        json.dumps({**manifest, "role_means": [], "measured": NOT_MEASURED.as_data(), "opponents": {}})
    )
    before = there(tmp_path)
    assert main(["run", "prune", str(tmp_path), "--keep=0", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["episodes"] == 3
    assert there(tmp_path) == before
    lock = RunLock(tmp_path / "journal")
    assert main(["run", "prune", str(tmp_path), "--keep=0"]) == 2
    assert f"process {os.getpid()}" in capsys.readouterr().err
    lock.release()
    assert main(["run", "prune", str(tmp_path), "--keep=0"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert set(there(tmp_path)) == {"e2", "e3", "e4", "e99"}
    assert main(["episode", "show", str(tmp_path), "e0"]) in (0, 2)
    assert "were pruned on" in "".join(capsys.readouterr())


def test_a_run_is_not_gone_on_with_from_where_pruned_episodes_would_be_trained_again(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))
    prune(tmp_path, rule(0, 2, 1))
    log = SqliteRunLog(tmp_path / "journal")
    assert PastRun(log, {"policy": PolicyVersion("policy", 0, 1)}, group_size=2).next_training == 100
    with pytest.raises(StorageError, match="e0, e1"):
        PastRun(log, {}, group_size=2)
    log.close()


def test_labels_never_go_back_whatever_the_clock_does(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, monotonic = 1000.0, 50.0
    monkeypatch.setattr("agentrl.core.clock.SystemClock.wall", staticmethod(lambda: wall))
    monkeypatch.setattr("agentrl.core.clock.SystemClock.monotonic", staticmethod(lambda: monotonic))
    clock = NonDecreasingClock(latest=900.0)
    labels = [clock.wall()]
    for jump in (1, 3600, -3600, 1, -7200, 1):
        wall, monotonic = wall + jump, monotonic + 1
        labels.append(clock.wall())
    assert labels == [1000.0, 1001.0, 4601.0, 4602.0, 4603.0, 4604.0, 4605.0]
    assert NonDecreasingClock(latest=5000.0).wall() == 5000.0


@pytest.mark.damages_journal
def test_the_ledger_takes_no_damage_for_pruned_and_nothing_pruned_for_damage(tmp_path: Path) -> None:
    async def begun() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        journal.record(VersionPublication(weights("policy", 0, 0), None))
        await write(journal, [spec(0), spec(1)])
        journal.record(VersionPublication(weights("policy", 0, 1), PolicyVersion("policy", 0, 0)))
        journal.record(step_of("policy", 0, 1, [spec(0), spec(1)]))
        await journal.close()

    asyncio.run(begun())
    assert prune(tmp_path, rule(0, 1)).episodes == 2
    assert counted(tmp_path).holds  # type: ignore[attr-defined]
    connection = sqlite3.connect(tmp_path / "journal" / "turns-w0.db")
    key = ("e0", 0, "r#0", b"", encode_body(RewardEntry("solver", 0, 0.5, None)))
    connection.execute("INSERT INTO entries VALUES (NULL, ?, ?, ?, ?, ?, ?)", (*key, entry_checksum(*key)))
    connection.commit()
    connection.close()
    assert counted(tmp_path).problems == [  # type: ignore[attr-defined]
        "episode e0 attempt 0: 3 entries were committed, turns-w0.db has 1"
    ]
