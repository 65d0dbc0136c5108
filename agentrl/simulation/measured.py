"""What came out of a simulation: shares, rates, lags and tails, from what was noted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, quantiles
from typing import TYPE_CHECKING

from agentrl.inspection.timelines import RunTimeline, filled

if TYPE_CHECKING:
    from agentrl.simulation.account import Account, Step
    from agentrl.simulation.plan import Plan

PARTS = 72
"""Of a timeline."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What came out; lengths in tokens, times in seconds, of the steps after the first."""

    seconds: float
    steps_per_hour: Mapping[str, float]
    """By policy."""
    tokens_per_s: float
    """Sampled, but for what was wasted."""
    engine_busy: float
    """Share of the engines' capacity that was used: all of it while a call waits for a slot or for memory, or contexts
    are computed."""
    slots_busy: float
    """Share of all slots' time in which they had a call."""
    engine_active: float
    """Share of the time in which an engine had any call: `engine/busy_share` of a real run."""
    trainer_busy: float
    token_lag: float
    """Mean staleness of the trained tokens."""
    older: float
    """Share of the trained tokens that were older than `max_staleness`."""
    lag_p99: float
    """Of the trained units: steps taken between admission and training."""
    lag_max: float
    max_lag_exceeded: int
    """Trajectories trained beyond `max_lag`, of all steps."""
    length_ratio: float
    """Mean length of what was trained over that of all that was begun."""
    waste: float
    """Share of the sampled tokens whose units were dropped."""
    episodes: int
    episode_seconds: Mapping[str, Sequence[float]]
    """By environment: median, P90 and P99 of the time from admission to the end."""
    held: Mapping[str, float]
    """Share of the time, by what held admission back."""
    no_room: float
    """Share of the time in which calls waited for room in the engines' memory."""
    preemptions: int
    """Calls that were pushed out of memory."""
    steps_per_bound: float
    """Steps per second over what engines of full slots or a trainer without any waiting could do."""
    makespan_over_bound: float
    """Time over the least that any schedule needs for all that was begun; for closed runs."""
    timeline: RunTimeline
    step_times: Sequence[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    """Of this simulation, real ones."""


def measure(plan: Plan, account: Account, skipped: int, cpu_seconds: float) -> Measured:
    """Add up what was noted after the first steps."""
    first = next(iter(plan.trained))
    own = [step for step in account.steps if step.policy == first]
    begin, end = own[skipped - 1], own[-1]
    seconds = end.at - begin.at
    window = [step for step in account.steps if begin.at < step.at <= end.at]
    slots, full, active, sampled = (now - before for now, before in zip(end.engine, begin.engine, strict=True))
    engines = plan.engine.replicas
    lags, units = _lags(account, window)
    tokens = sum(count for _, _, count in lags)
    kinds = _fed_by(plan, first)
    fed = [name for name in account.asked if _kind(account, name) in kinds]
    waste = account.wasted / max(sum(engine.sampled for engine in account.engines), 1.0)
    mean = fmean(account.asked[name] for name in fed)
    own_units = [name for step in window if step.policy == first for name in step.units]
    return Measured(
        seconds=seconds,
        steps_per_hour={name: 3600 * sum(step.policy == name for step in window) / seconds for name in plan.trained},
        tokens_per_s=(1 - waste) * sampled * account.grain / seconds,
        engine_busy=full / (engines * seconds),
        slots_busy=slots / (engines * plan.engine.slots * seconds),
        engine_active=active / (engines * seconds),
        trainer_busy=sum(step.seconds for step in window) / seconds,
        token_lag=sum(lag * count for _, lag, count in lags) / tokens,
        older=sum(count for name, lag, count in lags if lag > plan.trained[name].max_staleness) / tokens,
        lag_p99=quantiles(units, n=100)[-1],
        lag_max=max(units),
        max_lag_exceeded=int(account.exceeded),
        length_ratio=fmean(account.lengths[name] for name in own_units) / mean,
        waste=waste,
        episodes=len(account.asked),
        episode_seconds=_tails(account, begin.at),
        held=_held(account, begin.at, end.at),
        no_room=fmean(look.no_room for look in account.looks if begin.at <= look.at <= end.at),
        preemptions=sum(engine.preemptions for engine in account.engines),
        steps_per_bound=(len(own) - skipped) / seconds / _steps_per_second(plan, account, len(fed)),
        makespan_over_bound=end.at / _least_seconds(plan, account, own),
        timeline=_timeline(plan, account, begin.at, end.at),
        step_times=[step.at for step in own],
        cpu_seconds=cpu_seconds,
    )


def _kind(account: Account, episode: str) -> tuple[str, bool]:
    """An episode's environment, and whether it is a child."""
    return account.begun[episode].environment, "~" in episode


def _fed_by(plan: Plan, policy: str) -> set[tuple[str, bool]]:
    """Kinds of episodes that a policy plays in."""
    config = plan.config(1)
    return {
        (name, is_child)
        for name, environment in plan.environments.items()
        for is_child in (False, True)
        for seat in environment.seats
        if config.policy_of(f"{name}.{seat}" if is_child else seat, 0) == policy
    }


def _lags(account: Account, window: Sequence[Step]) -> tuple[list[tuple[str, int, int]], list[int]]:
    """Of trained tokens: policy, lag, how many; of units: steps from admission to training."""
    counts: Counter[tuple[str, int]] = Counter()
    units = []
    taken = Counter(dict.fromkeys({step.policy for step in account.steps}, 0))
    chosen = set(map(id, window))
    for step in account.steps:
        if id(step) in chosen:
            for name in step.units:
                units.append(taken[step.policy] - account.begun[name].steps.get(step.policy, 0))
                for (policy, version), count in account.spans[name].items():
                    if policy == step.policy:
                        counts[policy, taken[policy] - version] += count
        taken[step.policy] += 1
    return [(policy, lag, count) for (policy, lag), count in counts.items()], units


def _tails(account: Account, since: float) -> dict[str, tuple[float, float, float]]:
    seconds: dict[str, list[float]] = {name: [] for name in account.plan.environments}
    for name, at in account.ended.items():
        if at >= since:
            seconds[account.begun[name].environment].append(at - account.begun[name].at)
    found = {}
    for name, values in seconds.items():
        if len(values) > 1:
            cuts = quantiles(values, n=100)
            found[name] = (cuts[49], cuts[89], cuts[98])
    return found


def _held(account: Account, begin: float, end: float) -> dict[str, float]:
    looks = [look for look in account.looks if begin <= look.at <= end]
    reasons = Counter(look.held.partition(":")[0] if look.held else "nothing" for look in looks)
    return {reason: count / len(looks) for reason, count in reasons.most_common()}


def _steps_per_second(plan: Plan, account: Account, units: int) -> float:
    """No schedule that never ends has more steps of the first policy per second; `units` of it were begun."""
    size = next(iter(plan.trained.values())).step_size
    work = sum(account.asked.values()) * account.grain / units * size
    return min(plan.capacity() / work, 1 / max(fmean(step.seconds for step in account.steps), 1e-9))


def _least_seconds(plan: Plan, account: Account, own: Sequence[Step]) -> float:
    """No schedule of all that was begun is faster: all work through all slots and one step, all steps, or the longest
    of parent and child and one step.
    """
    longest: dict[str, int] = {}
    for name, blocks in account.asked.items():
        parent = name.partition("~")[0]
        longest.setdefault(parent, 0)
        if name != parent:
            longest[parent] = max(longest[parent], blocks)
    path = max(account.asked[parent] + blocks for parent, blocks in longest.items()) * account.grain
    work = sum(account.asked.values()) * account.grain / plan.capacity()
    step = fmean(step.seconds for step in own)
    return max(work + step, len(own) * step, path / plan.rates(1) + step)


def _timeline(plan: Plan, account: Account, begin: float, end: float) -> RunTimeline:
    part = (end - begin) / PARTS
    spans: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.environments}
    for name, begun in account.begun.items():
        stop = account.ended.get(name, end)
        if stop > begin and begun.at < end:
            spans[begun.environment].append((max(begun.at, begin) - begin, min(stop, end) - begin))
    trainers: dict[str, list[tuple[float, float]]] = {name: [] for name in plan.trained}
    publish = plan.trainer.publish_seconds
    for step in account.steps:
        stop = step.at - publish
        if begin < stop <= end:
            trainers[step.policy].append((max(stop - step.seconds, begin) - begin, stop - begin))
    at_work = {name: filled(found, PARTS, part) for name, found in trainers.items()}
    engine = _engine_shares(plan, account, begin, part)
    ends = [int((at - begin) / part) for at in account.ended.values() if begin <= at < end]
    counts = Counter(ends)
    return RunTimeline(
        began=begin,
        seconds=end - begin,
        part=part,
        in_flight={name: filled(found, PARTS, part) for name, found in spans.items()},
        committed=[counts[place] for place in range(PARTS)],
        dropped=[0] * PARTS,
        trainers=at_work,
        engine=list(engine),
        versions=[
            (step.at - begin, f"{step.policy}@0.{number}")
            for number, step in enumerate(account.steps, start=1)
            if begin < step.at < end
        ],
        idle={
            **{f"trainer of {name}": 1 - sum(shares) / PARTS for name, shares in at_work.items()},
            "engine": 1 - sum(engine) / PARTS,
        },
        problems=[],
    )


def _engine_shares(plan: Plan, account: Account, begin: float, part: float) -> list[float]:
    """Of each part, the share of the engines' capacity that was used, from the looks around its ends."""
    looks = account.looks
    at = 0
    totals = []
    for number in range(PARTS + 1):
        edge = begin + number * part
        while at + 2 < len(looks) and looks[at + 1].at <= edge:
            at += 1
        before, after = looks[at], looks[at + 1]
        share = (edge - before.at) / max(after.at - before.at, 1e-12)
        totals.append(before.full_seconds + share * (after.full_seconds - before.full_seconds))
    return [min(max((totals[n + 1] - totals[n]) / (part * plan.engine.replicas), 0.0), 1.0) for n in range(PARTS)]
