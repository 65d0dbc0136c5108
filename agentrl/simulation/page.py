"""What a simulation found, as a terminal shows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.inspection.render import Page, run_timeline_page
from agentrl.simulation.knobs import Turned, advice, bottleneck, shown

if TYPE_CHECKING:
    from agentrl.simulation.calibration import Busy
    from agentrl.simulation.measured import Measured
    from agentrl.simulation.plan import Plan


def simulation_page(
    name: str, plan: Plan, measured: Measured, turned: Sequence[Turned], run: Busy | None = None
) -> Page:
    """Assumptions, busy shares, the timeline, and what each knob would bring.

    Args:
        name: of what was simulated.
        plan: the same.
        measured: what came out.
        turned: the knobs.
        run: what a real run of it was like.
    """
    page = Page()
    steps = len(measured.step_times)
    page.line(
        f"{name}: {steps} steps simulated in {measured.cpu_seconds:.0f} s, the last "
        f"{round(measured.seconds * measured.steps_per_hour[next(iter(plan.trained))] / 3600)} measured"
    )
    page.facts(assumptions(plan))
    page.heading("busy")
    page.facts(results(measured))
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
            (_row(each) for each in sorted(turned, key=lambda each: -each.throughput)),
        )
        for line in advice(turned):
            page.line(f"  {line}")
    return page


def assumptions(plan: Plan) -> list[tuple[str, str]]:
    """What was simulated, in words."""
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


def results(measured: Measured) -> list[tuple[str, str]]:
    """Busy shares, rates, lags and tails, in words."""
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


def _row(turned: Turned) -> list[str]:
    return [
        turned.knob,
        shown(turned.now),
        shown(turned.then),
        f"{turned.throughput - 1:+.0%}",
        f"{turned.engine_busy:.0%}",
        f"{turned.trainer_busy:.0%}",
        f"{turned.token_lag:.2f}",
        turned.costs,
    ]
