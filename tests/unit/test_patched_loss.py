"""A loss that was replaced in the driver: it counts in this process, and is refused where ranks would not see it."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from agentrl.cluster.trainer_pool import RANK_MODULES, RayTrainerPool, refuse_monkeypatches
from agentrl.core.errors import ConfigError
from agentrl.learn import forward, loss_batch, losses, trainer
from tests.sim.small_run import config_for


def test_nothing_is_refused_where_nothing_was_replaced() -> None:
    assert {losses.__name__, trainer.__name__} <= set(RANK_MODULES)
    for name in RANK_MODULES:
        module = importlib.import_module(name)
        assert any(getattr(part, "__module__", "") == name for part in vars(module).values()), (
            f"{name} computes nothing"
        )
    refuse_monkeypatches()
    assert ALL_ATTENTION_FUNCTIONS[forward.ATTENTION] is forward.tree_attention, "a copy was left registered"


def mine(*_: object, **__: object) -> torch.Tensor:
    return torch.zeros(1)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (losses, "truncated", mine),
        (losses, "make_loss", mine),
        (trainer, "make_loss", mine),
        (loss_batch, "LOG_RATIO_LIMIT", 5.0),
        (trainer.PolicyTrainer, "_accumulate", mine),
    ],
)
def test_a_replacement_is_refused_under_ray(
    where: object, name: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, value)
    with pytest.raises(ConfigError, match=r"trainer\.ranks"):
        RayTrainerPool(config_for().trainer_plan, tmp_path)
