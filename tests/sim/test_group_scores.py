"""Scores of whole groups: all members are seen together, and the scores are on disk before anyone is credited."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import agentrl
from agentrl.app import scoring as scorers_module
from agentrl.core.errors import AgentRLError, ScorerError
from agentrl.core.records import GroupScores, Message, Score, ScoreRequest
from agentrl.core.tokens import Tokens
from agentrl.credit.group_baselines import group_mean
from agentrl.environment.context import LimitReachedError
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd, StepRow, UnitDropped
from agentrl.orchestrator import group_scores as group_scores_module
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.scoring.function import FunctionScorer
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_resume import second_life, trained_in
from tests.sim.test_scores import SixTurns, finished, headers, scorer

pytestmark = pytest.mark.sim

RANKED = {"scorers": {"ranked": scorer("ranked", per="group")}}


def group_scores(journal: MemoryJournal) -> dict[str, GroupScores]:
    found = [record for record in journal.records if isinstance(record, GroupScores)]
    assert len({record[:2] for record in found}) == len(found), "a group was scored twice"
    return {record.group_id: record for record in found}


def rewards_with_scores(run: SmallRun) -> dict[str, float]:
    """The rewards that the groups' scores should give, computed from the journal alone."""
    given = {name: [header.reward] for name, header in headers(run).items()}
    for record in group_scores(run.journal).values():
        for member in record.scores:
            if member.value is not None and record.weight is not None:
                given[member.episode_id].append(record.weight * member.value)
    return {name: sum(part for part in parts if part is not None) for name, parts in given.items()}


def test_members_are_compared_with_scores_that_saw_the_whole_group() -> None:
    weights = {"reward": 1.0, "ranked": 0.5}
    run = finished({**RANKED, "credit": {"group_size": 4, "advantage": "group_mean", "reward_weights": weights}})
    groups = group_scores(run.journal)
    assert {len(record.scores) for record in groups.values()} == {4}
    assert {record.weight for record in groups.values()} == {0.5}
    assert None in {member.value for record in groups.values() for member in record.scores}
    expected = rewards_with_scores(run)
    credits = {unit.episode_id: unit.credits[0] for batch in run.trainer.batches for unit in batch.units}
    assert {name: credit.reward for name, credit in credits.items()} == {name: expected[name] for name in credits}
    for record in groups.values():
        members = [member.episode_id for member in record.scores]
        for name, advantage in zip(members, group_mean([expected[each] for each in members], members), strict=True):
            if name in credits:
                assert credits[name].advantage == advantage.value
    silent = {m.episode_id for record in groups.values() for m in record.scores if m.value is None}
    for name, credit in credits.items():
        assert dict(credit.named_rewards).keys() == (set() if name in silent else {"reward", "ranked"})
    assert run.seen.steps[-1][2]["named_reward/ranked"] > 0


def test_scores_alone_are_a_reward() -> None:
    run = finished({"scorers": {"late": scorer("slowly_ranked", per="group")}}, environment=SixTurns)
    assert {header.reward for header in headers(run).values()} == {None}
    trained = [unit for batch in run.trainer.batches for unit in batch.units]
    assert len(trained) == 16
    assert {unit.credits[0].reward for unit in trained} == {0.0, 1.0, 2.0, 3.0}


def test_no_member_is_credited_before_its_scores_are_on_disk() -> None:
    run = finished({**RANKED, "steps": 3})
    order = [record for record in run.journal.records if isinstance(record, GroupScores | StepRow)]
    written: set[str] = set()
    for record in order:
        if isinstance(record, GroupScores):
            written.add(record.group_id)
        else:
            used = {unit.episode_id for unit in record.batch.units}
            assert {
                end.spec.group_id for end in run.journal.of_kind(EpisodeEnd) if end.spec.episode_id in used
            } <= written


