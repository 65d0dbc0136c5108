"""Ranks that share the weights (FSDP2, gloo on CPU processes), compared with one rank that has all of them.

`gradient_error`: of a step's gradient at 2 and 4 ranks, sharded, replicated and in groups (HSDP), relative to its norm,
the worst of all weights, adapters of two policies, and experts; float32. `resume_other_ranks`: 1 if the losses of a run
that goes from 2 ranks to 4 and to 1, each time from a checkpoint, are within 1e-6 of an undisturbed one's.
`bytes_per_rank_ratio`: weights, gradients and optimizer states of a rank of 2, over those of 1. `publish_extra_bytes`:
resident memory of the rank that writes a version with all weights, at its peak, over that before; the model of 116
million parameters, in bfloat16, at 2 ranks. `load_extra_bytes`: memory of a rank of 2 at its peak while it loads that
model from float32 files and checks it, without what files back, over that before and its float32 shards.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from agentrl.config.policies import PolicyConfig
from agentrl.config.sections import ModelConfig
from agentrl.core.machine import process_anonymous_memory_bytes
from agentrl.core.records import PolicyVersion
from agentrl.learn.ranks import DistributedRankGroup, local_shard
from agentrl.learn.trainer import PolicyTrainer
from benchmarks.real_models_doctor import peak_memory
from benchmarks.real_models_memory import SHAPE, SMALL
from tests.learn_cases import run_config, write_model
from tests.rank_processes import on_ranks
from tests.sharding_cases import FUNCTION, alone, case, gradient_error

LOSS_TOLERANCE = 1e-6


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part; `quick`: at 2 ranks only, and a smaller model is published."""
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for kind in ("qwen3", "moe"):
            write_model(root / kind, kind=kind)
        return _steps(root, (2,) if quick else (2, 4)) | _publication(root, quick=quick)


def _cases(root: Path, ranks: int) -> dict[str, dict[str, Any]]:
    def made(name: str, model: str = "qwen3", **settings: Any) -> dict[str, Any]:
        return case(root / model, root / name / str(ranks), **settings)

    found = {
        "all weights": made("all"),
        "adapters": made("adapters", lora=True, policies=("policy", "other")),
        "experts": made("experts", "moe"),
        "offloaded": made("offloaded", sharding="offload"),
        "replicated": made("replicated", sharding="none"),
        "replicated adapters": made("replicated adapters", lora=True, policies=("policy", "other"), sharding="none"),
    }
    return found | ({"groups": made("groups", sharding=2)} if ranks > 2 else {})


def _steps(root: Path, sizes: Sequence[int]) -> dict[str, float | None]:
    names = list(_cases(root, 1))
    one = dict(zip(names, alone(list(_cases(root, 1).values())), strict=True))
    errors, ratios, saved = {}, {}, ""
    for size in sizes:
        cases = _cases(root, size)
        for name, *ranks in zip(cases, *on_ranks(size, FUNCTION, list(cases.values())), strict=True):
            whole = "all weights" if name in ("groups", "offloaded") else name
            expected = Path(_cases(root, 1)[whole]["directory"])
            errors[name, size] = gradient_error(Path(cases[name]["directory"]), expected)
            if size == 2 and "replicated" not in name and "offloaded" not in name:
                ratios[name] = max(rank["bytes"] for rank in ranks) / one[name]["bytes"]
            if (name, size) == ("all weights", 2):
                saved = ranks[0]["checkpoint"]
    print(f"gradient errors {errors}, bytes per rank {ratios}", flush=True)
    (whole,) = alone([case(root / "qwen3", root / "undisturbed", steps=3)])
    losses = whole["losses"][:1]
    for step, size in ((2, max(sizes)), (3, 1)):
        resumed = case(root / "qwen3", root / f"resumed{step}", first=step, resume_from=saved)
        (found,) = alone([resumed]) if size == 1 else on_ranks(size, FUNCTION, [resumed])[0]
        losses, saved = losses + found["losses"], found["checkpoint"]
    off = max(abs(mine - other) for mine, other in zip(losses, whole["losses"], strict=True))
    print(f"losses of the resumed run are off by {off}", flush=True)
    return {
        "gradient_error": max(errors.values()),
        "bytes_per_rank_ratio": max(ratios.values()),
        "resume_other_ranks": float(off <= LOSS_TOLERANCE),
    }


def _publication(root: Path, *, quick: bool) -> dict[str, float | None]:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(**(SMALL if quick else SHAPE))
    model: Any = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(root / "float32")
    model.to(torch.bfloat16).save_pretrained(root / "large")
    del model
    gc.collect()
    extra, *_ = on_ranks(2, "benchmarks.real_models_sharding:publish", str(root / "large"), str(root / "published"))
    loading = on_ranks(2, "benchmarks.real_models_sharding:load", str(root / "float32"), str(root / "loaded"))
    print(f"bytes beside the shards while ranks load {loading}", flush=True)
    return {"publish_extra_bytes": extra, "load_extra_bytes": max(loading)}


def load(ranks: DistributedRankGroup, path: str, directory: str) -> int:
    """On each rank: the growth of anonymous memory to its peak while a trainer starts, less its shards."""
    config = run_config(Path(path), policies={"policy": PolicyConfig(lora=None)}, ranks=ranks.size, sharding="full")
    config = config.model_copy(update={"model": ModelConfig(path=path, dtype="bfloat16")})
    gc.collect()
    before = process_anonymous_memory_bytes()
    trainer = PolicyTrainer(config, Path(directory), ranks=ranks, publishes=False)
    with peak_memory() as peak:
        trainer.start()
    return (
        peak[0]
        - before
        - sum(local_shard(each).nbytes for each in trainer._learner("policy").model.parameters.values())
    )


def publish(ranks: DistributedRankGroup, model: str, directory: str) -> int:
    """On each rank: publish twice; the growth of resident memory to its peak in the second publication."""
    policies = {"policy": PolicyConfig(lora=None)}
    config = run_config(Path(model), policies=policies, ranks=ranks.size, sharding="full")
    trainer = PolicyTrainer(config, Path(directory), ranks=ranks, publishes=False)
    trainer.start()
    trainer.publish("policy", PolicyVersion("policy", 0, 0))  # buffers of gloo and libraries that load lazily
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    trainer.publish("policy", PolicyVersion("policy", 1, 0))
    (peak,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(peak.split()[1]) * 1024 - before
