"""Tables of the formats for export and import, with the functions that write and read each.

Imports no heavy modules, because the command line is built from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ExportFormat(NamedTuple):
    """Format of exports."""

    help: str
    file: str
    """Default file name of the export in the run's directory."""
    write: str
    """Reference `module:function`; called with a `ExportSelection` and the path of the file or directory to create."""
    is_directory: bool = False
    """Whether the export is a directory; a directory never replaces an existing path."""


EXPORTS: Mapping[str, ExportFormat] = {
    "html": ExportFormat(
        "one page to look at, without a server", "episodes.html", "agentrl.exchange.exporting:write_html_page"
    ),
    "jsonl": ExportFormat("a line of JSON per episode", "episodes.jsonl", "agentrl.exchange.episodes:write_json_lines"),
    "parquet": ExportFormat(
        "a table with a line per token row", "rows.parquet", "agentrl.exchange.episodes:write_parquet_table"
    ),
    "atif": ExportFormat(
        "a directory with a trajectory file per episode, ATIF 1.8",
        "trajectories",
        "agentrl.exchange.atif:write",
        is_directory=True,
    ),
}


class ImportFormat(NamedTuple):
    """Format of imports."""

    help: str
    read: str
    """Reference `module:function`; called with a path, returns its episodes as `imported_episodes.ImportedEpisode`."""


IMPORTS: Mapping[str, ImportFormat] = {
    "verifiers": ImportFormat("traces.jsonl or results.jsonl, or a run's directory", "agentrl.exchange.verifiers:read"),
    "atif": ImportFormat("a trajectory, or a directory of trajectories", "agentrl.exchange.atif:read"),
}
