"""Runs with a known bottleneck: the one shown is that one at every refresh after the third turn."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

import agentrl
from agentrl.core.holds import HoldKind
from agentrl.core.ports import GenerateRequest, NewTokensCallback
from agentrl.core.records import PolicyVersion, Task
from agentrl.core.tokens import Completion
from agentrl.engines.scripted import ScriptedEngine, ScriptedSession
from agentrl.observe.bottleneck import PARTS, TURNS, BottleneckWatch
from agentrl.observe.progress import LineDisplay
from agentrl.observe.run_directory import RunDirectory
from agentrl.observe.run_observer import RunObserver
from agentrl.observe.run_screen import render_run_screen
from agentrl.observe.run_state import RunDisplaySettings, RunSnapshot, RunState, read_run_snapshot
from agentrl.orchestrator.loop import Orchestrator
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.testing.virtual_time import simulate
from tests.sim.small_run import TASKS, SmallRun, config_for

pytestmark = pytest.mark.sim

FUNCTIONS = Path(__file__).parents[1] / "support" / "score_functions.py"


class ThreeTurns(agentrl.Environment):
    """Three turns, and a reward that differs within groups."""

    seats = ("guesser",)
    pause_s = 0.0

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        guesser = ctx.agent("guesser")
        for _ in range(3):
            await guesser.act(agentrl.user("Guess a digit."))
            if self.pause_s:
                await ctx.sleep(self.pause_s)
        guesser.reward(ctx.rng.random())


class SlowTools(ThreeTurns):
    """Each turn is followed by ten seconds outside the engine."""

    pause_s = 10.0


class LimitedEngine(ScriptedEngine):
    """Samples so many turns at once; further calls wait, as in a real engine."""

    def __init__(self, script: Any, *, places: int = 0, kv_tokens: int | None = None, **options: Any) -> None:
        super().__init__(script, **options)
        self.capabilities = replace(self.capabilities, places=places, kv_tokens=kv_tokens)
        self.free = asyncio.Semaphore(places or 1 << 20)

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> Any:
        return LimitedSession(self, super().open(session_id, policy, pin=pin))


class LimitedSession:
    """A conversation of `LimitedEngine`."""

    def __init__(self, engine: LimitedEngine, session: ScriptedSession) -> None:
        self._engine, self._session = engine, session

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        async with self._engine.free:
            return await self._session.generate(request, on_delta)

    async def wait_for_room(self) -> None:
        await self._session.wait_for_room()

    def hold(self, version: PolicyVersion) -> None:
        self._session.hold(version)

    def close(self) -> None:
        self._session.close()


class SlowCheckpoints:
    """Takes eight seconds for each checkpoint."""

    async def write(self, *parts: object) -> None:
        await asyncio.sleep(8.0)

    def resumable(self) -> list[object]:
        return []


def one_token(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    return [ord("1"), STOP_TOKEN]


def one_in_eight_is_long(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """The eighth episode of eight thinks for a minute in each turn, the others hardly."""
    episode = int(request.request_id.split(".")[0].removeprefix("e"))
    return [*b"." * (1200 if episode % 8 == 7 else 1), STOP_TOKEN]


def with_slow_checkpoints(orchestrator: Orchestrator) -> None:
    orchestrator.checkpoints = SlowCheckpoints()  # type: ignore[assignment]


def loses_its_engine(orchestrator: Orchestrator) -> None:
    engine = orchestrator.versions.engine
    assert isinstance(engine, ScriptedEngine)

    def lose() -> None:
        engine.lose()
        asyncio.get_running_loop().call_later(6.0, engine.restore)

    for number in range(30):
        asyncio.get_running_loop().call_later(0.2 + 10.0 * number, lose)


@dataclass(frozen=True, kw_only=True)
class Planted:
    """A run with one slow part."""

    part: str
    """Key of `PARTS`."""
    first: tuple[str, float] = ("", 0.0)
    """Another part that was the slowest so far, until these seconds."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    environment: type[agentrl.Environment] = ThreeTurns
    script: Callable[[GenerateRequest, str, PolicyVersion], list[int]] = one_token
    call_s: float = 0.01
    token_s: float = 0.0
    places: int = 0
    kv_tokens: int | None = None
    tasks: Sequence[Task] = tuple(TASKS)
    step_s: float = 0.1
    publish_s: float = 0.0
    during: Callable[[Orchestrator], None] = lambda orchestrator: None


