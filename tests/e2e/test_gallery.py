"""Every command of docs/how-to/inspection.md and docs/how-to/replaying.md runs on a sample run, and prints what the
page shows, up to numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gallery import NOT_HERE, Session, departures, printed, sessions, shape, workplace
from tests.markdown_pages import ROOT
from tests.support.sample_run import play_with_script

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PAGES = [ROOT / "docs" / "how-to" / name for name in ("inspection.md", "replaying.md")]


def test_every_command_prints_what_the_page_shows(
    sample_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workplace(tmp_path, sample_run))
    play_with_script(monkeypatch)
    seen = 0
    for session in (session for page in PAGES for session in sessions(page)):
        if session.command.startswith(NOT_HERE):
            continue
        if session.shown is None:
            printed(session.command)
        else:
            seen += 1
            assert departures(session) == [], session.command
    assert seen > 6


def test_a_line_that_is_not_printed_is_found(sample_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace(tmp_path, sample_run))
    shown = (
        "run      purpose  state     episodes  dropped  in_flight  steps  reward",
        "other    train    finished  2  1  0  proposer 8, solver 8  proposer 1, solver 1",
        "…",
    )
    assert departures(Session("agentrl run list", shown)) == [
        "other train finished 0 0 0 proposer 0 solver 0 proposer 0 solver 0"
    ]


def test_the_shape_of_a_line_is_its_words() -> None:
    assert shape("├ f0   at r#3   solver@1.6  -0.9 ██▁ 1,586") == shape("└ f12  at r#17  solver@0.0  1 ███▁▁ 7")
    assert shape("1 trained") != shape("1 dropped")
