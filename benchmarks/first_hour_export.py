"""The cost of an HTML export of the README's demo; see `first_hour.py`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from agentrl.core.machine import rare_collections
from agentrl.inspection.export.exporting import export
from agentrl.inspection.reader import RunReader
from benchmarks.processes import command


def figures(quick: bool) -> dict[str, float | None]:
    if quick:  # the demo takes minutes
        return {"export_ms_per_episode": None}
    with tempfile.TemporaryDirectory(prefix="agentrl-export-") as directory, rare_collections():
        command("demo", directory=Path(directory))
        reader = RunReader(Path(directory, "runs", "demo"))
        page = Path(directory, "page.html")
        export(reader, "html", page, limit=1)  # imports
        started = time.process_time()
        result = export(reader, "html", page, force=True)
        seconds = time.process_time() - started
        reader.close()
        count, size = result.episodes + result.left_out, page.stat().st_size / 1e6
        print(f"  {result.episodes} of {count} episodes: {seconds:.2f} CPU s, {size:.1f} MB")
        return {"export_ms_per_episode": 1e3 * seconds / result.episodes}
