"""Table of the export formats, with the functions that write them.

Imports no heavy modules, because the command line is built from this table.
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
    """Reference `module:function`; called with a `ExportSelection` and the path of the file to create."""
    limit: int | None = None
    """Maximum number of episodes unless the user gives one; None: all."""


EXPORTS: Mapping[str, ExportFormat] = {
    "html": ExportFormat(
        "one page to look at, without a server",
        "episodes.html",
        "agentrl.inspection.export.exporting:write_html_page",
        limit=1_000,
    ),
    "jsonl": ExportFormat(
        "a line of JSON per episode", "episodes.jsonl", "agentrl.inspection.export.episodes:write_json_lines"
    ),
    "parquet": ExportFormat(
        "a table with a line per token row", "rows.parquet", "agentrl.inspection.export.episodes:write_parquet_table"
    ),
}
