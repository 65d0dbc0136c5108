"""The SAO preset (docs/reference/algorithms.md, arXiv:2607.07508) against verl's formulas, written down from their
descriptions.

verl, `trainer/ppo/core_algos.py`: generalized advantages over a padded matrix, whose observation tokens pass on the
value and the trace behind them; a value loss of 0.5 · mean over trained tokens of max((V − G)², (clip(V) − G)²). verl
also whitens advantages, which agentrl does not. The masked loss of the preset is a row of test_losses_naive.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config.sections import GaeConfig
from agentrl.core.errors import ConfigError
from agentrl.learn.learner import ValueHead
from agentrl.learn.losses import make_loss
from agentrl.learn.step_columns import TokenColumns
from agentrl.learn.trainer import PolicyTrainer
from tests.loss_cases import token_table
from tests.sao import preset

ROWS, LENGTH = 6, 30
RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(ROWS, LENGTH)).astype(np.float32)
MASK = RNG.random((ROWS, LENGTH)) < 0.6
TURN = np.cumsum(~MASK, axis=1)
"""Tokens between two observations are a turn."""


def rewards_of_turns() -> np.ndarray[Any, Any]:
    """A reward at the last token of each turn."""
    rewards = np.zeros((ROWS, LENGTH))
    for row in range(ROWS):
        trained = np.flatnonzero(MASK[row])
        turns = TURN[row, trained]
        last = trained[np.append(turns[1:] != turns[:-1], True)]
        rewards[row, last] = RNG.normal(size=len(last))
    return rewards


REWARDS = rewards_of_turns()


def verl_advantages(discount: float, trace_decay: float) -> np.ndarray[Any, Any]:
    found = np.zeros((ROWS, LENGTH))
    for row in range(ROWS):
        next_value = trace = 0.0
        for at in reversed(range(LENGTH)):
            delta = REWARDS[row, at] + discount * next_value - VALUES[row, at]
            if MASK[row, at]:
                trace = delta + discount * trace_decay * trace
                next_value = VALUES[row, at]
            found[row, at] = trace
    return found[MASK]


def estimated(**options: Any) -> tuple[Any, Any, float]:
    """Advantages, the value loss's derivative and its value, as the trainer computes them with weights 1 / tokens."""
    to_go = np.cumsum((REWARDS * MASK)[:, ::-1], axis=1)[:, ::-1]
    of_turn = np.zeros_like(to_go)
    for row in range(ROWS):
        for turn in np.unique(TURN[row, MASK[row]]):
            places = MASK[row] & (TURN[row] == turn)
            of_turn[row, places] = to_go[row, np.flatnonzero(places)[0]]
    agent = np.repeat(np.arange(ROWS), LENGTH).reshape(ROWS, LENGTH)[MASK]
    step = SimpleNamespace(totals=defaultdict(float))
    weights, columns = np.full(len(agent), 1 / len(agent), np.float32), columns_of(of_turn[MASK], agent)
    by_value = PolicyTrainer._estimate_advantages(
        GaeConfig(**options),
        step,
        columns,
        VALUES[MASK],
        weights,  # type: ignore[arg-type]
        {},
    )
    return columns.advantages, by_value.numpy(), step.totals["value_loss"]


def columns_of(advantages: Any, agent: Any) -> TokenColumns:
    ids = dict.fromkeys(("row", "agent", "episode", "seat", "group"), agent)
    return TokenColumns(
        tokens=token_table(
            np.zeros(len(agent), np.float32),
            advantages.astype(np.float32),
        ),
        lags=np.zeros(len(agent), np.int32),
        turn=TURN[MASK],
        names={name: [str(number) for number in range(ROWS)] for name in ("seat", "group")},
        starts=np.array([0, len(agent)]),
        **ids,
    )


@pytest.mark.parametrize(("discount", "trace_decay"), [(1.0, 1.0), (1.0, 0.95), (0.99, 0.8), (0.9, 0.0)])
def test_advantages_skip_observations_as_verl_does(discount: float, trace_decay: float) -> None:
    advantages, _, _ = estimated(discount=discount, trace_decay=trace_decay)
    np.testing.assert_allclose(advantages, verl_advantages(discount, trace_decay), atol=1e-6)


@pytest.mark.parametrize("value_trace_decay", [None, 1.0, 0.5])
def test_values_learn_verls_returns_at_a_trace_decay_of_their_own(value_trace_decay: float | None) -> None:
    advantages, by_value, loss = estimated(trace_decay=0.9, value_trace_decay=value_trace_decay)
    np.testing.assert_allclose(advantages, verl_advantages(1.0, 0.9), atol=1e-6)
    old = torch.from_numpy(VALUES[MASK].astype(np.float64))
    returns = old + torch.from_numpy(verl_advantages(1.0, value_trace_decay or 0.9))
    new = old.clone().requires_grad_()
    clipped = torch.clamp(new, old - 0.5, old + 0.5)
    verl_loss = 0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2).mean()
    verl_loss.backward()
    assert loss == pytest.approx(float(verl_loss.detach()), abs=1e-6)
    assert new.grad is not None
    np.testing.assert_allclose(by_value, new.grad.numpy(), atol=1e-6)


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_further_updates_of_the_values_have_the_gradient_of_the_same_returns(updates: int) -> None:
    """Against updates that compute all values again; verl's clip of values begins at moves of 0.5."""
    width, pieces = 16, [slice(0, 20), slice(20, 37), slice(37, None)]
    hidden = torch.from_numpy(RNG.normal(size=(60, width)).astype(np.float32))
    returns = torch.from_numpy(RNG.normal(size=60).astype(np.float32))
    weights = torch.from_numpy(RNG.random(60).astype(np.float32) / 60)
    head, other = (ValueHead(width, torch.device("cpu"), count) for count in (updates, 1))
    optimizer, again = (torch.optim.AdamW(each.parameters(), lr=0.02, weight_decay=0.0) for each in (head, other))
    for _ in range(3):
        for piece in pieces:
            values = head(hidden[piece])
            values.backward(weights[piece] * (values.detach() - returns[piece]))
            head.add_curvature(weights[piece])
        head.update(optimizer)
        head.discard()
        optimizer.zero_grad()
        old = other(hidden).detach()
        for _ in range(updates):
            again.zero_grad()
            values = other(hidden)
            clipped = torch.clamp(values, old - 0.5, old + 0.5)
            (0.5 * weights * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)).sum().backward()
            again.step()
        assert float((other(hidden).detach() - old).abs().max()) < 0.5
        torch.testing.assert_close(head.weight, other.weight, atol=1e-6, rtol=0)
        torch.testing.assert_close(head.bias, other.bias, atol=1e-6, rtol=0)


def test_the_preset_of_the_page_is_a_configuration(repository: Path, tmp_path: Path) -> None:
    config = preset(repository, tmp_path)
    assert config.credit.advantage.gae == GaeConfig(
        trace_decay=0.95, value_trace_decay=1.0, value_learning_rate=0.05, value_updates=4
    )
    assert (config.credit.group_size, config.trainer.loss.name) == (1, "importance_sampling")
    make_loss(config.trainer)
    with pytest.raises(ConfigError, match="value_trace_decay"):
        preset(repository, tmp_path, "--credit.advantage.value_trace_decay=1.5")
