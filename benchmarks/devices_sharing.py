"""The part `sharing` of `benchmarks.devices`: prefix trees against padded rows, forward and backward."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

SHAPES = (  # tokens of the prefix, rows of a group, tokens of each row after it, groups
    *((1, 8, 16, 8), (4, 2, 16, 8), (4, 8, 64, 2), (8, 2, 128, 4), (16, 2, 32, 8), (16, 4, 256, 2)),
    *((32, 2, 512, 2), (64, 2, 64, 4), (64, 8, 64, 2), (256, 2, 64, 2), (256, 8, 32, 1), (1024, 4, 128, 1)),
)
REPEATS = 4


def figures(quick: bool) -> dict[str, float | None]:
    """Measure; `quick`: fewer repeats of every shape."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    import agentrl.learn.models  # noqa: F401  # registers the attention of trees
    from agentrl.learn.forward import ATTENTION, sharing_pays, token_logprobs
    from agentrl.learn.packing import pack

    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = Qwen3ForCausalLM(Qwen3Config(**shape, **heads)).to(device)
    share = partial(sharing_pays, hidden_size=128) if device == "cuda" else True  # as `PolicyModel.sharing`

    def seconds(samples: Any, *, tree: bool) -> float:
        model.set_attn_implementation(ATTENTION if tree else "sdpa")
        clock = time.process_time if device == "cpu" else time.perf_counter
        start = clock()
        for batch in pack(samples, max_tokens=8192, share=tree):
            token_logprobs(model, batch, shared=tree).logprob.sum().backward()
        model.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - start

    regrets = []
    for case in SHAPES:
        samples = _samples(*case)
        (chosen,) = {batch.is_tree for batch in pack(samples, max_tokens=8192, share=share)}
        pairs = [(seconds(samples, tree=True), seconds(samples, tree=False)) for _ in range(3 if quick else REPEATS)]
        tree, rows = (min(column) for column in zip(*pairs[1:], strict=True))  # the first one warms up
        regrets.append((tree if chosen else rows) / min(tree, rows) - 1.0)
        print(f"{case}: tree {tree:.3f} s, rows {rows:.3f} s, regret {regrets[-1]:.3f}", flush=True)
    return {
        "sharing_choice_regret": sum(regrets) / len(regrets),
        "sharing_worst_regret": max(regrets),
        "sharing_shapes": len(regrets),
    }


def _samples(prefix: int, group: int, suffix: int, groups: int) -> list[Any]:
    import numpy as np

    from agentrl.core.tokens import TrainingSample

    rng = np.random.default_rng(0)
    samples = []
    for _ in range(groups):
        common = rng.integers(0, 512, prefix)
        for _ in range(group):
            ids = np.concatenate([common, rng.integers(0, 512, suffix)]).astype(np.int32)
            blank = np.zeros(len(ids), np.float32)
            mask = np.arange(len(ids)) >= prefix
            samples.append(TrainingSample(token_ids=ids, loss_mask=mask, logprobs=blank, advantages=blank))
    return samples
