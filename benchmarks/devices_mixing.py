"""The part `mixing` of `benchmarks.devices`."""

from __future__ import annotations

import sys
import warnings


def figures(quick: bool) -> dict[str, float | None]:
    """Measure; `quick`: every sixth case, two of the steps and one planted fault."""
    from tests.support import device_cases as part
    from tests.support.accelerator import register_device

    warnings.simplefilter("ignore")
    register_device()
    exact, rounded = list(part.CASES), list(part.ROUNDED)
    steps, planted = list(part.STEPS), list(part.PLANTED)
    if quick:
        exact, rounded, steps, planted = exact[::6], rounded[:1], steps[:2], planted[:1]
    errors, worst = 0, 0.0
    for name in (*exact, *rounded):
        result = part.measured(name)
        if "error" in result:
            errors += 1
            print(f"{name}: {result['error']} at {', '.join(result['at'])}", file=sys.stderr, flush=True)
        elif name in part.CASES:
            worst = max(worst, result["difference"])
    measured = {name: part.measured(name) for name in steps}
    kernels = part.compiled_kernels()
    return {
        "compiles_before_first_token": kernels["before_first_token"],
        "flex_compiles_per_run": kernels["in_all"],
        "device_cases": len(exact) + len(rounded),
        "device_errors": errors,
        "device_max_error": worst,
        "planted_device_errors_found": sum(part.is_found(name) for name in planted) / len(planted),
        "host_syncs_per_micro_batch": max(each["waits_per_micro_batch"] for each in measured.values()),
        "host_copies_per_micro_batch": max(each["copies_per_micro_batch"] for each in measured.values()),
        "float32_matmuls_share": measured["bfloat16 adapter, one step"]["float32_matmuls_share"],
        "silent_fallbacks": part.silent_fallbacks(),
    }
