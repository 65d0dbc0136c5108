"""What a user looks at all day: the viewer, comparisons of runs, and tools that a chat template ignores.

    python -m benchmarks.viewing [--quick] [--part NAME]

Each part is a module `benchmarks.viewing_NAME` with one function, `figures(quick) -> {name: number or null}`. What no
part measures is null. `--part` runs one of them.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "first_screen_s",
    "defects_fixed",
    "contrast_and_keyboard",
    "compare_interval_covers",
    "own_tools_smollm2_start",
    "own_tools_smollm2_end",
    "own_tools_smollm2_gain",
    "own_tools_hidden_end",
)

if __name__ == "__main__":
    run_parts("viewing", FIGURES, description=__doc__)
