"""What a run directory says of itself after a kill, in plain SQL and JSON: nothing of agentrl is imported.

Held against each other: what was acknowledged to processes now dead, the databases, the checkpoints and, where the
trainer keeps a list of its own, what the weights were made of.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

Unit = tuple[str, int, str]
"""Episode, attempt, policy."""


@dataclass(slots=True)
class Verdict:
    """What was found; sets, so that a fault that stays is counted once."""

    lost: set[str] = field(default_factory=set)
    """Acknowledged and not there, or there in part."""
    twice: set[str] = field(default_factory=set)
    """In two steps of the surviving lineage, or journaled twice."""
    ledger_errors: set[str] = field(default_factory=set)
    """Where an equation, a count, or a version does not hold."""
    resampled: set[str] = field(default_factory=set)
    """Entries that are others than those with which a further life of the run began."""
    version_gone: set[str] = field(default_factory=set)
    """Episodes dropped for a version whose files are there."""
    steps: dict[str, int] = field(default_factory=dict)
    """Steps of the newest checkpoint, by policy."""

    def add(self, other: Verdict, where: str) -> None:
        """Take over another run's faults."""
        for name in ("lost", "twice", "ledger_errors", "resampled", "version_gone"):
            mine: set[str] = getattr(self, name)
            mine |= {f"{where}: {fault}" for fault in getattr(other, name)}

    def faults(self) -> set[str]:
        """All faults."""
        return self.lost | self.twice | self.ledger_errors | self.resampled | self.version_gone


def acknowledgements(directory: Path) -> list[list[Any]]:
    """Lines a killed process wrote whole."""
    file = directory / "acknowledged.jsonl"
    if not file.exists():
        return []
    lines = file.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def entries_on_disk(directory: Path) -> dict[tuple[Any, ...], bytes]:
    """Digests of a run's journal entries, by partition, episode, attempt and call."""
    found = {}
    for path in (directory / "run" / "journal").glob("turns-*.db"):
        with _open(path) as turns:
            for *call, body in turns.execute("SELECT episode, attempt, call, body FROM entries"):
                found[path.name, *call] = hashlib.blake2b(body, digest_size=16).digest()
    return found


def judge(directory: Path, *, ended: bool, before: Mapping[tuple[Any, ...], bytes] = MappingProxyType({})) -> Verdict:
    """Judge the run in `directory`/run; `ended`: it says it has taken all its steps.

    `before` are the entries with which its lives began, from `entries_on_disk`.
    """
    promised = acknowledgements(directory)  # read first: the run may be going on
    verdict = Verdict()
    journal = directory / "run" / "journal"
    if not (journal / "control.db").exists():
        if promised:
            verdict.lost.add("the journal")
        return verdict
    with _open(journal / "control.db") as control:
        if not control.execute("SELECT 1 FROM sqlite_master WHERE name = 'episodes'").fetchone():
            return verdict
        _judge_promises(promised, control, verdict)
        _judge_entries(control, sorted(journal.glob("turns-*.db")), verdict)
        _judge_drops(control, directory / "run" / "versions", verdict)
        manifest, state = _newest_checkpoint(directory / "run" / "checkpoints", promised, verdict)
        versions = manifest["versions"] if manifest else {}
        verdict.steps = {policy: step for policy, (_, step) in versions.items()}
        consumed: set[Unit] = set()
        for policy, (lineage, step) in versions.items():
            consumed |= _judge_line(control, policy, lineage, step, state, verdict)
        _judge_units(control, consumed, set(versions), ended=ended, verdict=verdict)
        _judge_pruned(control, consumed, set(versions), verdict)
    for call, digest in (entries_on_disk(directory) if before else {}).items():
        if before.get(call, digest) != digest:
            verdict.resampled.add(f"entry {call} was recorded anew")
    return verdict


@contextlib.contextmanager
def _open(path: Path) -> Iterable[sqlite3.Connection]:  # type: ignore[misc]
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20)
    try:
        yield connection
    finally:
        connection.close()


