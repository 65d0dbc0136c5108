"""`agentrl env …`: which environments there are, and whether one can be trained on."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from agentrl.cli.output import print_json
from agentrl.core.errors import AgentRLError
from agentrl.inspection.safe import safe, safe_line

if TYPE_CHECKING:
    import argparse

    from agentrl.environment.registry import EnvironmentSpec


def env_list(options: argparse.Namespace) -> int:
    """`agentrl env list`."""
    from agentrl.environment.registry import registered

    found = [_described(spec) for spec in registered()]
    if options.json:
        print_json(found)
        return 0
    width = max((len(line["id"]) for line in found), default=0)
    for line in found:
        about = f"cannot be used: {line['error']}" if line["error"] else line["description"]
        sys.stdout.write(f"{safe_line(line['id']):<{width}}  {safe_line(about)}\n")
        seats = f"; seats: {', '.join(line['seats'])}" if line["seats"] else ""
        sys.stdout.write(f"{'':<{width}}  from {safe_line(line['entry_point'] + seats)}\n")
    if not found:
        sys.stdout.write("no environments are installed; write one with `agentrl env new NAME`\n")
    return 0


def env_check(options: argparse.Namespace) -> int:
    """`agentrl env check ID`; exit code 1 where a check failed."""
    from agentrl import check_environment
    from agentrl.observe.progress import waiting

    with waiting(f"checking {options.id}", sys.stderr):
        report = check_environment(options.id)
    if options.json:
        print_json({"id": options.id, "passed": report.passed, "class": report.resume_class, "text": report.text})
    else:
        sys.stdout.write(safe(report.text).rstrip("\n") + "\n")
    return 0 if report.passed else 1


def _described(spec: EnvironmentSpec) -> dict[str, Any]:
    from agentrl.environment.registry import resolve

    line: dict[str, Any] = {"id": spec.id, "entry_point": spec.entry_point, "description": "", "seats": [], "error": ""}
    try:
        environment = resolve(spec.id)
    except Exception as error:  # noqa: BLE001 - foreign code: one environment that cannot be imported hides no other
        kind = "" if isinstance(error, AgentRLError) else f"{type(error).__name__}: "
        return {**line, "error": f"{kind}{error}"}
    description = (inspect.getdoc(environment) or "no docstring").splitlines()[0]
    return {**line, "description": description, "seats": list(environment.seats)}
