"""The viewer in a headless Chromium: how fast a file of 1,000 episodes opens, and what hostile content makes of it.

`html_open_s`: from the address to a list of 1,000 episodes of 10 turns of 200 tokens on the screen, into one, to its
conversation, and to its tokens, each drawn; median of 5, each in a fresh profile. `html_foreign_elements`: elements and
attributes that the page's script does not make, over all views of a run with hostile content in every field, as a file
and served; a script of the content that runs counts as well. Null where there is no Chromium.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.inspection.export.exporting import export
from agentrl.inspection.reader import RunReader
from agentrl.inspection.viewer.application import serve_viewer
from benchmarks.inspection_reading import TURNS, write_large_run
from tests.browser import HOW_TO_INSTALL, Browser, find_chromium
from tests.journal_cases import write_run
from tests.viewer_cases import HOSTILE, READY, foreign_elements, hostile_views

EPISODES, QUICK_EPISODES, SAMPLED, REPEATS = 1_000, 100, 200, 5
LISTED = f"{READY} && document.querySelectorAll('tbody tr').length === 100"
OPENED = f"document.querySelectorAll('.act.turn').length === {TURNS}"
TOKENS = f"document.querySelectorAll('.token.sampled').length === {TURNS * SAMPLED}"


def figures(quick: bool) -> dict[str, float | None]:
    chromium = find_chromium()
    if chromium is None:
        print(f"  {HOW_TO_INSTALL}")
        return {"html_open_s": None, "html_foreign_elements": None}
    with tempfile.TemporaryDirectory(prefix="agentrl-html-") as directory:
        place = Path(directory)
        return {
            "html_open_s": opened(place, chromium, QUICK_EPISODES if quick else EPISODES),
            "html_foreign_elements": asyncio.run(foreign(place, chromium)),
        }


def opened(place: Path, chromium: str, count: int) -> float:
    write_large_run(place / "large", count, SAMPLED)
    started = time.perf_counter()
    reader = RunReader(place / "large")
    path = Path(export(reader, "html", place / "large.html").path)
    reader.close()
    size = path.stat().st_size / 1e6
    print(f"  {count} episodes: {size:.1f} MB, written in {time.perf_counter() - started:.0f} s", flush=True)
    took = []
    for _ in range(REPEATS if count == EPISODES else 1):
        with Browser(chromium) as browser, browser.tab() as tab:
            started = time.perf_counter()
            tab.open(f"{path.as_uri()}#/episodes")
            tab.wait(LISTED)
            listed = time.perf_counter()
            tab.evaluate("document.querySelector('tbody a.id').click()")
            tab.wait(OPENED)
            tab.press("2")
            tab.wait(TOKENS)
            took.append(time.perf_counter() - started)
            print(f"  list {listed - started:.2f} s, episode {took[-1] - (listed - started):.2f} s", flush=True)
    return statistics.median(took)


async def foreign(place: Path, chromium: str) -> int:
    """Of the file and of the server, over all views."""
    await write_run(place / "hostile", text=HOSTILE, name=HOSTILE)
    reader = RunReader(place / "hostile")
    path = Path(export(reader, "html", place / "hostile.html").path)
    reader.close()
    async with serve_viewer(place / "hostile") as server:
        return await asyncio.to_thread(_count, chromium, [(path.as_uri(), ""), tuple(server.address.split("#"))])


def _count(chromium: str, pages: list[tuple[str, ...]]) -> int:
    found = 0
    with Browser(chromium) as browser, browser.tab() as tab:
        for page, token in pages:
            for view in hostile_views():
                tab.open("about:blank")
                tab.open(f"{page}{view}{'&' if '?' in view else '?'}{token}")
                tab.wait(READY)
                found += foreign_elements(tab) + bool(tab.evaluate("window.hit"))
    print(f"  {2 * len(hostile_views())} views of hostile content: {found} foreign elements")
    return found
