"""Scorers as a user writes them; they are recorded and shipped like losses."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence

import agentrl


@agentrl.scorer
def short(scored: agentrl.Scored, scale: float = 100.0) -> float | None:
    """Fewer characters; nothing about an odd turn."""
    return None if scored.number % 2 else 1.0 - len(scored.turn.text) / scale


@agentrl.scorer
async def slow(scored: agentrl.Scored, seconds: float = 1.0) -> float:
    """A score that takes its time."""
    await asyncio.sleep(seconds)
    return len(scored.turn.text) / 10


@agentrl.scorer
async def patchy(scored: agentrl.Scored, how: str = "raise") -> float:
    """Fails for four tasks of ten."""
    if scored.task.data["digit"] in "0123":
        if how == "raise":
            raise RuntimeError("503")
        if how == "infrastructure":
            raise agentrl.InfrastructureError("503")
        if how == "hang":
            await asyncio.sleep(1e6)
        return float("nan")
    return 0.5


@agentrl.scorer
def explained(scored: agentrl.Scored) -> agentrl.Score:
    """A score with an explanation."""
    return agentrl.Score(0.5, "half of it is right")


@agentrl.scorer
def down(scored: agentrl.Scored) -> float:
    """Always fails."""
    raise RuntimeError("503")


@agentrl.scorer
def fragile(scored: agentrl.Scored) -> float:
    """Fails from the second version of the policy on."""
    if scored.turn.completion.spans[-1].version.step >= 2:
        raise RuntimeError("503")
    return 0.5


@agentrl.scorer
async def growing(scored: agentrl.Scored) -> float | None:
    """More with each turn; later ones arrive first, and turn 3 has none."""
    await asyncio.sleep(10.0 - scored.number)
    return None if scored.number == 3 else scored.number + 0.5


@agentrl.scorer
def right(scored: agentrl.Scored, sign: float = 1.0) -> float:
    """What the environment pays, or its opposite, or with 0 nothing to do with it."""
    if not sign:
        return float(scored.turn.completion.token_ids.sum() % 97)
    return sign * float(scored.turn.text.strip(".") == scored.task.data["digit"])


@agentrl.scorer
def length(scored: agentrl.Scored) -> float:
    """Of a whole conversation."""
    return float(len(scored.messages))


@agentrl.scorer
async def timed(scored: agentrl.Scored, seconds: float = 0.2, spread: bool = False, log: str = "") -> float:
    """A score that takes its time; with `spread`, from a quarter of it to four times of it. With `log`, its last digits
    name the call."""
    call = int.from_bytes(os.urandom(4)) if log else 0
    _note(log, "asked", call)
    tokens = len(scored.turn.completion.token_ids)
    await asyncio.sleep(seconds * (0.25, 0.5, 1.0, 4.0)[tokens % 4] if spread else seconds)
    _note(log, "done", call)
    return tokens / 10 + call * CALL


CALL = 1e-14
"""Part of a score of `timed` that counts its call's number."""


def _note(log: str, what: str, call: int) -> None:
    """Append a line with this process, the call's number and the time, in one write."""
    if log:
        with open(log, "ab", buffering=0) as file:
            file.write(f"{what} {os.getpid()} {call} {time.time():.4f}\n".encode())


@agentrl.scorer
def wild(scored: agentrl.Scored) -> float:
    """Another number at each call."""
    return float(os.urandom(4)[0]) + time.perf_counter()


@agentrl.scorer
def broken(scored: agentrl.Scored) -> float:
    """Divides by nothing."""
    return 1 / (scored.number - scored.number)


@agentrl.scorer
def infinite(scored: agentrl.Scored) -> float:
    """No number that a reward may be."""
    return float("inf")


def unmarked(scored: agentrl.Scored) -> float:
    """No scorer."""
    return 1.0


@agentrl.scorer
def ranked(scored: Sequence[agentrl.Scored], sign: float = 1.0) -> list[float | None]:
    """The share of the group's other members that have fewer messages; nothing about a member whose guess is 9."""
    lengths = [len(member.messages) for member in scored]
    shares = [sign * sum(other < own for other in lengths) / len(lengths) for own in lengths]
    return [None if member.turn.text.endswith("9") else share for member, share in zip(scored, shares, strict=True)]


@agentrl.scorer
async def slowly_ranked(scored: Sequence[agentrl.Scored], seconds: float = 3.0) -> list[float]:
    """Later members are better, as is seen after some time."""
    await asyncio.sleep(seconds)
    return [float(place) for place in range(len(scored))]


@agentrl.scorer
def too_few(scored: Sequence[agentrl.Scored]) -> list[float]:
    """One score for the whole group."""
    return [1.0]


@agentrl.scorer
def lost_group(scored: Sequence[agentrl.Scored]) -> list[float]:
    """Fails for the groups of four tasks of ten."""
    if scored[0].task.data["digit"] in "0123":
        raise RuntimeError("503")
    return [float(place) for place in range(len(scored))]


@agentrl.scorer
async def stops_badly(scored: Sequence[agentrl.Scored]) -> list[float]:
    """Takes long, and fails when it is cancelled."""
    try:
        await asyncio.sleep(5_000.0)
    except asyncio.CancelledError:
        raise RuntimeError("the connection was closed") from None
    return [0.0 for _ in scored]


@agentrl.scorer
def own_timeout(scored: agentrl.Scored) -> float:
    """Its own service did not answer."""
    raise TimeoutError("the database took 3 s")


@agentrl.scorer
async def often_stuck(scored: Sequence[agentrl.Scored], seconds: float = 5_000.0) -> list[float]:
    """Takes long for the groups of four tasks of ten."""
    if scored[0].task.data["digit"] in "0123":
        await asyncio.sleep(seconds)
    return [float(place) for place in range(len(scored))]


@agentrl.scorer
def mostly_down(scored: agentrl.Scored) -> float:
    """Answers for three tasks of ten."""
    if scored.task.data["digit"] < "7":
        raise ConnectionError("the judge answers 503")
    return 1.0
