"""Limits on what scorers spend: the run ends by the scorer's name, with a checkpoint, and continues when raised."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from agentrl.app.scoring import expected_scores
from agentrl.core.errors import CheckFailedError
from agentrl.core.records import GroupScores, Task
from agentrl.journal.entries import ScoreEntry
from agentrl.testing.plugin import SeededSimulation
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_judges import CRITIC, judging
from tests.sim.test_judges import config as judge_config
from tests.sim.test_resume import second_life, trained_in
from tests.sim.test_scores import entries, finished, headers, scorer

pytestmark = pytest.mark.sim


def limited(limit: int, **settings: Any) -> dict[str, Any]:
    return {"scorers": {"length": scorer("length", limit={"requests": limit}, **settings)}, "steps": 6}


@pytest.mark.parametrize("per", ["episode", "turn"])
def test_a_spent_limit_ends_the_run_and_a_raised_one_continues_it(simulated_loop: SeededSimulation, per: str) -> None:
    async def main() -> None:
        first = SmallRun(config=config_for(**limited(20, per=per)))
        with pytest.raises(
            CheckFailedError, match=r"the scorer 'length' has used \d+ requests of scorers.length.limit"
        ):
            await first.run()
        asked = sum(1 for name in headers(first) for call in entries(first, name) if "?" in call)
        assert 20 <= first.journal.metric_total("scores/requests/length") == asked
        journal = first.journal.after_crash()
        again = second_life(first, journal, len(first.trainer.batches))
        with pytest.raises(CheckFailedError, match="raise the limit"):
            await again.run()
        second = second_life(first, journal, len(first.trainer.batches))
        second.config = config_for(**limited(10_000, per=per))
        await second.run()
        trained = trained_in(first) + trained_in(second)
        assert sum(trained.values()) == 48
        assert max(trained.values()) == 1

    simulated_loop.run(main)


def test_scores_before_a_kill_count_in_the_resumed_episode(simulated_loop: SeededSimulation) -> None:
    config = {"scorers": {"slow": scorer("slow", options={"seconds": 1.0})}, "steps": 4}

    async def main() -> int:
        first = SmallRun(config=config_for(**config))
        journal = await first.cut_after(3.0)
        known = [entry.episode_id for entry in journal.turn_log("0").entries if "?" in entry.call_id]
        second = second_life(first, journal, len(first.trainer.batches))
        await second.run()
        ended = headers(second)
        committed = [name for name in ended if ended[name].committed]
        recorded = sum("?" in call for name in committed for call in entries(second, name))
        assert second.journal.metric_total("scores/requests/slow") == recorded
        resumed = {spec.episode_id for spec in second.past.unfinished}
        return sum(name in resumed and name in committed for name in known)

    assert max(simulated_loop.run(main)) > 0, "no episode was cut between its scores"


def test_votes_and_retries_count_as_requests_and_cached_scores_do_not() -> None:
    run = finished({**judge_config(votes=3, attempts=8, cache=4096), "steps": 6}, script=judging)
    made = sum(metrics.get("scores/requests/helpful", 0.0) for _, _, metrics in run.seen.steps)
    assert made
    total = run.journal.metric_total("scores/requests/helpful")
    scores = [body for name in headers(run) for body in entries(run, name).values() if isinstance(body, ScoreEntry)]
    paid = Counter(score.cached for score in scores)
    assert paid[True] > 0
    assert total >= 3 * paid[False]
    assert total % 3 == 0
    assert total > 3 * paid[False], "no reply was nonsense, so no retry was counted"
    assert run.journal.metric_total("scores/tokens/helpful") == sum(score.tokens for score in scores)


def test_scores_of_groups_count_too() -> None:
    ranked = {"ranked": scorer("ranked", per="group", limit={"requests": 3})}
    run = SmallRun(config=config_for(scorers=ranked, steps=6))

    async def main() -> None:
        with pytest.raises(CheckFailedError, match="'ranked' has used 3 requests"):
            await run.run()

    simulate(main, seed=0)
    assert sum(record.requests for record in run.journal.of_kind(GroupScores)) >= 3


def test_requests_of_a_failed_scorer_of_groups_count() -> None:
    lost = {"lost": scorer("lost_group", per="group", attempts=3, limit={"requests": 6})}
    run = SmallRun(config=config_for(scorers=lost, steps=6), tasks=[Task(id="t", data={"digit": "0"})])

    async def main() -> None:
        with pytest.raises(CheckFailedError, match="'lost' has used 6 requests"):
            await run.run()

    simulate(main, seed=0)
    assert not run.journal.of_kind(GroupScores)


def test_a_dry_run_tells_the_expected_number() -> None:
    sections = {
        "short": scorer("short"),
        "length": scorer("length", per="episode", limit={"requests": 100}),
        "ranked": scorer("ranked", per="group"),
        "asked": scorer("length", per="request"),
        **judge_config(votes=3, per="episode")["scorers"],
    }
    assert expected_scores(config_for(scorers=sections, steps=5, policies=CRITIC)) == [
        "scorers.short: about 320 scores of 40 conversations, 320 requests",
        "scorers.length: about 40 scores of 40 conversations, 40 requests of 100 allowed",
        "scorers.ranked: about 10 scores of 40 conversations, 10 requests",
        "scorers.helpful: about 40 scores of 40 conversations, 120 requests",
    ]
