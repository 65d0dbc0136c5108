"""CPU seconds of the commands that check an environment and a machine; see `first_hour.py`."""

from __future__ import annotations

import os
import statistics
import tempfile
from pathlib import Path

from benchmarks.processes import command_cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "examples" / "08_smollm2.toml"
READINGS = 3


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    with tempfile.TemporaryDirectory(prefix="agentrl-first-hour-") as name:
        directory = Path(name)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        code = next(block for block in readme.split("```") if "class Calculator" in block)
        (directory / "my_env.py").write_text(code.removeprefix("python\n"))
        found = {"env_check_cpu_s": cpu_seconds("env", "check", "my_env.py:Calculator", directory=directory)}
        if not quick:
            found["doctor_cpu_s"] = cpu_seconds("doctor", str(SMOLLM2), directory=directory)
            found["doctor_suggest_cpu_s"] = cpu_seconds("doctor", str(SMOLLM2), "--suggest", directory=directory)
    return found


def cpu_seconds(*arguments: str, directory: Path) -> float:
    """CPU seconds of a command as of an installed agentrl, whose bytecode is cached: the median of several readings."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    seconds = [command_cpu_seconds(*arguments, directory=directory) for _ in range(READINGS + 1)][1:]
    print(f"  {statistics.median(seconds):.2f} CPU s: agentrl {' '.join(arguments)}", flush=True)
    return statistics.median(seconds)
