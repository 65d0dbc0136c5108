"""Who may import whom, and what an import costs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.architecture.sources import sources

HEAVY = ("numpy", "torch", "ray", "vllm", "transformers", "peft", "gymnasium", "rich", "aiohttp", "pydantic")


def test_every_import_goes_downwards(repository: Path) -> None:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    finished = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def modules_after(statement: str) -> set[str]:
    """Top-level modules a fresh interpreter holds after `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{m.partition('.')[0] for m in sys.modules}})))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return set(json.loads(finished.stdout))


def test_import_agentrl_loads_nothing_heavy() -> None:
    assert not modules_after("import agentrl").intersection(HEAVY)


def test_the_core_alone_has_every_public_name_but_the_learners() -> None:
    """What pyproject.toml lists as extras is hidden, as if only the core were installed."""
    extras = ("torch", "transformers", "peft", "safetensors", "tokenizers", "jinja2", "ray", "vllm", "reasoning_gym")
    statement = f"""
for name in {extras}:
    sys.modules[name] = None
import agentrl, agentrl.cli.main
for name in agentrl.__all__:
    try:
        getattr(agentrl, name)
    except ImportError as error:
        assert name == "LossBatch" and "needs torch; install it with" in str(error), error
"""
    assert "agentrl" in modules_after(statement)


def test_a_version_is_published_in_one_place_which_waits_for_the_disk() -> None:
    """Else an engine might sample by weights that a crash takes from the journal."""
    calls = {
        (source.path, ast.unparse(node.func))
        for source in sources("agentrl/app", "agentrl/orchestrator")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        if ast.unparse(node.func) == "VersionPublication" or ast.unparse(node.func).endswith("trainer.publish")
    }
    place = "agentrl/orchestrator/versions.py"
    assert calls == {(place, "trainer.publish"), (place, "VersionPublication")}


def test_the_second_reader_of_journals_imports_nothing_of_agentrl() -> None:
    assert "agentrl" not in modules_after("import tests.journal_oracle")


def test_the_pytest_plugin_loads_nothing_heavy() -> None:
    assert not modules_after("import agentrl.testing.plugin").intersection(HEAVY)


CANCELLED_START = """
import asyncio, threading
from agentrl.cluster.engine_actors import RayPlacement

async def main():
    placement, begun, cancelled = RayPlacement(), threading.Event(), threading.Event()

    def start_actor():
        begun.set()
        cancelled.wait()
        raise OSError("Ray did not start")

    placement._start_actor = start_actor
    starting = asyncio.create_task(placement.start(None))
    await asyncio.to_thread(begun.wait)
    starting.cancel()
    await asyncio.sleep(0)
    cancelled.set()
    await asyncio.gather(starting, return_exceptions=True)

asyncio.run(main())
"""


def test_a_cancelled_start_of_a_ray_that_did_not_start_imports_no_ray() -> None:
    """Ray reads its environment when it is imported: nobody may import it before a session has set that."""
    assert "ray" not in modules_after(CANCELLED_START)


@pytest.mark.parametrize(
    "package",
    [
        "core",
        "config",
        "environment",
        "journal",
        "rollout",
        "credit",
        "orchestrator",
        "inspection",
        "observe",
        "testing",
    ],
)
def test_everything_but_learning_and_serving_runs_without_the_heavy_stack(package: str) -> None:
    statement = (
        f"import agentrl.{package}, importlib, pkgutil\n"
        f"for found in pkgutil.walk_packages(agentrl.{package}.__path__, 'agentrl.{package}.'):\n"
        "    if not found.name.endswith(('__main__', 'function_check')):\n"
        "        importlib.import_module(found.name)"
    )
    assert not modules_after(statement).intersection({"torch", "ray", "vllm", "transformers", "peft"})


ASKS_WHETHER_NEW = re.compile(r"\.is_(new|replaying|resumed|inherited)\b|\bcall\.recorded\b")


def test_no_code_but_the_journal_of_calls_asks_whether_a_call_is_new(repository: Path) -> None:
    rollout = repository / "agentrl/rollout"
    asking = [str(each) for each in rollout.rglob("*.py") if ASKS_WHETHER_NEW.search(each.read_text())]
    assert [each for each in asking if each.split("/")[-2] != "calls"] == []


COUNTS_OF_STEPS = {
    "agentrl/engines/scripted.py": 1,  # of one lineage, which the line compares first
    "agentrl/engines/version_table.py": 1,  # the same
    "agentrl/learn/trainer.py": 1,  # steps that were taken, here and in the next two
    "agentrl/observe/alarms.py": 1,
    "agentrl/observe/run_state.py": 2,
    "agentrl/orchestrator/evaluation.py": 2,  # of several policies, which are evaluated at one step
    "agentrl/orchestrator/versions.py": 2,  # of versions that a deterministic run pins, all on its line
}
"""Number of places that compare `.step` without `Lines`; none may be added."""


def test_only_the_tree_of_lineages_compares_versions_by_their_steps() -> None:
    found: Counter[str] = Counter()
    for source in sources("agentrl"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
                sides = [node.left, node.right]
            else:
                continue
            is_fixed = any(isinstance(side, ast.Constant) for side in sides)
            found[source.path] += not is_fixed and any(_is_step(side) for side in sides)
    assert found.pop("agentrl/core/records.py") == 2
    assert +found == COUNTS_OF_STEPS


def test_no_part_of_the_loop_rebuilds_its_state_beside_the_log() -> None:
    names = [
        f"{source.path}: {node.name}"
        for source in sources("agentrl/orchestrator", "agentrl/credit", "agentrl/journal", "agentrl/app")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("restore")
    ]
    assert names == [], "the records of the log are applied, live and in a resume"


def _is_step(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("step", "oldest_step")
