"""Memory and time of a training step beside plain transformers, on a Qwen3 with a vocabulary of 151,936.

Bytes are those of every storage that is allocated and not yet released, parameters apart, over a forward and backward
pass with recomputation; counted on tensors without data, which a test holds equal to a real step. Plain is one row
through transformers with gradient checkpointing, `logits_to_keep`, and the log-probabilities of the same tokens.

`bytes_per_frozen_parameter`: of a bfloat16 base under an adapter. `published_bytes_per_parameter`: of the file of a
version with all weights. `memory_over_plain`: peak bytes at 8,192 tokens. `memory_slope`: growth of the peak from 8,192
to 16,384 tokens over twice that from 4,096 to 8,192, without gradients of parameters, which do not grow.
`largest_tensor_growth`: the largest tensor made at 8,192 tokens over that at 4,096, gradients apart.
`time_over_plain`: CPU seconds of a step without sharing, interleaved pairs, one thread.
`shared_time_over_plain`: the same where rows of 7,800 tokens share down to 3,560, over the rows in one padded batch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig, EnvironmentConfig, ModelConfig, TrainerConfig
from agentrl.core.records import PolicyVersion, TrainingSample
from agentrl.engines.meta import runnable_on_meta
from agentrl.learn.forward import token_logprobs
from agentrl.learn.memory_prediction import AllocationCounter
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack
from agentrl.learn.publish import Publisher

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
"""116 million parameters."""
SMALL = SHAPE | {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
TRAINED = 32
"""One in so many tokens of a row is trained, at its end."""
SHARED_ROWS, SHARED_LENGTH, SHARED_PREFIX = 6, 1300, 848
PAIRS, SHARED_PAIRS = 7, 3
"""Interleaved steps; one of those that share takes a minute."""
Counter = TypeVar("Counter", bound=AllocationCounter)


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**(SMALL if quick else SHAPE))
        transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
        return _dtypes(path) | _memory(path) | _times(path, quick=quick)


def _configured(path: Path, *, dtype: str = "auto", lora: bool = False, recompute: bool = False) -> RunConfig:
    policy = PolicyConfig(lora=LoraConfig(rank=8) if lora else None)
    return RunConfig(
        environment=EnvironmentConfig(id="none"),
        model=ModelConfig(path=str(path), dtype=dtype),
        engine=EngineConfig(max_context=32_768),
        policies={"policy": policy},
        trainer=TrainerConfig(recompute=recompute),
    )


def _rows(count: int, length: int, prefix: int = 0) -> list[TrainingSample]:
    """Rows of random tokens, the first `prefix` of which they share."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 8192, (count, length + 1)).astype(np.int32)
    tokens[:, :prefix] = tokens[0, :prefix]
    mask, blank = np.arange(length + 1) > length - length // TRAINED, np.zeros(length + 1, np.float32)
    return [TrainingSample(token_ids=row, loss_mask=mask, behavior_logprobs=blank, advantages=blank) for row in tokens]


def _dtypes(path: Path) -> dict[str, float | None]:
    adapted = load_models(_configured(path, lora=True), torch.device("cpu"))["policy"].model
    frozen = [each for each in nn.Module.parameters(adapted) if not each.requires_grad]
    full = load_models(_configured(path), torch.device("cpu"))["policy"]
    with tempfile.TemporaryDirectory() as run:
        reference = Publisher(Path(run)).publish(PolicyVersion("policy", 0, 1), full)
        published = (Path(reference.path) / "model.safetensors").stat().st_size
    return {
        "bytes_per_frozen_parameter": sum(each.nbytes for each in frozen) / sum(each.numel() for each in frozen),
        "published_bytes_per_parameter": published / sum(each.numel() for each in full.parameters.values()),
    }


# --- one step, ours and plain -----------------------------------------------------------------------------------------


def _ours(model: PolicyModel, rows: Sequence[TrainingSample]) -> None:
    (batch,) = pack(rows, max_tokens=1 << 30, share=model.shared_prefixes)
    token_logprobs(model.model, batch, shared=model.shared_prefixes).logprob.sum().backward()


