"""Past versions as opponents: who joins, who is drawn, what is served, and that a kill changes none of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import agentrl
from agentrl.app.policies import check_engine_capabilities
from agentrl.config.sections import EvaluationConfig
from agentrl.core.errors import ConfigError, EngineError
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import (
    EpisodeSpec,
    GameTally,
    Lines,
    PolicyVersion,
    SeatBinding,
    Task,
    TrajectoryHeader,
    WeightsRef,
    dropped_header,
)
from agentrl.engines.router import EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.inspection.statistics import tally_games_by_version
from agentrl.journal.entries import TurnEntry
from agentrl.journal.port import EpisodeEnd
from agentrl.observe.metrics import find_registered_metric
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.metrics import EpisodeTotals
from agentrl.orchestrator.opponents import OpponentPool, OpponentPools, opponent_pool_steps
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.plugin import SeededSimulation
from tests.sim.small_run import SmallRun, config_for
from tests.sim.test_schedules import SHARE, Duel
from tests.support.crash_scenario import CrashScenario
from tests.support.crashes import crash_everywhere
from tests.support.dispatched import dispatched, members

pytestmark = pytest.mark.sim

SPEC = EpisodeSpec(episode_id="e0", environment="duel", task=Task(id="t", data={}), seed=0, seats={}, group_id="g0")
SIDES = {"x": ["player", "past"], "o": ["past", "player"]}


def strength(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """The newer the version, the higher its digit, mostly."""
    return [ord(str(min(9, version.step + request.seed % 3))), STOP_TOKEN]


def config(**past: Any) -> Any:
    policies = {
        "player": {"step_size": 8, "lora": {"rank": 2}},
        "past": {"kind": "past", "of": "player", "every": 2, "size": 2, **past},
    }
    return config_for(policies=policies, seats=SIDES, steps=9, credit={"group_size": 4})


class Places(ScriptedEngine):
    """Counts pinned versions."""

    most = 0

    async def serve(self, current: Any, pinned: Any = ()) -> None:
        await super().serve(current, pinned)
        Places.most = max(Places.most, len(pinned))


def games(run: SmallRun) -> list[tuple[int, PolicyVersion, frozenset[PolicyVersion]]]:
    """(group, version the episode was pinned to, versions that sampled the opponent's turns) of trained episodes."""
    found = []
    log = run.journal.turn_log("0")
    for batch in run.trainer.batches:
        for unit in batch.units:
            spec = next(
                s
                for s, h in members(run.journal, {f"g{int(unit.episode_id[1:]) // 4 * 4}"})
                if s.episode_id == unit.episode_id
            )
            bodies = [entry.decode() for entry in log.read(unit.episode_id, unit.attempt)]
            turns = [body for body in bodies if isinstance(body, TurnEntry) and body.policy == "past"]
            sampled = {span.version for turn in turns for span in turn.tokens.spans}
            found.append((int(unit.episode_id[1:]) // 4, spec.pins["past"], frozenset(sampled)))
    return found


@pytest.mark.parametrize("choose", ["uniform", "latest", "prioritized"])
def test_a_group_plays_one_past_version_and_never_a_future_one(simulated_loop: SeededSimulation, choose: str) -> None:
    async def main() -> None:
        Places.most = 0
        run = SmallRun(config=config(choose=choose), environment=Duel, script=strength, engine_class=Places)
        await run.run()
        played = games(run)
        assert all(sampled == {pin} for _, pin, sampled in played)
        by_group: dict[int, set[PolicyVersion]] = {}
        for group, pin, _ in played:
            by_group.setdefault(group, set()).add(pin)
        assert all(len(pins) == 1 for pins in by_group.values())
        assert {pin.step for _, pin, _ in played} >= {0, 2, 4, 6}
        assert all(pin.step % 2 == 0 for _, pin, _ in played)
        assert Places.most <= 3, "more versions were kept than places are counted for"
        assert steps_of_policies(run) == {"player"}

    simulated_loop.run(main)


class LacksFiles(ScriptedEngine):
    """Loads slowly; the files of lineage 9 are gone."""

    async def load(self, weights: WeightsRef) -> None:
        await asyncio.sleep(0.3)
        if weights.version.lineage == 9:
            raise EngineError(f"weights {weights.version} refused: its files are gone")


def router_that_lacks_files(*arguments: Any, **options: Any) -> EngineRouter:
    return EngineRouter([LacksFiles(*arguments, **options) for _ in range(2)])


@pytest.mark.parametrize("engine_class", [LacksFiles, router_that_lacks_files])
def test_updates_opponents_and_evaluations_do_not_pay_for_versions_of_others(
    simulated_loop: SeededSimulation, engine_class: Callable[..., Engine]
) -> None:
    evaluated = config(choose="uniform").model_copy(update={"evaluation": EvaluationConfig(tasks=4, every=2)})
    refused: list[PolicyVersion] = []

    async def main() -> None:
        run = SmallRun(config=evaluated, environment=Duel, script=strength, engine_class=engine_class)
        run.held_out = [Task(id=f"held-out-{number}", data={}) for number in range(4)]
        pinning: list[asyncio.Task[None]] = []

        async def pin_lost_versions(orchestrator: Orchestrator) -> None:
            for step in itertools.count():
                lost = WeightsRef(version=PolicyVersion("player", 9, step), path="", kind="adapter", sha256="")
                with pytest.raises(EngineError, match=f"{lost.version} refused"):
                    await orchestrator.versions.pin(f"tree of e{step}", lost)
                refused.append(lost.version)
                await asyncio.sleep(0.1)

        run.during = lambda orchestrator: pinning.append(
            asyncio.get_running_loop().create_task(pin_lost_versions(orchestrator))
        )
        await run.run()
        pinning[0].cancel()
        assert len(run.trainer.batches) == 9
        assert len(run.seen.evaluations) > 2
        assert len({pin for _, pin, _ in games(run)}) > 2
        reasons = Counter(end.header.drop_reason for end in run.journal.of_kind(EpisodeEnd))
        assert reasons.keys() <= {None, "run_ended"}

    simulated_loop.run(main, seeds=3)
    assert len(refused) > 20


class Forgetful(ScriptedEngine):
    """Loses a pinned version for good once the next one is current, like a restarted process whose file is gone."""

    GONE = PolicyVersion("player", 0, 2)

    def has_pin(self, version: PolicyVersion) -> bool:
        return super().has_pin(version) and (version != self.GONE or self._current["player"].step < 3)


class Swallows(Duel):
    """Makes a reward of each error."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        try:
            await super().run(ctx)
        except Exception:  # noqa: BLE001
            for seat in self.seats:
                ctx.agent(seat).reward(0.0)


def test_a_lost_version_of_one_pool_leaves_the_others_as_they_are() -> None:
    """A group has a version of each pool, also of those that hold no seat in it."""
    lost, served = PolicyVersion("player", 0, 0), PolicyVersion("player", 0, 1)
    pools = {
        name: OpponentPool(name=name, of="player", every=1, size=2, choose="latest", served=[lost, served])
        for name in ("past", "other")
    }
    opponents = OpponentPools(
        pools=pools,
        versions=ServedVersions(ScriptedEngine([[1]], versions={"player": served})),
        run_seed=0,
        pinned=set,
        counts=EpisodeTotals(),
        lines=Lines(),
    )
    seats = {"x": SeatBinding("player", None), "o": SeatBinding("past", lost)}
    spec = replace(SPEC, seats=seats, pins={"past": lost, "other": served})
    opponents.record_result(spec, dropped_header(spec, "version_gone"))
    assert (pools["past"].lost, pools["other"].lost) == ({lost}, set())


@pytest.mark.parametrize(
    ("choose", "environment"),
    [("uniform", Duel), ("latest", Duel), ("prioritized", Duel), ("uniform", Swallows)],
)
def test_a_pinned_version_that_no_engine_serves_costs_its_episodes_and_not_the_run(
    simulated_loop: SeededSimulation, choose: str, environment: type[agentrl.Environment]
) -> None:
    async def main() -> int:
        run = SmallRun(config=config(choose=choose), environment=environment, script=strength, engine_class=Forgetful)
        await run.run()
        assert len(run.trainer.batches) == 9
        dropped = run.orchestrator.buffer.ledger.dropped
        assert set(dropped) <= {"version_gone", "run_ended"}
        against = {
            spec.episode_id
            for spec, header in dispatched(run.journal)
            if header is not None and header.drop_reason == "version_gone" and spec.pins["past"] == Forgetful.GONE
        }
        assert len(against) == dropped["version_gone"] <= 16, "no more groups are matched with it"
        return len(against)

    assert sum(simulated_loop.run(main)) > 0


def steps_of_policies(run: SmallRun) -> set[str]:
    return {batch.policy for batch in run.trainer.batches}


def test_a_resumed_run_plays_on_against_the_same(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        first = SmallRun(config=config(), environment=Duel, script=strength)
        journal = await first.cut_after(4.3)
        at = {"player": PolicyVersion("player", 0, len(first.trainer.batches))}
        second = SmallRun(
            config=config(),
            environment=Duel,
            script=strength,
            journal=journal,
            resumed_at=at,
        )
        await second.run()
        assert len(first.trainer.batches) + len(second.trainer.batches) == 9
        assert all(sampled == {pin} for _, pin, sampled in games(second))
        pool = second.orchestrator.opponents.pools["past"]
        known = sum(tally.episodes for tally in pool.tallies.values())
        assert known == sum("past" in {each.policy for each in end.trajectories} for _, end in members(journal))
        return sum("past" in spec.pins for spec in second.past.unfinished)

    assert sum(simulated_loop.run(main)) > 0, "nothing was stopped in the middle"


def test_a_run_with_opponents_that_dies_at_any_operation_goes_on_as_promised() -> None:
    policies = {**config().model_dump()["policies"], "past": {"kind": "past", "of": "player", "every": 1, "size": 1}}
    report = crash_everywhere(CrashScenario(Duel, changes={"policies": policies, "seats": SIDES}), share=SHARE)
    assert report.crashes > 20
    assert not report.violations, report


def test_a_rollback_has_the_pool_of_its_checkpoint_back(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        first = SmallRun(config=config(), environment=Duel, script=strength)
        await first.run()
        journal = first.journal.after_crash()
        pool = (PolicyVersion("player", 0, 1), PolicyVersion("player", 0, 4))  # the one for step 0 had no place then
        at = {"player": PolicyVersion("player", 0, 4)}
        second = SmallRun(
            config=config(),
            environment=Duel,
            script=strength,
            journal=journal,
            resumed_at=at,
            drawn_from={"past": pool},
        )
        begun: list[tuple[PolicyVersion, ...]] = []
        second.during = lambda orchestrator: begun.append(tuple(orchestrator.opponents.pools["past"].served))
        await second.run()
        assert begun == [pool]
        known = second.orchestrator.opponents.pools["past"].tallies
        assert known[pool[1]].episodes > 0, "how it did is known"

    simulated_loop.run(main)


def test_every_step_tells_who_won(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = SmallRun(config=config(), environment=Duel, script=strength)
        await run.run()
        steps = [metrics for _, _, metrics in run.seen.steps]
        pool = run.orchestrator.opponents.pools["past"]
        heard = sum(metrics.get("games/past", 0.0) for metrics in steps)
        assert 0.0 < heard <= sum(tally.episodes for tally in pool.tallies.values())
        decided = [metrics for metrics in steps if "episodes/decided" in metrics]
        assert decided
        for metrics in decided:
            assert metrics["won/x"] + metrics["won/o"] == pytest.approx(1.0), "a seat without a win has 0"
            assert metrics["episodes/decided"] <= metrics["games/past"], "a draw is not decided"
        for name in ("games/past", "won/x", "episodes/decided"):
            assert find_registered_metric(name) is not None

    simulated_loop.run(main)


@pytest.mark.parametrize(("adapters", "fits"), [(7, True), (6, False)])
def test_too_few_places_for_adapters_are_refused_at_the_start(adapters: int, fits: bool) -> None:
    engine = ScriptedEngine([[1]], versions={})
    capabilities = replace(engine.capabilities, adapters=adapters)
    with contextlib.nullcontext() if fits else pytest.raises(ConfigError, match="7 adapters at once"):
        check_engine_capabilities(config().engine_plan, capabilities)


def test_the_harder_ones_are_drawn_more_often() -> None:
    versions = [PolicyVersion("player", 0, step) for step in (0, 2, 4)]
    pool = OpponentPool(
        name="past",
        of="player",
        every=2,
        size=3,
        choose="prioritized",
        served=versions,
        tallies={versions[0]: GameTally(98, 98.0), versions[1]: GameTally(98, 49.0), versions[2]: GameTally(98, 0.0)},
    )
    drawn = Counter(pool.draw("seed", group) for group in range(2000))
    expected = {versions[1]: 0.25 / 1.23, versions[2]: 0.98 / 1.23}
    assert drawn[versions[0]] <= 2
    for version, share in expected.items():
        assert drawn[version] / 2000 == pytest.approx(share, abs=0.04)


def test_a_win_is_more_than_the_opponent_got() -> None:
    def ended(x: tuple[str, float | None, int], o: tuple[str, float | None, int]) -> Any:
        sides = (
            TrajectoryHeader(seat, 0, policy, reward, 3, step, 0)
            for seat, (policy, reward, step) in zip("xo", (x, o), strict=True)
        )
        return replace(dropped_header(SPEC, ""), drop_reason=None, trajectories=tuple(sides))

    headers = [
        ended(("player", 1.0, 5), ("past", -1.0, 0)),
        ended(("past", 1.0, 0), ("player", -1.0, 7)),
        ended(("player", 0.0, 13), ("past", None, 10)),
        ended(("player", 0.0, 13), ("player", 0.0, 13)),
    ]
    assert tally_games_by_version(headers, "player", "past", every=10) == {
        (0, PolicyVersion("player", 0, 0)): GameTally(2, 1.0),
        (10, PolicyVersion("player", 0, 10)): GameTally(1, 0.5),
    }


def test_who_joined_follows_from_the_step() -> None:
    assert [list(opponent_pool_steps(step, 10, 2)) for step in (0, 9, 10, 25, 40)] == [
        [0],
        [0],
        [0, 10],
        [10, 20],
        [30, 40],
    ]