def _judge_promises(promised: list[list[Any]], control: sqlite3.Connection, verdict: Verdict) -> None:
    rows = {(e, a): why for e, a, why in control.execute("SELECT episode, attempt, drop_reason FROM episodes")}
    shas: dict[tuple[Any, ...], str] = {}
    for kind, *what in promised:
        if kind == "commit":
            episode, attempt, reason = what
            if (episode, attempt) not in rows or rows[episode, attempt] != reason:
                verdict.lost.add(f"{episode}.{attempt}")
        elif kind == "version":
            *version, sha = what
            if shas.setdefault(tuple(version), sha) != sha:
                verdict.ledger_errors.add(f"version {version} was published with two weights")
    query = "SELECT policy, lineage, step, sha256 FROM versions"
    for policy, lineage, step, sha in control.execute(query):
        if shas.get((policy, lineage, step), sha) != sha:
            verdict.ledger_errors.add(f"version {policy}@{lineage}.{step} is in the journal with other weights")


def _judge_entries(control: sqlite3.Connection, partitions: list[Path], verdict: Verdict) -> None:
    query = "SELECT partition, episode, attempt, entries FROM episodes WHERE drop_reason IS NULL"
    expected = {(partition, episode, attempt): count for partition, episode, attempt, count in control.execute(query)}
    found = {}
    for path in partitions:
        with _open(path) as turns:
            query = "SELECT episode, attempt, count(*), count(DISTINCT call) FROM entries GROUP BY episode, attempt"
            for episode, attempt, count, calls in turns.execute(query):
                found[path.name, episode, attempt] = (count, calls)
    pruned = set(control.execute("SELECT episode, attempt FROM pruned"))
    for key, count in expected.items():
        if key[1:] in pruned and key not in found:
            continue
        if found.get(key, (0, 0))[0] != count:
            verdict.lost.add(f"entries of {key}: {found.get(key)} of {count}")
    for key, (count, calls) in found.items():
        if count != calls:
            verdict.twice.add(f"entries of {key}")


def _judge_drops(control: sqlite3.Connection, versions: Path, verdict: Verdict) -> None:
    """An episode is dropped for a version only if its files are missing."""
    query = "SELECT episode, attempt, detail FROM episodes WHERE drop_reason = 'version_gone'"
    for episode, attempt, detail in control.execute(query):
        named = re.search(r"(\w+)@(\d+\.\d+)", detail)
        if named is None or any((versions / named[1] / named[2]).glob("*.safetensors")):
            verdict.version_gone.add(f"{episode}.{attempt}: {detail}")


