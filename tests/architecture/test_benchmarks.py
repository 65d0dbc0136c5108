"""Every benchmark that a page names can be started."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

COMMAND = re.compile(r"-m (benchmarks(?:\.[a-z_]+)*)((?: --?[a-z]+(?:[ =][a-z_0-9./]+)?)*)")
PART = re.compile(r"--part[ =]([a-z_]+)")


def commands(repository: Path) -> list[tuple[str, str, str]]:
    """Return page, module and part (or nothing) of each command in a tracked page, workflow or the Makefile."""
    listed = ("git", "ls-files", "*.md", "Makefile", ".github", "docs/generators")
    pages = subprocess.run(listed, cwd=repository, capture_output=True, text=True, check=True).stdout.splitlines()
    found = set()
    for page in pages:
        for module, arguments in COMMAND.findall((repository / page).read_text(encoding="utf-8")):
            found.add((page, module, "".join(PART.findall(arguments)[:1])))
    return sorted(found)


def test_every_command_names_a_benchmark_and_a_part(repository: Path) -> None:
    named = commands(repository)
    assert len(named) > 20
    missing = []
    for page, module, part in named:
        file = repository.joinpath(*module.split(".")).with_suffix(".py")
        if not file.exists():
            file = file.with_suffix("") / "__main__.py"
        source = file.read_text(encoding="utf-8") if file.exists() else ""
        if '__name__ == "__main__"' not in source and file.name != "__main__.py":
            missing.append(f"{page}: {module} is not a command")
        elif part and not (file.with_name(f"{file.stem}_{part}.py").exists() or f'"{part}"' in source):
            missing.append(f"{page}: {module} has no part {part}")
    assert not missing


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`python -m benchmarks.scores --quick --part overlap`", ("benchmarks.scores", " --quick --part overlap")),
        ("python -m benchmarks.peers", ("benchmarks.peers", "")),
    ],
)
def test_commands_are_found(text: str, found: tuple[str, str]) -> None:
    assert COMMAND.findall(text) == [found]
