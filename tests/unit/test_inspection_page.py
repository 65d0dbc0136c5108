"""The commands of docs/how-to/inspection.md and docs/how-to/replaying.md whose output they do not show, on the sample
run."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.cli.main import main
from tests.gallery import NOT_HERE
from tests.markdown_pages import ROOT, blocks
from tests.support.sample_run import play_with_script

if TYPE_CHECKING:
    import pytest


def test_the_commands_of_the_pages_run(
    sample_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(sample_run, tmp_path / "runs" / "sample", symlinks=True)
    (tmp_path / "said.txt").write_text("2 + 2 =\n")
    monkeypatch.chdir(tmp_path)
    play_with_script(monkeypatch)
    shown = [
        block.text
        for page in ("inspection.md", "replaying.md")
        for block in blocks(ROOT / "docs" / "how-to" / page)
        if block.language == "sh" and block.executed
    ]
    lines = [line for text in shown for line in text.split("\n")]
    commands = [line for line in lines if line and not line.startswith(NOT_HERE)]
    assert len(commands) > 4
    for line in commands:
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr().err)
        assert capsys.readouterr().out.strip(), line
