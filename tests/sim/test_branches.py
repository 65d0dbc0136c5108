"""`ctx.branch` in whole runs: trees are sampled by one version, trained whole and once, and survive a crash."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path as FilePath
from typing import Any, ClassVar

import pytest

import agentrl
from agentrl.core import ids
from agentrl.core.errors import (
    VERSION_GONE,
    CheckFailedError,
    ConfigError,
    EngineError,
    EnvironmentDefinitionError,
)
from agentrl.core.ports import Engine, GenerateRequest
from agentrl.core.records import AgentTurns, EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, WeightsRef
from agentrl.credit.baselines import SeatRole
from agentrl.credit.release import reward_history_from_journal
from agentrl.engines.router import EngineRouter
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import (
    BeginEntry,
    BranchEntry,
    JournalEntry,
    NondeterministicValueEntry,
    ScoreEntry,
    TurnEntry,
    encode_body,
)
from agentrl.journal.port import EpisodeEnd, StepRow, UnitDropped
from agentrl.journal.reader import read_fork_prefix
from agentrl.orchestrator.host import DispatchingHost
from agentrl.orchestrator.loop import Orchestrator
from agentrl.orchestrator.metrics import SelectionBiasTracker, restore_selection_bias
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.check import check_environment
from agentrl.testing.plugin import SeededSimulation
from tests.markdown_pages import ROOT, python_of
from tests.sim.small_run import TASKS, Guess, SmallRun, config_for
from tests.support import user_functions
from tests.support.builders import make_past

pytestmark = pytest.mark.sim


class Tally:
    """A resource that is replayed."""

    def __init__(self) -> None:
        self.total = 0

    def add(self, number: int) -> int:
        self.total += number
        return self.total


class Retry(agentrl.Environment):
    """Six turns; two branches after the third."""

    seats = ("guesser",)
    branches = 2

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        tally = ctx.resource(Tally, level="replay")
        total = 0
        for number in range(6):
            turn = await agent.act(agentrl.user(f"turn {number}"))
            total = await tally.call("add", len(turn.text))
            if number == 2 and ctx.branches_left() == 2:
                agent.reward(float(await ctx.branch(2)), name="branch")
            await ctx.sleep(ctx.rng.random() * 0.3)
        agent.reward(float(total % 7))


def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [*b"." * (2 + request.seed % 38), STOP_TOKEN]


def retry_run(environment: type[agentrl.Environment] = Retry, **changes: Any) -> SmallRun:
    names = ("journal", "resumed_at", "lineage", "tasks")
    parts = {name: changes.pop(name) for name in names if name in changes}
    play = changes.pop("script", script)
    settings = {
        "steps": 4,
        "policies": {"guesser": {"step_size": 12, "max_staleness": 2, "lora": {"rank": 1}}},
        "sampling": {"max_tokens": 64, "max_turns": 32},
        **changes,
    }
    return SmallRun(
        environment=environment,
        script=play,
        config=config_for(**settings),
        engine_options={"seconds_per_token": 0.02},
        trainer_options={"step_seconds": 0.1, "publish_seconds": 0.05},
        **parts,
    )


def ends(run: SmallRun) -> dict[str, tuple[EpisodeSpec, EpisodeHeader]]:
    return {end.header.episode_id: (end.spec, end.header) for end in run.journal.of_kind(EpisodeEnd)}


def bodies(run: SmallRun, header: EpisodeHeader) -> list[Any]:
    return [entry.decode() for entry in run.journal.turn_log("0").read(header.episode_id, header.attempt)]


def versions_of(turns: Iterable[TurnEntry]) -> set[tuple[int, int]]:
    return {span.version[1:] for turn in turns for span in turn.tokens.spans}


def check_trees(run: SmallRun) -> int:
    """Check the trees of a run; returns the number of trees that were trained."""
    ended = ends(run)
    steps = {unit.episode_id: batch.step_id for batch in run.trainer.batches for unit in batch.units}
    trained = Counter(unit.episode_id for batch in run.trainer.batches for unit in batch.units)
    assert not trained or max(trained.values()) == 1
    for name, (spec, header) in ended.items():
        if not header.committed:
            continue
        entries = bodies(run, header)
        turns = [body for body in entries if isinstance(body, TurnEntry)]
        calls = [body for body in entries if isinstance(body, BranchEntry)]
        if spec.branched_from is not None:
            main_spec, main = ended[spec.branched_from]
            assert not calls
            assert dict(header.trajectories[0].named_rewards)["branch"] == int(name[-1])
            assert [turn.turn for turn in turns] == [3, 4, 5]
            assert (spec.group_id, spec.group_size) == (main_spec.group_id, main_spec.group_size)
            assert (header.turns, len(header.trajectories)) == (6, 1)
            if main.committed and spec.fork is not None and main.attempt == spec.fork.attempt:
                main_turns = [body for body in bodies(run, main) if isinstance(body, TurnEntry)]
                after = versions_of([*main_turns[3:], *turns])
                assert after == versions_of(main_turns[2:3]) or len(versions_of(main_turns[2:3])) > 1
        else:
            assert len(turns) == 6
            assert [len(call.children) for call in calls] == [2]
    trees: dict[str, set[int]] = {}
    for name, step in steps.items():
        trees.setdefault(ids.main_episode_id(name), set()).add(step)
    assert all(len(of_tree) == 1 for of_tree in trees.values()), "no tree is cut"
    return len(trees)


def test_trees_are_trained_whole_under_one_version(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = retry_run()
        await run.run()
        units = Counter("~" in unit.episode_id for batch in run.trainer.batches for unit in batch.units)
        assert units[True] == 2 * units[False]
        assert run.mean_lag("guesser") <= 2
        leases = run.orchestrator.dispatcher.leases
        assert leases is not None
        assert not leases.leased
        return check_trees(run)

    assert min(simulated_loop.run(main)) >= 4 * 4


def test_trees_survive_a_crash(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(1.5, 0.6)

    async def main() -> int:
        first = retry_run()
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        second = retry_run(journal=journal, resumed_at={"guesser": version})
        await second.run()
        check_trees(second)
        return sum(spec.branched_from is not None for spec in second.past.unfinished)

    assert sum(simulated_loop.run(main)) > 5, "trees were in flight"


def test_a_run_with_an_estimator_over_trees_trains_with_its_credit(simulated_loop: SeededSimulation) -> None:
    formula = f"{FilePath(user_functions.__file__).resolve()}:pieces_by_formula"

    async def main() -> None:
        credits = []
        for advantage in ("leave_one_out", formula):
            run = retry_run(steps=2, credit={"group_size": 4, "turn_credit": "to_go", "advantage": advantage})
            await run.run()
            credits.append({unit.episode_id: unit.credits for batch in run.trainer.batches for unit in batch.units})
        assert any(credit.advantage for own in credits[0].values() for credit in own)
        assert any("~" in name for name in credits[0])
        assert credits[0] == credits[1]

    simulated_loop.run(main, seeds=1)


PROBED_TURNS, PROBES = 3, 2


class Probing(agentrl.Environment):
    """Two probes before each of three turns."""

    seats = ("guesser",)
    probes = PROBES * PROBED_TURNS

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        tally = ctx.resource(Tally, level="replay")
        total = 0
        for number in range(PROBED_TURNS):
            agent.reward(float(await ctx.branch(PROBES, probe=True)), name="probe")
            turn = await agent.act(agentrl.user(f"turn {number}"))
            total = await tally.call("add", len(turn.text))
            await ctx.sleep(ctx.rng.random() * 0.3)
        agent.reward(float(total % 7))


def probing_run(directory: FilePath, **changes: Any) -> SmallRun:
    (text,) = [text for text in python_of(ROOT / "docs/reference/trees.md") if "def vine_ppo(" in text]
    mine = directory / "mine.py"
    mine.write_text(text, encoding="utf-8")
    settings = {
        "credit": {"group_size": 4, "advantage": f"{mine}:vine_ppo"},
        "policies": {"guesser": {"step_size": 4, "max_staleness": 1, "lora": {"rank": 1}}},
        **changes,
    }
    return retry_run(Probing, **settings)


def check_probes(*runs: SmallRun) -> int:
    """Check the probes of a run, and the advantages of the trained units; returns the number of probes."""
    run = runs[-1]
    ended = {name: end for name, end in ends(run).items() if end[1].committed}
    probes = {name for name, (spec, _) in ended.items() if spec.is_probe}
    drops = Counter((drop.episode_id, drop.reason) for drop in run.journal.of_kind(UnitDropped))
    assert {name for name, reason in drops if reason == "probe"} == probes
    assert set(drops.values()) <= {1}
    by_call: dict[tuple[str, int, str], list[float]] = {}
    for name in probes:
        spec, header = ended[name]
        fork = spec.fork
        assert fork is not None
        assert header.turns == PROBED_TURNS
        assert dict(header.trajectories[0].named_rewards)["probe"] == int(name[-1])
        by_call.setdefault((fork.episode_id, fork.attempt, fork.call_id), []).append(header.reward or 0.0)
    for unit in (unit for each in runs for batch in each.trainer.batches for unit in batch.units):
        assert "~" not in unit.episode_id
        _, header = ended[unit.episode_id]
        own = sorted(
            ((key, values) for key, values in by_call.items() if key[:2] == (unit.episode_id, unit.attempt)),
            key=lambda call: ids.episode_sort_key(call[0][2]),
        )
        assert [len(values) for _, values in own] == [PROBES] * PROBED_TURNS
        before = [sum(values) / len(values) for _, values in own]
        after = [*before[1:], header.reward or 0.0]
        expected = [later - earlier for earlier, later in zip(before, after, strict=True)]
        (credit,) = unit.credits
        assert list(credit.turn_advantages) == pytest.approx(expected, abs=1e-12)
    return len(probes)


def test_vine_ppo_trains_by_the_values_of_probes(simulated_loop: SeededSimulation, tmp_path: FilePath) -> None:
    async def main() -> int:
        run = probing_run(tmp_path, steps=3, evaluation={"tasks": 2})
        run.held_out = TASKS[:2]
        await run.run()
        ledger = run.orchestrator.buffer.ledger
        ledger.check()
        assert [len(batch.units) for batch in run.trainer.batches] == [4, 4, 4]
        assert ledger.units_consumed["guesser"] == 12
        assert ledger.dropped["probe"] >= 12 * PROBES * PROBED_TURNS
        assert run.mean_lag("guesser") <= 1
        leases = run.orchestrator.dispatcher.leases
        assert leases is not None
        assert not leases.leased
        assert not any(spec.branched_from for spec, header in ends(run).values() if header.purpose == "evaluate")
        return check_probes(run)

    assert min(simulated_loop.run(main, seeds=3)) >= 12 * PROBES * PROBED_TURNS


def test_probes_survive_a_crash(simulated_loop: SeededSimulation, tmp_path: FilePath) -> None:
    moments = itertools.count(1.2, 0.7)

    async def main() -> int:
        first = probing_run(tmp_path)
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        second = probing_run(tmp_path, journal=journal, resumed_at={"guesser": version})
        await second.run()
        second.orchestrator.buffer.ledger.check()
        check_probes(first, second)
        return sum(spec.is_probe for spec in second.past.unfinished)

    assert sum(simulated_loop.run(main, seeds=5)) > 5, "probes were in flight"


def test_a_probing_program_runs_again_from_every_entry(always_replay: Callable[..., None]) -> None:
    always_replay(Probing, tasks=TASKS[:1], episodes=1)


class Spawning(Probing):
    """Starts a child after its probes."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        await ctx.branch(1, probe=True)
        await agent.act(agentrl.user("first"))
        (child,) = ctx.spawn(Guess, {"digit": "1"})
        await child
        agent.reward(1.0)


