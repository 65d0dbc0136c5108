"""Losses against a naive loop, one token at a time, and what they promise about bounds and sums."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.losses import SUMS, Loss, token_metric_sums
from agentrl.learn.trainer import loss_metrics
from tests import naive_losses
from tests.loss_cases import ALL_LOSSES, batch_of, evaluated, loss_named
from tests.markdown_pages import ROOT
from tests.naive_losses import BY_TOKEN

pytestmark = pytest.mark.property

Tokens = list[tuple[float, float, float]]


def clamped_ratio(lp: float, mu: float) -> float:
    return math.exp(min(20.0, max(-20.0, lp - mu)))


CASES = [
    (loss_named(name, **options), options, naive) for name, options, naive in naive_losses.CASES if name in BY_TOKEN
]
SUMMED = [loss_named("truncated", max_ratio=1.5, trust_region=0.1), loss_named("ppo"), loss_named("reinforce")]

logprob = st.floats(-30, -1e-3)
tokens = st.lists(st.tuples(logprob, logprob, st.floats(-3, 3, allow_subnormal=False)), min_size=1, max_size=12)


def batch(rows: Tokens) -> LossBatch:
    lp, mu, advantages = zip(*rows, strict=True)
    return batch_of(lp, mu, advantages)


def sums(loss: Loss, rows: Tokens) -> torch.Tensor:
    given = batch(rows)
    return token_metric_sums(given, evaluated(loss, given), torch.ones(len(rows)))


def metrics_of(loss: Loss, rows: Tokens) -> Mapping[str, float]:
    return loss_metrics(dict(zip(SUMS, sums(loss, rows).tolist(), strict=True)), loss)


def by_autograd(
    naive: Callable[..., torch.Tensor], lp: float, mu: float, advantage: float, options: dict[str, Any]
) -> tuple[float, float]:
    """The reference of a row of one token, and its derivative by lp."""
    pi = torch.tensor([lp], dtype=torch.float64, requires_grad=True)
    loss = naive(pi, torch.tensor([mu], dtype=torch.float64), advantage, **options)
    (slope,) = torch.autograd.grad(loss.sum(), pi)
    return loss.item(), slope.item()


@pytest.mark.parametrize(("loss", "options", "naive"), CASES)
@settings(deadline=None)
@given(rows=tokens)
def test_loss_and_gradient_are_those_of_the_naive_loop(
    loss: Loss, options: dict[str, Any], naive: Callable[..., torch.Tensor], rows: Tokens
) -> None:
    found = evaluated(loss, batch(rows))
    for index, (lp, mu, advantage) in enumerate(rows):
        value, slope = by_autograd(naive, lp, mu, advantage, options)
        assert found.loss[index].item() == pytest.approx(value, rel=1e-9, abs=1e-12)
        assert found.by_logprob[index].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("loss", SUMMED)
@settings(deadline=None)
@given(rows=tokens, cut=st.integers(0, 12))
def test_sums_add_up_over_pieces(loss: Loss, rows: Tokens, cut: int) -> None:
    parts = [sums(loss, part) for part in (rows[:cut], rows[cut:]) if part]
    torch.testing.assert_close(sums(loss, rows), torch.stack(parts).sum(0), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(rows=tokens)
def test_metrics_are_those_of_the_naive_loop(rows: Tokens) -> None:
    rows = [(lp, mu, a) for lp, mu, a in rows if abs(a) > 1e-3] or [(-1.0, -1.0, 1.0)]
    loss = loss_named("truncated", max_ratio=1.5, trust_region=0.1)
    metrics = metrics_of(loss, rows)
    ratios = [clamped_ratio(lp, mu) for lp, mu, _ in rows]
    count = len(rows)
    options = {"max_ratio": 1.5, "trust_region": 0.1}
    masked = [by_autograd(naive_losses.naive_truncated, *row, options)[1] == 0.0 for row in rows]
    cut = [not hidden and 0.999 * w > 1.5 for w, hidden in zip(ratios, masked, strict=True)]
    assert metrics["k3"] == pytest.approx(sum(w - 1 - math.log(w) for w in ratios) / count, rel=1e-6, abs=1e-9)
    assert metrics["abs_logprob_difference"] == pytest.approx(sum(abs(lp - mu) for lp, mu, _ in rows) / count)
    assert metrics["truncated_fraction"] == pytest.approx(sum(cut) / count)
    assert metrics["masked_fraction"] == pytest.approx(sum(masked) / count)
    expected = sum(ratios) ** 2 / (count * sum(w * w for w in ratios))
    assert metrics["effective_sample_fraction"] == pytest.approx(expected)


BOUNDS: list[tuple[Loss, float]] = [
    (loss_named("truncated"), 5.0),
    (loss_named("truncated", max_ratio=2.0, trust_region=0.01), 2.0),
    (loss_named("ppo"), 3.0),
    (loss_named("ppo", clip_high=4.0), 5.0),
    (loss_named("reinforce"), 1.0),
    (loss_named("cispo"), 5.0),
    (loss_named("sapo"), 1.575),
    (loss_named("importance_sampling"), 2.0),
    (loss_named("importance_sampling", level="agent", outside="mask"), 2.0),
    (loss_named("geometric_mask", low=0.0, high=1e9), 5.0),
    (loss_named("off_policy_mask"), 3.0),
    (loss_named("m2po", threshold=1e9), 3.0),
    (loss_named("topr"), 1.0),
    (loss_named("vespo"), 1.2416),
]
"""Of the gradient by log pi, in units of |A|: those of the module's docstring and of docs/reference/algorithms.md."""
UNBOUNDED = {"dppo", "gspo", "decoupled_ppo", "clip_cov", "kl_cov"}
NOT_BY_ADVANTAGE = {"dpo", "distillation"}


