"""The one place where a run's content becomes text for a terminal: all that is put on a page is escaped here.

Whoever shows something builds a `Page` of it, out of plain strings; only this module knows rich, and `Text`, never
markup, is all it makes. Styles are the caller's own words. What came out of a run reaches the terminal escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from agentrl.core.safe import safe, safe_line

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_CELL = 500
"""Characters of content in a cell of a table."""
MAX_BLOCK = 20_000
"""Characters of content in a block; `--json` has all of it."""

Part = str | tuple[str, str]
"""Text, and perhaps a style of ours."""


class Page:
    """What a command shows, from top to bottom."""

    def __init__(self) -> None:
        self._parts: list[Text | Table] = []

    def __rich__(self) -> RenderableType:
        """For a console."""
        return Group(*self._parts)

    def add(self, page: Page) -> None:
        """What another page has."""
        self._parts += page._parts

    def line(self, *parts: Part) -> None:
        """One line: parts side by side."""
        self._parts.append(_styled(parts))

    def heading(self, text: str) -> None:
        """A line above what belongs together."""
        self._parts.append(Text("" if not self._parts else "\n") + Text(f"── {_short(text, MAX_CELL)} ──", "bold"))

    def block(self, content: str, style: str = "", *, indent: int = 4) -> None:
        """Content as it was written, line by line; of a very long one the beginning and how much there is."""
        shown = safe(content[:MAX_BLOCK])
        if len(content) > MAX_BLOCK:
            shown += f"\n… and {len(content) - MAX_BLOCK:,} more characters (--json has them)"
        self._parts.append(Text("\n".join(" " * indent + line for line in shown.split("\n")), style))

    def flow(self, parts: Iterable[tuple[str, str]], *, indent: int = 2) -> None:
        """Pieces of content one after the other, each in its style; newlines in them are shown, and kept."""
        text = Text(" " * indent)
        for content, style in parts:
            for number, piece in enumerate(content.split("\n")):
                if number:
                    text.append("⏎\n" + " " * indent, "dim")
                text.append(safe_line(piece), style)
        self._parts.append(text)

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Names and what they are, a line each."""
        for name, fact in facts:
            self._parts.append(Text(f"  {safe_line(name):<12} ", "dim") + Text(_short(fact, 4 * MAX_CELL)))

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Part]], *, caption: str = "") -> None:
        """A table; the heading of a column of numbers ends with `>`."""
        table = Table(box=None, pad_edge=False, header_style="bold", caption=safe_line(caption) or None)
        for column in columns:
            right = column.endswith(">")
            name = Text(safe_line(column.removesuffix(">")))
            table.add_column(name, justify="right" if right else "left", no_wrap=right, overflow="fold")
        for row in rows:
            table.add_row(*(_styled([cell]) for cell in row))
        self._parts.append(table)

    def problems(self, problems: Iterable[str]) -> None:
        """What could not be read."""
        for problem in problems:
            self._parts.append(Text(f"\nnot readable: {safe(problem)}", "bold red"))


def _styled(parts: Iterable[Part]) -> Text:
    text = Text()
    for part in parts:
        content, style = (part, "") if isinstance(part, str) else part
        text.append(_short(content, MAX_CELL), style)
    return text


def _short(content: str, most: int) -> str:
    return safe_line(content if len(content) <= most else f"{content[:most]}…")
