"""A browser, and the sample run as a file, for the tests of the viewer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.cli.main import main
from tests.browser import Browser, Tab, find_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = find_chromium()
    assert chromium is not None
    with Browser(chromium) as browser:
        yield browser


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    with browser.tab() as tab:
        tab.size(1280, 900)
        yield tab


@pytest.fixture(scope="module")
def sample_file(sample_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("viewer") / "sample.html"
    assert main(["run", "export", str(sample_run), "--to", "html", "--out", str(out)]) == 0
    return out.as_uri()