def test_of_every_loss_the_docs_say_how_large_its_gradient_gets() -> None:
    assert {loss.name for loss, _ in BOUNDS} | UNBOUNDED | NOT_BY_ADVANTAGE == ALL_LOSSES.keys()
    table = (
        (ROOT / "docs/reference/algorithms.md")
        .read_text(encoding="utf-8")
        .partition("| bound |")[2]
        .partition("\n\n")[0]
    )
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1:2][0] if row else "")
    }
    assert named == ALL_LOSSES.keys()


@pytest.mark.parametrize("name", sorted(UNBOUNDED))
def test_the_gradient_of_a_loss_without_a_bound_is_the_ratio(name: str) -> None:
    """At A = -1 and log w = 10, beside two tokens of larger covariance."""
    logprobs, advantages = [-1.0, -3.0, -8.0], [-1.0, 9.0, -4.0]
    given = batch_of(logprobs, [-11.0, -3.0, -8.0], advantages, lags=[1, 1, 1], ids={"agent": [0, 1, 2]})
    assert evaluated(loss_named(name), given).by_logprob[0].item() == pytest.approx(math.exp(10.0), rel=1e-9)


@pytest.mark.parametrize(("loss", "bound"), BOUNDS)
def test_the_gradient_is_finite_and_within_its_bound_at_any_ratio(loss: Loss, bound: float) -> None:
    sizes = [
        0.0,
        1e-12,
        0.1,
        0.19,
        0.21,
        0.25,
        0.3,
        0.4,
        0.6931,
        1.0,
        1.0986,
        1.1,
        1.6,
        3.0,
        9.99,
        10.0,
        19.99,
        20.0,
        20.01,
        80.0,
    ]
    ratios = [sign * size for size in (*sizes, 1e4) for sign in (1.0, -1.0)]
    cases = [(at, ratio, a) for ratio in ratios for at in (-1e-9, -1.0, -50.0, -1e4) for a in (-3.0, -1.0, 0.0, 2.0)]
    rows = [(at, at - ratio, a) for at, ratio, a in cases]
    rows += [(mu + ratio, mu, a) for mu, ratio, a in cases]
    alone = batch_of(*zip(*rows, strict=True), ids={"agent": range(len(rows))})  # a conversation of one token each
    found = evaluated(loss, alone)
    assert bool(found.loss.isfinite().all())
    assert bool(found.by_logprob.isfinite().all())
    assert bool(sums(loss, rows).isfinite().all())
    advantages = torch.tensor([a for _, _, a in rows], dtype=torch.float64)
    share = found.by_logprob.abs() / advantages.abs().clamp(min=1e-300)
    assert bool((share[advantages == 0] == 0).all())
    assert float(share.max()) <= bound * (1 + 1e-9)
    assert float(share.max()) > 0.9 * bound, "the bound is reached"


@pytest.mark.parametrize(("log_ratio", "expected"), [(10.0, 0.0), (1.0, math.e)])
def test_the_gradient_of_ppo_at_a_large_ratio_is_that_of_the_dual_clip(log_ratio: float, expected: float) -> None:
    """At A = -1 and log w = 10 the single clip's gradient is e^10 = 22,026; below the dual clip it is the ratio."""
    rows = [(-1.0, -1.0 - log_ratio, -1.0)]
    assert evaluated(loss_named("ppo"), batch(rows)).by_logprob.item() == pytest.approx(expected, rel=1e-12)
    loss = loss_named("ppo")
    assert metrics_of(loss, rows)["masked_fraction"] == float(expected == 0.0)
