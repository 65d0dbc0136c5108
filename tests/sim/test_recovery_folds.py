"""What a resumed run takes over is the same from the simulated journal and from SQLite, wherever the run died."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.records import EpisodeHeader, EpisodeSpec, FrozenGroupBaselines, PolicyVersion, Proposal
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import Admission, EpisodeEnd, MetricRow, UnitDropped, VersionPublication
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.checkpoints import find_newest_checkpoint
from tests.sim.crash_cases import Talk
from tests.support.crash_scenario import CHECKPOINTS, CrashScenario, Machine
from tests.support.dispatched import dispatched
from tests.support.sim_journal import SimJournal

pytestmark = pytest.mark.sim

POINTS = (20, 60, 118, 126, 150, 210, 250, 286)
"""Operations to die at: before the first checkpoint, between a step and its record, after the last."""


def survivors() -> list[Machine]:
    """What a run that died twice left: the second time in the middle of a lineage of its own."""
    scenario = CrashScenario(Talk)
    left = []
    for first, second in zip(POINTS, reversed(POINTS), strict=True):
        machine = scenario.new_machine()
        for operation in (first, second):
            machine.disk.before = lambda number, _, disk=machine.disk, at=operation: number == at and disk.crash()
            scenario.run(machine, seed=first)
            machine = machine.after_crash("kill")
            left.append(machine.after_crash("kill"))  # a copy, since this one lives on
    return left


async def written(records: SimJournal, directory: Path) -> SqliteJournal:
    journal = SqliteJournal(directory)
    for name, log in records.turn_logs.items():
        for entry in log.entries:
            journal.turn_log(name).append(entry)
    for record in records.on_disk():
        match record:
            case Admission():
                journal.admit(record.spec)
            case EpisodeEnd():
                await journal.commit(
                    EpisodeEnd(record.spec, record.header, record.digest, record.metrics, record.detail, record.counts)
                )
            case UnitDropped():
                journal.record(UnitDropped(record.episode_id, record.attempt, record.policy, record.reason))
            case VersionPublication():
                journal.record(VersionPublication(record.weights, record.parent))
            case MetricRow():
                journal.record(MetricRow(record.policy, record.step, record.values))
            case FrozenGroupBaselines():
                journal.record(record)
            case Proposal():
                journal.record(record)
            case _:
                journal.record(record)
    await journal.flush()
    return journal


def taken_over(past: PastRun) -> dict[str, Any]:
    return {
        "ended": past.ended,
        "fates": past.fates,
        "history": [replace(record, digest=b"") for record in past.log.history() if isinstance(record, EpisodeEnd)],
        "unfinished": list(past.unfinished),
        "next": (past.next_training, past.log.next_number("v")),
    }


def _dispatch(episode: tuple[EpisodeSpec, EpisodeHeader | None]) -> tuple[str, int, bool, str]:
    spec, header = episode
    return spec.episode_id, spec.attempt, header is not None, (header and header.drop_reason) or ""


def test_both_journals_are_folded_alike(tmp_path: Path) -> None:
    async def compare(machine: Machine, directory: Path) -> int:
        manifest, _ = find_newest_checkpoint(CHECKPOINTS, disk=machine.disk)
        versions: dict[str, PolicyVersion] = {} if manifest is None else dict(manifest.versions)
        journal = await written(machine.journal, directory)
        try:
            on_disk, in_memory = (PastRun(log, versions, group_size=4) for log in (journal, machine.journal))
            assert taken_over(on_disk) == taken_over(in_memory)
            assert sorted(map(_dispatch, dispatched(journal))) == sorted(map(_dispatch, dispatched(machine.journal)))
            assert journal.lines() == machine.journal.lines()
            assert journal.highest_lineage() == machine.journal.highest_lineage()
        finally:
            await journal.close()
        return machine.journal.highest_lineage() if manifest else -1

    lineages = {asyncio.run(compare(machine, tmp_path / str(n))) for n, machine in enumerate(survivors())}
    assert lineages == {-1, 0, 1}
