"""New weights while calls are in flight, on real vLLM: what they cost, and that nothing is lost.

    python -m benchmarks.weight_sync [--quick] [--part adapters|full]

Adapters, refresh `lazy`, 16 calls in flight on the calculator's model:
`lora_pause_calls`: how often vLLM was paused. `lora_gap_p99_ms`: p99 of the gaps between two tokens of a call that
overlap the 100 ms after a publish began, over the same without a publish, by turns. `lora_publish_ms`: from `serve` to
the first token that a new call samples on the new version, median. Its parts: `lora_copy_ms`, the adapter is copied
and checked beside vLLM's steps; then vLLM is asked at once to load it (`lora_load_ms`), to answer its canary
(`lora_canary_ms`) and for the first token. It takes these up between two steps of `lora_step_ms`, and computes both
answers in the step after; `first_token_ms` is that of a call without any publish. What makes steps longer (calls in
flight, a training process on the same cores) makes a publish longer: all of these again with `_training`, beside a
process that trains the same model.
`lazy_prefill_ratio`, `turn_prefill_ratio`: tokens prefilled per turn of 20-turn conversations with an update every 6
turns, over no updates; `lazy` at max_staleness 4. Beside them: 1, 2, and the prefix cache cleared at each update.

Full weights, refresh `token`, 64 calls in flight on a model of the same size whose tokens show who drew them:
`full_gap_over_bare_ms`: the longest gap between two tokens of any call across an update, over that of vLLM's own pause,
start, update, finish and resume on the same vLLM, by turns; medians; KV kept, and recomputed shown beside.
`requests_lost`: calls that failed or came back short, of both parts. `tokens_twice`: tokens that came twice, are
missing, or were drawn by other weights than their span says.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from agentrl.engines.vllm import process as vllm_process
from benchmarks.report import Report

PARTS = (
    "lora_gap_p99_ms",
    "lora_publish_ms",
    "lora_step_ms",
    "lora_copy_ms",
    "lora_load_ms",
    "lora_canary_ms",
    "first_token_ms",
)
NAMES = (
    *PARTS,
    *(f"{name}_training" for name in PARTS),
    "lora_pause_calls",
    "lazy_prefill_ratio",
    "turn_prefill_ratio",
    "full_gap_over_bare_ms",
    "requests_lost",
    "tokens_twice",
)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the updates")
    parser.add_argument("--part", choices=["adapters", "full"], help="measure this part alone")
    options = parser.parse_args()
    vllm_process.prepare_vllm_process()
    from benchmarks.weight_sync_adapters import adapters
    from benchmarks.weight_sync_full import full_weights

    updates = 20 if options.quick else 200
    report = Report(
        "weight_sync",
        quick=options.quick,
        repeats=updates,
        compared_with="no publish, no updates, and vLLM's own calls, on the same vLLM by turns",
    )
    report.figures.update(dict.fromkeys(NAMES))
    if options.part in (None, "adapters"):
        asyncio.run(adapters(report, publishes=updates, quick=options.quick))
    if options.part in (None, "full"):
        asyncio.run(full_weights(report, updates=updates, keep_kv=True))
        if not options.quick:
            asyncio.run(full_weights(report, updates=updates // 10, keep_kv=False))
    report.print()
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()
