"""Conversations with tools in an engine whose memory is short: with places in it, and without.

An engine of 16 slots and 125,000 tokens of keys and values; episodes of about eight turns of 200 tokens at 40 a second,
prompts of 2,000 tokens, 400 more with each tool's answer. Contexts that went while a tool ran are computed again, and
all that runs waits for it. Tokens sampled per second, none of which are wasted, with `engines/kv_budget.py` over those
without, by how long tools take and how many tokens of context are computed a second; the last has memory enough.
"""

from __future__ import annotations

from statistics import fmean

from tests.simulation.plan import SimulationPlan
from tests.simulation.run import Scenario, SimulationResult, simulate_run

CASES = {
    "places_5s": (5, 2_000, 125_000),
    "places_20s": (20, 2_000, 125_000),
    "places_5s_fast": (5, 10_000, 125_000),
    "places_20s_fast": (20, 10_000, 125_000),
    "places_ample": (5, 2_000, 1_000_000),
}
"""Figure: seconds of a tool in the middle, tokens of context computed per second, tokens that fit."""
SEEDS = 4


def plan(seed: int, tool_s: float, prefill_rate: float, kv_tokens: int) -> SimulationPlan:
    """The episodes and the engine."""
    return SimulationPlan.model_validate(
        {
            "seed": seed,
            "max_in_flight": 100_000,
            "environments": {
                "Solve": {
                    "seats": {
                        "solver": {
                            "tokens": {"p50": 1600, "p90": 8000, "cap": 32_000},
                            "turns": {"p50": 8, "p90": 24, "cap": 60},
                        }
                    },
                    "prompt": 2000,
                    "tool_seconds": {"p50": tool_s, "p90": 3 * tool_s, "cap": 30 * tool_s},
                    "tool_tokens": 400,
                }
            },
            "policies": {"policy": {"step_size": 64, "max_staleness": 2}},
            "credit": {"group_size": 8, "release": "late"},
            "engine": {"slots": 16, "rates": {1: 40.0}, "kv_tokens": kv_tokens, "prefill_rate": prefill_rate},
            "trainer": {"step_seconds": 30.0},
        }
    )


def figures(quick: bool) -> dict[str, float | None]:
    """Tokens per second with places over those without, of all seeds together."""
    seeds = range(1 if quick else SEEDS)
    return {name: _ratio(name, [plan(seed, *case) for seed in seeds]) for name, case in CASES.items()}


def _ratio(name: str, plans: list[SimulationPlan]) -> float:
    with_places = [measured(each) for each in plans]
    without = [measured(each, reserves=False) for each in plans]
    for label, found in (("with places", with_places), ("without", without)):
        print(
            f"  {name}, {label}: {fmean(one.tokens_per_s for one in found):.0f} tokens/s "
            f"({', '.join(f'{one.tokens_per_s:.0f}' for one in found)}), steps an hour "
            f"{fmean(one.steps_per_hour['policy'] for one in found):.2f}, slots busy "
            f"{fmean(one.slots_busy for one in found):.2f}, trained length / true "
            f"{fmean(one.length_ratio for one in found):.3f}",
            flush=True,
        )
    return fmean(one.tokens_per_s for one in with_places) / fmean(one.tokens_per_s for one in without)


def measured(planned: SimulationPlan, *, reserves: bool = True) -> SimulationResult:
    """Twenty steps, after the first five: in few steps the lengths of those that happen to end say more."""
    return simulate_run(Scenario(plan=planned, steps=25, skipped=5, reserves=reserves))
