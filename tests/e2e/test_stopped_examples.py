"""Example scripts that are stopped, or run where their run is already: they end with a sentence, not a traceback."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown_pages import ROOT

EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("script", "run", "needs"),
    [
        ("06_self_play.py", "self_play", "textarena"),
        ("08_openai_client.py", "openai_client", "openai"),
        ("11_scores.py", "scores", "reasoning_gym"),
        ("14_branches.py", "branches", "reasoning_gym"),
    ],
)
def test_a_script_whose_run_exists_says_so(
    script: str, run: str, needs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(needs)
    (tmp_path / "runs" / run / "journal").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit, match=rf"runs/{run} exists; resume it with --resume"):
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("stops", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGINT, signal.SIGINT]])
@pytest.mark.parametrize("until", ["loading trainer and engine", "step 1/"])
def test_a_stopped_script_ends_with_a_sentence(stops: list[signal.Signals], until: str, tmp_path: Path) -> None:
    pytest.importorskip("textarena")
    command = [sys.executable, str(EXAMPLES / "06_self_play.py")]
    with subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as script:
        assert script.stderr is not None
        lines: list[str] = []
        for line in script.stderr:
            lines.append(line)
            if line.startswith((until, "stopping")) and stops:
                script.send_signal(stops.pop(0))
    said = "".join(lines)
    assert "Traceback" not in said
    assert lines[-1].startswith(("stopped before its last step; --resume", "interrupted")), said
    assert script.returncode == 1
