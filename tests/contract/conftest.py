"""Fixtures of the contract suite."""

from __future__ import annotations

import pytest
import torch

from tests.contract.engine_kinds import MakeEmbedded, MakeEngine, MakeProcess, MakeScripted, ModelZoo


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Random tiny models."""
    torch.set_num_threads(1)
    return ModelZoo(tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["scripted", "embedded", "scripted in a process", "embedded in a process"])
def make_engine(request: pytest.FixtureRequest, zoo: ModelZoo) -> MakeEngine:
    """Every engine behind the port."""
    scripted, embedded = MakeScripted(), MakeEmbedded(zoo)
    made: dict[str, MakeEngine] = {maker.kind: maker for maker in (scripted, embedded)}
    program = "tests.contract.scripted_program:scripted_engine"
    made["scripted in a process"] = MakeProcess(scripted, program)
    program = "agentrl.engines.embedded:EmbeddedEngine.load"
    made["embedded in a process"] = MakeProcess(embedded, program, model_path=str(zoo.directory()))
    return made[request.param]
