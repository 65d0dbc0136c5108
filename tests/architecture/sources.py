"""The project's Python files as text and syntax trees, read once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the repository."""
    text: str
    tree: ast.Module


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file under `folders`, in order of path; never empty for a folder that exists for a reason."""
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            found.append(Source(path=str(path.relative_to(ROOT)), text=text, tree=ast.parse(text)))
    assert found, f"no Python files under {folders}"
    return tuple(found)