def _plain(model: Any, rows: Sequence[TrainingSample]) -> None:
    """All rows, which are of one length, through transformers as they are."""
    ids = torch.from_numpy(np.stack([row.token_ids for row in rows])).long()
    # No mask: none is needed for whole rows, and transformers makes one of L² where tensors have no data.
    causal = {"full_attention": None}
    trained = (ids.shape[1] - 1) // TRAINED
    logits = model(input_ids=ids[:, :-1], attention_mask=causal, use_cache=False, logits_to_keep=trained).logits
    logprobs = logits.float().log_softmax(-1).gather(2, ids[:, -trained:, None])
    logprobs.sum().backward()


# --- memory -----------------------------------------------------------------------------------------------------------


class _WithoutGradients(AllocationCounter):
    """Leaves out what has the size of a parameter, which are gradients, and remembers the largest storage."""

    def __init__(self, known: Sequence[Tensor]) -> None:
        super().__init__(known)
        self.largest = 0
        self._left_out = {tensor.untyped_storage().nbytes() for tensor in known}

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage.nbytes() not in self._left_out:
            super()._count(storage)
            self.largest = max(self.largest, storage.nbytes())


def _memory(path: Path) -> dict[str, float | None]:
    counted = {length: _counted(path, length, _WithoutGradients) for length in (4096, 8192, 16_384)}
    peak = {length: each.peak for length, each in counted.items()}
    ours, plain = _counted(path, 8192, AllocationCounter).peak, _plain_bytes(path, 8192)
    print(f"peak bytes at 8,192 tokens: {ours}, plain {plain}; without gradients of parameters: {peak}", flush=True)
    return {
        "memory_over_plain": ours / plain,
        "memory_slope": (peak[16_384] - peak[8192]) / (2 * (peak[8192] - peak[4096])),
        "largest_tensor_growth": counted[8192].largest / counted[4096].largest,
    }


def _counted(path: Path, length: int, kind: type[Counter]) -> Counter:
    """The bytes of a step on one row."""
    config = _configured(path, dtype="float32", recompute=True)
    model = load_models(config, torch.device("meta"))["policy"]
    module: nn.Module = model.model
    with runnable_on_meta(model.model), kind([*module.parameters(), *module.buffers()]) as counted:
        _ours(model, _rows(1, length))
    return counted


def _plain_bytes(path: Path, length: int) -> int:
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(path), dtype=torch.float32, attn_implementation="sdpa"
        )
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        with AllocationCounter([*model.parameters(), *model.buffers()]) as counted:
            _plain(model, _rows(1, length))
    peak: int = counted.peak
    return peak


# --- time -------------------------------------------------------------------------------------------------------------


def _times(path: Path, *, quick: bool) -> dict[str, float | None]:
    torch.set_num_threads(1)  # on a busy machine, threads that wait for each other would be measured
    model = load_models(_configured(path, dtype="float32"), torch.device("cpu"))["policy"]
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    plain = load(path, dtype=torch.float32, attn_implementation="sdpa")
    part = 4 if quick else 1
    _ratio("warm-up", model, plain, _rows(1, 256), 1)
    measured = {
        "time_over_plain": (_rows(1, 2048 // part), 3 if quick else PAIRS),
        "shared_time_over_plain": (_rows(SHARED_ROWS, SHARED_LENGTH // part, SHARED_PREFIX // part), SHARED_PAIRS),
    }
    return {name: _ratio(name, model, plain, rows, pairs) for name, (rows, pairs) in measured.items()}


def _ratio(name: str, model: PolicyModel, plain: Any, rows: Sequence[TrainingSample], pairs: int) -> float:
    """Median of the ratio of CPU seconds over interleaved pairs."""
    ratios = []
    for number in range(1, pairs + 1):
        start = time.process_time()
        _ours(model, rows)
        middle = time.process_time()
        _plain(plain, rows)
        ours, theirs = middle - start, time.process_time() - middle
        print(f"{name}, pair {number} of {pairs}: {ours:.1f} s, plain {theirs:.1f} s", flush=True)
        ratios.append(ours / theirs)
    return statistics.median(ratios)
