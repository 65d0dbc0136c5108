"""Damaged databases and files, and every reading command about them: an answer or a named error, whatever they hold.

`fuzz_crashes`: of 10,000 damages (`benchmarks.fuzzed`: bytes, cuts, pages, rows and entries of other types and sizes
under checksums that fit, other schemas), those after which a command ended otherwise: a traceback, a
signal, more than 512 MiB, two minutes of CPU time, or a control character on the terminal. A process takes thirty of
them. A damage counts if its seed, run again in a process of its own, ends so again: what a damaged file does is the
same each time, what a machine without memory does is not. Those that did not end so again are `fuzz_unrepeated`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from agentrl.cli.sample_run import write_sample_run

DAMAGES, QUICK_DAMAGES, BATCH = 10_000, 60, 30


def figures(quick: bool) -> dict[str, float | None]:
    count = QUICK_DAMAGES if quick else DAMAGES
    with tempfile.TemporaryDirectory(prefix="agentrl-inspection-") as directory:
        whole = sample(Path(directory))
        batches = [(first, min(BATCH, count - first)) for first in range(0, count, BATCH)]
        with ThreadPoolExecutor(os.cpu_count()) as side_by_side:
            suspects = set(chain.from_iterable(side_by_side.map(lambda batch: list(crashed(whole, *batch)), batches)))
        crashes = [seed for seed in sorted(suspects) if list(crashed(whole, seed, 1))]
    return {"fuzz_crashes": float(len(crashes)), "fuzz_unrepeated": float(len(suspects) - len(crashes))}


def sample(directory: Path) -> Path:
    """A whole run."""
    return write_sample_run(directory).path


def crashed(whole: Path, first: int, count: int) -> Iterator[int]:
    """The seeds of a batch after whose damage something ended otherwise than it may, each told."""
    expected = first
    while expected < first + count:
        command = [sys.executable, "-m", "benchmarks.fuzzed", str(whole), str(expected), str(first + count - expected)]
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
