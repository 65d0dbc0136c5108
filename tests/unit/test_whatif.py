"""`agentrl run whatif`: the effect of changed code on recorded episodes, sampling only what follows the difference."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import pytest

from agentrl.app.whatif import newest_evaluation, whatif
from agentrl.core.errors import InputError
from agentrl.core.records import PolicyVersion
from agentrl.inspection.comparisons import compare_episodes
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from agentrl.journal.port import VersionPublication
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import weights
from tests.support import changed_shop as shop
from tests.support.compared_runs import play, write_compared_run

if TYPE_CHECKING:
    from agentrl.inspection.comparisons import WhatIfEpisode, WhatIfResult

TASKS = 120


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shop.record(tmp_path_factory.mktemp("whatif"), tasks=TASKS)


def outcomes(result: WhatIfResult) -> Counter[str]:
    return Counter(episode.outcome for episode in result.episodes)


def turns(run: Path, episode: str) -> list[TurnEntry]:
    with contextlib.closing(RunReader(run)) as reader:
        return [body for _, body in reader.episode(episode).entries if isinstance(body, TurnEntry)]


def asked(run: Path, episodes: list[WhatIfEpisode]) -> set[str]:
    """The episodes that called the tool."""
    return {episode.episode for episode in episodes if len(turns(run, episode.episode)) > 1}


@pytest.mark.damages_journal  # it has held-out episodes, and nothing else
def test_an_evaluation_that_a_resume_continued_is_judged_whole(tmp_path: Path) -> None:
    """A resumed run plays the rest under another id of the same weights, or all tasks again if the reward changed."""
    path = write_compared_run(tmp_path / "run", {f"t{number}": 0.5 for number in range(10)}, curve=[0.1])

    async def resume(lineage: int, parent: PolicyVersion, numbers: range) -> None:
        journal = SqliteJournal(path / "journal")
        resumed = PolicyVersion("solver", lineage, parent.step)
        journal.record(VersionPublication(weights(*resumed), parent))
        for number in numbers:
            episode = 100 * lineage + number
            await play(journal, episode, f"t{number}", 0.5, resumed, seed=number)
        await journal.close()

    def newest() -> set[str]:
        with contextlib.closing(RunReader(path)) as reader:
            return {episode for episode, _ in newest_evaluation(reader)}

    whole = {f"e{number}" for number in range(10)}
    assert newest() == whole
    asyncio.run(resume(1, PolicyVersion("solver", 0, 1), range(10, 14)))
    assert newest() == whole | {f"e{number}" for number in range(110, 114)}
    asyncio.run(resume(2, PolicyVersion("solver", 1, 1), range(8, 14)))
    assert newest() == {f"e{number}" for number in range(8)} | {f"e{number}" for number in range(208, 214)}
    asyncio.run(resume(3, PolicyVersion("solver", 0, 0), range(3)))
    assert newest() == {"e300", "e301", "e302"}, "other weights"


def test_unchanged_code_samples_nothing_and_changes_nothing(run: Path) -> None:
    result = shop.judged(run, shop.Shop)
    assert outcomes(result) == {"identical": TASKS}
    assert all(episode.before == episode.after for episode in result.episodes)
    assert (result.sampled, result.saved) == (0, 1.0)
    assert [effect.difference for effect in result.effects] == [0.0]


def test_a_changed_reward_samples_nothing(run: Path) -> None:
    result = shop.judged(run, shop.Dear)
    assert outcomes(result).keys() == {"identical", "rescored"}
    assert result.sampled == 0
    (effect,) = result.effects
    assert effect.after == pytest.approx(3 * effect.before)
    assert effect.verdict == "better"


def test_a_changed_tool_is_sampled_only_where_it_was_called(run: Path) -> None:
    result = shop.judged(run, shop.Hinting)
    sampled = [episode for episode in result.episodes if episode.outcome == "resampled"]
    assert {episode.episode for episode in sampled} == asked(run, result.episodes)
    assert outcomes(result) == {"identical": TASKS - len(sampled), "resampled": len(sampled)}
    for episode in sampled:
        assert episode.fork is not None
        first, second = turns(run / "forks", episode.fork.removeprefix("forks/"))
        recorded = turns(run, episode.episode)
        assert first == recorded[0], "up to the difference, the fork is the recorded episode"
        assert shop.HINT in str(second.messages)
        with contextlib.closing(RunReader(run)) as reader:
            departure = compare_episodes(reader, episode.fork, None).departure
        assert departure is not None
        assert departure.call == episode.call
        tokens = [len(turn.sampled(plain=True)) for turn in (first, second)]
        assert (episode.sampled, episode.tokens) == (tokens[1], sum(tokens))
    assert result.sampled == sum(episode.sampled for episode in sampled)
    assert result.saved > 0.8


def test_a_changed_prompt_is_a_new_evaluation(run: Path) -> None:
    result = shop.judged(run, shop.Polite)
    assert outcomes(result) == {"resampled": TASKS}
    assert result.saved == 0.0


def test_episodes_that_fail_or_cannot_be_judged_are_named_and_not_counted(run: Path) -> None:
    result = shop.judged(run, shop.Failing)
    failed = [episode for episode in result.episodes if episode.outcome == "failed"]
    assert {episode.episode for episode in failed} == asked(run, result.episodes)
    assert all("no reward after a hint" in episode.text for episode in failed)
    assert [effect.episodes for effect in result.effects] == [TASKS - len(failed)]
    unknown: list[tuple[str, int | None]] = [("e0", None), ("nowhere", None)]
    with pytest.raises(InputError, match="nowhere"):
        whatif(run, unknown, environment=shop.Hinting, factories=shop.factories())


def test_the_code_may_go_on_where_the_record_ends(tmp_path: Path) -> None:
    run = shop.record(tmp_path, tasks=40, environment=shop.OneQuestion)
    assert outcomes(shop.judged(run, shop.OneQuestion)) == {"identical": 40}
    longer = [episode for episode in shop.judged(run, shop.TwoQuestions).episodes if episode.outcome != "identical"]
    assert longer
    for episode in longer:
        assert episode.outcome == "resampled"
        assert episode.before == {}
        assert episode.fork is not None
        first, second = turns(run / "forks", episode.fork.removeprefix("forks/"))
        assert [first] == turns(run, episode.episode)
        assert episode.sampled == len(second.sampled(plain=True))


def test_agents_that_act_before_the_difference_keep_their_rewards(tmp_path: Path) -> None:
    run = shop.record(tmp_path, tasks=40, environment=shop.Duel)
    result = shop.judged(run, shop.PoliteDuel)
    assert outcomes(result) == {"resampled": 40}
    assert all(episode.before["first"] == episode.after["first"] for episode in result.episodes)
    assert [effect.seat for effect in result.effects] == ["first", "second"]
    shorter = shop.judged(run, shop.Reserved)
    assert outcomes(shorter) == {"resampled": 40}
    assert shorter.sampled == 0
    assert all(episode.after == {"first": episode.before["first"]} for episode in shorter.episodes)


def test_episodes_without_turns_and_recorded_effects_are_said(tmp_path: Path) -> None:
    run = shop.record(tmp_path, tasks=40, environment=shop.Idle)
    result = shop.judged(run, shop.OtherPrice)
    assert len(result.episodes) == 40, "those without turns belong to the evaluation"
    assert outcomes(result) == {"identical": 40}
    assert all(episode.has_effects for episode in result.episodes)
    twice = [("v1", None), ("v1", 0), ("v1", None)]
    assert len(whatif(run, twice, environment=shop.Idle, factories=shop.factories()).episodes) <= 2


def test_weights_that_are_gone_are_named(tmp_path: Path) -> None:
    run = shop.record(tmp_path, tasks=40)
    for version in (run / "versions").glob("*/*"):
        for file in version.iterdir():
            file.unlink()
        version.rmdir()
    with pytest.raises(InputError, match="are not on disk"):
        shop.judged(run, shop.Polite)
    assert outcomes(shop.judged(run, shop.Dear)).keys() <= {"identical", "rescored"}, "no weights are needed"


def test_a_run_without_an_evaluation_says_so(tmp_path: Path) -> None:
    run = shop.record(tmp_path, tasks=0)
    with pytest.raises(InputError, match="--where"):
        shop.judged(run, shop.Shop)


def test_the_mean_is_that_of_a_new_evaluation(tmp_path: Path) -> None:
    """Over several seeds, against episodes of the changed environment and against the closed form; a record that is
    continued past the first difference is found."""
    effects, before, new = list[float](), list[float](), list[float]()
    for seed in range(3):
        result = shop.judged(shop.record(tmp_path, tasks=200, seed=seed), shop.Hinting)
        before += [episode.before["agent"] for episode in result.episodes]
        effects += [episode.after["agent"] - episode.before["agent"] for episode in result.episodes]
        new += shop.rewards(shop.record(tmp_path, tasks=200, seed=seed, environment=shop.Hinting))
    error, spread = stdev(effects) / math.sqrt(len(effects)), stdev(new) / math.sqrt(len(new))
    assert abs(fmean(effects) - shop.EFFECT) < 2.5 * error
    assert abs(0.0 - shop.EFFECT) > 2.5 * error, "without sampling there would be no effect"
    assert len(new) == len(before)
    assert abs(fmean(before) + fmean(effects) - fmean(new)) < 2.5 * math.hypot(spread, spread)
