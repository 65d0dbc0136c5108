"""The law of the calls: whatever is repeated of an episode comes to what the undisturbed episode came to.

A program is data, drawn from a seed: turns, demonstrations, tools, effects, resources of all levels, children,
branches, strands, timeouts, errors and limits. It is killed at every entry and resumed, forked at every turn, branched
and replayed. What it saw on `self`, its entries, rewards, metrics and end must be those of the recording.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace as replace_body

import agentrl
from agentrl.core.errors import EffectError, EngineError, EpisodeError
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import AgentTurns, EpisodeHeader, EpisodeSpec, ForkPoint, PolicyVersion, SeatBinding, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.entries import (
    BranchEntry,
    ChildResultEntry,
    EffectEntry,
    JournalEntry,
    ResourceCallEntry,
    ToolEntry,
    TurnEntry,
    UnansweredEntry,
    encode_body,
)
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.port import EpisodeEnd
from agentrl.rollout.calls.journal import current_strand
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.replay import Replay, ReplayHost
from agentrl.rollout.runner import EpisodeRunner
from agentrl.testing.execution import PARTITION, plain_rollout_settings, wire_dispatcher
from agentrl.testing.virtual_time import simulate
from tests.support.random_programs import Interpreter

SEEDS = range(int(os.environ.get("AGENTRL_LAW_SEEDS", "40")))


class Box:
    """A resource that takes its time."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    async def put(self, value: int, pause: float) -> list[float]:
        self.seen.append(value)
        await asyncio.sleep(pause)
        self.seen.append(-value)
        if value == 13:
            raise KeyError(value)
        return list(self.seen)

    def get_state(self) -> list[float]:
        return self.seen

    def set_state(self, state: list[float]) -> None:
        self.seen = list(state)


