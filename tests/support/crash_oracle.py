"""What must hold after crashes, told from what lies on disk and what a witness saw: no state of the product is asked.

Each check returns sentences, one for each violation; the word in front of the colon names the rule:

* `acknowledged`: a commit that was reported is there after the crash.
* `resumed`: the run goes on by itself, from a checkpoint none of which is damaged.
* `sampled`: a turn that was on disk at the crash is not sampled again.
* `served`: an engine is given no version before the journal has it, and the step that made it, on disk.
* `finished`: every policy has taken its steps, and nothing is in flight or ready at the end.
* `once`: what the last weights were trained on is what the journal says was consumed on the way to them, once each.
* `entries`: the log holds of each committed episode the entries its header names, and no others; or they were pruned.
* `pruned`: of what any checkpoint makes ready again, every entry is there.
* `ledger`: episodes: admitted = trained + dropped; units: committed = consumed + dropped; never two of these.
* `versions`: no version id was recorded with two different weights.
* `dropped`, `rewards`: no episode was dropped, and none rewarded, otherwise than in the run nothing happened to.
* `attempts`: no episode began again.
* `trained`: where the same episodes were admitted as in that run, the same units were trained.

Excused, as declared: an act that must happen `once` may end its episode as `unknown_outcome_error`; an episode that has
called a `pinned` resource may begin again, and is then another one; one that has done both is dropped instead, as
`resource_lost`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from agentrl.journal.entries import EffectIntentEntry, ResourceCallEntry, TurnEntry
from agentrl.journal.port import Admission, EpisodeEnd, UnitDropped, VersionPublication
from agentrl.orchestrator.checkpoints import find_newest_checkpoint, resumable_manifests
from tests.support.crash_scenario import CHECKPOINTS
from tests.support.dispatched import ready_units
from tests.support.recording_trainer import TRAINED_FILE

if TYPE_CHECKING:
    from agentrl.core.records import EpisodeHeader, PolicyVersion
    from tests.support.crash_scenario import Machine
    from tests.support.sim_journal import SimJournal

R = TypeVar("R")

UnitKey = tuple[str, int, str]
"""Episode, attempt, policy."""
Rewards = tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """How a run ended, as far as its last machine tells."""

    rewards: dict[str, tuple[int, Rewards]]
    """By committed episode: the attempt, and each seat's."""
    drops: frozenset[str]
    """Reasons, of episodes and of units."""
    trained: Counter[UnitKey]
    """What the last weights were trained on."""
    admitted: frozenset[str]
    pinned: frozenset[str]
    """Episodes that have called a pinned resource."""
    once: frozenset[str]
    """Episodes that have begun an act that must happen once."""
    violations: tuple[str, ...]


def lost(acknowledged: Iterable[tuple[str, int]], survivor: Machine) -> list[str]:
    """Acknowledged commits that a crash took."""
    ended = {(end.spec.episode_id, end.spec.attempt) for end in _on_disk(survivor.journal, EpisodeEnd)}
    return [f"acknowledged: the commit of {key} is gone" for key in acknowledged if key not in ended]


def needed(machine: Machine) -> list[str]:
    """Entries that were pruned and that a checkpoint makes ready again: it may be the one the run goes on from."""
    violations = []
    for manifest in resumable_manifests(CHECKPOINTS, disk=machine.disk):
        versions = manifest.versions
        for _, header in ready_units(machine.journal, versions):
            entries, _ = machine.journal.recorded(header.episode_id, header.attempt)
            if header.location is not None and len(entries) < header.location.entries:
                violations.append(f"pruned: {header.episode_id} is ready again at {dict(versions)}, and it is gone")
    return violations


def turns_on_disk(machine: Machine) -> frozenset[str]:
    """Request ids of the turns a machine holds."""
    return frozenset(
        f"{entry.episode_id}.{entry.attempt}.{entry.call_id}"
        for log in machine.journal.turn_logs.values()
        for entry in log.entries[: log.on_disk]
        if isinstance(entry.decode(), TurnEntry)
    )


def sampled_again(recorded: Iterable[str], machine: Machine) -> list[str]:
    """Turns that were on disk when a life began, and were sampled in it all the same."""
    return [f"sampled: {call} again" for call in sorted(set(recorded) & set(machine.sampled))]


def served_unknown(machine: Machine) -> list[str]:
    """Versions that an engine was given before they were on disk."""
    return [f"served: {version} before it was on disk" for version, is_known in machine.served if not is_known]


def finished(machine: Machine, *, steps: int, trainable: Sequence[str]) -> Finished:
    """Look at a run that has ended."""
    journal = machine.journal
    manifest, rejected = find_newest_checkpoint(CHECKPOINTS, disk=machine.disk)
    versions = {} if manifest is None else dict(manifest.versions)
    violations = [f"resumed: {reason}" for reason in rejected]
    violations += [
        f"finished: {policy} is at {versions.get(policy)}, not at step {steps}"
        for policy in trainable
        if policy not in versions or versions[policy].step != steps
    ]
    trained = Counter(unit for policy in versions for unit in _trained_by(machine, policy))
    ends = {(end.spec.episode_id, end.spec.attempt): end for end in _on_disk(journal, EpisodeEnd)}
    committed = {key: end.header for key, end in ends.items() if end.header.committed}
    violations += _once(machine, versions, trained)
    violations += _ledger(machine, trained, trainable)
    violations += _versions(machine)
    violations += _entries(machine, committed.values())
    return Finished(
        rewards={
            header.episode_id: (
                header.attempt,
                tuple((t.seat, t.reward) for t in sorted(header.trajectories, key=lambda t: t.seat)),
            )
            for header in committed.values()
        },
        drops=frozenset(
            [end.header.drop_reason or "" for end in ends.values() if not end.header.committed]
            + [drop.reason for drop in _on_disk(journal, UnitDropped)]
        ),
        trained=trained,
        admitted=frozenset(admission.spec.episode_id for admission in _on_disk(journal, Admission)),
        pinned=_pinned(machine),
        once=_began_once(machine),
        violations=tuple(violations),
    )


