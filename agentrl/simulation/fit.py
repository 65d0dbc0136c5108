"""How fast the engines of a run were, by the seconds of its turns: r(b) of a replica, and what contexts cost.

A turn takes the seconds of its tokens, each as long as a pass with all that runs, and those of the contexts that were
computed meanwhile, its own and others'. Seconds per token do not fall as more run; beside that nothing is assumed of
their curve. It is known at powers of two, where there were turns enough, and goes on as straight as between the last
two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENOUGH = 10
"""Turns that tell something."""


class SampledTurn(NamedTuple):
    """One engine call."""

    start: float
    stop: float
    tokens: int
    context: int
    """New tokens of it."""
    computed: int
    """Tokens of its whole context that no cache held."""


def fitted_rates(turns: Sequence[SampledTurn], slots: int, replicas: int) -> dict[str, Any]:
    """Rates of a replica as `[engine]` of a plan has them, by least squares.

    Who got a slot when is not known: while `n` calls are there for `slots`, each runs for `slots / n` of the time. So
    what one turn of those that waited took says nothing, and all of them count as their mean.

    `prefill_rate` is what new tokens of contexts cost: those that were computed, again perhaps, or that a cache held,
    are in it.

    Args:
        turns: all there were in some time, at least one, each with tokens and some seconds.
        slots: of a replica.
        replicas: the calls are spread over.
    """
    import numpy as np

    running, seconds, share = np.array(_ran(turns, slots * replicas)).T
    running = np.maximum(running / replicas, 1.0)
    tokens = np.array([turn.tokens for turn in turns], float)
    own = np.array([turn.computed for turn in turns], float)
    contexts = (own + (np.array(_computed_during(turns), float) - own) / replicas) * share
    counts = _counts(running)
    ramps = [np.maximum((running - low) / (high - low), 0.0) for low, high in pairwise(counts)]
    ramps = [*(np.minimum(ramp, 1.0) for ramp in ramps[:-1]), *ramps[-1:]]
    rows = np.stack([tokens, *(tokens * ramp for ramp in ramps), contexts, seconds], axis=1)
    waited = share < 1 - 1e-9
    if waited.any():
        rows[waited] = rows[waited].mean(axis=0)
    if (~waited).sum() < ENOUGH:  # what contexts cost cannot be told from what tokens do
        rows[:, -2] = 0.0
    *steps, context = _least_squares(rows[:, :-1], rows[:, -1])
    points = zip(counts, accumulate(steps), strict=True)
    rates: dict[str, Any] = {"rates": {count: 1.0 / max(value, 1e-9) for count, value in points}}
    new, computed = sum(turn.context for turn in turns), sum(turn.computed for turn in turns)
    if new and context * computed > 1e-6 * seconds.sum():
        rates["prefill_rate"] = new / (context * computed)
    return rates


def _ran(turns: Sequence[SampledTurn], slots: int) -> list[tuple[float, float, float]]:
    """Of each turn how many ran on average while it lasted, and of its time that in which it ran: seconds, share."""
    edges = sorted([(turn.start, 1) for turn in turns] + [(turn.stop, -1) for turn in turns])
    totals: dict[float, tuple[float, float]] = {}
    there, before, running, ran = 0, edges[0][0], 0.0, 0.0
    for at, change in edges:
        running += min(there, slots) * (at - before)
        ran += min(slots / max(there, 1), 1.0) * (at - before)
        totals[at] = running, ran
        there += change
        before = at
    found = []
    for turn in turns:
        (running, ran), (running_before, ran_before) = totals[turn.stop], totals[turn.start]
        whole = turn.stop - turn.start
        found.append(((running - running_before) / whole, ran - ran_before, (ran - ran_before) / whole))
    return found


def _computed_during(turns: Sequence[SampledTurn]) -> list[int]:
    """Tokens of context of all calls that began while each turn lasted, its own included."""
    begun = sorted((turn.start, turn.computed) for turn in turns)
    starts = [start for start, _ in begun]
    total = [0, *accumulate(computed for _, computed in begun)]
    return [total[bisect_left(starts, turn.stop)] - total[bisect_left(starts, turn.start)] for turn in turns]


def _counts(running: NDArray[Any]) -> list[int]:
    """Numbers of calls at which seconds per token are fitted: the powers of two that enough turns had about them."""
    import numpy as np

    near = Counter(np.rint(np.log2(running)).astype(int).tolist())
    powers = sorted(power for power, turns in near.items() if turns >= ENOUGH)
    return [2**power for power in powers or [near.most_common(1)[0][0]]]


def _least_squares(columns: NDArray[Any], seconds: NDArray[Any]) -> list[float]:
    """Weights of the columns, none below 0."""
    import numpy as np

    sizes = np.maximum(np.linalg.norm(columns, axis=0), 1e-9)
    found = np.zeros(len(sizes))
    used = list(range(len(sizes)))
    while True:
        weights = np.linalg.lstsq((columns / sizes)[:, used], seconds, rcond=None)[0]
        if (weights >= 0).all():
            break
        del used[int(weights.argmin())]
    found[used] = weights
    weights_found: list[float] = (found / sizes).tolist()
    return weights_found
