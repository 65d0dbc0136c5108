"""Scheduling against the tail: what trainers get done while a few episodes take very long.

    python -m benchmarks.scheduling [--quick] [--part NAME]

Each part is a module `benchmarks.scheduling_NAME` with one function, `figures(quick) -> {name: number or null}`. What
no part measures is null. `--part` runs one of them. `benchmarks.scheduling_real`, in real time, is one of its own.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "s1_c64",
    "s2_c64",
    "s2_c256",
    "lag_over_fifo",
    "release_gradient_ratio",
    "gradient_variance_ratio",
    "gradient_variance_worst",
    "gradient_ratio_own_slots",
    "length_ratio",
    "waste",
    "lag_p99",
    "survey_bottleneck_busy",
    "places_5s",
    "places_20s",
    "places_5s_fast",
    "places_20s_fast",
    "places_ample",
    "kv_overcommit",
    "kv_overcommit_divided",
    "auto_over_best",
    "auto_over_best_worst",
    "jump_over_best",
    "jump_thrashing",
    "split_trainers",
    "split_gain",
    "split_trainer_waits",
    "staleness_error",
    "late_mask_1",
    *("mask_1_share", "masked_fastest", "masked_slowest", "masked_failed", "masked_won"),
)

if __name__ == "__main__":
    run_parts("scheduling", FIGURES, description=__doc__, apart={"real"})
