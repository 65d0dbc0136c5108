"""The report of a simulation: the setting to change, a terminal page, and an SVG of timelines on one time axis.

A knob is a setting that can be changed: `try_knobs` simulates the plan with each at a neighbouring value and compares.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.app.policies import units_per_root_group
from agentrl.core.errors import ConfigError
from agentrl.environment.base import Environment
from agentrl.inspection.render import TerminalPage, run_timeline_page
from agentrl.simulation.plan import SimulationPlan
from agentrl.simulation.simulated_environments import make_root_environment

if TYPE_CHECKING:
    from agentrl.inspection.timelines import RunTimeline
    from agentrl.simulation.calibration import BusyShares
    from agentrl.simulation.run import SimulationResult

FULL = 0.9
"""Share of busy time at which engines or trainer count as the bottleneck."""
SEEN = 0.05
"""Minimum share of the time that the report mentions."""
WORTH = 0.03
"""Minimum relative change of the throughput that counts as significant."""


WIDTH, LEFT, RIGHT = 860, 150, 70
_PLOT = WIDTH - LEFT - RIGHT
_ROW, _GAP, _TITLE, _AXIS = 34, 8, 34, 30
_STYLE = """
text { font: 12px "DejaVu Sans", sans-serif; fill: #475467; } .title { font-weight: bold; fill: #1d2939; }
.frame { fill: #f2f4f7; } .engine { fill: #2563eb; } .trainer { fill: #d9480f; } .flight { fill: #98a2b3; }
.version { stroke: #98a2b3; stroke-width: 1; } .axis { stroke: #98a2b3; }
"""


class KnobResult(msgspec.Struct, frozen=True):
    """Knob and the results of the simulation with its other value."""

    knob: str
    """Name of the setting."""
    now: Any
    then: Any
    throughput: float
    """Trained tokens per second, relative to the unchanged plan."""
    engine_busy: float
    trainer_busy: float
    token_lag: float
    costs: str
    """Cost of the change: `hardware`, or `learning` if the composition of steps changes; else empty."""


class Knob(msgspec.Struct, frozen=True):
    """Setting and a neighbouring value."""

    name: str
    now: Any
    then: Any
    plan: SimulationPlan
    costs: str = ""


def knobs(plan: SimulationPlan) -> Iterator[Knob]:
    """Yield the settings that a person can change, with each neighbouring value that production accepts."""
    for knob in _knobs(plan):
        if knob.now != knob.then and _is_possible(knob.plan):
            yield knob


def _knobs(plan: SimulationPlan) -> Iterator[Knob]:
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
        if plan.trainer.step_seconds is not None:  # keeps the time per unit
            made = msgspec.structs.replace(
                made, plan=_changed(made.plan, "trainer.step_seconds", plan.trainer.step_seconds * factor)
            )
        yield made
    for then in (plan.credit.group_size * 2, plan.credit.group_size // 2):
        yield _knob(plan, "credit.group_size", then, costs="learning")


def _hardware(plan: SimulationPlan) -> Iterator[Knob]:
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


def _knob(plan: SimulationPlan, name: str, then: Any, *, costs: str = "") -> Knob:
    now: Any = plan
    for part in name.split("."):
        now = now[part] if isinstance(now, dict) else getattr(now, part)
    return Knob(name, now, then, _changed(plan, name, then), costs)


def _changed(plan: SimulationPlan, name: str, value: Any) -> SimulationPlan:
    """Return the plan with another value of a setting, without validation."""

    def put(owner: Any, path: Sequence[str]) -> Any:
        if not path:
            return value
        head, *rest = path
        if isinstance(owner, dict):
            return {**owner, head: put(owner[head], rest)}
        return owner.model_copy(update={head: put(getattr(owner, head), rest)})

    changed: SimulationPlan = put(plan, name.split("."))
    return changed


def _is_possible(plan: SimulationPlan) -> bool:
    try:
        checked = SimulationPlan.model_validate(plan.model_dump(mode="json"))
        validate_simulation_plan(checked)
    except (ConfigError, ValueError):
        return False
    return True


def validate_simulation_plan(plan: SimulationPlan) -> None:
    """Refuse a plan that production would refuse at the start.

    Raises:
        ConfigError: the plan is invalid; the message contains the remedy.
    """
    environment: type[Environment] = make_root_environment(plan)
    units_per_root_group(plan.config(1), environment)


def try_knobs(
    plan: SimulationPlan, base: SimulationResult, measure: Callable[[SimulationPlan], SimulationResult]
) -> Iterator[KnobResult]:
    """Simulate the plan with each knob changed."""
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


def bottleneck(measured: SimulationResult) -> str:
    """Name the bottleneck of the run, as a sentence."""
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
    """Return the best worthwhile change of each kind, as sentences."""
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
                f"{what}: {best.knob} = {format_setting(best.then)} instead of {format_setting(best.now)}, "
                f"{best.throughput - 1:+.0%}, "
                f"token lag {best.token_lag:.1f}"
            )
    spare = [
        each for each in turned if each.costs == "hardware" and abs(each.throughput - 1) < WORTH and _is_less(each)
    ]
    told += [
        f"Not needed: {each.knob} = {format_setting(each.then)} would do as well ({each.throughput - 1:+.0%})"
        for each in spare
    ]
    return told or ["No setting improves throughput by more than chance."]


def _is_less(turned: KnobResult) -> bool:
    """Whether the change reduces hardware."""
    return bool(turned.then > turned.now) == (turned.knob == "trainer.step_seconds")


def format_setting(value: Any) -> str:
    """Format the value of a setting."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def simulation_page(
    name: str,
    plan: SimulationPlan,
    measured: SimulationResult,
    turned: Sequence[KnobResult],
    run: BusyShares | None = None,
) -> TerminalPage:
    """Return a page with assumptions, busy shares, the timeline, and the effect of each knob.

    Args:
        name: name of the simulated plan.
        plan: simulated plan.
        measured: results of the simulation.
        turned: results of the knobs.
        run: busy shares of a real run of the plan.
    """
    page = TerminalPage()
    steps = len(measured.step_times)
    page.line(
        f"{name}: {steps} steps simulated in {measured.cpu_seconds:.0f} s, the last "
        f"{round(measured.seconds * measured.steps_per_hour[next(iter(plan.trained))] / 3600)} measured"
    )
    page.facts(assumptions(plan))
    page.heading("busy")
    page.facts(format_result_rows(measured))
    if run is not None:
        page.heading("beside the real run")
        pairs = [
            ("an engine has calls", run.engine, measured.engine_active, "{:.0%}"),
            ("trainer", run.trainer, measured.trainer_busy, "{:.0%}"),
            ("steps per hour", run.steps_per_hour, next(iter(measured.steps_per_hour.values())), "{:,.0f}"),
        ]
        page.table(
            ["", "measured>", "simulated>"],
            ([told, form.format(real), form.format(simulated)] for told, real, simulated, form in pairs),
        )
    page.heading("timeline of the measured steps")
    page.add(run_timeline_page(measured.timeline))
    page.heading("bottleneck")
    page.line(f"  {bottleneck(measured)}")
    if turned:
        page.heading("knobs")
        page.table(
            ["setting", "now>", "then>", "throughput>", "engines>", "trainer>", "token lag>", "costs"],
            (_knob_row(each) for each in sorted(turned, key=lambda each: -each.throughput)),
        )
        for line in advice(turned):
            page.line(f"  {line}")
    return page


def assumptions(plan: SimulationPlan) -> list[tuple[str, str]]:
    """Return the assumptions of a simulation as rows of label and text."""
    engine, rates = plan.engine, plan.rates
    by = f"{engine.model} on {engine.gpus} × {engine.gpu}, " if engine.model else ""
    speed = f"{rates(1):.3g} tokens/s a call alone, {rates(engine.slots):.3g} among {engine.slots}"
    estimate = "" if engine.rates else " (estimated; measure it and set engine.rates)"
    room = "" if plan.kv_tokens is None else f", keys and values of {plan.kv_tokens:,} tokens"
    prefill = "" if math.isinf(plan.prefill_rate) else f", contexts at {plan.prefill_rate:,.0f} tokens/s"
    trainer = plan.trainer
    learns = (
        f"{trainer.step_seconds:g} s a step"
        if trainer.step_seconds is not None
        else f"{trainer.gpus} × {engine.gpu}, {plan.train_rate():,.0f} tokens/s"
    )
    return [("engines", f"{engine.replicas}: {by}{speed}{room}{prefill}{estimate}"), ("trainer", learns)]


def format_result_rows(measured: SimulationResult) -> list[tuple[str, str]]:
    """Return busy shares, rates, lags and tails as rows of label and text."""
    facts = [
        ("engines", f"{measured.engine_busy:.0%} of their capacity; {measured.slots_busy:.0%} of the slots run"),
        ("trainer", f"{measured.trainer_busy:.0%}"),
        ("steps", ", ".join(f"{rate:.1f} per hour of {name}" for name, rate in measured.steps_per_hour.items())),
        ("tokens", f"{measured.tokens_per_s:,.0f} per second"),
        ("token lag", f"{measured.token_lag:.2f} steps; {measured.older:.0%} are older than max_staleness"),
    ]
    for environment, (half, most, last) in measured.episode_seconds.items():
        facts.append(
            (environment, f"half end within {half:,.0f} s, 90 % within {most:,.0f} s, 99 % within {last:,.0f} s")
        )
    held = ", ".join(f"{reason} {share:.0%}" for reason, share in measured.held.items())
    facts.append(("admission", f"held back by: {held}"))
    if measured.no_room or measured.preemptions:
        waits = f"calls wait for room for {measured.no_room:.0%} of the time"
        facts.append(("memory", f"{waits}; {measured.preemptions:,} were pushed out and computed again"))
    return facts


def _knob_row(turned: KnobResult) -> list[str]:
    return [
        turned.knob,
        format_setting(turned.now),
        format_setting(turned.then),
        f"{turned.throughput - 1:+.0%}",
        f"{turned.engine_busy:.0%}",
        f"{turned.trainer_busy:.0%}",
        f"{turned.token_lag:.2f}",
        turned.costs,
    ]


def timelines_svg(runs: Sequence[tuple[str, RunTimeline]], *, seconds: float | None = None) -> str:
    """Draw timelines as an SVG document.

    Args:
        runs: pairs of title and timeline.
        seconds: length of the drawn time axis in seconds; None: that of the longest timeline.
    """
    seconds = max(line.seconds for _, line in runs) if seconds is None else seconds
    unit, name = next(
        ((u, n) for u, n in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if seconds > 3 * u),
        (1.0, "seconds"),
    )
    parts: list[str] = []
    top = 8.0
    for title, line in runs:
        parts.append(f'<text class="title" x="{LEFT}" y="{top + 16:.0f}">{html.escape(title)}</text>')
        top += _TITLE - 8
        marks = top
        rows = [("engines", "engine", [share or 0.0 for share in line.engine], _busy(line, "engine"))]
        for policy, shares in line.trainers.items():
            label = "trainer" if len(line.trainers) == 1 else f"trainer of {policy}"
            rows.append((label, "trainer", shares, _busy(line, f"trainer of {policy}")))
        for environment, counts in line.in_flight.items():
            most = max(counts) or 1.0
            rows.append((f"{environment} in flight", "flight", [c / most for c in counts], f"≤ {most:.0f}"))
        for label, kind, shares, told in rows:
            parts += _timeline_row(label, kind, shares, told, top, line, seconds)
            top += _ROW + _GAP
        for at in (at for at, _ in line.versions if at <= seconds):
            x = LEFT + at / seconds * _PLOT
            parts.append(f'<line class="version" x1="{x:.1f}" x2="{x:.1f}" y1="{marks - 5:.0f}" y2="{marks - 1:.0f}"/>')
        top += 6
    parts += _axis(seconds / unit, name, top)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + _AXIS:.0f}" role="img">'
    about = "; ".join(f"{title}: engines {_busy(line, 'engine')}" for title, line in runs)
    paper = f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}<title>{html.escape(about)}</title>{paper}{''.join(parts)}</svg>\n"


