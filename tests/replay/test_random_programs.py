"""Random programs, killed at every entry: what is resumed agrees with what was recorded, whatever the schedule.

A program is data: acts, effects, tools, resource calls, draws, branches, timeouts, failures and catches. Each op writes
down what it saw in a log all branches share, and each asks something that depends on that log, so a log that evolves
another way is a mismatch.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import zlib
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import agentrl
from agentrl.core.errors import EffectError
from agentrl.journal.entries import EffectIntentEntry, JournalEntry
from agentrl.rollout.calls.journal import current_strand
from tests.replay.executions import Stage

pytestmark = pytest.mark.property

DRAWN = settings(
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],  # no shrinking: an example takes seconds
)


class Box:
    """A resource that remembers."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: int) -> list[int]:
        self.seen.append(value)
        if value == 13:
            raise KeyError(value)
        return [value, len(self.seen)]

    def get_state(self) -> list[int]:
        return self.seen

    def set_state(self, state: list[int]) -> None:
        self.seen = list(state)


def task_data(program: list[Any]) -> dict[str, Any]:
    """The data of a task with a program: tuples as lists."""
    return {"program": json.loads(json.dumps(program))}


class Program(agentrl.Environment):
    """Interprets `task.data["program"]`."""

    seats = ("agent", "other")
    last: ClassVar[Program]
    performed: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        Program.last = self
        self.ctx = ctx
        self.log: list[str] = []
        self.boxes = {level: ctx.resource(Box, level=level) for level in ("replay", "snapshot")}
        await self.ops(ctx.task.data["program"])
        ctx.agent("agent").reward(float(len(self.log)))

    async def ops(self, program: list[Any]) -> None:
        for op, *arguments in program:
            await getattr(self, op)(*arguments)

    def saw(self, what: object) -> None:
        self.log.append(f"{what} after {len(self.log)}")

    async def act(self, seat: str) -> None:
        # One conversation per branch, and one that all branches share.
        agent = self.ctx.agent(seat, 0 if seat == "other" else zlib.crc32(current_strand().path.encode()))
        self.saw((await agent.act(agentrl.user(self.log[-1] if self.log else "begin"))).text)

    async def effect(self, guarantee: str, pause: float, fails: bool) -> None:
        name = f"{guarantee} {len(self.log)}"

        async def perform() -> str:
            await asyncio.sleep(pause)
            Program.performed.append(name)
            if fails:
                raise LookupError(name)
            return name

        try:
            self.saw(await self.ctx.effect(name, perform, guarantee=guarantee, reconcile=lambda: (False, None)))
        except EffectError as error:
            self.saw(error.error_type)

    async def tool(self, external: bool, pause: float) -> None:
        async def call() -> str:
            await asyncio.sleep(pause)
            return f"{len(self.log) if external else ''}tool"

        self.saw(await self.ctx.call_tool("tool", {"n": len(self.log)}, call, external=external, timeout_s=0.5))

    async def box(self, level: str, value: int) -> None:
        self.saw(await self.boxes[level].call("put", value))

    async def draw(self) -> None:
        self.saw(f"{self.ctx.rng.random():.9f} {self.ctx.uuid()[:8]} {self.ctx.now() * 0}")

    async def sleep(self, seconds: float) -> None:
        await self.ctx.sleep(seconds)
        self.saw("slept")

    async def pause(self) -> None:
        await self.ctx.sleep(0.0)

    async def fail(self) -> None:
        raise ArithmeticError("on purpose")

    async def catch(self, program: list[Any]) -> None:
        try:
            await self.ops(program)
        except (ArithmeticError, EffectError) as error:
            self.saw(type(error).__name__)

    async def within(self, seconds: float, program: list[Any]) -> None:
        branch = current_strand()
        apart = zlib.crc32(f"{branch.path}#{branch.calls}".encode()) % 9973 / 1e6  # no two timers at one instant
        try:
            async with asyncio.timeout(seconds + apart):
                await self.ops(program)
        except TimeoutError:
            self.saw("late")

    async def gather(self, programs: list[list[Any]]) -> None:
        # before its first call a branch may not look at what the others do
        await self.ctx.gather(*(self.ops([["pause"], *program]) for program in programs))
        self.saw("gathered")


PAUSES = st.sampled_from([0.0, 0.1, 0.3, 0.7])
LEAVES = st.one_of(
    st.tuples(st.just("act"), st.sampled_from(["agent", "other"])),
    st.tuples(st.just("effect"), st.sampled_from(["read", "idempotent", "once"]), PAUSES, st.booleans()),
    st.tuples(st.just("tool"), st.booleans(), PAUSES),
    st.tuples(st.just("box"), st.sampled_from(["replay", "snapshot"]), st.sampled_from([1, 2, 13])),
    st.tuples(st.just("draw")),
    st.tuples(st.just("sleep"), PAUSES),
    st.tuples(st.just("fail")),
)