RUNS = {
    "ten-second turns": Planted(part="engine", call_s=10.0),
    "slow turns, synchronous": Planted(part="engine", call_s=10.0, changes={"max_staleness": 0}),
    "a full engine": Planted(part="engine", places=4, call_s=1.0),
    "one slow turn at a time": Planted(part="engine", places=1, call_s=10.0, changes={"steps": 2}),
    "a slow trainer": Planted(part="training", step_s=20.0),
    "a slow trainer, synchronous": Planted(part="training", step_s=20.0, changes={"max_staleness": 0}),
    "a slow trainer and ten-second turns": Planted(part="training", first=("engine", 31.0), call_s=10.0, step_s=99),
    "slow tools": Planted(part="environment", environment=SlowTools),
    "slow tools after slow turns": Planted(
        part="environment", environment=SlowTools, call_s=2.0, first=("engine", 4.0)
    ),
    "a slow judge": Planted(
        part="scorer",
        changes={
            "scorers": {"slow": {"function": f"{FUNCTIONS}:slow", "per": "episode", "options": {"seconds": 10.0}}}
        },
    ),
    "a slow judge of groups": Planted(
        part="scorer",
        changes={
            "scorers": {
                "slow": {"function": f"{FUNCTIONS}:slowly_ranked", "per": "group", "options": {"seconds": 10.0}}
            }
        },
    ),
    "too few episodes at once": Planted(part="max_in_flight", places=64, call_s=2.0, changes={"max_in_flight": 4}),
    "too few episodes with ten-second turns": Planted(
        part="max_in_flight", places=64, call_s=10.0, changes={"max_in_flight": 4}
    ),
    "max_staleness = 0": Planted(
        part="alternating", first=("engine", 13.0), call_s=3.0, step_s=9.0, changes={"max_staleness": 0}
    ),
    "little memory": Planted(part="memory", call_s=1.0, kv_tokens=120),
    "little memory and ten-second turns": Planted(part="memory", call_s=10.0, kv_tokens=120, changes={"steps": 2}),
    "slow publishing": Planted(part="publishing", publish_s=20.0),
    "slow checkpoints": Planted(
        part="checkpoint",
        changes={"checkpoint": {"every": 1, "versions": 0}, "steps": 6},
        during=with_slow_checkpoints,
    ),
    "stragglers": Planted(part="long", changes={"steps": 8}, script=one_in_eight_is_long, token_s=0.02, call_s=0.0),
    "stragglers, synchronous": Planted(
        part="long", script=one_in_eight_is_long, token_s=0.02, call_s=0.0, changes={"max_staleness": 0}
    ),
    "a lost engine": Planted(part="lost_engine", call_s=0.1, changes={"steps": 16}, during=loses_its_engine),
}


