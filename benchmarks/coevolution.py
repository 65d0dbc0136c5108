"""Co-evolution: several policies learning from whole episodes, measured part by part.

    python -m benchmarks.coevolution [--quick] [--part NAME]

Each part is a module `benchmarks.coevolution_NAME` with one function, `figures(quick) -> {name: number or null}`. What
no part measures is null. `--part` runs one of them.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "frontier_share_start",
    "frontier_share_best",
    "frontier_share_end",
    "distinct_share",
    "solver_gain",
    "solver_gain_frozen_proposer",
    "two_adapters_cost",
    "eight_policies_cost",
    "frozen_changed_bytes",
    "selfplay_vs_first",
    "selfplay_vs_random",
    "gradient_split_error",
    "bit_identical_after_kills",
)

if __name__ == "__main__":
    run_parts("coevolution", FIGURES, description=__doc__)
