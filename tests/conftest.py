"""Shared by all tests: pytest's own tester for plugins, and the repository's root."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that `agentrl demo --journal-only` writes; tests that change it make a copy."""
    from agentrl.cli.sample_run import write_sample_run

    return write_sample_run(tmp_path_factory.mktemp("runs")).path
