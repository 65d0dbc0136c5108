"""The router of a run with several base models and an external policy: each call and version has its engine."""

from __future__ import annotations

import asyncio
from random import Random
from typing import TYPE_CHECKING

import pytest

from agentrl.core.errors import EngineError
from agentrl.core.records import Message, PolicyVersion
from agentrl.engines.external import Bot
from agentrl.engines.router import FENCE_S, EngineRouter
from agentrl.testing.virtual_time import simulate
from tests.sim.test_replicas import Engine, turns, weights

if TYPE_CHECKING:
    from collections.abc import Sequence


def reply(conversation: Sequence[Message], random: Random) -> str:
    return "7"


def test_versions_reach_the_engines_of_their_policies_only() -> None:
    async def main() -> None:
        solver, proposer = [Engine(), Engine()], [Engine()]
        router = EngineRouter({"solver": solver, "proposer": proposer})
        assert len(router.fleets) == 2
        await router.serve([weights(1), weights(3, "proposer")], [weights(2, "proposer")])
        assert all(engine.updates == [PolicyVersion("solver", 0, 1)] for engine in solver)
        assert {version.step for version in proposer[0].updates} == {2, 3}
        assert await turns(router, "a") == {1}
        assert await turns(router, "b", "proposer") == {3}
        await router.serve([], [])
        assert not proposer[0].keeps(PolicyVersion("proposer", 0, 2))
        await router.close()

    simulate(main, seed=0)


def test_a_version_refused_for_one_base_model_does_not_hold_back_the_other() -> None:
    async def main() -> None:
        solver, proposer = Engine(), Engine()
        router = EngineRouter({"solver": [solver], "proposer": [proposer]})
        solver.refuses.add(PolicyVersion("solver", 0, 1))
        with pytest.raises(EngineError, match="solver"):
            await router.serve([weights(1), weights(1, "proposer")])
        assert await turns(router, "a") == {0}
        assert await turns(router, "b", "proposer") == {1}
        await router.serve([weights(2)])
        assert await turns(router, "c") == {2}
        await router.close()

    simulate(main, seed=0)


def test_the_only_replica_keeps_its_calls_during_a_long_update() -> None:
    async def main() -> None:
        lines: list[str] = []
        solver = Engine()
        router = EngineRouter({"solver": [solver]}, tell=lines.append)
        solver.update_s = 3 * FENCE_S
        serving = asyncio.ensure_future(router.serve([weights(1)]))
        await asyncio.sleep(2 * FENCE_S)
        assert await turns(router, "a") == {0}
        await serving
        assert await turns(router, "b") == {1}
        assert not lines
        await router.close()

    simulate(main, seed=0)


def test_an_external_policy_has_no_weights_and_an_unknown_one_no_engine() -> None:
    async def main() -> None:
        solver = Engine()
        router = EngineRouter({"solver": [solver]}, external={"dealer": Bot(policy="dealer", program=reply)})
        with pytest.raises(EngineError, match="dealer"):
            await router.serve([weights(1), weights(1, "dealer")])
        assert not solver.updates, "the engine was asked for a part of a refused request"
        with pytest.raises(EngineError, match="critic"):
            router.open("s", "critic")
        only_external = EngineRouter({}, external={"dealer": Bot(policy="dealer", program=reply)})
        await only_external.ping()
        await only_external.serve([])
        assert only_external.busy_seconds() == 0.0
        only_external.open("s", "dealer").close()
        await only_external.close()
        await router.close()

    simulate(main, seed=0)
