"""CPU seconds per rollout of four turns when the model answers at once.

Both have the model in their own process and 128 rollouts in flight. verifiers has the cheapest harness that its
contract allows, which starts no program; its harnesses call the model through its interception server. agentrl runs
`benchmarks.overhead`: a scripted engine, with a real run's chat template, journal and buffer.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import CONTENDERS, SCRIPTS
from benchmarks.peers.environments import ROOT, Built
from benchmarks.peers.running import QUIET, machine_cpu_seconds
from benchmarks.processes import children_cpu_seconds

IN_FLIGHT = 128  # what staleness 1 allows agentrl
OVERHEAD = """
import asyncio, sys, tempfile
from pathlib import Path
from benchmarks.overhead import train_once
with tempfile.TemporaryDirectory() as scratch:
    asyncio.run(train_once(Path(scratch) / "warm", 4))
    print(asyncio.run(train_once(Path(scratch) / "run", int(sys.argv[1]))))
"""


def measure(name: str, built: Built, *, quick: bool) -> dict[str, Any]:
    """CPU milliseconds per rollout."""
    started, before = time.monotonic(), machine_cpu_seconds() - children_cpu_seconds()
    if name == "verifiers":
        record = verifiers(built.python, 256 if quick else 2048)
    else:
        command = [str(built.python), "-c", OVERHEAD, str(4 if quick else 32)]
        output = _output(command, {**os.environ, **QUIET, "PYTHONPATH": str(ROOT)})
        record = {"rollout_cpu_ms": 1e3 * float(output.splitlines()[-1])}
    others = machine_cpu_seconds() - children_cpu_seconds() - before
    return record | {"cores_of_others": max(0.0, others) / (time.monotonic() - started)}


def verifiers(python: Path, count: int) -> dict[str, Any]:
    """Rollouts of verifiers alone."""
    command = [str(python), str(SCRIPTS / CONTENDERS["verifiers"].user_files[0]), str(count), str(IN_FLIGHT)]
    result = json.loads(_output(command, {**os.environ, **QUIET}).splitlines()[-1])
    if result["ok"] != count or result["reward"] != count:
        raise SystemExit(f"verifiers finished {result['ok']} of {count} rollouts: {result['errors']}")
    return {"rollout_cpu_ms": 1e3 * result["cpu_s"] / count, "rollouts_per_s": count / result["wall_s"]}


def _output(command: list[str], environment: dict[str, str]) -> str:
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{command[:2]}: exit code {finished.returncode}\n{finished.stderr[-4000:]}")
    return finished.stdout
