"""Functions that wrap scorers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from agentrl import Score, scorer

Scorer = Callable[..., Any]
"""A function of a `Scored`, or of the members of a group, that returns a score or awaits one."""


async def _ask(score: Scorer, scored: Any) -> Any:
    answer = score(scored)
    return await answer if inspect.isawaitable(answer) else answer


def retrying(score: Scorer, attempts: int = 4, *, timeout_s: float = 60.0, wait_s: float = 1.0) -> Scorer:
    """Ask a scorer again after an error.

    Args:
        score: the scorer.
        attempts: number of times that it is asked.
        timeout_s: time limit of each.
        wait_s: first wait; it doubles up to 30 s.
    """

    @scorer
    async def retried(scored: Any) -> Any:
        for attempt in range(attempts):
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await _ask(score, scored)
            except Exception as error:
                if attempt + 1 == attempts:
                    if limit.expired():
                        raise TimeoutError(f"no answer within {timeout_s:g} s, {attempts} times") from error
                    raise
            await asyncio.sleep(min(30.0, wait_s * 2**attempt))
        raise ValueError("retrying: attempts must be at least 1")

    return retried


def limited(score: Scorer, per_second: float) -> Scorer:
    """Start at most `per_second` scores a second in each worker process."""
    next_start = 0.0

    @scorer
    async def started(scored: Any) -> Any:
        nonlocal next_start
        now = asyncio.get_running_loop().time()
        start = max(now, next_start)
        next_start = start + 1 / per_second
        await asyncio.sleep(start - now)
        return await _ask(score, scored)

    return started


def fallback(score: Scorer, other: Scorer) -> Scorer:
    """Ask another scorer if the first one fails; the score's note says so."""

    @scorer
    async def either(scored: Any) -> Any:
        try:
            return await _ask(score, scored)
        except Exception as error:  # noqa: BLE001 - any failure of a scorer
            answer = await _ask(other, scored)
            found = answer if isinstance(answer, Score) else Score(answer)
            reason = f"by the fallback, because of {type(error).__name__}: {error}"[:2000]
            return Score(found.value, f"{found.note} ({reason})" if found.note else reason)

    return either
