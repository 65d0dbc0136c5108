"""Whether credit reaches the gradient as its formula says, against oracles: a part of `benchmarks.learning`."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations as pairs_of
from pathlib import Path

import torch

from agentrl.credit.advantages.group_baselines import leave_one_out
from agentrl.credit.advantages.pass_at_k import pass_at_k
from agentrl.credit.group import Group
from agentrl.learn.losses import dpo
from tests.branch_losses import combinations
from tests.credit_oracles import (
    Estimates,
    RoleCredit,
    asynchronous_estimates,
    decay_per_reward,
    newest_mean,
    pass_at_k_ratio,
    role_mean,
    true_mean,
)
from tests.learn_cases import write_model
from tests.loss_cases import conversations
from tests.rank_processes import on_ranks
from tests.sharding_cases import FUNCTION, alone, case
from tests.sim.test_enumeration import CASES, COMBINATIONS, FAST, PLANTED, error_of, is_refused_rightly

LENGTHS = (20, 6000)
"""Tokens of the shortest and the longest conversation."""


def figures(quick: bool) -> dict[str, float | None]:
    paired, rounded = tied_pairs(groups=10 if quick else 100)
    seeds = 1 if quick else 4
    roles, best, before = (role_mean_estimates(rule, seeds) for rule in (role_mean, true_mean, decay_per_reward))
    changes = {str(combination): (combination.change(), bool(combination.refusal())) for combination in combinations()}
    for name, (change, is_refused) in changes.items():
        print(f"  {name}: branches change its gradient by {change:.1e}{', refused' if is_refused else ''}", flush=True)
    attempts = worst(pass_at_k_ratios(pass_at_k))
    with tempfile.TemporaryDirectory() as place:
        ratio, silent = sharded(Path(place))
        cases = FAST if quick else FAST | CASES
        errors = [error_of(case, Path(place)) for case in cases.values()]
        planted = [error_of(case, Path(place)) for case in PLANTED.values()]
    tried = COMBINATIONS[:3] if quick else COMBINATIONS
    return {
        "dpo_ties_paired": paired,
        "dpo_ties_paired_control": rounded,
        "role_mean_ratio": worst(each.ratio for each in roles),
        "role_mean_ratio_control": worst(each.ratio for each in role_mean_estimates(newest_mean, 1)),
        "role_mean_variance_ratio": max(variances_over(roles, best)),
        "role_mean_variance_ratio_control": max(variances_over(before, best)),
        "sequence_losses_off_policy_error": max(change for change, is_refused in changes.values() if not is_refused),
        "sequence_losses_off_policy_error_control": min(
            change for change, is_refused in changes.values() if is_refused
        ),
        "sequence_losses_accepted": sum(not is_refused for _, is_refused in changes.values()),
        "sequence_losses_refused": sum(is_refused for _, is_refused in changes.values()),
        "pass_at_k_ratio": attempts,
        "pass_at_k_error": abs(attempts - 1),
        "pass_at_k_ratio_control": worst(pass_at_k_ratios(agents_as_attempts)),
        "enumeration_cases": float(len(errors)),
        "enumeration_max_error": max(errors),
        "enumeration_planted_error": min(planted),
        "roulette_refusals": statistics.fmean(is_refused_rightly(settings) for settings in tried),
        "sharded_over_unsharded": ratio,
        "moved_without_signal": silent,
    }


def worst(ratios: Iterable[float]) -> float:
    """The ratio farthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def tied_pairs(groups: int) -> tuple[int, int]:
    """Of the pairs of equal reward in groups of eight: how many `dpo` compares, and how many it would compare if it
    averaged their advantages over the tokens in float32.
    """
    draw = random.Random(0)
    paired = rounded = ties = 0
    for seed in range(groups):
        rewards = [float(draw.random() < 0.5) for _ in range(8)]
        lengths = [round(math.exp(draw.uniform(*map(math.log, LENGTHS)))) for _ in rewards]
        advantages = [each.value for each in leave_one_out(rewards)]
        for one, other in pairs_of(range(8), 2):
            if rewards[one] == rewards[other]:
                ties += 1
                both = [(lengths[at], advantages[at]) for at in (one, other)]
                batch = conversations(*zip(*both, strict=True), [0, 0], seed)
                paired += bool((dpo(batch) != 0).any())
                first, second = (float_mean(length, value) for length, value in both)
                rounded += abs(first - second) > 1e-6
    print(f"  dpo: {paired} of {ties} pairs of equal reward compared, {rounded} by means", flush=True)
    return paired, rounded


