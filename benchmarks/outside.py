"""External agents: token-exact rows, replies after kills, cost, clients.

    python -m benchmarks.outside [--quick] [--part NAME]

Each part is a module `benchmarks.outside_NAME` with one function, `figures(quick) -> {name: number or null}`.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    "rows_differ_from_engine",
    "tokens_trained_twice",
    "tokens_lost",
    "quarantined_share",
    "rows_per_episode",
    "gateway_ms",
    "resampled_replies",
    "recalled_replies",
    "kills",
    "harness_failures",
    "violations",
    "divergence_named",
    "clients",
    "clients_heavy",
    "reply_errors",
    "client_errors",
    "reward_end",
    "steps_over_native",
)

if __name__ == "__main__":
    run_parts("outside", FIGURES, description=__doc__)
