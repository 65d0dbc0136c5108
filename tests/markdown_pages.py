"""The fenced blocks of the pages at the root and in docs/, for the tests that check and run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md", "examples/README.md")
    ),
    *sorted((ROOT / "docs").rglob("*.md")),
)
NOT_EXECUTED = re.compile(r"<!-- not executed: \S.* -->")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*)$", flags=re.MULTILINE)
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    executed: bool
    """It has no comment right before it that says why not."""


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            language=match[1],
            text=match[2],
            executed=not NOT_EXECUTED.fullmatch(text[: match.start()].rstrip("\n").rpartition("\n")[2]),
        )
        for match in _FENCE.finditer(text)
    ]


def python_of(page: Path) -> list[str]:
    """The Python a page shows and means to be run, in order."""
    return [block.text for block in blocks(page) if block.language == "python" and block.executed]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def broken_links(page: Path) -> Iterator[str]:
    """The targets of a page's links that are no file, no heading of that file, and no https address."""
    for _, target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        found = page if not path else page.parent / path
        if "://" in target:
            if not target.startswith("https://"):
                yield target
        elif not found.exists() or (anchor and anchor not in _anchors(found)):
            yield target


def _anchors(page: Path) -> set[str]:
    return {anchor_of(heading) for heading in HEADING.findall(prose(page))}


def anchor_of(heading: str) -> str:
    """The anchor of a heading, as GitHub and mkdocs make it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())
