"""Forks: the prefix read where it was written, a stream of their own, children shared."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest

import agentrl
from agentrl.app.forks import (
    ForkParent,
    ended_child_episodes,
    find_parent,
    fork_episode_spec,
    fork_policies,
    weights_at_fork_point,
)
from agentrl.app.policies import serve_configured_weights, weights_from_directory
from agentrl.app.received import ReceivedRun
from agentrl.core.errors import EngineError, InputError, JournalError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, Task, WeightsRef
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import SpawnEntry, TurnEntry
from agentrl.journal.port import VersionPublication
from agentrl.journal.reader import load_fork_prefix
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.dispatch import Dispatcher
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.execution import plain_rollout_settings, wire_dispatcher
from tests.sim.small_run import config_for
from tests.support.builders import make_past, no_lost_group

T = TypeVar("T")


class Dice:
    """A resource."""

    def __init__(self) -> None:
        self.rolled: list[int] = []

    def roll(self) -> list[int]:
        self.rolled.append(random.randint(1, 1_000_000))
        return list(self.rolled)

    def get_state(self) -> list[int]:
        return self.rolled

    def set_state(self, state: list[int]) -> None:
        self.rolled = list(state)


class Walk(agentrl.Environment):
    """Four turns, each told what was drawn, rolled and counted outside."""

    outside: ClassVar[int] = 0
    level: ClassVar[Any] = "snapshot"

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        dice, agent, rng = ctx.resource(Dice, level=self.level), ctx.agent("agent"), ctx.rng
        for number in range(4):
            drawn = rng.randint(1, 1_000_000)
            rolled = await dice.call("roll")
            count = await ctx.effect("count", self.count)
            await agent.act(agentrl.user(f"turn {number}: {drawn} {rolled} {count}"))
        agent.reward(1.0)

    def count(self) -> int:
        Walk.outside += 1
        return Walk.outside


class Leaf(agentrl.Environment):
    """A child; one that is told to waits until it may end."""

    seats = ("leaf",)
    may_end: ClassVar[asyncio.Event]

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("leaf").act(agentrl.user(str(ctx.task.data["kind"])))
        if ctx.task.data["kind"] == "slow":
            await Leaf.may_end.wait()
        ctx.agent("leaf").reward(1.0)


class Parenting(agentrl.Environment):
    """A child that is gathered before the second turn, one that is not, and one after it."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent")
        (early,) = ctx.spawn(Leaf, {"kind": "quick"})
        (slow,) = ctx.spawn(Leaf, {"kind": "slow"})
        await agent.act(agentrl.user("first"))
        first = (await ctx.gather(early))[0]
        await agent.act(agentrl.user(f"second {first.episode_id}"))
        (late,) = ctx.spawn(Leaf, {"kind": "quick"})
        results = await ctx.gather(slow, late)
        ctx.metric("children", len(results))
        await agent.act(agentrl.user(" ".join(result.episode_id for result in results)))
        agent.reward(1.0)


def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [*str(request.seed % 100_000).encode(), STOP_TOKEN]


@dataclass
class World:
    """A run directory in use."""

    directory: Path
    store: SqliteJournal
    engine: ScriptedEngine
    dispatcher: Dispatcher
    failures: list[BaseException] = field(default_factory=list)

    @property
    def journal(self) -> Path:
        return self.directory / "journal"

    async def fork(self, parent: ForkParent, environment: type[agentrl.Environment], n: int = 1) -> list[EpisodeHeader]:
        first = self.store.next_number("f")
        specs = [fork_episode_spec(parent, first + index, self.journal, environment, n) for index in range(n)]
        headers = await self.dispatcher.play_forks(specs, ended_child_episodes(parent))
        assert not self.failures, self.failures
        assert all(header.drop_reason is None for header in headers), self.dispatcher.worker.last_failure
        return headers

    async def play(
        self,
        environment: type[agentrl.Environment],
        episode_id: str = "e0",
        pins: Mapping[str, PolicyVersion] = MappingProxyType({}),
    ) -> None:
        spec = EpisodeSpec(
            episode_id=episode_id,
            environment=name_of(environment),
            task=Task(id="t", data={}),
            seed=3,
            seats={seat: SeatBinding("policy") for seat in environment.seats},
            group_id="g",
            purpose="train",
            pins=dict(pins),
        )
        self.dispatcher.resume(make_past(unfinished=[spec]), no_lost_group)
        self.store.admit(spec)
        await self.dispatcher.worker.drain()
        assert not self.failures, self.failures


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[World]:
    store = SqliteJournal(directory / "journal", info={"name": directory.name})
    failures: list[BaseException] = []
    engine = ScriptedEngine(script, versions={"policy": PolicyVersion("policy", 0, 0)})
    dispatcher, _ = wire_dispatcher(
        Walk, engine, store, plain_rollout_settings(max_turns=100, max_context=1 << 16), failures, policy="policy"
    )
    try:
        yield World(directory, store, engine, dispatcher, failures)
    finally:
        await dispatcher.worker.cancel()
        await store.close()


