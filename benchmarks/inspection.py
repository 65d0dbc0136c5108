"""Inspection: how fast a large run is read, and whether what is executed again is the same.

    python -m benchmarks.inspection [--quick] [--part NAME]

Each part is a module `benchmarks.inspection_NAME` with one function, `figures(quick) -> {name: number or null}`. What
no part measures is null. `--part` runs one of them.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "first_screen_s",
    "filter_s",
    "search_s",
    "rss_mb",
    "html_open_s",
    "replay_identical",
    "step_replay_identical",
    "control_bytes",
    "html_foreign_elements",
    "fuzz_crashes",
    "fuzz_unrepeated",
)

if __name__ == "__main__":
    run_parts("inspection", FIGURES, description=__doc__)
