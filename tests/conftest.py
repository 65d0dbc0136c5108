"""Shared by all tests: pytest's own tester for plugins, the repository's root, and a judge of the runs they leave."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.journal_oracle import judge

pytest_plugins = ["pytester"]

# Ray gives its processes niceness 15, so beside anything else that runs they take minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")

settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))  # "default" draws anew


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that neither of two processes is left with one at the end."""
    folders = ["e2e", "learning", "contract", "sim", "property", "replay", "unit"]

    def place(item: pytest.Item) -> int:
        return next((place for place, folder in enumerate(folders) if f"tests/{folder}/" in item.nodeid), len(folders))

    items.sort(key=place)


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
