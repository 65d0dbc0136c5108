"""The laws over random runs and programs, and what the control log costs.

    python -m benchmarks.laws [--quick] [--part log|calls|versions|cost] [--programs N]

* `log`. `log_differences` of `log_scenarios` random runs, whose state a resume rebuilds otherwise than it lived;
  `log_planted_found` of `log_planted`: parts of the state in which an alteration was found.
* `calls`. `call_differences` of `call_programs` random programs that come to another result when they are killed,
  resumed, forked, branched or replayed; `programs_per_s` in two processes. `call_planted_found` of `call_planted`:
  places of a recording in which an alteration was found.
* `versions`. `version_differences` of `version_scenarios` random runs of engines in which a reply was not sampled by
  the version that it names, or a version was served without need; `version_planted_found` of `version_planted` faults.
* `cost`. Of episodes of one agent in groups of eight and steps of 64: bytes of the control log and microseconds of CPU
  per episode, and seconds of CPU in which a resume rebuilds the loop from 1,000 and 20,000 of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from agentrl.core.records import (
    EpisodeDataLocation,
    PolicyVersion,
    StepReport,
    Task,
    TrainBatch,
    TrajectoryCredit,
    Unit,
    WeightsRef,
)
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.credit.release import WholeGroupRelease
from agentrl.journal.past_run import PastRun
from agentrl.journal.port import Admission, ControlRecord, EpisodeEnd, StepRow, VersionPublication
from agentrl.journal.store import SqliteJournal
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.dispatch import ChangeCondition, make_dispatcher
from benchmarks.parts import outcomes, run_functions
from environments.calculator.env import Calculator
from tests.support.builders import make_episode_header, make_spec

FIGURES = (
    *("log_scenarios", "log_differences", "log_planted", "log_planted_found"),
    *("call_programs", "call_differences", "programs_per_s", "call_planted", "call_planted_found"),
    *("version_scenarios", "version_differences", "version_planted", "version_planted_found"),
    *("bytes_per_episode", "us_per_episode", "resume_1000_s", "resume_20000_s"),
)
SCENARIOS, PROGRAMS = 200, 2000
GROUP, STEP = 8, 64


def _counts(file: str, name: str, number: int) -> tuple[float, float]:
    os.environ["AGENTRL_LAW_SEEDS"] = str(number)
    passed = [each for test, each in outcomes(file, "-n", "2").items() if test.startswith(f"{name}[")]
    return float(len(passed)), float(passed.count(False))


def log(quick: bool) -> dict[str, float | None]:
    file = "tests/laws/test_log.py"
    scenarios, differences = _counts(file, "test_a_resume_rebuilds_the_state_that_lived", 8 if quick else SCENARIOS)
    planted, lost = _counts(file, "test_a_difference_in_each_part_is_found", 1)
    return {
        "log_scenarios": scenarios,
        "log_differences": differences,
        "log_planted": planted,
        "log_planted_found": planted - lost,
    }


def calls(number_of_programs: int, quick: bool) -> dict[str, float | None]:
    file, began = "tests/laws/test_calls.py", time.perf_counter()
    programs, differences = _counts(
        file, "test_what_is_repeated_comes_to_the_same", 40 if quick else number_of_programs
    )
    seconds = time.perf_counter() - began
    planted, lost = _counts(file, "test_a_difference_planted_in_each_place_is_found", 1)
    return {
        "call_programs": programs,
        "call_differences": differences,
        "programs_per_s": programs / seconds,
        "call_planted": planted,
        "call_planted_found": planted - lost,
    }


def versions(quick: bool) -> dict[str, float | None]:
    file = "tests/laws/test_versions.py"
    name = "test_each_reply_is_sampled_by_the_weights_it_names"
    scenarios, differences = _counts(file, name, 8 if quick else SCENARIOS)
    planted, lost = _counts(file, "test_a_planted_fault_is_found", 1)
    return {
        "version_scenarios": scenarios,
        "version_differences": differences,
        "version_planted": planted,
        "version_planted_found": planted - lost,
    }


def _steps(episodes: int) -> list[list[tuple[ControlRecord, ...]]]:
    """Return the records of a run of so many episodes: the calls of `record` up to each step."""
    version = PolicyVersion("policy", 0, 0)
    weights = WeightsRef(version=version, path="/weights", kind="adapter", sha256="0" * 64)
    steps: list[list[tuple[ControlRecord, ...]]] = [[(VersionPublication(weights, None),)]]
    units: list[Unit] = []
    for first in range(0, episodes, GROUP):
        task = Task(id=f"task {first // GROUP % 500}", data={"question": "What is 23 * 7 + 4?", "answer": "165"})
        specs = [
            make_spec(f"e{first + member}", group_id=f"g{first}", group_size=GROUP, task=task)
            for member in range(GROUP)
        ]
        steps[-1].append(tuple(Admission(spec=spec) for spec in specs))
        for member, spec in enumerate(specs):
            header = make_episode_header(spec, reward=float(member % 2), version=version, turns=2, tokens=120)
            steps[-1].append((EpisodeEnd(spec, header, b"d" * 16, {"turns/total": 2.0}),))
            unit = Unit(
                episode_id=spec.episode_id,
                attempt=0,
                policy="policy",
                location=EpisodeDataLocation("turns-0.db", 1),
                credits=(TrajectoryCredit("agent", 0, 1.0, 0.5, 0.5),),
            )
            units.append(unit)
        if len(units) == STEP:
            before, version = version, version._replace(step=version.step + 1)
            batch = TrainBatch(step_id=version.step, policy="policy", units=tuple(units), normalizer=1.0)
            report = StepReport(
                step_id=version.step,
                policy="policy",
                started_from=before,
                loss=0.1,
                grad_norm=1.0,
                samples=STEP,
                tokens=120 * STEP,
                seconds=1.0,
                metrics={},
                input_digest="d" * 32,
            )
            published = VersionPublication(replace(weights, version=version, sha256=f"{version.step:064d}"), before)
            steps[-1].append((published, StepRow(report=report, version=version, batch=batch)))
            steps.append([])
            units = []
    return steps


async def _write(journal: SqliteJournal, steps: list[list[tuple[ControlRecord, ...]]]) -> None:
    for calls in steps:
        for records in calls:
            journal.record(*records)
        await journal.flush()


async def _measure(directory: Path, episodes: int) -> tuple[float, float, float]:
    """Return bytes and microseconds per episode, and seconds of a resume."""
    journal = SqliteJournal(directory / "journal", info={"config": {"policies": {"policy": {"kind": "trained"}}}})
    steps, version = _steps(episodes), PolicyVersion("policy", 0, episodes // STEP)
    began = time.process_time()
    await _write(journal, steps)
    spent = time.process_time() - began
    await journal.close()
    size = (directory / "journal/control.db").stat().st_size
    del steps
    journal = SqliteJournal(directory / "journal")
    started = time.process_time()
    past = PastRun(journal, {"policy": version}, group_size=GROUP)
    buffer = EpisodeBuffer(("policy",), WholeGroupRelease(("policy",), REWARD_ESTIMATORS["leave_one_out"]))
    dispatcher = make_dispatcher(
        environment=Calculator,
        policy_of=lambda seat, group: "policy",
        run_seed=0,
        group_size=GROUP,
        max_in_flight=STEP,
        buffer=buffer,
        store=journal,
        changed=ChangeCondition(),
        fail=lambda error: None,
    )
    dispatcher.resume(past, lambda group: Task(id="none", data={}))
    seconds = time.process_time() - started
    assert buffer.ledger.trained == episodes, buffer.ledger
    await journal.close()
    return size / episodes, spent / episodes * 1e6, seconds


def cost(quick: bool) -> dict[str, float | None]:
    with tempfile.TemporaryDirectory() as scratch:
        places = [Path(scratch, name) for name in ("small", "large")]
        for place in places:
            place.mkdir()
        _, _, small_s = asyncio.run(_measure(places[0], 1024))
        size, spent_us, large_s = asyncio.run(_measure(places[1], 2048 if quick else 20_480))
    return {
        "bytes_per_episode": size,
        "us_per_episode": spent_us,
        "resume_1000_s": small_s,
        "resume_20000_s": None if quick else large_s,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--programs", type=int, default=PROGRAMS)
    options, sys.argv[1:] = parser.parse_known_args()
    functions = {"log": log, "calls": partial(calls, options.programs), "versions": versions, "cost": cost}
    run_functions("laws", FIGURES, functions, description=__doc__)
