"""Units of truncated episodes over a whole run: dropped, penalized or kept, also across a resume."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import agentrl
from agentrl.core.errors import CheckFailedError
from agentrl.core.records import EpisodeHeader
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_resume import second_life
from tests.support.dispatched import members

pytestmark = pytest.mark.sim


class Paid(agentrl.Environment):
    """Rewards its turn in any case, as most classes do."""

    seats = ("guesser",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        turn = await guesser.act(agentrl.user("Guess."))
        guesser.reward(1.0, turn=0)
        guesser.reward(float(len(turn.text) % 3))


class Dropping(Paid):
    truncated_reward = None


class Penalizing(Paid):
    truncated_reward = -2.0


def config(max_tokens: int = 5, **changes: Any) -> Any:
    """Replies have 2 to 8 tokens."""
    return config_for(sampling={"max_tokens": max_tokens}, **changes)


def trained_headers(run: SmallRun) -> dict[str, EpisodeHeader]:
    headers = {header.episode_id: header for _, header in members(run.journal)}
    return {unit.episode_id: headers[unit.episode_id] for batch in run.trainer.batches for unit in batch.units}


def test_dropped_units_are_counted_and_never_trained_also_after_a_resume(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        first = SmallRun(config=config(steps=6), environment=Dropping)
        first.during = lambda orchestrator: asyncio.get_running_loop().call_later(2.0, orchestrator.stop)
        await first.run()
        second = second_life(first, first.journal.after_crash(), len(first.trainer.batches))
        await second.run()
        before, after = trained_headers(first), trained_headers(second)
        assert not before.keys() & after.keys()
        assert len(before) + len(after) == 6 * 8
        for header in (*before.values(), *after.values()):
            assert (header.stop_reason, header.trajectories[0].reward is None) == ("completed", False)
        cut = [header for _, header in members(second.journal) if header.stop_reason == "max_tokens"]
        assert cut
        assert all(header.reward is None for header in cut)
        assert second.orchestrator.buffer.ledger.dropped["truncated"] > 0

    simulated_loop.run(main)


@pytest.mark.parametrize(("environment", "rewards"), [(Paid, {1.0, 2.0, 3.0}), (Penalizing, {-2.0})])
def test_other_units_are_trained_with_their_reward(
    simulated_loop: SeededSimulation, environment: type[Paid], rewards: set[float]
) -> None:
    async def main() -> None:
        run = SmallRun(config=config(), environment=environment)
        await run.run()
        cut = [header for header in trained_headers(run).values() if header.stop_reason == "max_tokens"]
        assert cut
        assert {header.reward for header in cut} <= rewards
        assert not run.orchestrator.buffer.ledger.dropped

    simulated_loop.run(main)


def test_a_run_whose_units_are_all_dropped_ends_and_says_why(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        with pytest.raises(CheckFailedError, match=r"truncated \(max_tokens\), and truncated_reward = None"):
            await SmallRun(config=config(max_tokens=1), environment=Dropping).run()

    simulated_loop.run(main)
