"""Checks, before the first step of a model, whether its kernels compute what `forward_check` has checked."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.learn.forward import FORWARD_ERRORS
from agentrl.learn.forward_check import REASON_LENGTH, SHARING_TOLERANCE, check_rows
from agentrl.learn.models import PolicyModel
from agentrl.learn.packing import pack

_ROUNDED_TOLERANCE = 0.1
"""Largest mean difference in log-probabilities between two kernels in 16 bits, in nats: rounding makes about .01, a
token that sees another's context about 1."""


def why_compiled_attention_fails(model: PolicyModel) -> str:
    """Return why attention as a step on CUDA computes it, compiled and in the model's dtype, cannot replace the unfused
    attention that `why_unshared` has checked; empty if it can. Compiling takes seconds."""
    try:
        with torch.no_grad():
            unfused = _check_logprobs(model, share=True)
        compiled = _check_logprobs(model, share=True)
        compiled.sum().backward()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - of the attention kernel's compiler
        return f"{type(error).__name__}: {' '.join(str(error).split())[:REASON_LENGTH]}"
    finally:
        for parameter in model.parameters.values():
            parameter.grad = None
    difference = float((compiled.detach() - unfused).abs().mean())
    return (
        ""
        if difference <= _tolerance(model)
        else f"log-probabilities of the compiled attention differ by {difference:.2g}"
    )


@torch.no_grad()
def rows_are_exact(model: PolicyModel) -> bool:
    """Whether padded rows reproduce the prefix tree, which `why_unshared` has checked, in the model's dtype."""
    try:
        difference = float((_check_logprobs(model, share=True) - _check_logprobs(model, share=False)).abs().mean())
    except FORWARD_ERRORS:
        return False
    return difference <= _tolerance(model)


def _tolerance(model: PolicyModel) -> float:
    return SHARING_TOLERANCE if model.model.dtype == torch.float32 else _ROUNDED_TOLERANCE


def _check_logprobs(model: PolicyModel, *, share: bool) -> Tensor:
    """Compute the log-probabilities of a few rows that share a prefix."""
    (batch,) = pack(check_rows(model.model, [12, 13, 15, 140]), max_tokens=1 << 30, share=share)
    return model.token_logprobs(batch).logprob