def test_a_probe_starts_no_children(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = retry_run(Spawning, steps=1, policies={"guesser": {"step_size": 8, "lora": {"rank": 1}}})
        await run.run()
        reasons = Counter(header.drop_reason for spec, header in ends(run).values() if spec.is_probe)
        assert reasons.keys() <= {"branches", "run_ended"}
        assert reasons["branches"] >= 4
        assert not any(unit.episode_id.count("~") > 1 for batch in run.trainer.batches for unit in batch.units)

    simulated_loop.run(main, seeds=1)


def test_probes_and_declared_children_are_refused_together(simulated_loop: SeededSimulation) -> None:
    class Both(Probing):
        fan_out: ClassVar[dict[str, int]] = {"Guess": 1}

    async def main() -> None:
        with pytest.raises(ConfigError, match="Both declares probes = 6 and child episodes in fan_out"):
            await retry_run(Both, steps=1).run()

    simulated_loop.run(main, seeds=1)


class TooManyProbes(Probing):
    """More probes than declared."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.branch(4, probe=True)
        await ctx.branch(3, probe=True)


def test_evaluations_do_not_branch(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = retry_run(steps=1, evaluation={"tasks": 2})
        run.held_out = TASKS[:2]
        await run.run()
        evaluated = [entry.decode() for entry in run.journal.turn_log("0").read("v0", 0)]
        assert NondeterministicValueEntry("branches_left", 0) in evaluated
        assert not any(isinstance(body, BranchEntry) for body in evaluated)

    simulated_loop.run(main)


class Restarted(Retry):
    """Main episodes whose first attempt fails after they branched."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        await agent.act(agentrl.user("first"))
        number = await ctx.branch(2)
        turn = await agent.act(agentrl.user("second"))
        if not number and len(turn.text) % 3 == 0:
            raise RuntimeError("the episode fails")
        agent.reward(float(len(turn.text) % 7))


def test_a_restarted_main_episode_loses_its_branches(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = retry_run(Restarted, steps=2)
        await run.run()
        ended = ends(run)
        attempts = {name: header.attempt for name, (_, header) in ended.items() if header.committed}
        trained = {unit.episode_id for batch in run.trainer.batches for unit in batch.units}
        lost = {drop.episode_id for drop in run.journal.of_kind(UnitDropped) if drop.reason == "tree_lost"}
        for name, (spec, header) in ended.items():
            if spec.fork is not None and header.committed and name in trained | lost:
                assert (attempts.get(spec.fork.episode_id) == spec.fork.attempt) == (name in trained)
        return len(lost)

    assert min(simulated_loop.run(main, seeds=3)) > 0


class Pinned(Retry):
    """Branches with a resource that cannot be copied."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        tally = ctx.resource(Tally, level="pinned")
        await agent.act(agentrl.user("first"))
        await tally.call("add", 1)
        await ctx.branch(1)


class Served(Retry):
    """Tools whose server remembers earlier calls."""

    mcp_servers = (agentrl.MCPServer(command=["server"], stateful=True),)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.branch(1)


class TooMany(Retry):
    """More branches than declared."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.branch(1)
        await ctx.branch(2)


class TooEarly(Retry):
    """Branches before any turn."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.branch(1)


class Gathered(Retry):
    """Branches inside a coroutine of `gather`."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.gather(ctx.branch(1))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Pinned, "cannot copy resource r.1, which is pinned to its process"),
        (Served, "cannot copy server, which is pinned to its process.*Stateful MCP servers"),
        (TooMany, "declares branches = 2, but ctx.branch asked for 2 after 1 before"),
        (TooManyProbes, "declares probes = 6, but ctx.branch asked for 3 after 4 before: .* Set probes = 7"),
        (TooEarly, "before any turn; raise credit.group_size"),
        (Gathered, "inside ctx.gather"),
    ],
)
def test_branches_that_cannot_be_exact_are_refused_by_name(
    simulated_loop: SeededSimulation, environment: type[agentrl.Environment], message: str
) -> None:
    async def main() -> None:
        run = retry_run(environment, steps=1)
        with pytest.raises(CheckFailedError, match=message):
            await run.run()

    simulated_loop.run(main, seeds=1)