def float_mean(length: int, advantage: float) -> float:
    """The mean of an advantage over as many tokens, added up in float32."""
    total = torch.zeros(1).index_add(0, torch.zeros(length, dtype=torch.int64), torch.full((length,), advantage))
    return float(total / length)


def role_mean_estimates(rule: Callable[[], RoleCredit], seeds: int) -> list[Estimates]:
    """The gradient and its variance at S = 1 and 4, 16 and 64 units per step, long episodes five times as long or as
    long as the others.
    """
    found = []
    for staleness in (1, 4):
        for step_size in (16, 64):
            for longer in (1.0, 5.0):
                by_seed = [
                    asynchronous_estimates(
                        rule(), staleness=staleness, step_size=step_size, episodes=100_000, longer=longer, seed=seed
                    )
                    for seed in range(seeds)
                ]
                found.append(Estimates(*(statistics.mean(values) for values in zip(*by_seed, strict=True))))
                where = f"S = {staleness}, {step_size} units, {longer:.0f} times as long"
                print(f"  {rule.__name__}, {where}: {found[-1].ratio:.4f} ± {found[-1].variance:.4f}", flush=True)
    return found


def variances_over(estimates: Sequence[Estimates], best: Sequence[Estimates]) -> list[float]:
    """The variances of a rule over those with the mean reward as the baseline, case by case."""
    return [own.variance / other.variance for own, other in zip(estimates, best, strict=True)]


def agents_as_attempts(group: Group, *, k: int) -> list[float]:
    """pass@k with every agent of a group as an independent attempt, those of one episode included: biased."""
    n, c = len(group.rewards), sum(reward > 0.5 for reward in group.rewards)
    whole = 1 - math.comb(n - c, k) / math.comb(n, k)
    return [
        n * (whole - 1 + math.comb(n - 1 - (c - (reward > 0.5)), k) / math.comb(n - 1, k)) for reward in group.rewards
    ]


def pass_at_k_ratios(estimator: Callable[..., Sequence[float]]) -> list[float]:
    """The gradient over the true one, one and two agents per episode, k from 1 to 4 of five episodes."""
    found = []
    for agents in (1, 2):
        for k in range(1, 5):
            found.append(pass_at_k_ratio(estimator, k=k, agents=agents))
            print(f"  {estimator.__name__}: {agents} agents per episode, k = {k}: {found[-1]:.12f}", flush=True)
    return found


def sharded(place: Path) -> tuple[float, float]:
    """How far three steps, the second without signal, move the weights of two ranks that hold shards over those of one
    rank; and how far any step without signal moved any weights.
    """
    kinds = {"all weights": ("qwen3", False), "adapter": ("qwen3", True), "experts": ("moe", False)}
    for kind in ("qwen3", "moe"):
        write_model(place / kind, kind=kind)
    two, one = (
        [
            case(place / model, place / name / str(ranks), lora=lora, steps=3, silent=[2])
            for name, (model, lora) in kinds.items()
        ]
        for ranks in (2, 1)
    )
    found, expected = on_ranks(2, FUNCTION, two)[0], alone(one)
    ratios = []
    for name, mine, theirs in zip(kinds, found, expected, strict=True):
        print(f"  {name}: moved by {mine['moved']} sharded, {theirs['moved']} on one rank", flush=True)
        ratios.append(sum(mine["moved"]) / sum(theirs["moved"]))
    return worst(ratios), max(each["moved"][1] for each in (*found, *expected))
