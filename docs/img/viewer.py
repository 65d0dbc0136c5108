"""Take the pictures of the viewer in the docs, of the sample run and another, in a headless Chromium.

    python -m tests.support.sample_run
    agentrl train examples/07_smollm2.toml --evaluation.every=4
    PYTHONPATH=. python docs/img/viewer.py runs/sample runs/smollm2 docs/img

The episodes are chosen by what is to be seen in them, since no two sample runs are the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from urllib.parse import quote

from agentrl.inspection.conversation import PolicyTurn, read_conversation
from agentrl.inspection.export.exporting import export
from agentrl.inspection.reader import RunReader
from tests.browser import Browser, Tab, find_chromium

WIDTH, HEIGHT = 1180, 760
MAX_BYTES = 150_000


def choose(reader: RunReader) -> tuple[str, str]:
    """An episode that most versions sampled, and a turn of one inside of which new weights took over, an early one."""
    versions, taken_over = {}, {}
    for line in reader.episodes("purpose = train and environment ~ Solve and status = trained", limit=500):
        turns = [
            act for act in read_conversation(reader, line.episode, line.attempt).acts if isinstance(act, PolicyTurn)
        ]
        versions[line.episode] = len({version for act in turns for _, version in act.versions}) - (line.reward or 0.0)
        for act in turns:
            taken_over[f"{quote(line.episode)}?call={quote(act.call)}"] = (len(act.versions) - 1) / (1 + act.turn)
    most, early = (max(found, key=lambda name: found[name]) for found in (versions, taken_over))
    return quote(most), early


def paint(tab: Tab, label: str) -> None:
    """Press the button of that name."""
    script = f"[...document.querySelectorAll('.segments button')].find(each => each.innerText === '{label}').click()"
    tab.evaluate(script)


def take(tab: Tab, page: str, out: Path, name: str, address: str, *, theme: str) -> None:
    """One picture."""
    tab.size(WIDTH, HEIGHT, scale=1.5, theme=theme)
    tab.open("about:blank")
    tab.open(page + address)
    tab.wait("document.querySelector('#main[data-view]:not([aria-busy])')")
    tab.wait("getComputedStyle(document.querySelector('#main')).opacity === '1'")
    tab.wait("!document.querySelector('.paints') || document.querySelector('.segments')")
    if "/tokens" in address:
        paint(tab, "log-probability" if theme == "dark" else "version")
    tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    path = out / f"viewer_{name}.webp"
    tab.picture(path, format="webp", quality=82)
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{path}: {size:,} bytes; a picture has at most {MAX_BYTES:,}")
    print(f"{path}: {size:,} bytes")


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("real", type=Path, help="run of a real model, for the overview")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("no Chromium was found: install one, or set AGENTRL_CHROMIUM to its path")
    reader = RunReader(arguments.run)
    versions, taken_over = choose(reader)
    with tempfile.TemporaryDirectory() as directory, Browser(chromium) as browser, browser.tab() as tab:
        page = _export(reader, Path(directory) / "page.html")
        here = (tab, page, arguments.out)
        take(*here, "episodes", "#/episodes?where=purpose = train", theme="light")
        take(*here, "conversation", f"#/episode/{taken_over}", theme="light")
        take(*here, "tokens", f"#/episode/{versions}/tokens?token=120", theme="dark")
        take(*here, "run", "#/run", theme="light")
        take(*here, "compare", f"#/compare?a={quote('forks/f0')}", theme="light")
        page = _export(RunReader(arguments.real), Path(directory) / "real.html")
        take(tab, page, arguments.out, "overview", "#/overview", theme="light")


def _export(reader: RunReader, path: Path) -> str:
    """The address of a run's page, whose reader it closes."""
    written = export(reader, "html", path).path
    reader.close()
    return Path(written).as_uri()


if __name__ == "__main__":
    main()
