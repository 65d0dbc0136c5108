"""`agentrl skill`: what it tells a coding agent to type, typed in its order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.commands import make_parser
from agentrl.cli.main import main
from agentrl.cli.skill import SKILL

MAX_WORDS = 1500


def commands(text: str) -> list[str]:
    """Those of its blocks that need nothing from outside."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_every_command_of_the_skill_exists_with_its_arguments() -> None:
    text = SKILL.read_text(encoding="utf-8")
    assert len(text.split()) <= MAX_WORDS
    typed = [shlex.split(line) for line in commands(text)]
    assert len(typed) >= 15
    for program, *words in typed:
        if program != "cd":
            options, others = make_parser().parse_known_args(words)
            assert program == "agentrl"
            assert all(other.startswith("--") and options.takes_overrides for other in others), words


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_every_command_of_the_skill_works(tmp_path: Path) -> None:
    directory, typed = tmp_path, commands(SKILL.read_text(encoding="utf-8"))
    for line in typed:
        words = shlex.split(line)
        if words[0] == "cd":
            directory /= words[1]
            continue
        assert words[0] == "agentrl", line
        done = subprocess.run(
            [sys.executable, "-m", "agentrl.cli", *words[1:]],
            cwd=directory,
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (line, done.stdout[-2000:], done.stderr[-2000:])
    lines = (directory / "episodes.jsonl").read_text().splitlines()
    assert {json.loads(line)["run"] for line in lines}


def test_it_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["skill"]) == 0
    assert capsys.readouterr().out == SKILL.read_text(encoding="utf-8")


def test_the_list_for_language_models_leads_to_pages(repository: Path) -> None:
    pages = re.findall(r"\]\((.*?)\)", (repository / "docs/llms.txt").read_text(encoding="utf-8"))
    assert len(pages) >= 20
    assert [page for page in pages if not (repository / "docs" / page).is_file()] == []
