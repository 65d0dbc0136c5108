"""Every named loss and estimator against a loop over padded rows in float64: values and gradients, ragged masks.

The loop is written from the papers' formulas over [rows, tokens] with a mask, one sequence at a time; ours works on
flat columns with ids.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agentrl_algorithms.advantages import pass_at_k
from torch import Tensor

from agentrl.config.algorithms import ADVANTAGES, LOSSES
from agentrl.core.errors import GroupTooSmallError
from agentrl.credit.estimators import REWARD_ESTIMATORS, make_advantage_estimator
from agentrl.credit.group import Group
from agentrl.learn.losses import BUILT_IN, kl_divergence
from tests.credit_oracles import pass_at_k_ratio
from tests.loss_cases import ALL_LOSSES, PACKAGED_ADVANTAGES, batch_of, evaluated, loss_named
from tests.loss_oracle import oracle_errors
from tests.naive_losses import CASES, number

LENGTHS = (7, 1, 12, 4, 9)
TURNS = 3
ADVANTAGES_OF_ROWS = (1.3, -0.7, 0.4, -2.0, 0.9)

Row = tuple[Tensor, Tensor, float, Tensor, list[int]]
"""log pi, log mu, the advantage, the lags, and the turn of each token."""


def rows(seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length, advantage in zip(LENGTHS, ADVANTAGES_OF_ROWS, strict=True):
        mu = -3 * torch.rand(length, generator=generator, dtype=torch.float64) - 0.05
        pi = (mu + 0.5 * torch.randn(length, generator=generator, dtype=torch.float64)).clamp(max=-0.01)
        lags = torch.randint(0, 4, (length,), generator=generator)
        found.append((pi, mu, advantage, lags, [at * TURNS // length for at in range(length)]))
    return found


def flat(found: list[Row], **more: Any) -> Any:
    ids = [index for index, row in enumerate(found) for _ in row[0]]
    return batch_of(
        [float(x) for row in found for x in row[0]],
        [float(x) for row in found for x in row[1]],
        [row[2] for row in found for _ in row[0]],
        lags=[int(x) for row in found for x in row[3]],
        ids={
            **dict.fromkeys(("row", "agent", "episode"), ids),
            "turn": [TURNS * index + turn for index, row in enumerate(found) for turn in row[4]],
        },
        **more,
    )


@pytest.mark.parametrize(("name", "options", "naive"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loss_is_that_of_a_loop_over_rows(
    name: str, options: dict[str, Any], naive: Callable[..., Tensor], seed: int
) -> None:
    found = rows(seed)
    ours = evaluated(loss_named(name, **options), flat(found))
    at = 0
    for pi, mu, advantage, lags, turns in found:
        leaf = pi.clone().requires_grad_()
        expected = naive(leaf, mu, advantage, lags=lags, turns=turns, **options)
        (slope,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(ours.loss[at : at + len(pi)], expected.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ours.by_logprob[at : at + len(pi)], slope, rtol=1e-9, atol=1e-12)
        at += len(pi)


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.2, 10.0])
def test_m2po_leaves_out_tokens_until_the_second_moment_is_below_its_threshold(threshold: float) -> None:
    found = rows(2)
    pi, mu = torch.cat([row[0] for row in found]), torch.cat([row[1] for row in found])
    left = list(range(len(pi)))
    while left and sum(float(pi[i] - mu[i]) ** 2 for i in left) / len(left) >= threshold:
        left.remove(max(left, key=lambda i: abs(float(pi[i] - mu[i]))))
    whole = evaluated(loss_named("ppo"), flat(found))
    ours = evaluated(loss_named("m2po", threshold=threshold), flat(found))
    for i in range(len(pi)):
        assert float(ours.loss[i]) == (float(whole.loss[i]) if i in left else 0.0)
        assert float(ours.by_logprob[i]) == (float(whole.by_logprob[i]) if i in left else 0.0)
    assert (not left) == (threshold == 0.0)


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_covariance_losses_hold_back_the_tokens_of_largest_covariance(name: str) -> None:
    found = rows(3)
    pi = torch.cat([row[0] for row in found])
    mu = torch.cat([row[1] for row in found])
    a = torch.tensor([row[2] for row in found for _ in row[0]], dtype=torch.float64)
    covariance = (pi - pi.mean()) * (a - a.mean())
    options = {"share": 0.1, **({"low": 0.1, "high": 5.0} if name == "clip_cov" else {})}
    count = round(0.1 * len(pi))
    inside = [i for i in range(len(pi)) if name == "kl_cov" or 0.1 <= covariance[i] <= 5.0]
    chosen = sorted(inside, key=lambda i: -float(covariance[i]))[:count]
    ours = evaluated(loss_named(name, **options), flat(found))
    for i in range(len(pi)):
        w = math.exp(float(pi[i] - mu[i]))
        expected = -w * float(a[i])
        if i in chosen:
            expected = 0.0 if name == "clip_cov" else expected + math.copysign(1.0, float(pi[i] - mu[i]))
        assert float(ours.by_logprob[i]) == pytest.approx(expected, rel=1e-9)


def test_the_divergence_and_its_derivative() -> None:
    def naive(d: float) -> float:
        return math.exp(-d) - 1 + d

    pi = torch.tensor([-0.5, -2.0, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.0, -1.5, -1.0], dtype=torch.float64)
    value = kl_divergence(pi, reference)
    (slope,) = torch.autograd.grad(value.sum(), pi)
    for index in range(3):
        d, step = number(pi[index] - reference[index]), 1e-6
        assert number(value[index]) == pytest.approx(naive(d))
        assert float(slope[index]) == pytest.approx((naive(d + step) - naive(d - step)) / (2 * step), abs=1e-6)


def test_entropy_and_divergence_are_added_with_their_weights() -> None:
    from agentrl.config.sections import LossConfig, TrainerConfig
    from agentrl.learn.losses import make_loss

    found = rows(0)
    count = sum(LENGTHS)
    batch = flat(found, entropies=[1.0] * count, reference=[-1.0] * count)
    plain = evaluated(loss_named("ppo"), flat(found))
    section = TrainerConfig(loss=LossConfig(name="ppo", kl=0.1), entropy_bonus=0.5)
    ours = evaluated(make_loss(section), batch)
    away = batch.logprobs.detach() + 1.0
    torch.testing.assert_close(ours.loss, plain.loss - 0.5 + 0.1 * (torch.exp(-away) - 1 + away))
    torch.testing.assert_close(ours.by_logprob, plain.by_logprob + 0.1 * (1 - torch.exp(-away)))
    torch.testing.assert_close(ours.by_entropy, torch.full_like(away, -0.5))


def test_the_divergence_pulls_hardest_where_the_policy_is_farthest_away() -> None:
    """Also beyond 20 nats, where a bound on the difference would leave no gradient."""
    for d in (-45.0, -22.0, -19.0, -1.0, 1.0, 19.0, 22.0, 45.0):
        pi = torch.tensor([-50.0 + max(0.0, d)], dtype=torch.float64, requires_grad=True)
        value = kl_divergence(pi, pi.detach() - d)
        (found,) = torch.autograd.grad(value.sum(), pi)
        assert float(found) == pytest.approx(1 - math.exp(min(20.0, -d)), rel=1e-12)
        single = kl_divergence(pi.detach().float(), (pi.detach() - d).float())
        assert single.isfinite().all()
        assert number(value) >= 0


@pytest.mark.parametrize("far", [-25.0, 25.0])
def test_a_token_far_from_mu_keeps_its_share_of_a_mean_and_its_penalty(far: float) -> None:
    """The ratio of a conversation moves with each of its tokens, and the penalty of KL-Cov with the token."""
    pi = [-1.0 + far if far < 0 else -1.0, -1.0, -1.0]
    mu = [-1.0 if far < 0 else -1.0 - far, -1.2, -0.9]
    wide = loss_named("gspo", clip_low=1.0, clip_high=1e9)
    by_logprob = evaluated(wide, batch_of(pi, mu, [1.0] * 3)).by_logprob
    s = math.exp(sum(a - b for a, b in zip(pi, mu, strict=True)) / 3)
    assert by_logprob.tolist() == pytest.approx([-s] * 3)
    penalty = loss_named("kl_cov", share=1.0, coefficient=0.5)
    by_logprob = evaluated(penalty, batch_of(pi, mu, [0.0] * 3)).by_logprob
    assert by_logprob.tolist() == pytest.approx([0.5 * math.copysign(1.0, far), 0.5, -0.5])


def test_the_names_of_the_configuration_are_the_functions() -> None:
    assert set(LOSSES) == BUILT_IN.keys()
    assert ALL_LOSSES.keys() == {case[0] for case in CASES} | {"clip_cov", "kl_cov", "m2po", "distillation", "dpo"}
    assert ADVANTAGES.keys() == REWARD_ESTIMATORS.keys()
    for function in (*ALL_LOSSES.values(), *PACKAGED_ADVANTAGES.values()):
        assert any(paper in (function.__doc__ or "") for paper in ("arXiv", "Williams", "et al."))


def test_the_losses_and_advantages_of_others_are_those_that_were_recorded() -> None:
    errors = oracle_errors()
    assert len(errors) >= 40
    assert {case.partition(":")[0] for case in errors} == {"trl", "verl", "AReaL", "prime-rl"}
    assert {case: error for case, error in errors.items() if error > 1e-6} == {}


def test_pass_at_k_is_the_mean_over_subsets() -> None:
    """n (pass@k of all - pass@k of the others), each as a mean of the maximum over all subsets of size k."""
    from itertools import combinations

    rewards = (1.0, 0.0, 1.0, 0.0, 0.0)
    for k in (1, 2, 3, 4):
        group = Group(rewards=rewards, episodes=tuple("abcde"))
        subsets = list(combinations(range(5), k))

        def mean(chosen: list[tuple[int, ...]]) -> float:
            return sum(max(rewards[i] for i in each) for each in chosen) / len(chosen)

        expected = [5 * (mean(subsets) - mean([each for each in subsets if i not in each])) for i in range(5)]
        found = [each.value for each in make_advantage_estimator("pass_at_k", {"k": k})(group)]
        assert found == pytest.approx(expected)
    group = Group(rewards=rewards, episodes=tuple("abcde"))
    assert [each.value for each in make_advantage_estimator("pass_at_k", {"k": 1})(group)] == pytest.approx(
        [each.value for each in REWARD_ESTIMATORS["leave_one_out"](rewards, tuple("abcde"))]
    )


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_gradient_of_pass_at_k_is_unbiased(k: int, agents: int) -> None:
    assert pass_at_k_ratio(pass_at_k, k=k, agents=agents) == pytest.approx(1.0, abs=1e-9)


def test_pass_at_k_leaves_out_the_whole_episode() -> None:
    rewards, episodes = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), ("a", "a", "b", "b", "c", "d")
    found = pass_at_k(Group(rewards=rewards, episodes=episodes), k=1)
    assert found == pytest.approx([each.value for each in REWARD_ESTIMATORS["leave_one_out"](rewards, episodes)])
    with pytest.raises(GroupTooSmallError):
        pass_at_k(Group(rewards=(1.0, 1.0, 0.0, 0.0), episodes=("a", "a", "b", "b")), k=2)


def test_the_estimators_over_a_step() -> None:
    rewards, groups = (1.0, 0.0, 3.0, 1.0), ("g0", "g0", "g1", "g1")
    group = Group(rewards=rewards, episodes=tuple("abcd"), groups=groups)
    tensor = torch.tensor(rewards, dtype=torch.float64)
    plain = (tensor - tensor.mean()) / (tensor.std(correction=0) + 1e-8)
    assert [each.value for each in make_advantage_estimator("reinforce_plus_plus", {})(group)] == pytest.approx(
        plain.tolist()
    )
    centred = torch.tensor([0.5, -0.5, 1.0, -1.0], dtype=torch.float64)
    expected = (centred / (centred.std(correction=0) + 1e-8)).tolist()
    found = make_advantage_estimator("reinforce_plus_plus_baseline", {})(group)
    assert [each.value for each in found] == pytest.approx(expected)
    assert [each.value for each in make_advantage_estimator("max_rl", {})(group)] == pytest.approx(
        [-0.2, -1.0, 1.4, -0.2]
    )
