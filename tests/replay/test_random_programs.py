"""A program that is resumed in another process; `tests/laws/test_calls.py` resumes random ones in this process.

A program is data: acts, effects, tools, resource calls, draws, branches, timeouts, failures and catches. Each op writes
down what it saw in a log all branches share, and each asks something that depends on that log, so a log that evolves
another way is a mismatch.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any, ClassVar

import msgspec
import pytest

import agentrl
from agentrl.core.errors import EffectError
from agentrl.journal.entries import JournalEntry
from tests.replay.executions import Stage
from tests.support.random_programs import Interpreter


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


class Program(Interpreter):
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

    async def catch(self, program: list[Any]) -> None:
        try:
            await self.ops(program)
        except (ArithmeticError, EffectError) as error:
            self.saw(type(error).__name__)


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
