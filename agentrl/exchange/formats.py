"""The formats a run is exported to and imported from: two tables of names, and who writes and reads each.

Imports nothing heavy: the command line is made of these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ExportFormat(NamedTuple):
    """A format for exports."""

    help: str
    file: str
    """Default name of the export, in the run's directory."""
    write: str
    """`module:function`, called with a `Selection` and the path of a file or directory to make."""
    is_directory: bool = False
    """Whether the export is a directory; one never replaces anything."""


EXPORTS: Mapping[str, ExportFormat] = {
    "html": ExportFormat("one page to look at, without a server", "episodes.html", "agentrl.exchange.html:write"),
    "jsonl": ExportFormat("a line of JSON per episode", "episodes.jsonl", "agentrl.exchange.episodes:write_json_lines"),
    "parquet": ExportFormat(
        "a table with a line per token row", "rows.parquet", "agentrl.exchange.episodes:write_table"
    ),
    "atif": ExportFormat(
        "a directory with a trajectory file per episode, ATIF 1.8",
        "trajectories",
        "agentrl.exchange.atif:write",
        is_directory=True,
    ),
}


class ImportFormat(NamedTuple):
    """A format for imports."""

    help: str
    read: str
    """`module:function`, called with a path, gives the episodes there, as `foreign.ForeignEpisode`."""


IMPORTS: Mapping[str, ImportFormat] = {
    "verifiers": ImportFormat("traces.jsonl or results.jsonl, or a run's directory", "agentrl.exchange.verifiers:read"),
    "atif": ImportFormat("a trajectory, or a directory of trajectories", "agentrl.exchange.atif:read"),
}