class Child(agentrl.Environment):
    """One turn."""

    seats = ("leaf",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        turn = await ctx.agent("leaf").act(agentrl.user(str(ctx.task.data)))
        ctx.agent("leaf").reward(float(len(turn.text)))


class Program(Interpreter):
    """Interprets `task.data["program"]`; writes down what it sees, and asks what depends on that."""

    seats = ("agent", "other")
    branches = 2
    fan_out: ClassVar[dict[str, int]] = {"Child": 3}
    truncated_reward = "keep"
    last: ClassVar[Program]
    performed: ClassVar[list[str]] = []
    wrong: ClassVar[set[str]] = set()
    """Errors that the program should not have seen."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        Program.last = self
        self.ctx = ctx
        self.log: list[str] = []
        self.aside: dict[str, list[float]] = {}
        self.boxes: dict[tuple[str, str], Any] = {}
        try:
            await self.ops(ctx.task.data["program"])
        finally:
            ctx.agent("agent").reward(float(len(self.log)))

    async def reply(self, text: str) -> None:
        self.saw((await self.agent("agent").act(agentrl.user("repeat"), reply=text)).text)

    async def long(self, seat: str) -> None:
        self.saw((await self.agent(seat).act(agentrl.user("long" * 500))).text)

    async def insist(self, seat: str) -> None:
        """Swallow every error, and ask again."""
        errors: list[str] = []
        for _ in range(9):
            try:
                await self.act(seat)
            except Exception as error:
                self.check(error)
                errors.append(type(error).__name__)
                if errors[-2:] == ["LimitReachedError"] * 2:
                    self.wrong.add("LimitReachedError twice")
                    raise
            else:
                errors.clear()

    async def effect(self, guarantee: str, pause: float, fails: bool) -> None:
        name = f"{guarantee} {len(self.log)}"

        async def perform() -> str:
            await asyncio.sleep(pause)
            Program.performed.append(name)
            if fails:
                raise LookupError(name)
            return name

        self.saw(await self.ctx.effect(name, perform, guarantee=guarantee, reconcile=lambda: (False, None)))

    async def tool(self, external: bool, pause: float, program: list[Any]) -> None:
        aside = self.aside.setdefault(current_strand().path, [])
        limit_s = 0.5 if external or not program else 30.0  # a resumed tool runs its recorded calls in no time

        async def call() -> str:
            if not external:
                self.saw("tool begins")
            if pause:  # between two of its own waits, code may only touch what other strands do not
                await asyncio.sleep(pause)
                if not external:
                    aside.append(pause)
            await self.ops(program)
            return f"{len(self.log) if external else ''}tool"

        self.saw(await self.ctx.call_tool("tool", {"n": len(self.log)}, call, external=external, timeout_s=limit_s))

    async def box(self, level: str, value: int, pause: float) -> None:
        key = current_strand().path, level
        if key not in self.boxes:
            self.boxes[key] = self.ctx.resource(Box, level=level)
        self.saw(await self.boxes[key].call("put", value, pause))

    async def remember(self) -> None:
        self.saw(tuple(await self.ctx.remember("key", f"{len(self.log) % 3}")))

    async def spawn(self, n: int, waits: bool) -> None:
        children = self.ctx.spawn(Child, {"n": len(self.log)}, n=n)
        if waits:
            self.saw([(await child).rewards for child in children])

    async def branch(self, n: int) -> None:
        if self.ctx.branches_left() >= n:
            self.saw(await self.ctx.branch(n))

    def check(self, error: Exception) -> None:
        if not isinstance(error, ArithmeticError | EffectError | agentrl.LimitReachedError):
            self.wrong.add(f"{type(error).__name__} ({getattr(error, 'reason', error)})")

    async def catch(self, program: list[Any]) -> None:
        try:
            await self.ops(program)
        except Exception as error:  # noqa: BLE001 - as retry loops do
            self.check(error)
            self.saw(type(error).__name__)


PAUSES = [0.0, 0.1, 0.3, 0.7]


def draw_leaf(rng: random.Random) -> list[Any]:
    pause = rng.choice(PAUSES)
    return rng.choice(
        [
            ["act", "agent"],
            ["act", "other"],
            ["act", "agent"],
            ["reply", rng.choice(["yes", "z" * 400])],
            ["long", rng.choice(["agent", "other"])],
            ["effect", rng.choice(["read", "idempotent", "once"]), pause, rng.random() < 0.3],
            ["tool", True, pause, []],
            ["tool", False, pause, []],
            ["box", rng.choice(["replay", "snapshot"]), rng.choice([1, 2, 13]), pause],
            ["box", rng.choice(["replay", "snapshot", "pinned"]), 1, pause],
            ["draw"],
            ["sleep", pause],
            ["fail"],
            ["remember"],
            ["spawn", 1, rng.random() < 0.7],
            ["branch", 1],
        ]
    )


LIMITS = [0.05, 0.25, 0.65]


def draw_timed(rng: random.Random) -> list[Any]:
    """A single call, perhaps within a second timer."""
    return ["within", rng.choice(LIMITS), [draw_leaf(rng)]] if rng.random() < 0.3 else draw_leaf(rng)


NESTED = ["catch", "within", "tool", "gather"]
KINDS = ["leaf", "leaf", "leaf", "leaf", "insist", "spawn", *NESTED]


def draw_program(rng: random.Random, depth: int, *, races: bool) -> list[Any]:
    ops = []
    for _ in range(rng.choice([1, 2, 3, 4])):
        kind = rng.choice(KINDS) if depth else "leaf"
        inner = draw_program(rng, depth - 1, races=races) if kind in NESTED else []
        match kind:
            case "catch":
                ops.append(["catch", inner])
            case "within":  # a resume runs no recorded call again, so only a single call meets its timeout again
                timed = [draw_leaf(rng), draw_timed(rng)] if rng.random() < 0.3 else inner
                ops.append(["within", rng.choice(LIMITS), timed if races else [draw_timed(rng)]])
            case "tool":
                ops.append(["tool", False, 0.0, inner])
            case "insist":
                ops.append(["insist", "other"])
            case "spawn":
                ops.append(["spawn", 2, rng.random() < 0.7])
            case "gather" if races:
                others = [draw_program(rng, depth - 1, races=True) for _ in range(rng.choice([0, 1, 2]))]
                ops.append(["gather", [inner, *others]])
            case _:
                ops.append(draw_leaf(rng))
    return ops


@dataclass(frozen=True, kw_only=True)
class World:
    """A random program and the limits of its episode."""

    program: list[Any]
    races: bool
    """Whether a resume may come to another end, because the calls after the prefix end in another order."""
    max_turns: int
    max_context: int
    episode_timeout_s: float


def draw(seed: int) -> World:
    rng = random.Random(seed)
    races = rng.random() < 0.6
    program = draw_program(rng, 3, races=races)
    return World(
        program=[["act", "agent"]] * rng.choice([0, 1]) + (program if rng.random() < 0.3 else [["catch", program]]),
        races=races,
        max_turns=rng.choice([2, 100]),
        max_context=rng.choice([400, 1 << 16]),
        episode_timeout_s=rng.choice([1.55, 3600.0, 3600.0]) if races else 3600.0,
    )


@dataclass
class Execution:
    """What came of one execution."""

    entries: list[JournalEntry]
    end: str
    """Its stop reason, or the error that ended it."""
    text: str = ""
    header: EpisodeHeader | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    boxes: dict[Any, Any] = field(default_factory=dict)
    engine_calls: int = 0
    performed: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    children: dict[str, EpisodeHeader] = field(default_factory=dict)

    @property
    def transcript(self) -> dict[str, Any]:
        """What was asked and answered, by call, without times."""
        untimed = {"seconds", "started", "location"}
        found = {}
        for entry in self.entries:
            body = entry.decode()
            values = [getattr(body, name) for name in type(body).__struct_fields__ if name not in untimed]
            found[entry.call_id] = "now" if values[:1] == ["now"] else (entry.request_hash, *values)
        return found

    @property
    def rewards(self) -> Any:
        return self.header and [(each.seat, each.index, each.reward) for each in self.header.trajectories]

    def seen(self) -> dict[str, Any]:
        return {
            "end": self.end,
            "rewards": self.rewards,
            "what it saw": self.log,
            "metrics": {name: value for name, value in self.metrics.items() if name != "turns/interrupted"},
            "entries": self.transcript,
            "resources": self.boxes,
        }


def say(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    """A few digits that depend on the request alone."""
    return [*str(request.seed % 1000).encode(), STOP_TOKEN]


async def execute(
    world: World, spec: EpisodeSpec, recorded: Sequence[JournalEntry], parent: Execution | None, *, stops: bool
) -> Execution:
    journal, calls = MemoryJournal(), 0

    def counted(request: GenerateRequest, policy: str, version: PolicyVersion) -> Sequence[int]:
        nonlocal calls
        calls += request.request_id.partition(".")[0] == spec.episode_id
        return say(request, policy, version)

    engine = ScriptedEngine(counted, versions={"policy": PolicyVersion("policy", 0, 0)}, seconds_per_token=0.1)
    settings = plain_rollout_settings(
        max_turns=world.max_turns, max_context=world.max_context, episode_timeout_s=world.episode_timeout_s
    )
    settings = replace(settings, missing_scorer=None)
    dispatcher, runner = wire_dispatcher(Program, engine, journal, settings, [], policy="policy")
    log = journal.turn_log(PARTITION)
    for entry in (*(parent.entries if parent else ()), *([] if stops else recorded)):
        log.append(entry)
    log.on_disk = len(log.entries)
    dispatcher.children.add_ended(parent.children if parent else {})
    replay: dict[str, Any] = {}
    if stops:
        scratch = MemoryJournal(keeps=False)
        replay = {"inherited": [] if spec.fork is None else log.prefix(spec.fork), "on_new": Replay()}
        runner = EpisodeRunner(
            engine=engine,
            chat_format=runner._services.default.chat_format,
            store=scratch,
            log=scratch.turn_log("replay"),
            host=ReplayHost(),
            clock=runner.clock,
            settings=settings,
        )
        spec = replace(spec, purpose="replay")
    Program.performed, Program.wrong = [], set()
    header, end, text = None, "", ""
    try:
        header = await asyncio.get_running_loop().create_task(runner.run(spec, Program, recorded, **replay))
        end = header.stop_reason or ""
    except EpisodeError as error:
        end, text = error.reason, str(error)
    except EngineError as error:
        end, text = type(error).__name__, str(error)
    except Exception as error:  # noqa: BLE001 - the program's own
        end, text = type(error).__name__, str(error)
    await dispatcher.worker.drain()
    await asyncio.sleep(1.0)  # strands that were abandoned end
    await log.flush()
    ends = [each for each in journal.of_kind(EpisodeEnd) if each.spec.episode_id == spec.episode_id]
    last = Program.last
    return Execution(
        list(recorded) if stops else log.read(spec.episode_id, spec.attempt),
        end,
        text,
        header,
        dict(ends[0].metrics) if ends else {},
        last.log,
        {key: box.state() for key, box in last.boxes.items() if key[1] != "pinned"} | last.aside,
        calls,
        Program.performed,
        Program.wrong,
        {each.spec.episode_id: each.header for each in journal.of_kind(EpisodeEnd)},
    )


@dataclass
class Law:
    """Executes a world's program in all ways, and collects what differs."""

    world: World
    seed: int
    change: Callable[[list[JournalEntry]], list[JournalEntry]] = list
    """Alters what is recorded."""
    differences: dict[str, list[str]] = field(default_factory=dict)
    executions: int = 0

    def spec(self, fork: ForkPoint | None = None) -> EpisodeSpec:
        name = "e0" if fork is None else f"f{fork.branch}"
        spec = EpisodeSpec(
            episode_id=name,
            environment=name_of(Program),
            task=Task(id="t", data={"program": self.world.program}),
            seed=7 + len(name),
            seats={seat: SeatBinding("policy") for seat in Program.seats},
            group_id="g0",
            fork=fork,
            purpose="train" if fork is None or fork.branch else "fork",
        )
        return spec

    def play(
        self,
        spec: EpisodeSpec,
        recorded: Sequence[JournalEntry] = (),
        parent: Execution | None = None,
        *,
        stops: bool = False,
    ) -> Execution:
        self.executions += 1
        seed = self.seed + self.executions
        return simulate(lambda: execute(self.world, spec, recorded, parent, stops=stops), seed=seed)

    @property
    def text(self) -> str:
        return "\n".join(f"{name}\n{texts[0]}" for name, texts in self.differences.items())

    def note(self, what: str, text: str) -> None:
        self.differences.setdefault(what, []).append(text)

    def compare(self, how: str, first: Execution, second: Execution, names: Sequence[str] = ()) -> None:
        """Note which parts of two executions differ."""
        if first.header is None:  # strands that fail race for the reason
            if first.end == "episode_timeout":  # a re-execution does not take that long
                return
            may_end = self.world.races or second.header is None
            if not may_end or second.end == "nondeterminism" != first.end:
                self.note(f"{how}: failure", f"{first.end} {first.text}\nnow: {second.end} {second.text}")
            return
        one, other = first.seen(), second.seen()
        for name in names or one:
            if one[name] != other[name]:
                detail = f"{one[name]}\nnow: {other[name]}\n{second.text}"
                self.note(f"{how}: {name}", detail)
                return

    def repeat(self, how: str, spec: EpisodeSpec, whole: Execution, parent: Execution | None = None) -> None:
        """Execute over a whole recording: nothing is sampled or performed, and nothing differs."""
        for error in whole.wrong:
            self.note("caught", error)
        if "pinned" in [getattr(entry.decode(), "level", "") for entry in whole.entries]:
            return  # the object died with its process
        recorded = self.change(whole.entries)
        again = self.play(spec, recorded, parent)
        self.compare(how, whole, again)
        effects = [body for entry in whole.entries if isinstance(body := entry.decode(), EffectEntry)]
        once = {body.name for body in effects if body.guarantee == "once"}
        if (again.engine_calls and whole.header) or once & set(again.performed):
            self.note(f"{how}: performed again", str(again.performed))
        if whole.header is not None:
            replayed = self.play(spec, recorded, parent, stops=True)
            self.compare(f"{how}, replay", whole, replayed, ("end", "rewards", "what it saw"))

    def resume(self, how: str, spec: EpisodeSpec, whole: Execution, parent: Execution | None = None) -> None:
        """Kill at every entry."""
        for cut in range(1, len(whole.entries)):
            prefix = whole.entries[:cut]
            resumed = self.play(spec, prefix, parent)
            levels = [body.level for body in (e.decode() for e in prefix) if isinstance(body, ResourceCallEntry)]
            if "pinned" in levels:
                if resumed.end != "resource_lost" and whole.header is not None:
                    self.note(f"{how}: pinned", f"{cut}: {resumed.end} {resumed.text}")
                continue
            if resumed.end != whole.end and resumed.end in ("nondeterminism", "unknown_outcome_error", "resource_lost"):
                self.note(f"{how}: {resumed.end}", f"{cut}: {resumed.text}")
                continue
            if resumed.entries[:cut] != prefix:
                self.note(f"{how}: prefix", f"{cut}")
            elif not self.world.races:
                self.compare(f"{how}, killed", whole, resumed)
            elif cut % 3 == 0:
                self.repeat(f"{how}, killed", spec, resumed, parent)

    def check(self) -> None:
        spec = self.spec()
        whole = self.play(spec)
        self.repeat("whole", spec, whole)
        self.resume("resume", spec, whole)
        counts: dict[tuple[str, int], int] = {}
        for number, entry in enumerate(whole.entries):
            body = entry.decode()
            is_branch = isinstance(body, BranchEntry) and body.children
            if not (is_branch or isinstance(body, TurnEntry)):
                continue
            point = ForkPoint(
                journal=".",
                partition=PARTITION,
                episode_id="e0",
                attempt=0,
                call_id=entry.call_id,
                turns=tuple(AgentTurns(seat, index, turns) for (seat, index), turns in counts.items()),
                branch=int(bool(is_branch)),
            )
            prefix = whole.entries[:number]
            if isinstance(body, TurnEntry):
                counts[body.seat, body.index] = counts.get((body.seat, body.index), 0) + 1
            if "pinned" in [getattr(each.decode(), "level", "") for each in prefix]:
                break
            forked_spec = self.spec(point)
            forked = self.play(forked_spec, (), whole)
            if forked.end in ("nondeterminism", "unknown_outcome_error", "resource_lost"):
                self.note(f"{'branch' if is_branch else 'fork'}: {forked.end}", f"{entry.call_id}: {forked.text}")
                continue
            self.repeat("branch" if is_branch else "fork", forked_spec, forked, whole)


def find_differences(seed: int, change: Callable[[list[JournalEntry]], list[JournalEntry]] = list) -> Law:
    law = Law(draw(seed), seed, change)
    law.check()
    return law


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_repeated_comes_to_the_same(seed: int) -> None:
    law = find_differences(seed)
    assert not law.differences, law.text


def effect(pause: float) -> list[Any]:
    return ["effect", "read", pause, False]


def outer_first(call: list[Any]) -> list[Any]:
    """A program whose outer timer expires first, although a re-execution would meet the inner one first."""
    return [["within", 0.65, [effect(0.5), ["within", 0.3, [call]], ["act", "agent"]]], ["act", "agent"]]


SLOW_TOOL = [["tool", False, 0.3, []]]
"""A strand whose tool runs again: recorded calls of other strands wait for it."""


def beside(*program: list[Any]) -> list[Any]:
    return [["gather", [SLOW_TOOL, [effect(0.2), *program, ["act", "agent"]]]]]


PROGRAMS = {
    "the outer timer": outer_first(["sleep", 0.7]),
    "the outer timer, in a tool": outer_first(["tool", False, 0.7, []]),
    "the outer timer, around a tool": [["tool", False, 0.0, outer_first(["act", "agent"])]],
    "the outer timer, around strands": outer_first(["gather", [[["sleep", 0.7]], [["sleep", 0.3], ["act", "agent"]]]]),
    "the inner timer": [["within", 0.7, [effect(0.1), ["within", 0.3, [["sleep", 0.7]]], effect(0.2)]]],
    "the inner timer, which a tool delays": beside(["within", 0.8, [["within", 0.25, [effect(0.2), effect(0.2)]]]]),
    "no timer": beside(["within", 0.25, [effect(0.2)]]),
    "no timer, around strands": beside(["within", 0.25, [["gather", [[effect(0.2)]]]]]),
    "a timer after a call that it did not end": beside(["within", 0.25, [effect(0.2), ["sleep", 0.7]]]),
}
"""What ends a call, with a program."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_timer_ends_the_calls_that_it_ended_when_they_were_recorded(name: str) -> None:
    world = World(program=PROGRAMS[name], races=True, max_turns=100, max_context=1 << 16, episode_timeout_s=3600.0)
    law = Law(world, 0)
    law.check()
    assert not law.differences, law.text


def _change(kind: type, **fields: Any) -> Callable[[list[JournalEntry]], list[JournalEntry]]:
    """Alter the recorded calls of one kind."""

    def change(entries: list[JournalEntry]) -> list[JournalEntry]:
        bodies = [entry.decode() for entry in entries]
        altered = [replace_body(body, **fields) if isinstance(body, kind) else body for body in bodies]
        return [replace_body(entry, body=encode_body(body)) for entry, body in zip(entries, altered, strict=True)]

    return change


def _swap(entries: list[JournalEntry]) -> list[JournalEntry]:
    """Swap neighbouring calls of different strands."""
    entries = list(entries)
    for n in range(1, len(entries) - 1):
        paths = {entry.call_id.partition("#")[0] for entry in entries[n : n + 2]}
        if len(paths) == 2 and all(isinstance(e.decode(), TurnEntry | EffectEntry) for e in entries[n : n + 2]):
            entries[n : n + 2] = reversed(entries[n : n + 2])
    return entries


PLANTED = {
    "effect": _change(EffectEntry, value="planted"),
    "tool": _change(ToolEntry, observation="planted"),
    "child": _change(ChildResultEntry, rewards={"leaf": 99.0}),
    "end": _change(UnansweredEntry, stop_reason="max_turns"),
    "order": _swap,
}
"""Alterations of what is recorded, in different places."""


@pytest.mark.parametrize("place", PLANTED)
def test_a_difference_planted_in_each_place_is_found(place: str) -> None:
    assert any(find_differences(seed, PLANTED[place]).differences for seed in range(80, 120))
