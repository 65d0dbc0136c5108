"""Generates docs/cli.md from the command line: `python -m docs.generators.commands > docs/cli.md`.

Owns the layout of the page. Commands, options and help texts are those of `agentrl.cli.commands`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from agentrl.cli.commands import make_parser

_HEAD = """# Command line

<!-- Written by `make docs-config` from agentrl/cli/commands.py; changes belong there. -->

`--help` after a command prints the same. Every command accepts `--json`. Commands that read a configuration also accept
`--SECTION.KEY=VALUE` for any [setting](configuration.md).

Exit codes: 0 success; 1 a failed check, or a difference; 2 bad input; 70 internal error; 74 storage; 130 interrupted.
"""


def render_commands_page() -> str:
    """Make the page."""
    return "\n".join([_HEAD, *_commands(make_parser())]) + "\n"


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the lines of a parser's commands, in the order of its help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _command(command)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    nested = list(_commands(parser))
    if nested:
        yield from nested
        return
    yield f"## {parser.prog}\n"
    yield f"{_sentence(parser.description or '')}\n"
    options = [
        action for action in parser._actions if action.dest not in ("help", "json") and action.help != argparse.SUPPRESS
    ]
    if options:
        yield "| argument | meaning |"
        yield "|---|---|"
        yield from (f"| {_name(action)} | {_cell(action, parser)} |" for action in options)
        yield ""


def _name(action: argparse.Action) -> str:
    value = action.metavar or action.dest.upper()
    if not action.option_strings:
        name = value if isinstance(value, str) else " ".join(value)
        return f"`{name}`" if action.nargs not in ("?", "*") else f"`[{name}]`"
    names = ", ".join(action.option_strings)
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    return f"`{names}`" if action.nargs == 0 else f"`{names} {value}`".replace("|", "\\|")


def _cell(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    values = {**vars(action), "prog": parser.prog}
    return ((action.help or "") % values).replace("|", "\\|")


def _sentence(text: str) -> str:
    text = text.replace("%%", "%").rstrip(".")
    return f"{text[:1].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.stdout.write(render_commands_page())
