"""Durability: what a run promises about crashes, damage, kills and their cost, measured part by part.

    python -m benchmarks.durability [--quick] [--part NAME]

Each part is a module `benchmarks.durability_NAME` with one function, `figures(quick) -> {name: number or null}`. What
no part measures is null. `--part` runs one of them.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil

import benchmarks
from benchmarks.report import Report

FIGURES = (
    "crash_points",
    "violations",
    "mutants_caught",
    "bit_identical_after_kills",
    "flips_unnoticed",
    "flips_readable_share",
    "tokens_resampled",
    "resume_10k_cpu_s",
    "journal_cost_main",
    "journal_cost_zero_latency",
    "soak_bytes_per_episode",
    "sim_seeds",
    "sim_violations",
)
PREFIX = "durability_"


def parts() -> list[str]:
    """Names of the parts there are."""
    found = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name.removeprefix(PREFIX) for name in found if name.startswith(PREFIX))


def main() -> None:
    """Run the parts and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a sample of everything, in under a minute")
    parser.add_argument("--part", choices=parts(), help="this part only")
    arguments = parser.parse_args()
    report = Report("durability", quick=arguments.quick, repeats=1, compared_with="")
    report.figures = dict.fromkeys(FIGURES)
    for part in [arguments.part] if arguments.part else parts():
        print(f"{part} …", flush=True)
        measured = importlib.import_module(f"benchmarks.{PREFIX}{part}").figures(arguments.quick)
        unknown = measured.keys() - report.figures.keys()
        if unknown:
            raise SystemExit(f"{part} measures {', '.join(sorted(unknown))}, which is no figure of this benchmark")
        report.figures |= measured
    report.print()


if __name__ == "__main__":
    main()
