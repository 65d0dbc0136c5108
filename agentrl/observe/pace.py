"""The choice between two bounds on staleness, from the seconds per step that a run measured with each."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.observe.metrics import STALENESS_BOUND, TIMED_STEP

NEAR = 1.1
"""Factor within which the smaller bound's steps may take longer: steps on stale data teach less than fresh ones."""


def choose_staleness(seconds: Mapping[int, float]) -> int:
    """Return the smallest bound whose steps take at most `NEAR` times as long as the fastest ones.

    Example:
        >>> choose_staleness({0: 4.5, 1: 2.7}), choose_staleness({0: 0.54, 1: 0.5})
        (1, 0)
    """
    return min(bound for bound in seconds if seconds[bound] <= NEAR * min(seconds.values()))


def explain_staleness(bound: int, seconds: Mapping[int, float]) -> str:
    """Return the bound in force and the measured seconds per step by bound, for people.

    Example:
        >>> explain_staleness(0, {0: 0.54, 1: 0.5})
        'lockstep: 0.54 s a step in lockstep, 0.5 s a step with staleness 1'
    """
    names = {each: f"with staleness {each}" if each else "in lockstep" for each in (bound, *seconds)}
    times = [f"{value:.3g} s a step {names[each]}" for each, value in seconds.items()]
    times += [] if bound in seconds else ["its steps are being timed"]
    return f"{names[bound].split(' ', 1)[1]}: {', '.join(times)}"


def recorded_choice(metrics: Mapping[str, float]) -> str | None:
    """Return `explain_staleness` of the metrics of a step; None if the configuration set the bound."""
    if STALENESS_BOUND not in metrics:
        return None
    names = ((name, name.removeprefix(TIMED_STEP)) for name in metrics if name.startswith(TIMED_STEP))
    seconds = {int(bound): metrics[name] for name, bound in names if bound.isdecimal()}
    return explain_staleness(int(metrics[STALENESS_BOUND]), seconds)
