"""Damaged journals: is anything changed ever returned as good, and how much stays readable?

Writes a run of 256 episodes, then cuts its databases at many places and flips single bits, one at a time. After each,
everything is read back: each episode's entries must be exactly those that were written, or an error by name; the
control log must give the same facts, or an error by name.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from agentrl.core.errors import JournalError
from agentrl.core.records import (
    DataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    SeatBinding,
    StepReport,
    Task,
    TrainBatch,
    TrajectoryCredit,
    TrajectoryHeader,
    Unit,
    WeightsRef,
)
from agentrl.journal.checksums import episode_digest
from agentrl.journal.entries import JournalEntry, RewardEntry, ToolEntry, encode_body
from agentrl.journal.port import StepRow
from agentrl.journal.reader import EntryKey, TurnReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.store import SqliteJournal

EPISODES = 256
ENTRIES = 6
FLIPS, CUTS = 20_000, 1_000
NEIGHBOURS = 8
"""Episodes that may share a page of 4,096 bytes with the damage: those are damaged, all others undamaged."""


def figures(quick: bool) -> dict[str, float | None]:
    """Damage that was returned as good (flips and cuts), and the share of flips that left the undamaged readable."""
    flips, cuts = (200, 40) if quick else (FLIPS, CUTS)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        run = Run(Path(directory))
        unnoticed = readable = 0
        draw = random.Random(0)
        for name, times in (("turns-0.db", flips * 3 // 4), ("control.db", flips - flips * 3 // 4)):
            size = (run.path / name).stat().st_size
            for _ in range(times):
                with run.spoilt(name, flip=(draw.randrange(size), draw.randrange(8))):
                    wrong, errors = run.read()
                unnoticed += wrong
                readable += errors <= NEIGHBOURS
        for index in range(cuts):
            name = "control.db" if index % 4 == 0 else "turns-0.db"
            with run.spoilt(name, cut=draw.randrange((run.path / name).stat().st_size)):
                unnoticed += run.read()[0]
    return {"flips_unnoticed": float(unnoticed), "flips_readable_share": readable / flips}


class Run:
    """A run on disk, and what reading it must give."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = {f"e{number}": _entries(number) for number in range(EPISODES)}
        asyncio.run(self._write())
        self.keys = [
            EntryKey("turns-0.db", name, 0, len(entries), episode_digest(entries))
            for name, entries in self.entries.items()
        ]
        self.facts = self._facts()

    @contextmanager
    def spoilt(self, name: str, *, flip: tuple[int, int] | None = None, cut: int | None = None) -> Iterator[None]:
        """Within: one bit of a file is another, or the file ends early."""
        path, sound = self.path / name, self.path / f"{name}.sound"
        if not sound.exists():
            shutil.copyfile(path, sound)
        content = bytearray(sound.read_bytes())
        if flip is not None:
            content[flip[0]] ^= 1 << flip[1]
        path.write_bytes(content[:cut])
        try:
            yield
        finally:
            shutil.copyfile(sound, path)
            for rest in self.path.glob("*-wal"):
                rest.unlink()
            for rest in self.path.glob("*-shm"):
                rest.unlink()

    def read(self) -> tuple[int, int]:
        """(things returned that are not what was written, episodes that could not be read)."""
        wrong = 0
        with suppress(JournalError):
            wrong += self._facts() != self.facts
        reader = TurnReader(self.path)
        errors = 0
        try:
            try:
                found = reader.read_many(self.keys)
            except JournalError:
                for key in self.keys:
                    try:
                        found = reader.read_many([key])
                    except JournalError:
                        errors += 1
                    else:
                        wrong += found[0] != self.entries[key.episode_id]
            else:
                wrong += sum(rows != self.entries[key.episode_id] for key, rows in zip(self.keys, found, strict=True))
        finally:
            reader.close()
        return wrong, errors

    def _facts(self) -> Any:
        """What a resume takes from the control log."""
        log = SqliteRunLog(self.path)
        try:
            log.verify()
            at = {"solver": PolicyVersion("solver", 0, 4)}
            return (
                log.next_number("e"),
                log.unfinished(),
                list(log.ready_units(at)),
                log.resolved_units(at),
                log.parents(),
                log.highest_lineage(),
            )
        finally:
            log.close()

    async def _write(self) -> None:
        journal = SqliteJournal(self.path, info={"name": "damage"})
        log = journal.turn_log("0")
        for step in range(5):
            version = PolicyVersion("solver", 0, step)
            weights = WeightsRef(version=version, path=f"v{step}", kind="full", sha256="0" * 64)
            journal.record_version(weights, PolicyVersion("solver", 0, step - 1) if step else None)
        units = []
        for number, entries in enumerate(self.entries.values()):
            spec = _spec(number)
            journal.admit(spec)
            for entry in entries:
                log.append(entry)
            location = DataLocation(log.name, len(entries))
            header = _header(spec, location)
            if number % 16 != 15:  # some stay in flight
                await journal.commit_episode(spec, header, episode_digest(entries), {"metric": 1.0})
                credit = TrajectoryCredit("solver", 0, 1.0, 0.5, 0.5)
                units.append(
                    Unit(episode_id=spec.episode_id, attempt=0, policy="solver", location=location, credits=(credit,))
                )
        for step in range(1, 5):
            fed = tuple(units[40 * (step - 1) : 40 * step])
            batch = TrainBatch(step_id=step, policy="solver", units=fed, normaliser=1.0)
            journal.record_step(StepRow(report=_report(step), version=PolicyVersion("solver", 0, step), batch=batch))
        journal.record_drop("e0", 1, "solver", "no_reward")
        await journal.close()


def _entries(number: int) -> list[JournalEntry]:
    draw = random.Random(number)
    bodies = [
        ToolEntry("calculate", {"a": draw.random()}, draw.randbytes(120).hex(), "ok", False, draw.random())
        for _ in range(ENTRIES - 1)
    ]
    numbered = enumerate([*bodies, RewardEntry("solver", 0, 1.0, None)])
    return [JournalEntry(f"e{number}", 0, f"r#{call}", draw.randbytes(8), encode_body(body)) for call, body in numbered]


def _spec(number: int) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=f"e{number}",
        environment="damage",
        task=Task(id=f"t{number}", data={"number": number}),
        seed=number,
        seats={"solver": SeatBinding("solver")},
        group_id=f"g{number // 8 * 8}",
        group_size=8,
    )


def _header(spec: EpisodeSpec, location: DataLocation) -> EpisodeHeader:
    return EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=0,
        purpose="train",
        parent_id=None,
        stop_reason="completed",
        drop_reason=None,
        turns=1,
        tokens=9,
        seconds=0.5,
        trajectories=(TrajectoryHeader("solver", 0, "solver", 1.0, 9, 0, 0),),
        location=location,
    )


def _report(step: int) -> StepReport:
    return StepReport(
        step_id=step,
        policy="solver",
        started_from=PolicyVersion("solver", 0, step - 1),
        loss=0.1,
        grad_norm=1.0,
        samples=40,
        tokens=360,
        seconds=0.1,
        metrics={},
        input_digest="0" * 32,
    )
