"""A distribution by its quantiles: how long something is that is seldom as long as usual."""

from __future__ import annotations

import math
from statistics import NormalDist, fmean
from typing import Annotated, Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section

MOST = 10_000_000
"""Tokens, seconds or turns of anything: of a prompt, an episode, a tool, a step. No real plan comes near."""
Amount = Annotated[float, Field(ge=1e-6, le=MOST)]
"""Tokens, seconds or turns."""
FURTHEST = 3.0
"""Deviations of a normal variable, up to which the ranks of what was measured are kept."""
_NORMAL = NormalDist()
_Z90 = _NORMAL.inv_cdf(0.9)
SCORES = [_NORMAL.inv_cdf((rank + 0.5) / 200) for rank in range(200)]
"""Equally likely values of a normal variable."""


class Tail(Section):
    """A distribution by its quantiles: of tokens, seconds or turns.

    Example:
        >>> tail = Tail(p50=32, p90=160, cap=1280)
        >>> round(tail.value(0.0)), round(tail.value(1.2815515)), round(tail.value(9.0))
        (32, 160, 1280)
    """

    p50: Amount
    p90: Amount
    cap: Amount
    """Longer ones are cut off here."""
    law: Literal["lognormal", "pareto", "measured"] = "lognormal"
    ranks: tuple[Amount, ...] = ()
    """With `law = "measured"`, up to the cap: the values whose ranks a normal variable has at equal distances from -3
    to 3."""

    @model_validator(mode="after")
    def _check_order(self) -> Tail:
        if not self.p50 <= self.p90 <= self.cap:
            raise ValueError(f"p50 = {self.p50:g}, p90 = {self.p90:g}, cap = {self.cap:g} do not grow")
        if self.law == "pareto" and not self.p50 < self.p90 < self.cap:
            raise ValueError("law = 'pareto' needs p50 < p90 < cap")
        if (self.law == "measured") != (len(self.ranks) > 1) or list(self.ranks) != sorted(self.ranks):
            raise ValueError("law = 'measured' and ranks, two or more that grow, belong together")
        if self.ranks and self.ranks[-1] > self.cap:
            raise ValueError(f"ranks end at {self.ranks[-1]:g}, beyond cap = {self.cap:g}")
        return self

    def value(self, z: float) -> float:
        """The quantile at which a standard normal variable has the value `z`."""
        if self.law == "lognormal":
            return min(self.p50 * math.exp(math.log(self.p90 / self.p50) / _Z90 * z), self.cap)
        if self.law == "measured":
            place = min(max((z + FURTHEST) / (2 * FURTHEST), 0.0), 1.0) * (len(self.ranks) - 1)
            below = min(int(place), len(self.ranks) - 2)
            return self.ranks[below] + (place - below) * (self.ranks[below + 1] - self.ranks[below])
        cap = self.cap / self.p50
        alpha = _pareto_index(self.p90 / self.p50, cap)
        low = _pareto_low(alpha, cap)
        rank = _NORMAL.cdf(z) * (1 - (low / cap) ** alpha)
        return float(self.p50 * low * (1 - min(rank, 1 - 1e-12)) ** (-1 / alpha))

    @property
    def mean(self) -> float:
        """The mean."""
        return fmean(map(self.value, SCORES))


def _pareto_low(alpha: float, cap: float) -> float:
    """Where a Pareto distribution cut off at `cap` begins, for a median of 1."""
    # 1 - x^a = (1 - (x/cap)^a) / 2  =>  x^a = 1 / (2 - cap^-a)
    return float((2 - cap**-alpha) ** (-1 / alpha))


def _pareto_index(p90: float, cap: float) -> float:
    """The index with which it has this P90, for a median of 1: by bisection."""
    low, high = 1e-3, 50.0
    while high - low > 1e-9:
        alpha = (low + high) / 2
        begin = _pareto_low(alpha, cap)
        rank = 0.9 * (1 - (begin / cap) ** alpha)
        low, high = (alpha, high) if begin * (1 - rank) ** (-1 / alpha) > p90 else (low, alpha)
    return low
