"""What scripts of the Tinker SDK get from `agentrl serve tinker`, in parts: `training`, `kills`, `recipes` and
`waiting`.

    python -m benchmarks.tinker [--quick] [--part PART]

The module of each part says what its figures mean. `recipes` needs the cookbook in an environment of its own.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

NAMES = (
    "recipes_run",
    "full_recipes_run",
    "gradient_error",
    "custom_loss_error",
    "wire_logprob_error",
    "kills",
    "scripts_differ",
    "steps_lost",
    "steps_twice",
    "futures_lost",
    "control_futures_lost",
    "tenants_equal",
    "fairness",
    "disorder_detected",
    "overhead",
    "tinker_wait_ratio",
    "requests_lost",
)

if __name__ == "__main__":
    run_parts("tinker", NAMES, description=__doc__)