def within(directory: Path, play: Callable[[World], Coroutine[Any, Any, T]]) -> T:
    async def main() -> T:
        async with opened(directory) as world:
            return await play(world)

    return asyncio.run(main())


def conversation(run: Path, episode_id: str) -> list[tuple[str, str]]:
    """What was asked and said, turn by turn, as a reader sees it."""
    reader = RunReader(run)
    view = reader.episode(episode_id)
    reader.close()
    assert view.problems == []
    return [(str(b.messages[-1]["content"]), b.text) for _, b in view.entries if isinstance(b, TurnEntry)]


@pytest.mark.parametrize("level", ["replay", "snapshot"])
@pytest.mark.parametrize("at", [0, 2, -1])
def test_a_fork_shares_what_came_before_and_goes_its_own_way(tmp_path: Path, at: int, level: str) -> None:
    Walk.level = level
    within(tmp_path / "run", lambda world: world.play(Walk))
    parent = find_parent(tmp_path / "run" / "journal", "e0", None, at)
    performed = Walk.outside
    first, second = within(tmp_path / "run" / "forks", lambda world: world.fork(parent, Walk, 2))
    number = at % 4
    assert Walk.outside == performed + 2 * (3 - number), "effects before the turn are remembered"
    whole = conversation(tmp_path / "run", "e0")
    forks = [conversation(tmp_path / "run" / "forks", header.episode_id) for header in (first, second)]
    for turns in forks:
        assert len(turns) == 4
        assert turns[:number] == whole[:number]
        assert turns[number][0] == whole[number][0], "the turn is asked the same"
        assert turns[number][1] != whole[number][1], "and sampled anew"
    later = [[asked for asked, _ in turns[number + 1 :]] for turns in (whole, *forks)]
    assert number == 3 or len({str(asked) for asked in later}) == 3, "draws and dice are each fork's own"
    assert first.turns == 4, "inherited turns count, too"
    assert first.reward == 1.0


def test_forks_of_forks_of_an_earlier_life_in_a_directory_that_was_moved(tmp_path: Path) -> None:
    Walk.level = "snapshot"
    within(tmp_path / "old" / "run", lambda world: world.play(Walk))
    parent = find_parent(tmp_path / "old" / "run" / "journal", "e0", None, 1)
    forks = tmp_path / "old" / "run" / "forks"
    within(forks, lambda world: world.fork(parent, Walk))
    shutil.move(tmp_path / "old", tmp_path / "new")
    run, forks = tmp_path / "new" / "run", tmp_path / "new" / "run" / "forks"
    own = find_parent(forks / "journal", "f0", None, 3)
    assert own.point.episode_id == "f0"
    taken_over = find_parent(forks / "journal", "f0", None, 0)
    assert taken_over.point.episode_id == "e0"
    within(forks, lambda world: world.fork(own, Walk))
    within(forks, lambda world: world.fork(taken_over, Walk))
    whole, first = conversation(run, "e0"), conversation(forks, "f0")
    second, third = conversation(forks, "f1"), conversation(forks, "f2")
    assert first[:1] == whole[:1]
    assert second[:3] == first[:3]
    assert second[3][0] == first[3][0]
    assert second[3][1] != first[3][1]
    assert third[0][0] == whole[0][0]
    assert third[0][1] != whole[0][1]
    reader = RunReader(forks)
    assert sorted(line.episode for line in reader.episodes("purpose = 'fork'")) == ["f0", "f1", "f2"]
    reader.close()


