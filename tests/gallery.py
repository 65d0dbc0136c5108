"""What a page shows of commands and their output: its `console` blocks, executed in order beside a sample run.

python -m tests.gallery PAGE writes what the commands print now into the page; a block that ends with `…` stays as long.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl.cli.main import main
from tests.markdown_pages import blocks
from tests.support import sample_environment

PROMPT = "$ "
CUT = "…"
NOT_HERE = ("agentrl demo", "agentrl run serve")
"""The one wrote what is looked at, the other does not end."""
SLOW = ("  time ", "  released ")
"""How `episode why` begins what it says of acts that took long, and of whom the group waited for: who is chance."""


class Session(NamedTuple):
    """A command of a page, and what it says the command prints."""

    command: str
    shown: tuple[str, ...] | None
    """None: nothing is said."""


def sessions(page: Path) -> Iterator[Session]:
    """The commands of a page in order: a `console` block has one, with its output."""
    for block in blocks(page):
        if block.executed and block.language == "console":
            first, *shown = block.text.splitlines()
            yield Session(first.removeprefix(PROMPT), tuple(shown))
        elif block.executed and block.language == "sh":
            yield from (Session(line, None) for line in block.text.splitlines() if line.startswith("agentrl "))


def workplace(directory: Path, sample: Path) -> Path:
    """Where the commands of the pages are typed: beside runs/, with the files that they name."""
    shutil.copytree(sample, directory / "runs" / "sample", symlinks=True)
    source = Path(sample_environment.__file__).read_text(encoding="utf-8")
    (directory / "env.py").write_text(source.replace("REVISION = -0.1", "REVISION = -0.5"), encoding="utf-8")
    (directory / "said.txt").write_text("The checker says it is one less. Again:\n", encoding="utf-8")
    return directory


def printed(command: str) -> tuple[str, ...]:
    """What a command of agentrl prints, line by line."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        code = main(shlex.split(command)[1:])
    if code:
        raise AssertionError(f"{command}: exit code {code}")
    return tuple(line.rstrip() for line in stream.getvalue().splitlines())


def shape(line: str) -> str:
    """A line without what differs from one sample run to the next: numbers, plots, spaces; nothing of what was slow."""
    if line.startswith(SLOW):
        return ""
    line = re.sub(r"[█▓▒·◆★↻│├└▁-█⠀-⣿]+", " ", line)
    line = re.sub(r"\b[0-9a-f]{32}\b|-?\d[\d.,]*(?:e-?\d+)?", "0", line)
    return " ".join(line.split())


def departures(session: Session) -> list[str]:
    """Lines a page shows and the command does not print; `…` stands for any."""
    assert session.shown is not None
    found = {"", CUT, *map(shape, printed(session.command))}
    return [shape(line) for line in session.shown if shape(line) not in found]


def refreshed(page: Path) -> str:
    """The page with what its commands print now."""
    text = page.read_text(encoding="utf-8")
    for session in sessions(page):
        if session.command.startswith(NOT_HERE):
            continue
        now = printed(session.command)
        if session.shown is None:
            continue
        if session.shown[-1:] == (CUT,):
            now = (*now[: len(session.shown) - 1], CUT)
        text = text.replace(_block(session.command, session.shown), _block(session.command, now), 1)
    return text


def _block(command: str, shown: tuple[str, ...]) -> str:
    return "\n".join(["```console", PROMPT + command, *shown, "```"])


def _refresh(page: Path) -> None:
    from tests.support.sample_run import play_with_script, write_sample_run

    with (
        tempfile.TemporaryDirectory() as made,
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patched,
    ):
        play_with_script(patched)
        workplace(Path(directory), write_sample_run(made).path)
        with contextlib.chdir(directory):
            text = refreshed(page)
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    _refresh(Path(sys.argv[1]).resolve())
