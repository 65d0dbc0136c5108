"""A benchmark in parts: modules `benchmarks.NAME_PART`, each with `figures(quick) -> {name: number or None}`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import benchmarks
from benchmarks.report import Report

ROOT = Path(__file__).resolve().parents[1]
Figures = Callable[[bool], Mapping[str, float | None]]
"""Measures figures, by name; its argument is whether the run is quick."""


def parts(benchmark: str, apart: Collection[str] = ()) -> list[str]:
    """Names of the parts there are, but for those that are `apart`."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    names = {name.removeprefix(f"{benchmark}_") for name in found if name.startswith(f"{benchmark}_")}
    return sorted(names.difference(apart))


def run_parts(
    benchmark: str,
    names: Sequence[str],
    *,
    description: str | None,
    apart: Collection[str] = (),
    on_request: Collection[str] = (),
) -> None:
    """Run the parts that the command line asks for and print the line; what none measures is null.

    Args:
        benchmark: its name.
        names: its figures.
        description: of the command line.
        apart: modules named like parts of it that are benchmarks of their own.
        on_request: parts that run only if `--part` names them.
    """

    def measure(part: str, quick: bool) -> Mapping[str, float | None]:
        measured: Mapping[str, float | None] = importlib.import_module(f"benchmarks.{benchmark}_{part}").figures(quick)
        return measured

    functions = {part: partial(measure, part) for part in parts(benchmark, apart)}
    run_functions(benchmark, names, functions, description=description, on_request=on_request)


def run_functions(
    benchmark: str,
    names: Sequence[str],
    functions: Mapping[str, Figures],
    *,
    description: str | None,
    on_request: Collection[str] = (),
) -> None:
    """Run the parts that the command line asks for and print the line; what none measures is null.

    Args:
        benchmark: its name.
        names: its figures.
        functions: what measures each part.
        description: of the command line.
        on_request: parts that run only if `--part` names them.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of everything, in under a minute")
    parser.add_argument("--part", choices=functions, help="this part only")
    arguments = parser.parse_args()
    report = Report(benchmark, quick=arguments.quick, repeats=1, compared_with="")
    report.figures = dict.fromkeys(names)
    for part in [arguments.part] if arguments.part else [name for name in functions if name not in on_request]:
        print(f"{part} …", flush=True)
        measured = functions[part](arguments.quick)
        unknown = measured.keys() - report.figures.keys()
        if unknown:
            raise SystemExit(f"{part} measures {', '.join(sorted(unknown))}, which is no figure of this benchmark")
        report.figures |= measured
    report.print()


def run(
    benchmark: str,
    names: Sequence[str],
    figures: Figures,
    *,
    description: str | None,
) -> None:
    """Run a benchmark of one module, and print the line.

    Args:
        benchmark: its name.
        names: its figures.
        figures: measures them.
        description: of the command line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of everything")
    quick = parser.parse_args().quick
    report = Report(benchmark, quick=quick, repeats=1, compared_with="")
    report.figures = dict.fromkeys(names) | dict(figures(quick))
    report.print()


def outcomes(*arguments: str) -> Mapping[str, bool]:
    """Run tests in a process of their own.

    Args:
        arguments: of pytest: files, `-k` and what else chooses them.

    Returns:
        Whether each test passed, by its name behind the file; what was skipped is absent.

    Raises:
        SystemExit: no test ran.
    """
    command = [sys.executable, "-m", "pytest", "-rA", "-q", *arguments]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    lines = re.findall(r"^(PASSED|FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", printed, re.MULTILINE)
    if not lines:
        raise SystemExit(f"{' '.join(command)}: no test ran\n{printed}")
    found: dict[str, bool] = {}
    for outcome, name in lines:
        found[name] = outcome == "PASSED" and found.get(name, True)
        if outcome != "PASSED":
            print(f"  {outcome}: {name}", flush=True)
    return found
