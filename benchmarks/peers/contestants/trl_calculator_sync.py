"""The calculator for TRL's synchronous trainer."""

import time
from typing import Literal

from progress import draw_wait  # measured
from trl_calculator import dataset, exact, tokenizer  # noqa: F401


def calculate(a: int, op: Literal["+", "-", "*"], b: int) -> int:
    """One operation on two integers.

    Args:
        a: The first.
        op: The operation.
        b: The second.
    """
    time.sleep(draw_wait())  # measured
    return {"+": a + b, "-": a - b, "*": a * b}[op]


tools = [calculate]
