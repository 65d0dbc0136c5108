"""Lines of an environment's module that look like stray randomness or time, for the checker's messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.environment.base import Environment

_STRAY = re.compile(
    r"\b(?:random\.(?!Random\b|default_rng\(\w)\w+|time\.(?:time|monotonic|perf_counter)|uuid\.uuid[14]|os\.urandom"
    r"|secrets\.\w+|datetime\.(?:now|utcnow|today))\("
)
_MOST = 3


def suspects(environment: type[Environment]) -> str:
    """Up to three such lines as a clause, or the empty string. A hint: what a line really does is not looked at.

    Example:
        >>> bool(_STRAY.search("x = random.randint(1, 6)")), bool(_STRAY.search("draw = random.Random(3)"))
        (True, False)
    """
    lines = enumerate(environment.source().splitlines(), start=1)
    found = [f"line {number}: `{line.strip()}`" for number, line in lines if _STRAY.search(line)][:_MOST]
    return f". Look at {', '.join(found)}" if found else ""
