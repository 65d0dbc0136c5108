"""One episode and its optimizer step enter every function that the pages on an episode and an update name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.architecture.test_pages_of_the_code import PAGES, SYMBOL
from tests.support import warm

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

TRACED = """
import json, sys
from pathlib import Path
from benchmarks.code_shape import StepEnds, Tasks, Tracer, train
from agentrl.environments.calculator import Calculator

tracer = Tracer()
tracer.install()
task = next(iter(Calculator.tasks("held_out")))
step = StepEnds(tracer)
train(Path(sys.argv[1]), "traced", task, tasks=Tasks(task, tracer), observers=[step])
print(json.dumps([[file, name] for file, name, _ in step.trace.events]))
"""


def functions_of(page: Path) -> set[tuple[str, str]]:
    symbols = {(path, symbol.rpartition(".")[2]) for path, symbol in SYMBOL.findall(page.read_text(encoding="utf-8"))}
    return {(path, name) for path, name in symbols if name.islower()}


def test_an_episode_and_its_update_enter_every_function_of_the_pages(repository: Path, tmp_path: Path) -> None:
    pages = {name: functions_of(repository / "docs" / "explanation" / name) for name in PAGES}
    assert all(len(functions) >= 6 for functions in pages.values())
    (script := tmp_path / "traced.py").write_text(TRACED)
    traced = warm.script(repository, script, str(tmp_path))
    assert traced.returncode == 0, traced.stderr
    entered = {(file, name.rpartition(".")[2]) for file, name in json.loads(traced.stdout.splitlines()[-1])}
    assert not {name: functions - entered for name, functions in pages.items() if functions - entered}
