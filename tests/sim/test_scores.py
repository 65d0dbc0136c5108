"""Scores while episodes run: rewards that `run()` does not give, journaled when they arrive. Failure is no zero."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import AgentRLError, ScorerError
from agentrl.core.records import EpisodeHeader
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import NondeterministicValueEntry, ScoreEntry, TurnEntry
from agentrl.journal.port import EpisodeEnd
from agentrl.orchestrator.loop import Orchestrator
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.replay.executions import Execution, Stage, resumed_everywhere
from tests.sim.small_run import Guess, SmallRun, config_for
from tests.sim.test_resume import second_life, trained_in

pytestmark = pytest.mark.sim

FUNCTIONS = Path(__file__).parents[1] / "support" / "score_functions.py"


def scorer(name: str, **settings: Any) -> dict[str, Any]:
    return {"function": f"{FUNCTIONS}:{name}", **settings}


class SixTurns(agentrl.Environment):
    """Six turns; gives no reward itself."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for number in range(6):
            await ctx.agent("guesser").act(agentrl.user(str(number)))


class Judged(agentrl.Environment):
    """A reward from a judge behind `ctx.effect`, which is down for some tasks."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        await guesser.act(agentrl.user("Guess a digit."))

        async def judge() -> float:
            if ctx.task.data["digit"] in "0123":
                raise agentrl.InfrastructureError("the judge answers 503")
            return 1.0

        guesser.reward(await ctx.effect("judge", judge, guarantee="read"))


def headers(run: SmallRun) -> dict[str, EpisodeHeader]:
    return {end.header.episode_id: end.header for end in run.journal.of_kind(EpisodeEnd)}


def entries(run: SmallRun, episode: str) -> dict[str, Any]:
    return {entry.call_id: entry.decode() for entry in run.journal.turn_log("0").read(episode, 0)}


def fails(header: EpisodeHeader, run: SmallRun) -> bool:
    spec = next(end.spec for end in run.journal.of_kind(EpisodeEnd) if end.header is header)
    return spec.task.data["digit"] in "0123"


def finished(config: dict[str, Any], **options: Any) -> SmallRun:
    run = SmallRun(config=config_for(**{"steps": 2, **config}), **options)

    async def main() -> None:
        await run.run()

    simulate(main, seed=0)
    return run


def test_a_failing_effect_of_the_real_loop_trains_nobody_with_a_zero() -> None:
    run = finished({}, environment=Judged)
    ended = headers(run).values()
    assert Counter((fails(each, run), each.drop_reason, each.reward) for each in ended) == {
        (False, None, 1.0): 16,
        (True, "infrastructure", None): 16,
    }
    assert run.orchestrator.buffer.ledger.dropped == {"infrastructure": 16}


def test_a_rule_scores_every_turn_and_nothing_is_no_zero() -> None:
    run = finished({"scorers": {"short": scorer("short", options={"scale": 10.0})}})
    for episode, header in headers(run).items():
        recorded = entries(run, episode)
        turns = [body for body in recorded.values() if isinstance(body, TurnEntry)]
        (trajectory,) = header.trajectories
        given = {turn.turn: 1.0 - (len(turn.tokens.token_ids) / 4 - 1) / 10 for turn in turns if turn.turn % 2 == 0}
        assert dict(trajectory.turn_rewards) == given
        assert dict(trajectory.named_rewards)["short"] == math.fsum(given.values())
        said = {turn.turn: recorded[f"guesser.0.{turn.turn}?short"] for turn in turns}
        assert [turn for turn, body in said.items() if isinstance(body, ScoreEntry)] == list(given)
        assert all(body == NondeterministicValueEntry("score", None) for turn, body in said.items() if turn % 2)
    assert run.seen.steps[-1][2]["named_reward/short"] > 0


def test_a_weight_counts_and_a_conversation_is_scored_once_at_its_end() -> None:
    weights = {"length": 0.5, "reward": 1.0}
    run = finished(
        {"scorers": {"length": scorer("length", per="episode")}, "credit": {"group_size": 4, "reward_weights": weights}}
    )
    for episode, header in headers(run).items():
        own = next(body.value for body in entries(run, episode).values() if type(body).__name__ == "RewardEntry")
        assert header.reward == own + 0.5 * 2 * header.turns
        assert [name for name in entries(run, episode) if "?" in name] == ["guesser.0?length"]
        assert header.trajectories[0].turn_rewards == ()


def test_differences_add_up_to_the_last_score_whatever_the_number_of_turns() -> None:
    weights = {"reward": 1.0, "growing": 0.5}
    growing = scorer("growing", credit="difference")
    run = finished(
        {"scorers": {"growing": growing}, "credit": {"group_size": 4, "reward_weights": weights}}, environment=SixTurns
    )
    for episode, header in headers(run).items():
        recorded = entries(run, episode)
        scores = [recorded[f"guesser.0.{turn}?growing"] for turn in (0, 1, 2, 4, 5)]
        assert [body.score for body in scores] == [0.5, 1.5, 2.5, 4.5, 5.5]
        assert [body.value for body in scores] == [0.5, 1.0, 1.0, 2.0, 1.0]
        assert recorded["guesser.0.3?growing"] == NondeterministicValueEntry("score", None)
        assert header.reward == 0.5 * 5.5


def test_a_note_is_recorded_and_not_credited() -> None:
    run = finished({"scorers": {"short": scorer("short", credit="note")}, "credit": {"group_size": 4}})
    for episode, header in headers(run).items():
        noted = [body for name, body in entries(run, episode).items() if "?" in name]
        assert {type(body.value) for body in noted} <= {float, type(None)}
        assert all(isinstance(body, NondeterministicValueEntry) for body in noted)
        assert header.trajectories[0].named_rewards == ()
    alone = finished(
        {"scorers": {"short": scorer("short", credit="note"), "length": scorer("length", per="episode")}},
        environment=SixTurns,
    )
    assert {header.reward for header in headers(alone).values()} == {12.0}


def test_a_bad_judge_is_told_from_a_good_one_by_its_agreement_with_the_reward() -> None:
    signs = {"good": 1.0, "opposite": -1.0, "unrelated": 0.0}
    scorers = {name: scorer("right", per="episode", options={"sign": sign}) for name, sign in signs.items()}
    run = finished({"scorers": scorers, "policies": {"guesser": {"step_size": 64}}})
    for _, _, metrics in run.seen.steps:
        assert metrics["reward_agreement/good"] == 1.0
        assert metrics["reward_agreement/opposite"] == 0.0
        assert 0.3 < metrics["reward_agreement/unrelated"] < 0.7
        assert "reward_agreement/reward" not in metrics


def test_the_next_turn_does_not_wait_for_a_score_and_the_episode_waits_at_its_end() -> None:
    plain = finished({}, environment=Scoreless)
    slow = scorer("slow", options={"seconds": 30.0})
    scored = finished({"scorers": {"slow": slow}}, environment=SixTurns)
    ended = headers(scored)
    for episode, before in headers(plain).items():
        turns = [body for body in entries(scored, episode).values() if isinstance(body, TurnEntry)]
        last = max(turn.started + turn.seconds for turn in turns)
        first = min(turn.started for turn in turns)
        assert last - first <= before.seconds + 1e-6, "as long as without a scorer"
        assert ended[episode].seconds - (last - first) == pytest.approx(30.0), "the last score is exposed, others not"


class Scoreless(SixTurns):
    """The same, with a reward of its own."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await super().run(ctx)
        ctx.agent("guesser").reward(1.0)


