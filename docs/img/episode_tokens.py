"""Draw an episode's tokens from a run's journal as an SVG: a box per token, colored by the version that sampled it.

    python docs/img/episode_tokens.py RUN EPISODE OUT.svg

Gray tokens are context (prompts and tool results), which is never trained. Needs the run's model for its tokenizer.
A turn of several versions needs full weights, or `engine.refresh = "token"`: under `lazy`, the default for adapters,
a conversation changes its version between two turns only.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry

WIDTH, MARGIN, GUTTER = 940, 16, 64
LINE, BOX, CHARACTER, PADDING = 26, 20, 6.7, 4
CONTEXT = "#ececec"
COLORS = ("#9ecae9", "#ffbf79", "#88d27a", "#d6a5c9", "#f58518")
FONT = "font-family='ui-monospace, SFMono-Regular, Menlo, Consolas, monospace' font-size='11'"


def tokens(turn: TurnEntry) -> Iterator[tuple[int, str | None]]:
    """Each token of a turn with its version; None for context."""
    for token in np.frombuffer(turn.context_ids, dtype="<i4"):
        yield int(token), None
    sampled = np.frombuffer(turn.token_ids, dtype="<i4")
    for span in turn.spans:
        for token in sampled[span.start : span.stop]:
            yield int(token), f"{turn.policy}@{span.lineage}.{span.step}"


def draw(turns: list[TurnEntry], tokenizer: Tokenizer, *, title: str) -> str:
    """The SVG."""
    versions = list(dict.fromkeys(version for turn in turns for _, version in tokens(turn) if version))
    if len(versions) > len(COLORS):
        raise SystemExit(f"{len(versions)} versions, but only {len(COLORS)} colors: choose another episode")
    colors: dict[str | None, str] = {None: CONTEXT, **dict(zip(versions, COLORS, strict=False))}
    boxes: list[str] = []
    x, y = float(MARGIN), MARGIN + 4
    boxes.append(f"<text x='{x}' y='{y + 10}' font-weight='bold'>{escape(title)}</text>")
    y += LINE
    for version, color in colors.items():
        name = version or "context, not trained"
        boxes.append(f"<rect x='{x:.1f}' y='{y}' width='14' height='14' rx='3' fill='{color}' stroke='#999'/>")
        boxes.append(f"<text x='{x + 20:.1f}' y='{y + 11}'>{escape(name)}</text>")
        x += 44 + CHARACTER * len(name)
    for turn in turns:
        x, y = MARGIN + GUTTER, y + LINE + 4
        boxes.append(f"<text x='{MARGIN}' y='{y + 14}' fill='#777'>turn {turn.turn}</text>")
        for token, version in tokens(turn):
            text = tokenizer.decode([token], skip_special_tokens=False).replace("\n", "⏎").replace(" ", "·")
            width = CHARACTER * len(text) + 2 * PADDING
            if x + width > WIDTH - MARGIN:
                x, y = MARGIN + GUTTER, y + LINE
            ink = "#111" if version else "#888"
            boxes.append(
                f"<rect x='{x:.1f}' y='{y}' width='{width:.1f}' height='{BOX}' rx='3' fill='{colors[version]}'/>"
                f"<text x='{x + PADDING:.1f}' y='{y + 14}' fill='{ink}'>{escape(text)}</text>"
            )
            x += width + 2
    height = y + LINE + MARGIN
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    lines = [f"{head} role='img' {FONT}>", f"<title>{escape(title)}</title>"]
    lines.append(f"<rect width='{WIDTH}' height='{height}' rx='6' fill='#fff' stroke='#ddd'/>")
    return "\n".join([*lines, *boxes, "</svg>", ""])


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("episode")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    reader = RunReader(options.run)
    view = reader.episode(options.episode)
    model = Path(reader.info()["config"]["model"]["path"])
    turns = [entry for _, entry in view.entries if isinstance(entry, TurnEntry)]
    title = f"{view.summary.task} · {view.summary.turns} turns · reward {view.summary.reward:g}"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    options.out.write_text(draw(turns, tokenizer, title=f"episode {options.episode} · {title}"), encoding="utf-8")


if __name__ == "__main__":
    main()
