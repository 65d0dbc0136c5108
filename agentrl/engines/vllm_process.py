"""vLLM's process: `python -m agentrl.engines.vllm_process FD PARENT`: `process_host`, and what vLLM needs around it.

vLLM starts processes of its own by spawning, and each of them imports this module before anything else: what stands
here at module level holds in all of them. Imports nothing heavy.
Invariants: no process outlives the one that started it; nothing but loopback is bound; no usage report is sent.
"""

from __future__ import annotations

import multiprocessing
import os

from agentrl.engines.supervision import die_with

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
_GENTLE = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""Defaults that the user's own environment may override."""


def prepare() -> None:
    """Set up this process before vLLM, torch or transformers are imported."""
    os.environ.update(_ENVIRONMENT)
    for name, value in _GENTLE.items():
        os.environ.setdefault(name, value)
    if multiprocessing.parent_process() is not None:
        die_with(os.getppid())


prepare()

if __name__ == "__main__":
    from agentrl.engines.process_host import main

    main()
    os._exit(0)
