"""Generates docs/reference/cli.md from the command line: `python -m docs.generators.commands > docs/reference/cli.md`.

Owns the layout of the page. Commands, options and help texts are those of `agentrl.cli.commands`.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

from agentrl.cli.commands import make_parser

Row = tuple[str, str]
"""An argument and its meaning."""

_HEAD = """# Command line

<!-- Written by `make docs-config` from agentrl/cli/commands.py; changes belong there. -->

Every command accepts `--help` and `--json`. Commands that read a configuration accept `--SECTION.KEY=VALUE` for any
[setting](configuration.md); behind the other arguments, also `--SECTION.KEY VALUE`.

Exit codes: 0 success; 1 a failed check, or a difference; 2 bad input; 70 internal error; 74 storage; 130 interrupted.

## Common arguments

{common}
"""
_COMMON_USES = 2
"""Number of commands from which on an argument is described once, under *Common arguments*."""


def render_commands_page() -> str:
    """Make the page."""
    parsers = list(_parsers(make_parser()))
    uses = Counter(row for parser in parsers for row in _rows(parser))
    common = [row for row, count in uses.items() if count >= _COMMON_USES]
    head = _HEAD.format(common="\n".join(map(_item, common)))
    return "\n".join([head, *(line for parser in parsers for line in _command(parser, common))])


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of commands without verbs, in the order of the help."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for group in groups:
        for command in group.choices.values():
            yield from _parsers(command)
    if not groups:
        yield parser


def _rows(parser: argparse.ArgumentParser) -> list[Row]:
    """List the arguments of a command with their meanings."""
    return [
        (_name(action), _cell(action, parser))
        for action in parser._actions
        if action.dest not in ("help", "json") and action.help != argparse.SUPPRESS
    ]


def _command(parser: argparse.ArgumentParser, common: Sequence[Row]) -> Iterator[str]:
    rows = _rows(parser)
    shared = ", ".join(_without_value(name) for name, meaning in rows if (name, meaning) in common)
    yield f"## {parser.prog}\n"
    yield f"{_sentence(parser.description or '')}{f' Takes {shared}.' if shared else ''}\n"
    if special := [row for row in rows if row not in common]:
        yield from map(_item, special)
        yield ""


def _item(row: Row) -> str:
    name, meaning = row
    return f"* {name}: {meaning}" if meaning else f"* {name}"


def _without_value(name: str) -> str:
    """Shorten `--option VALUE` to `--option`."""
    return f"`{name.strip('`').partition(' ')[0]}`"


def _name(action: argparse.Action) -> str:
    value = action.metavar or action.dest.upper()
    if not action.option_strings:
        name = value if isinstance(value, str) else " ".join(value)
        return f"`{name}`" if action.nargs not in ("?", "*") else f"`[{name}]`"
    names = ", ".join(action.option_strings)
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return f"`{names}`" if action.nargs == 0 else f"`{names} {value}`"


def _cell(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    return (action.help or "") % values


def _sentence(text: str) -> str:
    text = text.replace("%%", "%").rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.stdout.write(render_commands_page())
