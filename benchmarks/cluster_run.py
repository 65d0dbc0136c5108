"""The part of `benchmarks.cluster` about one run over three hosts, and the same on one of them.

`hosts_used`: hosts in whose namespace all parts of the run were seen that the plan puts there: ranks on 1 and 2,
engines on 2 and 3, workers on all. `reward_end`: on `TASKS` held-out tasks, after all steps of
`examples/01_tool_use.toml`. `wall_over_one_host`: seconds per training step, over those of a shorter run with the same
processes on one host. `runs_hidden`: 1 where it ended well although the run directory and the home of host 1 are hidden
on the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.chaos import ROLES
from tests.journal_oracle import judge
from tests.support.hosts import Hosts, unavailable

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "01_tool_use.toml"
PLANNED = {1: {"rank", "worker"}, 2: {"rank", "engine", "worker"}, 3: {"engine", "worker"}}
TASKS, STEPS_OF_ONE = 128, 20
QUICK = ["--steps=3", "--evaluation.tasks=0", "--policies.solver.step_size=16"]
PARTS = ["--workers=3", "--trainer.ranks=2", "--engine.replicas=2", "--directory=/tmp/runs"]
LOOK_S = 2.0
"""Seconds between two looks at the run's processes, and at what it says."""


def figures(quick: bool) -> dict[str, float | None]:
    """See the module."""
    if reason := unavailable():
        print(f"not measured: {reason}", flush=True)
        return {}
    alone = QUICK if quick else [f"--steps={STEPS_OF_ONE}", "--evaluation.tasks=0"]
    whole = QUICK if quick else [f"--evaluation.tasks={TASKS}"]
    with Hosts(3) as hosts:
        hosts.start_ray([1, 2, 3], hide=hosts.directory / "1")
        three = trained(hosts, "three", [*PARTS, *whole, "--cluster.address=auto"])
        hidden = not any((hosts.directory / number / "tmp" / "runs").exists() for number in "23")
        for number in PLANNED:
            hosts.kill(number)  # Ray's processes, which the other run would share the machine with
        one = trained(hosts, "one", [*PARTS, *alone, "--engine.replicas=1"])
    print(f"seen: { {number: sorted(roles) for number, roles in three.seen.items()} }", flush=True)
    return {
        "hosts_used": sum(roles <= three.seen[number] for number, roles in PLANNED.items()),
        "runs_hidden": float(hidden),
        "reward_end": None if quick else three.summary["reward_end"],
        "wall_over_one_host": None if quick else three.step_s / one.step_s,
    }


class Trained(NamedTuple):
    """A run that has ended."""

    summary: dict[str, Any]
    seen: dict[int, set[str]]
    """Roles of its processes, by host."""

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return float(self.summary["rl_seconds"] / self.summary["steps"])


def trained(hosts: Hosts, name: str, settings: list[str]) -> Trained:
    """Train on host 1, and print what the run says."""
    seen: dict[int, set[str]] = defaultdict(set)
    home = hosts.directory / "1" / "tmp"
    log = home / f"{name}.log"
    with log.open("w") as output, log.open() as said:
        command = ["-m", "agentrl.cli", "train", str(EXAMPLE), f"--name={name}", *settings]
        process = hosts.start(1, [sys.executable, *command], stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            for number in PLANNED:
                seen[number] |= hosts.roles(number, ROLES)
            time.sleep(LOOK_S)
            for line in said:
                print(f"  {name}: {line}", end="", flush=True)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}: {log.read_text()[-4000:]}")
    if faults := judge(home / "runs" / name, ended=True):
        raise SystemExit(f"{name} ended, and its journal does not hold: {faults}")
    summary: dict[str, Any] = json.loads((home / "runs" / name / "summary.json").read_text())
    print(f"{name}: {summary.get('reward_end')} in {summary.get('rl_seconds')} s", flush=True)
    return Trained(summary, seen)