class Stopped(agentrl.Environment):
    """A quarter of the episodes with an even first turn continue."""

    seats = ("guesser",)
    roulette = True

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        turn = await agent.act(agentrl.user("first"))
        agent.reward(1.0, 0)
        if len(turn.text) % 2 == 0 and not await ctx.roulette(0.25):
            return
        await agent.act(agentrl.user("second"))
        agent.reward(1.0)


def test_survivors_of_roulette_weigh_more(simulated_loop: SeededSimulation) -> None:
    async def main() -> Counter[tuple[float, int, str]]:
        run = retry_run(Stopped, steps=1, evaluation={"tasks": 10})
        run.held_out = TASKS
        await run.run()
        return Counter((header.reward, header.turns, header.purpose) for _, header in ends(run).values())

    found = sum(simulated_loop.run(main, seeds=3), Counter[Any]())
    kinds = found.keys() - {(None, 0, "train")}  # cut at the end of the run
    assert kinds == {(2.0, 2, "train"), (5.0, 2, "train"), (1.0, 1, "train"), (2.0, 2, "evaluate")}
    stopped, survived = found[1.0, 1, "train"], found[5.0, 2, "train"]
    assert 0.1 < survived / (survived + stopped) < 0.45


def test_the_page_s_program_branches_and_stops_by_a_score(simulated_loop: SeededSimulation, tmp_path: FilePath) -> None:
    (text,) = [text for text in python_of(ROOT / "docs/how-to/branches.md") if "class Prove(" in text]
    mine = tmp_path / "mine.py"
    mine.write_text(text, encoding="utf-8")
    scope: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, str(mine), "exec"), scope)
    scorers = {"progress": {"function": f"{mine}:progress", "per": "request", "credit": "note"}}

    def letters(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        draw = random.Random(request.seed)
        return [*(draw.choice(b"abcdefgx") for _ in range(draw.randint(1, 5))), STOP_TOKEN]

    async def main() -> None:
        run = retry_run(
            scope["Prove"],
            scorers=scorers,
            steps=2,
            policies={"prover": {"step_size": 16, "max_staleness": 1, "lora": {"rank": 1}}},
            tasks=[agentrl.Task(id="t", data={"question": "Say x.", "answer": "x"})],
            script=letters,
        )
        await run.run()
        rewards: Counter[float | None] = Counter()
        branching = 0
        for spec, header in ends(run).values():
            if not header.committed:
                continue
            scores = [1.0]
            for body in bodies(run, header):
                if isinstance(body, TurnEntry) and "x" not in body.text:
                    scores.append(len(set(body.text.removesuffix("<|stop|>"))) / 10)
                if isinstance(body, BranchEntry):
                    branching += 1
                    assert spec.branched_from is None
                    assert scores[-1] < 0.5
            rewards[header.reward] += 1
            low = sum(score < 0.3 for score in scores)
            stopped = bool(header.reward == 0 and scores[-1] < 0.3)
            assert header.reward in (0.0, 4.0 ** (low - stopped)) or spec.branched_from is not None
        assert branching > 4
        assert rewards[0.0] > 4
        assert rewards[1.0] > 4
        assert rewards[4.0] > 0
        assert any("~" in unit.episode_id for batch in run.trainer.batches for unit in batch.units)

    simulated_loop.run(main, seeds=1)


def test_a_version_that_is_gone_costs_the_episode(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = retry_run(steps=2)

        def during(orchestrator: Orchestrator) -> None:
            versions, pin = orchestrator.versions, orchestrator.versions.pin

            async def lose_some(holder: str, weights: WeightsRef) -> None:
                if holder.startswith("tree of e") and int(holder.split()[-1][1:].partition(".")[0]) % 5 == 0:
                    raise EngineError("its files were deleted")
                await pin(holder, weights)

            versions.pin = lose_some  # type: ignore[method-assign]

        run.during = during
        await run.run()
        reasons = Counter(header.drop_reason for _, header in ends(run).values())
        check_trees(run)
        return reasons[VERSION_GONE]

    assert min(simulated_loop.run(main, seeds=2)) > 0


class Hesitant(Retry):
    """Waits before it branches, so that the version of its newest turn is often no longer the current one."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        for number in range(6):
            await agent.act(agentrl.user(f"turn {number}"))
            if number == 2 and ctx.branches_left() == 2:
                await ctx.sleep(ctx.rng.random() * 2)
                agent.reward(float(await ctx.branch(2)), name="branch")
            await ctx.sleep(ctx.rng.random() * 0.3)
        agent.reward(float(ctx.rng.random()))


def has_lost_files(version: PolicyVersion) -> bool:
    return (version.lineage + version.step) % 3 == 1


class LosesFiles(ScriptedEngine):
    """Loads versions slowly; the files of some are gone as soon as they are not current."""

    loads, refusals = 0, 0

    async def load(self, weights: WeightsRef) -> None:
        self.loads += 1
        await asyncio.sleep(random.Random(self.loads).random() * 0.5)
        if has_lost_files(weights.version) and not self._request.is_current(weights):
            LosesFiles.refusals += 1
            raise EngineError(f"weights {weights.version} refused: its files are gone")


def router_over_slow_replicas(*arguments: Any, **options: Any) -> EngineRouter:
    return EngineRouter([LosesFiles(*arguments, **options) for _ in range(2)])


@pytest.mark.parametrize("engine_class", [LosesFiles, router_over_slow_replicas])
def test_no_branch_is_dropped_for_a_version_whose_files_exist(
    simulated_loop: SeededSimulation, engine_class: Callable[..., Engine]
) -> None:
    moments = itertools.count(1.4, 0.37)

    def run(**parts: Any) -> SmallRun:
        evaluated = {"evaluation": {"tasks": 2, "every": 1}}
        run = retry_run(Hesitant, steps=4, **evaluated, **parts)
        run.engine_class, run.held_out = engine_class, TASKS[:2]
        return run

    async def main() -> int:
        runs = [run()]
        for lineage in (1, 2):
            journal = await runs[-1].cut_after(next(moments) % 5)
            steps = [row.version for row in journal.of_kind(StepRow)]
            version = max(steps, default=PolicyVersion("guesser", 0, 0))
            parts = {"journal": journal, "resumed_at": {"guesser": version}}
            runs.append(run(**parts, lineage=lineage))
        await runs[-1].run()
        ended = runs[-1].journal.of_kind(EpisodeEnd)
        for end in ended:
            if end.header.drop_reason == VERSION_GONE:
                (name,) = set(re.findall(r"guesser@(\d+)\.(\d+), which", end.detail))
                assert has_lost_files(PolicyVersion("guesser", *map(int, name))), end.detail
                assert end.header.purpose == "train"
        return sum(end.spec.fork is not None for end in ended)

    branches = sum(simulated_loop.run(main, seeds=10))
    assert branches > 100
    assert LosesFiles.refusals > 20


def test_a_late_call_of_a_superseded_attempt_leases_nothing(simulated_loop: SeededSimulation) -> None:
    async def main() -> None:
        run = retry_run(steps=1)
        await run.run()
        dispatcher = run.orchestrator.dispatcher
        branch = next(spec for spec, _ in ends(run).values() if spec.branched_from is not None)
        assert branch.fork is not None
        main_spec, _ = ends(run)[branch.fork.episode_id]
        host = DispatchingHost(dispatcher)
        await host.branch(main_spec, branch.fork, 2, {"guesser": PolicyVersion("guesser", 0, 0)})
        assert dispatcher.leases is not None
        assert not dispatcher.leases.leased

    simulated_loop.run(main, seeds=1)


def test_a_branching_program_runs_again_from_every_entry(always_replay: Callable[..., None]) -> None:
    always_replay(Retry, tasks=TASKS[:1], episodes=1)


class Pivot(agentrl.Environment):
    """DEEP-GRPO (arXiv:2602.14169): a turn of an episode that failed is sampled four more times."""

    seats = ("guesser",)
    branches = 4

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        tally = ctx.resource(Tally, level="replay")
        total = 0
        for number in range(4):
            turn = await agent.act(agentrl.user(f"turn {number}"))
            total = await tally.call("add", len(turn.text))
            await ctx.sleep(ctx.rng.random() * 0.3)
        agent.reward(float(total % 7 > 3))
        if total % 7 <= 3:
            depths = range(1, 5)
            await ctx.resample(4, at=ctx.rng.choices(depths, weights=[depth**0.1 for depth in depths])[0] - 1)


def check_pivots(*runs: SmallRun) -> int:
    """Check the resampled episodes of a run, and of those before it; returns the number that was trained."""
    run = runs[-1]
    ended = ends(run)
    credits = {
        unit.episode_id: unit.credits[0] for each in runs for batch in each.trainer.batches for unit in batch.units
    }
    resampled: dict[tuple[str, str], list[str]] = {}
    for name, (spec, header) in ended.items():
        if spec.fork is not None and header.committed:
            assert spec.fork.resample_weight == 1.0
            (before,) = spec.fork.turns
            turns = [body for body in bodies(run, header) if isinstance(body, TurnEntry)]
            assert [turn.turn for turn in turns] == [*range(before.turns, 4)]
            assert versions_of(turns) == {(spec.pins["guesser"].lineage, spec.pins["guesser"].step)}
            assert len([body for body in bodies(run, header) if isinstance(body, BranchEntry) and body.children]) == 0
            resampled.setdefault((spec.fork.episode_id, spec.fork.call_id), []).append(name)
    count = 0
    for (main, _), names in resampled.items():
        if len(names) < 4 or any(name not in credits for name in (main, *names)):
            continue
        rewards = {name: ended[name][1].reward or 0.0 for name in names}
        for name in names:
            others = [rewards[other] for other in names if other != name]
            assert credits[name].advantage == pytest.approx((rewards[name] - sum(others) / 3) / 4)
        roots = {
            name: header.reward or 0.0
            for name, (spec, header) in ended.items()
            if spec.fork is None and spec.group_id == ended[main][0].group_id
        }
        if len(roots) == 4 and all(ended[name][1].committed for name in roots):
            others = [reward for name, reward in roots.items() if name != main]
            assert credits[main].advantage == pytest.approx(roots[main] - sum(others) / 3)
            count += len(names)
    return count


def pivot_run(**changes: Any) -> SmallRun:
    return retry_run(Pivot, **changes)


def test_resampled_episodes_are_compared_with_each_other(simulated_loop: SeededSimulation) -> None:
    async def main() -> int:
        run = pivot_run(steps=5)
        await run.run()
        run.orchestrator.buffer.ledger.check()
        steps = {unit.episode_id: batch.step_id for batch in run.trainer.batches for unit in batch.units}
        assert all(steps[name] == steps[ids.main_episode_id(name)] for name in steps)
        return check_pivots(run)

    assert min(simulated_loop.run(main, seeds=4)) > 8


def test_the_page_s_program_samples_failed_turns_again(simulated_loop: SeededSimulation) -> None:
    (text,) = [text for text in python_of(ROOT / "docs/reference/trees.md") if "class DeepGrpo(" in text]
    scope: dict[str, Any] = {"__name__": __name__}
    exec(text, scope)

    def letters(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        return [random.Random(request.seed).choice(b"abcx"), STOP_TOKEN]

    async def main() -> None:
        run = retry_run(
            scope["DeepGrpo"],
            steps=3,
            policies={"solver": {"step_size": 16, "max_staleness": 1, "lora": {"rank": 1}}},
            tasks=[agentrl.Task(id="t", data={"question": "Say x.", "answer": "x"})],
            script=letters,
        )
        await run.run()
        mains = [header for spec, header in ends(run).values() if spec.fork is None and header.committed]
        resampled = Counter(spec.branched_from for spec, _ in ends(run).values() if spec.fork is not None)
        failed = [header.episode_id for header in mains if header.reward == 0.0]
        assert len(failed) > 4
        assert all(resampled[name] == 4 for name in failed)
        pieces = [unit for batch in run.trainer.batches for unit in batch.units if "~" in unit.episode_id]
        assert {abs(unit.credits[0].advantage) for unit in pieces} - {0.0}

    simulated_loop.run(main, seeds=1)


def test_resampled_episodes_inherit_late_scores_of_the_turns_before() -> None:
    point = ForkPoint(
        journal=".", partition="turns-0.db", episode_id="e0", attempt=0, call_id="r#1", branch=1, resample_weight=1.0,
        turns=(AgentTurns("guesser", 0, 1),),
    )  # fmt: skip
    calls = ["begin", "r#0", "r#1", "guesser.0.0?slow", "guesser.0.1?slow", "guesser.0?whole", "r#2"]
    begin = encode_body(BeginEntry("e", "", "t", {}, 0, {}, "train", "g0", 4, None))
    entries = [JournalEntry("e0", 0, call, b"", begin if call == "begin" else b"") for call in calls]
    prefix = read_fork_prefix("journal", point, lambda journal, at: entries)
    assert [entry.call_id for entry in prefix] == ["begin", "r#0", "guesser.0.0?slow"]


def test_a_resumed_run_counts_main_episodes_and_no_probes(simulated_loop: SeededSimulation, tmp_path: FilePath) -> None:
    async def main() -> None:
        run = probing_run(tmp_path)
        await run.run()
        found = ends(run)
        members = [end for end in found.values() if end[1].committed]
        mains = [end for end in members if end[0].branched_from is None]
        assert len(mains) < len(members)
        role = SeatRole("guesser", mains[0][0].environment, "guesser")
        means = [reward_history_from_journal(ended, ()).mean(role, None) for ended in (members, mains)]
        assert means[0] == means[1] is not None
        trackers = [SelectionBiasTracker(4), SelectionBiasTracker(4)]
        for tracker, ended in zip(trackers, (members, mains), strict=True):
            restore_selection_bias({"guesser": tracker}, make_past(ended))
        assert trackers[0].metrics() == trackers[1].metrics()

    simulated_loop.run(main, seeds=1)


def test_resampled_episodes_survive_a_crash(simulated_loop: SeededSimulation) -> None:
    moments = itertools.count(1.2, 0.7)

    async def main() -> int:
        first = pivot_run()
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        second = pivot_run(journal=journal, resumed_at={"guesser": version})
        await second.run()
        second.orchestrator.buffer.ledger.check()
        check_pivots(first, second)
        return sum(spec.fork is not None for spec in second.past.unfinished)

    assert sum(simulated_loop.run(main, seeds=5)) > 5, "resampled episodes were in flight"


def test_a_resampling_program_runs_again_from_every_entry(always_replay: Callable[..., None]) -> None:
    always_replay(Pivot, tasks=TASKS[:1], episodes=1)


class ResamplesTwice(Pivot):
    """The same turn in two calls."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.resample(2, at=0)
        await ctx.resample(2, at=-1)


class ResamplesMore(Pivot):
    """More episodes than declared."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.resample(5, at=0)


class ResamplesGathered(Pivot):
    """A turn inside a coroutine of `gather`."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.gather(ctx.agent("guesser").act(agentrl.user("first")))
        await ctx.resample(2, at=0)


class ResamplesOnce(Pivot):
    """One episode, with which none can be compared."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.resample(1, at=0)


class ResamplesEarly(Pivot):
    """Before any turn."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.resample(2, at=0)


class ResamplesNothing(Pivot):
    """A turn that does not exist."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.resample(2, at=1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (ResamplesTwice, "turn 0 was resampled before"),
        (ResamplesMore, "branches = 4, but ctx.resample asked for 5"),
        (ResamplesGathered, "turn 0 was taken inside ctx.gather"),
    ],
)
def test_turns_that_cannot_be_resampled_are_refused_by_name(
    simulated_loop: SeededSimulation, environment: type[agentrl.Environment], message: str
) -> None:
    async def main() -> None:
        with pytest.raises(CheckFailedError, match=message):
            await retry_run(environment, steps=1).run()

    simulated_loop.run(main, seeds=1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (ResamplesOnce, "2 or more"),
        (ResamplesNothing, "one of the episode's 1 turn"),
        (ResamplesEarly, "one of the episode's 0 turns"),
    ],
)
def test_wrong_arguments_of_resample_end_the_run(
    simulated_loop: SeededSimulation, environment: type[agentrl.Environment], message: str
) -> None:
    async def main() -> None:
        with pytest.raises(EnvironmentDefinitionError, match=message):
            await retry_run(environment, steps=1).run()

    simulated_loop.run(main, seeds=1)


@pytest.mark.parametrize("with_probes", [False, True])
def test_a_deterministic_run_trains_the_same_trees_after_a_kill(
    simulated_loop: SeededSimulation, tmp_path: FilePath, *, with_probes: bool
) -> None:
    moments = itertools.count(2.5, 0.6)

    def trained(*runs: SmallRun) -> list[Any]:
        batches = {batch.step_id: batch for run in runs for batch in run.trainer.batches}
        return [[(unit.episode_id, unit.credits) for unit in batches[step].units] for step in sorted(batches)]

    def new_run(**resumed: Any) -> SmallRun:
        return (partial(probing_run, tmp_path) if with_probes else retry_run)(steps=3, deterministic=True, **resumed)

    async def main() -> list[Any]:
        first = new_run()
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        second = new_run(journal=journal, resumed_at={"guesser": version})
        await second.run()
        return trained(first, second)

    first, *others = simulated_loop.run(main)
    assert len(first) == 3
    assert all(other == first for other in others)


# --- after roulette ---------------------------------------------------------------------------------------------------


class StopsAndGoesOn(agentrl.Environment):
    """Goes on after it was stopped, as the task says."""

    seats = ("guesser",)
    branches = 4
    roulette = True

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        await agent.act(agentrl.user("first"))
        agent.reward(1.0, 0)
        if await ctx.roulette(0.05):
            return
        match ctx.task.data["then"]:
            case "act()":
                await agent.act(agentrl.user("second"))
            case "reward()":
                agent.reward(1.0, name="late")
            case "ctx.score()":
                await ctx.score("noted", agent)
            case "ctx.spawn()":
                ctx.spawn(Guess, {"digit": "1"})
            case "ctx.branch()":
                await ctx.branch(2)
            case "ctx.resample()":
                await ctx.resample(2, at=0)
            case "ctx.roulette()":
                await ctx.roulette(0.5)
            case "ctx.endpoint()":
                async with ctx.endpoint():
                    pass


@pytest.mark.parametrize(
    "call",
    [
        *("act()", "reward()", "ctx.score()", "ctx.spawn()"),
        *("ctx.branch()", "ctx.resample()", "ctx.roulette()", "ctx.endpoint()"),
    ],
)
def test_a_stopped_episode_is_over(simulated_loop: SeededSimulation, call: str) -> None:
    async def main() -> None:
        run = retry_run(StopsAndGoesOn, steps=1, tasks=[agentrl.Task(id="t", data={"then": call})])
        message = rf"{re.escape(call)} in .* ctx\.roulette returned False before, which stopped the episode"
        with pytest.raises(EnvironmentDefinitionError, match=message):
            await run.run()

    simulated_loop.run(main, seeds=1)


class Undeclared(Stopped):
    """Calls what it does not declare."""

    roulette = False


class InGather(Stopped):
    """Calls it beside another coroutine."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        await ctx.gather(ctx.roulette(0.5))


class SpawnsAfter(Stopped):
    """Starts a child after it survived."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        await ctx.agent("guesser").act(agentrl.user("first"))
        if await ctx.roulette(0.9):
            ctx.spawn(Guess, {"digit": "1"})


class ServesAfter(Stopped):
    """Serves an external agent after it survived."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        if await ctx.roulette(0.9):
            async with ctx.endpoint():
                pass


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Undeclared, "Undeclared calls ctx.roulette and does not declare it: set roulette = True"),
        (InGather, "inside ctx.gather"),
        (SpawnsAfter, "ctx.spawn.* after ctx.roulette, whose survivors count for more"),
        (ServesAfter, "seat 'guesser' acts for the first time after ctx.roulette"),
    ],
)
def test_roulette_where_it_would_be_biased_ends_the_run(
    simulated_loop: SeededSimulation, environment: type[agentrl.Environment], message: str
) -> None:
    async def main() -> None:
        with pytest.raises(EnvironmentDefinitionError, match=message):
            await retry_run(environment, steps=1).run()

    simulated_loop.run(main, seeds=1)


