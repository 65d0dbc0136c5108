"""Fixtures of the contract suite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from agentrl.journal.memory import MemoryJournal
from agentrl.journal.store import SqliteJournal
from tests.contract.engine_kinds import MakeEmbedded, MakeEngine, MakeProcess, MakeReplicas, MakeScripted, ModelZoo
from tests.contract.journal_kinds import INFO, AnyJournal, OnJournal, Scenario
from tests.contract.vllm_server import chosen
from tests.contract.vllm_suite import VllmSuite, suite_params

KINDS = ("scripted", "replicas", "embedded", "scripted in a process", "embedded in a process")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make_engine" in metafunc.fixturenames:
        kinds = [*KINDS, *suite_params(metafunc.config, metafunc.definition.path)]
        metafunc.parametrize("make_engine", kinds, indirect=True)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Random tiny models."""
    torch.set_num_threads(1)
    _, architecture = chosen()
    return ModelZoo(tmp_path_factory.mktemp("models"), architecture)


@pytest.fixture
def make_engine(request: pytest.FixtureRequest, zoo: ModelZoo) -> MakeEngine:
    """Every engine behind the port."""
    if isinstance(request.param, VllmSuite):
        vllm: MakeEngine = request.getfixturevalue("vllm")
        return vllm
    scripted, replicas, embedded = MakeScripted(), MakeReplicas(), MakeEmbedded(zoo)
    made: dict[str, MakeEngine] = {maker.kind: maker for maker in (scripted, replicas, embedded)}
    program = "tests.contract.scripted_program:scripted_engine"
    # In real time: a busy machine must not let a turn end before its call is aborted.
    made["scripted in a process"] = MakeProcess(scripted, program, seconds_per_token=5e-3)
    program = "agentrl.engines.embedded.engine:EmbeddedEngine.load"
    made["embedded in a process"] = MakeProcess(embedded, program, model_path=str(zoo.directory()))
    return made[request.param]


@pytest.fixture(params=["memory", "sqlite"])
def on_journal(request: pytest.FixtureRequest, tmp_path: Path) -> OnJournal:
    """Runs a scenario on a fresh journal and closes it."""

    async def on_fresh(scenario: Scenario) -> None:
        memory = request.param == "memory"
        journal: AnyJournal = MemoryJournal(info=INFO) if memory else SqliteJournal(tmp_path / "journal", info=INFO)
        try:
            await scenario(journal)
        finally:
            await journal.close()

    return lambda scenario: asyncio.run(on_fresh(scenario))
