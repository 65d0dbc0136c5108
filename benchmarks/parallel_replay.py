"""The part `replay` of `benchmarks.parallel`: recorded experts of a model with 512 of them, on sharded ranks.

The embedded engine samples in float32. The trainer's routers are rounded to four bits, so that they choose other
experts for some tokens, as engine and trainer of a large model do in bfloat16.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agentrl.core.ports import SamplingParams
from agentrl.learn.ranks import DistributedRankGroup
from agentrl.learn.trainer import PolicyTrainer
from benchmarks import mismatch
from tests.learn_cases import Episodes, run_config
from tests.rank_processes import on_ranks

RANKS, EXPERTS = 2, 512


def figures(quick: bool) -> dict[str, float | None]:
    """Measure k3 with the recorded experts and without; quick: fewer episodes."""
    with tempfile.TemporaryDirectory() as directory:
        sampled, rounded = Path(directory) / "sampled", Path(directory) / "rounded"
        mismatch.write_model(sampled, 0, num_experts=EXPERTS)
        shutil.copytree(sampled, rounded)
        weights = load_file(sampled / "model.safetensors")
        routers = {name: each for name, each in weights.items() if name.endswith(".mlp.gate.weight")}
        weights |= {name: _rounded(each) for name, each in routers.items()}
        save_file(weights, rounded / "model.safetensors", {"format": "pt"})
        function = f"{__name__}:replayed"
        found, *_ = on_ranks(RANKS, function, str(sampled), str(rounded), directory, 8 if quick else 32)
    with_replay, without = found
    print(f"  k3 {with_replay:.2g} with the recorded experts, {without:.2g} without", flush=True)
    return {"routing_replay_k3": with_replay, "routing_replay_gain": without / with_replay}


def _rounded(weights: torch.Tensor) -> torch.Tensor:
    mantissas, exponents = weights.frexp()
    return torch.ldexp((mantissas * 16).round() / 16, exponents)


def replayed(ranks: DistributedRankGroup, sampled: str, rounded: str, directory: str, episodes: int) -> list[float]:
    """Return k3 of a step with the recorded experts, and of one without. Each rank samples the same episodes."""
    torch.set_num_threads(1)
    sampling = SamplingParams(max_tokens=mismatch.NEW)
    of_engine = mismatch.sampled(Path(sampled), episodes=episodes, dtype="float32", sampling=sampling)
    rows = [row for trajectories in asyncio.run(of_engine) for each in trajectories for row in each.rows]
    found = []
    for is_routed in (True, False):
        read = Episodes(rows if is_routed else [row.with_column("experts", None) for row in rows])
        config = run_config(Path(rounded), ranks=RANKS, sharding="full")
        config = config.model_copy(update={"engine": config.engine.model_copy(update={"capture_routing": True})})
        place = Path(directory) / str(is_routed)
        trainer = PolicyTrainer(config.trainer_plan, place, ranks=ranks, read=read.read)
        trainer.start()
        trainer.forward_backward(read.batch())
        found.append(trainer.optim_step("policy", 1).metrics["mismatch/k3"])
    return found
