"""Losses against a naive loop, one token at a time, and what they promise about masks and sums."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.config.run import LossConfig, PolicyGradientLoss, PpoLoss, ReinforceLoss
from agentrl.learn.losses import DUAL_CLIP, SUMS, loss_metrics, make_loss

pytestmark = pytest.mark.property

Tokens = list[tuple[float, float, float, bool]]


def clamped_ratio(lp: float, mu: float) -> float:
    return math.exp(min(20.0, max(-20.0, lp - mu)))


def naive_truncated(lp: float, mu: float, advantage: float, section: PolicyGradientLoss) -> tuple[float, float]:
    """Loss and its derivative by lp: the weight is a constant."""
    moved = math.exp(lp) - math.exp(mu)
    if advantage > 0 and moved > section.trust_region:
        return 0.0, 0.0
    if advantage <= 0 and moved < -section.trust_region:
        return 0.0, 0.0
    weight = min(clamped_ratio(lp, mu), section.max_ratio)
    return -weight * advantage * lp, -weight * advantage


def naive_ppo(lp: float, mu: float, advantage: float, section: PpoLoss) -> tuple[float, float]:
    w = clamped_ratio(lp, mu)
    clipped = min(max(w, 1 - section.clip_low), 1 + section.clip_high)
    if advantage < 0 and w > DUAL_CLIP:
        return -DUAL_CLIP * advantage, 0.0
    if clipped * advantage < w * advantage:
        return -clipped * advantage, 0.0
    return -w * advantage, -w * advantage if abs(lp - mu) < 20 else 0.0


def naive_reinforce(lp: float, mu: float, advantage: float, section: ReinforceLoss) -> tuple[float, float]:
    return -advantage * lp, -advantage


CASES: list[tuple[LossConfig, Callable[..., tuple[float, float]]]] = [
    (PolicyGradientLoss(max_ratio=1.5, trust_region=0.1), naive_truncated),
    (PpoLoss(), naive_ppo),
    (PpoLoss(clip_low=0.1, clip_high=0.5), naive_ppo),
    (ReinforceLoss(), naive_reinforce),
]

logprob = st.floats(-30, -1e-3)
tokens = st.lists(
    st.tuples(logprob, logprob, st.floats(-3, 3, allow_subnormal=False), st.booleans()), min_size=1, max_size=12
)


def columns(rows: Tokens) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    lp, mu, advantages, mask = zip(*rows, strict=True)
    numbers = [torch.tensor(column, dtype=torch.float64) for column in (lp, mu, advantages)]
    numbers[0].requires_grad_(True)
    return numbers[0], numbers[1], numbers[2], torch.tensor(mask)


@pytest.mark.parametrize(("section", "naive"), CASES)
@settings(deadline=None)
@given(rows=tokens)
def test_loss_and_gradient_are_those_of_the_naive_loop(
    section: LossConfig, naive: Callable[..., tuple[float, float]], rows: Tokens
) -> None:
    lp, mu, advantages, mask = columns(rows)
    terms = make_loss(section)(lp, mu, advantages, mask)
    terms.loss.sum().backward()
    assert lp.grad is not None
    for index, (row_lp, row_mu, advantage, trained) in enumerate(rows):
        loss, slope = naive(row_lp, row_mu, advantage, section) if trained else (0.0, 0.0)
        assert terms.loss[index].item() == pytest.approx(loss, rel=1e-9, abs=1e-12)
        assert lp.grad[index].item() == pytest.approx(slope, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("section", [case[0] for case in CASES])
@settings(deadline=None)
@given(rows=tokens, cut=st.integers(0, 12))
def test_sums_add_up_over_pieces(section: LossConfig, rows: Tokens, cut: int) -> None:
    loss = make_loss(section)
    whole = loss(*columns(rows)).sums
    parts = [loss(*columns(part)).sums for part in (rows[:cut], rows[cut:]) if part]
    torch.testing.assert_close(whole, torch.stack(parts).sum(0), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(rows=tokens)
def test_metrics_are_those_of_the_naive_loop(rows: Tokens) -> None:
    section = PolicyGradientLoss(max_ratio=1.5, trust_region=0.1)
    metrics = loss_metrics(make_loss(section)(*columns(rows)).sums)
    trained = [row for row in rows if row[3]]
    if not trained:
        assert metrics == {}
        return
    ratios = [clamped_ratio(lp, mu) for lp, mu, _, _ in trained]
    count = len(trained)
    assert metrics["k3"] == pytest.approx(sum(w - 1 - math.log(w) for w in ratios) / count, rel=1e-6, abs=1e-9)
    assert metrics["abs_logprob_difference"] == pytest.approx(sum(abs(lp - mu) for lp, mu, _, _ in trained) / count)
    assert metrics["truncated_fraction"] == pytest.approx(sum(w > 1.5 for w in ratios) / count)
    masked = [naive_truncated(lp, mu, a, section)[1] == 0.0 and a != 0.0 for lp, mu, a, _ in trained if a != 0.0]
    if len(masked) == count:
        assert metrics["masked_fraction"] == pytest.approx(sum(masked) / count)
    expected = sum(ratios) ** 2 / (count * sum(w * w for w in ratios))
    assert metrics["effective_sample_fraction"] == pytest.approx(expected)


BOUNDS: list[tuple[LossConfig, float]] = [
    (PolicyGradientLoss(), 5.0),
    (PolicyGradientLoss(max_ratio=2.0, trust_region=0.01), 2.0),
    (PpoLoss(), 3.0),
    (PpoLoss(clip_high=4.0), 5.0),
    (ReinforceLoss(), 1.0),
]
"""Of the gradient by log pi, in units of |A|: those of the module's docstring and of docs/off_policy.md."""


