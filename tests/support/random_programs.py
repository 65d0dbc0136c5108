"""The parts of random programs that the law of calls and the replays of random programs share."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any

import agentrl
from agentrl.rollout.calls.journal import current_strand


class Interpreter(agentrl.Environment):
    """Interprets lists of operations with arguments; writes down what it sees, and asks what depends on it."""

    ctx: agentrl.EpisodeContext
    log: list[str]

    async def ops(self, program: list[Any]) -> None:
        for op, *arguments in program:
            await getattr(self, op)(*arguments)

    def saw(self, what: object) -> None:
        self.log.append(f"{what} after {len(self.log)}")

    def agent(self, seat: str) -> Any:
        """An agent of the strand, or the one that all share."""
        return self.ctx.agent(seat, 0 if seat == "other" else zlib.crc32(current_strand().path.encode()))

    async def act(self, seat: str) -> None:
        self.saw((await self.agent(seat).act(agentrl.user(self.log[-1] if self.log else "begin"))).text)

    async def draw(self) -> None:
        self.saw(f"{self.ctx.rng.random():.9f} {self.ctx.uuid()[:8]} {self.ctx.now() * 0}")

    async def sleep(self, seconds: float) -> None:
        await self.ctx.sleep(seconds)
        self.saw("slept")

    async def pause(self) -> None:
        await self.ctx.sleep(0.0)

    async def fail(self) -> None:
        raise ArithmeticError("on purpose")

    async def within(self, seconds: float, program: list[Any]) -> None:
        strand = current_strand()
        apart = zlib.crc32(f"{strand.path}#{strand.calls}".encode()) % 9973 / 1e6  # no two timers at one instant
        try:
            async with asyncio.timeout(seconds + apart):
                await self.ops(program)
        except TimeoutError:
            self.saw("late")

    async def gather(self, programs: list[list[Any]]) -> None:
        # before its first call a strand may not look at what the others do
        await self.ctx.gather(*(self.ops([["pause"], *program]) for program in programs))
        self.saw("gathered")