@pytest.mark.parametrize("how", ["raise", "infrastructure", "hang"])
def test_a_failed_scorer_drops_the_episode_without_a_further_attempt(how: str) -> None:
    run = finished({"scorers": {"patchy": scorer("patchy", options={"how": how}, timeout_s=5.0)}})
    ended = headers(run).values()
    assert {(fails(each, run), each.drop_reason, each.attempt) for each in ended} == {
        (False, None, 0),
        (True, "scorer_failed", 0),
    }
    details = [end.detail for end in run.journal.of_kind(EpisodeEnd) if end.detail]
    expected = "no answer within 5 s" if how == "hang" else "503"
    assert details
    assert all("the scorer 'patchy' failed" in detail and expected in detail for detail in details)


def test_a_function_s_own_timeout_is_told_from_that_of_the_scorer() -> None:
    with pytest.raises(AgentRLError, match=r"failed: TimeoutError: the database took 3 s"):
        finished({"scorers": {"own": scorer("own_timeout")}})


def test_what_is_no_score_stops_the_run() -> None:
    with pytest.raises(ScorerError, match=r"'patchy': the reward is nan; it must be finite"):
        finished({"scorers": {"patchy": scorer("patchy", options={"how": "nonsense"})}})


def test_a_score_may_explain_itself() -> None:
    run = finished({"scorers": {"explained": scorer("explained")}})
    notes = [
        body.note for episode in headers(run) for body in entries(run, episode).values() if isinstance(body, ScoreEntry)
    ]
    assert notes
    assert set(notes) == {"half of it is right"}


