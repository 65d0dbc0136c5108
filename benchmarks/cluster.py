"""One run over several machines: what they are used for, what their loss costs, and how far one run's process reaches.

    python -m benchmarks.cluster [--quick] [--part NAME]

Each part is a module `benchmarks.cluster_NAME` with one function, `figures(quick) -> {name: number or null}`. What no
part measures is null. `--part` runs one of them. The hosts are network namespaces with private disks, which needs root.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("hosts_used", "reward_end", "wall_over_one_host", "runs_hidden"),
    *("gradient_error", "join_timeout_s"),
    *("adapter_publish_ms", "adapter_publish_over_one_host", "full_publish_gb_s", "full_file_gb_s", "bare_copy_gb_s"),
    *("faults", "lost", "twice", "ledger_errors", "resampled_acknowledged_tokens"),
    "orchestrator_cpu_ms_per_episode_1k",
    "orchestrator_cpu_ms_per_episode_10k",
    "orchestrator_cpu_ms_per_episode_100k",
    "orchestrator_cpu_growth",
    "kb_per_episode_100k",
)

if __name__ == "__main__":
    run_parts("cluster", FIGURES, description=__doc__)