def compared(found: Finished, undisturbed: Finished) -> list[str]:
    """What went otherwise than in the run nothing happened to, and should not have."""
    excused = {"run_ended", "unknown_outcome_error"} | ({"resource_lost"} if found.pinned & found.once else set())
    violations = [
        f"dropped: something, because of {reason}" for reason in sorted(found.drops - undisturbed.drops - excused)
    ]
    for episode, (attempt, rewards) in found.rewards.items():
        then, expected = undisturbed.rewards.get(episode, (attempt, rewards))
        if attempt != then and episode not in found.pinned:
            violations.append(f"attempts: {episode} began again")
        if attempt == then and rewards != expected:
            violations.append(f"rewards: {episode} got {rewards}, and {expected} in the run nothing happened to")
    if found.admitted == undisturbed.admitted and found.drops <= undisturbed.drops:
        began_again = {(episode, policy) for episode, _, policy in found.trained if episode in found.pinned}
        missing = undisturbed.trained - found.trained
        violations += [f"trained: not {unit}" for unit in sorted(missing) if (unit[0], unit[2]) not in began_again]
    return violations


def _pinned(machine: Machine) -> frozenset[str]:
    return frozenset(
        entry.episode_id
        for log in machine.journal.turn_logs.values()
        for entry in log.entries[: log.on_disk]
        if isinstance(body := entry.decode(), ResourceCallEntry) and body.level == "pinned"
    )


def _began_once(machine: Machine) -> frozenset[str]:
    return frozenset(
        entry.episode_id
        for log in machine.journal.turn_logs.values()
        for entry in log.entries[: log.on_disk]
        if isinstance(entry.decode(), EffectIntentEntry)
    )


def _trained_by(machine: Machine, policy: str) -> list[UnitKey]:
    """The units a policy's last weights were trained on, as these say."""
    manifest, _ = find_newest_checkpoint(CHECKPOINTS, disk=machine.disk)
    assert manifest is not None
    content = machine.disk.read(manifest.directory / policy / TRAINED_FILE, limit=1 << 30)
    return [(episode, attempt, policy) for episode, attempt in json.loads(content)]


def _once(machine: Machine, versions: dict[str, PolicyVersion], trained: Counter[UnitKey]) -> list[str]:
    """Weights and journal agree on what was consumed, and that it was once."""
    resolved = machine.journal.resolved_units(versions)
    consumed = {unit for unit, reason in resolved.items() if reason is None}
    violations = [f"once: {unit} was trained {count} times" for unit, count in trained.items() if count > 1]
    violations += [f"once: {unit} is consumed, and no weights know it" for unit in sorted(consumed - set(trained))]
    violations += [f"once: {unit} was trained, and is not consumed" for unit in sorted(set(trained) - consumed)]
    return violations


def _ledger(machine: Machine, trained: Counter[UnitKey], trainable: Sequence[str]) -> list[str]:
    """Both equations at the end of a run, where nothing is in flight or ready."""
    journal = machine.journal
    newest_attempt = {admission.spec.episode_id: admission.spec for admission in _on_disk(journal, Admission)}
    ends = {(end.spec.episode_id, end.spec.attempt): end.header for end in _on_disk(journal, EpisodeEnd)}
    dropped = Counter((drop.episode_id, drop.attempt, drop.policy) for drop in _on_disk(journal, UnitDropped))
    violations = []
    for spec in newest_attempt.values():
        header = ends.get((spec.episode_id, spec.attempt))
        if header is None:
            violations.append(f"ledger: {spec.episode_id} is in flight at the end")
        elif header.committed:
            for policy in sorted({t.policy for t in header.trajectories} & set(trainable)):
                unit = (header.episode_id, header.attempt, policy)
                fates = (unit in trained) + (unit in dropped)
                if fates != 1:
                    violations.append(f"ledger: {unit} is {'trained and dropped' if fates else 'ready at the end'}")
    committed = {key for key, header in ends.items() if header.committed}
    resolved = {(episode, attempt) for episode, attempt, _ in (*trained, *dropped)}
    violations += [f"ledger: {key} was never committed, and is trained or dropped" for key in resolved - committed]
    violations += [f"ledger: {key} was never admitted" for key in ends if key[0] not in newest_attempt]
    return violations


def _versions(machine: Machine) -> list[str]:
    weights: dict[PolicyVersion, str] = {}
    violations = []
    for publication in _on_disk(machine.journal, VersionPublication):
        version, sha256 = publication.weights.version, publication.weights.sha256
        if weights.setdefault(version, sha256) != sha256:
            violations.append(f"versions: {version} names two different weights")
    return violations


def _entries(machine: Machine, headers: Collection[EpisodeHeader]) -> list[str]:
    found = Counter(
        (log.name, entry.episode_id, entry.attempt)
        for log in machine.journal.turn_logs.values()
        for entry in log.entries[: log.on_disk]
    )
    pruned = machine.journal.pruned({header.episode_id for header in headers})
    violations = []
    for header in headers:
        assert header.location is not None
        there = found[header.location.partition, header.episode_id, header.attempt]
        if not there and (header.episode_id, header.attempt) in pruned:
            continue
        if there != header.location.entries:
            violations.append(f"entries: {header.episode_id} has {there}, and {header.location.entries} were committed")
    return violations


def _on_disk(journal: SimJournal, kind: type[R]) -> list[R]:
    return [record for record in journal.on_disk() if isinstance(record, kind)]
