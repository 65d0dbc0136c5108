"""The last line every benchmark prints: one JSON object with its figures."""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl import Run

ROOT = Path(__file__).resolve().parents[1]


@dataclass(slots=True)
class Report:
    """Figures by name; None where a quick run did not measure one."""

    benchmark: str
    quick: bool = field(kw_only=True)
    repeats: int = field(kw_only=True)
    compared_with: str = field(kw_only=True)
    figures: dict[str, float | None] = field(default_factory=dict)

    def print(self) -> None:
        """Print the line."""
        figures = {name: None if value is None else _short(value) for name, value in self.figures.items()}
        line = {
            "benchmark": self.benchmark,
            "quick": self.quick,
            "figures": figures,
            "compared_with": self.compared_with,
            "repeats": self.repeats,
        }
        print(json.dumps(line), flush=True)  # some benchmarks leave by os._exit


def conditions() -> dict[str, str]:
    """What the runs share: when, where, and of which commit."""
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    commit = subprocess.run(
        ("git", "rev-parse", "--short=8", "HEAD"), cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%-d %B %Y"),
        "machine": f"{len(os.sched_getaffinity(0))} CPU cores ({cpu[1] if cpu else 'unknown'})",
        "commit": commit.stdout.strip(),
    }


def completed(run: Run) -> Run:
    """Return the run if it reached its end: a figure of one that was stopped means nothing."""
    if run.interrupted:
        raise SystemExit(f"the run {run.path} was stopped before its end, so there is nothing to measure")
    return run


def _short(value: float) -> float:
    """Four decimals, and of what is too small for them three digits."""
    return round(value, 4) if value == 0 or abs(value) >= 1e-3 else float(f"{value:.2e}")
