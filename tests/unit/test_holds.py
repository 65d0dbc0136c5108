"""What holds new episodes back is a value: rows keep it, texts follow from it, and old texts are read as kinds."""

from __future__ import annotations

from typing import get_args

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
    Hold("max_staleness", ("solver",), {"behind": 0}),
    Hold("max_staleness", ("solver",), {"behind": 2}),
    Hold("max_staleness", ("solver",), {"step": 3, "batch": 5}),
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
