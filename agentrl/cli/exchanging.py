"""`agentrl run export` and `agentrl run import`: a run's episodes as other tools' files, and such files as a run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from agentrl.cli.output import print_json
from agentrl.cli.reading import open_run
from agentrl.core.safe import safe_line
from agentrl.core.words import plural

if TYPE_CHECKING:
    import argparse

SHOWN = 5
"""Problems that are printed."""


def run_export(options: argparse.Namespace) -> int:
    """`agentrl run export [RUN] --to FORMAT [--out PATH] [--where …] [--match …] [--force]`."""
    from agentrl.exchange.exporting import export

    with open_run(options) as reader:
        found = export(reader, options.to, options.out, where=options.where, match=options.match, force=options.force)
    if options.json:
        print_json(found)
        return 0
    _say(f"{found.path}: {plural(found.episodes, 'episode')}")
    for problem in found.problems[:SHOWN]:
        _say(f"  not readable: {problem}")
    if len(found.problems) > SHOWN:
        _say(f"  and {len(found.problems) - SHOWN:,} more (--json has them)")
    return 0


def run_import(options: argparse.Namespace) -> int:
    """`agentrl run import SOURCE RUN --from FORMAT`."""
    from agentrl.exchange.importing import import_run

    found = import_run(options.source, options.format, options.run)
    if options.json:
        print_json(found)
        return 0
    holds = f"{plural(found.episodes, 'episode')}, {plural(found.turns, 'turn')}"
    _say(f"{found.path}: {holds}; `agentrl episode list {found.path}`")
    for what, count in sorted(found.not_told.items()):
        _say(f"  {what}: not told of {plural(count, 'episode')}")
    return 0


def _say(line: str) -> None:
    sys.stdout.write(f"{safe_line(line)}\n")
