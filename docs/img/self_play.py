"""Draw what the versions of a self-play run get against the first of them and against random moves, as an SVG.

    python docs/img/self_play.py RUN OUT.svg [--every 15] [--games 256]

RUN is a run of `examples/06_self_play.py`.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

from curves import HEIGHT, WIDTH, Line, plot

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "06_self_play.py"))
PERFECT = 0.96
"""What perfect play gets against random moves."""
STYLE = """
svg { background: #ffffff; } text { font: 11px "DejaVu Sans", sans-serif; fill: #475467; }
.grid { stroke: #dfe3ea; } polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.c0 { stroke: #2563eb; } circle.c0, text.c0 { fill: #2563eb; } .c1 { stroke: #d9480f; }
circle.c1, text.c1 { fill: #d9480f; } .c2 { stroke: #98a2b3; stroke-dasharray: 4 3; } text.c2 { fill: #667085; }
text.c0, text.c1, text.c2 { stroke: none; }
"""


def main() -> None:
    """Play the games and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=15, help="steps between the versions that play")
    parser.add_argument("--games", type=int, default=256, help="of each of them against either opponent")
    options = parser.parse_args()
    versions = sorted((options.run / "versions" / "player").iterdir(), key=step_of)
    chosen = [version for version in versions if step_of(version) % options.every == 0 or version is versions[-1]]
    steps = [step_of(version) for version in chosen]
    lines = []
    for number, (name, opponent) in enumerate(EXAMPLE["OPPONENTS"].items()):
        scores = [EXAMPLE["score"](opponent, version, options.games) for version in chosen]
        print(name, *(f"{step}: {score:.3f}" for step, score in zip(steps, scores, strict=True)))
        lines.append(Line(f"against {name}", steps, scores, color=number, dots=True))
    lines.append(Line("perfect play against random moves", [steps[0], steps[-1]], [PERFECT, PERFECT], color=2))
    title = "Share of games won, a draw by half, by optimizer step"
    options.out.write_text(framed(lines, title=title, low=0.4, high=1.0))


def step_of(version: Path) -> int:
    """The step in the name of a published version."""
    return int(version.name.rpartition(".")[2])


def framed(lines: list[Line], *, title: str, low: float, high: float | None) -> str:
    """The plot with its style and a line of text for each curve that has a label."""
    drawn = plot(lines, title=title, low=low, high=high)
    labeled = [line for line in lines if line.label]
    first = 28 if high is None else HEIGHT - 34 - 15 * (len(labeled) - 1)  # below the curves, above one that falls
    rows = "".join(
        f'<text class="c{line.color}" x="{WIDTH - 16}" y="{first + 15 * place}" text-anchor="end">{line.label}</text>'
        for place, line in enumerate(labeled)
    )
    head, body = drawn.split(">", 1)
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{body.removesuffix("</svg>")}{rows}</svg>\n'
    )


if __name__ == "__main__":
    main()
