"""What holds new episodes back is a value: rows keep it, texts follow from it, and old texts are read as kinds."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from agentrl.core.holds import AdmissionWait, Hold, HoldKind, InFlightLimit, LimitKind
from agentrl.core.records import EpisodeSpec, Task
from agentrl.journal.control_rows import decode_admission_row, encode_admission_row, with_checksum

LIMITS = [
    InFlightLimit(),
    InFlightLimit("first", {"places": 4}),
    InFlightLimit("room", {"waiting": 7.0, "running": 12}),
    InFlightLimit("places", {"waiting": 7.0, "running": 12}),
    InFlightLimit("raised", {"sampled": 2.5, "places": 4}),
]
HOLDS = [
    Hold("paused"),
    Hold("draining"),
    *(Hold("max_in_flight", values={"running": 4}, limit=limit) for limit in LIMITS),
    Hold("max_in_flight", values={"running": 8, "due": 4}),
    Hold("max_in_flight_per_task", values={"running": 1}),
    Hold("max_staleness", ("solver",), {"behind": 0}),
    Hold("max_staleness", ("solver",), {"behind": 2}),
    Hold("max_staleness", ("solver",), {"step": 3, "batch": 5}),
    Hold("max_lag", ("solver",), {"outstanding": 3, "overtaken": 5}),
    Hold("last_steps", ("solver", "proposer")),
]


def spec(*waited: AdmissionWait) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id="e0", environment="E", task=Task(id="t", data={}), seed=0, seats={}, group_id="g0", waited=waited
    )


def test_every_kind_is_here() -> None:
    assert {hold.kind for hold in HOLDS} == {*get_args(HoldKind)}
    assert {limit.kind for limit in LIMITS} == {*get_args(LimitKind)}


@pytest.mark.parametrize("hold", HOLDS, ids=repr)
def test_a_row_of_the_journal_keeps_the_kind_and_its_values(hold: Hold) -> None:
    row = encode_admission_row(spec(AdmissionWait(2.5, hold)), 0.0)
    (waited,) = decode_admission_row(with_checksum("admissions", row)).waited
    assert waited == AdmissionWait(2.5, hold)
    assert waited.text.startswith("2.5 s ")
    assert all(name in waited.text for name in hold.policies)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("33 s because 4 episodes are running (max_in_flight)", "max_in_flight"),
        (
            "1.25 s because 1 episode is running, the limit since 7 of 12 waited for a place in the engine "
            "(max_in_flight)",
            "max_in_flight",
        ),
        ("0.5 s because the trainer is 1 step behind (max_staleness of solver)", "max_staleness"),
        ("1e+03 s for the next step (max_staleness of solver is 0)", "max_staleness"),
        ("2 s because solver is at step 3 (batch 5 of a deterministic run)", "max_staleness"),
        (
            "2 s because 3 episodes are not trained yet, and 5 others were since the oldest of them began (max_lag of "
            "solver)",
            "max_lag",
        ),
        ("2 s because the last steps of solver have all their episodes", "last_steps"),
        ("2 s because the run is paused", "paused"),
        ("2 s because the run drains", "draining"),
    ],
)
def test_the_texts_of_old_journals_are_read_as_kinds(text: str, kind: HoldKind) -> None:
    row = list(encode_admission_row(spec(), 0.0))
    old = msgspec.msgpack.decode(row[7])
    del old["waited"]
    row[7] = msgspec.msgpack.encode({**old, "held_by": text})
    (waited,) = decode_admission_row(with_checksum("admissions", row)).waited
    assert waited.hold == Hold(kind)
    assert waited.seconds == float(text.split()[0])
    assert waited.text


@pytest.mark.parametrize("text", ["", "for a reason of another version", "x s because the run drains"])
def test_an_old_text_that_names_no_rule_is_left_out(text: str) -> None:
    assert AdmissionWait.from_old_text(text) is None
