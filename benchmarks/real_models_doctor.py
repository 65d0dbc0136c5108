"""The memory that `agentrl doctor` predicts for a trainer process, beside the peak of one that trains.

Each configuration is predicted in a fresh process, as doctor predicts it, and trained in another: two steps on a full
micro-batch of the longest rows, all weights of which are loaded from a directory. On a CPU the peak is of anonymous
resident memory, read every few milliseconds; on a GPU it is of what torch's allocator handed out.

`doctor_error`: the largest |predicted - peak| / peak of four configurations: an adapter and all weights in float32,
both again in bfloat16, the adapter's without recomputation and the others' with it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import transformers

from agentrl.app.memory_estimate import estimate_memory
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import (
    ClusterConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    SamplingConfig,
    TrainerConfig,
)
from agentrl.core.machine import process_anonymous_memory_bytes
from agentrl.core.records import EpisodeDataLocation, TrainBatch, Trajectory, TrajectoryCredit, TrajectoryRow, Unit
from agentrl.learn.memory_prediction import make_worst_case_samples
from agentrl.learn.models import load_models
from agentrl.learn.trainer import PolicyTrainer
from benchmarks.real_models_memory import SHAPE, SMALL

ROWS, STEPS = 2, 2
"""The second step is the first that has the optimizer's moments beside activations."""
CONTEXT, SAMPLED = 1024, 256
POLICY = "policy"
CONFIGURATIONS = {
    "an adapter": {"lora": True, "recompute": False, "dtype": "float32"},
    "an adapter, bfloat16": {"lora": True, "recompute": False, "dtype": "bfloat16"},
    "all weights, recomputed": {"lora": False, "recompute": True, "dtype": "float32"},
    "all weights, recomputed, bfloat16": {"lora": False, "recompute": True, "dtype": "bfloat16"},
}
EVERY_S = 0.002
MIB = 1 << 20


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**(SMALL if quick else SHAPE))
        transformers.Qwen3ForCausalLM(config).save_pretrained(path)
        return {"doctor_error": max(error_of(path, name) for name in CONFIGURATIONS)}


def error_of(model: Path, name: str) -> float:
    """The relative error of the prediction for one of `CONFIGURATIONS`."""
    predicted, peak = (_in_a_process(what, model, name) for what in ("predict", "train"))
    error = (predicted - peak) / peak
    print(f"{name}: predicted {predicted / MIB:,.0f} MiB, held {peak / MIB:,.0f} MiB, {error:+.1%}", flush=True)
    return abs(error)


def _in_a_process(what: str, model: Path, name: str) -> int:
    command = [sys.executable, "-m", __name__, what, str(model), name]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    if answer.returncode:
        raise SystemExit(f"{what}, {name}, failed:\n{answer.stderr}")
    return int(json.loads(answer.stdout.splitlines()[-1]))


def _configured(model: Path, *, lora: bool, recompute: bool, dtype: str) -> RunConfig:
    policy = PolicyConfig(lora=LoraConfig(rank=8) if lora else None, step_size=ROWS)
    return RunConfig(
        environment=EnvironmentConfig(id="none"),
        model=ModelConfig(path=str(model), dtype=dtype),
        engine=EngineConfig(max_context=CONTEXT),
        sampling=SamplingConfig(max_tokens=SAMPLED, max_turns=1),
        policies={POLICY: policy},
        cluster=ClusterConfig(address="local"),  # ranks in processes of their own
        trainer=TrainerConfig(recompute=recompute, micro_batch_tokens=ROWS * CONTEXT),
    )


def predicted_bytes(config: RunConfig) -> int:
    """Bytes of a trainer process, by doctor."""
    parts = [part for part in estimate_memory(config).parts if part.process == "trainer rank"]
    return sum(part.bytes for part in parts)


def trained_bytes(config: RunConfig) -> int:
    """The most that this process held while it trained."""
    with tempfile.TemporaryDirectory() as run, peak_memory() as peak:
        (shapes,) = load_models(config, torch.device("meta")).values()
        samples = make_worst_case_samples(config, POLICY, shapes)
        rows = [
            TrajectoryRow(
                token_ids=sample.token_ids,
                loss_mask=sample.loss_mask,
                behavior_logprobs=sample.behavior_logprobs,
                turn_index=np.where(sample.loss_mask, 0, -1).astype(np.int32),
                spans=(),
            )
            for sample in samples
        ]
        trajectories = [Trajectory(seat="agent", index=0, policy=POLICY, rows=(row,), reward=0.0) for row in rows]
        units = tuple(
            Unit(
                episode_id=f"e{number}",
                attempt=0,
                policy=POLICY,
                location=EpisodeDataLocation("nowhere", 0),
                credits=(TrajectoryCredit("agent", 0, 0.0, 1.0 - 2.0 * number, 0.0),),
            )
            for number in range(len(rows))
        )
        trainer = PolicyTrainer(
            config, Path(run), read=lambda units: [(trajectories[int(unit.episode_id[1:])],) for unit in units]
        )
        trainer.start()
        for step in range(1, STEPS + 1):
            trainer.forward_backward(TrainBatch(step_id=step, policy=POLICY, units=units, normalizer=1.0))
            trainer.optim_step(POLICY, step)
    return peak[0]


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The peak of what is allocated inside, once it is left."""
    peak, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            peak[0] = max(peak[0], process_anonymous_memory_bytes())

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak[0] = torch.cuda.max_memory_allocated()
        return
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        ended.set()
        watcher.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("predict", "train"))
    parser.add_argument("model", type=Path)
    parser.add_argument("name", choices=CONFIGURATIONS)
    arguments = parser.parse_args()
    configured = _configured(arguments.model, **CONFIGURATIONS[arguments.name])
    print((predicted_bytes if arguments.what == "predict" else trained_bytes)(configured))
