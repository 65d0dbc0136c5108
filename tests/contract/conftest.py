"""Fixtures of the contract suite."""

from __future__ import annotations

import pytest
import torch

from tests.contract.engine_kinds import MakeEmbedded, MakeEngine, MakeScripted, ModelZoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Random tiny models."""
    torch.set_num_threads(1)
    return ModelZoo(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["scripted", "embedded"])
def make_engine(request: pytest.FixtureRequest, zoo: ModelZoo) -> MakeEngine:
    """Every engine behind the port."""
    made: dict[str, MakeEngine] = {"scripted": MakeScripted(), "embedded": MakeEmbedded(zoo)}
    return made[request.param]
