"""The pages that lead through the code name symbols and files that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PAGES = ("follow_one_episode.md", "follow_one_update.md")
SYMBOL = re.compile(r"`([\w./-]+\.py)::([\w.]+)`")


def has_symbol(body: list[ast.stmt], dotted: str) -> bool:
    """Whether `Class.method`, a function or a module-level name is defined in `body`."""
    name, _, rest = dotted.partition(".")
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return not rest
        if isinstance(node, ast.ClassDef) and node.name == name:
            return not rest or has_symbol(node.body, rest)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return not rest
    return False


@pytest.mark.parametrize("name", PAGES)
def test_every_symbol_exists(repository: Path, name: str) -> None:
    page = (repository / "docs" / "explanation" / name).read_text(encoding="utf-8")
    symbols = SYMBOL.findall(page)
    files = {path for path, _ in symbols}

    assert len(files) >= 5, sorted(files)
    trees = {path: ast.parse((repository / path).read_text(encoding="utf-8")) for path in files}
    assert not [f"{path}::{symbol}" for path, symbol in symbols if not has_symbol(trees[path].body, symbol)]


@pytest.mark.parametrize("name", [*PAGES, "architecture.md", "../../CONTRIBUTING.md"])
def test_every_file_it_names_exists(repository: Path, name: str) -> None:
    page = (repository / "docs" / "explanation" / name).read_text(encoding="utf-8")
    paths = re.findall(r"`((?:agentrl|environments|examples|docs|tests)/[\w./-]+\.\w+)", page)
    assert paths
    assert not [path for path in paths if not (repository / path).exists()]
