"""What independent checks find in runs that were killed, attacked and resumed with another configuration.

    python -m benchmarks.oracle [--quick] [--part PART] [--kinds KIND ...] [--directory DIR] [--seed 0]

* `kills`: small real runs (tiny models, real processes) are killed with SIGKILL in each of their processes while they
  take steps, and go on to their end: one policy in one process and an engine, two worker processes, two policies with
  child episodes, all of it under Ray, where a trainer's rank and the raylet die too, dynamic sampling with selected
  tasks and a reference, branches with scores and sandboxes, and an external agent. The last two are also stopped with
  SIGTERM. `--kinds` runs some of them. After every kill the second
  reader of journals (`tests/journal_oracle.py`, which imports nothing of agentrl) judges the run directory, as does
  `tests/support/chaos_oracle.py`, which holds it against what had been acknowledged. A quick run kills a scripted run.
* `fields`: every setting is changed between two starts of a run (`tests/support/resume_fields.py`).
* `hostile`: environments that attack their process (`tests/support/hostile_environments.py`).
* `pairs`: programs that differ in one field of one call, recorded by one and executed by the other, from every prefix
  (`tests/replay/program_pairs.py`).
* `seeds`: programs whose order depends on string hashes, killed and resumed under other seeds (`oracle_seeds.py`).
* `failures`: runs whose sandboxes fail (`oracle_failures.py`).
* `evaluations`: runs that are stopped inside their evaluations, evaluations that fail, and pinned versions that are
  lost (`oracle_evaluations.py`).
* `inputs`: files, models, data and strangers that attack a run from outside (`oracle_inputs.py`).
* `received`: run directories from other people, with every recorded field set to hostile values
  (`tests/received_runs.py`).
* `starts`: runs of every family of models that set no size (`oracle_starts.py`).
* `families`: hybrid models, and checkpoints for images and text, against transformers (`families.py`).

Figures: `violations` of the second reader, and of them the `unknown_versions`; `lost`, `twice`, `ledger_errors`,
`resampled` (journal entries that a later life recorded anew) and `version_gone` (episodes dropped for a version whose
files exist) as of `benchmarks.chaos`; `bricked`, runs that could not go on; `kills` and by role, such as `kills_stop`
(SIGTERM and `--resume`); `runs` that got to their end; and those of the other parts. `replay_pairs_undetected` counts
the `replay_pairs` in which a prefix with the difference was executed without a mismatch; the negative control are
`replay_pairs_by_design`, in fields that no replay compares.
`received_run_fields` counts pairs of a field and a command; `received_planted_found`, the kinds of harm that are found
while the gate is off.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from benchmarks import oracle_evaluations, oracle_outside
from benchmarks.chaos import SCRIPTED, Chaos, Kind, Tally
from benchmarks.report import Report
from tests import received_runs
from tests.replay.program_pairs import BY_DESIGN, PAIRS

KINDS = {
    Kind("one", 24, {"orchestrator": 5, "engine": 4}, 1.5, 10.0, one_victim=True, after_progress=True): 12,
    Kind(
        "workers", 24, {"orchestrator": 5, "engine": 2, "worker": 4}, 1.5, 10.0, one_victim=True, after_progress=True
    ): 20,
    Kind("two", 16, {"orchestrator": 5, "engine": 2, "worker": 3}, 1.5, 10.0, one_victim=True, after_progress=True): 16,
    Kind(
        "ray",
        24,
        {"orchestrator": 3, "engine": 2, "worker": 3, "rank": 4, "raylet": 3},
        2.0,
        25.0,
        one_victim=True,
        after_progress=True,
    ): 16,
    Kind(
        "selected", 24, {"orchestrator": 5, "engine": 2, "worker": 3}, 1.5, 10.0, one_victim=True, after_progress=True
    ): 12,
    Kind(
        *("trees", 24, {"orchestrator": 2, "stop": 4, "engine": 1, "worker": 3}, 4.0, 10.0),
        one_victim=True,
        after_progress=True,
    ): 40,
    oracle_outside.KIND: 20,
}
"""Runs that are killed, and how often."""
QUICK_KILLS = 4
ROLES = ("orchestrator", "stop", "engine", "worker", "rank", "raylet", "harness")


def kills(quick: bool, root: Path, seed: int, only: Collection[str] = ()) -> dict[str, float | None]:
    """Kill runs, and judge them; `only`: of these kinds, or of all."""
    tally = Tally()
    kinds = {kind: count for kind, count in KINDS.items() if not only or kind.name in only}
    for kind, count in {SCRIPTED: QUICK_KILLS}.items() if quick else kinds.items():
        began, before = time.monotonic(), tally.kills.total()
        Chaos(kind, root, seed, tally).run(count)
        print(f"{kind.name}: {tally.kills.total() - before} kills in {time.monotonic() - began:.0f} s", flush=True)
    faults = tally.verdict
    for fault in sorted([*tally.violations, *faults.faults(), *tally.unexplained]):
        print(fault, flush=True)
    return {
        "violations": float(len(tally.violations)),
        "unknown_versions": float(sum(": unknown version: " in violation for violation in tally.violations)),
        "lost": float(len(faults.lost)),
        "twice": float(len(faults.twice)),
        "ledger_errors": float(len(faults.ledger_errors)),
        "resampled": float(len(faults.resampled)),
        "version_gone": float(len(faults.version_gone)),
        "bricked": float(len(tally.unexplained)),
        "kills": float(tally.kills.total()),
        "runs": float(tally.runs),
        **{f"kills_{role}": float(tally.kills[role]) for role in ROLES},
    }


def pairs(quick: bool, root: Path, seed: int) -> dict[str, float | None]:
    """Execute each program over the recording of another."""
    undetected = [fault for pair in PAIRS for fault in pair.undetected()[:1]]
    for fault in undetected:
        print(fault, flush=True)
    return {
        "replay_pairs": float(len(PAIRS)),
        "replay_pairs_undetected": float(len(undetected)),
        "replay_pairs_by_design": float(sum(bool(pair.undetected()) for pair in BY_DESIGN)),
    }


def received(quick: bool, root: Path, seed: int, shards: int = 1) -> dict[str, float | None]:
    """Try every command on changed run directories (of so many shards one), and planted changes without the gate."""
    pairs: set[tuple[str, str]] = set()
    counts: Counter[str] = Counter()
    memory = Path("/dev/shm")  # commands sync what they write
    with tempfile.TemporaryDirectory(prefix="received-", dir=memory if memory.is_dir() else root) as scratch:
        for record in (received_runs.record_scripted_run, received_runs.record_model_run):
            place = Path(scratch, record.__name__)
            with received_runs.watched(record, place) as (run, watch):
                chosen = list(received_runs.chosen_cases(run, watch, shards=200 if quick else shards))
                for number, case in enumerate(chosen):
                    if number % 100 == 0:
                        print(f"  {number:,} of {len(chosen):,} changes, harm {counts.total()}", flush=True)
                    verdict = received_runs.attack(run, case, watch, place / "copy")
                    pairs |= {(case.field, command) for command in verdict.commands}
                    counts.update(verdict.harm)
                    counts["received_run_faults"] += len(verdict.faults)
                    for fault in verdict.faults:
                        print(fault, flush=True)
                if run.has_model:
                    found = received_runs.planted(run, watch, place / "copy", gate=False)
                    counts["received_planted_found"] = sum(found.values())
    names = (*received_runs.HARMS, "received_run_faults", "received_planted_found")
    return {"received_run_fields": float(len(pairs)), **{name: float(counts[name]) for name in names}}


def _measured_by(module: str, function: str = "figures") -> Callable[[bool, Path, int], dict[str, float | None]]:
    def measure(quick: bool, root: Path, seed: int) -> dict[str, float | None]:
        figures: dict[str, float | None] = getattr(importlib.import_module(module), function)(quick)
        return figures

    return measure


PARTS = {
    "kills": kills,
    "fields": _measured_by("tests.support.resume_fields"),
    "hostile": _measured_by("tests.support.hostile_environments", "measure"),
    "pairs": pairs,
    "seeds": _measured_by("benchmarks.oracle_seeds", "measure"),
    "failures": _measured_by("benchmarks.oracle_failures", "measure"),
    "evaluations": oracle_evaluations.measure,
    "inputs": _measured_by("benchmarks.oracle_inputs", "measure"),
    "received": received,
    "starts": _measured_by("benchmarks.oracle_starts"),
    "families": _measured_by("benchmarks.families", "measure_hybrid_and_wrapped"),
}
FIGURES = (
    *("violations", "unknown_versions", "bricked", "lost", "twice", "ledger_errors", "resampled", "version_gone"),
    *("kills", *(f"kills_{role}" for role in ROLES), "runs"),
    *("config_fields_unclassified", "resumes_judged"),
    *("hostile_environments", "hostile_inputs", "runs_ended", "named"),
    *("replay_pairs", "replay_pairs_undetected", "replay_pairs_by_design"),
    *("rewards_on_the_wrong_agent", "wrong_without_comparison", "hash_seed_kills", "hash_seed_resumed"),
    *("hash_seed_dropped", "sorted_dropped", "hash_seed_violations"),
    *("zeros_from_failures", "zeros_without_the_rule", "infrastructure_failures", "failures_committed"),
    *("failures_dropped", "failures_unnamed"),
    *("stops", "stops_without_checkpoint", "stop_violations", "runs_ended_by_evaluations"),
    *("runs_ended_by_pins", "episodes_of_lost_versions"),
    *("default_starts", "default_starts_refused", "starts_failed", "predictions_failed", "prediction_errors_that_stop"),
    *("received_run_fields", "code_run", "bytes_sent", "files_opened_outside", "connections", "received_run_faults"),
    *("received_planted_found", "start_s"),
    *("family_shapes", "family_max_dlogp", "family_max_gradient_error", "engine_max_dlogp", "published_whole"),
)
SUMMED = ("violations", "bricked", "runs_ended")
"""Figures of several parts."""
NONE_OF = (
    *("violations", "unknown_versions", "bricked", "lost", "twice", "ledger_errors", "resampled", "version_gone"),
    *("replay_pairs_undetected", "rewards_on_the_wrong_agent", "sorted_dropped", "hash_seed_violations"),
    *("zeros_from_failures", "failures_unnamed"),
    *("stops_without_checkpoint", "stop_violations", "runs_ended_by_evaluations", "runs_ended_by_pins"),
    *("starts_failed", "prediction_errors_that_stop"),
    *("code_run", "bytes_sent", "files_opened_outside", "connections", "received_run_faults"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few kills of a scripted run, and samples of the rest")
    parser.add_argument("--part", choices=PARTS, help="this part only")
    parser.add_argument("--kinds", nargs="*", choices=[kind.name for kind in KINDS], default=(), help="of `kills`")
    parser.add_argument(
        "--shards", type=int, default=1, help="of `received`, which takes 100 CPU minutes: one of these"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=None, help="where the killed runs are left, to be looked at")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # take the runs along
    report = Report("oracle", quick=options.quick, repeats=1, compared_with="a second reader of the journal")
    report.figures = dict.fromkeys(FIGURES)
    with tempfile.TemporaryDirectory(prefix="oracle-") as scratch:
        root = options.directory or Path(scratch)
        root.mkdir(exist_ok=True)
        for part in [options.part] if options.part else PARTS:
            print(f"{part} …", flush=True)
            measure = {
                "kills": partial(kills, only=options.kinds),
                "received": partial(received, shards=options.shards),
            }.get(part, PARTS[part])
            measured = measure(options.quick, root, options.seed)
            for name, value in measured.items():
                before = report.figures.get(name) if name in SUMMED else None
                report.figures[name] = value if before is None or value is None else before + value
    report.print()
    return 1 if any(report.figures[name] for name in NONE_OF) else 0


if __name__ == "__main__":
    sys.exit(main())