def _nested(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    programs = st.lists(children, min_size=1, max_size=4)
    return st.one_of(
        st.tuples(st.just("catch"), programs),
        st.tuples(st.just("within"), st.sampled_from([0.05, 0.25, 0.65]), programs),
        st.tuples(st.just("gather"), st.lists(programs, min_size=1, max_size=3)),
    )


PROGRAMS = st.lists(st.recursive(LEAVES, _nested, max_leaves=12), min_size=1, max_size=5)


def check(program: list[Any], seed: int) -> int:
    """Kill at every entry under other schedules; returns how many entries there were."""
    stage = Stage(environment=Program, data=task_data([["catch", program]]))
    whole = stage.play(seed=seed)
    assert whole.error is None, whole.error
    log = Program.last.log
    complete = stage.play(whole.entries, seed=seed + 1)
    assert complete.error is None, complete.error
    assert complete.engine_calls == 0
    assert complete.transcript == whole.transcript
    assert Program.last.log == log
    for cut in range(1, len(whole.entries)):
        resumed = stage.play(whole.entries[:cut], seed=seed + cut)
        assert resumed.error is None, (cut, resumed.error)
        assert resumed.entries[:cut] == whole.entries[:cut]
        log = Program.last.log
        once = [body.name for body in resumed.bodies.values() if isinstance(body, EffectIntentEntry)]
        Program.performed.clear()
        again = stage.play(resumed.entries, seed=seed + cut + 1)
        assert again.error is None, (cut, again.error)
        assert again.transcript == resumed.transcript
        assert Program.last.log == log
        assert not {f"effect {name!r}" for name in Program.performed} & set(once)
    return len(whole.entries)


@pytest.mark.timeout(600)
@settings(DRAWN, max_examples=25)
@given(program=PROGRAMS, seed=st.integers(0, 1 << 16))
def test_random_programs_resume_from_every_entry(program: list[Any], seed: int) -> None:
    check(msgspec.json.decode(msgspec.json.encode(program)), seed)


SEQUENTIAL = st.lists(
    st.one_of(LEAVES, st.tuples(st.just("catch"), st.lists(LEAVES, max_size=4))), min_size=1, max_size=12
)


@settings(DRAWN, max_examples=20)
@given(program=SEQUENTIAL, seed=st.integers(0, 1 << 16))
def test_programs_without_races_come_to_the_same_end(program: list[Any], seed: int) -> None:
    stage = Stage(environment=Program, data=task_data([["catch", program]]))
    whole = stage.play(seed=seed)
    assert whole.header is not None
    for cut in range(1, len(whole.entries)):
        resumed = stage.play(whole.entries[:cut], seed=seed + cut)
        assert resumed.header is not None
        now = {"now": 0.0}  # the one thing that differs: when it was asked again
        assert _without_now(resumed.transcript, now) == _without_now(whole.transcript, now)
        assert resumed.header.reward == whole.header.reward


def _without_now(transcript: dict[str, Any], now: dict[str, float]) -> dict[str, Any]:
    return {call_id: ("now" if "now" in entry[1:2] else entry) for call_id, entry in transcript.items()}


BUSY = [
    ["gather", [[["act", "agent"], ["draw"], ["box", "snapshot", 1]], [["act", "other"], ["tool", True, 0.1]]]],
    ["within", 0.25, [["effect", "once", 0.7, False]]],
    ["catch", [["gather", [[["sleep", 0.3], ["fail"]], [["act", "agent"], ["act", "agent"]]]]]],
    ["box", "replay", 13],
    ["act", "agent"],
]


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_another_process_with_another_hash_seed_resumes_the_same(hash_seed: str) -> None:
    program = [["catch", BUSY[2][1]], *BUSY[:2]]
    stage = Stage(environment=Program, data=task_data(program))
    whole = stage.play()
    assert whole.error is None
    code = "import sys; from tests.replay.test_random_programs import resume_elsewhere; resume_elsewhere()"
    told = subprocess.run(
        [sys.executable, "-c", code],
        input=msgspec.msgpack.encode((program, whole.entries)),
        capture_output=True,
        check=True,
        env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
    ).stdout
    entries, log = msgspec.msgpack.decode(told, type=tuple[list[JournalEntry], list[str]])
    assert entries == whole.entries
    assert log == Program.last.log


def resume_elsewhere() -> None:
    """Replay what standard input holds; the entries and the log go to standard output."""
    program, entries = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=tuple[list[Any], list[JournalEntry]])
    again = Stage(environment=Program, data=task_data(program)).play(entries, seed=5)
    assert again.error is None, again.error
    sys.stdout.buffer.write(msgspec.msgpack.encode((again.entries, Program.last.log)))
