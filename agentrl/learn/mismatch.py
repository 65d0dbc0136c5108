"""How far the trainer's log-probabilities are from the recorded ones, by version lag: the monitor that is always on.

Where a row was sampled by the very weights the trainer computes with, both sides mean the same distribution: what is
left is the mismatch of the two implementations (dtype, kernels, routing, filters, a wrong adapter). Elsewhere it comes
on top of what the optimizer steps in between changed. Pure numpy, from a step's columns of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import BoolArray
    from agentrl.learn.columns import MergedColumns

LOG_RATIO_LIMIT = 20.0
"""log w is clamped to ±20, as in the losses."""
LAGS = ("0", "1", "2", "3", "4+")
"""Lags told apart."""


def mismatch(columns: MergedColumns) -> dict[str, float]:
    """Metrics of a step; see `mismatch_metrics`."""
    found = columns.columns
    trainer, behavior = found["trainer_logprobs"], found["behavior_logprobs"]
    return mismatch_metrics(trainer, behavior, lag=found["lag"], fresh=columns.fresh) | seat_metrics(
        trainer, behavior, columns.seats
    )


def seat_metrics(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], seats: NDArray[np.object_]
) -> dict[str, float]:
    """`seat_k3/<seat>` where the tokens, all of shape [n], are of several seats: k3 as in `mismatch_metrics`."""
    names = sorted(set(seats.tolist()))
    if len(names) < 2:
        return {}
    measured = {name: _log_ratio(trainer, behavior, seats == name) for name in names}
    return {f"seat_k3/{name}": float((np.expm1(w) - w).mean()) for name, w in measured.items() if len(w)}


def mismatch_metrics(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], *, lag: NDArray[np.int32], fresh: BoolArray
) -> dict[str, float]:
    """Mismatch figures over the tokens whose row was forwarded.

    With log w = trainer - behavior, `k3` is the mean of w - 1 - log w: never negative, an unbiased estimate of KL(mu ||
    pi) over tokens sampled from mu (Schulman 2020, http://joschu.net/blog/kl-approx.html). `difference` is the mean of
    |log w|, `max_difference` the largest.

    Args:
        trainer: [n], NaN where the token was not forwarded.
        behavior: [n], recorded by the engine.
        lag: [n], steps between the weights of both; -1: not known.
        fresh: [n], whether the token's whole row was sampled by the weights the trainer computed with: a token of lag 0
            in another row may have been sampled over KV of older weights.

    Returns:
        `mismatch/k3`, `/difference`, `/max_difference`, `/tokens` over fresh tokens, and the same as `lag_k3/<lag>`,
        `lag_difference/<lag>`, `lag_max_difference/<lag>`, `lag_tokens/<lag>` by lag; without those that saw no token.
    """
    groups = {"mismatch/{}": fresh}
    for at, word in enumerate(LAGS):
        groups[f"lag_{{}}/{word}"] = lag == at if at < len(LAGS) - 1 else lag >= at
    metrics: dict[str, float] = {}
    for name, tokens in groups.items():
        values = _log_ratio(trainer, behavior, tokens)
        if len(values):
            metrics[name.format("k3")] = float((np.expm1(values) - values).mean())
            metrics[name.format("difference")] = float(np.abs(values).mean())
            metrics[name.format("max_difference")] = float(np.abs(values).max())
            metrics[name.format("tokens")] = float(len(values))
    return metrics


def _log_ratio(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], tokens: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """log w of those of the tokens that were forwarded."""
    chosen = tokens & np.isfinite(trainer)
    difference: NDArray[np.float64] = trainer[chosen].astype(np.float64) - behavior[chosen]
    return difference.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