def test_a_kill_costs_only_the_groups_in_flight(simulated_loop: SeededSimulation) -> None:
    config = {"scorers": {"late": scorer("slowly_ranked", per="group", options={"seconds": 1.0})}, "steps": 6}

    async def main() -> int:
        first = SmallRun(config=config_for(**config))
        journal = await first.cut_after(4.0)
        known = group_scores(journal)
        second = second_life(first, journal, len(first.trainer.batches))
        await second.run()
        after = group_scores(journal)
        assert all(after[name] == record for name, record in known.items())
        trained = trained_in(first) + trained_in(second)
        assert max(trained.values()) == 1
        assert sum(trained.values()) == 48
        credited = [unit for batch in second.trainer.batches for unit in batch.units]
        expected = rewards_with_scores(second)
        assert all(unit.credits[0].reward == expected[unit.episode_id] for unit in credited)
        return len(known.keys() & second.past.open_groups)

    assert max(simulated_loop.run(main)) > 0, "no scored group was open at the kill"


def test_a_failed_scorer_drops_the_group_and_a_resume_keeps_it_dropped() -> None:
    run = finished({"scorers": {"lost": scorer("lost_group", per="group")}})
    digits = {end.spec.group_id: end.spec.task.data["digit"] for end in run.journal.of_kind(EpisodeEnd)}
    of_group = {end.spec.episode_id: end.spec.group_id for end in run.journal.of_kind(EpisodeEnd)}
    dropped = {drop.episode_id for drop in run.journal.of_kind(UnitDropped) if drop.reason == "scorer_failed"}
    assert dropped
    assert {digits[of_group[name]] in "0123" for name in dropped} == {True}
    assert {digits[name] in "0123" for name in group_scores(run.journal)} == {False}
    assert not dropped & set(trained_in(run))
    assert run.orchestrator.buffer.ledger.dropped["scorer_failed"] == len(dropped)


def test_a_scorer_that_never_answers_ends_the_run_by_name() -> None:
    with pytest.raises(AgentRLError, match="the scorer 'lost' failed"):
        finished(
            {"scorers": {"lost": scorer("lost_group", per="group")}}, tasks=[agentrl.Task(id="t", data={"digit": "0"})]
        )


def test_a_list_of_another_length_stops_the_run() -> None:
    with pytest.raises(ScorerError, match="'short' scores groups, so it must return a list of 4 numbers"):
        finished({"scorers": {"short": scorer("too_few", per="group")}})


def test_noted_scores_are_recorded_and_not_credited() -> None:
    run = finished({"scorers": {"ranked": scorer("ranked", per="group", credit="note")}})
    assert {record.weight for record in group_scores(run.journal).values()} == {None}
    given = {unit.episode_id: unit.credits[0].reward for batch in run.trainer.batches for unit in batch.units}
    assert given == {name: headers(run)[name].reward for name in given}


def test_a_deterministic_run_waits_for_the_scores_of_its_batch() -> None:
    slow = {"late": scorer("slowly_ranked", per="group", options={"seconds": 5.0})}
    runs = [finished({"scorers": slow, "deterministic": True, "steps": 3, "max_staleness": 0}) for _ in range(2)]
    batches = [[[unit.credits for unit in batch.units] for batch in run.trainer.batches] for run in runs]
    assert batches[0] == batches[1]
    assert [len(batch) for batch in batches[0]] == [8, 8, 8]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"credit": {"group_size": 4, "release": "late"}}, "members are credited before their group is complete"),
        ({"credit": {"group_size": 4, "release": "episode"}}, "Set credit.release = 'group'"),
        ({"scorers": {"ranked": scorer("ranked", per="group", credit="difference")}}, "set per = 'turn'"),
    ],
)
def test_settings_that_contradict_group_scores_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_for(**{**RANKED, **changes})


def test_an_unexpected_error_before_the_scorers_are_asked_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, simulated_loop: SeededSimulation
) -> None:
    def unreadable(*_: object) -> dict[tuple[str, int], agentrl.Scored]:
        raise LookupError("no such turn")

    async def main() -> None:
        with pytest.raises(LookupError, match="no such turn"):
            await SmallRun(config=config_for(**RANKED)).run()

    monkeypatch.setattr(group_scores_module, "conversations", unreadable)
    simulated_loop.run(main, seeds=1)


