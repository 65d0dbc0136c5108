"""Who is served first: whole runs, with the priorities their engines were given."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from agentrl.core.ids import root_episode_number
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import PolicyVersion
from agentrl.journal.port import StepRow
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import TASKS, Ask, SmallRun, config_for, guess

pytestmark = pytest.mark.sim


@dataclass
class Asked:
    """Notes the calls of a run, in the order in which they began."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    """Request id and priority."""

    def __call__(self, request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        self.calls.append((request.request_id, request.priority))
        return guess(request, policy, version)

    def of_episodes(self, purpose: str) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for request_id, priority in self.calls:
            episode_id = request_id.rsplit(".", 2)[0]
            if episode_id.startswith(purpose):
                found.setdefault(episode_id, []).append(priority)
        return found


def ordered_run(asked: Asked, **changes: object) -> SmallRun:
    settings = {"steps": 6, "step_size": 12, "evaluation": {"every": 2, "tasks": 2}, **changes}
    return SmallRun(config=config_for(**settings), environment=Ask, script=asked, held_out=TASKS[:2])


def test_earlier_ones_go_first_then_parents_then_who_has_worked_most(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        asked = Asked()
        run = ordered_run(asked)
        await run.run()
        trained = asked.of_episodes("e")
        assert all(later < earlier for calls in trained.values() for earlier, later in itertools.pairwise(calls))
        waves: dict[int, list[int]] = {}
        for episode_id, priorities in trained.items():
            waves.setdefault(root_episode_number(episode_id) // 4, []).extend(
                priorities
            )  # 12 units: 4 parents, 8 children
        assert len(waves) > 4
        assert all(max(waves[wave]) < min(waves[wave + 1]) for wave in range(len(waves) - 1))
        for episode_id, priorities in trained.items():
            if "~" in episode_id:
                assert max(trained[episode_id.partition("~")[0]]) < min(priorities)

    simulated_loop.run(main)


def test_an_evaluation_waits_for_what_trains_and_not_for_ever(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        asked = Asked()
        await ordered_run(asked).run()
        is_training = [request_id.startswith("e") for request_id, _ in asked.calls]
        first, last = is_training.index(True), len(is_training) - is_training[::-1].index(True)
        evaluations = [at for at in range(first, last) if not is_training[at]]
        assert evaluations, "nothing was evaluated beside training"
        for at in evaluations:
            priority = asked.calls[at][1]
            assert all(other < priority for name, other in asked.calls[:at] if name.startswith("e"))
        assert max(priority for _, priority in asked.calls[evaluations[0] :]) > asked.calls[evaluations[0]][1]

    simulated_loop.run(main)


def test_who_goes_on_after_a_crash_is_as_old_as_before(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        before, after = Asked(), Asked()
        first = ordered_run(before)
        journal = await first.cut_after(4.0)
        version = PolicyVersion("guesser", 0, max(len(journal.of_kind(StepRow)) - 1, 0))
        second = ordered_run(after)
        second.journal, second.resumed_at = journal, {"guesser": version}
        await second.run()
        again = dict(before.calls).keys() & dict(after.calls).keys()
        trained = [name for name in again if name.startswith("e")]
        assert all(dict(before.calls)[name] == dict(after.calls)[name] for name in trained)
        return len(trained)

    assert sum(simulated_loop.run(main)) > 0, "no call was cut"
