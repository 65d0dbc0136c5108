"""From hidden states to what a loss needs: log-probability, entropy and kept mass of the trained tokens only.

Owns: the vocabulary projection, temperature and the masked log-softmax over the kept set. Does not own: which hidden
states (`packing.py` gathers those that precede a trained token, before the projection), and losses (`losses.py`).
Invariant: the distribution is the one the engine sampled from, so ratios compare like with like.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 26
"""Logits held at once, per piece of the projection; larger ones are recomputed in the backward pass."""


class HeadOutput(NamedTuple):
    """Per trained token, [n] each, float32."""

    logprob: Tensor
    """Natural log of the target's probability under the processed distribution."""
    entropy: Tensor
    """Of the processed distribution, in nats."""
    kept_mass: Tensor
    """Probability the full tempered distribution gives to the kept set; 1 where nothing was masked. No gradient."""


class KeptSets(NamedTuple):
    """The kept set K_t of each of n tokens, ragged."""

    counts: Tensor  # int64 [n]; 0: the full vocabulary
    token_ids: Tensor  # int64 [sum of counts]

    def mask(self, vocabulary: int) -> Tensor:
        """Boolean [n, vocabulary]; rows with count 0 are all True."""
        kept = (self.counts == 0).unsqueeze(1).expand(-1, vocabulary).clone()
        rows = torch.repeat_interleave(torch.arange(len(self.counts), device=self.counts.device), self.counts)
        kept[rows, self.token_ids] = True
        return kept

    def slice(self, start: int, stop: int) -> KeptSets:
        """The sets of tokens [start, stop)."""
        before, inside = int(self.counts[:start].sum()), int(self.counts[start:stop].sum())
        return KeptSets(self.counts[start:stop], self.token_ids[before : before + inside])


def logprob_head(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor | float = 1.0,
    kept_mask: Tensor | None = None,
    bias: Tensor | None = None,
    entropy_gradient: bool = True,
) -> HeadOutput:
    """Log-probability of `targets` under softmax(logits / temperature) restricted to the kept set.

    log pi_K(y) = z_y / tau - log sum over k in K ∪ {y} of exp(z_k / tau), with z the logits, tau the temperature; the
    target always belongs to the kept set, so a sampled token never has probability 0.

    Args:
        hidden: [n, H], the states that predict the targets (after the final norm).
        lm_head_weight: [V, H].
        targets: [n], int64.
        temperature: one for all, or [n].
        kept_mask: bool [n, V], True where the sampler kept the token; None: nothing was masked.
        bias: [V], of the projection.
        entropy_gradient: whether the entropy is differentiable; without, it costs less.
    """
    logits = F.linear(hidden, lm_head_weight, bias).float()
    if isinstance(temperature, Tensor):
        logits = logits / temperature.unsqueeze(1)
    elif temperature != 1.0:
        logits = logits / temperature
    chosen = targets.unsqueeze(1)
    if kept_mask is None:
        log_softmax = logits.log_softmax(dim=1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(log_softmax.exp() * log_softmax).sum(dim=1)
        return HeadOutput(log_softmax.gather(1, chosen).squeeze(1), entropy, torch.ones_like(entropy).detach())
    kept = kept_mask.scatter(1, chosen, True)
    log_kept = logits.masked_fill(~kept, -torch.inf).log_softmax(dim=1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # 0 · log 0 is 0; masked_fill before the product keeps NaN out of the gradient.
        entropy = -(log_kept.exp() * log_kept.masked_fill(~kept, 0.0)).sum(dim=1)
    with torch.no_grad():
        kept_mass = logits.softmax(dim=1).masked_fill(~kept, 0.0).sum(dim=1)
    return HeadOutput(log_kept.gather(1, chosen).squeeze(1), entropy, kept_mass)


def logprobs_of(
    hidden: Tensor,
    head: torch.nn.Module,
    targets: Tensor,
    *,
    temperature: Tensor,
    kept: KeptSets | None = None,
    entropy_gradient: bool = True,
) -> HeadOutput:
    """`logprob_head` in pieces of at most `MAX_LOGITS` logits, recomputed in the backward pass where there are several.

    Args:
        hidden: [n, H].
        head: the output embedding, with `weight` [V, H] and perhaps `bias` [V].
        targets: [n], int64.
        temperature: [n].
        kept: the kept sets of the n tokens; None: nothing was masked.
        entropy_gradient: whether the entropy is differentiable.
    """
    weight, bias = head.weight, getattr(head, "bias", None)
    assert isinstance(weight, Tensor)

    def piece(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return logprob_head(
            hidden[start:stop],
            weight,
            targets[start:stop],
            temperature=temperature[start:stop],
            kept_mask=None if kept is None else kept.slice(start, stop).mask(weight.shape[0]),
            bias=bias,
            entropy_gradient=entropy_gradient,
        )

    count, step = len(targets), max(1, MAX_LOGITS // weight.shape[0])
    if count <= step:
        return HeadOutput(*piece(0, count))
    bounds = [(start, min(start + step, count)) for start in range(0, count, step)]
    pieces = [checkpoint(piece, start, stop, use_reentrant=False) for start, stop in bounds]
    return HeadOutput(*(torch.cat(column) for column in zip(*pieces, strict=True)))
