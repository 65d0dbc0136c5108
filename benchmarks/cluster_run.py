"""The part of `benchmarks.cluster` about one run over three hosts, and the same on one of them.

`hosts_used`: hosts in whose namespace all parts of the run were seen that the plan puts there: ranks on 1 and 2,
engines on 2 and 3, workers on all. `reward_end`: on held-out tasks, after `examples/01_tool_use.toml`.
`wall_over_one_host`: seconds of training over those of the same processes on one host. `runs_hidden`: 1 where it ended
well although the run directory and the home of host 1 are hidden on the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.chaos import ROLES
from tests.journal_oracle import judge
from tests.support.hosts import Hosts, unavailable

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "01_tool_use.toml"
PLANNED = {1: {"rank", "worker"}, 2: {"rank", "engine", "worker"}, 3: {"engine", "worker"}}
QUICK = ["--steps=3", "--evaluation.tasks=0", "--policies.solver.step_size=16"]
PARTS = ["--workers=3", "--trainer.workers=2", "--engine.replicas=2", "--directory=/tmp/runs"]
LOOK_S = 0.5


def figures(quick: bool) -> dict[str, float | None]:
    """See the module."""
    if reason := unavailable():
        print(f"not measured: {reason}", flush=True)
        return {}
    settings = [*PARTS, *(QUICK if quick else [])]
    with Hosts(3) as hosts:
        one, _ = trained(hosts, "one", [*settings, "--engine.placement=process"])
        hosts.start_ray([1, 2, 3], hide=hosts.directory / "1")
        three, seen = trained(hosts, "three", [*settings, "--cluster.address=auto"])
        hidden = not any((hosts.directory / number / "tmp" / "runs").exists() for number in "23")
    print(f"seen: { {number: sorted(roles) for number, roles in seen.items()} }", flush=True)
    return {
        "hosts_used": sum(roles <= seen[number] for number, roles in PLANNED.items()),
        "runs_hidden": float(hidden),
        "reward_end": None if quick else three["reward_end"],
        "wall_over_one_host": None if quick else three["rl_seconds"] / one["rl_seconds"],
    }


def trained(hosts: Hosts, name: str, settings: list[str]) -> tuple[dict[str, Any], dict[int, set[str]]]:
    """Train on host 1; the run's summary, and the roles of its processes by host."""
    seen: dict[int, set[str]] = defaultdict(set)
    home = hosts.directory / "1" / "tmp"
    with (home / f"{name}.log").open("w") as log:
        command = ["-m", "agentrl.cli", "train", str(EXAMPLE), f"--name={name}", *settings]
        process = hosts.start(1, [sys.executable, *command], stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for number in PLANNED:
                seen[number] |= {role for role, marks in ROLES.items() if hosts.processes(number, *marks)}
            time.sleep(LOOK_S)
    said = (home / f"{name}.log").read_text()
    if process.returncode or (faults := judge(home / "runs" / name, ended=True)):
        raise SystemExit(f"{name} ended with {process.returncode}: {said[-4000:]}")
    summary: dict[str, Any] = json.loads((home / "runs" / name / "summary.json").read_text())
    print(f"{name}: {summary.get('reward_end')} in {summary.get('rl_seconds')} s, {len(faults)} faults", flush=True)
    return summary, seen