def _newest_checkpoint(
    checkpoints: Path, promised: list[list[Any]], verdict: Verdict
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The newest sealed checkpoint: its manifest, and its trainer's own account where it keeps one."""
    sealed = []
    for path in checkpoints.glob("step_*"):
        with contextlib.suppress(OSError):
            sealed.append((*_order(path.name), path, json.loads((path / "manifest.json").read_text())))
    acknowledged = max((_order(what[0]) for kind, *what in promised if kind == "checkpoint"), default=None)
    if not sealed:
        if acknowledged is not None:
            verdict.lost.add("every checkpoint")
        return None, None
    lineage, step, path, manifest = max(sealed, key=lambda one: one[:2])
    if acknowledged is not None and (lineage, step) < acknowledged:
        verdict.lost.add(f"checkpoint {acknowledged}")
    state = None
    try:
        for name, (size, digest) in manifest["files"].items():
            content = (path / name).read_bytes()
            if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
                verdict.ledger_errors.add(f"{path.name}/{name} is not what its manifest says")
        if (path / "trained.json").exists():
            state = json.loads((path / "trained.json").read_text())
    except FileNotFoundError:
        pass  # a live run has pruned it meanwhile
    return manifest, state


def _order(name: str) -> tuple[int, int]:
    step, lineage = name.removeprefix("step_").split("-")
    return int(lineage), int(step)


def _judge_line(
    control: sqlite3.Connection, policy: str, lineage: int, step: int, state: dict[str, Any] | None, verdict: Verdict
) -> set[Unit]:
    """The units of the steps that led to a version, which the trainer's account must repeat."""
    line: list[tuple[int, str, int]] = []
    query = "SELECT episode, attempt FROM step_units WHERE policy = ? AND lineage = ? AND step = ? ORDER BY position"
    while True:
        units = dict.fromkeys(control.execute(query, (policy, lineage, step)))
        line = [*((step, episode, attempt) for episode, attempt in units), *line]
        parent = control.execute(
            "SELECT parent_lineage, parent_step FROM versions WHERE policy = ? AND lineage = ? AND step = ?",
            (policy, lineage, step),
        ).fetchone()
        if parent is None:
            verdict.lost.add(f"version {policy}@{lineage}.{step}")
            break
        if parent[0] is None:
            break
        if not units and parent[1] != step:
            verdict.lost.add(f"the units of {policy}@{lineage}.{step}")
        lineage, step = parent
    for episode, count in Counter(episode for _, episode, _ in line).items():
        if count > 1:
            verdict.twice.add(f"{policy}: {episode} in {count} steps")
    if state is not None and [tuple(unit) for unit in state[policy]["units"]] != line:
        verdict.twice.add(f"{policy}: the trainer was given other units than the journal says")
    return {(episode, attempt, policy) for _, episode, attempt in line}


def _judge_units(
    control: sqlite3.Connection, consumed: set[Unit], policies: set[str], *, ended: bool, verdict: Verdict
) -> None:
    """admitted = in flight + ended, committed = ready + consumed + dropped; nothing in flight or ready at the end."""
    committed: set[Unit] = set()
    query = (
        "SELECT t.episode, t.attempt, t.policy FROM trajectories t JOIN episodes e ON e.episode = t.episode AND"
        " e.attempt = t.attempt WHERE e.purpose = 'train' AND e.drop_reason IS NULL"
    )
    committed |= {(episode, attempt, policy) for episode, attempt, policy in control.execute(query)}
    dropped = set(control.execute("SELECT episode, attempt, policy FROM unit_drops"))
    for name, wrong in (
        ("consumed and never committed", consumed - committed),
        ("dropped and never committed", dropped - committed),
        ("consumed and dropped", consumed & dropped),
    ):
        verdict.ledger_errors |= {f"{name}: {unit}" for unit in wrong}
    attempts = Counter(row[0] for row in control.execute("SELECT episode FROM episodes WHERE drop_reason IS NULL"))
    verdict.twice |= {f"{episode} was committed {count} times" for episode, count in attempts.items() if count > 1}
    query = (
        "SELECT a.episode FROM admissions a WHERE a.purpose = 'train' AND NOT EXISTS (SELECT 1 FROM episodes e"
        " WHERE e.episode = a.episode AND e.attempt = a.attempt) AND NOT EXISTS (SELECT 1 FROM admissions b"
        " WHERE b.episode = a.episode AND b.attempt > a.attempt)"
    )
    unfinished = {episode for (episode,) in control.execute(query)}
    never = control.execute(
        "SELECT e.episode FROM episodes e WHERE NOT EXISTS (SELECT 1 FROM admissions a WHERE a.episode = e.episode"
        " AND a.attempt = e.attempt)"
    )
    verdict.ledger_errors |= {f"ended and never admitted: {episode}" for (episode,) in never}
    if ended:
        ready = {unit for unit in committed - consumed - dropped if unit[2] in policies}
        verdict.lost |= {f"unfinished at the end: {episode}" for episode in unfinished}
        verdict.lost |= {f"ready at the end: {unit}" for unit in ready}


def _judge_pruned(control: sqlite3.Connection, consumed: set[Unit], policies: set[str], verdict: Verdict) -> None:
    """No unit that may still be trained has lost its tokens."""
    dropped = set(control.execute("SELECT episode, attempt, policy FROM unit_drops"))
    query = "SELECT t.episode, t.attempt, t.policy FROM pruned p JOIN trajectories t USING (episode, attempt)"
    for unit in set(control.execute(query)) - consumed - dropped:
        if unit[2] in policies:
            verdict.lost.add(f"pruned, and neither trained nor dropped: {unit}")
