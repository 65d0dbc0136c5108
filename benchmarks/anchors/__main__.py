"""`python -m benchmarks.anchors`; see the package."""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import benchmarks.anchors
from benchmarks.anchors.cases import ANCHORS, ROOT, Arm
from benchmarks.anchors.recording import read_records, record
from benchmarks.report import Report

FIGURES = ("anchors_runs", "anchors_improved")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.anchors",
        description=benchmarks.anchors.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--anchor", choices=ANCHORS, action="append", help="this one; without it, all")
    parser.add_argument("--arm", help="only this arm of the anchor")
    parser.add_argument("--seed", type=int, help="only this seed; without it, all seeds of an arm")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="three steps of the first arm of an anchor, kept nowhere; without --anchor, of arithmetic",
    )
    parser.add_argument("--directory", type=Path, default=ROOT / "runs" / "anchors", help="runs and their results")
    parser.add_argument("--report", action="store_true", help="run nothing: report what has been measured")
    parser.add_argument("--output", type=Path, help="also write the records here; docs/anchors.json makes the page")
    return parser.parse_args()


def main() -> None:
    """Run what the results lack, seed by seed, and report them all."""
    chosen = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that it stops the run, too
    anchors = chosen.anchor or [name for name, anchor in ANCHORS.items() if anchor.quick or not chosen.quick]
    known = sorted({arm for name in anchors for arm in ANCHORS[name].arms})
    if chosen.arm and chosen.arm not in known:
        raise SystemExit(f"--arm: no arm {chosen.arm!r}; there are: {', '.join(known)}")
    if chosen.quick:
        with tempfile.TemporaryDirectory() as directory:
            measure(Path(directory), anchors, chosen.arm, 0, quick=True)
            records = read_records(Path(directory) / "results.jsonl")
    else:
        results = chosen.directory.resolve() / "results.jsonl"
        if not chosen.report:
            measure(chosen.directory.resolve(), anchors, chosen.arm, chosen.seed, quick=False)
        records = read_records(results)
        if chosen.output:
            write(records, chosen.output)
    records = [row for row in records if row["anchor"] in anchors]
    figures = {"anchors_runs": len(records), "anchors_improved": sum(map(improved, records))}
    Report(
        "anchors",
        quick=chosen.quick,
        repeats=len({row["seed"] for row in records}),
        compared_with="each run's own start, and what was published",
        figures={name: float(value) for name, value in figures.items()},
    ).print()


def measure(directory: Path, anchors: Sequence[str], arm: str | None, seed: int | None, *, quick: bool) -> None:
    """Append to the results the runs that they lack, the first seed of all arms before the second."""
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.jsonl"
    for run in range(max(arm.seeds for anchor in anchors for arm in ANCHORS[anchor].arms.values())):
        if (quick and run) or seed not in (None, run):
            continue
        for anchor in anchors:
            arms = ANCHORS[anchor].arms
            chosen = [arm] if arm else list(arms)[: 1 if quick else None]
            for name, each in arms.items():
                if run < each.seeds and name in chosen:
                    complete(results, anchor, name, each, run, quick=quick)


def complete(results: Path, anchor: str, name: str, arm: Arm, seed: int, *, quick: bool) -> None:
    """Run an arm with a seed unless the results have it."""
    if any((row["anchor"], row["arm"], row["seed"]) == (anchor, name, seed) for row in read_records(results)):
        return
    weights = None
    if arm.start_from:
        complete(results, anchor, arm.start_from, ANCHORS[anchor].arms[arm.start_from], seed, quick=quick)
        weights = results.parent / f"{anchor}-{arm.start_from}-{seed}" / "policies" / arm.start_policy
    print(f"{anchor}, {name}, seed {seed}", flush=True)
    row = record(arm, results.parent, f"{anchor}-{name}-{seed}", seed, weights, quick=quick)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"anchor": anchor, "arm": name, "seed": seed, **row}) + "\n")
    shown = " ".join(f"{step:.0f}: {reward:.3f}" for step, reward, *_ in row["curve"])
    print(f"{anchor}, {name}, seed {seed}: {row['error'] or shown}", flush=True)


def improved(row: Mapping[str, Any]) -> bool:
    """Whether the last held-out interval lies above the first."""
    if len(row["curve"]) < 2:
        return False
    (_, first, first_half, _), (_, last, last_half, _) = row["curve"][0], row["curve"][-1]
    return bool(last - last_half > first + first_half)


def write(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the records in the order of the anchors, so that a run more changes few lines."""
    places = {(anchor, arm): place for place, (anchor, arm) in enumerate(_arms())}
    ordered = sorted(
        (row for row in records if (row["anchor"], row["arm"]) in places),
        key=lambda row: (places[row["anchor"], row["arm"]], row["seed"]),
    )
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in ordered)
    path.write_text(f'{{"benchmark": "anchors", "records": [\n{lines}\n]}}\n', encoding="utf-8")


def _arms() -> list[tuple[str, str]]:
    return [(anchor, arm) for anchor, each in ANCHORS.items() for arm in each.arms]


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command resumes the run") from None