def test_children_are_shared_and_later_ones_new(tmp_path: Path) -> None:
    async def play(world: World) -> list[EpisodeHeader]:
        Leaf.may_end = asyncio.Event()
        running = asyncio.get_running_loop().create_task(world.play(Parenting))
        while not conversation_so_far(world, "e0", 2):
            await asyncio.sleep(0.01)
        await world.store.flush()
        parent = find_parent(world.journal, "e0", None, 1)
        forking = asyncio.get_running_loop().create_task(world.fork(parent, Parenting))
        while not conversation_so_far(world, "f0", 1):
            await asyncio.sleep(0.01)
        Leaf.may_end.set()
        await running
        return await forking

    def conversation_so_far(world: World, episode_id: str, turns: int) -> bool:
        entries = world.store.turn_log("0").read(episode_id, 0)
        return sum(isinstance(entry.decode(), TurnEntry) for entry in entries) >= turns

    (header,) = within(tmp_path / "run", play)
    assert header.reward == 1.0
    whole, forked = conversation(tmp_path / "run", "e0"), conversation(tmp_path / "run", "f0")
    assert forked[:1] == whole[:1]
    assert forked[1][0] == whole[1][0]
    slow, late = whole[2][0].split()
    assert forked[2][0].split() == [slow, late.replace("e0~", "f0~")]
    reader = RunReader(tmp_path / "run")
    spawned = [body for _, body in reader.episode("f0").entries if isinstance(body, SpawnEntry)]
    assert [entry.children[0][:2] for entry in spawned] == ["e0", "e0", "f0"]
    reader.close()


def test_weights_given_by_hand_are_found_again_and_never_taken_for_the_runs(tmp_path: Path) -> None:
    Walk.level = "snapshot"
    run, forks = tmp_path / "run", tmp_path / "run" / "forks"
    given = tmp_path / "given"
    given.mkdir()
    (given / "adapter_model.safetensors").write_bytes(b"given by hand")
    with pytest.raises(InputError, match=r"adapter_config\.json: cannot be read"):
        weights_from_directory("policy", given)
    (given / "adapter_config.json").write_bytes(b"{}")
    published = run / "versions" / "policy" / "0.1"
    published.mkdir(parents=True)
    of_the_run = WeightsRef(version=PolicyVersion("policy", 0, 1), path=str(published), kind="adapter", sha256="00")

    async def play(world: World) -> None:
        world.store.record(VersionPublication(of_the_run, None))
        await world.engine.serve([of_the_run])
        await world.play(Walk)

    async def fork(world: World, weights: WeightsRef, number: str) -> None:
        await serve_configured_weights(config_for().bases, ServedVersions(world.engine), world.store, [weights])
        await world.fork(find_parent((run if number == "e0" else forks) / "journal", number, None, 2), Walk)

    within(run, play)
    first = find_parent(run / "journal", "e0", None, 2)
    assert weights_at_fork_point(first) == [of_the_run]
    by_hand = weights_from_directory("policy", given)
    within(forks, lambda world: fork(world, by_hand, "e0"))
    assert weights_at_fork_point(find_parent(forks / "journal", "f0", None, 3)) == [by_hand]
    assert weights_at_fork_point(find_parent(forks / "journal", "f0", None, 0)) == [of_the_run]
    shutil.move(tmp_path / "run", tmp_path / "moved")
    moved = find_parent(tmp_path / "moved" / "forks" / "journal", "f0", None, 0)
    [found] = weights_at_fork_point(moved)
    assert found.path == str(tmp_path / "moved" / "versions" / "policy" / "0.1")
    shutil.rmtree(given)
    with pytest.raises(InputError, match=r"the weights of policy@-1\.\d+ are not on disk"):
        weights_at_fork_point(find_parent(tmp_path / "moved" / "forks" / "journal", "f0", None, 3))


def test_a_past_opponent_that_has_not_acted_plays_the_version_that_the_episode_fixed(tmp_path: Path) -> None:
    Walk.level = "snapshot"
    run, forks, drawn = tmp_path / "run", tmp_path / "run" / "forks", PolicyVersion("policy", 0, 3)
    published = run / "versions" / "policy" / "0.3"
    published.mkdir(parents=True)

    async def play(world: World) -> None:
        weights = WeightsRef(version=drawn, path=str(published), kind="adapter", sha256="00")
        world.store.record(VersionPublication(weights, None))
        await world.play(Walk, pins={"past": drawn})

    within(run, play)
    policies = {"policy": {}, "past": {"kind": "past", "of": "policy"}}
    known = config_for(policies=policies).policies
    parent = find_parent(run / "journal", "e0", None, 1)
    (weights,) = fork_policies(known, parent, [], ReceivedRun(run)).weights
    assert (weights.version, weights.path) == (PolicyVersion("past", 0, 3), str(published))
    within(forks, lambda world: world.fork(parent, Walk))
    again = find_parent(forks / "journal", "f0", None, 3)
    assert [each.version for each in fork_policies(known, again, [], ReceivedRun(run)).weights] == [weights.version]
    shutil.rmtree(published)
    assert fork_policies(known, parent, [], ReceivedRun(run)).weights == [], "it holds no seat"
    held = replace(parent, begin=msgspec.structs.replace(parent.begin, seats={"agent": "past"}))
    with pytest.raises(InputError, match=r"past played policy@0\.3: .* not on disk .*--policy SEAT=policy@STEP"):
        fork_policies(known, held, [], ReceivedRun(run))


