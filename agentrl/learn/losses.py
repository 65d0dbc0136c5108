"""Policy losses: pure functions of log-probabilities, one value per token, chosen by configuration.

Owns: the formulas, their masks and what is measured about the ratio. Does not own: the model (`logprobs.py`), the
normaliser (a constant of the step, `TrainBatch.normaliser`), advantages (`credit`). Every loss corrects against the
*recorded* log-probabilities of the tokens, so one episode may mix policy versions. `LossTerms.sums` are additive over
tokens, rows, micro-batches and ranks; `loss_metrics` turns their totals into means.

Symbols: pi = exp(logprobs), mu = exp(behavior_logprobs), A = advantages, w = pi / mu, sg = stop-gradient.

The gradient of a token's loss with respect to its log pi is bounded by |A| times
truncated   max_ratio, also far from mu: the weight is a constant, cut there
ppo         max(1 + clip_high, DUAL_CLIP): the former where A > 0, the latter where A < 0
reinforce   1
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.config.run import LossConfig, PolicyGradientLoss, PpoLoss, ReinforceLoss

LOG_RATIO_LIMIT = 20.0
"""log w is clamped to ±20, so that no recorded value can overflow the ratio."""

SUMS = ("measured_tokens", "k3", "abs_logprob_difference", "masked", "truncated", "ratio", "ratio_squared")
"""The entries of `LossTerms.sums`, in this order."""


class LossTerms(NamedTuple):
    """A loss over some tokens, and the sums for its metrics."""

    loss: Tensor
    """Per token, shape of `logprobs`; 0 where `loss_mask` is False. Sum it and divide by the constant normaliser."""
    sums: Tensor
    """[len(SUMS)], float64, without gradient; see `loss_metrics`."""


def log_ratio(logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    """log w = log pi - log mu, clamped to ±`LOG_RATIO_LIMIT`."""
    return (logprobs - behavior_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _terms(
    loss: Tensor, *, logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, masked: Tensor, truncated: Tensor
) -> LossTerms:
    """`loss` with the statistics of the ratio; `masked` and `truncated` are boolean, per token."""
    with torch.no_grad():
        log_w = log_ratio(logprobs, behavior_logprobs)[loss_mask].double()
        w = log_w.exp()
        difference = (logprobs - behavior_logprobs)[loss_mask].double().abs()
        columns = (
            torch.ones_like(w),
            w - 1 - log_w,
            difference,
            masked[loss_mask].double(),
            truncated[loss_mask].double(),
            w,
            w * w,
        )
        sums = torch.stack([column.sum() for column in columns])
    return LossTerms(torch.where(loss_mask, loss, torch.zeros_like(loss)), sums)


def truncated(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, section: PolicyGradientLoss
) -> LossTerms:
    """Truncated importance weight with a trust region: -sg(min(w, C)) · keep · A · log pi.

    C = `section.max_ratio` (CISPO, arXiv:2506.13585). keep = 0 where A > 0 and pi - mu > `section.trust_region`, or
    A <= 0 and pi - mu < -`section.trust_region` (DPPO-TV, arXiv:2602.04879): a token whose probability has already
    moved that far in its advantage's direction pushes no further. All tensors have one shape, any; `loss_mask` is bool.
    """
    with torch.no_grad():
        w = log_ratio(logprobs, behavior_logprobs).exp()
        moved = logprobs.exp() - behavior_logprobs.exp()
        masked = torch.where(advantages > 0, moved > section.trust_region, moved < -section.trust_region)
        weight = torch.where(masked, torch.zeros_like(w), w.clamp(max=section.max_ratio)) * advantages
    return _terms(
        -weight * logprobs,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        loss_mask=loss_mask,
        masked=masked,
        truncated=w > section.max_ratio,
    )


DUAL_CLIP = 3.0
"""A token of negative advantage whose ratio is above this pushes no further (verl's `clip_ratio_c`): else its gradient
grows with the ratio, without bound."""


def ppo(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, section: PpoLoss
) -> LossTerms:
    """Clipped surrogate (PPO, arXiv:1707.06347) with dual clip (Ye et al. 2020, arXiv:1912.09729).

    -min(w A, clip(w, 1 - l, 1 + h) A) where A >= 0, -max(min(w A, clip(w, 1 - l, 1 + h) A), c A) where A < 0.
    l = `section.clip_low`, h = `section.clip_high` (asymmetric: DAPO, arXiv:2503.14476), c = `DUAL_CLIP`.
    Tokens whose gradient a clip removed count as masked. All tensors have one shape, any; `loss_mask` is bool.
    """
    w = log_ratio(logprobs, behavior_logprobs).exp()
    clipped = w.clamp(1 - section.clip_low, 1 + section.clip_high)
    objective = torch.minimum(w * advantages, clipped * advantages)
    objective = torch.where(advantages < 0, torch.maximum(objective, DUAL_CLIP * advantages), objective)
    loss = -objective
    with torch.no_grad():
        masked = (clipped * advantages < w * advantages) | ((advantages < 0) & (w > DUAL_CLIP))
    return _terms(
        loss,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        loss_mask=loss_mask,
        masked=masked,
        truncated=torch.zeros_like(masked),
    )


def reinforce(
    logprobs: Tensor, behavior_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, section: ReinforceLoss
) -> LossTerms:
    """-A log pi (REINFORCE, Williams 1992), without correction: right only where pi sampled the tokens itself.

    All arguments have one shape, any; `loss_mask` is bool. `behavior_logprobs` is only measured against.
    """
    nothing = torch.zeros_like(loss_mask)
    return _terms(
        -advantages * logprobs,
        logprobs=logprobs,
        behavior_logprobs=behavior_logprobs,
        loss_mask=loss_mask,
        masked=nothing,
        truncated=nothing,
    )


Loss = Callable[[Tensor, Tensor, Tensor, Tensor], LossTerms]
"""A loss with its configuration bound: (logprobs, behavior_logprobs, advantages, loss_mask)."""


def make_loss(section: LossConfig) -> Loss:
    """The loss a configuration section names, with the section bound to it."""
    match section:
        case PolicyGradientLoss():
            return partial(truncated, section=section)
        case PpoLoss():
            return partial(ppo, section=section)
        case ReinforceLoss():
            return partial(reinforce, section=section)


def loss_metrics(sums: Tensor) -> Mapping[str, float]:
    """Means per trained token from the totals of `LossTerms.sums`.

    Returns:
        `k3` (the k3 estimate of KL(mu || pi), Schulman 2020), `abs_logprob_difference`, `masked_fraction`,
        `truncated_fraction`, `mean_ratio`, and `effective_sample_fraction` = (sum w)² / (n · sum w²); empty without
        tokens.
    """
    total = dict(zip(SUMS, sums.tolist(), strict=True))
    count = total["measured_tokens"]
    if not count:
        return {}
    return {
        "k3": total["k3"] / count,
        "abs_logprob_difference": total["abs_logprob_difference"] / count,
        "masked_fraction": total["masked"] / count,
        "truncated_fraction": total["truncated"] / count,
        "mean_ratio": total["ratio"] / count,
        "effective_sample_fraction": total["ratio"] ** 2 / (count * total["ratio_squared"]),
    }
