"""One word for one concept: docs/glossary.md against the code, in both directions, and the names it bans."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentrl
from tests.architecture.sources import Source, sources

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^\| \*\*([^*|]+)\*\* \| ([^|]+) \|", re.MULTILINE)
BANNED_ROW = re.compile(r"^\| (`[^|*]+`) \| [^|]+ \| [^|]+ \|$", re.MULTILINE)


def quoted(cell: str) -> list[str]:
    """The names between backticks in a cell of a table."""
    return re.findall(r"`([^`]+)`", cell)


ENTRIES = [(word, quoted(cell)) for word, cell in ENTRY.findall(GLOSSARY)]
BANNED = {name for cell in BANNED_ROW.findall(GLOSSARY) for name in quoted(cell)}
BANNED_WORDS = {name for name in BANNED if "_" not in name}
"""As a part of a name between underscores or capitals."""
BANNED_NAMES = BANNED - BANNED_WORDS
"""Anywhere inside a name."""

FOREIGN = {"task_done"}
"""Names of protocols that are not ours to choose."""


def defined_names(source: Source) -> Iterator[tuple[str, int]]:
    """Every name a file gives to something, with its line; uses of other people's names are not among them."""
    yield Path(source.path).stem, 1
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


def known_names(source: Source) -> Iterator[str]:
    """Every name a file defines, and the identifiers among its strings: kinds, reasons, keys."""
    for name, _ in defined_names(source):
        yield name
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            yield node.value


def parts(name: str) -> set[str]:
    """The words of a name, in lower case.

    >>> sorted(parts("isTaskDone_now"))
    ['done', 'is', 'now', 'task']
    """
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_"))


def is_banned(name: str) -> bool:
    if name in FOREIGN:
        return False
    return bool(parts(name) & BANNED_WORDS) or any(banned in name.lower() for banned in BANNED_NAMES)


@pytest.mark.parametrize("name", ["done", "is_done", "EngineManager", "old_logprobs", "text_utils", "policy_log_probs"])
def test_the_ban_catches(name: str) -> None:
    assert is_banned(name)


@pytest.mark.parametrize("name", ["behavior_logprobs", "abandoned", "terminated", "utilisation", "task_done"])
def test_the_ban_lets_through(name: str) -> None:
    assert not is_banned(name)


def test_no_banned_word_names_anything() -> None:
    found = [
        f"{source.path}:{line} {name}"
        for source in sources("agentrl", "environments", "examples")
        for name, line in defined_names(source)
        if is_banned(name)
    ]
    assert not found


def test_every_word_of_the_glossary_has_a_name_in_the_code() -> None:
    known = {name for source in sources("agentrl") for name in known_names(source)}
    assert len(ENTRIES) > 60
    assert not [word for word, names in ENTRIES if not names]
    assert not [(word, name) for word, names in ENTRIES for name in names if name not in known]


def test_every_public_name_is_in_the_glossary() -> None:
    explained = {name for _, names in ENTRIES for name in names}
    assert not sorted(set(agentrl.__all__) - explained)


def test_the_glossary_has_one_entry_per_word() -> None:
    words = [word for word, _ in ENTRIES]
    assert len(words) == len(set(words))