def test_the_environment_check_finds_an_undeclared_roulette() -> None:
    report = check_environment(Undeclared, tasks=[*TASKS])
    assert any("Undeclared calls ctx.roulette" in finding for finding in report.findings)


class StopsAndBranches(agentrl.Environment):
    """Roulette before and behind a branch point, and a cleanup after it."""

    seats = ("guesser",)
    branches = 2
    roulette = True

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("guesser")
        for number in range(3):
            turn = await agent.act(agentrl.user(f"turn {number}"))
            agent.reward(float(len(turn.text) % 3), number)
            if not await ctx.roulette(0.6):
                await ctx.sleep(0.1)
                return
            if number == 0:
                await ctx.branch(2)
        agent.reward(1.0)


def test_a_program_with_roulette_runs_again_from_every_entry(always_replay: Callable[..., None]) -> None:
    always_replay(StopsAndBranches, tasks=TASKS[:3], episodes=3)
    always_replay(Stopped, tasks=TASKS[:3], episodes=3)


def stopping_run(directory: FilePath, **changes: Any) -> SmallRun:
    mine = directory / "mine.py"
    mine.write_text("import agentrl\n\n@agentrl.scorer\ndef one(scored):\n    return 1.0\n", encoding="utf-8")
    return retry_run(StopsAndBranches, scorers={"whole": {"function": f"{mine}:one", "per": "episode"}}, **changes)


