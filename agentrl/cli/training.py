"""`agentrl train` and `agentrl evaluate`: from a file to a finished run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json, print_text
from agentrl.config.load import dump_toml, load
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from agentrl.config.run import RunConfig


def train(options: argparse.Namespace) -> int:
    """`agentrl train FILE [--section.field=value …] [--model DIR] [--resume] [--dry-run]`."""
    config = _config(options)
    if options.dry_run:
        if options.json:
            print_json(config.model_dump(mode="json"))
        else:
            sys.stdout.write(dump_toml(config))
        return 0
    from agentrl import app

    run = app.train(config, resume=options.resume)
    if options.json:
        print_json({"path": str(run.path), "metrics": dict(run.metrics), "policies": dict(run.policies)})
        return 0
    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.render import curves

    reader = RunReader(run.path)
    try:
        print_text(curves(reader.curve()))
    finally:
        reader.close()
    sys.stdout.write(f"run: {run.path}\n")
    for policy, path in run.policies.items():
        sys.stdout.write(f"{policy}: {path}\n")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """`agentrl evaluate FILE [--section.field=value …] [--policy DIR] [--tasks N]`."""
    config = _config(options)
    if options.tasks is not None and options.tasks < 1:
        raise ConfigError(f"--tasks {options.tasks}: at least 1")
    from agentrl import app

    metrics = app.evaluate(config, policy=options.policy, tasks=options.tasks)
    if options.json:
        print_json(dict(metrics))
        return 0
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        sys.stdout.write(f"{name:<{width}}  {value:.4g}\n")
    return 0


def _config(options: argparse.Namespace) -> RunConfig:
    overrides = list(options.overrides)
    if options.model is not None:
        here = Path(options.model)
        overrides.append(f"model.path={here.resolve() if here.exists() else here}")
    return load(options.file, overrides)
