"""Shared by all tests: pytest's own tester for plugins, the suites over vLLM, the root, and a judge of left runs."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import tests.support.one_process  # noqa: F401 (sets a default)
from tests.journal_oracle import judge
from tests.support.programs import IS_INSTALLED
from tests.support.uncollected import uncollected

if TYPE_CHECKING:
    from benchmarks.code_shape import Module

pytest_plugins = ["pytester", "tests.contract.vllm_suite"]

# Ray gives its processes niceness 15, so beside anything else that runs they take minutes to start.
os.environ.setdefault("RAY_worker_niceness", "0")

# Threads of torch wait without spinning: models of tests are so small that spinning is most of their CPU time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests start hundreds of Pythons, and without bytecode each would compile agentrl again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Environments that commands of tests name are remembered there instead of in the user's home directory.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="agentrl-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

# Every test makes the checks of its models itself: nothing can be kept in a directory below a file.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="agentrl-cache-")
Path(os.environ["XDG_CACHE_HOME"], "agentrl").touch()
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

OF_TESTS: set[Path] = set()
"""`tmp_path` of each test so far, whose runs are judged at its end."""

settings.register_profile("repeatable", derandomize=True, deadline=None)  # another load is no failure
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))  # "default" draws anew


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what stays for the whole session, modules and tests, out of garbage collections, which would be a third of
    the time that tests take in this process."""
    with uncollected():
        try:
            return (yield)
        finally:
            gc.collect()


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, also from the processes that tests start, unless `-m gpu` asks for the tests that need one."""
    if not _tests_gpu(config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _tests_gpu(config: pytest.Config) -> bool:
    return bool(config.option.markexpr == "gpu")


def pytest_unconfigure() -> None:
    """Unfreeze: libraries in C++ that report leaks at exit look for objects that a collection frees."""
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes come first, so that no process is left with one at the end. Tests that need a GPU are
    skipped without `-m gpu`, and those that need a program without it."""
    for item in items:
        for mark in item.iter_markers("needs"):
            if not IS_INSTALLED[mark.args[0]]():
                item.add_marker(pytest.mark.skip(reason=f"needs {mark.args[0]}: apt-get install {mark.args[0]}"))
    if not _tests_gpu(config):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a GPU; run by `pytest -m gpu`"))
    slow = ("tests/e2e/", "tests/learning/", "tests/contract/", "packages/", "environments/")
    folders = (*slow, "tests/sim/", "tests/property/", "tests/replay/", "tests/unit/")

    def place(item: pytest.Item) -> int:
        return next((place for place, folder in enumerate(folders) if item.nodeid.startswith(folder)), len(folders))

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Shorten the checks of models at the start, once a test has imported them."""
    if "agentrl.engines.models" in sys.modules:
        from tests.support.short_start_checks import use_full_start_checks

        use_full_start_checks(item.get_closest_marker("full_start_check") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Judge every run under the test's `tmp_path`, unless the test says that it damages them."""
    tmp_path = getattr(item, "funcargs", {}).get("tmp_path")
    if tmp_path is not None:
        OF_TESTS.add(tmp_path)
    yield
    if tmp_path is not None and not item.get_closest_marker("damages_journal"):
        judge_runs([tmp_path])


@pytest.fixture(scope="module", autouse=True)
def _leave_out_what_stays() -> None:
    """Leave what earlier modules imported and made out of garbage collections, which took an eighth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _judge_runs_of_fixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Judge the runs that fixtures of more than one test left since the module began."""
    base = tmp_path_factory.getbasetemp()
    before = {*base.iterdir()}
    yield
    judge_runs(each for each in {*base.iterdir()} - before - OF_TESTS if not each.is_symlink())


def judge_runs(directories: Iterable[Path]) -> None:
    """Fail if a run under one of them does not hold."""
    runs = [control.parent.parent for each in directories for control in each.rglob("journal/control.db")]
    found = [f"{run}: {violation}" for run in runs for violation in judge(run)]
    if found:
        pytest.fail("a run that was left does not hold:\n" + "\n".join(found), pytrace=False)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sample_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one of everything; tests that change it make a copy."""
    from tests.support.sample_run import write_sample_run

    return write_sample_run(tmp_path_factory.mktemp("runs")).path


@pytest.fixture(scope="session")
def package_modules() -> list[Module]:
    """Every module of `agentrl/`, parsed."""
    from benchmarks.code_shape import PACKAGE, modules_of

    with uncollected():
        return modules_of(PACKAGE)
