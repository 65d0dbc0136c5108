"""The part of `benchmarks.serving` about GPUs: who gets which, and vLLM's own check of the memory that is free."""

from __future__ import annotations

from collections import Counter

from agentrl.config.devices import SHARED_SHARE, plan_devices
from tests.unit.test_device_plan import COMBINATIONS, configuration, machine, planned

CARD = 24 << 30
CONTEXT = 512 << 20
"""Bytes that CUDA itself takes in a process."""


def figures(quick: bool) -> dict[str, float | None]:
    """The part's figures."""
    return {
        "plans_right": float(all(is_right(*combination) for combination in COMBINATIONS)),
        "starts_either_order": float(starts_either_order()),
    }


def is_right(ranks: int, replicas: int, size: int, count: int, nodes: int) -> bool:
    """Whether every process has its GPUs, and no GPU two ranks or two engines."""
    plan = planned(ranks, replicas, size, count, nodes)
    engines = Counter(at for held in plan.engines for at in held)
    print(
        f"{ranks} ranks, {replicas} engines of {size}, {count} GPUs, {nodes or 'no'} nodes: {'; '.join(plan.lines())}"
    )
    return (
        len(set(plan.ranks)) == len(plan.ranks) == ranks
        and [len(held) for held in plan.engines] == [size] * replicas
        and max(engines.values()) == 1
        and (not nodes or not set(plan.ranks) & engines.keys())
    )


def starts_either_order() -> bool:
    """Whether a vLLM starts before, after and again beside a trainer that has filled its share of the same card."""
    plan = plan_devices(configuration(), machine(1))
    trainer = int(plan.share_of_rank(0) * CARD) + CONTEXT
    frees = {"before the trainer": CARD - CONTEXT, "after it, and again": CARD - trainer - CONTEXT}
    for when, free in frees.items():
        for share in (plan.shares[0], 0.92):
            print(f"vLLM with {share:.0%} of a 24 GB card, started {when}: {'yes' if starts(free, share) else 'no'}")
    return (
        plan.shares == (SHARED_SHARE,)
        and all(starts(free, SHARED_SHARE) for free in frees.values())
        and not starts(frees["after it, and again"], 0.92)
    )


def starts(free: int, share: float) -> bool:
    """Whether vLLM's worker finds the memory that it is to take."""
    from vllm.config import CacheConfig
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    snapshot = MemorySnapshot(device="cpu", auto_measure=False)
    snapshot.total_memory, snapshot.free_memory = CARD, free
    try:
        return request_memory(snapshot, CacheConfig(gpu_memory_utilization=share)) <= free
    except ValueError:
        return False
