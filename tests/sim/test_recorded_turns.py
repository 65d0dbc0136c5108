"""Groups that begin at recorded turns: the turns before are context, whatever happens to the run."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from agentrl.core.records import EpisodeHeader, EpisodeSpec, ForkPoint, GroupStart, PolicyVersion
from agentrl.journal.entries import TurnEntry
from agentrl.journal.port import EpisodeEnd, StepRow
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_resume import second_life, trained_in

pytestmark = pytest.mark.sim


def second_turns(run: SmallRun) -> list[GroupStart]:
    """The second turn of every episode of a run that has one."""
    starts = []
    for end in run.journal.of_kind(EpisodeEnd):
        calls = [call for call, body in turns(run, end.spec) if body.turn == 1]
        if calls:
            point = ForkPoint(
                journal=".",
                partition=run.journal.turn_log("0").name,
                episode_id=end.spec.episode_id,
                attempt=end.spec.attempt,
                call_id=calls[0],
            )
            starts.append(GroupStart(end.spec.task, point))
    return starts


def turns(run: SmallRun, spec: EpisodeSpec) -> list[tuple[str, TurnEntry]]:
    entries = run.journal.turn_log("0").read(spec.episode_id, spec.attempt)
    return [(entry.call_id, body) for entry in entries if isinstance(body := entry.decode(), TurnEntry)]


def committed(run: SmallRun) -> list[tuple[EpisodeSpec, EpisodeHeader]]:
    return [(end.spec, end.header) for end in run.journal.of_kind(EpisodeEnd) if end.header.committed]


def test_groups_begin_at_recorded_turns_through_a_crash(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(1.0, 0.6)

    async def main() -> tuple[int, int]:
        first = SmallRun(config=config_for(steps=2))
        await first.run()
        starts = second_turns(first)
        assert len({start.point.episode_id for start in starts if start.point}) == len(starts) > 3
        config = config_for(
            steps=6, environment={"id": "unused", "start_from": {"run": "unused", "at": 1, "share": 0.5}}
        )
        second = second_life(first, first.journal, 2)
        second.config, second.recorded_turns = config, starts
        journal = await second.cut_after(next(moments))
        recorded = len(journal.of_kind(StepRow))
        version = PolicyVersion("guesser", 1, recorded)
        third = SmallRun(
            config=config,
            journal=journal,
            resumed_at={"guesser": version},
            recorded_turns=starts,
            lineage=2,
        )
        await third.run()

        kept = Counter(unit.episode_id for batch in second.trainer.batches[: recorded - 2] for unit in batch.units)
        trained = trained_in(first) + kept + trained_in(third)
        assert max(trained.values()) == 1
        assert sum(trained.values()) == 6 * 8
        points = [start.point for start in starts]
        groups: dict[str, set[str]] = {}
        forked = Counter[int]()
        for spec, header in committed(third):
            numbers = [body.turn for _, body in turns(third, spec)]
            begin = int(spec.fork is not None)
            forked[begin] += 1
            groups.setdefault(spec.group_id, set()).add(str(spec.fork))
            assert numbers == list(range(begin, begin + len(numbers)))
            assert (header.turns, header.trajectories[0].tokens) == (
                begin + len(numbers),
                sum(len(body.tokens) for _, body in turns(third, spec)),
            )
            assert spec.fork is None or spec.fork in points
        assert all(len(of_group) == 1 for of_group in groups.values())
        return forked[1], forked[0]

    outcomes = simulated_loop.run(main)
    assert min(map(min, outcomes)) > 8, "groups of both kinds"
