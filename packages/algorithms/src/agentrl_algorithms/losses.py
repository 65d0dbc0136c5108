"""Policy losses from papers: functions of a `LossBatch`, one value per token.

Symbols: pi = exp(logprobs), mu = exp(behavior_logprobs), A = advantages, w = pi / mu, sg = stop-gradient.
docs/reference/algorithms.md lists them with their names in TRL and verl.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agentrl import LossBatch, loss

LOG_RATIO_LIMIT = 20.0
"""Bound on the logarithm of a ratio, as that of `LossBatch.log_ratio`."""


@loss(groups="token")
def dppo(batch: LossBatch, *, delta_low: float = 0.2, delta_high: float = 0.2) -> Tensor:
    """-w A, without gradient outside a trust region in probability (DPPO with binary TV, arXiv:2602.04879, eq. 13).

    Left out where A > 0 and pi - mu > h, or A <= 0 and pi - mu < -l, l = `delta_low`, h = `delta_high`: as `truncated`
    with an unbounded ratio. SkyRL serves it under this name, with these options.
    """
    change = batch.logprobs.detach().exp() - batch.behavior_logprobs.exp()
    is_outside = torch.where(batch.advantages > 0, change > delta_high, change < -delta_low)
    return -batch.ratio * batch.advantages * ~is_outside


@loss(groups="token")
def cispo(batch: LossBatch, *, min_ratio: float = 0.0, max_ratio: float = 5.0) -> Tensor:
    """-sg(clip(w, l, h)) A log pi (CISPO, arXiv:2506.13585): l = `min_ratio`, h = `max_ratio`.

    Every token keeps a gradient, however far its ratio is. h = 5 and no lower bound are ScaleRL's (arXiv:2510.13786).
    """
    return -batch.ratio.detach().clamp(min_ratio, max_ratio) * batch.advantages * batch.logprobs


@loss(groups="token")
def sapo(batch: LossBatch, *, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    """-(4 / t) sigmoid(t (w - 1)) A, t = `positive` where A > 0, else `negative` (SAPO, arXiv:2511.20347).

    A smooth gate instead of a clip: the gradient fades with the distance of w from 1, faster where A <= 0.
    """
    t = _choose(batch.advantages > 0, positive, negative, batch.advantages)
    return -4 / t * torch.sigmoid(t * (batch.ratio - 1)) * batch.advantages


@loss(groups="agent")
def gspo(batch: LossBatch, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """-min(s A, clip(s, 1 - l, 1 + h) A), s = exp(mean of log w over the conversation) (GSPO, arXiv:2507.18071).

    The unit of the ratio is that of the reward. Use it with `normalizer = "sequences"`, as in the paper; with
    `normalizer = 1` instead, long conversations weigh by their length (LUSPO, arXiv:2602.05261).
    """
    log_s = batch.mean(batch.logprobs - batch.behavior_logprobs, "agent")
    s = log_s.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return _clipped(s, batch.advantages, clip_low, clip_high)


@loss(groups="token")
def decoupled_ppo(
    batch: LossBatch, *, clip_low: float = 0.2, clip_high: float = 0.28, max_ratio: float = 5.0
) -> Tensor:
    """-sg(min(prox / mu, C)) min(r A, clip(r, 1 - l, 1 + h) A), r = pi / prox (Hilton et al. 2021, arXiv:2110.00641).

    log prox is `LossBatch.proximal_logprobs`, so that the clip keeps pi near a recent policy instead of an old one. C =
    `max_ratio` (AReaL, arXiv:2505.24298, which masks or clamps at 5).
    """
    correction = batch.proximal_logprobs - batch.behavior_logprobs
    weight = correction.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=max_ratio).detach()
    r = (batch.logprobs - batch.proximal_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return weight * _clipped(r, batch.advantages, clip_low, clip_high)


@loss(groups="agent", groups_option="level")
def geometric_mask(
    batch: LossBatch, *, level: str = "agent", low: float = 0.99, high: float = 1.01, max_ratio: float = 5.0
) -> Tensor:
    """-sg(min(w, C)) A log pi where exp(mean of log w over the turn or conversation) lies in [`low`, `high`], else 0.

    Geometric rejection (Liu et al. 2025, richardli.xyz/rl-collapse; NeMo-RL's `seq-mask-tis`). Unlike the product, the
    mean does not grow with the length. A conversation of several versions is accepted or rejected as a whole. C =
    `max_ratio`.
    """
    if level not in ("turn", "agent"):
        raise ValueError(f"level = {level!r}: expected turn, agent")
    with torch.no_grad():
        mean = batch.mean(batch.log_ratio, "turn" if level == "turn" else "agent").exp()
        weight = batch.ratio.clamp(max=max_ratio).masked_fill((mean < low) | (mean > high), 0.0)
    return -weight * batch.advantages * batch.logprobs


@loss(groups="agent")
def off_policy_mask(
    batch: LossBatch, *, threshold: float = 0.5, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float = 3.0
) -> Tensor:
    """`ppo`, but 0 where A < 0 and the mean of log mu - log pi over the conversation exceeds `threshold`.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9): tokens that pi has already moved away
    from are not pushed down further. Published thresholds differ by a factor of 5,000 (slime 1e-4, TRL 0.5).
    """
    with torch.no_grad():
        away = batch.mean(batch.behavior_logprobs - batch.logprobs, "agent")
        keep = (batch.advantages >= 0) | (away <= threshold)
    return _clipped(batch.ratio, batch.advantages, clip_low, clip_high, dual_clip) * keep


@loss(groups="step")
def m2po(
    batch: LossBatch,
    *,
    threshold: float = 0.04,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float = 3.0,
) -> Tensor:
    """`ppo`, but 0 for the tokens of largest (log w)² in the step, as many as it takes to bring the mean of the others
    below `threshold`; for all tokens if none are small enough.

    M2PO (arXiv:2510.01161): the second moment bounds the variance of the ratios, and few tokens make up most of it, so
    that data from hundreds of steps ago stays useful. The divisor still counts all tokens.
    """
    with torch.no_grad():
        moments, order = batch.log_ratio.square().sort(descending=True)
        remaining_mean = moments.flip(0).cumsum(0).flip(0) / torch.arange(len(moments), 0, -1, device=moments.device)
        low = (remaining_mean < threshold).nonzero()
        first = int(low[0]) if len(low) else len(moments)
        keep = torch.zeros_like(order, dtype=torch.bool)
        keep[order[first:]] = True
    return _clipped(batch.ratio, batch.advantages, clip_low, clip_high, dual_clip) * keep


@loss(groups="agent")
def topr(batch: LossBatch, *, max_ratio: float = 1.0) -> Tensor:
    """-A log pi where A > 0; -sg(min(v, C)) A log pi where A <= 0 (TOPR, arXiv:2503.14286).

    v is the product of w over the conversation, C = `max_ratio`: good conversations are learned as in supervised
    training, bad ones only as far as pi would still produce them.
    """
    with torch.no_grad():
        v = batch.sum(batch.log_ratio, "agent").clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=max_ratio)
        weight = torch.where(batch.advantages > 0, torch.ones_like(v), v)
    return -weight * batch.advantages * batch.logprobs


@loss(groups="agent")
def vespo(
    batch: LossBatch,
    *,
    k_positive: float = 2.0,
    scale_positive: float = 3.0,
    k_negative: float = 3.0,
    scale_negative: float = 2.0,
) -> Tensor:
    """-sg(exp(c + k log v - c v)) A log pi (VESPO, arXiv:2602.10693), with v the product of w over the conversation.

    k = `k_positive` and c = `scale_positive` where A >= 0, else the others. The weight is 1 at v = 1, and falls on both
    sides. log v is kept within log 1e-8 and 20.
    """
    with torch.no_grad():
        log_v = batch.sum(batch.log_ratio, "agent").clamp(math.log(1e-8), LOG_RATIO_LIMIT)
        good = batch.advantages >= 0
        k = _choose(good, k_positive, k_negative, batch.advantages)
        c = _choose(good, scale_positive, scale_negative, batch.advantages)
        weight = (c + k * log_v - c * log_v.exp()).exp()
    return -weight * batch.advantages * batch.logprobs


@loss(groups="step")
def clip_cov(batch: LossBatch, *, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Tensor:
    """-w A, without gradient for a `share` of the step's tokens: those of largest covariance within [`low`, `high`].

    Covariance of a token: (log pi - mean)(A - mean), means over the step (Clip-Cov, arXiv:2505.22617): such tokens make
    the entropy fall. The paper draws them at random among those within the bounds; a loss here is a pure function.
    """
    covariance = _covariance(batch)
    inside = (covariance >= low) & (covariance <= high)
    clip_mask = _largest(covariance.masked_fill(~inside, -torch.inf), share) & inside
    return -batch.ratio * batch.advantages * ~clip_mask


@loss(groups="step")
def kl_cov(batch: LossBatch, *, share: float = 2e-4, coefficient: float = 1.0) -> Tensor:
    """-w A, plus `coefficient` |log w| for the `share` of the step's tokens of largest covariance (arXiv:2505.22617).

    Covariance as in `clip_cov`: KL-Cov penalizes those tokens instead of leaving them out.
    """
    mask = _largest(_covariance(batch), share)
    log_w = batch.logprobs - batch.behavior_logprobs  # without the bound of `log_ratio`, which ends the penalty
    return -batch.ratio * batch.advantages + coefficient * log_w.abs() * mask


def _covariance(batch: LossBatch) -> Tensor:
    logprobs = batch.logprobs.detach()
    return (logprobs - logprobs.mean()) * (batch.advantages - batch.advantages.mean())


def _largest(values: Tensor, share: float) -> Tensor:
    """Return a bool mask [n] of the share of tokens with the largest values, at least one."""
    mask = torch.zeros(len(values), dtype=torch.bool, device=values.device)
    if len(values):
        mask[values.topk(min(len(values), max(1, round(share * len(values))))).indices] = True
    return mask


def _choose(where: Tensor, if_true: float, if_false: float, like: Tensor) -> Tensor:
    """Choose one of two numbers per token, in the dtype of `like`."""
    return torch.where(where, like.new_tensor(if_true), like.new_tensor(if_false))


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float = torch.inf) -> Tensor:
    """-min(r A, clip(r, 1 - l, 1 + h) A), at most -c A where A < 0: the loss `ppo` for any ratio r."""
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    return -torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
