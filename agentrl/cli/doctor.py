"""`agentrl doctor`: what this machine has, what a run will use, what is missing, and the command that mends it.

Every probe stands alone: what one raises becomes a line, never the end of the report. Exit code 1 where the default run
(`agentrl demo`) cannot work.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING

from agentrl.cli import probes
from agentrl.cli.output import print_json
from agentrl.cli.probes import Check
from agentrl.core.safe import safe_line
from agentrl.observe.progress import waiting

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

SECTIONS: dict[str, tuple[Callable[[], list[Check]], ...]] = {
    "this machine": (probes.python, probes.processor, probes.memory, probes.gpu, probes.disk, probes.shadows),
    "installed": (probes.packages, probes.torch_runs, probes.ray_runs, probes.vllm, probes.model),
    "the demo will use": (probes.plan,),
}
_MARKS = {"ok": " ", "note": "·", "missing": "✗"}


def doctor(options: argparse.Namespace) -> int:
    """`agentrl doctor`; exit code 1 where something the default run needs is missing."""
    with waiting("looking at this machine", sys.stderr):  # importing torch takes seconds
        report = {title: [check for probe in section for check in _run(probe)] for title, section in SECTIONS.items()}
    missing = [check for checks in report.values() for check in checks if check.level == "missing"]
    if options.json:
        sections = {title: [asdict(check) for check in checks] for title, checks in report.items()}
        print_json({"ready": not missing, "sections": sections})
        return 1 if missing else 0
    for title, checks in report.items():
        sys.stdout.write(f"{title}\n")
        for check in checks:
            sys.stdout.write(f"  {_MARKS[check.level]} {check.name:<25} {safe_line(check.found)}\n")
            if check.fix:
                sys.stdout.write(f"    {'':<25} → {safe_line(check.fix)}\n")
    ready = "ready: try `agentrl demo`" if not missing else f"not ready: {len(missing)} thing(s) marked ✗ to mend"
    sys.stdout.write(f"{ready}\n")
    return 1 if missing else 0


def _run(probe: Callable[[], list[Check]]) -> list[Check]:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - a probe that fails must not hide what the others found
        return [Check(name=probe.__name__, found=f"cannot be told ({type(error).__name__}: {error})", level="note")]


def version(options: argparse.Namespace) -> int:
    """`agentrl --version`."""
    sys.stdout.write(f"agentrl {metadata.version('agentrl')}\n")
    return 0
