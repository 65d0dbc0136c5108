"""Simulated runs that train episodes more than once: the weights are unbiased, and each episode is counted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from tests.simulation.reuse import CHOICES, TASKS, TURNS, Decision, Plan, gradient, log_softmax, play, success

pytestmark = pytest.mark.sim

SMALL = Plan(rate=0.4, fresh=16, uses=2, staleness=1, least_ess=0.0, tool_s=0.1, limit_s=2.5)


def test_exact_weights_of_old_episodes_are_unbiased() -> None:
    """All outcomes, weighted by the probability under the old policy; the reference differentiates numerically."""
    draw = np.random.default_rng(0)
    old, new = (draw.standard_normal((TASKS, TURNS, CHOICES)) for _ in range(2))
    logprobs, expected, exact, token = log_softmax(old), np.zeros_like(old), np.zeros_like(old), np.zeros_like(old)
    for task, choices in itertools.product(range(TASKS), itertools.product(range(CHOICES), repeat=TURNS)):
        states = [(task, turn) for turn in range(TURNS)]
        reward = float(not any(choices))
        pairs = list(zip(states, choices, strict=True))
        row = [Decision(state, choice, float(logprobs[state][choice]), reward) for state, choice in pairs]
        probability = np.exp(sum(each.logprob for each in row)) / TASKS
        exact += probability * gradient(new, [row], exact=True)
        token += probability * gradient(new, [row], exact=False)
    for place in np.ndindex(new.shape):
        step = np.zeros_like(new)
        step[place] = 1e-5
        expected[place] = (success(new + step) - success(new - step)) / 2e-5
    size = np.linalg.norm(expected)
    assert np.linalg.norm(exact - expected) / size < 1e-6
    assert np.linalg.norm(token - expected) / size > 0.1  # the control: weights of single tokens are biased


@pytest.mark.parametrize("in_a_row", [False, True])
def test_each_episode_is_trained_as_often_as_the_plan_says(in_a_row: bool) -> None:
    trainer, _ = play(replace(SMALL, in_a_row=in_a_row), seed=0)
    steps = len(trainer.trained)
    assert steps > 3
    again = sum(trainer.trained) if in_a_row else sum(trainer.trained[:-1])
    assert sum(trainer.trained_again) == again


def test_old_episodes_need_an_effective_sample_size() -> None:
    trainer, _ = play(replace(SMALL, least_ess=1.1), seed=0)
    assert len(trainer.trained) > 3
    assert not any(trainer.trained_again)


def test_the_policy_learns() -> None:
    trainer, _ = play(replace(SMALL, limit_s=3.0), seed=0)
    assert trainer.curve[-1][1] > trainer.curve[0][1] + 0.2
