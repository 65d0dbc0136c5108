"""The part `pivot` of `benchmarks.branches`: pivot resampling against plain groups.

Two runs start from the same table with groups of 4 and the same step size. In one of them, each failed episode calls
`ctx.resample(3, at=-1, weight=3)`: three further episodes sample its last turn again. A ratio is that of the sampled
tokens up to an expected reward, interpolated between steps; the recalled turns are not sampled, so they do not count.
The figure of a task is the median over the seeds, for each of two rewards, and the larger of both.

The tasks are those of `benchmarks.tabular`. Resampling the last turn is made for the task whose last turn decides. Two
tasks were not made for it: every turn counts, or one of several guesses must be right; there the turn is drawn with
DEEP-GRPO's weights. In the negative control the first turn decides, so resampling the last one cannot help.

Each resampled episode weighs as much as a plain one (`weight = 3`). With the default of 1 for all three, they cost more
tokens than they add to the gradient: .845, 1.30 and 1.31 on the three tasks, seeds 0 to 4.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import ClassVar

import agentrl
from agentrl.testing.virtual_time import simulate
from benchmarks.tabular import (
    AnyTurn,
    EveryTurn,
    FirstTurn,
    LastTurn,
    Rules,
    Spell,
    TabularRun,
    median_at_worse_reward,
    tokens_to,
)
from tests.sim.small_run import config_for

NAMES = (
    *("pivot_token_ratio", "pivot_token_other_ratio", "pivot_every_ratio", "pivot_any_ratio", "pivot_first_ratio"),
    *("pivot_shortest_ratio", "pivot_longest_ratio"),
)
REWARDS = (0.8, 0.9)
STEPS = 400
EPISODES = 3


class Pivot(Spell):
    """Samples the last turn of each failed episode again."""

    branches = EPISODES
    weighted: ClassVar[bool] = False
    """Whether the turn is drawn with DEEP-GRPO's weights."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent, kind = ctx.agent("guesser"), ctx.task.data["kind"]
        await super().run(ctx)
        said = "".join(turn.text[:1] for turn in agent.turns)
        if self.rules.reward(kind, said) < 0.5:
            turns = range(len(said))
            drawn = ctx.rng.choices(turns, [(turn + 1) ** 0.1 for turn in turns])[0]
            await ctx.resample(EPISODES, at=drawn if self.weighted else -1, weight=float(EPISODES))


class WeightedPivot(Pivot):
    """Draws the turn."""

    weighted = True


def pivot(_: Path, *, quick: bool) -> dict[str, float | None]:
    """Compare sampled tokens."""
    seeds = range(5 if quick else 15)
    last, first = ([_ratios(rules, Pivot, seed) for seed in seeds] for rules in (LastTurn, FirstTurn))
    every, guesses = ([_ratios(rules, WeightedPivot, seed) for seed in seeds] for rules in (EveryTurn, AnyTurn))
    every_ratio, any_ratio = median_at_worse_reward(every), median_at_worse_reward(guesses)
    return {
        "pivot_token_ratio": median_at_worse_reward(last),
        "pivot_token_other_ratio": max(every_ratio, any_ratio),
        "pivot_every_ratio": every_ratio,
        "pivot_any_ratio": any_ratio,
        "pivot_first_ratio": median_at_worse_reward(first),
        "pivot_shortest_ratio": min(min(ratios) for ratios in last),
        "pivot_longest_ratio": max(max(ratios) for ratios in last),
    }


def _ratios(rules: type[Rules], environment: type[Pivot], seed: int) -> tuple[float, ...]:
    """Return the ratio at each of `REWARDS`."""
    plain, resampled = (
        simulate(functools.partial(_tokens, rules(seed), of, seed), seed=seed, max_steps=100_000_000)
        for of in (Spell, environment)
    )
    return tuple(ours / theirs for ours, theirs in zip(resampled, plain, strict=True))


async def _tokens(rules: Rules, environment: type[Spell], seed: int) -> list[float]:
    """Return the tokens that a run samples up to each of `REWARDS`."""
    config = config_for(
        steps=STEPS, policies={"guesser": {"step_size": 16, "max_staleness": 0, "lora": {"rank": 1}}}, seed=seed
    )
    run = TabularRun(rules=rules, config=config, until=max(REWARDS) + 0.02)
    await run.play(environment)
    found = [tokens_to(run.curve, reward) for reward in REWARDS]
    tokens = [reached for reached in found if reached is not None]
    if len(tokens) < len(found):
        raise SystemExit(f"{environment.__name__} did not reach a reward of {max(REWARDS)} in {STEPS} steps")
    return tokens
