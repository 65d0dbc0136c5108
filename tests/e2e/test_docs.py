"""What the README and docs/ show is run: every Python block, and the commands of the first ten minutes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.markdown_pages import PAGES, ROOT, blocks, python_of
from tests.support import warm
from tests.support.sample_run import write_sample_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

README = ROOT / "README.md"
SMALL = "--steps=2 --evaluation.tasks=8"
FILE_NAME = re.compile(r"# (\w+\.py)\n")
SHORTENED = """
def shortened(config):
    return config.model_copy(
        update={
            "steps": 2,
            "evaluation": config.evaluation.model_copy(update={"tasks": 8}),
        }
    )
"""


def agentrl(directory: Path, *arguments: str) -> str:
    finished = warm.command(directory, *arguments)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a reader stands after `make demo`: examples/ at hand, a run in runs/demo, and the sample run."""
    directory = tmp_path_factory.mktemp("reader")
    (directory / "examples").symlink_to(ROOT / "examples")
    train = ["train", "examples/01_tool_use.toml", "--name=demo", *SMALL.split()]
    agentrl(directory, *train)
    write_sample_run(directory / "runs")
    return directory


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=() if page == README else pytest.mark.exhaustive, id=str(page.relative_to(ROOT)))
        for page in PAGES
        if python_of(page)
    ],
)
def test_the_python_of_a_page_runs(page: Path, workplace: Path) -> None:
    shown = python_of(page)
    for text in shown:
        if found := FILE_NAME.match(text):
            (workplace / found[1]).write_text(text, encoding="utf-8")
    script = "\n\n".join(text.replace("agentrl.train(config", "agentrl.train(shortened(config)") for text in shown)
    path = workplace / f"{page.stem}_page.py"
    path.write_text(SHORTENED + script, encoding="utf-8")
    finished = warm.script(workplace, path)
    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "page",
    [README, pytest.param(ROOT / "docs/tutorials/getting_started.md", marks=pytest.mark.exhaustive)],
    ids=lambda page: page.stem,
)
def test_the_first_ten_minutes(page: Path, workplace: Path) -> None:
    listed = json.loads(agentrl(workplace, "episode", "list", "demo", "--json"))
    trained = next(episode["episode"] for episode in listed if episode["purpose"] == "train")
    lines = [
        line.replace("e100", trained)
        for block in blocks(page)
        if block.language == "" and "/path/to/" not in block.text
        for line in block.text.splitlines()
    ]
    lines = [line for line in lines if line.startswith(("agentrl ", "cd ")) and "api.example.com" not in line]
    lines = [line for line in lines if not line.startswith("agentrl run serve")]  # serves until it is stopped
    assert len(lines) > 3
    [code] = python_of(README)
    (workplace / "my_env.py").write_text(code, encoding="utf-8")
    small = {"train": SMALL.split(), "evaluate": ["--tasks=8"]}
    said, directory = "", workplace
    for line in lines:
        command, *arguments = shlex.split(line, comments=True)
        if command == "cd":
            directory /= arguments[0]
        else:
            said += agentrl(directory, *arguments, *small.get(arguments[0], []))
    assert ("passed" if page.stem == "getting_started" else "evaluation/reward") in said
