"""The release of groups: rewards of turns, and the tasks of children after a resume."""

from __future__ import annotations

from dataclasses import replace

from agentrl.core.records import Task
from agentrl.credit.baselines import SeatRole
from agentrl.credit.estimators import reward_estimator
from agentrl.credit.group_baselines import no_baseline
from agentrl.credit.release import (
    FirstFinishersRelease,
    GroupReleasePolicy,
    GroupReleaseRule,
    WholeGroupRelease,
)
from agentrl.orchestrator.buffer import EpisodeBuffer
from tests.support.builders import make_episode_header, make_spec


def test_turns_have_their_rewards_to_go_however_an_episode_is_released() -> None:
    whole = WholeGroupRelease(["policy"], no_baseline, to_go=True)
    first = FirstFinishersRelease(
        ["policy"],
        GroupReleaseRule(share=0.0),
        freeze=lambda baselines: None,
        compares=False,
        to_go=True,
    )
    header = make_episode_header(make_spec(), reward=3.0)
    trajectories = tuple(replace(each, turn_rewards=((0, 1.0), (1, 2.0))) for each in header.trajectories)
    header = replace(header, trajectories=trajectories)

    def credited(policy: GroupReleasePolicy) -> object:
        buffer = EpisodeBuffer(["policy"], policy)
        buffer.admit(make_spec())
        buffer.record_end(make_spec(), header)
        (ready,) = buffer.pop_ready("policy", 1)
        return ready.unit.credits

    assert credited(whole) == credited(first)
    assert "(3.0, 2.0, 0.0)" in str(credited(first))


def test_a_step_takes_whole_groups_if_its_loss_compares_them() -> None:
    for whole_groups, sizes in ((False, [2, 2, 2, 2, 1]), (True, [3, 3, 3])):
        buffer = EpisodeBuffer(["policy"], WholeGroupRelease(["policy"], no_baseline), whole_groups=whole_groups)
        for number in range(9):
            spec = make_spec(f"e{number}", group_id=f"g{number // 3}", group_size=3)
            buffer.admit(spec)
            buffer.record_end(spec, make_episode_header(spec, reward=1.0))
        assert [len(buffer.pop_ready("policy", 2)) for _ in sizes] == sizes


def test_dpo_reads_the_order_of_the_rewards() -> None:
    """Of two agents in a seat of each episode: no baseline then has rewards of the own episode."""
    rewards, episodes = [0.9, -1.0, 0.8, 1.0], ["e0", "e0", "e1", "e1"]

    def order(loss: str) -> list[int]:
        values = [entry.value for entry in reward_estimator("leave_one_out", loss=loss)(rewards, episodes)]
        return sorted(range(4), key=values.__getitem__)

    assert order("dpo") == sorted(range(4), key=rewards.__getitem__)
    assert order("truncated") != order("dpo")


CHILD = make_spec("e0~r#1.0", group_id="e0~r#1", parent_id="e0", task=Task(id="child", data={}))
ROOT = make_spec("e0", task=Task(id="root", data={}))
ROLE = SeatRole("policy", ROOT.environment, "agent")
