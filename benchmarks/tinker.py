"""What scripts of the Tinker SDK get from `agentrl-tinker`, in parts: `training`, `kills` and `recipes`.

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
    "disorder_detected",
    "overhead",
)

if __name__ == "__main__":
    run_parts("tinker", NAMES, description=__doc__)
