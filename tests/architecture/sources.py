"""The project's Python files as text and syntax trees, read once."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.support.uncollected import uncollected

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file."""

    path: str
    """Relative to the repository."""
    text: str
    tree: ast.Module


def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file under `folders`, in order of path; never empty for a folder that exists for a reason."""
    found = tuple(_source(path) for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    assert found, f"no Python files under {folders}"
    return found


@cache
def _source(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    with uncollected():
        return Source(path=str(path.relative_to(ROOT)), text=text, tree=ast.parse(text))