def test_a_version_without_a_lineage_is_that_of_the_newest(tmp_path: Path) -> None:
    Walk.level = "snapshot"
    run = tmp_path / "run"
    versions = [PolicyVersion("policy", *number) for number in ((-1, 4), (0, 3), (0, 4), (1, 4))]

    async def play(world: World) -> None:
        for version in versions:
            path = run / "versions" / "policy" / f"{version.lineage}.{version.step}"
            path.mkdir(parents=True)
            weights = WeightsRef(version=version, path=str(path), kind="adapter", sha256="00")
            world.store.record(VersionPublication(weights, None))
        await world.play(Walk)

    within(run, play)
    parent, known = find_parent(run / "journal", "e0", None, 2), config_for(policies={"policy": {}}).policies
    for request, version in {"policy@4": "policy@1.4", "policy@0.4": "policy@0.4", "policy@3": "policy@0.3"}.items():
        (weights,) = fork_policies(known, parent, [request], ReceivedRun(run)).weights
        assert str(weights.version) == version
    with pytest.raises(InputError, match=rf"policy@0\.9 are not on disk .*`agentrl step list {run}` shows"):
        fork_policies(known, parent, ["policy@9"], ReceivedRun(run))


def test_weights_that_are_pruned_meanwhile_are_gone_and_fit_no_worse(tmp_path: Path) -> None:
    weights = WeightsRef(version=PolicyVersion("policy", 0, 1), path=str(tmp_path / "0.1"), kind="adapter", sha256="00")

    class Pruned(ServedVersions):
        async def make_current(self, weights: WeightsRef) -> None:
            await asyncio.to_thread(shutil.rmtree, weights.path)
            raise EngineError("adapter_model.safetensors does not exist")

    async def serve(world: World) -> None:
        (tmp_path / "0.1").mkdir()
        await serve_configured_weights(config_for().bases, Pruned(world.engine), world.store, [weights])

    with pytest.raises(InputError, match=r"policy@0\.1, .* are gone"):
        within(tmp_path / "run", serve)


def test_a_fork_reads_no_other_run(tmp_path: Path) -> None:
    """A received journal may name any directory of the user."""
    Walk.level = "snapshot"
    own, received = tmp_path / "own", tmp_path / "received"
    within(own, lambda world: world.play(Walk))
    parent = find_parent(own / "journal", "e0", None, 1)
    within(received, lambda world: world.play(Walk))
    with pytest.raises(JournalError, match=r"/own/journal, which is no journal of this run"):
        load_fork_prefix(received / "journal", parent.point_for(received / "journal"))


def test_what_cannot_be_forked_is_said(tmp_path: Path) -> None:
    Walk.level = "snapshot"
    run = tmp_path / "run"
    within(run, lambda world: world.play(Walk))
    with pytest.raises(InputError, match=r"has 4 turns, .* turn 4"):
        find_parent(run / "journal", "e0", None, 4)
    with pytest.raises(InputError, match="no episode e9"):
        find_parent(run / "journal", "e9", None, 0)
    parent = find_parent(run / "journal", "e0", None, 1)
    within(tmp_path / "run" / "forks", lambda world: world.fork(parent, Walk))
    shutil.rmtree(run / "journal")
    (run / "journal").mkdir()
    reader = RunReader(tmp_path / "run" / "forks")
    view = reader.episode("f0")
    assert any("there is no such file" in problem for problem in view.problems), view.problems
    reader.close()
    with pytest.raises(JournalError):
        find_parent(tmp_path / "run" / "forks" / "journal", "f0", None, 1)


def test_a_fork_over_a_pinned_resource_is_dropped_by_name(tmp_path: Path) -> None:
    Walk.level = "pinned"

    async def play(world: World) -> list[EpisodeHeader]:
        await world.play(Walk)
        await world.store.flush()
        parent = find_parent(world.journal, "e0", None, 1)
        return await world.dispatcher.play_forks([fork_episode_spec(parent, 0, world.journal, Walk, 1)], {})

    (header,) = within(tmp_path / "run", play)
    assert header.drop_reason == "resource_lost"
