"""Fixtures of the contract suite."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.journal.memory import MemoryJournal
from agentrl.journal.store import SqliteJournal
from tests.contract import vllm_suite
from tests.contract.engine_kinds import MakeEmbedded, MakeEngine, MakeProcess, MakeReplicas, MakeScripted, ModelZoo
from tests.contract.journal_kinds import INFO, AnyJournal, OnJournal, Scenario

IN_VLLM_SUITE = vllm_suite.SWITCH in os.environ
KINDS = (
    ["vllm"]
    if IN_VLLM_SUITE
    else ["scripted", "replicas", "embedded", "scripted in a process", "embedded in a process"]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In vLLM's process only what vLLM answers: the rest of its files runs outside of it."""
    if IN_VLLM_SUITE:
        asking = {"make_vllm", "make_engine", "rounded"}
        items[:] = [item for item in items if asking & set(getattr(item, "fixturenames", ()))]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    """Random tiny models."""
    torch.set_num_threads(1)
    _, architecture = vllm_suite.chosen()
    return ModelZoo(tmp_path_factory.mktemp("models"), architecture)


@pytest.fixture(scope="session")
def make_vllm(zoo: ModelZoo) -> Iterator[vllm_suite.MakeVllm]:
    """Engines over one real vLLM."""
    if not IN_VLLM_SUITE:
        pytest.skip("run by test_engine_vllm_process.py, in a process of its own")
    yield from vllm_suite.started(zoo)


@pytest.fixture(params=KINDS)
def make_engine(request: pytest.FixtureRequest, zoo: ModelZoo) -> MakeEngine:
    """Every engine behind the port."""
    if request.param == "vllm":
        vllm: MakeEngine = request.getfixturevalue("make_vllm")
        return vllm
    scripted, replicas, embedded = MakeScripted(), MakeReplicas(), MakeEmbedded(zoo)
    made: dict[str, MakeEngine] = {maker.kind: maker for maker in (scripted, replicas, embedded)}
    program = "tests.contract.scripted_program:scripted_engine"
    made["scripted in a process"] = MakeProcess(scripted, program)
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
