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
from agentrl.core.records import PolicyVersion
from agentrl.journal.entries import JournalEntry, RewardEntry, ToolEntry, encode_body, episode_digest
from agentrl.journal.port import UnitDropped, VersionPublication
from agentrl.journal.reader import AttemptLocation, TurnLogReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import header, spec, step_of, weights

EPISODES = 256
ENTRIES = 6
FLIPS, CUTS = 20_000, 1_000
NEIGHBORS = 8
"""Episodes that may share a page of 4,096 bytes with the damage: those are damaged, all others undamaged."""


def figures(quick: bool) -> dict[str, float | None]:
    """Damage that was returned as good (flips and cuts), and the share of flips that left the undamaged readable."""
    flips, cuts = (200, 40) if quick else (FLIPS, CUTS)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        run = Run(Path(directory))
        unnoticed = readable = 0
        draw = random.Random(0)
        for name, times in (("turns-w0.db", flips * 3 // 4), ("control.db", flips - flips * 3 // 4)):
            size = (run.path / name).stat().st_size
            for _ in range(times):
                with run.spoilt(name, flip=(draw.randrange(size), draw.randrange(8))):
                    wrong, errors = run.read()
                unnoticed += wrong
                readable += errors <= NEIGHBORS
        for index in range(cuts):
            name = "control.db" if index % 4 == 0 else "turns-w0.db"
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
            AttemptLocation("turns-w0.db", name, 0, len(entries), episode_digest(entries))
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
        reader = TurnLogReader(self.path)
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
            at = {"policy": PolicyVersion("policy", 0, 4)}
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
        log = journal.turn_log("w0")
        for step in range(5):
            before = PolicyVersion("policy", 0, step - 1) if step else None
            journal.record(VersionPublication(weights("policy", 0, step), before))
        committed = []
        for number, entries in enumerate(self.entries.values()):
            episode = spec(number)
            journal.admit(episode)
            for entry in entries:
                log.append(entry)
            if number % 16 != 15:  # some stay in flight
                digest = episode_digest(entries)
                await journal.commit_episode(episode, header(episode, len(entries)), digest, {"metric": 1.0})
                committed.append(episode)
        for step in range(1, 5):
            journal.record(step_of("policy", 0, step, committed[40 * (step - 1) : 40 * step]))
        journal.record(UnitDropped("e0", 1, "policy", "no_reward"))
        await journal.close()


def _entries(number: int) -> list[JournalEntry]:
    draw = random.Random(number)
    bodies = [
        ToolEntry("calculate", {"a": draw.random()}, draw.randbytes(120).hex(), "ok", False, draw.random())
        for _ in range(ENTRIES - 1)
    ]
    numbered = enumerate([*bodies, RewardEntry("solver", 0, 1.0, None)])
    return [JournalEntry(f"e{number}", 0, f"r#{call}", draw.randbytes(8), encode_body(body)) for call, body in numbered]
