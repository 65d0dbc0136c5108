"""A benchmark in parts: modules `benchmarks.NAME_PART`, each with `figures(quick) -> {name: number or None}`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Sequence

import benchmarks
from benchmarks.report import Report


def parts(benchmark: str) -> list[str]:
    """Names of the parts there are."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name.removeprefix(f"{benchmark}_") for name in found if name.startswith(f"{benchmark}_"))


def run_parts(benchmark: str, names: Sequence[str], *, description: str | None) -> None:
    """Run the parts that the command line asks for and print the line; what none measures is null."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of everything, in under a minute")
    parser.add_argument("--part", choices=parts(benchmark), help="this part only")
    arguments = parser.parse_args()
    report = Report(benchmark, quick=arguments.quick, repeats=1, compared_with="")
    report.figures = dict.fromkeys(names)
    for part in [arguments.part] if arguments.part else parts(benchmark):
        print(f"{part} …", flush=True)
        measured = importlib.import_module(f"benchmarks.{benchmark}_{part}").figures(arguments.quick)
        unknown = measured.keys() - report.figures.keys()
        if unknown:
            raise SystemExit(f"{part} measures {', '.join(sorted(unknown))}, which is no figure of this benchmark")
        report.figures |= measured
    report.print()
