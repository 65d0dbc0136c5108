"""Measures what the trainer takes for a token, and for an update, with random tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from agentrl.config.plans import TrainerPlan
from agentrl.learn.memory_prediction import make_worst_case_samples
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack

Clock = Callable[[], float]
"""Returns seconds."""
_ROWS, _LENGTH = 4, 64
"""Number and length of the rows that are computed."""


class TrainerSeconds(NamedTuple):
    """What the parts of a step take in the trainer, in seconds."""

    forwarded: float
    """A token in the forward and backward pass."""
    trained: float
    """A trained token, in addition."""
    update: float
    """The optimizer's update."""


def measure_trainer(plan: TrainerPlan, clock: Clock) -> tuple[str, PolicyModel, TrainerSeconds]:
    """Load the models of a run on the CPU, and measure a step of its first policy, which changes no weights.

    Raises:
        ModelError: the directory holds no model that can be trained.
    """
    torch.set_num_threads(plan.threads)
    name, model = next(iter(load_models(plan, torch.device("cpu")).items()))
    length = min(_LENGTH, plan.max_context)

    def seconds(trained: int) -> tuple[float, int, int]:
        rows = make_worst_case_samples(plan, name, model, length, trained)[:_ROWS]
        (batch,) = pack(rows, max_tokens=len(rows) * length, share=model.shared_prefixes)
        began = clock()
        model.token_logprobs(batch).logprob.sum().backward()
        return clock() - began, len(batch.token_ids), len(batch.targets)

    model.activate()
    seconds(1)  # prepares kernels
    few_s, tokens, few = seconds(1)
    many_s, _, many = seconds(length // 2)
    trained_s = max(many_s - few_s, 0.0) / max(many - few, 1)
    optimizer = torch.optim.AdamW(model.parameters.values(), lr=0.0)
    began = clock()
    optimizer.step()
    update_s = clock() - began
    model.round_masters()
    return name, model, TrainerSeconds(max(few_s - few * trained_s, 0.0) / tokens, trained_s, update_s)
