"""A benchmark in parts: modules `benchmarks.NAME_PART`, each with `figures(quick) -> {name: number or None}`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Collection, Sequence

import benchmarks
from benchmarks.report import Report


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
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of everything, in under a minute")
    known = parts(benchmark, apart)
    parser.add_argument("--part", choices=known, help="this part only")
    arguments = parser.parse_args()
    report = Report(benchmark, quick=arguments.quick, repeats=1, compared_with="")
    report.figures = dict.fromkeys(names)
    for part in [arguments.part] if arguments.part else [name for name in known if name not in on_request]:
        print(f"{part} …", flush=True)
        measured = importlib.import_module(f"benchmarks.{benchmark}_{part}").figures(arguments.quick)
        unknown = measured.keys() - report.figures.keys()
        if unknown:
            raise SystemExit(f"{part} measures {', '.join(sorted(unknown))}, which is no figure of this benchmark")
        report.figures |= measured
    report.print()
