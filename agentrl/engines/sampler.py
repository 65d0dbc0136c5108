"""From logits to tokens: temperature, top-k, top-p, min-p, and the inverse of the cumulative distribution.

Invariants:
1. The n-th token of a request depends on (seed, n) and its distribution, never on the company in the batch.
2. A logprob is that of the processed distribution: after temperature and filters, renormalised.
3. A token outside the kept set is never sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBatch:
    """How each row of a pass samples, `[B]` each."""

    uniforms: NDArray[np.float64]
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    """0: off."""
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    filtered: bool
    """Whether any row has a filter."""
    tempered: bool
    """Whether any row has a temperature other than 1."""


def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row.

    Args:
        logits: `[B, V]`, any floating dtype.
        batch: how each row samples.

    Returns:
        tokens `[B]` int64; their logprobs `[B]` float32; the kept set `[B, V]` bool, None where no row has a filter.
    """
    scores = logits.float()
    if batch.tempered:
        scores = scores / torch.from_numpy(batch.temperature).to(scores.device)[:, None]
    kept = kept_set(scores, batch.top_k, batch.top_p, batch.min_p) if batch.filtered else None
    if kept is not None:
        scores = scores.masked_fill(~kept, -torch.inf)
    logprobs = torch.log_softmax(scores, dim=-1)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    at = torch.from_numpy(batch.uniforms).to(scores.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, at, right=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0], kept


def kept_set(
    scores: Tensor, top_k: NDArray[np.int64], top_p: NDArray[np.float32], min_p: NDArray[np.float32]
) -> Tensor:
    """Which tokens survive top-k, then top-p (arXiv:1904.09751), then min-p (arXiv:2407.01082), as `[B, V]` bool.

    Each filter acts on the distribution renormalised after the one before. Ties are broken by token id; top-p keeps
    the smallest set whose mass reaches `top_p`; min-p keeps what has at least `min_p` of the likeliest token's mass.
    """
    vocabulary = scores.shape[-1]
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    limit = torch.from_numpy(np.where(top_k > 0, top_k, vocabulary)).to(scores.device)[:, None]
    beyond = torch.arange(vocabulary, device=scores.device) >= limit
    mass = torch.softmax(ordered.masked_fill(beyond, -torch.inf), dim=-1)
    before = mass.cumsum(-1, dtype=torch.float64) - mass
    nucleus = torch.from_numpy(top_p.astype(np.float64)).to(scores.device)[:, None]
    floor = torch.from_numpy(min_p).to(scores.device)[:, None] * mass[:, :1]
    keep = ~beyond & ((before < nucleus) | (nucleus >= 1)) & (mass >= floor)
    return torch.zeros_like(keep).scatter_(1, order, keep)
