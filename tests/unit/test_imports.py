"""What commands do not import: one process takes one step after another, so lighter ones come first."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.journal_cases import write_run
from tests.unit.test_train_start import MISTAKES, write_project

HEAVY = ("torch", "transformers", "peft", "ray", "vllm")
STEPS: dict[str, tuple[str, tuple[str, ...]]] = {
    "reading commands": (
        """
for line in ("--help", "run list", "episode list demo", "episode show demo e3", "run view demo"):
    run(*line.split())
""",
        (*HEAVY, "numpy", "pydantic", "gymnasium", "environments"),
    ),
    "the first line of a start": (
        """
say, loaded = command._say, []
command._say = lambda text: loaded.append((text, [*sys.modules]))
run("train", "absent.toml")
command._say = say
told = [loaded[0][0], sorted({"pydantic", "numpy", "torch"}.intersection(loaded[0][1]))]
""",
        HEAVY,
    ),
    "a missing model": (
        'told = run("train", "run.toml", "--model=/nope")',
        (*HEAVY, "agentrl.app.training", "agentrl.orchestrator.loop", "numpy"),
    ),
    "mistakes": ('told = [run("train", *mistake) for mistake in json.loads(sys.argv[1])]', HEAVY),
    "adapters of games": (
        """
import agentrl
agentrl.PettingZooEnvironment, agentrl.TextArenaEnvironment
""",
        (*HEAVY, "pettingzoo", "textarena", "openai", "nltk", "pygame", "mcp"),
    ),
    "the plan of a run": (
        """
from agentrl.app.plan import resolve
from agentrl.config.load import load
from agentrl.environment.registry import resolve as find
config = load(sys.argv[2])
plan = resolve(config, find(config.environment.id))
assert plan.engine and plan.trainer and plan.rollout
""",
        HEAVY,
    ),
    "a missing package": (
        """
from agentrl.core.machine import EXTRAS
sys.modules.update(dict.fromkeys(EXTRAS))  # as if not installed
train = ["train", "sums/train.toml"]
told = [run(*words) for words in (["env", "new", "sums"], [*train, "--dry-run"], train, ["demo", "--name=second"])]
""",
        (),
    ),
}
"""What the process does, and the modules that are not loaded after it."""

PROGRAM = """
import contextlib, io, json, sys
from agentrl.cli import main as command

def run(*words):
    with contextlib.redirect_stdout(io.StringIO()) as output, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            code = command.main(list(words))
        except SystemExit as left:
            code = left.code
    return code, output.getvalue(), error.getvalue()

found, scope = {}, {"run": run, "command": command, "sys": sys, "json": json}
for name, (source, absent) in json.load(sys.stdin).items():
    scope["told"] = None
    exec(source, scope)
    found[name] = [scope["told"], [module for module in absent if sys.modules.get(module)]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def steps(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each step told, and the modules that it should not have loaded."""
    directory = tmp_path_factory.mktemp("project")
    write_project(directory)
    asyncio.run(write_run(directory / "runs" / "demo"))
    before = files(directory)
    arguments = [json.dumps([*MISTAKES]), str(repository / "examples" / "01_tool_use.toml")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        input=json.dumps(STEPS),
        capture_output=True,
        text=True,
        cwd=directory,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found | {"made": sorted(str(path.relative_to(directory)) for path in {*files(directory)} - {*before})}


def files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if "__pycache__" not in path.parts]


@pytest.mark.parametrize("step", STEPS)
def test_what_a_step_does_not_need_is_not_loaded(steps: dict[str, Any], step: str) -> None:
    assert steps[step][1] == []


def test_the_first_line_comes_before_the_slow_imports(steps: dict[str, Any]) -> None:
    assert steps["the first line of a start"][0] == ["reading absent.toml …\n", []]


def test_a_mistake_is_refused_with_its_words(steps: dict[str, Any]) -> None:
    answers = zip(
        [*MISTAKES.values(), "/nope: there is no such directory"],
        [*steps["mistakes"][0], steps["a missing model"][0]],
        strict=True,
    )
    for words, (code, _, error) in answers:
        assert (code, words in error) == (2, True), error


def test_a_missing_package_is_named_before_anything_is_created(steps: dict[str, Any]) -> None:
    """So that the same command works once it is installed. A new environment and a dry run need none."""
    answers = steps["a missing package"][0]
    assert [code for code, _, _ in answers] == [0, 0, 2, 2], answers
    for (_, _, error), packages in zip(answers[2:], ("torch, transformers, peft", "reasoning_gym"), strict=True):
        assert packages in error
        assert "pip install" in error


def test_only_commands_that_are_accepted_write(steps: dict[str, Any]) -> None:
    assert not [path for path in steps["made"] if not f"{path}/".startswith(("sums/", "runs/demo/"))]