def test_turns_of_other_policies_are_not_parsed() -> None:
    run = finished({**RANKED, "steps": 1})
    entries = run.journal.turn_log("0").read("e0", 0)
    spec = next(end.spec for end in run.journal.of_kind(EpisodeEnd) if end.spec.episode_id == "e0")

    def refused(policy: str) -> PlainChatFormat:
        raise LimitReachedError(f"the endpoint of {policy} refused the turn", stop_reason="refused")

    assert group_scores_module.conversations(entries, spec, {"other"}, refused) == {}
    found = group_scores_module.conversations(entries, spec, {"guesser"}, lambda _: PlainChatFormat())
    assert found.keys() == {("guesser", 0)}


def test_members_that_wait_when_a_metric_ends_the_run_are_no_failures(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = SmallRun(
            config=config_for(
                scorers={"stuck": scorer("often_stuck", per="group", timeout_s=10_000.0)},
                best={"metric": "reward/mean", "stop_at": -100.0, "window": 1},
                policies={"guesser": {"step_size": 8, "max_staleness": 11}},
                max_in_flight=256,
                steps=40,
            ),
            trainer_options={"step_seconds": 100.0},
        )
        await run.run()
        assert run.orchestrator.ended_early
        return len([drop for drop in run.journal.of_kind(UnitDropped) if drop.reason == "run_ended"])

    assert min(simulated_loop.run(main, seeds=1)) > 32


def test_a_scorer_that_fails_because_the_run_ends_is_no_failure(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = SmallRun(config=config_for(scorers={"stuck": scorer("stops_badly", per="group", timeout_s=10_000.0)}))
        await run.stop_after(30.0)
        await asyncio.sleep(1.0)
        assert not [drop for drop in run.journal.of_kind(UnitDropped) if drop.reason == "scorer_failed"]
        return len(list(run.orchestrator.dispatcher.group_scoring.waiting()))  # type: ignore[union-attr]

    assert min(simulated_loop.run(main, seeds=3)) > 0, "no group waited for its scores"


class Restarting(agentrl.Environment):
    """Restarts its conversation after the second of three turns."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        for number in range(3):
            turn = await agent.act(agentrl.user(f"turn {number}"))
            if number == 1:
                agent.restart(agentrl.user(f"so far: {turn.text}"))
        agent.reward(1.0)


def test_a_restarted_conversation_is_seen_as_other_scorers_see_it() -> None:
    seen: dict[str, list[tuple[str, ...]]] = {"episode": [], "group": []}

    class Seeing(FunctionScorer):
        async def score(self, request: ScoreRequest) -> Score:
            for member in request.group or (request.scored,):
                seen[self.per].append(tuple(message.content for message in member.messages))
            return await FunctionScorer.score(self, request)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(scorers_module, "FunctionScorer", Seeing)
        scorers = {"one": scorer("length", per="episode"), "all": scorer("ranked", per="group")}
        finished({"scorers": scorers, "steps": 1}, environment=Restarting)
    assert seen["group"]
    assert set(seen["group"]) <= set(seen["episode"])
    assert {len(messages) for messages in seen["group"]} == {3}
    assert {messages[1] for messages in seen["group"]} == {"turn 2"}


def test_a_rewritten_history_is_no_restart() -> None:
    format = PlainChatFormat()
    conversation = [Message(role="user", content="a question"), Message(role="assistant", content="<think> an answer")]

    class Forking:
        forks = True
        decode = format.decode

    def entry(*messages: Message) -> Any:
        ids = np.array(format.start(messages, ()), np.int32)
        return SimpleNamespace(context=lambda: Tokens.context(ids))

    answer, further = Message(role="assistant", content="an answer"), Message(role="user", content="and then?")
    restarted = group_scores_module._restarted
    assert not restarted(entry(conversation[0], answer, further), conversation, Forking())  # type: ignore[arg-type]
    assert restarted(entry(Message(role="user", content="so far: an answer")), conversation, Forking())  # type: ignore[arg-type]
    assert restarted(entry(), conversation, format)
