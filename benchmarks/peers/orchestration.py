"""CPU seconds per rollout of four turns when the model answers at once.

verifiers drives a mock chat server in another process, whose CPU seconds do not count, with 64 rollouts in flight and
the cheapest harness its contract allows: one that runs in its own process, so no rollout starts a program. agentrl runs
`benchmarks.overhead`: a scripted engine in its process, with a real run's chat template, journal and buffer.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.peers.contenders import SCRIPTS, VERIFIERS
from benchmarks.peers.environments import ROOT, Built

IN_FLIGHT = 64
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
    if name == "verifiers":
        return verifiers(built.python, 128 if quick else 1024)
    command = [str(built.python), "-c", OVERHEAD, str(4 if quick else 32)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return {"rollout_cpu_ms": 1e3 * float(_output(command, environment).splitlines()[-1])}


def verifiers(python: Path, count: int) -> dict[str, Any]:
    """Rollouts against the mock server."""
    with subprocess.Popen([str(python), str(SCRIPTS / "mock_server.py")], stdout=subprocess.PIPE, text=True) as mock:
        try:
            assert mock.stdout is not None
            url = f"http://127.0.0.1:{int(mock.stdout.readline())}/v1"
            command = [str(python), str(SCRIPTS / VERIFIERS.script), url, str(count), str(IN_FLIGHT)]
            result = json.loads(_output(command, dict(os.environ)).splitlines()[-1])
        finally:
            mock.terminate()
    if result["ok"] != count or result["reward"] != count:
        raise SystemExit(f"verifiers finished {result['ok']} of {count} rollouts: {result['errors']}")
    return {"rollout_cpu_ms": 1e3 * result["cpu_s"] / count, "rollouts_per_s": count / result["wall_s"]}


def _output(command: list[str], environment: dict[str, str]) -> str:
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{command[:2]}: exit code {finished.returncode}\n{finished.stderr[-4000:]}")
    return finished.stdout
