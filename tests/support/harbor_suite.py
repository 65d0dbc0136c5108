"""Harbor tasks for tests and benchmarks: two to solve, with answers that are right, half right and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

HALF = """#!/bin/bash
right=0
[ "$(python3 -c 'import stats; print(stats.median([3, 1, 2]))')" = 2 ] && right=$((right + 1))
[ "$(python3 -c 'import stats; print(stats.median([4, 1, 2, 3]))')" = 2.5 ] && right=$((right + 1))
echo "{\\"reward\\": $(python3 -c "print($right / 2)")}" > /logs/verifier/reward.json
"""
MEDIAN = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 30.0\n[environment]\nmemory_mb = 256\n',
    "instruction.md": "Write median(numbers) in /app/stats.py.\n",
    "environment/Dockerfile": "# a comment\nFROM python:3.12\nWORKDIR /app\nCOPY src/ .\nENV STYLE=plain \\\n    A=1\n",
    "environment/src/stats.py": "def mean(numbers):\n    return sum(numbers) / len(numbers)\n",
    "environment/src/tools/show.sh": "#!/bin/sh\nls\n",
    "tests/test.sh": HALF,
}
WORD = {
    "task.toml": '[environment]\nmemory = "128M"\n',
    "instruction.md": "Write the variable WORD to word.txt, in /data/in.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nENV WORD=amber\nWORKDIR /data\nWORKDIR in\n",
    "tests/test.sh": '#!/bin/sh\n[ "$(cat word.txt)" = amber ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n',
}
GOOD = (
    "printf 'def median(n):\\n    n = sorted(n); m = len(n) // 2\\n"
    "    return n[m] if len(n) %% 2 else (n[m - 1] + n[m]) / 2\\n' >>"
)
ANSWERS: Mapping[str, Mapping[str, str]] = {
    "median": {
        "right": f"{GOOD} stats.py",
        "odd only": "echo 'def median(n): return sorted(n)[len(n) // 2]' >> stats.py",
        "nothing": "ls",
        "its own tests": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "its own verdict": "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    },
    "word": {
        "right": "echo $WORD > word.txt",
        "elsewhere": "echo $WORD > /data/word.txt",
        "wrong": "echo blue > word.txt",
        "nothing": "true",
    },
}
"""Commands by task and kind."""
ROOTS = {"python:3.12": "/", "ubuntu:24.04": "/"}


def write_task(directory: Path, files: Mapping[str, str]) -> Path:
    """Write a task directory; returns it."""
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def write_suite(top: Path) -> Path:
    """Write both tasks; returns their directory."""
    write_task(top / "median", MEDIAN)
    write_task(top / "word", WORD)
    return top
