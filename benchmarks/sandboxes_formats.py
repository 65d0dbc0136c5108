"""Rewards of each task format in agentrl, beside those of the format's own code for the same answers.

The formats' packages are looked for below the directory AGENTRL_FORMATS, and a format without its package is left out:

    python3.12 -m venv $AGENTRL_FORMATS/harbor && $AGENTRL_FORMATS/harbor/bin/pip install harbor
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agentrl.formats.harbor import Harbor
from agentrl.testing.execution import play
from tests.support.harbor_suite import ANSWERS, MEDIAN, ROOTS, WORD, write_task

PACKAGES = Path(os.environ.get("AGENTRL_FORMATS", "/nonexistent"))
REFERENCES = Path(__file__).parent / "format_references"
Pair = tuple[Any, Any]
"""A reward in agentrl, and by the format's own code."""


def reference(environment: str, program: str, *arguments: str) -> Any:
    """Run a program of `format_references` with the Python of a format; return the JSON of its last line."""
    done = subprocess.run(
        [PACKAGES / environment / "bin" / "python", REFERENCES / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def harbor(scratch: Path, quick: bool) -> Sequence[Pair] | None:
    """Each answer is the solution of a task, which Harbor's oracle runs and its verifier grades."""
    if not (PACKAGES / "harbor").exists():
        return None
    commands = {}
    for name, answers in ANSWERS.items():
        for kind, command in answers.items():
            commands[f"{name}-{kind}".replace(" ", "-")] = command
            solution = {"solution/solve.sh": f"#!/bin/bash\n{command}\n"}
            files = MEDIAN if name == "median" else WORD
            write_task(scratch / f"{name}-{kind}".replace(" ", "-"), {**files, **solution})
    theirs = reference("harbor", "harbor_trials.py", str(scratch))
    tasks = Harbor.tasks("train", directory=str(scratch), roots=ROOTS, held_out=0.0)
    pairs = []
    for task in tasks:  # type: ignore[attr-defined]
        call = {"name": "bash", "arguments": {"command": commands[task.id]}}
        pairs.append((play(Harbor, task, [call, "done"]).reward, theirs[task.id]["reward"]))
    return pairs


FORMATS: dict[str, Callable[[Path, bool], Sequence[Pair] | None]] = {"harbor": harbor}


def figures(quick: bool) -> dict[str, float | None]:
    """Compare the formats whose packages there are."""
    counts: dict[str, tuple[int, int]] = {}
    for name, compare in FORMATS.items():
        with tempfile.TemporaryDirectory(prefix="agentrl-formats-") as scratch:
            pairs = compare(Path(scratch), quick)
        if pairs is None:
            print(f"  {name}: its package is not below {PACKAGES}", flush=True)
            continue
        counts[name] = (sum(ours == theirs for ours, theirs in pairs), len(pairs))
        print(f"  {name}: {counts[name][0]} of {counts[name][1]} rewards equal", flush=True)
    total = sum(number for _, number in counts.values())
    return {
        "formats": float(len(counts)) if counts else None,
        "format_rewards": float(total) if counts else None,
        "format_rewards_equal": sum(equal for equal, _ in counts.values()) / total if total else None,
    }
