"""Durability: what a run promises about crashes, damage, kills and their cost, measured part by part.

    python -m benchmarks.durability [--quick] [--part NAME]

Each part is a module `benchmarks.durability_NAME` with one function, `figures(quick) -> {name: number or null}`. What
no part measures is null. `--part` runs one of them.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "crash_points",
    "violations",
    "mutants_caught",
    "bit_identical_after_kills",
    "flips_unnoticed",
    "flips_readable_share",
    "tokens_resampled",
    "resume_10k_cpu_s",
    "journal_cost_main",
    "journal_cost_zero_latency",
    "soak_bytes_per_episode",
    "resume_cpu_s_1e6",
    "resume_mib_1e6",
    "list_cpu_s_1e6",
    "ledger_cpu_s_1e6",
    "journal_bytes_per_episode",
    "pruned_bytes_per_episode",
    "sim_seeds",
    "sim_violations",
)

if __name__ == "__main__":
    run_parts("durability", FIGURES, description=__doc__)
