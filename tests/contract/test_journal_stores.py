"""The journals, in memory and in SQLite, keep the promises of `JournalStore`, `TurnLog` and `RunLog`."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.core.ports import PolicyCounts
from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    FrozenGroupBaselines,
    GroupScores,
    MemberScore,
    PolicyVersion,
    Proposal,
    RoleMeanAtAdmission,
    StepReport,
    TrainBatch,
    TrajectoryCredit,
    Unit,
    WeightsRef,
    dropped_header,
)
from agentrl.journal.entries import (
    JournalEntry,
    PartialTurnTokens,
    decode_partial_turn,
    encode_partial_turn,
)
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import Admission, ControlRecord, EpisodeEnd, StepRow, UnitDropped, VersionPublication
from agentrl.journal.reader import TurnLogReader
from tests.contract.journal_kinds import AnyJournal, OnJournal, entry
from tests.support.builders import make_completion, make_episode_header, make_spec
from tests.support.dispatched import members, ready_units

if TYPE_CHECKING:
    import pytest


async def finish(journal: AnyJournal, spec: EpisodeSpec, *, drop_reason: str | None = None) -> EpisodeHeader:
    """Admit, write one entry, commit."""
    journal.admit(spec)
    log = journal.turn_log("w0")
    log.append(entry(spec, 0))
    await log.flush()
    header = make_episode_header(spec, drop_reason=drop_reason, location=EpisodeDataLocation(log.name, 1))
    await journal.commit(EpisodeEnd(spec, header, b"d" * 16, {}))
    return header


def consume(journal: AnyJournal, header: EpisodeHeader, made: PolicyVersion, started_from: PolicyVersion) -> None:
    """Record the step that trained on `header`, and the version it made."""
    assert header.location is not None
    credit = TrajectoryCredit(seat="agent", index=0, reward=1.0, advantage=0.5, baseline=0.5)
    unit = Unit(
        episode_id=header.episode_id,
        attempt=header.attempt,
        policy=made.policy,
        location=header.location,
        credits=(credit,),
    )
    batch = TrainBatch(step_id=made.step, policy=made.policy, units=(unit,), normalizer=1.0)
    report = StepReport(
        step_id=made.step,
        policy=made.policy,
        started_from=started_from,
        loss=0.0,
        grad_norm=0.0,
        samples=1,
        tokens=1,
        seconds=0.0,
        metrics={},
        input_digest="",
    )
    journal.record(StepRow(report=report, version=made, batch=batch))
    journal.record(VersionPublication(weights(made), started_from))


def weights(version: PolicyVersion) -> WeightsRef:
    return WeightsRef(version=version, path=f"weights/{version}", kind="full", sha256="0" * 64)


def test_entries_are_read_in_the_order_they_were_appended_and_by_attempt(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        first, second = make_spec("e0"), make_spec("e0", attempt=1)
        log = journal.turn_log("w0")
        for number in range(3):
            log.append(entry(first, number))
            log.append(entry(second, 10 + number))
        await log.flush()

        assert [found.call_id for found in log.read("e0", 0)] == ["r#0", "r#1", "r#2"]
        assert [found.call_id for found in log.read("e0", 1)] == ["r#10", "r#11", "r#12"]
        assert log.read("e1", 0) == []
        assert journal.turn_log("w0").name == log.name

    on_journal(scenario)


def test_roots_are_counted_once_and_what_never_ended_is_found(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        await finish(journal, make_spec("e0"))
        await finish(journal, make_spec("e1"), drop_reason="env_error")
        retried = replace(make_spec("e1"), attempt=1)
        journal.admit(retried)
        journal.admit(make_spec("e2"))
        journal.admit(make_spec("v0", purpose="evaluate"))
        journal.admit(make_spec("e2~0.r#0.0", parent_id="e2"))
        await journal.flush()

        assert journal.next_number("e") == 3
        assert [(spec.episode_id, spec.attempt) for spec in journal.unfinished()] == [
            ("e1", 1),
            ("e2", 0),
            ("e2~0.r#0.0", 0),
        ]
        assert journal.next_number("v") == 1

    on_journal(scenario)


def test_units_are_ready_until_they_are_consumed_or_dropped(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        start, first = PolicyVersion("policy", 0, 0), PolicyVersion("policy", 0, 1)
        journal.record(VersionPublication(weights(start), None))
        headers = [await finish(journal, make_spec(f"e{number}")) for number in range(3)]
        await finish(journal, make_spec("e3", seats={"agent": "frozen"}))
        await finish(journal, make_spec("v0", purpose="evaluate"))
        consume(journal, headers[0], first, start)
        journal.record(UnitDropped("e1", 0, "policy", "stale"))
        await journal.flush()

        ready = list(ready_units(journal, {"policy": first}))
        assert [header for _, header in ready] == [headers[2]]
        assert [spec.episode_id for spec, _ in ready] == ["e2"]
        without_manifest = [spec.episode_id for spec, _ in ready_units(journal, {})]
        assert without_manifest == ["e0", "e2", "e3"], "before the first checkpoint nothing was consumed"

    on_journal(scenario)


def test_the_rewards_and_states_of_turns_come_back_with_their_trajectories(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        spec = make_spec("e0")
        journal.admit(spec)
        log = journal.turn_log("w0")
        log.append(entry(spec, 0))
        plain = make_episode_header(spec, location=EpisodeDataLocation(log.name, 1))
        rewarded = replace(plain.trajectories[0], turn_rewards=((0, 0.1), (2, -1.5)), turn_states=bytes(24))
        header = replace(plain, trajectories=(rewarded,))
        await journal.commit(EpisodeEnd(spec, header, b"d" * 16, {}))
        assert [found for _, found in members(journal, {spec.group_id})] == [header]

    on_journal(scenario)


def test_records_come_back_in_the_order_of_the_log(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        first, second = make_spec("e0"), make_spec("e1")
        scores = GroupScores(first.group_id, "scorer", 1.0, (MemberScore("e0", "agent", 0, 0.5),), "", 0.25)
        weights = WeightsRef(version=PolicyVersion("policy", 0, 1), path="/w", kind="adapter", sha256="ab")
        counts = {"policy": PolicyCounts(1, {"x": 1.0}), "other": PolicyCounts(2, {})}
        end = EpisodeEnd(spec=first, header=make_episode_header(first), metrics={"x": 1.0}, counts=counts)
        records: list[ControlRecord] = [
            *(Admission(spec=first), Admission(spec=second)),
            *(Proposal(0, "e1", 0, "r#1", "Propose", "key", ""), end, scores),
            Admission(spec=replace(second, attempt=1)),
            *(UnitDropped("e0", 0, "policy", "frozen"), VersionPublication(weights, PolicyVersion("policy", 0, 0))),
        ]
        superseded = EpisodeEnd(spec=second, header=dropped_header(second, "engine_lost"))
        journal.record(*records, superseded)
        await journal.flush()
        assert list(journal.history()) == records
        assert journal.next_seq() == len(records) + 1

    on_journal(scenario)


def test_a_header_comes_back_with_whom_it_was_measured_against(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        spec = make_spec("e0")
        journal.admit(spec)
        log = journal.turn_log("w0")
        log.append(entry(spec, 0))
        against = (PolicyVersion("judge", 0, 7), PolicyVersion("solver", 1, 3))
        header = replace(make_episode_header(spec, location=EpisodeDataLocation(log.name, 1)), measured_against=against)
        await journal.commit(EpisodeEnd(spec, header, b"d" * 16, {}))
        other = await finish(journal, make_spec("e1"))
        await journal.flush()
        found = {header.episode_id: header.measured_against for _, header in members(journal)}
        assert found == {"e0": against, "e1": other.measured_against}
        assert other.measured_against == ()

    on_journal(scenario)


def test_what_a_group_is_compared_with_comes_back_as_it_was_frozen(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        frozen = FrozenGroupBaselines("g0", ("e3", "e1"), (RoleMeanAtAdmission("solver", "agent", 0.1 + 0.2),))
        again = FrozenGroupBaselines("g0", ("e1", "e2"))
        for baselines in (frozen, FrozenGroupBaselines("g4", ()), again):
            journal.record(baselines)
        await journal.flush()
        assert journal.baselines() == {"g0": frozen, "g4": FrozenGroupBaselines("g4", ())}

    on_journal(scenario)


def test_scores_of_a_group_come_back_as_they_were_recorded(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        members = (MemberScore("e0", "agent", 0, 0.1 + 0.2), MemberScore("e1", "agent", 0, None))
        one = GroupScores("g0", "ruler", 0.5, members, "first", 1.5)
        other = GroupScores("g0", "noted", None, members)
        journal.record(one, other)
        await journal.flush()
        assert list(journal.history()) == [one, other]

    on_journal(scenario)


def test_after_a_rollback_only_the_surviving_lineage_has_consumed(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        versions = [PolicyVersion("policy", 0, step) for step in range(3)]
        journal.record(VersionPublication(weights(versions[0]), None))
        headers = [await finish(journal, make_spec(f"e{number}")) for number in range(3)]
        consume(journal, headers[0], versions[1], versions[0])
        consume(journal, headers[1], versions[2], versions[1])
        resumed, again = PolicyVersion("policy", 1, 1), PolicyVersion("policy", 1, 2)
        journal.record(VersionPublication(weights(resumed), versions[1]))
        consume(journal, headers[2], again, resumed)
        await journal.flush()

        def ready_at(version: PolicyVersion) -> list[str]:
            return [header.episode_id for _, header in ready_units(journal, {"policy": version})]

        assert ready_at(versions[2]) == ["e2"]
        assert ready_at(versions[1]) == ["e1", "e2"]
        assert ready_at(again) == ["e1"]
        assert journal.highest_lineage() == 1

    on_journal(scenario)


def test_steps_of_undone_lineages_do_not_count_as_taken_and_repeated_weights_are_known(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        def publish(version: PolicyVersion, parent: PolicyVersion | None, sha256: str) -> None:
            journal.record(VersionPublication(replace(weights(version), sha256=sha256), parent))

        version = functools.partial(PolicyVersion, "policy")
        for step in range(5):
            publish(version(0, step), version(0, step - 1) if step else None, f"{step:064}")
        publish(version(1, 2), version(0, 2), "2" * 64)  # the checkpoint of step 2, written anew
        await journal.flush()
        assert journal.newest_steps() == {"policy": 2}
        publish(version(1, 3), version(1, 2), f"{3:064}")
        publish(version(1, 4), version(1, 3), "5" * 64)
        await journal.flush()
        lines, now = journal.lines(), version(1, 4)
        assert journal.newest_steps() == {"policy": 4}
        assert lines.weights(version(1, 2)) == version(0, 2)
        assert [lines.survives(version(0, step), now) for step in range(5)] == [True, True, True, True, False]
        assert (lines.age(version(0, 3), now), lines.age(version(0, 4), now)) == (1, 1)

    on_journal(scenario)


def test_an_empty_journal_says_so(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        assert journal.next_number("e") == 0
        assert journal.highest_lineage() == -1
        assert list(journal.unfinished()) == []
        assert journal.info()["name"] == "contract"

    on_journal(scenario)


def partial(spec: EpisodeSpec, call_id: str, start: int) -> JournalEntry:
    body = encode_partial_turn(PartialTurnTokens(start, make_completion([0, 0]).encode()))
    return JournalEntry(spec.episode_id, spec.attempt, call_id, b"asked", body)


def test_partials_are_kept_beside_the_entries_until_they_are_removed(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        log, first, second = journal.turn_log("w0"), make_spec("e0"), make_spec("e0", attempt=1)
        for item in (partial(first, "r#0", 0), partial(first, "r#1", 0), partial(first, "r#0", 2)):
            log.append_partial(item)
        log.append_partial(partial(second, "r#0", 0))
        await log.flush()

        found = log.read_partials("e0", 0)
        assert [(entry.call_id, decode_partial_turn(entry.body).start) for entry in found] == [
            ("r#0", 0),
            ("r#1", 0),
            ("r#0", 2),
        ]
        assert found[0] == partial(first, "r#0", 0)
        assert log.read("e0", 0) == []

        log.append_partial(partial(first, "r#2", 0))
        log.remove_partials("e0", 0, "r#0")
        log.remove_partials("e0", 0, "r#2")
        await log.flush()
        assert [entry.call_id for entry in log.read_partials("e0", 0)] == ["r#1"]
        log.remove_partials("e0", 0)
        await log.flush()
        assert log.read_partials("e0", 0) == []
        assert [entry.call_id for entry in log.read_partials("e0", 1)] == ["r#0"]

    on_journal(scenario)


def test_a_commit_does_not_count_partials(on_journal: OnJournal) -> None:
    async def scenario(journal: AnyJournal) -> None:
        spec = make_spec("e0")
        journal.turn_log("w0").append_partial(partial(spec, "r#7", 0))
        header = await finish(journal, spec)
        assert header.location is not None
        assert header.location.entries == len(journal.turn_log("w0").read("e0", 0)) == 1

    on_journal(scenario)


def test_whole_attempts_are_read_in_the_given_order_beside_the_event_loop(
    on_journal: OnJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    read = TurnLogReader.read

    def reading(reader: TurnLogReader, partition: str, episode_id: str, attempt: int) -> list[JournalEntry]:
        threads.append(threading.get_ident())
        return read(reader, partition, episode_id, attempt)

    monkeypatch.setattr(TurnLogReader, "read", reading)

    async def scenario(journal: AnyJournal) -> None:
        first, second = make_spec("e0"), make_spec("e1")
        log = journal.turn_log("w0")
        for number in range(2):
            log.append(entry(first, number))
            log.append(entry(second, 10 + number))
        await log.flush()
        found = await journal.read_attempts([(second, 0), (first, 0), (first, 1)])
        assert [[each.call_id for each in own] for own in found] == [["r#10", "r#11"], ["r#0", "r#1"], []]
        assert threading.get_ident() not in threads
        assert len(threads) == (0 if isinstance(journal, MemoryJournal) else 2)

    on_journal(scenario)
