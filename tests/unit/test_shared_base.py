"""Trainer and engine of one process hold a base model once if only adapters are served on it or merged into it."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl.app.engines import make_engine
from agentrl.app.memory_estimate import estimate_memory
from agentrl.config.load import load
from agentrl.core.records import PolicyVersion
from agentrl.learn.models import load_models

if TYPE_CHECKING:
    from pathlib import Path

    from agentrl.config.run import RunConfig
    from agentrl.engines.embedded.engine import EmbeddedEngine

ADAPTER = "--policies.solver.lora.rank=4"
MERGED = "--policies.solver.lora.merge=true"
IN_PROCESS = "--engine.replicas=0"
CPU = torch.device("cpu")


def config_of(repository: Path, *overrides: str) -> RunConfig:
    return load(repository / "examples" / "01_tool_use.toml", [one.removeprefix("--") for one in overrides])


def served(config: RunConfig) -> EmbeddedEngine:
    engine: Any = asyncio.run(make_engine(config.engine_plan, {"solver": PolicyVersion("solver", 0, 0)}, print))
    return engine  # type: ignore[no-any-return]


def addresses(model: torch.nn.Module) -> set[int]:
    return {tensor.data_ptr() for tensor in model.parameters()}


@pytest.mark.parametrize(("overrides", "shared"), [((ADAPTER,), True), ((ADAPTER, MERGED), True), ((), False)])
def test_an_engine_uses_the_weights_that_no_step_changes(
    repository: Path, overrides: tuple[str, ...], shared: bool
) -> None:
    config = config_of(repository, IN_PROCESS, *overrides)
    trained = load_models(config.trainer_plan, CPU)["solver"].model
    engine = served(config)
    model = engine.versions.base.model
    assert addresses(model) <= addresses(trained) if shared else addresses(model).isdisjoint(addresses(trained))
    stored = load_file(repository / "environments" / "calculator" / "model" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())
    asyncio.run(engine.close())


def test_an_engine_reads_the_weights_again_once_the_trainer_is_gone(repository: Path) -> None:
    config = config_of(repository, IN_PROCESS, ADAPTER)
    models = load_models(config.trainer_plan, CPU)
    del models
    gc.collect()
    engine = served(config)
    assert sum(parameter.numel() for parameter in engine.versions.base.model.parameters()) > 800_000
    asyncio.run(engine.close())


def test_the_plan_counts_shared_weights_once(repository: Path) -> None:
    def weights(*overrides: str, name: str = "weights in") -> int:
        config = config_of(repository, *overrides)
        parts = estimate_memory(config.engine_plan, config.trainer_plan).parts
        return sum(part.name.startswith(name) for part in parts)

    assert weights(IN_PROCESS, ADAPTER) == 1
    assert weights(IN_PROCESS, ADAPTER, MERGED) == 1
    assert weights(IN_PROCESS, ADAPTER, MERGED, name="1 copy of the weights") == 1
    assert weights("--engine.replicas=1", ADAPTER, MERGED) == 2
    assert weights("--engine.replicas=1", ADAPTER) == 2
    assert weights(IN_PROCESS, ADAPTER, "--trainer.ranks=2") == 2
