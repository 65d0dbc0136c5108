"""Finds the setting to change: simulates a plan with one setting at a neighbouring value, and compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.app.policies import demands_of
from agentrl.core.errors import ConfigError
from agentrl.environment.base import Environment
from agentrl.simulation.plan import Plan
from agentrl.simulation.program import programs

if TYPE_CHECKING:
    from agentrl.simulation.run import Measured

FULL = 0.9
"""Busy for so much of the time, engines or trainer are the bottleneck."""
SEEN = 0.05
"""A share of the time that is worth telling."""
WORTH = 0.03
"""A change of the throughput that is more than chance."""


class KnobResult(msgspec.Struct, frozen=True):
    """A knob, and what the run was like with it turned."""

    knob: str
    """The setting's name."""
    now: Any
    then: Any
    throughput: float
    """Trained tokens per second, relative to the unchanged plan."""
    engine_busy: float
    trainer_busy: float
    token_lag: float
    costs: str
    """`hardware`, or `learning` where steps are made of other things; else empty."""


class Knob(msgspec.Struct, frozen=True):
    """A setting and a neighbouring value."""

    name: str
    now: Any
    then: Any
    plan: Plan
    costs: str = ""


def knobs(plan: Plan) -> Iterator[Knob]:
    """The settings that a person can turn, each to its neighbours; what production refuses is left out."""
    for knob in _knobs(plan):
        if knob.now != knob.then and _is_possible(knob.plan):
            yield knob


def _knobs(plan: Plan) -> Iterator[Knob]:
    for name, policy in plan.trained.items():
        for then in (policy.max_staleness + 1, policy.max_staleness - 1):
            yield _knob(plan, f"policies.{name}.max_staleness", then)
    yield _knob(plan, "credit.release", "group" if plan.credit.release == "late" else "late")
    yield _knob(plan, "max_in_flight", plan.max_in_flight * 2)
    for then in (plan.engine.slots * 2, plan.engine.slots // 2):
        yield _knob(plan, "engine.slots", then)
    yield from _hardware(plan)
    first = next(iter(plan.trained))
    for factor in (2.0, 0.5):
        size = plan.policies[first].step_size
        made = _knob(plan, f"policies.{first}.step_size", int(size * factor), costs="learning")
        if plan.trainer.step_seconds is not None:  # as long per unit as before
            made = msgspec.structs.replace(
                made, plan=_changed(made.plan, "trainer.step_seconds", plan.trainer.step_seconds * factor)
            )
        yield made
    for then in (plan.credit.group_size * 2, plan.credit.group_size // 2):
        yield _knob(plan, "credit.group_size", then, costs="learning")


def _hardware(plan: Plan) -> Iterator[Knob]:
    for then in (plan.engine.replicas + 1, plan.engine.replicas - 1):
        yield _knob(plan, "engine.replicas", then, costs="hardware")
    if plan.kv_tokens is not None:
        for then in (plan.kv_tokens * 2, plan.kv_tokens // 2):
            changed = _changed(plan, "engine.kv_tokens", then)
            yield Knob("engine.kv_tokens", plan.kv_tokens, then, changed, costs="hardware")
    if plan.trainer.step_seconds is None:
        for then in (plan.trainer.gpus * 2, plan.trainer.gpus // 2):
            yield _knob(plan, "trainer.gpus", then, costs="hardware")
    else:
        for seconds in (plan.trainer.step_seconds / 2, plan.trainer.step_seconds * 2):
            yield _knob(plan, "trainer.step_seconds", seconds, costs="hardware")


def _knob(plan: Plan, name: str, then: Any, *, costs: str = "") -> Knob:
    now: Any = plan
    for part in name.split("."):
        now = now[part] if isinstance(now, dict) else getattr(now, part)
    return Knob(name, now, then, _changed(plan, name, then), costs)


def _changed(plan: Plan, name: str, value: Any) -> Plan:
    """The plan with another value of a setting; not checked."""

    def put(owner: Any, path: Sequence[str]) -> Any:
        if not path:
            return value
        head, *rest = path
        if isinstance(owner, dict):
            return {**owner, head: put(owner[head], rest)}
        return owner.model_copy(update={head: put(getattr(owner, head), rest)})

    changed: Plan = put(plan, name.split("."))
    return changed


def _is_possible(plan: Plan) -> bool:
    try:
        checked = Plan.model_validate(plan.model_dump(mode="json"))
        check(checked)
    except (ConfigError, ValueError):
        return False
    return True


def check(plan: Plan) -> None:
    """Refuse what production would refuse when it starts.

    Raises:
        ConfigError: what does not fit, and the mend.
    """
    environment: type[Environment] = programs(plan)
    demands_of(plan.config(1), environment)


def turn(plan: Plan, base: Measured, measure: Callable[[Plan], Measured]) -> Iterator[KnobResult]:
    """Simulate every knob turned."""
    for knob in knobs(plan):
        measured = measure(knob.plan)
        yield KnobResult(
            knob=knob.name,
            now=knob.now,
            then=knob.then,
            throughput=measured.tokens_per_s / base.tokens_per_s,
            engine_busy=measured.engine_busy,
            trainer_busy=measured.trainer_busy,
            token_lag=measured.token_lag,
            costs=knob.costs,
        )


def bottleneck(measured: Measured) -> str:
    """The bottleneck of the run, as a sentence."""
    busiest, share = max(
        (("the engines", measured.engine_busy), ("the trainer", measured.trainer_busy)), key=lambda pair: pair[1]
    )
    if share >= FULL:
        waits = f"calls wait for room in it for {measured.no_room:.0%} of the time"
        if measured.no_room >= 0.5:
            return f"the engines' memory: {waits}, while {measured.slots_busy:.0%} of the slots run"
        memory = f"; {waits.replace(' in it ', ' in their memory ')}" if measured.no_room > SEEN else ""
        return f"{busiest}: busy for {share:.0%} of the time{memory}"
    idle = f"neither engines ({measured.engine_busy:.0%} busy) nor trainer ({measured.trainer_busy:.0%})"
    held = {reason: part for reason, part in measured.held.items() if reason != "nothing"}
    if not held:
        return f"{idle}: steps wait for the slowest episodes"
    reason, part = max(held.items(), key=lambda pair: pair[1])
    return f"{idle}: for {part:.0%} of the time {reason} holds new episodes back until slow ones have been trained"


def advice(turned: Sequence[KnobResult]) -> list[str]:
    """The best change of each kind that is worth making, as sentences."""
    told = []
    for costs, what in (
        ("", "Turn"),
        ("hardware", "With other hardware"),
        ("learning", "With other steps, which learn otherwise"),
    ):
        worth = [each for each in turned if each.costs == costs and each.throughput >= 1 + WORTH]
        if worth:
            best = max(worth, key=lambda each: each.throughput)
            told.append(
                f"{what}: {best.knob} = {shown(best.then)} instead of {shown(best.now)}, {best.throughput - 1:+.0%}, "
                f"token lag {best.token_lag:.1f}"
            )
    spare = [
        each for each in turned if each.costs == "hardware" and abs(each.throughput - 1) < WORTH and _is_less(each)
    ]
    told += [
        f"Not needed: {each.knob} = {shown(each.then)} would do as well ({each.throughput - 1:+.0%})" for each in spare
    ]
    return told or ["No knob brings more than chance does."]


def _is_less(turned: KnobResult) -> bool:
    """Whether it is less hardware."""
    return bool(turned.then > turned.now) == (turned.knob == "trainer.step_seconds")


def shown(value: Any) -> str:
    """A setting's value."""
    return f"{value:g}" if isinstance(value, float) else str(value)
