"""CPU seconds of the commands that check an environment and a machine; see `first_hour.py`."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path

from benchmarks.processes import command_cpu_seconds

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = ROOT / "examples" / "07_smollm2.toml"
READINGS = 3


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    with tempfile.TemporaryDirectory(prefix="agentrl-first-hour-") as name:
        directory = Path(name)
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        code = next(block for block in readme.split("```") if "class Calculator" in block)
        (directory / "my_env.py").write_text(code.removeprefix("python\n"))
        cpu_seconds = partial(command_cpu_seconds, directory=directory, readings=READINGS)
        found: dict[str, float | None] = {"env_check_cpu_s": cpu_seconds("env", "check", "my_env.py:Calculator")}
        if not quick:
            found["doctor_cpu_s"] = cpu_seconds("doctor", str(SMOLLM2))
    return found
