"""Engines of known rates are emulated, and their rates found again from nothing but the times of their turns."""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import numpy as np
import pytest

from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion
from agentrl.engines.fleet import ReplicatedEngine
from agentrl.simulation.calibration import TimedTurn, fit_engine_rates
from agentrl.simulation.engine import EmulatedEngine
from agentrl.simulation.plan import DecodeRateCurve
from agentrl.simulation.simulated_environments import requested_turn_length
from agentrl.simulation.virtual_time import simulate

pytestmark = pytest.mark.sim

MEASURED = {1: 400.0, 2: 200.0, 4: 160.0, 8: 160.0, 16: 120.0, 32: 50.0}
"""Neither a line nor a curve that anybody would have thought of."""


def turns_of(
    *,
    slots: int = 64,
    replicas: int = 1,
    prefill_rate: float = math.inf,
    conversations: int = 40,
    forgets: bool = False,
) -> list[TimedTurn]:
    """What conversations that come one after another did, and left in the same order, 120 turns each.

    Where an engine `forgets`, all of a context is computed for each turn.
    """

    async def main() -> list[TimedTurn]:
        versions = {"solver": PolicyVersion("solver", 0, 0)}
        engines = [
            EmulatedEngine(
                requested_turn_length,
                versions=versions,
                slots=slots,
                rate=DecodeRateCurve(MEASURED),
                prefill_rate=prefill_rate,
            )
            for _ in range(replicas)
        ]
        engine = ReplicatedEngine(engines) if replicas > 1 else engines[0]
        found: list[TimedTurn] = []

        async def converse(number: int) -> None:
            rng, loop = random.Random(number), asyncio.get_running_loop()
            await asyncio.sleep(10.0 * number)
            session, said = engine.open(f"e{number}", "solver"), 0
            for turn in range(120):
                new, length = rng.randint(10, 300), rng.randint(20, 400)
                if forgets:
                    session.close()
                    session = engine.open(f"e{number}", "solver")
                said += new
                tokens = np.zeros(said, np.int32)
                tokens[-1] = length
                start = loop.time()
                await session.generate(
                    GenerateRequest(
                        request_id=f"e{number}.0.{turn}",
                        token_ids=tokens,
                        sampling=SamplingParams(max_tokens=10_000),
                        seed=0,
                        priority=number % 3,
                    )
                )
                said += length
                computed = said - length if forgets else new
                found.append(TimedTurn(start, loop.time(), length, new, computed))
                await asyncio.sleep(rng.expovariate(2.0))

        await asyncio.gather(*map(converse, range(conversations)))
        return found

    return simulate(main, seed=0)


def rates_of(turns: list[TimedTurn], *, slots: int = 64, replicas: int = 1) -> tuple[DecodeRateCurve, dict[str, Any]]:
    found = fit_engine_rates(turns, slots, replicas)
    return DecodeRateCurve(found["rates"]), found


def check(turns: list[TimedTurn], *, slots: int = 64, replicas: int = 1, within: float = 0.1) -> dict[str, Any]:
    """Rates are those that were emulated, as far as slots go."""
    found = fit_engine_rates(turns, slots, replicas)
    rates = DecodeRateCurve(found["rates"])
    for count, rate in MEASURED.items():
        if count <= slots:
            assert rates(count) == pytest.approx(rate, rel=within), count
    return found


def test_rates_are_found_again() -> None:
    assert "prefill_rate" not in check(turns_of())


def test_what_contexts_cost_is_found_again() -> None:
    assert check(turns_of(prefill_rate=5000.0))["prefill_rate"] == pytest.approx(5000, rel=0.1)


def test_what_is_computed_again_is_what_new_context_costs() -> None:
    turns = turns_of(prefill_rate=50_000.0, forgets=True)
    again = sum(turn.computed for turn in turns) / sum(turn.context for turn in turns)
    assert again > 100
    assert check(turns)["prefill_rate"] == pytest.approx(50_000 / again, rel=0.1)


def test_who_waits_for_a_slot_does_not_run() -> None:
    """Nearly all wait, and some are served before those that came first."""
    turns = turns_of(slots=8, prefill_rate=5000.0)
    assert check(turns, slots=8)["prefill_rate"] == pytest.approx(5000, rel=0.1)


def test_calls_are_spread_over_replicas() -> None:
    """Who ran with whom is not known, so this is less exact."""
    found = check(turns_of(slots=16, replicas=2, prefill_rate=5000.0), slots=16, replicas=2, within=0.2)
    assert found["prefill_rate"] == pytest.approx(5000, rel=0.3)


def test_one_conversation_tells_one_rate() -> None:
    found = fit_engine_rates(turns_of(conversations=1), slots=64, replicas=1)
    assert list(found["rates"]) == [1]
    assert found["rates"][1] == pytest.approx(400)


def test_turns_that_are_all_alike_take_what_they_took() -> None:
    """Four at once: what was contexts and what tokens is unknown; where they waited, contexts are left out."""
    turns = [TimedTurn(10.0 * (n // 4), 10.0 * (n // 4) + 8.0, 100, 50, 50) for n in range(40)]
    found = fit_engine_rates(turns, slots=4, replicas=1)
    assert 100 / found["rates"][4] + 4 * 50 / found["prefill_rate"] == pytest.approx(8)
    assert fit_engine_rates(turns, slots=2, replicas=1) == {"rates": {2: pytest.approx(25)}}
    assert fit_engine_rates(turns[:1], slots=4, replicas=1) == {"rates": {1: pytest.approx(12.5)}}