def test_a_scorer_that_never_answers_ends_the_run_by_name() -> None:
    with pytest.raises(AgentRLError, match=r"32 episodes in a row .*scorer_failed.*the scorer 'patchy' failed"):
        finished({"scorers": {"patchy": scorer("patchy")}}, tasks=[agentrl.Task(id="t", data={"digit": "0"})])


class Decides(agentrl.Environment):
    """Asks for a score of each turn, and looks at it before it waits for it; stops on a low one."""

    seats = ("agent",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        for number in range(4):
            await agent.act(agentrl.user(str(number)))
            verdict = ctx.score("value", agent)
            agent.reward(0.0 if await verdict.peek() is None else 1.0, name="arrived")
            await ctx.sleep(1.0)
            value = await verdict
            assert value is not None
            if value < 0.1:
                break
        other = ctx.score("other", agent)
        agent.reward(1.0 if await other.peek() is None else 2.0, name="late")


def test_a_program_that_decides_by_scores_is_the_same_from_every_prefix() -> None:
    whole, *resumed = resumed_everywhere(Stage(environment=Decides))
    assert whole.header is not None
    scores = {name: body for name, body in whole.bodies.items() if isinstance(body, ScoreEntry)}
    assert {name.partition("?")[2] for name in scores} == {"value", "other"}
    for execution in resumed:
        assert execution.transcript == whole.transcript
        assert execution.header is not None
        assert execution.header.trajectories == whole.header.trajectories
    assert resumed[-1].engine_calls == 0


@pytest.mark.parametrize("credit", ["difference", "note"])
def test_a_program_that_decides_by_scores_reads_them_however_they_are_credited(credit: str) -> None:
    stages = [Stage(environment=Decides, scorer_credit=name) for name in ("reward", credit)]
    plain, other = (stage.play() for stage in stages)

    def of_the_program(execution: Execution) -> dict[str, Any]:
        return {name: entry for name, entry in execution.transcript.items() if "?" not in name}

    assert of_the_program(other) == of_the_program(plain)
    for execution in resumed_everywhere(stages[1]):
        assert execution.transcript == other.transcript
        assert execution.header is not None
        assert other.header is not None
        assert execution.header.trajectories == other.header.trajectories


def test_the_same_scores_are_credited_whatever_order_they_arrive_in() -> None:
    stage = Stage(environment=Decides)
    plays = [stage.play(seed=seed) for seed in range(8)]
    assert len({play.header.trajectories for play in plays if play.header is not None}) == 1


def test_a_killed_run_asks_again_only_for_scores_in_flight(simulated_loop: SeededSimulation) -> None:
    config = {"scorers": {"slow": scorer("slow", options={"seconds": 1.0})}, "steps": 6}

    async def main() -> int:
        first = SmallRun(config=config_for(**config))
        journal = await first.cut_after(3.0)
        known = {
            (entry.episode_id, entry.call_id): entry.body
            for entry in journal.turn_log("0").entries
            if "?" in entry.call_id
        }
        second = second_life(first, journal, len(first.trainer.batches))
        await second.run()
        written = Counter(
            (entry.episode_id, entry.call_id) for entry in journal.turn_log("0").entries if "?" in entry.call_id
        )
        assert set(written.values()) == {1}, "no score was given twice"
        after = {(each.episode_id, each.call_id): each.body for each in journal.turn_log("0").entries}
        assert all(after[key] == body for key, body in known.items()), "a score on disk stands"
        assert max((trained_in(first) + trained_in(second)).values()) == 1
        open_before = {spec.episode_id for spec in second.past.unfinished}
        return sum(episode in open_before for episode, _ in known)

    assert max(simulated_loop.run(main)) > 0, "no episode was cut between its scores"


def test_an_episode_that_waits_for_its_scores_holds_no_session(simulated_loop: SeededSimulation) -> None:
    held: list[int] = []

    def watch(orchestrator: Orchestrator) -> None:
        loop = asyncio.get_running_loop()
        engine = orchestrator.versions.engine
        assert isinstance(engine, ScriptedEngine)
        loop.call_later(40.0, lambda: held.append(engine.sessions))

    async def main() -> None:
        run = SmallRun(
            config=config_for(steps=1, scorers={"slow": scorer("slow", options={"seconds": 1000.0}, timeout_s=2000.0)}),
            environment=Guess,
            during=watch,
        )
        await run.run()

    simulated_loop.run(main)
    assert set(held) == {0}
