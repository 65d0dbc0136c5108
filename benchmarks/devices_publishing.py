"""The part `publishing` of `benchmarks.devices`: how long full weights being published block the trainer.

Before: compute the canary, write the file, sync it, read it again for its digest, gather the tensors again, and wait
until an engine on the same machine has received them as files. Now: `PolicyTrainer.publish`, which syncs and hashes
while it writes; an engine loads the published file without the trainer. By turns on one model, medians of wall time.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.core.files import rename_durably, sha256_of, staging_directory
from agentrl.core.records import PolicyVersion
from agentrl.learn.models import PolicyModel
from agentrl.learn.publish import FULL_FILE
from agentrl.learn.trainer import PolicyTrainer
from tests.default_starts import default_config
from tests.learn_cases import write_tokenizer

LAYERS, QUICK_LAYERS = 24, 2
PAIRS, QUICK_PAIRS = 5, 1


def figures(quick: bool) -> dict[str, float | None]:
    """Publish both ways by turns; quick: a small model, once."""
    warnings.simplefilter("ignore")
    before, now = [], []
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as received:
        root = Path(scratch)
        config = default_config(_write_model(root / "model", quick), adapter=False, dtype="bfloat16")
        trainer = PolicyTrainer(config.trainer_plan, root / "run")
        trainer.start()
        model = trainer._learner("policy").model
        engine = {name: torch.empty_like(tensor, device="cpu") for name, tensor in model.publication.layout().items()}
        gigabytes = sum(tensor.nbytes for tensor in engine.values()) / 1e9
        for number in range(QUICK_PAIRS if quick else PAIRS):
            start = time.perf_counter()
            weights = trainer.publish("policy", PolicyVersion("policy", number, 0))
            published = time.perf_counter()
            trainer._canaries[model.base].of(model)
            _publish_and_send(model, root / f"before{number}", Path(received), engine)
            now.append((published - start) / gigabytes)
            before.append((time.perf_counter() - published) / gigabytes)
            print(f"{gigabytes:.2f} GB: {now[-1]:.2f} s per GB, before {before[-1]:.2f}", flush=True)
            shutil.rmtree(weights.path)  # a run deletes old versions, and the next one reuses their pages of memory
            shutil.rmtree(root / f"before{number}")
    medians = statistics.median(now), statistics.median(before)
    return {
        "publish_blocked_s_per_gb": medians[0],
        "publish_blocked_s_per_gb_before": medians[1],
        "publish_blocked_ratio": medians[0] / medians[1],
    }


def _write_model(directory: Path, quick: bool) -> Path:
    config = transformers.Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=QUICK_LAYERS if quick else LAYERS,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def _publish_and_send(model: PolicyModel, target: Path, received: Path, engine: dict[str, Tensor]) -> None:
    """Publish as commit 5d5b18fd did, and load into the tensors of an engine."""
    with staging_directory(target, depth=1) as staging:
        save_file(dict(model.publication.tensors()), staging / FULL_FILE)
        rename_durably(staging, target)
    sha256_of(target / FULL_FILE)
    for number, (name, tensor) in enumerate(model.publication.tensors()):
        file = received / f"{number}.safetensors"
        save_file({name: tensor.contiguous()}, file)
        for name, tensor in load_file(file).items():
            engine[name].copy_(tensor)