def _busy(line: RunTimeline, name: str) -> str:
    return f"{1 - line.idle[name]:.0%}"


def _timeline_row(
    label: str, kind: str, shares: Sequence[float], told: str, top: float, line: RunTimeline, seconds: float
) -> list[str]:
    """Return one row of the SVG: a label, an area over time, and its total."""
    width = _PLOT * line.part / seconds
    shares = shares[: round(seconds / line.part)]
    bottom = top + _ROW
    points = [f"{LEFT:.1f},{bottom:.1f}"]
    for number, share in enumerate(shares):
        height = bottom - min(share, 1.0) * _ROW
        points += [f"{LEFT + number * width:.1f},{height:.1f}", f"{LEFT + (number + 1) * width:.1f},{height:.1f}"]
    points.append(f"{LEFT + len(shares) * width:.1f},{bottom:.1f}")
    middle = top + _ROW / 2 + 4
    return [
        f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{html.escape(label)}</text>',
        f'<rect class="frame" x="{LEFT}" y="{top:.0f}" width="{len(shares) * width:.1f}" height="{_ROW}"/>',
        f'<polygon class="{kind}" points="{" ".join(points)}"/>',
        f'<text x="{LEFT + len(shares) * width + 6:.0f}" y="{middle:.0f}">{html.escape(told)}</text>',
    ]


def _axis(length: float, name: str, top: float) -> list[str]:
    """Return the ticks of the time axis: four or five round times."""
    step = next(s for s in (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if length / s <= 6 or s == 1000)
    parts = [f'<line class="axis" x1="{LEFT}" x2="{LEFT + _PLOT}" y1="{top:.0f}" y2="{top:.0f}"/>']
    for number in range(int(length / step) + 1):
        x = LEFT + number * step / length * _PLOT
        told = f"{number * step:g}" + (f" {name}" if number == 0 else "")
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{top:.0f}" y2="{top + 4:.0f}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{top + 18:.0f}" text-anchor="{"start" if number == 0 else "middle"}">{told}</text>'
        )
    return parts