def looked_at(
    planted: Planted, directory: Path, seed: int = 0
) -> tuple[list[tuple[RunSnapshot, float, float]], RunObserver]:
    """Return the snapshots of the training phase with the turns that had ended and the seconds of training, and the
    observer after the end."""
    refreshes: list[tuple[RunSnapshot, float, float]] = []
    settings = RunDisplaySettings(steps=4, max_staleness={"guesser": 1})

    async def main() -> RunObserver:
        run = SmallRun(
            config=config_for(**planted.changes),
            environment=planted.environment,
            script=planted.script,
            tasks=planted.tasks,
            engine_class=LimitedEngine,
            engine_options={
                "seconds_per_call": planted.call_s,
                "seconds_per_token": planted.token_s,
                "places": planted.places,
                "kv_tokens": planted.kv_tokens,
            },
            trainer_options={"step_seconds": planted.step_s, "publish_seconds": planted.publish_s},
        )
        with RunObserver(RunDirectory.create(directory, "{}"), plan=settings, quiet=True) as observer:
            run.seen = observer  # type: ignore[assignment]

            def during(orchestrator: Orchestrator) -> None:
                def status() -> RunSnapshot:
                    snapshot, totals = orchestrator.status(), orchestrator.activity_totals()
                    if snapshot.phase == "training":
                        refreshes.append((snapshot, totals.get(TURNS, 0.0), totals.get("run", 0.0)))
                    return snapshot

                planted.during(orchestrator)
                observer.watch(status)

            run.during = during
            await run.run()
            observer.finish({})
            return observer

    return refreshes, simulate(main, seed=seed)


def named_part(line: str) -> str:
    return next((part for part, name in PARTS.items() if line.startswith(f"{name}: ")), line)


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("max_in_flight", {"max_in_flight": 4, "max_staleness": 8}),
        ("max_staleness", {"max_staleness": 0}),
    ],
)
def test_the_time_that_a_rule_holds_groups_back_counts_under_the_rule(rule: str, changes: dict[str, Any]) -> None:
    async def main() -> Mapping[str, float]:
        run = SmallRun(config=config_for(steps=4, **changes), environment=SlowTools, tasks=TASKS[:1])
        await run.run()
        return run.orchestrator.activity_totals()

    totals = simulate(main, seed=0)
    held = {kind: totals.get(kind, 0.0) for kind in get_args(HoldKind) if kind != "last_steps"}
    assert max(held, key=held.__getitem__) == rule, held
    assert held[rule] > 10.0


def test_the_time_of_a_step_is_estimated_from_the_first_turns_on(tmp_path: Path) -> None:
    planted = Planted(part="engine", places=4, call_s=10.0, changes={"step_size": 16, "max_staleness": 0})
    refreshes, _ = looked_at(planted, tmp_path / "run")
    told = {seconds: snapshot.pace for snapshot, _, seconds in refreshes}
    assert told[5.0] == "", "no turn has ended"
    assert told[11.0] == "so far 0 of 16 episodes", "the turns of the others are unknown"
    in_between = {seconds: pace for seconds, pace in told.items() if 101 < seconds < 120}
    assert len(in_between) > 15
    estimates = {pace.partition(";")[0] for pace in in_between.values()}
    allowed = {"about 2 min to sample a step", *(f"about {seconds} s to sample a step" for seconds in range(105, 120))}
    assert estimates <= allowed, "twelve rounds of 10 s, of which the current one is half over"
    assert in_between[111.0].endswith("; so far 12 of 16 episodes")
    assert not any("16 of 16" in pace for pace in told.values())
    assert "16 episodes sampled; the trainer works on the step" in told.values()
    assert told[max(told)] == "", "the metrics of the steps say it then"


def test_a_first_step_that_is_published_waits_for_no_episodes(tmp_path: Path) -> None:
    planted = Planted(
        part="engine", call_s=1.0, step_s=20.0, publish_s=30.0, changes={"step_size": 16, "max_staleness": 0}
    )
    refreshes, _ = looked_at(planted, tmp_path / "run")
    told = [(snapshot.pace, snapshot.waits) for snapshot, _, _ in refreshes if snapshot.pace]
    works = [at for at, (pace, _) in enumerate(told) if pace.endswith("the trainer works on the step")]
    assert len(works) >= 45, "training and publishing take 50 s"
    assert works == [*range(works[0], len(told))], "no other message follows"
    assert all("trainer works on step 1" in waits for _, waits in told[works[1] :])


