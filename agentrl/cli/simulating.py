"""`agentrl simulate`: predicts throughput for given episodes on other hardware and settings, and names the setting to
change."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, NamedTuple

from agentrl.cli.output import print_json, print_text
from agentrl.core.errors import ConfigError, InputError, StorageError

if TYPE_CHECKING:
    import argparse

    from agentrl.simulation.calibration import Calibration
    from agentrl.simulation.plan import Plan
    from agentrl.simulation.run import Measured

STEPS = 12
"""Default number of measured steps."""


class _Simulation(NamedTuple):
    """The run to simulate."""

    name: str
    plan: Plan
    steps: int
    skipped: int
    """Number of first steps that are not measured."""
    run: Calibration | None


def simulate(options: argparse.Namespace) -> int:
    """`agentrl simulate [FILE.toml] [--from RUN] [--steps N] [--as-is] [--timeline FILE.svg]`."""
    from agentrl.simulation.report import advice, bottleneck, check, knobs, simulation_page, turn

    asked = _asked(options)
    try:
        check(asked.plan)
    except ConfigError as error:
        raise ConfigError(f"{asked.name}: {error}") from error
    measured = _measured(asked.plan, asked)
    turned = []
    if not options.as_is:
        count = sum(1 for _ in knobs(asked.plan))
        for number, each in enumerate(turn(asked.plan, measured, lambda plan: _measured(plan, asked)), start=1):
            turned.append(each)
            _tell(f"setting {number} of {count}: {each.knob}")
        _tell("")
    if options.timeline is not None:
        _write(options, asked.name, measured)
    run = None if asked.run is None else asked.run.measured
    if options.json:
        print_json(
            {
                **{field.name: getattr(measured, field.name) for field in dataclasses.fields(measured)},
                "bottleneck": bottleneck(measured),
                "knobs": turned,
                "advice": advice(turned) if turned else [],
                "plan": asked.plan.model_dump(mode="json"),
                "measured": run,
                "simulated": {
                    "engine": measured.engine_active,
                    "trainer": measured.trainer_busy,
                    "steps_per_hour": next(iter(measured.steps_per_hour.values())),
                },
            }
        )
    else:
        print_text(simulation_page(asked.name, asked.plan, measured, turned, run))
    return 0


def _asked(options: argparse.Namespace) -> _Simulation:
    from agentrl.simulation.plan import load

    if options.steps is not None and not 2 <= options.steps <= 10_000:
        raise InputError("--steps must be a number from 2 to 10000")
    if options.run is None:
        if options.file is None:
            raise InputError("nothing to simulate: give a TOML file, such as examples/07_simulate.toml, or --from RUN")
        plan = load(options.file)
        return _Simulation(str(options.file), plan, options.steps or STEPS, plan.filling_steps, None)
    run = _calibrated(options)
    plan = run.plan if options.file is None else load(options.file, over=run.plan)
    steps = options.steps or min(run.steps - run.skipped, 10 * STEPS)
    name = options.run if options.file is None else f"{options.run} with {options.file}"
    return _Simulation(name, plan, steps, run.skipped, run)


def _calibrated(options: argparse.Namespace) -> Calibration:
    from agentrl.cli.runs import open_run
    from agentrl.simulation.calibration import calibrated

    with open_run(options) as reader:
        return calibrated(reader)


def _measured(plan: Plan, asked: _Simulation) -> Measured:
    from agentrl.simulation.run import Scenario, simulate_run

    return simulate_run(Scenario(plan=plan, steps=asked.skipped + asked.steps, skipped=asked.skipped))


def _write(options: argparse.Namespace, name: str, measured: Measured) -> None:
    from agentrl.simulation.report import timelines_svg

    try:
        options.timeline.write_text(timelines_svg([(name, measured.timeline)]), encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{options.timeline}: cannot be written ({error.strerror})") from error


def _tell(text: str) -> None:
    """Show the progress on a terminal."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
