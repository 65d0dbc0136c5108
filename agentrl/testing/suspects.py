"""Lines of an environment's module that look like time, or chance from the operating system, for the checker."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.environment.base import Environment

_STRAY = re.compile(
    r"\b(?:random\.(?:Random|RandomState|default_rng)\(\)|random\.SystemRandom\("
    r"|(?:time\.(?:time|monotonic|perf_counter)|uuid\.uuid[14]|os\.urandom|secrets\.\w+"
    r"|datetime\.(?:now|utcnow|today))\()"
)
_MOST = 3


def suspects(environment: type[Environment]) -> str:
    """Up to three such lines as a clause, or the empty string. A hint: what a line really does is not looked at.

    Example:
        >>> bool(_STRAY.search("draw = random.Random()")), bool(_STRAY.search("draw = random.Random(3)"))
        (True, False)
    """
    lines = enumerate(environment.source().splitlines(), start=1)
    found = [f"line {number}: `{line.strip()}`" for number, line in lines if _STRAY.search(line)][:_MOST]
    return f". Look at {', '.join(found)}" if found else ""
