"""Deterministic runs, killed for real, end with the undisturbed runs' weights: in one process, with worker
processes, and with workers in Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.core.clock import SystemClock
from agentrl.inspection.reader import RunReader
from agentrl.journal.run_process import check_partitions_unlocked, retry_until_writer_exits
from tests.journal_oracle import judge
from tests.processes import descendants, running
from tests.support.killed_runs import calculator_job, digests, two_policies_job

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
WORKER = b"agentrl.app.worker_server"
STEPS = 2
"""Of the runs of two policies."""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The weights of two policies after `STEPS` steps in one process that nobody kills."""
    job = two_policies_job(tmp_path_factory.mktemp("undisturbed"))
    return digests(job.train("undisturbed", steps=STEPS, kills=0))


def workers_of(run: int) -> Iterator[int]:
    """The processes that play a run's episodes."""
    for process in descendants(run):
        if WORKER in command_of(process):
            yield process


def command_of(process: int) -> bytes:
    """Empty where it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def entries(run: Path) -> int:
    """In all partitions of a run."""
    total = 0
    for partition in run.glob("journal/turns-*.db"):
        with (
            contextlib.closing(sqlite3.connect(f"file:{partition}?mode=ro", uri=True)) as connection,
            contextlib.suppress(sqlite3.Error),
        ):
            total += connection.execute("SELECT count(*) FROM entries").fetchone()[0]
    return total


def wait_until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    """While the process runs."""
    while process.poll() is None and not condition():
        time.sleep(0.02)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.exhaustive
def test_workers_in_actors_outlive_a_run_that_is_killed_and_are_waited_for(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """Ray needs some seconds to see that whoever asked for the actors is dead; so long they play on, and write."""
    one = two_policies_job(tmp_path)
    run = tmp_path / "killed"
    with replace(one, settings=("--workers=2", "--cluster.address=local"))._life(
        "killed", steps=STEPS, resume=False
    ) as process:
        wait_until(process, lambda: entries(run) > 30)
        assert process.poll() is None, one._log("killed")
        workers = [process.number for process in running() if WORKER in command_of(process.number)]
    asyncio.run(retry_until_writer_exits(lambda: check_partitions_unlocked(run / "journal"), print, SystemClock()))
    written = entries(run)
    while any(WORKER in command_of(worker) for worker in workers):
        time.sleep(0.02)
    assert entries(run) == written
    assert digests(one.train("killed", steps=STEPS, kills=0)) == undisturbed
    reader = RunReader(run)
    assert reader.ledger().holds
    reader.close()


@pytest.mark.exhaustive
def test_weights_are_those_of_one_process_after_kills_of_workers_and_of_the_run(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """The run goes on by itself after the first kill, and with another number of workers after the second."""
    two = replace(two_policies_job(tmp_path), settings=("--workers=2",))
    run = tmp_path / "killed"
    with two._life("killed", steps=STEPS, resume=False) as process:
        wait_until(process, lambda: len(list(workers_of(process.pid))) == 2 and entries(run) > 30)
        victim, other = workers_of(process.pid)
        os.kill(victim, signal.SIGKILL)
        wait_until(process, lambda: entries(run) > 150)
        workers = set(workers_of(process.pid))
        assert process.poll() is None, two._log("killed")
        assert other in workers
        assert victim not in workers
    # their parent is dead, and they with it
    while any(WORKER in command_of(worker) for worker in workers):
        time.sleep(0.02)
    three = replace(two, settings=("--workers=3",))
    assert digests(three.train("killed", steps=STEPS, kills=0)) == undisturbed
    assert "worker 0 died (SIGKILL)" in two._log("killed") or "worker 1 died (SIGKILL)" in two._log("killed")
    reader = RunReader(run)
    assert reader.ledger().holds
    lines = reader.episodes(limit=20)
    assert len(lines) == 20
    assert not [problem for line in lines for problem in reader.episode(line.episode).problems]
    reader.close()


@pytest.mark.exhaustive
def test_weights_of_two_policies_after_real_kills_are_bit_identical(
    tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = replace(two_policies_job(tmp_path), most_entries=(1, 60))  # few: two steps write not many more
    killed = digests(job.train("killed", steps=STEPS, kills=2))
    assert set(undisturbed) == {"proposer", "solver"}
    assert killed == undisturbed


@pytest.mark.exhaustive
def test_weights_after_real_kills_are_bit_identical(tmp_path: Path) -> None:
    """The main job's, with an adapter."""
    job = calculator_job(tmp_path)
    undisturbed = digests(job.train("undisturbed", steps=2, kills=0))
    killed = digests(job.train("killed", steps=2, kills=2))
    assert set(undisturbed) == {"solver"}
    assert killed == undisturbed


@pytest.mark.exhaustive
def test_a_kill_between_serving_full_weights_and_their_durable_write_changes_nothing(tmp_path: Path) -> None:
    """The kill falls while the version after the checkpoint's samples. What a power cut may leave of full weights that
    no checkpoint needs is torn: so are all of them here."""
    settings = ("--policies.solver.max_staleness=0", "--checkpoint.every=2", "--evaluation.tasks=0")
    job = calculator_job(tmp_path)
    kept = [each for each in job.settings if not each.startswith(("--policies.solver.lora", "--engine.refresh"))]
    job = replace(job, settings=(*kept, *settings))
    undisturbed = digests(job.train("undisturbed", steps=4, kills=0))
    run = tmp_path / "killed"
    with job._life("killed", steps=4, resume=False) as process:
        wait_until(process, (run / "versions/solver/0.3").is_dir)
        published = entries(run)
        wait_until(process, lambda: entries(run) > published)  # sampled with it: nothing is stale
        assert process.poll() is None, job._log("killed")
    files = list(run.glob("versions/solver/*/model.safetensors"))
    assert len(files) == 4
    for file in files:
        os.truncate(file, file.stat().st_size // 2)
    assert digests(job.train("killed", steps=4, kills=0)) == undisturbed
    assert len([problem for problem in judge(run) if "have another digest" in problem]) == 4
    for file in files:
        shutil.rmtree(file.parent)
    reader = RunReader(run)
    assert reader.log.starts()[-1].checkpoint == "step_000002-0"
    assert reader.ledger().holds
    reader.close()