def check_stopped(run: SmallRun) -> Counter[float]:
    """Check the rewards of a run's episodes against their entries; returns how often each weight was met."""
    weights = Counter[float]()
    for end in run.journal.of_kind(EpisodeEnd):
        spec, header = end.spec, end.header
        if not header.committed:
            continue
        entries = bodies(run, header)
        if spec.fork is not None:
            entries = [entry.decode() for entry in run.journal.turn_log("0").prefix(spec.fork)] + entries
        weight, expected = 1.0, 0.0
        for body in entries:
            match body:
                case TurnEntry():
                    expected += weight * (len(body.text.removesuffix("<|stop|>")) % 3)
                case NondeterministicValueEntry(kind="roulette", value=factor):
                    weight *= factor
        expected += 2.0 * weight  # the last reward, and the score of the whole conversation
        assert header.reward == pytest.approx(expected)
        assert sum(isinstance(body, ScoreEntry) for body in entries) == bool(weight), "a stopped one is not scored"
        counted = {name: value for name, value in end.metrics.items() if name.startswith("roulette/")}
        assert counted == ({"roulette/weight": pytest.approx(weight)} if weight else {"roulette/stopped": 1.0})
        weights[weight] += 1
    return weights


def test_a_stopped_conversation_has_no_whole_score_through_branches(
    simulated_loop: SeededSimulation, tmp_path: FilePath
) -> None:
    async def main() -> Counter[float]:
        run = stopping_run(tmp_path, steps=2)
        await run.run()
        return check_stopped(run)

    weights = sum(simulated_loop.run(main, seeds=2), Counter[float]())
    assert weights[0.0] > 4
    assert sum(count for weight, count in weights.items() if weight > 2) > 4


def test_stopped_episodes_stay_stopped_after_a_crash(simulated_loop: SeededSimulation, tmp_path: FilePath) -> None:
    moments = itertools.count(0.9, 0.5)

    async def main() -> Counter[float]:
        first = stopping_run(
            tmp_path,
        )
        journal = await first.cut_after(next(moments))
        version = PolicyVersion("guesser", 0, len(journal.of_kind(StepRow)))
        second = stopping_run(tmp_path, journal=journal, resumed_at={"guesser": version})
        await second.run()
        return check_stopped(second)

    assert min(found[0.0] for found in simulated_loop.run(main, seeds=4)) > 4