@pytest.mark.parametrize(("section", "bound"), BOUNDS)
def test_the_gradient_is_finite_and_within_its_bound_at_any_ratio(section: LossConfig, bound: float) -> None:
    sizes = [
        0.0,
        1e-12,
        0.1,
        0.19,
        0.21,
        0.25,
        0.3,
        0.4,
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
        1e4,
    ]
    ratios = [sign * size for size in sizes for sign in (1.0, -1.0)]
    cases = [(at, ratio, a) for ratio in ratios for at in (-1e-9, -1.0, -50.0, -1e4) for a in (-3.0, -1.0, 0.0, 2.0)]
    rows = [(at, at - ratio, a, True) for at, ratio, a in cases]
    rows += [(mu + ratio, mu, a, True) for mu, ratio, a in cases]
    lp, mu, advantages, mask = columns(rows)
    terms = make_loss(section)(lp, mu, advantages, mask)
    terms.loss.sum().backward()
    assert lp.grad is not None
    assert bool(terms.loss.isfinite().all())
    assert bool(lp.grad.isfinite().all())
    assert bool(terms.sums.isfinite().all())
    share = lp.grad.abs() / advantages.abs().clamp(min=1e-300)
    assert bool((share[advantages == 0] == 0).all())
    assert float(share.max()) <= bound * (1 + 1e-9)
    assert float(share.max()) > 0.9 * bound, "the bound is reached"


@pytest.mark.parametrize(("log_ratio", "expected"), [(10.0, 0.0), (1.0, math.e)])
def test_the_gradient_of_ppo_at_a_large_ratio_is_that_of_the_dual_clip(log_ratio: float, expected: float) -> None:
    """At A = -1 and log w = 10 the single clip's gradient is e^10 = 22,026; below the dual clip it is the ratio."""
    lp, mu, advantages, mask = columns([(-1.0, -1.0 - log_ratio, -1.0, True)])
    terms = make_loss(PpoLoss())(lp, mu, advantages, mask)
    terms.loss.sum().backward()
    assert lp.grad is not None
    assert lp.grad.item() == pytest.approx(expected, rel=1e-12)
    assert loss_metrics(terms.sums)["masked_fraction"] == float(expected == 0.0)


def test_a_masked_token_may_hold_anything() -> None:
    lp = torch.tensor([-1.0, float("nan")], requires_grad=True)
    terms = make_loss(PolicyGradientLoss())(lp, torch.tensor([-1.0, 0.0]), torch.ones(2), torch.tensor([True, False]))
    assert terms.loss.tolist() == [1.0, 0.0]
    assert bool(terms.sums.isfinite().all())
    assert len(terms.sums) == len(SUMS)
