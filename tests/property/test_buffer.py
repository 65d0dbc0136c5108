"""The buffer under any order of admissions, ends, steps and drops: everything leaves once and the ledger balances."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition
from hypothesis.stateful import rule as act

from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    FrozenGroupBaselines,
    SeatBinding,
    Task,
    TrajectoryHeader,
)
from agentrl.credit.group_baselines import leave_one_out
from agentrl.credit.release import FirstFinishersRelease, GroupReleasePolicy, GroupReleaseRule, WholeGroupRelease
from agentrl.orchestrator.buffer import EpisodeBuffer, ReadyUnit

SEATS = {
    "proposer": SeatBinding("a"),
    "critic": SeatBinding("a"),
    "solver": SeatBinding("b"),
    "judge": SeatBinding("frozen"),
}
AGENTS = {"proposer": 1, "critic": 1, "solver": 3, "judge": 1}
"""Agents of a seat."""
ENDINGS = st.sampled_from(["committed", "committed", "committed", "dropped", "unrewarded", "frozen_only"])


def header_for(spec: EpisodeSpec, ending: str, reward: float) -> EpisodeHeader:
    """How an episode ended."""
    seats = {"dropped": (), "frozen_only": ("judge",)}.get(ending, tuple(SEATS))
    given = None if ending == "unrewarded" else reward
    return EpisodeHeader(
        episode_id=spec.episode_id,
        group_id=spec.group_id,
        attempt=0,
        purpose="train",
        parent_id=None,
        stop_reason=None if ending == "dropped" else "completed",
        drop_reason="environment_error" if ending == "dropped" else None,
        turns=1,
        tokens=3,
        seconds=0.0,
        trajectories=tuple(
            TrajectoryHeader(seat, index, SEATS[seat].policy, given, 3, 0, 0)
            for seat in seats
            for index in range(AGENTS[seat])
        ),
        location=EpisodeDataLocation("turns-0.db", 2),
    )


class BufferMachine(RuleBasedStateMachine):
    """Admits groups, ends their members in any order, takes and resolves units."""

    rule: ClassVar[GroupReleaseRule] = GroupReleaseRule(1.0)

    def __init__(self) -> None:
        super().__init__()
        self.frozen: dict[str, FrozenGroupBaselines] = {}
        self.buffer = EpisodeBuffer("ab", self.release())
        self.ended: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}
        self.running: list[EpisodeSpec] = []
        self.groups = 0
        self.taken: list[ReadyUnit] = []
        self.left: set[tuple[str, str]] = set()
        self.open_groups: dict[str, int] = {}
        self.committed_units: dict[str, int] = {}

    def release(self) -> GroupReleasePolicy:
        return WholeGroupRelease("ab", leave_one_out)

    @act(size=st.integers(1, 4))
    def admit(self, size: int) -> None:
        for member in range(size):
            spec = EpisodeSpec(
                episode_id=f"e{self.groups}.{member}",
                environment="x",
                task=Task(id="t", data={}),
                seed=0,
                seats=SEATS,
                group_id=f"g{self.groups}",
                group_size=size,
            )
            self.buffer.admit(spec)
            self.running.append(spec)
        self.open_groups[f"g{self.groups}"] = self.sizes[f"g{self.groups}"] = size
        self.groups += 1

    @precondition(lambda self: self.running)
    @act(data=st.data(), ending=ENDINGS, reward=st.floats(-2, 2))
    def end(self, data: st.DataObject, ending: str, reward: float) -> None:
        spec = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        ready = {policy: self.buffer.ready(policy) for policy in "ab"}
        drops = self.buffer.record_end(spec, header_for(spec, ending, reward))
        assert {drop.reason for drop in drops} == ({"no_reward"} if ending == "unrewarded" else set())
        self.open_groups[spec.group_id] -= 1
        self.ended[spec.group_id] += ending != "dropped"
        if self.open_groups[spec.group_id] and self.ended[spec.group_id] < self.rule.waited_for(spec.group_size):
            assert ready == {policy: self.buffer.ready(policy) for policy in "ab"}, "released before its time"
        elif ending == "committed":
            assert all(self.buffer.ready(policy) > ready[policy] for policy in "ab"), "held back"

    @act(policy=st.sampled_from("ab"), count=st.integers(1, 6))
    def take(self, policy: str, count: int) -> None:
        for ready in self.buffer.pop_ready(policy, count):
            key = (ready.unit.policy, ready.unit.episode_id)
            assert key not in self.left, "left twice"
            self.left.add(key)
            whole = {(seat, n) for seat in SEATS if SEATS[seat].policy == policy for n in range(AGENTS[seat])}
            assert [(credit.seat, credit.index) for credit in ready.unit.credits] == sorted(
                whole, key=lambda agent: (list(SEATS).index(agent[0]), agent[1])
            ), "a part of an episode's trajectories left without the others"
            assert {(t.seat, t.index) for t in ready.trajectories} == whole
            self.taken.append(ready)

    @precondition(lambda self: self.taken)
    @act(consume=st.booleans())
    def resolve(self, consume: bool) -> None:
        taken, self.taken = self.taken, []
        if consume:
            self.buffer.consume(taken)
        else:
            assert len(self.buffer.drop(taken, "nonfinite_gradient")) == len(taken)

    @invariant()
    def balances(self) -> None:
        ledger = self.buffer.ledger
        ledger.check()
        assert ledger.in_flight == len(self.running)
        released = {name for name, size in self.sizes.items() if self.ended[name] >= self.rule.waited_for(size)}
        assert self.buffer.late("a") == sum(spec.group_id in released for spec in self.running)
        assert all(value >= 0 for value in ledger.units_ready.values())
        assert ledger.ready >= 0

    def teardown(self) -> None:
        """Whatever happened, everything can be brought to an end."""
        for spec in self.running:
            self.buffer.record_end(spec, header_for(spec, "committed", 1.0))
        self.buffer.consume(self.taken)
        for policy in "ab":
            self.buffer.consume(self.buffer.pop_ready(policy, 10**6))
        ledger = self.buffer.ledger
        ledger.check()
        assert ledger.in_flight == ledger.ready == 0
        assert not +ledger.units_ready


class LateBufferMachine(BufferMachine):
    """The same where the first half of a group is released together and the others one by one."""

    rule = GroupReleaseRule(0.5)

    def release(self) -> GroupReleasePolicy:
        return FirstFinishersRelease("ab", self.rule, freeze=self.freeze)

    def freeze(self, baselines: FrozenGroupBaselines) -> None:
        assert baselines.group_id not in self.frozen, "frozen twice"
        self.frozen[baselines.group_id] = baselines


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLateBuffer = LateBufferMachine.TestCase
TestLateBuffer.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
