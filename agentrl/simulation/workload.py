"""Episodes that do nothing but take their time: how long each turn is, drawn from a tail, and how long its tool takes.

A root episode proposes and has children that solve, as in co-evolution. The log-length of a turn is normal, or its rank
is that of a normal variable: a share of it is common to a task, a share to a proposal, so that siblings are alike. What
is drawn depends on task and episode alone: whoever schedules, the jobs are the same.

An agent is told how long its turn is to be; `length_of` reads it off the call.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar

from agentrl.core.records import Message, Task
from agentrl.core.rng import stream
from agentrl.environment.base import Environment, EpisodeContext, user
from agentrl.rollout.plain_format import STOP_TOKEN, PlainFormat

if TYPE_CHECKING:
    from agentrl.core.ports import GenerateRequest

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A distribution of lengths, in tokens.

    Example:
        >>> tail = Tail(median=32, p90=160, longest=1280)
        >>> round(tail.length(0.0)), round(tail.length(1.2815515)), round(tail.length(9.0))
        (32, 160, 1280)
    """

    median: float
    p90: float
    longest: float
    kind: str = "lognormal"
    """Or `pareto`, cut off at `longest`."""

    def length(self, z: float) -> float:
        """The quantile of a standard normal variable, as a length."""
        ratio = math.log(self.p90 / self.median)
        if self.kind == "lognormal":
            return float(min(self.median * math.exp(ratio / _NORMAL.inv_cdf(0.9) * z), self.longest))
        alpha = _pareto_index(self.p90 / self.median, self.longest / self.median)
        low = _pareto_low(alpha, self.longest / self.median)
        rank = _NORMAL.cdf(z) * (1 - (low * self.median / self.longest) ** alpha)
        return float(self.median * low * (1 - min(rank, 1 - 1e-12)) ** (-1 / alpha))


def _pareto_low(alpha: float, longest: float) -> float:
    """Where a Pareto distribution cut off at `longest` begins, for a median of 1."""
    # (1 - (x/1)^a) = (1 - (x/longest)^a) / 2  =>  x^a = 1 / (2 - longest^-a)
    return float((2 - longest**-alpha) ** (-1 / alpha))


def _pareto_index(p90: float, longest: float) -> float:
    """The index with which it has this P90, for a median of 1: by bisection."""
    low, high = 1e-3, 50.0
    while high - low > 1e-9:
        alpha = (low + high) / 2
        begin = _pareto_low(alpha, longest)
        rank = 0.9 * (1 - (begin / longest) ** alpha)
        low, high = (alpha, high) if begin * (1 - rank) ** (-1 / alpha) > p90 else (low, alpha)
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What an episode of the simulation does."""

    tail: Tail
    """Of all turns of an agent together."""
    turns: int = 1
    """Of each child."""
    tool_s: float = 0.0
    """Mean seconds of the tool between two turns."""
    of_task: float = 0.25
    """Share of the variance that all episodes of a task have in common."""
    of_proposal: float = 0.25
    """Share that a proposal and its children have."""


class Tasks:
    """Tasks without an end, each with what its episodes have in common."""

    def __init__(self, workload: Workload, *, seed: int) -> None:
        self._data = dataclasses.asdict(workload)
        self._seed = seed

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> Task:
        data = {"work": self._data, "z": stream("simulated task", self._seed, number).gauss()}
        return Task(id=f"task-{number}", data=data)


class Solve(Environment):
    """Takes its turns, with a tool between them."""

    seats = ("solver",)

    async def run(self, ctx: EpisodeContext) -> None:
        """Act, wait, act."""
        work = ctx.task.data["work"]
        solver, turns = ctx.agent("solver"), work["turns"]
        own = 1.0 - work["of_task"] - work["of_proposal"]
        length = Tail(**work["tail"]).length(ctx.task.data["z"] + math.sqrt(own) * ctx.rng.gauss())
        for turn in range(turns):
            if turn and work["tool_s"]:
                await ctx.sleep(ctx.rng.expovariate(1 / work["tool_s"]))
            await solver.act(asked_for(length / turns))
        solver.reward(float(ctx.rng.random() < 0.5))


class Propose(Environment):
    """One turn, then children."""

    seats = ("proposer",)
    fan_out: ClassVar[Mapping[str, int]] = {"Solve": 8}

    async def run(self, ctx: EpisodeContext) -> None:
        """Propose, and wait for those who try."""
        work, proposer = ctx.task.data["work"], ctx.agent("proposer")
        z = math.sqrt(work["of_task"]) * ctx.task.data["z"] + math.sqrt(work["of_proposal"]) * ctx.rng.gauss()
        own = 1.0 - work["of_task"] - work["of_proposal"]
        await proposer.act(asked_for(Tail(**work["tail"]).length(z + math.sqrt(own) * ctx.rng.gauss())))
        children = await ctx.gather(*ctx.spawn(Solve, {"work": work, "z": z}, n=self.fan_out["Solve"]))
        proposer.reward(float(len(children)))


def asked_for(length: float) -> Message:
    """What tells an agent how long its turn is to be."""
    return user(f"{max(round(length), 1)}")


def length_of(request: GenerateRequest) -> int:
    """How long a call is to be: what the last message of its context says."""
    end = len(request.token_ids) - len(_ASK)
    digits = bytes(request.token_ids[max(end - 8, 0) : end].astype("uint8")).split(b"\n")[-1]
    return int(digits)


_ASK = (STOP_TOKEN, *PlainFormat().extend((), after="stop"))
"""What follows the last message of a context."""
