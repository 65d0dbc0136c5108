"""Whether what was promised still holds: the figures of `bounds.toml` that two cores measure in half an hour.

    python -m benchmarks.figures [--only NAME] [--json]

Runs each benchmark of `bounds.toml` that has a `run`, those with `pairs` by turns with the commit `base` in a work tree
of its own, prints a table of figure, bound and what was seen, and exits with 1 where one falls short or is missing.
Figures that only whole benchmarks measure are listed as such. The last line is one JSON object like any benchmark's;
`--json`: that line alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[1]
BOUNDS = Path(__file__).with_name("bounds.toml")
LONGEST_S = 1800.0
"""Of one run of one benchmark."""
Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a figure must be. See the comment at the head of `bounds.toml`."""

    benchmark: str
    figure: str
    why: str
    least: float | None = None
    most: float | None = None
    ratio_least: float | None = None
    ratio_most: float | None = None
    whole: bool = False
    test: str = ""

    @property
    def name(self) -> str:
        """Benchmark and figure."""
        return f"{self.benchmark}.{self.figure}"

    @property
    def is_ratio(self) -> bool:
        """Whether it is compared with the base."""
        return self.ratio_least is not None or self.ratio_most is not None

    def holds(self, seen: float) -> bool:
        """Whether a figure, or its ratio where that is what is bounded, is as promised; NaN never is."""
        least, most = (self.ratio_least, self.ratio_most) if self.is_ratio else (self.least, self.most)
        return (least is None or seen >= least) and (most is None or seen <= most)

    def __str__(self) -> str:
        least, most = (self.ratio_least, self.ratio_most) if self.is_ratio else (self.least, self.most)
        parts = [f">= {least:g}" if least is not None else "", f"<= {most:g}" if most is not None else ""]
        return " and ".join(filter(None, parts)) + (" x base" if self.is_ratio else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A benchmark with promises."""

    name: str
    run: Sequence[str] | None = None
    """Its arguments; None: it is run by hand only."""
    pairs: int = 0
    shown: Sequence[str] = ()
    bounds: Sequence[Bound] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table."""

    bound: Bound
    seen: float | None
    verdict: str
    """`ok`, `short`, `missing` or `whole run only`."""


@dataclass(slots=True)
class Measured:
    """What the runs of one benchmark came to."""

    here: list[Figures] = field(default_factory=list)
    base: list[Figures] = field(default_factory=list)

    def of(self, bound: Bound) -> float | None:
        """The median of a figure, or of its ratios to the base's, run by run; None where it was not measured."""
        here = [figures.get(bound.figure) for figures in self.here]
        if not bound.is_ratio:
            known = [value for value in here if value is not None]
            return statistics.median(known) if known else None
        base = [figures.get(bound.figure) for figures in self.base]
        ratios = [now / then for now, then in zip(here, base, strict=True) if now is not None and then]
        return statistics.median(ratios) if ratios else None


def read_bounds(path: Path = BOUNDS) -> tuple[str, list[Benchmark]]:
    """The base commit, and the benchmarks with their bounds."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    base: str = content.pop("base")
    return base, [_benchmark(name, table) for name, table in content.items()]


def _benchmark(name: str, table: dict[str, Any]) -> Benchmark:
    figures = table.pop("figures", {})
    bounds = [Bound(benchmark=name, figure=figure, **bound) for figure, bound in figures.items()]
    return Benchmark(name=name, bounds=bounds, **table)


def judged(benchmark: Benchmark, measured: Measured) -> Iterator[Line]:
    """A line for each promise of a benchmark that was run."""
    for bound in benchmark.bounds:
        seen = measured.of(bound)
        if bound.whole:  # where a quick run measures it too, it is over fewer cases than were promised
            yield Line(bound, None, "whole run only")
        elif seen is None:
            yield Line(bound, None, "missing")
        else:
            yield Line(bound, seen, "ok" if bound.holds(seen) else "short")


def measure(benchmark: Benchmark, base: Path | None) -> Measured:
    """Run a benchmark, by turns with its base where it has one."""
    measured = Measured()
    for _ in range(max(benchmark.pairs, 1)):
        if base is not None:
            measured.base.append(figures_of(benchmark, base))
        measured.here.append(figures_of(benchmark, ROOT))
    return measured


def figures_of(benchmark: Benchmark, tree: Path) -> Figures:
    """The figures of one run in a work tree; none where it failed, which is told."""
    command = [sys.executable, "-m", f"benchmarks.{benchmark.name}", *(benchmark.run or ())]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{benchmark.name}: no end within {LONGEST_S:g} s", file=sys.stderr, flush=True)
        return {}
    for line in reversed(ended.stdout.splitlines()):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            figures: Figures = json.loads(line)["figures"]
            return figures
    told = (ended.stderr or ended.stdout).strip().splitlines()[-3:]
    print(
        f"{benchmark.name}: exit code {ended.returncode}, no figures: {' | '.join(told)}", file=sys.stderr, flush=True
    )
    return {}


@contextlib.contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """A commit of this repository, checked out beside it."""
    with tempfile.TemporaryDirectory(prefix="agentrl-figures-") as directory:
        tree = Path(directory) / "base"
        git = ("git", "-C", str(ROOT), "worktree")
        added = subprocess.run(
            [*git, "add", "--detach", str(tree), commit], capture_output=True, text=True, check=False
        )
        if added.returncode:
            raise SystemExit(
                f"figures: commit {commit[:12]}, with which figures are compared, is not in this repository's history "
                f"({added.stderr.strip()}). In a shallow clone: git fetch --unshallow"
            )
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=False)


def main() -> int:
    """Run, print the table and the line; 1 where something falls short."""
    commit, benchmarks = read_bounds()
    known = [benchmark.name for benchmark in benchmarks if benchmark.run is not None]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=known, help="this benchmark alone")
    parser.add_argument("--json", action="store_true", help="the last line alone")
    arguments = parser.parse_args()
    wanted = [each for each in benchmarks if each.name in ([arguments.only] if arguments.only else known)]
    lines: list[Line] = []
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(work_tree(commit)) if any(each.pairs for each in wanted) else None
        for benchmark in wanted:
            if not arguments.json:
                print(f"{benchmark.name} …", file=sys.stderr, flush=True)
            lines += judged(benchmark, measure(benchmark, base if benchmark.pairs else None))
    by_hand = [each.name for each in benchmarks if each.run is None]
    if not arguments.json:
        print_table(lines, [] if arguments.only else by_hand)
    report = Report("figures", quick=True, repeats=max(each.pairs for each in wanted) or 1, compared_with=commit[:12])
    report.figures = {line.bound.name: line.seen for line in lines}
    report.print()
    return int(any(line.verdict in ("short", "missing") for line in lines))


def print_table(lines: Sequence[Line], by_hand: Sequence[str]) -> None:
    """Figure, bound, seen, verdict; what falls short once more, with the reason of its bound."""
    print(f"{'figure':52}{'bound':24}{'seen':>12}  verdict    (load {os.getloadavg()[0]:.1f})")
    for line in lines:
        seen = "" if line.seen is None else f"{line.seen:.4g}"
        print(f"{line.bound.name:52}{line.bound!s:24}{seen:>12}  {line.verdict}")
    for line in lines:
        if line.verdict in ("short", "missing"):
            print(f"{line.verdict}: {line.bound.name} {line.bound}, because {line.bound.why}")
    if by_hand:
        print(f"run by hand, whole: {', '.join(by_hand)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
