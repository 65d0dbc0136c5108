"""No promised figure is lost: `benchmarks/bounds.toml` names what the benchmarks measure, and all of them."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import pytest

from benchmarks.figures import Benchmark, Bound, Measured, judged, read_bounds

NOT_MEASURING = {"figures", "naive_loop", "client_programs", "oracle_lives"}
"""They have a command line, and print no figures of their own: this comparison, and processes of other benchmarks."""


def source_of(repository: Path, benchmark: str) -> str:
    """The benchmark and its parts."""
    folder = repository / "benchmarks"
    return "".join(path.read_text() for path in (folder / f"{benchmark}.py", *folder.glob(f"{benchmark}_*.py")))


def listed(repository: Path, benchmark: str) -> set[str]:
    """Names of the tuples FIGURES or NAMES of a benchmark."""
    found: set[str] = set()
    for node in ast.parse((repository / "benchmarks" / f"{benchmark}.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in ("FIGURES", "NAMES"):
            patterns = {
                id(part) for text in ast.walk(node.value) if isinstance(text, ast.JoinedStr) for part in text.values
            }
            texts = (
                each for each in ast.walk(node.value) if isinstance(each, ast.Constant) and id(each) not in patterns
            )
            found |= {each.value for each in texts if isinstance(each.value, str)}
    return found


def test_every_benchmark_has_its_promises_or_says_that_it_makes_none(repository: Path) -> None:
    runnable = {
        path.stem
        for path in (repository / "benchmarks").glob("*.py")
        if re.search(r"^if __name__ == ", path.read_text(), re.MULTILINE) and path.stem not in NOT_MEASURING
    }
    named = {benchmark.name for benchmark in read_bounds()[1]}
    parts = {name for name in runnable if any(name.startswith(f"{other}_") for other in named) and name not in named}
    assert runnable - parts == named, "a benchmark has a table in benchmarks/bounds.toml: figures, or `shown` alone"


@pytest.mark.parametrize("benchmark", read_bounds()[1], ids=lambda benchmark: benchmark.name)
def test_every_figure_is_measured_bounded_and_explained(benchmark: Benchmark, repository: Path) -> None:
    source = source_of(repository, benchmark.name)
    names = [bound.figure for bound in benchmark.bounds]
    for name in (*names, *benchmark.shown):
        assert re.search(rf"\b{name}\b", source), f"{benchmark.name} measures no {name}"
    missing = listed(repository, benchmark.name) - {*names, *benchmark.shown}
    assert not missing, f"{benchmark.name}: without a bound, and not in `shown`: {missing}"
    assert not set(names) & set(benchmark.shown)
    for bound in benchmark.bounds:
        assert bound.why
        assert any(each is not None for each in (bound.least, bound.most)), bound.name
        assert not (bound.is_ratio and not benchmark.pairs), f"{bound.name} has nothing to be compared with"
        if bound.test:
            path, _, name = bound.test.partition("::")
            assert f"def {name}(" in (repository / path).read_text(), bound.test
    assert benchmark.bounds or benchmark.shown


def test_what_falls_short_or_is_missing_is_told() -> None:
    least = Bound(benchmark="b", figure="kept", why="w", least=1.0, most=2.0)
    ratio = Bound(benchmark="b", figure="fast", why="w", least=0.0, ratio_least=1.0)
    rare = Bound(benchmark="b", figure="rare", why="w", least=0.0, whole=True)
    benchmark = Benchmark(name="b", run=(), pairs=3, bounds=(least, ratio, rare))

    def verdicts(kept: float | None, *fast: float) -> list[str]:
        here = [{"kept": kept, "fast": value, "rare": -1.0} for value in fast]
        return [line.verdict for line in judged(benchmark, Measured(here, [{"fast": 10.0}] * len(fast)))]

    assert verdicts(1.5, 9.0, 11.0, 12.0) == ["ok", "ok", "whole run only"]
    assert verdicts(2.5, 9.0, 9.9, 12.0) == ["short", "short", "whole run only"]
    assert verdicts(math.nan, 10.0)[0] == "short"
    assert verdicts(None, 10.0) == ["missing", "ok", "whole run only"]
    assert [line.verdict for line in judged(benchmark, Measured())] == ["missing", "missing", "whole run only"]