def test_no_time_is_estimated_from_the_few_episodes_that_end_first(tmp_path: Path) -> None:
    planted = Planted(part="engine", places=4, call_s=10.0, changes={"step_size": 32, "max_staleness": 0})
    refreshes, _ = looked_at(planted, tmp_path / "run")
    told = [snapshot.pace for snapshot, _, _ in refreshes]
    ended = [int(found[1]) for pace in told if (found := re.search(r"about .*so far (\d+) of 32", pace))]
    assert ended
    assert min(ended) >= 16
    assert "so far 12 of 32 episodes" in told


def test_turns_that_wait_for_the_engine_are_not_called_sampled(tmp_path: Path) -> None:
    planted = Planted(part="engine", places=4, call_s=10.0, changes={"step_size": 16, "max_staleness": 0})
    refreshes, _ = looked_at(planted, tmp_path / "run")
    told = {snapshot.bottleneck for snapshot, _, _ in refreshes}
    sampled = [line for line in told if (found := re.search("samples ([0-9.]+) turns", line)) and float(found[1]) > 4]
    assert not sampled
    assert any("16 turns are in it at once, of which it samples 4 while the others wait" in line for line in told)


def test_lines_tell_the_pace_of_the_first_step_now_and_then() -> None:
    stream = io.StringIO()
    state = RunState(plan=RunDisplaySettings(steps=4))
    display = LineDisplay(state, stream)
    for second in range(100):
        pace = f"about {second} s a step; so far 1 of 2 episodes" if second > 3 else ""
        state.status = RunSnapshot(phase="training", pace=pace, bottleneck="the engine: …", seconds=float(second))
        display.show()
    assert stream.getvalue().splitlines() == [
        f"first step: about {second} s a step; so far 1 of 2 episodes  (the engine: …)"
        for second in (4, 34, 94)  # without news, more rarely
    ]


def wrong_refreshes(planted: Planted, directory: Path) -> tuple[list[tuple[str, float]], RunObserver]:
    """Return the lines after the third turn that name another part, with their seconds, and the observer."""
    refreshes, observer = looked_at(planted, directory)
    shown = [(snapshot.bottleneck, seconds) for snapshot, turns, seconds in refreshes if turns >= 3]
    assert len(shown) >= 8, "too short to say anything"
    first, until_s = planted.first
    wrong = [
        (line, seconds) for line, seconds in shown if named_part(line) != (first if seconds < until_s else planted.part)
    ]
    return wrong, observer


@pytest.mark.parametrize("name", RUNS)
def test_the_bottleneck_is_right_at_every_refresh(name: str, tmp_path: Path) -> None:
    planted = RUNS[name]
    wrong, observer = wrong_refreshes(planted, tmp_path / "run")
    assert not wrong
    last = observer.state.status
    assert last is not None
    assert named_part(last.bottleneck) == planted.part
    assert "whole run" in last.bottleneck
    assert read_run_snapshot(tmp_path / "run") == last
    screen = io.StringIO()
    Console(file=screen, width=100).print(render_run_screen(observer.state))
    assert f"bottleneck  {PARTS[planted.part]}: " in screen.getvalue()


def test_nothing_is_concluded_before_a_step_or_from_what_follows_training() -> None:
    reading: dict[str, float] = {}
    watch = BottleneckWatch(lambda: dict(reading), lambda: {"guesser": 1}, places=8)
    watch.start()
    watch.step_begins()
    reading.update({"run": 3.0, "episodes/any": 3.0, "step/any": 3.0})
    assert watch.recent() is None, "the first step is in progress, so sampling has not had to wait for it"
    watch.step_ended()
    assert (found := watch.recent()) is not None
    assert found.part == "none"

    reading.update({"run": 13.0, "episodes/any": 13.0, "episodes": 13.0, "engine": 13.0, "engine/any": 13.0})
    watch.stop()
    reading["step/any"] = 13.0  # the last checkpoint
    assert (found := watch.whole()) is not None
    assert found.part == "engine"

    watch.start()
    reading["run"] += 1e-4
    watch.stop()
    reading.update({"episodes/any": 19.0, "step/any": 19.0})  # the last checkpoint and evaluation
    assert watch.whole() is None
