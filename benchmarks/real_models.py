"""From a checkpoint to a trained policy, measured part by part.

    python -m benchmarks.real_models [--quick] [--part NAME]

Each part is a module `benchmarks.real_models_NAME` with one function, `figures(quick) -> {name: number or null}`. What
no part measures is null. `--part` runs one of them.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "families",
    "families_wrong",
    "families_refused",
    "max_dlogp",
    "max_gradient_error",
    "planted_errors_found",
    "bytes_per_frozen_parameter",
    "published_bytes_per_parameter",
    "memory_over_plain",
    "memory_slope",
    "largest_tensor_growth",
    "time_over_plain",
    "shared_time_over_plain",
    "doctor_error",
    "gradient_error",
    "resume_other_ranks",
    "bytes_per_rank_ratio",
    "publish_extra_bytes",
    "load_extra_bytes",
    "bf16_over_f32_reward",
    "k3_bf16",
    "k3_bf16_vllm",
    "k3_f32",
    "smollm2_start",
    "smollm2_end",
    "smollm2_gain",
    "minutes",
    "async_over_sync_reward",
    "async_over_sync_wall",
)

if __name__ == "__main__":
    run_parts("real_models", FIGURES, description=__doc__)
