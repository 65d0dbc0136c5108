"""Plays six example runs and writes each as one page for a browser, with an index: `make gallery`, about ten minutes.

    python -m docs.generators.gallery [docs/gallery]

Needs the extras `train,calculator,games,openai`. mkdocs copies the pages into the site.
"""

from __future__ import annotations

import html
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
AGENTRL = (sys.executable, "-m", "agentrl.cli")
MAX_PAGE_BYTES = 20_000_000


class Exhibit(NamedTuple):
    """A run of the gallery."""

    name: str
    title: str
    text: str
    command: tuple[str, ...]
    run: str
    """Directory of the run, relative to where the command ran."""
    where: str = ""
    """Filter of the episodes on the page; empty: all."""


def example(file: str) -> tuple[str, ...]:
    """The command of an example."""
    return (sys.executable, str(EXAMPLES / file))


EXHIBITS = (
    Exhibit(
        "tool_use",
        "Tool use",
        "A 0.84 M-parameter model learns when to use a calculator.",
        (*AGENTRL, "demo"),
        "runs/demo",
    ),
    Exhibit(
        "self_play",
        "Self-play",
        "One policy plays both sides of TicTacToe, and against its past versions.",
        example("06_self_play.py"),
        "runs/self_play",
        "oldest_step >= 40",
    ),
    Exhibit(
        "propose_and_solve",
        "Proposer and solver",
        "A proposer is rewarded for sums that the solver gets right about half of the time. Both learn.",
        example("03_propose_and_solve.py"),
        "runs/propose_and_solve",
        "oldest_step >= 5",
    ),
    Exhibit(
        "openai_client",
        "An external agent",
        "A loop over the OpenAI client, trained without changes.",
        example("08_openai_client.py"),
        "runs/openai_client",
    ),
    Exhibit(
        "crash_and_resume",
        "Killed and resumed",
        "The run was killed with SIGKILL in the middle of its conversations, and resumed.",
        example("04_crash_and_resume.py"),
        "runs/crash_and_resume",
    ),
    Exhibit(
        "scored_branches",
        "Branches with scores",
        "An episode tries its last turns three more times, and a scorer rates each turn: a tree of rewards.",
        (*AGENTRL, "train", str(ROOT / "docs/generators/scored_branches.toml")),
        "runs/scored_branches",
    ),
)


def write(out: Path) -> None:
    """Play the runs and write their pages."""
    out.mkdir(parents=True, exist_ok=True)
    cards = []
    for exhibit in EXHIBITS:
        with tempfile.TemporaryDirectory() as directory:
            print(f"{exhibit.title}: {' '.join(exhibit.command[-2:])}", flush=True)
            subprocess.run(exhibit.command, cwd=directory, check=True, stdout=subprocess.DEVNULL)
            page = out / f"{exhibit.name}.html"
            export = ["run", "export", exhibit.run, "--to", "html", "--out", str(page), "--force"]
            export += ["--where", exhibit.where] if exhibit.where else []
            subprocess.run([*AGENTRL, *export], cwd=directory, check=True)
        size = page.stat().st_size
        if size > MAX_PAGE_BYTES:
            raise SystemExit(f"{page} has {size:,} bytes; the limit is {MAX_PAGE_BYTES:,}")
        cards.append(
            f'<li><a href="{page.name}">{html.escape(exhibit.title)}</a> ({size / 1e6:.1f} MB)<br>'
            f"{html.escape(exhibit.text)}</li>"
        )
    index = (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        "<title>agentrl: gallery</title><style>body{font:16px/1.5 system-ui;max-width:40rem;margin:2rem auto;"
        "padding:0 1rem}ul{padding:0;list-style:none}li{margin:1.2rem 0}:root{color-scheme:light dark}</style>"
        "<h1>Six runs</h1><p>Each page is one file with a whole run: curves, "
        f"episodes, conversations, tokens. It loads nothing else.</p><ul>{''.join(cards)}</ul></html>\n"
    )
    (out / "index.html").write_text(index, encoding="utf-8")
    print(f"{out / 'index.html'}")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "gallery")
