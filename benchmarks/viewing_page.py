"""The viewer in a headless Chromium: its first screen for a large run, its fourteen defects, its contrast and keys.

`first_screen_s`: from the address of a served run of 1,000 steps and 100,000 episodes to its overview with all charts;
median of 5, each with a new server and a new profile. `defects_fixed`: tests of `tests/e2e/test_viewer_defects.py` that
pass, by the number of the defect. `contrast_and_keyboard`: share of the views, light and dark, in which every text has
the contrast of WCAG AA and the Tab key leads on visibly. Null where there is no Chromium.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import tempfile
import time
from pathlib import Path

from agentrl.cli.sample_run import write_sample_run
from agentrl.core.records import PolicyVersion
from agentrl.inspection.export.exporting import export
from agentrl.inspection.reader import RunReader
from agentrl.inspection.viewer.application import serve_viewer
from agentrl.journal.port import MetricRow, VersionPublication
from agentrl.journal.store import SqliteJournal
from benchmarks.inspection_reading import write_large_run
from benchmarks.parts import outcomes
from tests.browser import HOW_TO_INSTALL, Browser, find_chromium
from tests.journal_cases import step_of, weights
from tests.viewer_cases import READY, VIEWS, faint_texts, lost_keys, show

EPISODES, STEPS, REPEATS = 100_000, 1_000, 5
QUICK_EPISODES, QUICK_STEPS, QUICK_REPEATS = 1_000, 100, 1
METRICS = ("reward/mean", "episodes/tokens", "entropy", "k3", "tokens/sampled_per_s", "engine/busy_share")
CHARTED = f"{READY} && document.querySelectorAll('.card path.curve').length >= {len(METRICS)}"


def figures(quick: bool) -> dict[str, float | None]:
    """Measure this part."""
    chromium = find_chromium()
    if chromium is None:
        print(f"  {HOW_TO_INSTALL}")
        return {"first_screen_s": None, "defects_fixed": None, "contrast_and_keyboard": None}
    with tempfile.TemporaryDirectory(prefix="agentrl-viewing-") as directory:
        run = Path(directory) / "large"
        write_large_run(run, QUICK_EPISODES if quick else EPISODES, sampled=1)
        asyncio.run(write_steps(run, QUICK_STEPS if quick else STEPS))
        seconds = [asyncio.run(_first_screen(run, chromium)) for _ in range(QUICK_REPEATS if quick else REPEATS)]
        print(f"  first screen: {', '.join(f'{each:.2f}' for each in seconds)} s", flush=True)
        return {
            "first_screen_s": statistics.median(seconds),
            "defects_fixed": _defects_fixed(),
            "contrast_and_keyboard": _contrast_and_keyboard(Path(directory), chromium),
        }


async def write_steps(run: Path, steps: int) -> None:
    """Add steps with the metrics of the overview, and an evaluation at every tenth, to a run."""
    journal = SqliteJournal(run / "journal")
    for step in range(steps + 1):
        before = PolicyVersion("solver", 0, step - 1) if step else None
        journal.record(VersionPublication(weights("solver", 0, step), before))
        if step:
            journal.record(step_of("solver", 0, step, []))
            journal.record(MetricRow("solver", step, dict.fromkeys(METRICS, step / steps)))
        if step % 10 == 0:
            evaluated = {"evaluation/reward": step / steps, "evaluation/reward_error": 0.05}
            journal.record(MetricRow("solver", step, evaluated))
    await journal.close()


async def _first_screen(run: Path, chromium: str) -> float:
    def look(address: str) -> float:
        with Browser(chromium) as browser, browser.tab() as tab:
            tab.size(1280, 900)
            started = time.perf_counter()
            tab.open(address)
            tab.wait(CHARTED)
            return time.perf_counter() - started

    async with serve_viewer(run) as server:
        return await asyncio.to_thread(look, server.address)


def _defects_fixed() -> int:
    passed: dict[str, bool] = {}
    for name, has_passed in outcomes("tests/e2e/test_viewer_defects.py").items():
        if defect := re.match(r"test_(\d+)_", name):
            passed[defect[1]] = passed.get(defect[1], True) and has_passed
    return sum(passed.values())


def _contrast_and_keyboard(directory: Path, chromium: str) -> float:
    reader = RunReader(write_sample_run(directory / "runs").path)
    page = Path(export(reader, "html", directory / "sample.html").path).as_uri()
    reader.close()
    passed = []
    with Browser(chromium) as browser, browser.tab() as tab:
        for theme in ("light", "dark"):
            tab.size(1280, 900, theme=theme)
            for name, address in VIEWS.items():
                show(tab, page + address)
                problems = [*faint_texts(tab), *lost_keys(tab)]
                passed.append(not problems)
                if problems:
                    print(f"  {name}, {theme}: {problems[:5]}", flush=True)
    return statistics.fmean(passed)
