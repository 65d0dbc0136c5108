"""vLLM as people run it: which GPUs it gets, which arguments it takes, and weights that arrive.

    python -m benchmarks.serving [--part plans|arguments|weights|smollm2|formats]

`plans_right`: 1 where of twelve combinations of ranks, replicas, tensor parallelism and placement over described GPUs
each process gets its GPUs, none twice (but by a rank and an engine that share it) and none is missing.
`starts_either_order`: 1 where vLLM's own check of free memory lets an engine start on snapshots of a 24 GB card before
its trainer, after it, and again beside it; without the plan's share it refuses the second.

`arguments_passed`: 1 where 20 engine arguments of `[engine.vllm]` stand in the argument class vLLM is started with.
`refused_with_reason`: arguments that would break a promise, each refused with its reason.

`faults_caught`: of five faults between trainer and engine, on real vLLM, those that the canary check or the checks
before it find before a token leaves. `full_update_equal`: 1 where 24 greedy tokens after an update of all weights are
those of a vLLM started on these weights, and no log-probability differs by more than 1e-4. What an update costs is
measured by `python -m benchmarks.weight_sync`.

`reward_gap_vllm`: how far the held-out reward of examples/08_smollm2.toml in bfloat16, at half its learning rate, on
vLLM ends from that on the embedded engine after as many steps, seed 0; `reward_end_*`, `tokens_per_s_*`: both, and
trained tokens per second. It needs `make smollm2`, and takes half an hour, so a quick benchmark trains neither.

`template_families`: chat templates of installed packages that carry a conversation (null where TRL, which has most of
them, is not installed). `retokenised`: sampled replies that a later context does not hold token by token;
`rows_differ_from_engine`: turns whose row is not what the engine had; both while the history is kept and while it is
forked. `rewrites_found`: the share of planted ways of rewriting former turns that the probe names, each alone.
`tool_formats`: reply formats in which two calls reach a tool in a two-turn episode, with the thinking before them.
"""

from __future__ import annotations

import os

from agentrl.engines.vllm import process as vllm_process
from benchmarks.parts import run_parts

NAMES = (
    *("plans_right", "starts_either_order"),
    *("arguments_passed", "refused_with_reason"),
    *("faults_caught", "full_update_equal"),
    *("reward_gap_vllm", "reward_end_vllm", "reward_end_embedded", "tokens_per_s_vllm", "tokens_per_s_embedded"),
    *("template_families", "retokenised", "rows_differ_from_engine", "rewrites_found", "tool_formats"),
)


def main() -> None:
    """Run and report."""
    vllm_process.prepare_vllm_process()
    run_parts("serving", NAMES, description=__doc__)
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()
