"""Damaged runs, and the reading commands about them: an answer or a named error, whatever the files hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.support.sample_run import write_sample_run


def sample(directory: Path) -> Path:
    """A whole run."""
    return write_sample_run(directory).path


def crashed(whole: Path, first: int, count: int) -> Iterator[int]:
    """The seeds of a batch after whose damage something ended otherwise than it may, each told."""
    expected = first
    while expected < first + count:
        command = [
            sys.executable,
            "-m",
            "tests.support.fuzzed",
            str(whole),
            str(expected),
            str(first + count - expected),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        for line in ended.stdout.splitlines():
            told = json.loads(line)
            if "finished" in told:
                expected = told["finished"] + 1
            else:
                print(f"  seed {told['seed']}: {' '.join(told['command'])}\n    {told['wrong']}", flush=True)
                yield told["seed"]
        if expected < first + count:  # the process itself ended
            print(f"  seed {expected}: ended with {ended.returncode}: {ended.stderr[-2000:]}", flush=True)
            yield expected
            expected += 1
