"""The calculator for TRL's asynchronous trainer, whose tools may wait at once."""

import asyncio
from typing import Literal

from progress import draw_wait  # measured
from trl_calculator import dataset, exact, tokenizer  # noqa: F401


async def calculate(a: int, op: Literal["+", "-", "*"], b: int) -> int:
    """One operation on two integers.

    Args:
        a: The first.
        op: The operation.
        b: The second.
    """
    await asyncio.sleep(draw_wait())  # measured
    return {"+": a + b, "-": a - b, "*": a * b}[op]


tools = [calculate]
