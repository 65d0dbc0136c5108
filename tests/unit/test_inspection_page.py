"""The commands of docs/inspection.md, in the order they stand there, on the sample run."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.main import main
from tests.markdown_pages import ROOT, blocks

if TYPE_CHECKING:
    import pytest

GIVEN = {"env.py:Propose": "agentrl.cli.sample_environment:Propose", "said.txt": "said.txt"}
"""What the reader brings, and what it is here."""


def test_the_commands_of_the_page_run(
    sample_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sample_run, tmp_path / "runs" / "sample", symlinks=True)
    (tmp_path / "said.txt").write_text("2 + 2 =\n")
    monkeypatch.chdir(tmp_path)
    shown = [block.text for block in blocks(ROOT / "docs" / "inspection.md") if block.language == "sh"]
    lines = [line for text in shown for line in text.split("\n")]
    commands = [line for line in lines if line and "--journal-only" not in line and "runs/other" not in line]
    assert len(commands) > 18
    for line in commands:
        arguments = [GIVEN.get(word, word) for word in shlex.split(line)[1:]]
        assert main(arguments) == 0, (line, capsys.readouterr().err)
        assert capsys.readouterr().out.strip(), line
