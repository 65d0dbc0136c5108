"""The part `recorded` of `benchmarks.branches`: groups that begin at recorded turns against plain groups.

A first run of two steps records episodes. Two runs continue from its weights, one of them with `environment.start_from
= { where = "reward < 1", at = -1, share = 0.3 }`: 30 % of its groups begin at the last turn of a failed episode of the
first run. A ratio is that of the sampled tokens up to an expected reward, interpolated between steps; the figure of a
task is the median over the seeds, for each of two rewards, and the larger of both.

The tasks are those of `benchmarks.tabular`. Recorded turns are made for the task whose last turn decides. Two tasks
were not made for them: every turn counts, or one of several guesses must be right. In the negative control the first
turn decides, so that groups that begin later learn nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.app.recovery import read_resume_state
from agentrl.core.records import ForkPoint, GroupStart, PolicyVersion
from agentrl.journal.entries import TurnEntry
from agentrl.journal.port import EpisodeEnd
from agentrl.testing.virtual_time import simulate
from benchmarks.tabular import (
    AnyTurn,
    EveryTurn,
    FirstTurn,
    LastTurn,
    Rules,
    TabularRun,
    median_at_worse_reward,
    tokens_to,
)
from tests.sim.small_run import SmallRun, config_for

NAMES = (
    *("recorded_turn_ratio", "recorded_turn_other_ratio", "recorded_every_ratio", "recorded_any_ratio"),
    *("recorded_first_ratio", "recorded_shortest_ratio", "recorded_longest_ratio"),
)
REWARDS = (0.8, 0.9)
SHARE = 0.3
RECORDED_STEPS = 2
STEPS = 400


def recorded(_: Path, *, quick: bool) -> dict[str, float | None]:
    """Compare sampled tokens."""
    seeds = range(5 if quick else 15)
    last, every, guesses, first = (
        [_ratios(rules, seed) for seed in seeds] for rules in (LastTurn, EveryTurn, AnyTurn, FirstTurn)
    )
    every_ratio, any_ratio = median_at_worse_reward(every), median_at_worse_reward(guesses)
    return {
        "recorded_turn_ratio": median_at_worse_reward(last),
        "recorded_turn_other_ratio": max(every_ratio, any_ratio),
        "recorded_every_ratio": every_ratio,
        "recorded_any_ratio": any_ratio,
        "recorded_first_ratio": median_at_worse_reward(first),
        "recorded_shortest_ratio": min(min(ratios) for ratios in last),
        "recorded_longest_ratio": max(max(ratios) for ratios in last),
    }


def _ratios(rules: type[Rules], seed: int) -> tuple[float, ...]:
    """Return the ratio at each of `REWARDS`."""
    return simulate(functools.partial(_compared, rules(seed), seed), seed=seed, max_steps=100_000_000)


async def _compared(rules: Rules, seed: int) -> tuple[float, ...]:
    config = config_for(steps=RECORDED_STEPS, step_size=16, max_staleness=0, seed=seed)
    recording = TabularRun(rules=rules, config=config)
    first = await recording.play()
    starts = _last_turns_of_failures(first)
    curves = []
    for begins in ([], starts):
        settings: dict[str, Any] = {"id": "unused"}
        if begins:
            settings["start_from"] = {"run": "unused", "at": -1, "share": SHARE}
        config = config_for(steps=STEPS, step_size=16, max_staleness=0, seed=seed, environment=settings)
        journal = first.journal.after_crash()
        version = PolicyVersion("guesser", 0, RECORDED_STEPS)
        run = TabularRun(rules=rules, config=config, table=dict(recording.table), until=max(REWARDS) + 0.02)
        await run.play(
            journal=journal,
            resume_state=read_resume_state(journal, {"guesser": version}, group_size=config.credit.group_size),
            resumed_at={"guesser": version},
            recorded_turns=begins,
        )
        curves.append(run.curve)
    plain, from_recorded = ([_reached(curve, reward) for reward in REWARDS] for curve in curves)
    return tuple(ours / theirs for ours, theirs in zip(from_recorded, plain, strict=True))


def _reached(curve: Sequence[tuple[int, float]], reward: float) -> float:
    tokens = tokens_to(curve, reward)
    if tokens is None:
        raise SystemExit(f"a run did not reach a reward of {reward} in {STEPS} steps, so there is nothing to compare")
    return tokens


def _last_turns_of_failures(run: SmallRun) -> list[GroupStart]:
    """What `app.recorded_turns` finds for `where = "reward < 1", at = -1` in a journal on disk."""
    log, starts = run.journal.turn_log("0"), []
    for end in run.journal.of_kind(EpisodeEnd):
        if end.header.committed and (end.header.reward or 0.0) < 1:
            entries = log.read(end.spec.episode_id, end.spec.attempt)
            call_id = [entry.call_id for entry in entries if isinstance(entry.decode(), TurnEntry)][-1]
            point = ForkPoint(
                journal=".",
                partition=log.name,
                episode_id=end.spec.episode_id,
                attempt=end.spec.attempt,
                call_id=call_id,
            )
            starts.append(GroupStart(end.spec.task, point))
    return starts
