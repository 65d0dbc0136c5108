"""Shared by all tests: pytest's own tester for plugins, the repository's root, and a judge of the runs they leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.journal_oracle import judge

pytest_plugins = ["pytester"]

settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))  # `make test-all` draws anew: "default"


@pytest.hookimpl(tryfirst=True)  # pytest-xdist's own reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes share the tests: one starts Ray while the other starts vLLM, and whole files follow."""
    folders = ["e2e", "learning", "contract", "sim", "property", "replay", "unit", "architecture", "environments"]
    groups = {}
    for item in items:
        heavy = next((name for name in ("ray", "vllm") if item.get_closest_marker(name)), None)
        file, _, _ = item.nodeid.partition("::")
        rank = next((place for place, folder in enumerate(folders) if f"{folder}/" in file), len(folders))
        groups[item] = (-1, heavy) if heavy else (rank, file)
        item.add_marker(pytest.mark.xdist_group(heavy or file))
    items.sort(key=groups.__getitem__)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Judge every run under the test's `tmp_path`, unless the test says that it damages them."""
    tmp_path = getattr(item, "funcargs", {}).get("tmp_path")
    yield
    if tmp_path is None or item.get_closest_marker("damages_journal"):
        return
    runs = [control.parent.parent for control in tmp_path.rglob("journal/control.db")]
    found = [f"{run}: {violation}" for run in runs for violation in judge(run)]
    if found:
        pytest.fail("a run that this test left does not hold:\n" + "\n".join(found), pytrace=False)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that `agentrl demo --journal-only` writes; tests that change it make a copy."""
    from agentrl.cli.sample_run import write_sample_run

    return write_sample_run(tmp_path_factory.mktemp("runs")).path
