"""The packages' tests run by the rules of the core's tests: without GPUs, and each run they leave is judged."""

from tests.conftest import (  # noqa: F401 - found here by pytest
    _judge_runs_of_fixtures,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_runtest_teardown,
    repository,
)
