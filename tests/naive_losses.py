"""Losses from the papers' formulas, for one row of tokens: the reference of `tests/unit` and `tests/property`.

Written with autograd over log-probabilities in float64, and without anything of agentrl.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Logarithms of ratios beyond it count as it, without a gradient."""


def ratio(pi: Tensor, mu: Tensor) -> Tensor:
    return torch.exp(torch.clamp(pi - mu, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clip(w: Tensor, low: float, high: float) -> Tensor:
    return torch.clamp(w, 1 - low, 1 + high)


def number(x: Tensor) -> float:
    return float(x.detach())


def naive_sapo(pi: Tensor, mu: Tensor, a: float, **_: Any) -> Tensor:
    t = 1.0 if a > 0 else 1.05
    return -a * 4 / t / (1 + torch.exp(-t * (ratio(pi, mu) - 1)))


def naive_cispo(
    pi: Tensor, mu: Tensor, a: float, *, min_ratio: float = 0.0, max_ratio: float = 5.0, **_: Any
) -> Tensor:
    return -a * pi * ratio(pi, mu).detach().clamp(min_ratio, max_ratio)


def naive_gspo(pi: Tensor, mu: Tensor, a: float, *, clip_low: float, clip_high: float, **_: Any) -> Tensor:
    s = torch.exp((pi - mu).sum() / len(pi))
    return -torch.min(s * a, clip(s, clip_low, clip_high) * a).expand(len(pi))


def naive_decoupled(pi: Tensor, mu: Tensor, a: float, lags: Tensor, **_: Any) -> Tensor:
    share = [0.0 if lag == 0 else 1 / float(lag) for lag in lags]
    prox = torch.stack([x * m + (1 - x) * p for x, m, p in zip(share, mu, pi.detach(), strict=True)])
    r = ratio(pi, prox)
    return -ratio(prox, mu).clamp(max=5.0) * torch.min(r * a, clip(r, 0.2, 0.28) * a)


def naive_sampling(
    pi: Tensor, mu: Tensor, a: float, turns: list[int], *, level: str, outside: str, low: float, high: float, **_: Any
) -> Tensor:
    losses = []
    for at in range(len(pi)):
        same = [
            i for i in range(len(pi)) if level == "agent" or (i == at if level == "token" else turns[i] == turns[at])
        ]
        v = math.exp(sum(number(pi[i] - mu[i]) for i in same))
        weight = min(v, high) if outside == "truncate" else v * (low <= v <= high)
        losses.append(-weight * a * pi[at])
    return torch.stack(losses)


def naive_geometric(pi: Tensor, mu: Tensor, a: float, *, low: float, high: float, **_: Any) -> Tensor:
    keep = low <= math.exp(number((pi - mu).mean())) <= high
    return -ratio(pi, mu).detach().clamp(max=5.0) * a * pi * keep


def naive_off_policy(
    pi: Tensor, mu: Tensor, a: float, *, threshold: float, clip_low: float = 0.2, clip_high: float = 0.28, **_: Any
) -> Tensor:
    w = ratio(pi, mu)
    surrogate = torch.min(w * a, clip(w, clip_low, clip_high) * a)
    surrogate = surrogate if a >= 0 else torch.max(surrogate, torch.tensor(3.0 * a, dtype=torch.float64))
    return -surrogate * (a >= 0 or number((mu - pi).mean()) <= threshold)


def naive_topr(pi: Tensor, mu: Tensor, a: float, **_: Any) -> Tensor:
    return -a * pi * (1.0 if a > 0 else min(1.0, math.exp(number((pi - mu).sum()))))


def naive_vespo(pi: Tensor, mu: Tensor, a: float, **_: Any) -> Tensor:
    k, c = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
    log_v = min(20.0, max(math.log(1e-8), number((pi - mu).sum())))
    return -math.exp(c + k * log_v - c * math.exp(log_v)) * a * pi


def naive_truncated(
    pi: Tensor, mu: Tensor, a: float, *, max_ratio: float = 5.0, trust_region: float = 0.2, **_: Any
) -> Tensor:
    moved = (pi.exp() - mu.exp()).detach()
    keep = moved <= trust_region if a > 0 else moved >= -trust_region
    return -ratio(pi, mu).detach().clamp(max=max_ratio) * keep * a * pi


def naive_dppo(pi: Tensor, mu: Tensor, a: float, *, delta_low: float, delta_high: float, **_: Any) -> Tensor:
    losses = []
    for now, before in zip(pi, mu, strict=True):
        moved = math.exp(number(now)) - math.exp(number(before))
        is_masked = moved > delta_high if a > 0 else moved < -delta_low
        losses.append(-ratio(now, before) * a * (not is_masked))
    return torch.stack(losses)


def naive_ppo(pi: Tensor, mu: Tensor, a: float, **options: Any) -> Tensor:
    return naive_off_policy(pi, mu, a, **{**options, "threshold": math.inf})


def naive_reinforce(pi: Tensor, mu: Tensor, a: float, **_: Any) -> Tensor:
    return -a * pi


CASES: list[tuple[str, dict[str, Any], Callable[..., Tensor]]] = [
    ("truncated", {}, naive_truncated),
    ("truncated", {"max_ratio": 1.5, "trust_region": 0.1}, naive_truncated),
    ("dppo", {"delta_low": 0.2, "delta_high": 0.2}, naive_dppo),
    ("dppo", {"delta_low": 0.1, "delta_high": 0.02}, naive_dppo),
    ("ppo", {}, naive_ppo),
    ("ppo", {"clip_low": 0.1, "clip_high": 0.5}, naive_ppo),
    ("reinforce", {}, naive_reinforce),
    ("sapo", {}, naive_sapo),
    ("cispo", {}, naive_cispo),
    ("cispo", {"min_ratio": 0.8, "max_ratio": 1.28}, naive_cispo),
    ("gspo", {"clip_low": 0.05, "clip_high": 0.1}, naive_gspo),
    ("decoupled_ppo", {}, naive_decoupled),
    *(
        ("importance_sampling", {"level": level, "outside": outside, "low": 0.5, "high": 2.0}, naive_sampling)
        for level in ("token", "turn", "agent")
        for outside in ("truncate", "mask")
    ),
    ("geometric_mask", {"low": 0.8, "high": 1.1}, naive_geometric),
    ("off_policy_mask", {"threshold": 0.05}, naive_off_policy),
    ("topr", {}, naive_topr),
    ("vespo", {}, naive_vespo),
]
"""Name, options, and the loss of a row: log pi, log mu, its advantage, and the lag and turn of each token."""
BY_TOKEN = {"truncated", "dppo", "ppo", "reinforce", "sapo", "cispo"}
"""Losses in which a token's does not depend on others."""
