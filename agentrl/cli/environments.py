"""`agentrl env …`: which environments there are, and whether one can be trained on."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json
from agentrl.inspection.safe import safe, safe_line

if TYPE_CHECKING:
    import argparse


def env_list(options: argparse.Namespace) -> int:
    """`agentrl env list`."""
    from agentrl.environment.registry import registered

    specs = registered()
    if options.json:
        print_json([asdict(spec) for spec in specs])
        return 0
    width = max((len(spec.id) for spec in specs), default=0)
    for spec in specs:
        sys.stdout.write(f"{safe_line(spec.id):<{width}}  {safe_line(spec.entry_point)}\n")
    if not specs:
        sys.stdout.write("no environments are installed\n")
    return 0


def env_check(options: argparse.Namespace) -> int:
    """`agentrl env check ID`; exit code 1 where a check failed."""
    from agentrl import check_environment

    report = check_environment(options.id)
    if options.json:
        print_json({"id": options.id, "passed": report.passed, "text": report.text})
    else:
        sys.stdout.write(safe(report.text).rstrip("\n") + "\n")
    return 0 if report.passed else 1
